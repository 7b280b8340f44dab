//! A receive through a bounded buffer.
//!
//! Entries whose final place the network cannot write to, those of a device for one, come through memory that the
//! caller gives for each wave of blocks and copies from while the next wave comes (`payload::waves`). Entries with a
//! place of their own are written there as ever.
//!
//! Invariants:
//!
//! * a wave is verified against the digests of the source before it is handed out;
//! * a source that changes its state while it is fetched makes the waves concerned come once more: what the caller has
//!   after the last wave is the state at one moment.

use std::time::Instant;

use super::Arrived;
use super::ledger::BlockLedger;
use super::remote::{Passes, PlannedFetch, Remote};
use crate::error::{Error, ErrorKind};
use crate::payload::{Destination, Plan, StagedRun, Waves};
use crate::report::Report;

/// A receive under way.
#[derive(Debug)]
pub struct StagedFetch {
    remote: Remote,
    waves: Waves,
    /// Whether the blocks of the waves to come were fetched before, and differ from the source's current ones.
    refetching: bool,
    /// Whether all bytes have arrived as they were at the source at one moment.
    settled: bool,
    received: BlockLedger,
    passes: Passes,
    started: Instant,
    report: Report,
}

impl Remote {
    /// Begins a receive that ends where [`Remote::fetch`] does, except that the entries numbered in `passing` go by way
    /// of memory of `most` bytes, at least one MiB, that is given for each wave.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] when there are several sources: what a wave brought must not be taken back because
    /// sources turn out to differ; when there are not as many destinations as entries; when `passing` names an entry
    /// that there is not, or one twice; and when `most` is less than one MiB. [`ErrorKind::System`] when there is no
    /// memory.
    pub fn staged(mut self, destination: Destination, passing: &[usize], most: u64) -> Result<StagedFetch, Error> {
        let started = Instant::now();
        if self.has_several_sources() {
            return Err(Error::new(ErrorKind::Invalid, "waves take one source"));
        }
        let waves = self.waves(destination, passing, most)?;
        let report = self.begin();
        self.choose_route(self.header().payload_len());
        Ok(StagedFetch {
            received: self.received(false)?,
            settled: self.came_with_header(),
            remote: self,
            waves,
            refetching: false,
            passes: Passes::default(),
            started,
            report,
        })
    }
}

impl StagedFetch {
    /// Fetches the next wave; the runs that pass through the waves' memory are then at `address`, verified. Returns
    /// `None` once all bytes have arrived as they were at one moment: blocks that the source changed are fetched again.
    ///
    /// # Errors
    /// As [`Remote::fetch`]. The receive is over then: neither this nor [`StagedFetch::finish`] must be called any
    /// more, since runs of the wave that failed might never be handed out.
    ///
    /// # Safety
    /// `address` must be that of writable memory of as many bytes as were named when the receive began, which nobody
    /// else uses until this returns.
    pub unsafe fn fetch(&mut self, address: usize) -> Result<Option<Vec<StagedRun>>, Error> {
        if self.waves.is_empty() && !self.settled {
            self.compare_blocks()?;
        }
        // SAFETY: the caller's promise.
        let Some((plan, parts)) = (unsafe { self.waves.next(address) })? else { return Ok(None) };
        let missing = if self.refetching {
            plan.wanted_blocks(0)
        } else {
            self.remote.copy_prefix(&plan)?;
            self.remote.missing(&plan)
        };
        let fetch = PlannedFetch { plan: &plan, missing: &missing, held: &missing, received: &self.received };
        self.remote.transfer(&[fetch], None, &mut self.report)?;
        Ok(Some(parts))
    }

    /// Compares all received blocks with the source's current digests; blocks that differ will be fetched again.
    fn compare_blocks(&mut self) -> Result<(), Error> {
        let plan = Plan::new(Vec::new(), self.remote.header().payload_len())?;
        let fetch = PlannedFetch { plan: &plan, missing: &[], held: &self.remote.blocks(), received: &self.received };
        let differing = self.remote.compare_digests(&[fetch], &mut self.passes, &mut self.report)?.concat();
        self.settled = differing.is_empty();
        self.refetching = true;
        self.waves.repeat(differing);
        Ok(())
    }

    /// Ends the receive once [`StagedFetch::fetch`] has returned `None`; returns the entries that were received
    /// directly into their place.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] when it has not: there are waves that were not fetched, or all of them were not compared
    /// yet.
    pub fn finish(self) -> Result<Arrived, Error> {
        if !self.waves.is_empty() || !self.settled {
            return Err(Error::new(ErrorKind::Invalid, "there are waves that were not fetched"));
        }
        let report = self.remote.complete(self.report, self.started);
        let (arena, offsets) = self.waves.into_memory();
        Ok(Arrived { arena, offsets, report })
    }
}
