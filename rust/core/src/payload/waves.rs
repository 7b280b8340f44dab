//! Entries that pass through a bounded buffer, wave by wave.
//!
//! Entries whose final place bytes cannot be written to, those of a device for one, come through memory that the caller
//! gives for each wave of blocks. Entries with a place of their own are written there as ever.
//!
//! Invariant: no wave needs more memory than was named at the beginning.

use std::collections::VecDeque;
use std::sync::Arc;

use tensorferry_wire::container::Header;
use tensorferry_wire::digest::BLOCK_SIZE;

use super::{Destination, Extent, Plan, ReceiveMemory};
use crate::error::{Error, ErrorKind};
use crate::memory::{Arena, ArenaPool, FreshPages};

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

/// The waves of a receive, of which each has a plan.
#[derive(Debug)]
pub(crate) struct Waves {
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
    payload_len: u64,
}

impl Waves {
    /// Waves over the first `payload_len` bytes of payload, in which the entries numbered in `passing` go by way of
    /// memory of `most` bytes, at least one MiB, that is given for each wave; those numbered in `elsewhere`, all of
    /// which must be there, are left out.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] for an entry that the header does not have or that passes twice, for too little memory,
    /// and for not as many addresses as entries; [`ErrorKind::System`] when there is no memory for the others.
    pub(crate) fn new(
        (header, payload_len): (&Header, u64),
        destination: Destination,
        (passing, elsewhere): (&[usize], &[usize]),
        most: u64,
        pool: Option<Arc<ArenaPool>>,
    ) -> Result<Self, Error> {
        let entries = header.entries();
        if most < BLOCK_SIZE || passing.iter().any(|&entry| entry >= entries.len()) {
            let message = "waves take entries that there are and memory of at least 1 MiB";
            return Err(Error::new(ErrorKind::Invalid, message));
        }
        let mut through: Vec<_> = passing
            .iter()
            .map(|&entry| StagedEntry { entry, start: entries[entry].start, end: entries[entry].end })
            .filter(|passing| passing.start < passing.end)
            .collect();
        through.sort_unstable_by_key(|passing| passing.start);
        if through.windows(2).any(|pair| pair[0].end > pair[1].start) {
            return Err(Error::new(ErrorKind::Invalid, "an entry that passes through the waves twice"));
        }
        let without = [passing, elsewhere].concat();
        let memory = ReceiveMemory::prepare(header, destination.addresses().as_deref(), &without, pool)?;
        let ReceiveMemory { arena, offsets, mut extents } = memory;
        extents.retain(|extent| extent.len > 0);
        extents.sort_unstable_by_key(|extent| extent.start);
        let ends = wave_ends(&through, payload_len, most);
        let waiting = std::iter::once(0).chain(ends.iter().copied()).zip(ends.iter().copied()).collect();
        let fresh = arena.fresh_pages().cloned();
        Ok(Self { arena, fresh, offsets, extents, passing: through, ends, waiting, payload_len })
    }

    /// Whether every wave was taken.
    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Takes the next wave from the list: its plan, and the runs of it that pass through the memory at `address`; `None`
    /// after the last one.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] when two destinations overlap.
    ///
    /// # Safety
    /// `address` must be that of writable memory of as many bytes as were named at the beginning, which nobody else
    /// uses until the plan is gone.
    pub(crate) unsafe fn next(&mut self, address: usize) -> Result<Option<(Plan, Vec<StagedRun>)>, Error> {
        let Some((first_block, end_block)) = self.waiting.pop_front() else { return Ok(None) };
        let (start, end) = (first_block * BLOCK_SIZE, (end_block * BLOCK_SIZE).min(self.payload_len));
        let index = self.extents.partition_point(|extent| extent.start + extent.len <= start);
        let direct = self.extents[index..].iter().take_while(|extent| extent.start < end);
        let mut extents: Vec<_> = direct.filter_map(|extent| extent.within(start, end)).collect();
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
        let plan = Plan::new(extents, self.payload_len)?.with_fresh_pages(self.fresh.clone());
        Ok(Some((plan, parts)))
    }

    /// Has the blocks of `runs` come once more, in waves with no more blocks than those that brought them first.
    pub(crate) fn repeat(&mut self, runs: Vec<(u64, u64)>) {
        for (mut first, end) in runs {
            for &stop in &self.ends {
                let stop = stop.min(end);
                if first < stop {
                    self.waiting.push_back((first, stop));
                    first = stop;
                }
            }
        }
    }

    /// The arena, and where the entries lie in it that were received directly into their place.
    pub(crate) fn into_memory(self) -> (Arena, Vec<Option<u64>>) {
        (self.arena, self.offsets)
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
