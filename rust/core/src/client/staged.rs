//! A receive through a bounded buffer.
//!
//! Entries whose final place the network cannot write to, those of a device for one, come through memory that the
//! caller gives for each wave of blocks and copies from while the next wave comes. Entries with a place of their own
//! are written there as ever.
//!
//! Invariants:
//!
//! * no wave needs more memory than was named at the beginning;
//! * a wave is verified against the digests of the source before it is handed out;
//! * a source that changes its state while it is fetched makes the waves concerned come once more: what the caller has
//!   after the last wave is the state at one moment.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use tensorferry_wire::digest::BLOCK_SIZE;

use super::ledger::BlockLedger;
use super::remote::{Passes, PlannedFetch, ReceiveMemory, Remote};
use super::{Arrived, Destination};
use crate::error::{Error, ErrorKind};
use crate::memory::{Arena, FreshPages};
use crate::payload::{Extent, Plan};
use crate::report::Report;

/// Bytes of an entry that a wave has brought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StagedRun {
    /// The entry's number in the header.
    pub entry: usize,
    /// The first of its bytes that are here.
    pub start: u64,
    /// How many there are.
    pub len: u64,
    /// Where they lie in the memory of the wave.
    pub at: u64,
}

/// An entry that passes through the waves' memory: its number and its bytes of the payload.
#[derive(Clone, Copy, Debug)]
struct StagedEntry {
    entry: usize,
    start: u64,
    end: u64,
}

