//! Contiguous bytes that lie in several regions of memory, addressed by their offset.
//!
//! A server sends a container as if it were one buffer, while its bytes are those of thousands of tensors. [`Segments`]
//! finds the regions of a range by binary search and hands them out in order, without copying.
//!
//! Invariants: no region is empty, `starts` is strictly ascending, and the regions follow one another without a gap.

use bytes::Bytes;

use crate::memory::{Memory, Region};

/// Contiguous bytes in memory pieces, addressed by offset.
pub(crate) struct Segments {
    starts: Vec<u64>,
    regions: Vec<Region>,
    len: u64,
    /// The owners of some of the regions; others belong to the publication's owner.
    _owned: Vec<Bytes>,
}

impl Segments {
    /// The bytes of `parts` in order, with whatever owns them.
    pub(crate) fn new(mut parts: Vec<Memory>) -> Self {
        let owned = parts.iter_mut().filter_map(Memory::take_owned).collect();
        Self::over(parts.iter().map(Memory::region), owned)
    }

    /// The `regions` in order; `owned` is the memory of those that have no other owner.
    pub(super) fn over(regions: impl Iterator<Item = Region>, owned: Vec<Bytes>) -> Self {
        let (mut starts, mut taken, mut len) = (Vec::new(), Vec::new(), 0);
        for region in regions.filter(|region| region.len() > 0) {
            starts.push(len);
            taken.push(region);
            len += region.len() as u64;
        }
        Self { starts, regions: taken, len, _owned: owned }
    }

    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// From now on the byte at `offset`, of a region of borrowed memory, is at `address`, and those behind it follow;
    /// those before it must not be read any more.
    pub(crate) fn place(&mut self, offset: u64, address: usize) {
        let index = self.starts.partition_point(|&start| start <= offset).saturating_sub(1);
        let inside = usize::try_from(offset - self.starts[index]).unwrap_or(usize::MAX);
        self.regions[index] = self.regions[index].placed(inside, address);
    }

    /// Calls `visit` with the regions that make up `[start, end)`, in order, until it returns false.
    pub(crate) fn visit(&self, start: u64, end: u64, mut visit: impl FnMut(Region) -> bool) {
        let mut at = start;
        let mut index = self.starts.partition_point(|&s| s <= start).saturating_sub(1);
        while at < end && index < self.regions.len() {
            let (first, region) = (self.starts[index], self.regions[index]);
            let last = first + region.len() as u64;
            let stop = end.min(last);
            if at < stop {
                #[allow(
                    clippy::cast_possible_truncation,
                    reason = "differences within one region fit usize, since its length is one"
                )]
                let part = region.slice((at - first) as usize, (stop - first) as usize);
                if !visit(part) {
                    return;
                }
                at = stop;
            }
            index += 1;
        }
    }
}
