//! Fetching from other receivers of the same snapshot.
//!
//! A [`Swarm`] accompanies the lanes of one transfer. Lanes to the source fetch what its tracker has granted; each relay
//! that the tracker names gets a lane of its own. What to do next is decided in [`Receiver`]. A relay that fails in any
//! way is set aside, and what it was to bring waits again: relays cannot fail a transfer.
//!
//! A tracker may be hostile, and so may be whoever has changed its answer. So nothing is asked for at an address that it
//! names but the path of a relay, and no address only this machine or this link has, unless the source itself was
//! reached by one.

use std::net::IpAddr;
use std::num::NonZero;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

use tensorferry_wire::digest::{Algorithm, BlockDigests, WideTable};
use tensorferry_wire::swarm::{Answer, Ask, Nearness, is_relay_path};

use super::answers::read_long_digests;
use super::connection::Connection;
use super::limits::Limits;
use super::relaying::OpenRelay;
use super::{Remote, Source};
use crate::cancel::Cancel;
use crate::error::{Error, ErrorKind};
use crate::payload::Plan;
use crate::swarm::{BlockMap, BlockSet, Receiver};
use crate::sync::Locked;
use crate::trust::{random, secret};

/// Relays that are fetched from at once: as many lanes more than to the source.
const MOST_RELAYS: usize = 12;
/// The same of each of many receives that run side by side.
const LEAST_RELAYS: usize = 3;
/// A source is too fast for others to be of help when it brings more bytes than this a second for each core: receiving,
/// hashing and passing on twice as many would take a core.
const FAST_FOR_CORE: u64 = 128 << 20;
/// The longest answer of a tracker.
const MAX_ANSWER: u64 = 64 << 10;
/// How long a relay, or a tracker, may be silent.
const RELAY_STALL: Duration = Duration::from_secs(5);
/// The pause between two questions to a relay that has nothing.
const MAP_PAUSE: Duration = Duration::from_millis(10);

/// The swarm as one transfer sees it.
pub(super) struct Swarm<'a> {
    relay: &'a OpenRelay<'a>,
    remote: &'a Remote,
    source: &'a Source,
    etag: &'a str,
    blocks: u64,
    /// Whether others cannot reach the relay.
    is_hidden: AtomicBool,
    /// The most blocks that are fetched from a relay at a time.
    pub(super) unit: u64,
    /// The most relays that are fetched from at once.
    most_relays: usize,
    began: Instant,
    receiver: Mutex<Receiver>,
    tracker: Mutex<Option<Connection>>,
    /// The digests of all blocks, once they are here.
    table: OnceLock<Arc<WideTable>>,
    /// The algorithm for the checksums of what relays bring.
    algorithm: Algorithm,
    relays: Mutex<NamedRelays>,
    /// Those of relays: their lanes end with the others.
    pub(super) limits: Limits,
    /// Those of questions to the tracker, which is asked once more when the lanes have ended.
    tracker_limits: Limits,
}

/// What is left of a swarm when all blocks have come.
pub(super) struct SwarmEnd {
    /// The digests of all blocks, if they have come.
    pub(super) table: Option<Arc<WideTable>>,
    /// The tracker takes a member whose connection ends for one that has left.
    _tracker: Option<Connection>,
}

/// A relay that a lane begins to fetch from.
pub(super) struct NewRelay {
    /// Its number in this receive, in the order of their beginnings.
    pub(super) number: usize,
    url: String,
    pub(super) source: Source,
}

