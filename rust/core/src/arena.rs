//! Memory for what arrives: anonymous mappings or what a pool's maker gives, fresh or kept from an earlier receive.

use std::any::Any;
use std::collections::VecDeque;
use std::fmt;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use crate::error::{Error, ErrorKind};

/// Where each tensor starts in an arena: torch's own CPU allocator aligns to the same.
pub(crate) const ALIGNMENT: u64 = 64;

/// A huge page where the kernel has them (x86-64, and aarch64 with 4 KiB pages).
const HUGE: usize = 2 << 20;

/// Refuses `len` bytes for `what` where the machine, swap included, has fewer: a source can announce any number, and what
/// is kept for each MiB of it would cost memory already.
pub(crate) fn check_machine_has(len: u64, what: &str) -> Result<(), Error> {
    static MACHINE: OnceLock<u64> = OnceLock::new();
    let has = match MACHINE.get() {
        Some(&has) => has,
        None => match machine() {
            Some(has) => *MACHINE.get_or_init(|| has),
            None => return Ok(()),
        },
    };
    if len <= has {
        return Ok(());
    }
    let message = format!("{what} has {len} bytes, and all memory of this machine is {has}");
    Err(Error::new(ErrorKind::System, message))
}

/// Memory and swap in bytes, if the system says.
fn machine() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let field = |name| text.lines().find_map(|l| l.strip_prefix(name)?.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    Some((field("MemTotal:")? + field("SwapTotal:").unwrap_or(0)) << 10)
}

/// Memory of somebody else, who made it for a pool.
pub struct Made {
    /// Address of the first byte.
    pub address: usize,
    /// Keeps the memory; it may be dropped on any thread.
    pub owner: Box<dyn Any + Send + Sync>,
}

/// Makes memory of so many bytes, or leaves it to the pool.
type Maker = dyn Fn(usize) -> Option<Made> + Send + Sync;

/// Memory of one or more receives.
struct Mapping {
    /// What can be used of it starts here, at a huge page if it is our own and that large.
    start: NonNull<u8>,
    usable: usize,
    held: Held,
}

/// What a mapping goes back to.
enum Held {
    Nothing,
    /// An anonymous, private mapping, a little larger than what is used of it: zeros, whose pages are taken from the
    /// system only when they are touched.
    Own {
        base: usize,
        size: usize,
    },
    /// Only to be dropped.
    Made {
        _owner: Box<dyn Any + Send + Sync>,
    },
}

impl fmt::Debug for Mapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mapping").field("start", &self.start).field("usable", &self.usable).finish_non_exhaustive()
    }
}

// SAFETY: a mapping is owned memory; writes go through destinations handed out while it is being filled.
unsafe impl Send for Mapping {}
// SAFETY: shared access only reads, or writes disjoint destinations (see `client::plan`).
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(len: usize) -> std::io::Result<Self> {
        if len == 0 {
            return Ok(Self { start: NonNull::dangling(), usable: 0, held: Held::Nothing });
        }
        let slack = if len >= HUGE { HUGE } else { 0 };
        let size = len.checked_add(slack).ok_or(std::io::ErrorKind::OutOfMemory)?;
        // SAFETY: a fresh anonymous mapping with no address hint touches no existing memory.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                size,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error());
        }
        let mut start = base.cast::<u8>();
        if slack > 0 {
            let ahead = (base as usize).next_multiple_of(HUGE) - base as usize;
            // SAFETY: `ahead` is below the slack the mapping was made longer by.
            start = unsafe { start.add(ahead) };
            // SAFETY: inside our own mapping, and only advice: a kernel without huge pages ignores it.
            unsafe { libc::madvise(start.cast(), len, libc::MADV_HUGEPAGE) };
        }
        let start = NonNull::new(start).ok_or(std::io::ErrorKind::OutOfMemory)?;
        Ok(Self { start, usable: len, held: Held::Own { base: base as usize, size } })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if let Held::Own { base, size } = self.held {
            // SAFETY: exactly the mapping made in `new`; whoever holds it holds no slice of it any more.
            unsafe { libc::munmap(base as *mut libc::c_void, size) };
        }
    }
}

