//! The messages between the members of a swarm and its tracker: a query and a text.
//!
//! ```text
//! GET {step}/swarm?port=4000&token=0f..&need=0-16,20-21      a member says how it is reached and what it lacks
//!                 &took=16-17                                what it fetches already without a grant
//!                 &coming=4-5,9-10                           what the source is sending it
//!                 &part=0123456789abcdef                     names the blocks it wants, if these are not all
//!
//! grant 0-4                                                  blocks it may fetch from the source
//! wait 250                                                   milliseconds after which to ask again
//! table 1                                                    the digests of all blocks can be fetched
//! place 1 0/2 1                                              where the member is ([`Place`])
//! peer http://10.0.0.7:4000/0f../checkpoint/                 a member that relays
//! ```
//!
//! Both are read with bounds on the length and the number of everything, since any member may have written them. That
//! the blocks of a query are blocks of the payload, and what a pause may be, is up to the reader. Lines and keys that
//! are not known are ignored, so that later versions may add some.

use std::fmt::Write as _;

use crate::request::MAX_RUNS;

/// The header field of a source that has a tracker.
pub const SWARM_HEADER: &str = "tensorferry-swarm";
/// Its value where the source has all of the snapshot.
pub const SWARM_FULL: &str = "1";
/// Its value where the source is still copying the snapshot, from the beginning on.
pub const SWARM_FILLING: &str = "1 filling";
/// The query of a request for the [`crate::digest::WideTable`] of a source that has a tracker: `{step}/digests?long=1`.
pub const LONG_QUERY: &str = "long=1";
/// The length of the path segment below which a member relays, in hex digits.
pub const TOKEN_LEN: usize = 32;
/// The length of a certificate's fingerprint, in hex digits.
pub const FINGERPRINT_LEN: usize = 64;
/// The most members that an answer names.
pub const MAX_PEERS: usize = 64;
/// The longest URL of a member.
const MAX_URL: usize = 256;
/// The length of the number that stands for a part, in hex digits.
const PART_LEN: usize = 16;

/// How a member's relay is reached: everything but its host, which is where the request comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RelayAddress {
    /// The port of its server.
    pub port: u16,
    /// The path segment of the relay, [`TOKEN_LEN`] hex digits.
    pub token: String,
    /// The fingerprint of its certificate, [`FINGERPRINT_LEN`] hex digits; `None` where it speaks plain HTTP.
    pub fingerprint: Option<String>,
}

/// What a member asks its tracker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ask {
    /// Where the member relays.
    pub relay: RelayAddress,
    /// Ascending runs of blocks that it lacks and that no relay offers it.
    pub need: Vec<(u64, u64)>,
    /// Ascending runs of blocks that it has begun to fetch from the source before it has asked for any.
    pub took: Vec<(u64, u64)>,
    /// Ascending runs of blocks that the source is sending it.
    pub coming: Vec<(u64, u64)>,
    /// Stands for the blocks that it wants, where it does not want all: members with the same number want the same.
    pub part: Option<u64>,
}

/// What a tracker answers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Answer {
    /// Ascending runs of blocks that the member may fetch from the source.
    pub grant: Vec<(u64, u64)>,
    /// When to ask again, in milliseconds.
    pub wait_ms: u64,
    /// Whether the digests of all blocks can be fetched.
    pub has_table: bool,
    /// Where the member is, among the others; `None` where the tracker says nothing of it.
    pub place: Option<Place>,
    /// URLs of members that relay, those that [`Place`] counts first.
    pub peers: Vec<String>,
}

/// How far from a member something is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Nearness {
    /// On the same host.
    Host,
    /// On another one.
    #[default]
    Far,
}

/// Which part of the blocks a member is to bring to its host: it is number `number` of `of`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// Below `of`.
    pub number: u32,
    /// At least 1.
    pub of: u32,
}

impl Share {
    /// The part that is everything.
    pub const ALL: Self = Self { number: 0, of: 1 };
}

/// Where a member is, among the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// How far the source is.
    pub source: Nearness,
    /// What the member brings to its host.
    pub host: Share,
    /// How many of the members that are named are on its host, the first ones.
    pub on_host: usize,
}

impl Ask {
    /// The query of the request. Of `need`, `took` and `coming` the first [`MAX_RUNS`] runs are stated.
    #[must_use]
    pub fn query(&self) -> String {
        let mut query = format!("port={}&token={}", self.relay.port, self.relay.token);
        if let Some(fingerprint) = &self.relay.fingerprint {
            let _ = write!(query, "&tls={fingerprint}");
        }
        if !self.need.is_empty() {
            let _ = write!(query, "&need={}", Runs(&self.need));
        }
        if !self.took.is_empty() {
            let _ = write!(query, "&took={}", Runs(&self.took));
        }
        if !self.coming.is_empty() {
            let _ = write!(query, "&coming={}", Runs(&self.coming));
        }
        if let Some(part) = self.part {
            let _ = write!(query, "&part={part:016x}");
        }
        query
    }

