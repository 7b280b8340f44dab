//! Memory that is kept from one receive for the next.
//!
//! A receive into fresh memory is bound by page faults, not by the network (docs/explanation/performance.md). An
//! [`ArenaPool`] keeps mappings with their pages instead of unmapping them.
//!
//! Invariants:
//!
//! * the pool never keeps more bytes than its limit; the mapping kept longest goes first;
//! * a mapping is given out only to a request of at least half its size, so that small receives do not hold large
//!   memory;
//! * mappings are unmapped outside the lock, since that takes a while.

use std::any::Any;
use std::collections::VecDeque;
use std::fmt;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex};

use super::mapping::{Held, Mapping};
use crate::sync::Locked;

/// Memory that an allocator has provided for a pool.
pub struct Allocation {
    /// Address of the first byte.
    pub address: usize,
    /// Keeps the memory until it is dropped, which may happen on any thread.
    pub owner: Box<dyn Any + Send + Sync>,
}

/// Provides memory of the given length, or `None` to leave it to the pool.
type Allocator = dyn Fn(usize) -> Option<Allocation> + Send + Sync;

/// Memory that earlier receives have released, kept for later ones: it has its pages already, and page faults, not the
/// network, bound a receive into fresh memory (docs/explanation/performance.md).
///
/// ```
/// use std::sync::Arc;
/// use tensorferry_core::{Arena, ArenaPool};
///
/// # fn main() -> Result<(), tensorferry_core::Error> {
/// let pool = ArenaPool::new(64 << 20);
/// drop(Arena::new(8 << 20, Some(Arc::clone(&pool)))?);
/// assert_eq!(pool.held(), 8 << 20);
/// let again = Arena::new(8 << 20, Some(Arc::clone(&pool)))?;
/// assert_eq!((again.len(), pool.held()), (8 << 20, 0));
/// # Ok(())
/// # }
/// ```
pub struct ArenaPool {
    pub(super) limit: usize,
    /// In the order in which they were released, the oldest first.
    kept: Mutex<VecDeque<Mapping>>,
    allocator: Option<Box<Allocator>>,
}

impl fmt::Debug for ArenaPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool").field("limit", &self.limit).field("held", &self.held()).finish_non_exhaustive()
    }
}

impl ArenaPool {
    /// A pool that keeps at most `limit` bytes. A larger mapping is never kept; with a limit of 0 none is.
    #[must_use]
    pub fn new(limit: usize) -> Arc<Self> {
        Arc::new(Self { limit, kept: Mutex::default(), allocator: None })
    }

    /// A pool that keeps at most `limit` bytes and asks `allocator` for memory that it may keep: pinned memory, which a
    /// device copies from faster, for one. Where `allocator` returns `None`, memory is mapped as without one.
    ///
    /// # Safety
    /// An [`Allocation`] must have as many initialised bytes as were asked for, which nobody else touches until its
    /// owner is dropped.
    #[must_use]
    pub unsafe fn with_allocator(
        limit: usize,
        allocator: impl Fn(usize) -> Option<Allocation> + Send + Sync + 'static,
    ) -> Arc<Self> {
        Arc::new(Self { limit, kept: Mutex::default(), allocator: Some(Box::new(allocator)) })
    }

    /// Memory of `len` bytes from the allocator, if the pool could keep so much.
    pub(super) fn make(&self, len: usize) -> Option<Mapping> {
        let allocator = self.allocator.as_ref().filter(|_| (1..=self.limit).contains(&len))?;
        let Allocation { address, owner } = allocator(len)?;
        let start = NonNull::new(address as *mut u8)?;
        Some(Mapping { start, usable: len, held: Held::Allocation { _owner: owner } })
    }

    /// Bytes kept now.
    #[must_use]
    pub fn held(&self) -> usize {
        self.kept.locked().iter().map(|m| m.usable).sum()
    }

    /// The smallest mapping that holds `len` bytes and is not much larger.
    pub(super) fn take(&self, len: usize) -> Option<Mapping> {
        let mut kept = self.kept.locked();
        let fits = |m: &Mapping| m.usable >= len && m.usable / 2 <= len;
        let best = (0..kept.len()).filter(|&i| fits(&kept[i])).min_by_key(|&i| kept[i].usable)?;
        kept.remove(best)
    }