/// Memory that earlier receives have let go of, kept for later ones: it has its pages already, and page faults, not the
/// network, bound a receive into fresh memory (docs/performance.md).
pub struct Pool {
    limit: usize,
    /// The one kept longest is in front.
    kept: Mutex<VecDeque<Mapping>>,
    maker: Option<Box<Maker>>,
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool").field("limit", &self.limit).field("held", &self.held()).finish_non_exhaustive()
    }
}

impl Pool {
    /// A pool that keeps at most `limit` bytes.
    #[must_use]
    pub fn new(limit: usize) -> Arc<Self> {
        Arc::new(Self { limit, kept: Mutex::default(), maker: None })
    }

    /// A pool that keeps at most `limit` bytes and asks `maker` for what it may keep: for memory that a device copies
    /// from faster, say. What `maker` leaves to it is mapped as without one.
    ///
    /// # Safety
    /// What `maker` gives has as many initialised bytes as it was asked for, which nobody else touches until the owner
    /// is dropped.
    #[must_use]
    pub unsafe fn made_by(limit: usize, maker: impl Fn(usize) -> Option<Made> + Send + Sync + 'static) -> Arc<Self> {
        Arc::new(Self { limit, kept: Mutex::default(), maker: Some(Box::new(maker)) })
    }

    /// Memory of `len` bytes from the maker, if it is such as may be kept.
    fn make(&self, len: usize) -> Option<Mapping> {
        let maker = self.maker.as_ref().filter(|_| (1..=self.limit).contains(&len))?;
        let Made { address, owner } = maker(len)?;
        let start = NonNull::new(address as *mut u8)?;
        Some(Mapping { start, usable: len, held: Held::Made { _owner: owner } })
    }

    fn kept(&self) -> MutexGuard<'_, VecDeque<Mapping>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes kept now.
    #[must_use]
    pub fn held(&self) -> usize {
        self.kept().iter().map(|m| m.usable).sum()
    }

    /// The smallest mapping that holds `len` bytes and is not much larger.
    fn take(&self, len: usize) -> Option<Mapping> {
        let mut kept = self.kept();
        let fits = |m: &Mapping| m.usable >= len && m.usable / 2 <= len;
        let best = (0..kept.len()).filter(|&i| fits(&kept[i])).min_by_key(|&i| kept[i].usable)?;
        kept.remove(best)
    }

