//! Fetching from other receivers of the same snapshot.
//!
//! A [`Swarm`] accompanies the lanes of one transfer. Lanes to the source fetch what its tracker has granted; each relay
//! that the tracker names gets a lane of its own. What to do next is decided in [`Receiver`]. A relay that fails in any
//! way is set aside, and what it was to bring goes back into the queue: relays cannot fail a transfer.

use std::net::IpAddr;
use std::num::NonZero;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

use tensorferry_wire::digest::{Algorithm, BlockDigests, WideTable};
use tensorferry_wire::swarm::{Answer, Ask, Nearness};

use super::Source;
use super::answers::read_long_digests;
use super::connection::Connection;
use super::limits::Limits;
use super::named_relays::NamedRelays;
use super::relaying::OpenRelay;
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
    source: &'a Source,
    key: &'a str,
    /// The first bytes of the payload.
    prefix: &'a [u8],
    etag: &'a str,
    blocks: u64,
    at_once: bool,
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
    /// What the digests have to be of: the checksum of the header, and the length of the payload.
    header_digest: u64,
    payload_len: u64,
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
    pub(super) fn new(
        relay: &'a OpenRelay<'a>,
        source: &'a Source,
        (key, prefix): (&'a str, &'a [u8]),
        plan: &Plan,
        (header_digest, payload_len): (u64, u64),
        (at_once, beside): (bool, usize),
        (limits, began): (&Limits, Instant),
        help: &Cancel,
    ) -> Result<Option<Self>, Error> {
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
            source,
            key,
            prefix,
            etag,
            blocks,
            at_once,
            is_hidden: AtomicBool::new(false),
            unit: (wanted / 256).clamp(1, 16),
            most_relays: (MOST_RELAYS / beside).max(LEAST_RELAYS),
            began,
            receiver: Mutex::new(Receiver::new(count, seed, fast).wanting(relay.missing())),
            tracker: Mutex::default(),
            table: OnceLock::new(),
            algorithm,
            header_digest,
            payload_len,
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
            || (self.at_once && !receiver.has_joined());
        drop(receiver);
        if joins && !self.relay.show(self.prefix) {
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
        let Ok(table) = read_long_digests(connection, self.key, Some(self.etag), self.blocks) else {
            *tracker = None;
            return;
        };
        if table.header == self.header_digest && table.payload_len == self.payload_len {
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
        let path = format!("{}/swarm?{}", self.key, ask.query());
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
        if wait && !swarm.limits.pause(MAP_PAUSE, || false) {
            return Err(swarm.limits.over());
        }
        let connection = match &mut self.connection {
            Some(connection) => connection,
            none => none.insert(Connection::open(&relay.source.url, &swarm.limits)?),
        };
        let since = if wait { format!("?since={}", self.count) } else { String::new() };
        let head = connection.get(&format!("{}/have{since}", swarm.key), None, Some(swarm.etag), None)?;
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
