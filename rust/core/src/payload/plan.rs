//! Where the bytes of a payload go.
//!
//! A [`Plan`] is a list of [`Extent`]s, runs of payload bytes with the address each goes to. Threads ask it for the
//! destination slices of a range of blocks and receive straight into them; bytes of a block that nobody wants go to a
//! sink, so that its checksum can still be taken.
//!
//! Invariants, established by [`Plan::new`]:
//!
//! * extents are sorted and do not overlap in the payload, so that no byte has two destinations;
//! * extents lie within the payload;
//! * neighbours in the payload and in memory are merged.
//!
//! That no two threads hold slices of the same bytes at once is up to the caller: `payload::queue` gives each range of
//! blocks to one thread at a time.

use std::io::IoSliceMut;
use std::sync::Arc;

use bytes::Bytes;
use tensorferry_wire::digest::{BLOCK_SIZE, BLOCK_SIZES};

use super::runs::BlockRuns;
use crate::error::{Error, ErrorKind};
use crate::memory::{ALIGNMENT, FreshPages, Memory, PAGE, untouched};

/// One run of payload bytes and the address they go to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Extent {
    pub(crate) start: u64,
    pub(crate) len: u64,
    address: usize,
}

impl Extent {
    /// `[start, start + len)` of the payload goes to `address`.
    ///
    /// # Safety
    /// The memory must be writable, and nobody else may use it, until the plan made of this extent is gone.
    pub(crate) unsafe fn new(start: u64, len: u64, address: usize) -> Self {
        Self { start, len, address }
    }

    fn end(&self) -> u64 {
        self.start + self.len
    }

    /// Takes `next` in if that goes on where this ends, in the payload and in memory.
    pub(crate) fn join(&mut self, next: &Self) -> bool {
        let goes_on = self.end() == next.start && self.address as u64 + self.len == next.address as u64;
        if goes_on {
            self.len += next.len;
        }
        goes_on
    }

    /// The part of this extent that lies in `[start, end)` of the payload.
    pub(crate) fn within(&self, start: u64, end: u64) -> Option<Self> {
        let (from, to) = (self.start.max(start), self.end().min(end));
        let len = to.checked_sub(from).filter(|&len| len > 0)?;
        #[allow(clippy::cast_possible_truncation, reason = "an offset into memory that exists")]
        let address = self.address + from.checked_sub(self.start)? as usize;
        Some(Self { start: from, len, address })
    }
}

/// Destinations for a payload, in payload order.
#[derive(Debug)]
pub(crate) struct Plan {
    extents: Vec<Extent>,
    payload_len: u64,
    /// Bytes per block, that is, per checksum.
    block_size: u64,
    /// The pages of destinations that were never touched.
    pub(crate) fresh: Option<Arc<FreshPages>>,
}

impl Plan {
    /// Sorts `extents` and merges neighbours; overlapping or out of range extents are refused.
    pub(crate) fn new(mut extents: Vec<Extent>, payload_len: u64) -> Result<Self, Error> {
        extents.retain(|p| p.len > 0);
        extents.sort_unstable_by_key(|p| p.start);
        let mut merged: Vec<Extent> = Vec::with_capacity(extents.len().min(1 << 16));
        for extent in extents {
            let end = extent.start.checked_add(extent.len).filter(|&end| end <= payload_len);
            let before = merged.last_mut();
            if end.is_none() || before.as_ref().is_some_and(|b| b.end() > extent.start) {
                return Err(Error::new(ErrorKind::Invalid, "two destinations for one byte, or one past the payload"));
            }
            if !before.is_some_and(|before| before.join(&extent)) {
                merged.push(extent);
            }
        }
        Ok(Self { extents: merged, payload_len, block_size: BLOCK_SIZE, fresh: None })
    }

    /// The same plan with checksums for blocks of `block_size` bytes.
    pub(crate) fn with_block_size(self, block_size: u64) -> Self {
        Self { block_size, ..self }
    }

    /// The same plan with `fresh` to be populated where bytes go there.
    pub(crate) fn with_fresh_pages(self, fresh: Option<Arc<FreshPages>>) -> Self {
        Self { fresh, ..self }
    }

    /// The largest block size whose blocks hold at most a 64th more than the wanted bytes; the smallest if none does.
    pub(crate) fn fitting_block_size(&self) -> u64 {
        let wanted: u64 = self.extents.iter().map(|p| p.len).sum();
        let held = |block_size| {
            let (mut bytes, mut end) = (0, 0);
            for extent in &self.extents {
                let (first, last) = (extent.start / block_size, extent.end().div_ceil(block_size));
                bytes += block_size * last.saturating_sub(first.max(end));
                end = last.max(end);
            }
            bytes
        };
        let fits = |block_size: &u64| held(*block_size) <= wanted + wanted / 64;
        BLOCK_SIZES.into_iter().find(fits).unwrap_or(BLOCK_SIZES[BLOCK_SIZES.len() - 1])
    }