/// A receive under way.
#[derive(Debug)]
pub struct StagedFetch {
    remote: Remote,
    arena: Arena,
    fresh: Option<Arc<FreshPages>>,
    offsets: Vec<Option<u64>>,
    /// Entries that are received directly into their place, in payload order.
    extents: Vec<Extent>,
    /// Entries that pass through the waves' memory, in payload order.
    passing: Vec<StagedEntry>,
    /// The block at which each wave ends.
    ends: Vec<u64>,
    /// The blocks of the waves that are still to come.
    waiting: VecDeque<(u64, u64)>,
    /// Whether those blocks were fetched before, and differ from the source's current ones.
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
    /// sources turn out to differ. [`ErrorKind::System`] when there is no memory.
    pub fn staged(self, destination: Destination, passing: &[usize], most: u64) -> Result<StagedFetch, Error> {
        let started = Instant::now();
        let entries = self.header().entries();
        if most < BLOCK_SIZE || passing.iter().any(|&entry| entry >= entries.len()) || self.has_several_sources() {
            let message = "waves take one source, entries it has and memory of at least 1 MiB";
            return Err(Error::new(ErrorKind::Invalid, message));
        }
        let mut addresses = destination.addresses();
        let mut through: Vec<_> = passing
            .iter()
            .map(|&entry| StagedEntry { entry, start: entries[entry].start, end: entries[entry].end })
            .filter(|passing| passing.start < passing.end)
            .collect();
        through.sort_unstable_by_key(|passing| passing.start);
        if through.windows(2).any(|pair| pair[0].end > pair[1].start) {
            return Err(Error::new(ErrorKind::Invalid, "an entry that passes through the waves twice"));
        }
        for &entry in passing {
            if let Some(address) = addresses.as_mut().and_then(|addresses| addresses.get_mut(entry)) {
                *address = None;
            }
        }
        let memory = self.prepare_memory(addresses.as_deref(), passing)?;
        let fresh = memory.fresh_pages();
        let ReceiveMemory { arena, offsets, mut extents } = memory;
        extents.retain(|extent| extent.len > 0);
        extents.sort_unstable_by_key(|extent| extent.start);
        let ends = wave_ends(&through, self.header().payload_len(), most);
        let report = self.begin();
        self.choose_route(self.header().payload_len());
        let waiting = std::iter::once(0).chain(ends.iter().copied()).zip(ends.iter().copied()).collect();
        Ok(StagedFetch {
            received: self.received()?,
            settled: self.came_with_header(),
            remote: self,
            arena,
            fresh,
            offsets,
            extents,
            passing: through,
            ends,
            waiting,
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
    /// As [`Remote::fetch`].
    ///
    /// # Safety
    /// `address` must be that of writable memory of as many bytes as were named when the receive began, which nobody
    /// else uses until this returns.
    pub unsafe fn fetch(&mut self, address: usize) -> Result<Option<Vec<StagedRun>>, Error> {
        if self.waiting.is_empty() && !self.settled {
            self.settle()?;
        }
        let Some((first, last)) = self.waiting.pop_front() else { return Ok(None) };
        let payload_len = self.remote.header().payload_len();
        let (start, end) = (first * BLOCK_SIZE, (last * BLOCK_SIZE).min(payload_len));
        let index = self.extents.partition_point(|extent| extent.start + extent.len <= start);
        let standing = self.extents[index..].iter().take_while(|extent| extent.start < end);
        let mut extents: Vec<_> = standing.filter_map(|extent| extent.within(start, end)).collect();
        let mut parts = Vec::new();
        let mut at = 0;
        let index = self.passing.partition_point(|passing| passing.end <= start);
        for passing in self.passing[index..].iter().take_while(|passing| passing.start < end) {
            let (from, to) = (passing.start.max(start), passing.end.min(end));
            #[allow(clippy::cast_possible_truncation, reason = "`wave_ends` lets no wave have more than fits")]
            let place = address + at as usize;
            // SAFETY: the caller promises the memory from `address` on; parts lie in it one behind the other.
            extents.push(unsafe { Extent::new(from, to - from, place) });
            parts.push(StagedRun { entry: passing.entry, start: from - passing.start, len: to - from, at });
            at += to - from;
        }
        let plan = Plan::new(extents, payload_len)?.with_fresh_pages(self.fresh.clone());
        let missing = if self.refetching {
            plan.wanted_blocks(0)
        } else {
            self.remote.copy_prefix(&plan);
            self.remote.missing(&plan)
        };
        let fetch = PlannedFetch { plan: &plan, missing: &missing, held: &missing, received: &self.received };
        self.remote.transfer(&[fetch], &mut self.report)?;
        Ok(Some(parts))
    }

    /// Compares all received blocks with the source's current digests; blocks that differ will be fetched again.
    fn settle(&mut self) -> Result<(), Error> {
        let plan = Plan::new(Vec::new(), self.remote.header().payload_len())?;
        let fetch = PlannedFetch { plan: &plan, missing: &[], held: &self.remote.blocks(), received: &self.received };
        let differing = self.remote.compare_digests(&[fetch], &mut self.passes, &mut self.report)?.concat();
        self.settled = differing.is_empty();
        self.refetching = true;
        for (mut first, end) in differing {
            // A repeated wave has no more blocks than the wave that fetched them first.
            for &stop in &self.ends {
                let stop = stop.min(end);
                if first < stop {
                    self.waiting.push_back((first, stop));
                    first = stop;
                }
            }
        }
        Ok(())
    }

    /// Ends the receive after the last wave; returns the entries that were received directly into their place.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] when there are waves that were not fetched.
    pub fn finish(self) -> Result<Arrived, Error> {
        if !self.waiting.is_empty() || !self.settled {
            return Err(Error::new(ErrorKind::Invalid, "there are waves that were not fetched"));
        }
        let report = self.remote.complete(self.report, self.started);
        Ok(Arrived { arena: self.arena, offsets: self.offsets, report })
    }
}

/// The blocks at which waves end: each has at most `most` bytes that pass through, and all together are the payload.
fn wave_ends(passing: &[StagedEntry], payload_len: u64, most: u64) -> Vec<u64> {
    let mut ends = Vec::new();
    // Bytes of the wave, and of them those of its last block.
    let (mut held, mut in_block, mut last) = (0, 0, None);
    for one in passing {
        let mut at = one.start;
        while at < one.end {
            let block = at / BLOCK_SIZE;
            let stop = one.end.min((block + 1) * BLOCK_SIZE);
            if last.replace(block) != Some(block) {
                in_block = 0;
            }
            if held + (stop - at) > most {
                ends.push(block);
                held = in_block;
            }
            held += stop - at;
            in_block += stop - at;
            at = stop;
        }
    }
    if payload_len > 0 {
        ends.push(payload_len.div_ceil(BLOCK_SIZE));
    }
    ends
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waves_hold_what_they_may_and_together_everything() {
        const MIB: u64 = BLOCK_SIZE;
        let passing = |spans: &[(u64, u64)]| {
            let one = |(entry, &(start, end)): (usize, &(u64, u64))| StagedEntry { entry, start, end };
            spans.iter().enumerate().map(one).collect::<Vec<_>>()
        };
        let whole = passing(&[(0, 10 * MIB + 5)]);
        assert_eq!(wave_ends(&whole, 10 * MIB + 5, 4 * MIB), [4, 8, 11]);
        assert_eq!(wave_ends(&whole, 10 * MIB + 5, 64 * MIB), [11]);
        assert_eq!(wave_ends(&[], 3 * MIB, MIB), [3], "nothing passes: one wave");
        assert!(wave_ends(&[], 0, MIB).is_empty());
        // The second half of a block does not fit any more: all of that block comes with the next wave.
        let half = MIB + (600 << 10);
        let halves = passing(&[(0, MIB), (MIB, half), (half, 2 * MIB), (2 * MIB, 3 * MIB)]);
        assert_eq!(wave_ends(&halves, 3 * MIB, MIB + (700 << 10)), [1, 2, 3]);
        // Small ones, with others between them, and one that begins in the middle of a block.
        let mixed = passing(&[(7, 9), (MIB - 1, MIB + 1), (2 * MIB + 100, 5 * MIB), (9 * MIB, 9 * MIB + 1)]);
        for most in [MIB, MIB + 1, 2 * MIB, 3 * MIB] {
            let ends = wave_ends(&mixed, 12 * MIB, most);
            assert_eq!(ends.last(), Some(&12));
            let mut before = 0;
            for end in ends {
                assert!(before < end, "{most}");
                let bytes: u64 =
                    mixed.iter().map(|p| p.end.min(end * MIB).saturating_sub(p.start.max(before * MIB))).sum();
                assert!(bytes <= most, "{bytes} bytes in a wave of {most}");
                before = end;
            }
        }
    }
}
