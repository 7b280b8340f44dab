//! The memory of one receive.
//!
//! An [`Arena`] is laid out before the first byte arrives: [`ArenaLayout`] assigns a place to each entry, and the arena
//! makes one mapping, or two, for all of them. Tensors are then laid over it without a copy.
//!
//! Invariants:
//!
//! * every entry starts at a multiple of [`ALIGNMENT`] and lies within one region;
//! * a region consists of whole pages, and its pages go back to the system when it has no owner any more, so that one
//!   surviving counter of an optimizer does not keep gigabytes of parameters; memory that a pool keeps stays whole;
//! * scalars lie behind all other entries, and never in memory that a pool keeps;
//! * while a receive fills the arena, each byte has exactly one writer (`payload::plan` sees to that); afterwards Rust
//!   does not write to it any more.

use std::fmt;
use std::sync::Arc;

use super::arena_layout::{ArenaLayout, Regions};
use super::mapping::{Held, Mapping};
use super::{ArenaPool, FreshPages, check_machine_has};
use crate::error::{Error, ErrorKind};

/// The memory behind an arena, or behind a part of it.
struct ArenaMemory {
    // Taken only by Drop.
    mapping: Option<Mapping>,
    pool: Option<Arc<ArenaPool>>,
    /// Whether pages go back to the system before all of it does: not where it is kept with its pages.
    in_parts: bool,
}

impl Drop for ArenaMemory {
    fn drop(&mut self) {
        if let (Some(pool), Some(mapping)) = (&self.pool, self.mapping.take_if(|m| m.usable > 0)) {
            pool.put(mapping);
        }
    }
}

/// Whole pages of an arena, which go back to the system when they have no owner any more.
struct ArenaRegion {
    backing: Arc<ArenaMemory>,
    address: usize,
    len: usize,
}

impl Drop for ArenaRegion {
    fn drop(&mut self) {
        // The last region goes with the mapping.
        if self.backing.in_parts && self.len > 0 && Arc::strong_count(&self.backing) > 1 {
            // SAFETY: whole pages inside an anonymous mapping of our own that `backing` keeps; nobody holds what lies
            // in them any more, and later receives never see them.
            unsafe { libc::madvise(self.address as *mut libc::c_void, self.len, libc::MADV_DONTNEED) };
        }
    }
}

/// Keeps a part of an arena, and with it no more than the region that part lies in; of memory that goes back to a pool,
/// all of it. Cloning and dropping it may happen on any thread; the last one that is dropped gives the pages back.
#[derive(Clone)]
pub struct Hold(#[allow(dead_code, reason = "only to be dropped")] Arc<ArenaRegion>);

impl fmt::Debug for Hold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hold").field("address", &self.0.address).field("len", &self.0.len).finish()
    }
}

/// The memory of one receive: regions, each of which lives as long as the arena or any [`Hold`] on it
/// ([`Arena::hold`]).
///
/// ```
/// use tensorferry_core::Arena;
///
/// # fn main() -> Result<(), tensorferry_core::Error> {
/// let (arena, offsets) = Arena::sparse(&[4, 3 << 20])?;
/// let (address, hold) = arena.hold(offsets[1], 3 << 20).expect("it was laid out for this");
/// drop(arena);
/// // The large entry is still there; the scalar beside it is not.
/// assert_eq!(address % 64, 0);
/// drop(hold);
/// # Ok(())
/// # }
/// ```
pub struct Arena {
    regions: Vec<Arc<ArenaRegion>>,
    /// Where each region ends in the arena.
    ends: Vec<u64>,
    /// None where no page of it has to be taken from the system: it has them already, or there is nothing to fill.
    fresh: Option<Arc<FreshPages>>,
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Arena").field("len", &self.len()).field("fresh", &self.fresh.is_some()).finish_non_exhaustive()
    }
}

impl Arena {
    /// Memory for `len` bytes, one region: kept by `pool` if it has some that fits, or made for it, with whatever bytes
    /// are in that, else fresh zeros; 0 bytes take none. From 2 MiB on fresh memory begins where a huge page can. It
    /// goes to `pool` when it is dropped.
    ///
    /// # Errors
    /// [`ErrorKind::System`] when the machine has not so much memory, or the system refuses a mapping of that size.
    pub fn new(len: u64, pool: Option<Arc<ArenaPool>>) -> Result<Self, Error> {
        let large = Regions { len, ends: Vec::from_iter((len > 0).then_some(len)) };
        Self::of(&ArenaLayout { large, scalars: Regions::default() }, pool)
    }

