//! The receives of this process: those that run, the last ones that ended, and their sums.
//!
//! They are noted here because a trainer has one address to scrape, and how it heals is as interesting as what it
//! served. An error is known by its class: its message, which a peer may have written, is not shown.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant, SystemTime};

use crate::report::Report;
use crate::sync::Locked;

/// How many receives that ended are remembered.
pub(super) const REMEMBERED: usize = 8;

/// The receives of one process.
#[derive(Debug, Default)]
pub(in crate::server) struct Receives(Mutex<Kept>);

#[derive(Debug, Default)]
pub(super) struct Kept {
    pub(super) next: u64,
    pub(super) running: BTreeMap<u64, Running>,
    /// The latest first.
    pub(super) ended: VecDeque<Ended>,
    pub(super) sums: Sums,
}

#[derive(Debug)]
pub(super) struct Running {
    pub(super) step: i64,
    pub(super) began: Instant,
    /// Once the source has answered: the bytes that are here, and how many there will be.
    pub(super) opened: Option<(Arc<AtomicU64>, u64)>,
}

/// The phases that the time of a receive is divided into, and the part of `fetch` that compared digests.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::server) struct Phases {
    pub(in crate::server) open: Duration,
    pub(in crate::server) fetch: Duration,
    pub(in crate::server) build: Duration,
    pub(in crate::server) verify: Duration,
}

/// All receives since the server began.
#[derive(Clone, Debug, Default)]
pub(in crate::server) struct Sums {
    pub(in crate::server) healed: u64,
    pub(in crate::server) failed: u64,
    /// Those that failed, by [`Failure::counted_as`].
    pub(in crate::server) failures: BTreeMap<String, u64>,
    pub(in crate::server) bytes: u64,
    /// The part of the bytes that other receivers have sent, and their blocks that were not the source's.
    pub(in crate::server) relayed: u64,
    pub(in crate::server) refused: u64,
    pub(in crate::server) retries: u64,
    pub(in crate::server) phases: Phases,
}

/// A receive that ended.
#[derive(Clone, Debug)]
pub(in crate::server) struct Ended {
    pub(in crate::server) step: i64,
    pub(in crate::server) at: SystemTime,
    pub(in crate::server) took: Duration,
    /// How it went, or the class of its error.
    pub(in crate::server) outcome: Result<(Report, Phases), String>,
}

/// A receive that runs.
#[derive(Clone, Debug)]
pub(in crate::server) struct Underway {
    pub(in crate::server) step: i64,
    pub(in crate::server) took: Duration,
    pub(in crate::server) phase: &'static str,
    pub(in crate::server) received: u64,
    /// 0 while the source has not answered.
    pub(in crate::server) total: u64,
}

/// Everything about receives at one moment.
#[derive(Clone, Debug)]
pub(in crate::server) struct ReceiveFigures {
    pub(in crate::server) running: Vec<Underway>,
    /// The latest first.
    pub(in crate::server) ended: Vec<Ended>,
    pub(in crate::server) sums: Sums,
}

impl Receives {
    pub(super) fn kept(&self) -> MutexGuard<'_, Kept> {
        self.0.locked()
    }

    pub(in crate::server) fn figures(&self) -> ReceiveFigures {
        let kept = self.kept();
        let running = kept.running.values().map(Running::look).collect();
        ReceiveFigures { running, ended: kept.ended.iter().cloned().collect(), sums: kept.sums.clone() }
    }
}

impl Running {
    /// How far the receive is at this moment.
    pub(super) fn look(&self) -> Underway {
        let (received, total) =
            self.opened.as_ref().map_or((0, 0), |(received, total)| (received.load(Ordering::Relaxed), *total));
        // Bytes that had to be fetched again count once.
        let received = received.min(total);
        let phase = match &self.opened {
            None => "open",
            Some(_) if received < total => "fetch",
            Some(_) => "build",
        };
        Underway { step: self.step, took: self.began.elapsed(), phase, received, total }
    }
}