    pub(crate) fn block_size(&self) -> u64 {
        self.block_size
    }

    /// How many blocks are received in one go: those of 1 MiB of payload.
    pub(crate) fn stride(&self) -> u64 {
        BLOCK_SIZE / self.block_size
    }

    /// Payload bytes that have a destination.
    pub(crate) fn wanted(&self) -> u64 {
        self.extents.iter().map(|p| p.len).sum()
    }

    /// The blocks that hold at least one wanted byte, as ascending runs `[first, end)`. Runs with at most `gap` bytes
    /// of blocks between them are one.
    pub(crate) fn wanted_blocks(&self, gap: u64) -> Vec<(u64, u64)> {
        let mut runs = BlockRuns::default();
        for extent in &self.extents {
            let run = (extent.start / self.block_size, extent.end().div_ceil(self.block_size));
            runs.push(run, gap / self.block_size);
        }
        runs.into_vec()
    }

    /// The wanted blocks of block `have` and those behind it, as runs.
    pub(crate) fn missing_blocks(&self, have: u64) -> Vec<(u64, u64)> {
        let runs = self.wanted_blocks(0).into_iter();
        runs.map(|(first, end)| (first.max(have), end)).filter(|(first, end)| first < end).collect()
    }

    /// The bytes of whole blocks in `runs`.
    pub(crate) fn held(&self, runs: &[(u64, u64)]) -> u64 {
        runs.iter().map(|(first, end)| end - first).sum::<u64>() * self.block_size
    }

    /// How many blocks the payload has.
    pub(crate) fn block_count(&self) -> u64 {
        self.payload_len.div_ceil(self.block_size)
    }

    /// The first byte of the payload in `block`, and the one behind its last.
    pub(crate) fn block_bounds(&self, block: u64) -> (u64, u64) {
        (block * self.block_size, ((block + 1) * self.block_size).min(self.payload_len))
    }