impl<'a> Swarm<'a> {
    /// The swarm of `remote`, which fetches as `plan` says since the time `began`; `help` ends the lanes of relays. `None`
    /// where the source has no entity tag.
    pub(super) fn new(
        relay: &'a OpenRelay<'a>,
        remote: &'a Remote,
        plan: &Plan,
        began: Instant,
        help: &Cancel,
    ) -> Result<Option<Self>, Error> {
        let (source, limits, (_, beside)) = (&remote.sources[remote.primary], &remote.limits, remote.joining);
        let Some(etag) = source.etag.get() else { return Ok(None) };
        let blocks = plan.block_count();
        let count = usize::try_from(blocks).map_err(|e| Error::caused(ErrorKind::System, "too many blocks", e))?;
        let seed = u64::from_ne_bytes(random::bytes()?);
        let cores = std::thread::available_parallelism().map_or(2, NonZero::get);
        let fast = FAST_FOR_CORE.saturating_mul(cores as u64) / beside as u64;
        let wanted: u64 = relay.missing().iter().map(|(first, end)| end - first).sum();
        let algorithm = secret::algorithm(source.url.secret()).for_relayed();
        let tracker_limits = Limits { stall: limits.stall.min(RELAY_STALL), ..limits.clone() };
        let limits = Limits { cancel: help.clone(), ..tracker_limits.clone() };
        Ok(Some(Self {
            relay,
            remote,
            source,
            etag,
            blocks,
            is_hidden: AtomicBool::new(false),
            unit: (wanted / 256).clamp(1, 16),
            most_relays: (MOST_RELAYS / beside).max(LEAST_RELAYS),
            began,
            receiver: Mutex::new(Receiver::new(count, seed, fast).wanting(relay.missing())),
            tracker: Mutex::default(),
            table: OnceLock::new(),
            algorithm,
            relays: Mutex::default(),
            limits,
            tracker_limits,
        }))
    }

    /// Whether this should take part from now on, `bytes` having come. If so, others reach its relay from then on; if
    /// they cannot, it takes no part any more.
    pub(super) fn is_worth_joining(&self, bytes: u64) -> bool {
        if self.is_hidden.load(Ordering::Relaxed) {
            return false;
        }
        let mut receiver = self.receiver();
        let joins = receiver.is_worth_joining(self.now(), bytes, self.relay.bytes().saturating_sub(bytes))
            || (self.remote.joining.0 && !receiver.has_joined());
        drop(receiver);
        if joins && !self.relay.show(&self.remote.prefix) {
            self.is_hidden.store(true, Ordering::Relaxed);
            return false;
        }
        joins
    }

    /// What to ask the tracker for, while the ranges in `waiting` are not begun; `joins` says whether this is about to take
    /// part.
    pub(super) fn question(&self, waiting: &[(u64, u64)], joins: bool) -> Option<Vec<(u64, u64)>> {
        let (now, mut receiver) = (self.now(), self.receiver());
        if joins { Some(receiver.join(now, waiting)) } else { receiver.next_question(now, waiting) }
    }

