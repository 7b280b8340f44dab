//! All that counters and status page show, taken at one moment: both say the same.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use super::metrics::Tallies;
use super::program::ProgramFigures;
use super::receives::ReceiveFigures;
use super::strangers::{Reason, Stranger};
use super::transfers::Transfer;
use crate::server::Shared;

/// A server at one moment. It holds nothing that gives access to a state.
#[derive(Clone, Debug)]
pub(in crate::server) struct Figures {
    pub(in crate::server) at: SystemTime,
    pub(in crate::server) up: Duration,
    /// When the server began.
    pub(in crate::server) since: SystemTime,
    pub(in crate::server) port: u16,
    pub(in crate::server) encrypted: bool,
    pub(in crate::server) secret: bool,
    /// The cap on what is sent, in bytes per second.
    pub(in crate::server) max_bandwidth: Option<u64>,
    pub(in crate::server) allowed: bool,
    pub(in crate::server) step: Option<i64>,
    /// Bytes of what is served, header included.
    pub(in crate::server) published: Option<u64>,
    pub(in crate::server) requests: u64,
    pub(in crate::server) sent: u64,
    pub(in crate::server) connections: u64,
    /// Answers that are being sent.
    pub(in crate::server) answers: u64,
    pub(in crate::server) waiting: u64,
    pub(in crate::server) tallies: Tallies,
    /// Requests of those who have not shown a right to ask, by reason, and who they were.
    pub(in crate::server) refused: [(Reason, u64); 3],
    pub(in crate::server) strangers: Vec<Stranger>,
    pub(in crate::server) transfers: Vec<Transfer>,
    pub(in crate::server) receives: ReceiveFigures,
    /// Bytes that were served on while this process received them.
    pub(in crate::server) relayed: u64,
    /// The receivers that send each other what is served, and how long ago each of them asked.
    pub(in crate::server) members: Vec<(SocketAddr, Duration)>,
    /// What the program around the server says of itself, and how long ago it did.
    pub(in crate::server) program: Option<(Duration, Arc<ProgramFigures>)>,
}

impl Figures {
    /// The figures of a server at this moment.
    pub(in crate::server) fn of(shared: &Shared) -> Self {
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let shelves = shared.shelves.stores();
        let answers = shared.store.active() + shelves.iter().map(|store| store.active()).sum::<usize>();
        Self {
            at: SystemTime::now(),
            up: shared.began.elapsed(),
            since: shared.since,
            port: shared.address.port(),
            encrypted: shared.identity.is_some(),
            secret: shared.auth.is_some(),
            max_bandwidth: shared.throttle.as_ref().map(|throttle| throttle.bytes_per_second()),
            allowed: shared.store.is_allowed(),
            step: shared.store.step(),
            published: shared.store.published_len(),
            requests: load(&shared.requests),
            sent: load(&shared.progress.bytes),
            connections: shared.connections.load(Ordering::Relaxed) as u64,
            answers: answers as u64,
            waiting: load(&shared.metrics.waiting),
            tallies: shared.metrics.look(),
            refused: shared.strangers.totals(),
            strangers: shared.strangers.latest(),
            transfers: shared.transfers.now(),
            receives: shared.receives.figures(),
            relayed: load(&shared.metrics.relayed),
            members: shared.store.members(),
            program: shared.program.latest(),
        }
    }
}
