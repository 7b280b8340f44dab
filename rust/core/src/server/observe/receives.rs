//! The receives of this process: those that run, the last ones that ended, and their sums.
//!
//! They are noted here because a trainer has one address to scrape, and how it heals is as interesting as what it
//! served. What a peer wrote is not among it: an error is known by its class.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use crate::report::Report;
use crate::server::Shared;

/// How many receives that ended are remembered.
const REMEMBERED: usize = 8;

/// The receives of one process.
#[derive(Debug, Default)]
pub(in crate::server) struct Receives(Mutex<Kept>);

#[derive(Debug, Default)]
struct Kept {
    next: u64,
    running: BTreeMap<u64, Running>,
    /// The latest first.
    ended: VecDeque<Ended>,
    sums: Sums,
}

#[derive(Debug)]
struct Running {
    step: i64,
    began: Instant,
    /// Once the source has answered: the bytes that are here, and how many there will be.
    opened: Option<(Arc<AtomicU64>, u64)>,
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

/// Why a receive failed, in the words of the program around the engine.
#[derive(Clone, Copy, Debug)]
pub struct Failure<'a> {
    /// The class of the error, for people.
    pub class: &'a str,
    /// The label under which it is counted. Each label is a series of its own, so the caller takes it from a short list.
    pub counted_as: &'a str,
}

impl Failure<'_> {
    /// The label of what is on no list. It is always counted, so that a first failure is an increase.
    pub const OTHER: &'static str = "other";
}

/// A receive of this process, which its [`crate::Server`] shows as running until [`Receive::end`]. One that is dropped
/// before counts as failed.
///
/// ```
/// use std::time::Duration;
/// use tensorferry_core::{Report, Server, ServerConfig};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let runtime = tokio::runtime::Runtime::new()?;
/// let server = Server::bind(&ServerConfig::default(), runtime.handle())?;
/// let receive = server.begin_receive(7);
/// receive.end(Ok(&Report::default()), Duration::from_secs(1));
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Receive {
    shared: Arc<Shared>,
    number: u64,
}

impl Receives {
    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(in crate::server) fn figures(&self) -> ReceiveFigures {
        let kept = self.kept();
        let running = kept.running.values().map(Running::look).collect();
        ReceiveFigures { running, ended: kept.ended.iter().cloned().collect(), sums: kept.sums.clone() }
    }
}

impl Running {
    /// How far the receive is at this moment.
    fn look(&self) -> Underway {
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

impl Receive {
    /// Notes that a receive of `step` begins.
    pub(in crate::server) fn begin(shared: &Arc<Shared>, step: i64) -> Self {
        let mut kept = shared.receives.kept();
        let number = kept.next;
        kept.next += 1;
        kept.running.insert(number, Running { step, began: Instant::now(), opened: None });
        drop(kept);
        Self { shared: Arc::clone(shared), number }
    }

    /// The source has answered: `received` counts the bytes that are here, of `total`.
    pub fn opened(&self, received: Arc<AtomicU64>, total: u64) {
        if let Some(running) = self.shared.receives.kept().running.get_mut(&self.number) {
            running.opened = Some((received, total));
        }
    }

    /// Notes that the receive is over, after `took` in all: with its report, or with an error.
    pub fn end(self, outcome: Result<&Report, Failure<'_>>, took: Duration) {
        self.note(outcome, Some(took));
    }

    /// Moves the receive to those that ended, and adds it to the sums; does nothing the second time.
    fn note(&self, outcome: Result<&Report, Failure<'_>>, took: Option<Duration>) {
        let mut kept = self.shared.receives.kept();
        let Some(running) = kept.running.remove(&self.number) else { return };
        let took = took.unwrap_or_else(|| running.began.elapsed());
        let outcome = match outcome {
            Ok(report) => {
                let build = took.saturating_sub(report.opening + report.fetching);
                let (open, fetch, verify) = (report.opening, report.fetching, report.verifying);
                let sums = &mut kept.sums;
                sums.healed += 1;
                sums.bytes += report.bytes;
                sums.retries += report.retries;
                sums.relayed += report.relayed;
                sums.refused += report.refused;
                sums.phases.open += open;
                sums.phases.fetch += fetch;
                sums.phases.build += build;
                sums.phases.verify += verify;
                Ok((report.clone(), Phases { open, fetch, build, verify }))
            }
            Err(Failure { class, counted_as }) => {
                kept.sums.failed += 1;
                *kept.sums.failures.entry(counted_as.to_owned()).or_default() += 1;
                Err(class.to_owned())
            }
        };
        kept.ended.push_front(Ended { step: running.step, at: SystemTime::now(), took, outcome });
        kept.ended.truncate(REMEMBERED);
    }
}

impl Drop for Receive {
    fn drop(&mut self) {
        self.note(Err(Failure { class: "ended without a result", counted_as: Failure::OTHER }), None);
    }
}