    /// Reads a query; `None` where it is not valid.
    ///
    /// ```
    /// use tensorferry_wire::swarm::{Ask, RelayAddress};
    ///
    /// let relay = RelayAddress { port: 4000, token: "0f".repeat(16), fingerprint: None };
    /// let need = vec![(0, 16), (20, 21)];
    /// let (took, coming) = (vec![(16, 17)], vec![(4, 5)]);
    /// let ask = Ask { relay, need, took, coming, part: Some(7) };
    /// assert_eq!(Ask::parse(&ask.query()), Some(ask));
    /// assert_eq!(Ask::parse("port=4000&token=../healthz"), None);
    /// ```
    #[must_use]
    pub fn parse(query: &str) -> Option<Self> {
        let (mut port, mut token, mut fingerprint) = (None, None, None);
        let (mut need, mut took, mut coming) = (Vec::new(), Vec::new(), Vec::new());
        let mut wanted = None;
        for field in query.split('&') {
            match field.split_once('=')? {
                ("port", value) => port = Some(value.parse().ok().filter(|&port| port > 0)?),
                ("token", value) => token = Some(hex(value, TOKEN_LEN)?),
                ("tls", value) => fingerprint = Some(hex(value, FINGERPRINT_LEN)?),
                ("need", value) => need = parse_runs(value)?,
                ("took", value) => took = parse_runs(value)?,
                ("coming", value) => coming = parse_runs(value)?,
                ("part", value) => wanted = Some(u64::from_str_radix(&hex(value, PART_LEN)?, 16).ok()?),
                _ => {}
            }
        }
        let relay = RelayAddress { port: port?, token: token?, fingerprint };
        Some(Self { relay, need, took, coming, part: wanted })
    }
}

impl Answer {
    /// The text of the answer.
    #[must_use]
    pub fn encode(&self) -> String {
        let mut text = String::new();
        if !self.grant.is_empty() {
            let _ = writeln!(text, "grant {}", Runs(&self.grant));
        }
        let _ = writeln!(text, "wait {}", self.wait_ms);
        if self.has_table {
            text.push_str("table 1\n");
        }
        if let Some(place) = &self.place {
            let _ = writeln!(text, "place {place}");
        }
        for peer in self.peers.iter().take(MAX_PEERS) {
            let _ = writeln!(text, "peer {peer}");
        }
        text
    }

    /// Reads an answer about a payload of `blocks` blocks; `None` where it is not valid. Whether a peer's URL is one is
    /// up to whoever connects ([`is_relay_path`]).
    #[must_use]
    pub fn decode(text: &str, blocks: u64) -> Option<Self> {
        let mut answer = Self::default();
        for line in text.lines() {
            match line.split_once(' ')? {
                ("grant", runs) => answer.grant = parse_runs(runs).filter(|runs| last(runs) <= blocks)?,
                ("wait", millis) => answer.wait_ms = millis.parse().ok()?,
                ("table", value) => answer.has_table = value == "1",
                ("place", place) => answer.place = Some(Place::decode(place)?),
                ("peer", url) if answer.peers.len() < MAX_PEERS && url.len() <= MAX_URL => {
                    answer.peers.push(url.to_owned());
                }
                ("peer", _) => return None,
                _ => {}
            }
        }
        Some(answer)
    }
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { source, host, on_host } = self;
        write!(f, "{} {}/{} {on_host}", *source as u8, host.number, host.of)
    }
}

impl Place {
    /// How far the member is that is named as number `index`.
    #[must_use]
    pub fn nearness(&self, index: usize) -> Nearness {
        if index < self.on_host { Nearness::Host } else { Nearness::Far }
    }

    fn decode(text: &str) -> Option<Self> {
        let mut words = text.split(' ');
        let source = match words.next()? {
            "0" => Nearness::Host,
            "1" => Nearness::Far,
            _ => return None,
        };
        Some(Self { source, host: Share::decode(words.next()?)?, on_host: words.next()?.parse().ok()? })
    }
}

impl Share {
    fn decode(text: &str) -> Option<Self> {
        let (number, of) = text.split_once('/')?;
        let share = Self { number: number.parse().ok()?, of: of.parse().ok()? };
        Some(share).filter(|share| share.number < share.of)
    }
}

/// The block behind the last of `runs`.
fn last(runs: &[(u64, u64)]) -> u64 {
    runs.last().map_or(0, |run| run.1)
}

struct Runs<'a>(&'a [(u64, u64)]);

impl std::fmt::Display for Runs<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (index, (first, end)) in self.0.iter().take(MAX_RUNS).enumerate() {
            write!(f, "{}{first}-{end}", if index == 0 { "" } else { "," })?;
        }
        Ok(())
    }
}

/// Whether `path` is one below which a member relays, as trackers name it.
#[must_use]
pub fn is_relay_path(path: &str) -> bool {
    let token = path.strip_prefix('/').and_then(|path| path.strip_suffix("/checkpoint/"));
    token.is_some_and(|token| hex(token, TOKEN_LEN).is_some())
}

/// Runs as [`crate::request::parse_runs`] reads them: none empty, ascending, no more than [`MAX_RUNS`].
fn parse_runs(text: &str) -> Option<Vec<(u64, u64)>> {
    crate::request::parse_runs(&format!("blocks={text}")).map(|(runs, _)| runs)
}

fn hex(text: &str, len: usize) -> Option<String> {
    let valid = text.len() == len && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
    valid.then(|| text.to_owned())
}

#[cfg(test)]
mod tests;