    /// What decides; not to be held while anything is waited for.
    pub(super) fn receiver(&self) -> MutexGuard<'_, Receiver> {
        self.receiver.locked()
    }

    /// The time as [`Receiver`] counts it.
    pub(super) fn now(&self) -> Duration {
        self.began.elapsed()
    }

    /// The algorithm for the checksums of what relays bring.
    pub(super) fn algorithm(&self) -> &Algorithm {
        &self.algorithm
    }

    /// `block` has come from a relay or from the source, with the long checksum or the short one. Returns an error where a
    /// relay has made it up: it is passed on to nobody then, and has to come again.
    pub(super) fn note_block(&self, block: u64, digest: u128, from_relay: bool) -> Result<(), Error> {
        let expected = self.table.get().and_then(|table| table.blocks.get(usize::try_from(block).ok()?));
        if expected.is_none_or(|expected| matches(expected, digest, from_relay)) {
            self.relay.note_complete(block);
            return Ok(());
        }
        if from_relay {
            return Err(Error::new(ErrorKind::Corrupt, format!("block {block} is not the one that the source has")));
        }
        // The source has changed it since. All blocks are compared when they are here.
        Ok(())
    }

    /// Asks the tracker for the blocks in `need`; returns relays to be fetched from, and whether this has had no others
    /// until now.
    pub(super) fn ask(&self, need: Vec<(u64, u64)>) -> (Vec<NewRelay>, bool) {
        let (took, coming) = {
            let mut receiver = self.receiver();
            (receiver.take_taken(), receiver.coming())
        };
        let Some(address) = self.relay.address() else {
            self.receiver().note_no_tracker(self.now());
            return (Vec::new(), false);
        };
        let ask = Ask { relay: address, need, took, coming, part: self.relay.part() };
        // One lane asks at a time, as `Receiver` has it.
        let mut tracker = self.tracker.locked();
        let Ok(Answer { grant, wait_ms, peers, place, has_table }) = self.answer(&mut tracker, &ask) else {
            *tracker = None;
            self.receiver().note_no_tracker(self.now());
            return (Vec::new(), false);
        };
        let there = tracker.as_ref().and_then(Connection::route).map(|(_, there)| there);
        if has_table && self.table.get().is_none() {
            self.fetch_table(&mut tracker);
        }
        let mut receiver = self.receiver();
        let are_new = receiver.note_place(place);
        receiver.note_answer(self.now(), grant, Duration::from_millis(wait_ms));
        drop(receiver);
        let near = |index| place.map_or(Nearness::Far, |place| place.nearness(index));
        let relays = peers.into_iter().enumerate().filter_map(|(index, url)| self.begin_relay(url, there, near(index)));
        (relays.collect(), are_new)
    }

    /// Fetches the digests of all blocks. Without them it goes on as before.
    fn fetch_table(&self, tracker: &mut Option<Connection>) {
        let Some(connection) = tracker else { return };
        let Ok(table) = read_long_digests(connection, &self.remote.key, Some(self.etag), self.blocks) else {
            *tracker = None;
            return;
        };
        if table.header == self.remote.header_digest && table.payload_len == self.remote.header().payload_len() {
            let _ = self.table.set(Arc::new(table));
            self.receiver().note_table();
        }
    }

    /// What is left when all blocks have come; `None` if this has taken no part.
    pub(super) fn end(self) -> Option<SwarmEnd> {
        let has_joined = self.receiver.into_value().has_joined();
        has_joined.then(|| SwarmEnd { table: self.table.into_inner(), _tracker: self.tracker.into_value() })
    }

    fn answer(&self, tracker: &mut Option<Connection>, ask: &Ask) -> Result<Answer, Error> {
        let path = format!("{}/swarm?{}", self.remote.key, ask.query());
        let of = (self.source, self.etag, self.blocks);
        match request(tracker, of, &self.tracker_limits, &path) {
            // The connection may have been given to somebody else since the last answer.
            Err(e) if e.kind() == ErrorKind::Connect => {
                *tracker = None;
                request(tracker, of, &self.tracker_limits, &path)
            }
            answer => answer,
        }
    }

    /// The relay at `url`, which the source at the address `there` has named, if it may be asked now.
    fn begin_relay(&self, url: String, there: Option<IpAddr>, nearness: Nearness) -> Option<NewRelay> {
        let mut relays = self.relays.locked();
        let source = relays.begin(&url, (self.source, there), self.most_relays)?;
        let _ = source.etag.set(self.etag.to_owned());
        Some(NewRelay { number: self.receiver().add_relay_at(nearness), url, source })
    }

    /// The relay is fetched from no more, if it `lied`, or until the tracker names it again.
    pub(super) fn set_aside(&self, relay: &NewRelay, lied: bool) {
        self.receiver().set_aside(relay.number);
        let mut relays = self.relays.locked();
        relays.set_aside(&relay.url, lied);
    }
}

/// Whether a block that a relay or the source has sent is the one that has the checksums `expected`.
#[allow(clippy::cast_possible_truncation, reason = "the low half is the checksum of what the source sends")]
pub(super) fn matches(expected: &BlockDigests, digest: u128, from_relay: bool) -> bool {
    if from_relay { expected.long == digest } else { expected.short == digest as u64 }
}

/// Asks the tracker of a source by the connection in `tracker`, or by a new one.
fn request(
    tracker: &mut Option<Connection>,
    (source, etag, blocks): (&Source, &str, u64),
    limits: &Limits,
    path: &str,
) -> Result<Answer, Error> {
    let (connection, body) = source.ask(tracker.take(), limits, |connection| {
        let head = connection.get(path, None, Some(etag), None)?;
        if head.status != 200 {
            return Err(connection.refuse(&head));
        }
        connection.body(&head, MAX_ANSWER)
    })?;
    *tracker = Some(connection);
    let answer = std::str::from_utf8(&body).ok().and_then(|text| Answer::decode(text, blocks));
    answer.ok_or_else(|| Error::new(ErrorKind::Protocol, "the source answered with what no tracker says"))
}

