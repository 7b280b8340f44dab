//! Counters of a server.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

use super::program::printable;
use crate::server::ConnectionContext;
use crate::server::connection_slots::Peer;
use crate::sync::Locked;

/// How many refusals are remembered.
const REMEMBERED: usize = 16;

/// Counts since the server began.
#[derive(Debug, Default)]
pub(in crate::server) struct Metrics {
    pub(in crate::server) waiting: AtomicU64,
    /// Bytes that were served on while this process received them.
    pub(in crate::server) relayed: AtomicU64,
    tallies: Mutex<Tallies>,
}

/// The counts that are kept under one lock.
#[derive(Clone, Debug, Default)]
pub(in crate::server) struct Tallies {
    /// By status.
    pub(in crate::server) answers: BTreeMap<u16, u64>,
    pub(in crate::server) bodies: Bodies,
    /// The latest first. Only peers that knew the path are listed, so that a stranger cannot fill the list.
    pub(in crate::server) refusals: VecDeque<Refusal>,
}

/// Bodies of checkpoints.
#[derive(Clone, Debug, Default)]
pub(in crate::server) struct Bodies {
    pub(in crate::server) complete: u64,
    pub(in crate::server) cut: u64,
    pub(in crate::server) time: Duration,
}

/// A request that was refused.
#[derive(Clone, Debug)]
pub(in crate::server) struct Refusal {
    pub(in crate::server) at: SystemTime,
    pub(in crate::server) peer: Peer,
    pub(in crate::server) status: u16,
    /// The text of the answer, in printable ASCII; parts of it may come from the peer.
    pub(in crate::server) message: String,
}

/// A request that waits for a checkpoint; it is counted as long as this lives.
pub(in crate::server) struct Waiting<'a>(&'a AtomicU64);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A body that is being sent.
#[derive(Debug)]
pub(in crate::server) struct Sending {
    since: Instant,
    /// How many bytes of bodies the connection had sent before this answer, and will have sent after it.
    bounds: (u64, u64),
    /// Whether it is of a container that this process receives.
    relayed: bool,
}

impl Sending {
    pub(in crate::server) fn new(connection: &ConnectionContext, len: u64, relayed: bool) -> Self {
        let before = connection.progress[0].bytes.load(Ordering::Relaxed);
        Self { since: Instant::now(), bounds: (before, before + len), relayed }
    }

    /// Counts a body that has ended. One of which nothing was sent, as in the answer to HEAD, does not count.
    pub(in crate::server) fn end(&self, connection: &ConnectionContext) {
        let sent = connection.progress[0].bytes.load(Ordering::Relaxed);
        if sent > self.bounds.0 {
            if self.relayed {
                connection.shared.metrics.relayed.fetch_add(sent - self.bounds.0, Ordering::Relaxed);
            }
            connection.shared.metrics.note_body(sent >= self.bounds.1, self.since.elapsed());
        }
    }
}

impl Metrics {
    /// All counts at one moment.
    pub(in crate::server) fn look(&self) -> Tallies {
        self.tallies.locked().clone()
    }

    pub(in crate::server) fn wait(&self) -> Waiting<'_> {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        Waiting(&self.waiting)
    }

    pub(in crate::server) fn note_answer(&self, status: u16) {
        *self.tallies.locked().answers.entry(status).or_default() += 1;
    }

    /// Remembers the refusal of a request whose path was known to `peer`.
    pub(in crate::server) fn note_refusal(&self, peer: Peer, status: u16, message: &[u8]) {
        let message = printable(&String::from_utf8_lossy(message.trim_ascii_end()));
        let refusals = &mut self.tallies.locked().refusals;
        refusals.push_front(Refusal { at: SystemTime::now(), peer, status, message });
        refusals.truncate(REMEMBERED);
    }

    /// Counts a body that was sent whole, or was cut, after so much time.
    fn note_body(&self, complete: bool, time: Duration) {
        let bodies = &mut self.tallies.locked().bodies;
        *(if complete { &mut bodies.complete } else { &mut bodies.cut }) += 1;
        bodies.time += time;
    }
}