    fn put(&self, mapping: Mapping) {
        if mapping.usable > self.limit {
            return;
        }
        // What has to go is unmapped after the lock is free: that takes a while.
        let mut gone = Vec::new();
        let mut kept = self.kept();
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

/// The memory of one receive.
#[derive(Debug)]
pub struct Arena {
    // Taken only by Drop.
    mapping: Option<Mapping>,
    start: NonNull<u8>,
    len: usize,
    fresh: bool,
    pool: Option<Arc<Pool>>,
}

// SAFETY: as for `Mapping`, into which `start` points.
unsafe impl Send for Arena {}
// SAFETY: as for `Mapping`.
unsafe impl Sync for Arena {}

impl Arena {
    /// Memory for `len` bytes: kept by `pool` if it has some that fits, or made for it, else fresh zeros; 0 bytes take
    /// none. From 2 MiB on fresh memory asks for huge pages. It goes to `pool` when it is dropped.
    ///
    /// # Errors
    /// [`ErrorKind::System`] when the machine has not so much memory, or the system refuses a mapping of that size.
    pub fn new(len: u64, pool: Option<Arc<Pool>>) -> Result<Self, Error> {
        check_machine_has(len, "the received state")?;
        let refused = |cause: std::io::Error| {
            Error::caused(ErrorKind::System, format!("cannot map {len} bytes for the received state"), cause)
        };
        let len = usize::try_from(len).map_err(|_| refused(std::io::ErrorKind::OutOfMemory.into()))?;
        let touched = pool.as_ref().and_then(|pool| pool.take(len).or_else(|| pool.make(len)));
        let fresh = touched.is_none();
        let mapping = match touched {
            Some(mapping) => mapping,
            None => Mapping::new(len).map_err(refused)?,
        };
        Ok(Self { start: mapping.start, mapping: Some(mapping), len, fresh, pool })
    }

    /// Whether nobody has touched this memory yet.
    pub(crate) fn is_fresh(&self) -> bool {
        self.fresh
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the arena holds nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Address of the first byte.
    #[must_use]
    pub fn address(&self) -> usize {
        self.start.as_ptr() as usize
    }

    /// The bytes of the arena.
    #[must_use]
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: the mapping is at least `len` bytes long, readable and initialised (zeroed by the kernel, or as
        // `Pool::made_by` has it) until drop.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        if let (Some(pool), Some(mapping)) = (&self.pool, self.mapping.take_if(|m| m.usable > 0)) {
            pool.put(mapping);
        }
    }
}

/// Asks the kernel for the pages of `[address, address + len)` at once instead of fault by fault. Only a hint: an old
/// kernel that does not know it leaves the pages to be faulted in one by one.
pub(crate) fn populate(address: usize, len: usize) {
    const PAGE: usize = 4096;
    let start = address & !(PAGE - 1);
    let end = (address + len).next_multiple_of(PAGE);
    // SAFETY: MADV_POPULATE_WRITE only makes pages present and writable; contents stay as they are, and an address
    // outside a mapping is answered with an error.
    unsafe { libc::madvise(start as *mut libc::c_void, end - start, libc::MADV_POPULATE_WRITE) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_kept_and_given_again() {
        let pool = Pool::new(64 << 20);
        let first = Arena::new(9 << 20, Some(Arc::clone(&pool))).unwrap();
        let address = first.address();
        assert!(first.is_fresh());
        assert_eq!(pool.held(), 0);
        drop(first);
        assert_eq!(pool.held(), 9 << 20);
        let again = Arena::new(8 << 20, Some(Arc::clone(&pool))).unwrap();
        assert_eq!((again.address(), again.len(), again.is_fresh()), (address, 8 << 20, false));
        assert!(Arena::new(8 << 20, Some(pool)).unwrap().is_fresh());
    }

    #[test]
    fn a_pool_keeps_no_more_than_it_may_and_gives_nothing_far_too_large() {
        let pool = Pool::new(10 << 20);
        for len in [4 << 20, 5 << 20, 6 << 20] {
            drop(Arena::new(len, Some(Arc::clone(&pool))).unwrap());
        }
        assert_eq!(pool.held(), 6 << 20, "the oldest went");
        drop(Arena::new(11 << 20, Some(Arc::clone(&pool))).unwrap());
        assert_eq!(pool.held(), 6 << 20, "one that is larger than the limit is not kept");
        drop(Arena::new(8 << 20, Some(Arc::clone(&pool))).unwrap());
        assert!(Arena::new(1 << 20, Some(Arc::clone(&pool))).unwrap().is_fresh());
        assert!(Arena::new(0, Some(pool)).unwrap().is_empty());
    }

    #[test]
    fn a_maker_is_asked_for_what_may_be_kept_and_its_memory_is_kept_and_let_go_of() {
        let asked = Arc::new(Mutex::new(Vec::new()));
        let alive = Arc::new(());
        let maker = {
            let (asked, alive) = (Arc::clone(&asked), Arc::clone(&alive));
            move |len| {
                asked.lock().unwrap().push(len);
                let memory = (len < 5 << 20).then(|| vec![7_u8; len].into_boxed_slice())?;
                Some(Made { address: memory.as_ptr() as usize, owner: Box::new((memory, Arc::clone(&alive))) })
            }
        };
        // SAFETY: initialised memory of that size, which the owner holds.
        let pool = unsafe { Pool::made_by(6 << 20, maker) };
        let first = Arena::new(4 << 20, Some(Arc::clone(&pool))).unwrap();
        let address = first.address();
        assert!(!first.is_fresh() && first.as_slice().iter().all(|&b| b == 7));
        drop(first);
        assert_eq!(pool.held(), 4 << 20);
        assert_eq!(Arena::new(3 << 20, Some(Arc::clone(&pool))).unwrap().address(), address);
        assert_eq!(Arc::strong_count(&alive), 3, "one in the maker, one kept");
        // Left to the pool; then it takes the place of what was kept.
        let own = Arena::new(5 << 20, Some(Arc::clone(&pool))).unwrap();
        assert!(own.is_fresh());
        drop(own);
        assert_eq!((pool.held(), Arc::strong_count(&alive)), (5 << 20, 2));
        // Too large to be kept, or nothing at all: not asked for.
        assert!(Arena::new(7 << 20, Some(Arc::clone(&pool))).unwrap().is_fresh());
        drop(Arena::new(0, Some(pool)).unwrap());
        assert_eq!(*asked.lock().unwrap(), [4 << 20, 5 << 20]);
    }
}