    /// Calls `with` with the destination slices of payload `[start, end)`; bytes nobody wants go to `sink`, which must
    /// be as long.
    pub(crate) fn with_slices<R>(
        &self,
        start: u64,
        end: u64,
        sink: &mut [u8],
        with: impl FnOnce(&mut [IoSliceMut<'_>]) -> R,
    ) -> R {
        let mut slices = Vec::with_capacity(16);
        let mut sink = sink;
        let mut at = start;
        let mut index = self.extents.partition_point(|p| p.end() <= start);
        #[allow(clippy::cast_possible_truncation, reason = "no length is more than that of the sink")]
        while at < end {
            match self.extents.get(index).filter(|p| p.start < end) {
                Some(extent) if extent.start <= at => {
                    let stop = extent.end().min(end);
                    let address = extent.address + (at - extent.start) as usize;
                    // SAFETY: `Extent::new` promises writable memory of ours alone; ranges of one plan are handed to
                    // one lane at a time and extents do not overlap, so no two slices to the same bytes exist at once.
                    slices.push(IoSliceMut::new(unsafe {
                        std::slice::from_raw_parts_mut(address as *mut u8, (stop - at) as usize)
                    }));
                    at = stop;
                    index += 1;
                }
                next => {
                    let stop = next.map_or(end, |p| p.start);
                    let (gap, rest) = sink.split_at_mut((stop - at) as usize);
                    slices.push(IoSliceMut::new(gap));
                    sink = rest;
                    at = stop;
                }
            }
        }
        with(&mut slices)
    }

    /// Calls `copy` with each part of `bytes`, which are those of the payload from `start` on, that has a destination,
    /// and with that.
    pub(crate) fn scatter(&self, start: u64, bytes: &[u8], mut copy: impl FnMut(&[u8], &mut [u8])) {
        let end = start + bytes.len() as u64;
        let index = self.extents.partition_point(|p| p.end() <= start);
        for part in self.extents[index..].iter().map_while(|extent| extent.within(start, end)) {
            #[allow(clippy::cast_possible_truncation, reason = "no more than `bytes`")]
            let (at, len) = ((part.start - start) as usize, part.len as usize);
            // SAFETY: as in `with_slices`.
            copy(&bytes[at..at + len], unsafe { std::slice::from_raw_parts_mut(part.address as *mut u8, len) });
        }
    }

    /// Sends bytes of wanted blocks that nobody wants to `spare`, which has room for [`Plan::spare_len`] bytes: all bytes
    /// of these blocks have a destination then.
    ///
    /// # Safety
    /// As for [`Extent::new`], of all of `spare`.
    pub(crate) unsafe fn fill_gaps(&mut self, spare: &mut [u8]) -> Result<(), Error> {
        let (mut extents, mut rest) = (self.extents.clone(), spare);
        for (start, end) in self.gaps() {
            #[allow(clippy::cast_possible_truncation, reason = "no more than the length of `spare`")]
            let (gap, behind) = rest.split_at_mut((end - start) as usize);
            // SAFETY: a part of `spare`, for which the caller promises it.
            extents.push(unsafe { Extent::new(start, end - start, gap.as_mut_ptr() as usize) });
            rest = behind;
        }
        self.extents = Self::new(extents, self.payload_len)?.extents;
        Ok(())
    }

    /// How many bytes of wanted blocks have no destination.
    pub(crate) fn spare_len(&self) -> u64 {
        self.gaps().map(|(start, end)| end - start).sum()
    }

    /// The bytes of wanted blocks that have no destination, as runs.
    fn gaps(&self) -> impl Iterator<Item = (u64, u64)> {
        let bounds = |(first, end): (u64, u64)| (self.block_bounds(first).0, self.block_bounds(end - 1).1);
        self.wanted_blocks(0).into_iter().map(bounds).flat_map(|(start, end)| {
            let first = self.extents.partition_point(|extent| extent.end() <= start);
            let within = self.extents[first..].iter().take_while(move |extent| extent.start < end);
            let mut at = start;
            let before = within.map(|extent| (extent.start, extent.end())).chain([(end, end)]);
            before.map(move |(next, behind)| (std::mem::replace(&mut at, behind), next)).filter(|gap| gap.0 < gap.1)
        })
    }

    /// All of the payload as memory to be read, in order: destinations, and bytes that have none from `prefix`, which is
    /// the beginning of the payload, or zeros in the place of bytes that do not come. `None` if memory cannot be so long.
    ///
    /// # Safety
    /// The memory may be read only while this plan exists, and no byte of it while it is received.
    pub(crate) unsafe fn readable(&self, prefix: &Bytes) -> Option<Vec<Memory>> {
        let mut parts = Vec::with_capacity(self.extents.len() + 2);
        let starts = self.extents.iter().map(|extent| extent.start).chain([self.payload_len]);
        let ends = std::iter::once(0).chain(self.extents.iter().map(Extent::end));
        let known = prefix.len() as u64;
        let longest = starts.zip(ends).map(|(start, end)| start.saturating_sub(end.max(known))).max();
        let absent = untouched(longest.unwrap_or(0)).ok()?;
        let gap = |start: u64, end: u64| {
            let middle = known.clamp(start, end);
            let here = usize::try_from(start).ok()?..usize::try_from(middle).ok()?;
            let here = if start < middle { prefix.slice(here) } else { Bytes::new() };
            let rest = absent.slice(..usize::try_from(end - middle).ok()?);
            Some([Memory::from(here), Memory::from(rest)])
        };
        let mut at = 0;
        for extent in &self.extents {
            if at < extent.start {
                parts.extend(gap(at, extent.start)?);
            }
            // SAFETY: destinations are memory until the plan is gone; the caller promises the rest.
            parts.push(unsafe { Memory::borrowed(extent.address, usize::try_from(extent.len).ok()?) });
            at = extent.end();
        }
        if at < self.payload_len {
            parts.extend(gap(at, self.payload_len)?);
        }
        Some(parts)
    }

    /// Populates the fresh pages that payload `[start, end)` goes to, before the bytes arrive.
    pub(crate) fn populate(&self, start: u64, end: u64) {
        let Some(fresh) = &self.fresh else { return };
        let index = self.extents.partition_point(|p| p.end() <= start);
        // Many extents may share a page: one call for as many as follow one another.
        let mut pages = 0..0;
        for extent in self.extents[index..].iter().take_while(|p| p.start < end) {
            let (first, last) = (extent.start.max(start), extent.end().min(end));
            #[allow(clippy::cast_possible_truncation, reason = "offsets into memory that exists")]
            let (address, len) = (extent.address + (first - extent.start) as usize, (last - first) as usize);
            let (low, high) = (address & !(PAGE - 1), (address + len).next_multiple_of(PAGE));
            if (pages.start..=pages.end).contains(&low) {
                pages.end = high.max(pages.end);
            } else if last - first > ALIGNMENT {
                fresh.populate(pages.clone());
                pages = low..high;
            }
            // A scalar lies apart from what is around it in the payload, and a call would cost what a fault does.
        }
        fresh.populate(pages);
    }
}

#[cfg(test)]
mod tests;