/// What is known of one relay.
pub(super) struct RelayView {
    connection: Option<Connection>,
    count: u64,
}

impl RelayView {
    pub(super) fn new() -> Self {
        Self { connection: None, count: 0 }
    }

    /// Learns what `relay` has. If there was nothing to fetch from it, waits until it has more, or for a moment.
    pub(super) fn refresh(&mut self, swarm: &Swarm<'_>, relay: &NewRelay, wait: bool) -> Result<(), Error> {
        if wait && !swarm.limits.pause(MAP_PAUSE) {
            return Err(swarm.limits.over());
        }
        let connection = match &mut self.connection {
            Some(connection) => connection,
            none => none.insert(Connection::open(&relay.source.url, &swarm.limits)?),
        };
        let since = if wait { format!("?since={}", self.count) } else { String::new() };
        let head = connection.get(&format!("{}/have{since}", swarm.remote.key), None, Some(swarm.etag), None)?;
        if head.status != 200 {
            return Err(connection.refuse(&head));
        }
        let body = connection.body(&head, BlockMap::encoded_len(swarm.blocks))?;
        let invalid = || Error::new(ErrorKind::Protocol, "the source says that it has other blocks than there are");
        let (count, set) = BlockSet::decode(&body, swarm.blocks).ok_or_else(invalid)?;
        relay.source.learn(head.same_host);
        let mut receiver = swarm.receiver();
        receiver.learn(relay.number, set);
        drop(receiver);
        self.count = count;
        Ok(())
    }
}

/// How often one receive tries relays in all, and how often the same one, as long as it does not lie, which counts as
/// that many tries: a relay that was slow, or frozen, may be the only one that has a block when the source is gone.
const MOST_TRIED: usize = 256;
const MOST_TIMES: usize = 3;

/// The relays that the tracker has named.
#[derive(Default)]
struct NamedRelays {
    /// The URLs that were tried, each time, and those that are fetched from.
    tried: Vec<String>,
    active: Vec<String>,
}

impl NamedRelays {
    /// The relay at `url`, which `source` names whom we have reached at the address `there`, if it is not fetched from, nor
    /// `most` others, was not tried too often, and may be asked. One that may not be asked counts as tried.
    fn begin(&mut self, url: &str, (source, there): (&Source, Option<IpAddr>), most: usize) -> Option<Source> {
        let times = self.tried.iter().filter(|tried| *tried == url).count();
        let is_full = self.tried.len() >= MOST_TRIED || self.active.len() >= most;
        if is_full || times >= MOST_TIMES || self.active.iter().any(|active| active == url) {
            return None;
        }
        self.tried.push(url.to_owned());
        let relay = Source::parse(url, source.wants_same_host, source.url.secret()).ok()?;
        if !may_be_asked(&relay, source, there) {
            return None;
        }
        self.active.push(url.to_owned());
        Some(relay)
    }

    /// The relay at `url` is fetched from no more, if it `lied`, or until the tracker names it again.
    fn set_aside(&mut self, url: &str, lied: bool) {
        self.active.retain(|active| active != url);
        let times = if lied { MOST_TIMES } else { 0 };
        self.tried.extend(std::iter::repeat_n(url.to_owned(), times));
    }
}

/// Whether `relay` may be one: at an address, so that nobody is asked for a name, and encrypted if `source` is.
fn may_be_asked(relay: &Source, source: &Source, there: Option<IpAddr>) -> bool {
    let Some(host) = relay.url.host().parse::<IpAddr>().ok().map(|host| host.to_canonical()) else { return false };
    let is_near = |address: IpAddr| [address.is_loopback(), is_link_local(address)];
    let (near, near_source) = (is_near(host), there.map_or([false; 2], is_near));
    let is_reached = near.iter().zip(near_source).all(|(relay, source)| source || !relay);
    let is_host = !host.is_unspecified() && !host.is_multicast() && relay.url.port() > 0;
    let is_private = source.url.tls().is_none() || relay.url.tls().is_some();
    is_host && is_reached && is_private && is_relay_path(relay.url.prefix())
}

