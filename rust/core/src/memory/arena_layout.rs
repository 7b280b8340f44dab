//! Where entries go in an arena.

use rustix::param::page_size;

/// Where each tensor starts in an arena: torch's own CPU allocator aligns to the same.
pub(crate) const ALIGNMENT: u64 = 64;

/// Entries up to this size lie apart from all others: an optimizer's counters outlive the parameters beside them.
const SCALAR: u64 = ALIGNMENT;

/// Small entries share a region until they have so many bytes. One that is held holds no more than that, and entries of
/// that size and more have regions of their own.
const REGION: u64 = 1 << 20;

/// Where entries go in an arena, in bytes from its beginning, and which of its pages go back to the system together.
#[derive(Debug, Default)]
pub(crate) struct ArenaLayout {
    pub(super) large: Regions,
    pub(super) scalars: Regions,
}

/// Regions one behind the other, each of whole pages.
#[derive(Debug, Default)]
pub(super) struct Regions {
    pub(super) len: u64,
    pub(super) ends: Vec<u64>,
}

impl Regions {
    /// A place for `nbytes` bytes behind all before, in a region of their own if they are many.
    fn add(&mut self, nbytes: u64, page: usize) -> u64 {
        if nbytes >= REGION {
            self.close(page);
        }
        let place = self.len;
        self.len = (place + nbytes).next_multiple_of(ALIGNMENT);
        if self.len - self.ends.last().copied().unwrap_or(0) >= REGION {
            self.close(page);
        }
        place
    }

    /// Ends the region under way, at a page.
    fn close(&mut self, page: usize) {
        self.len = self.len.next_multiple_of(page as u64);
        if self.len > self.ends.last().copied().unwrap_or(0) {
            self.ends.push(self.len);
        }
    }
}

impl ArenaLayout {
    /// A place for an entry of `nbytes` bytes, to be passed to [`ArenaLayout::offset`] when all have one. Entries that
    /// follow one another here are neighbours, but for scalars, which come behind all others.
    pub(crate) fn add(&mut self, nbytes: u64) -> u64 {
        let regions = if nbytes > SCALAR { &mut self.large } else { &mut self.scalars };
        regions.add(nbytes, page_size())
    }

    /// Ends the layout: to be called once, after the last [`ArenaLayout::add`] and before the first
    /// [`ArenaLayout::offset`].
    pub(crate) fn close(&mut self) {
        self.large.close(page_size());
        self.scalars.close(page_size());
    }

    /// Where an entry of `nbytes` bytes begins in the arena, whose `place` [`ArenaLayout::add`] returned.
    pub(crate) fn offset(&self, place: u64, nbytes: u64) -> u64 {
        if nbytes > SCALAR { place } else { self.large.len + place }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_page_belongs_to_two_regions_however_large_pages_are() {
        for page in [4 << 10, 16 << 10, 64 << 10] {
            let mut regions = Regions::default();
            for nbytes in [REGION + 1, 1, 5000, REGION - 1, 64, 3 * REGION, 100] {
                regions.add(nbytes, page);
            }
            regions.close(page);
            let whole = regions.ends.iter().all(|end| end.is_multiple_of(page as u64));
            assert!(regions.ends.len() > 3 && whole, "{page}: {:?}", regions.ends);
        }
    }
}
