//! One receive of this process, as its server is told of it.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant, SystemTime};

use super::receives::{Ended, Phases, REMEMBERED, Running};
use crate::report::Report;
use crate::server::Shared;

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
