//! All that counters and status page show, taken at one moment: both say the same.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use super::Shared;
use super::metrics::Tallies;
use super::receives::ReceiveFigures;
use super::transfers::Transfer;

/// A server at one moment. It holds nothing that gives access to a state.
#[derive(Clone, Debug)]
pub(super) struct Figures {
    pub(super) at: SystemTime,
    pub(super) up: Duration,
    pub(super) port: u16,
    pub(super) encrypted: bool,
    pub(super) secret: bool,
    pub(super) allowed: bool,
    pub(super) step: Option<i64>,
    /// Bytes of what is served, header included.
    pub(super) published: Option<u64>,
    pub(super) requests: u64,
    pub(super) sent: u64,
    pub(super) connections: u64,
    /// Answers that are being sent.
    pub(super) answers: u64,
    pub(super) waiting: u64,
    pub(super) tallies: Tallies,
    pub(super) transfers: Vec<Transfer>,
    pub(super) receives: ReceiveFigures,
}

impl Figures {
    pub(super) fn of(shared: &Shared) -> Self {
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let shelves = shared.shelves.stores();
        let answers = shared.store.active() + shelves.iter().map(|store| store.active()).sum::<usize>();
        Self {
            at: SystemTime::now(),
            up: shared.began.elapsed(),
            port: shared.address.port(),
            encrypted: shared.identity.is_some(),
            secret: shared.auth.is_some(),
            allowed: shared.store.is_allowed(),
            step: shared.store.step(),
            published: shared.store.published_len(),
            requests: load(&shared.requests),
            sent: load(&shared.progress.bytes),
            connections: shared.connections.load(Ordering::Relaxed) as u64,
            answers: answers as u64,
            waiting: load(&shared.metrics.waiting),
            tallies: shared.metrics.look(),
            transfers: shared.transfers.now(),
            receives: shared.receives.figures(),
        }
    }
}