    /// Takes `mapping` back, and releases the oldest ones as long as there is more than the limit.
    pub(super) fn put(&self, mapping: Mapping) {
        if mapping.usable > self.limit {
            return;
        }
        // Memory that must go is unmapped after the lock is released, since that takes a while.
        let mut gone = Vec::new();
        let mut kept = self.kept.locked();
        kept.push_back(mapping);
        let mut held: usize = kept.iter().map(|m| m.usable).sum();
        while held > self.limit
            && let Some(oldest) = kept.pop_front()
        {
            held -= oldest.usable;
            gone.push(oldest);
        }
        drop(kept);
    }
}

#[cfg(test)]
mod tests {
    use super::super::Arena;
    use super::*;

    #[test]
    fn memory_is_kept_and_given_again() {
        let pool = ArenaPool::new(64 << 20);
        let first = Arena::new(9 << 20, Some(Arc::clone(&pool))).unwrap();
        let address = first.hold(0, 1).unwrap().0;
        assert!(first.fresh_pages().is_some());
        assert_eq!(pool.held(), 0);
        drop(first);
        assert_eq!(pool.held(), 9 << 20);
        let again = Arena::new(8 << 20, Some(Arc::clone(&pool))).unwrap();
        assert_eq!((again.address_of(0, 1), again.len(), again.fresh_pages().is_some()), (address, 8 << 20, false));
        assert!(Arena::new(8 << 20, Some(pool)).unwrap().fresh_pages().is_some());
    }

    #[test]
    fn a_pool_keeps_no_more_than_it_may_and_gives_nothing_far_too_large() {
        let pool = ArenaPool::new(10 << 20);
        for len in [4 << 20, 5 << 20, 6 << 20] {
            drop(Arena::new(len, Some(Arc::clone(&pool))).unwrap());
        }
        assert_eq!(pool.held(), 6 << 20, "the oldest went");
        drop(Arena::new(11 << 20, Some(Arc::clone(&pool))).unwrap());
        assert_eq!(pool.held(), 6 << 20, "one that is larger than the limit is not kept");
        drop(Arena::new(8 << 20, Some(Arc::clone(&pool))).unwrap());
        assert!(Arena::new(1 << 20, Some(Arc::clone(&pool))).unwrap().fresh_pages().is_some());
        assert!(Arena::new(0, Some(pool)).unwrap().is_empty());
    }

    #[test]
    fn a_maker_is_asked_for_what_may_be_kept_and_its_memory_is_kept_and_let_go_of() {
        let asked = Arc::new(Mutex::new(Vec::new()));
        let alive = Arc::new(());
        let allocator = {
            let (asked, alive) = (Arc::clone(&asked), Arc::clone(&alive));
            move |len| {
                asked.lock().unwrap().push(len);
                let memory = (len < 5 << 20).then(|| vec![7_u8; len].into_boxed_slice())?;
                Some(Allocation { address: memory.as_ptr() as usize, owner: Box::new((memory, Arc::clone(&alive))) })
            }
        };
        // SAFETY: initialised memory of that size, which the owner holds.
        let pool = unsafe { ArenaPool::with_allocator(6 << 20, allocator) };
        let first = Arena::new(4 << 20, Some(Arc::clone(&pool))).unwrap();
        let address = first.hold(0, 1).unwrap().0;
        assert!(first.fresh_pages().is_none() && first.bytes(0, 4 << 20).iter().all(|&b| b == 7));
        drop(first);
        assert_eq!(pool.held(), 4 << 20);
        assert_eq!(Arena::new(3 << 20, Some(Arc::clone(&pool))).unwrap().address_of(0, 1), address);
        assert_eq!(Arc::strong_count(&alive), 3, "one in the allocator, one kept");
        // Returned to the pool, where it replaces the memory that was kept.
        let own = Arena::new(5 << 20, Some(Arc::clone(&pool))).unwrap();
        assert!(own.fresh_pages().is_some());
        drop(own);
        assert_eq!((pool.held(), Arc::strong_count(&alive)), (5 << 20, 2));
        // Memory too large to be kept, or empty, is not requested from the allocator.
        assert!(Arena::new(7 << 20, Some(Arc::clone(&pool))).unwrap().fresh_pages().is_some());
        drop(Arena::new(0, Some(pool)).unwrap());
        assert_eq!(*asked.lock().unwrap(), [4 << 20, 5 << 20]);
    }
}