    /// Memory for storages of `sizes` bytes, and where each begins in it: fresh zeros, of which the system gives no
    /// page before it is touched.
    ///
    /// # Errors
    /// [`ErrorKind::System`] when the machine has less memory than all of them together, or the system refuses a
    /// mapping of that size.
    pub fn sparse(sizes: &[u64]) -> Result<(Self, Vec<u64>), Error> {
        let total = sizes.iter().try_fold(0_u64, |sum, &n| sum.checked_add(n)).filter(|&n| n < 1 << 62);
        check_machine_has(total.unwrap_or(u64::MAX), "the memory that the source's views look into")?;
        let mut places = ArenaLayout::default();
        let mut offsets: Vec<_> = sizes.iter().map(|&nbytes| places.add(nbytes)).collect();
        places.close();
        for (offset, &nbytes) in offsets.iter_mut().zip(sizes) {
            *offset = places.offset(*offset, nbytes);
        }
        let mut arena = Self { regions: Vec::new(), ends: Vec::new(), fresh: None };
        let len = places.large.len + places.scalars.len;
        arena.append(&places.large, Mapping::new(len, false).map_err(|e| refused(len, e))?, None, &places.scalars);
        Ok((arena, offsets))
    }

    /// Memory for `places`. Memory of a pool holds no scalars: a tensor over a scalar would keep all of it in use.
    pub(crate) fn of(places: &ArenaLayout, pool: Option<Arc<ArenaPool>>) -> Result<Self, Error> {
        let ArenaLayout { large, scalars } = places;
        let len = large.len + scalars.len;
        check_machine_has(len, "the received state")?;
        let (mut arena, none) = (Self { regions: Vec::new(), ends: Vec::new(), fresh: None }, Regions::default());
        let apart = pool.is_some() && large.len > 0;
        let first = if apart { large.len } else { len };
        let bytes = usize::try_from(first).map_err(|_| refused(first, std::io::ErrorKind::OutOfMemory.into()))?;
        let touched = pool.as_ref().and_then(|pool| pool.take(bytes).or_else(|| pool.make(bytes)));
        let mapping = if let Some(mapping) = touched {
            mapping
        } else {
            let mapping = Mapping::new(first, true).map_err(|e| refused(first, e))?;
            let start = mapping.start.as_ptr() as usize;
            arena.fresh = (bytes > 0).then(|| Arc::new(FreshPages::new(start..start + bytes)));
            mapping
        };
        arena.append(large, mapping, pool, if apart { &none } else { scalars });
        if apart {
            let mapping = Mapping::new(scalars.len, true).map_err(|e| refused(scalars.len, e))?;
            arena.append(&none, mapping, None, scalars);
        }
        Ok(arena)
    }

    /// Adds the regions of `first` and those of `then` behind them, which lie in `mapping`.
    fn append(&mut self, first: &Regions, mapping: Mapping, pool: Option<Arc<ArenaPool>>, then: &Regions) {
        let start = mapping.start.as_ptr() as usize;
        let kept = pool.as_ref().is_some_and(|pool| mapping.usable <= pool.limit);
        let in_parts = !kept && matches!(mapping.held, Held::Own { .. });
        let backing = Arc::new(ArenaMemory { mapping: Some(mapping), pool, in_parts });
        let (base, mut at) = (self.len(), 0);
        for end in first.ends.iter().copied().chain(then.ends.iter().map(|end| first.len + end)) {
            #[allow(clippy::cast_possible_truncation, reason = "offsets into a mapping that exists")]
            let (address, len) = (start + at as usize, (end - at) as usize);
            self.regions.push(Arc::new(ArenaRegion { backing: Arc::clone(&backing), address, len }));
            self.ends.push(base + end);
            at = end;
        }
    }

    /// The pages of this memory if it was never touched: to be populated before it is filled.
    pub(crate) fn fresh_pages(&self) -> Option<&Arc<FreshPages>> {
        self.fresh.as_ref()
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.ends.last().copied().unwrap_or(0)
    }

    /// Whether the arena holds nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The region that `[at, at + len)` lies in, and the address of its first byte. Nothing for no bytes, nor for such
    /// as lie in several regions, as no entry does.
    fn find(&self, at: u64, len: u64) -> Option<(&Arc<ArenaRegion>, usize)> {
        let index = self.ends.partition_point(|&end| end <= at);
        let region = self.regions.get(index)?;
        let before = index.checked_sub(1).map_or(0, |before| self.ends[before]);
        if len == 0 || at.checked_add(len)? > self.ends[index] {
            return None;
        }
        Some((region, region.address + usize::try_from(at - before).ok()?))
    }

    /// The address of an entry of `len` bytes at `at`; any number for one of none.
    pub(crate) fn address_of(&self, at: u64, len: u64) -> usize {
        self.find(at, len).map_or(1, |(_, address)| address)
    }