/// Whether only hosts of one link have this address: services of a cloud for its machines are at some of them.
fn is_link_local(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => address.is_link_local(),
        IpAddr::V6(address) => address.is_unicast_link_local(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOKEN: &str = "0123456789abcdef0123456789abcdef";

    fn begins(url: &str, there: &str) -> bool {
        let source = Source::parse("http://10.0.0.1:1/0f/checkpoint/", false, None).unwrap();
        NamedRelays::default().begin(url, (&source, there.parse().ok()), 12).is_some()
    }

    #[test]
    fn a_tracker_leads_to_relays_alone() {
        for host in ["10.0.0.7", "192.0.2.1", "[2001:db8::1]", "[::ffff:10.0.0.7]"] {
            assert!(begins(&format!("http://{host}:4000/{TOKEN}/checkpoint/"), "10.0.0.1"), "{host}");
        }
        for host in [
            "127.0.0.1",
            "[::1]",
            "[::ffff:127.0.0.1]",
            "169.254.169.254",
            "[fe80::1]",
            "0.0.0.0",
            "[::]",
            "224.0.0.1",
            "localhost",
            "node7",
            "2130706433",
        ] {
            assert!(!begins(&format!("http://{host}:4000/{TOKEN}/checkpoint/"), "10.0.0.1"), "{host}");
        }
        for path in [
            "",
            "checkpoint/",
            "latest/meta-data/",
            &format!("{TOKEN}/checkpoint/../"),
            &format!("{TOKEN}~10.0.0.9/checkpoint/"),
            &format!("{TOKEN}/checkpoint/?a=/"),
            &format!("admin/{TOKEN}/checkpoint/"),
            &format!("{}/checkpoint/", &TOKEN[1..]),
        ] {
            assert!(!begins(&format!("http://10.0.0.7:4000/{path}"), "10.0.0.1"), "{path}");
        }
        assert!(!begins(&format!("http://10.0.0.7:0/{TOKEN}/checkpoint/"), "10.0.0.1"));
    }

    #[test]
    fn a_near_source_may_name_near_relays() {
        for (host, there) in [("127.0.0.1", "127.0.0.1"), ("127.0.0.1", "::1"), ("169.254.0.7", "169.254.0.1")] {
            assert!(begins(&format!("http://{host}:4000/{TOKEN}/checkpoint/"), there), "{host}");
        }
        assert!(!begins(&format!("http://127.0.0.1:4000/{TOKEN}/checkpoint/"), "169.254.0.1"));
        assert!(!begins(&format!("http://127.0.0.1:4000/{TOKEN}/checkpoint/"), "unknown"));
    }

    #[test]
    fn a_relay_is_tried_so_often_and_one_that_lies_no_more() {
        let source = Source::parse("http://10.0.0.1:1/0f/checkpoint/", false, None).unwrap();
        let mut relays = NamedRelays::default();
        let url = |number: u32| format!("http://10.0.0.7:4000/{number:032x}/checkpoint/");
        let begin = |relays: &mut NamedRelays, number| relays.begin(&url(number), (&source, None), 2);
        for _ in 0..MOST_TIMES {
            begin(&mut relays, 1).unwrap();
            assert!(begin(&mut relays, 1).is_none(), "it is fetched from");
            relays.set_aside(&url(1), false);
        }
        assert!(begin(&mut relays, 1).is_none());
        begin(&mut relays, 2).unwrap();
        relays.set_aside(&url(2), true);
        assert!(begin(&mut relays, 2).is_none());
        assert!(begin(&mut relays, 3).is_some() && begin(&mut relays, 4).is_some());
        assert!(begin(&mut relays, 5).is_none(), "there are enough");
    }
}
