//! Where entries go in an arena.

use super::PAGE;

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
    fn add(&mut self, nbytes: u64) -> u64 {
        if nbytes >= REGION {
            self.close();
        }
        let place = self.len;
        self.len = (place + nbytes).next_multiple_of(ALIGNMENT);
        if self.len - self.ends.last().copied().unwrap_or(0) >= REGION {
            self.close();
        }
        place
    }

    /// Ends the region under way, at a page.
    fn close(&mut self) {
        self.len = self.len.next_multiple_of(PAGE as u64);
        if self.len > self.ends.last().copied().unwrap_or(0) {
            self.ends.push(self.len);
        }
    }
}

impl ArenaLayout {
    /// A place for an entry of `nbytes` bytes, to be passed to [`ArenaLayout::offset`] when all have one. Entries that
    /// follow one another here are neighbours, but for scalars, which come behind all others.
    pub(crate) fn add(&mut self, nbytes: u64) -> u64 {
        if nbytes > SCALAR { self.large.add(nbytes) } else { self.scalars.add(nbytes) }
    }

    /// Ends the layout: to be called once, after the last [`ArenaLayout::add`] and before the first
    /// [`ArenaLayout::offset`].
    pub(crate) fn close(&mut self) {
        self.large.close();
        self.scalars.close();
    }

    /// Where an entry of `nbytes` bytes begins in the arena, whose `place` [`ArenaLayout::add`] returned.
    pub(crate) fn offset(&self, place: u64, nbytes: u64) -> u64 {
        if nbytes > SCALAR { place } else { self.large.len + place }
    }
}