    /// The address of an entry of `len` bytes at `at`, and a [`Hold`] that keeps it when the arena is gone; `None` if
    /// no entry of this length can be there.
    #[must_use]
    pub fn hold(&self, at: u64, len: u64) -> Option<(usize, Hold)> {
        let (region, address) = self.find(at, len)?;
        Some((address, Hold(Arc::clone(region))))
    }

    /// The bytes of an entry of `len` bytes at `at`; none where no entry of so many bytes can be.
    #[must_use]
    pub fn bytes(&self, at: u64, len: usize) -> &[u8] {
        let Some((_, address)) = self.find(at, len as u64) else { return &[] };
        // SAFETY: the region is inside a mapping that is readable and initialised (zeroed by the kernel, or as
        // `ArenaPool::with_allocator` has it), which lives as long as the region.
        unsafe { std::slice::from_raw_parts(address as *const u8, len) }
    }
}

fn refused(len: u64, cause: std::io::Error) -> Error {
    Error::caused(ErrorKind::System, format!("cannot map {len} bytes for the received state"), cause)
}

#[cfg(test)]
mod tests {
    use super::super::ALIGNMENT;
    use super::super::machine::memory_limit;
    use super::super::mapping::resident;
    use super::*;

    #[test]
    fn entries_lie_in_regions_whose_pages_go_with_the_last_hold() {
        const MIB: u64 = 1 << 20;
        let sizes = [3 * MIB, 4, MIB + 5, 700 << 10, 700 << 10, 0, 64, 100];
        let mut places = ArenaLayout::default();
        let at: Vec<_> = sizes.iter().map(|&n| places.add(n)).collect();
        places.close();
        let at: Vec<_> = at.into_iter().zip(sizes).map(|(at, n)| places.offset(at, n)).collect();
        let mut spans: Vec<_> = at.iter().zip(sizes).map(|(&at, n)| (at, at + n)).collect();
        spans.sort_unstable();
        assert!(spans.windows(2).all(|two| two[0].1 <= two[1].0) && at.iter().all(|at| at % ALIGNMENT == 0));
        assert!(at[1] > at[7] && at[6] > at[7], "scalars lie behind the others");
        let arena = Arena::of(&places, None).unwrap();
        assert!(arena.hold(at[5], 0).is_none() && arena.hold(at[0], 6 * MIB).is_none());
        let holds: Vec<_> = at.iter().zip(sizes).map(|(&at, n)| arena.hold(at, n)).collect();
        let pages = Arc::clone(arena.fresh_pages().unwrap());
        for (address, _) in holds.iter().flatten() {
            pages.populate(address & !4095..(address & !4095) + 4096);
        }
        drop(arena);
        let [first, scalar, odd, one, two, _, other, last] = holds.try_into().unwrap();
        let (first, one) = (first.unwrap(), one.unwrap());
        assert!(resident(first.0, 3 << 20) > 0 && resident(one.0 & !4095, 4096) > 0);
        let (address, shared) = (first.0, one.0 & !4095);
        drop((first, one));
        assert_eq!(resident(address, 3 << 20), 0, "its own pages");
        assert!(resident(shared, 4096) > 0, "the region of another that is held");
        drop((two, odd, last));
        let scalar = scalar.unwrap();
        assert!(resident(scalar.0 & !4095, 4096) > 0);
        drop(other);
        assert!(resident(scalar.0 & !4095, 4096) > 0);
    }

    #[test]
    fn scalars_do_not_hold_what_a_pool_keeps() {
        let pool = ArenaPool::new(64 << 20);
        let mut places = ArenaLayout::default();
        let (large, small) = (places.add(9 << 20), places.add(4));
        places.close();
        let arena = Arena::of(&places, Some(Arc::clone(&pool))).unwrap();
        let held = arena.hold(places.offset(small, 4), 4).unwrap();
        assert!(arena.hold(large, 9 << 20).is_some());
        drop(arena);
        assert_eq!(pool.held(), 9 << 20);
        drop(held);
        assert_eq!(pool.held(), 9 << 20);
    }

    #[test]
    fn announced_storages_are_refused_together_and_take_no_pages() {
        let has = memory_limit().unwrap();
        assert!(Arena::sparse(&[has / 2, has / 2, has / 2]).is_err());
        assert!(Arena::sparse(&[u64::MAX, 2]).is_err());
        let (arena, at) = Arena::sparse(&[has / 4, 0, 100]).unwrap();
        let (address, _hold) = arena.hold(at[0], has / 4).unwrap();
        assert_eq!(resident(address, 64 << 20), 0);
    }
}
