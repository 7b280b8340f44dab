//! Memory for what arrives: anonymous mappings, fresh or kept from an earlier receive.

use std::collections::VecDeque;
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

/// An anonymous, private memory mapping: zeros, whose pages are taken from the system only when they are touched.
#[derive(Debug)]
struct Mapping {
    /// What can be used of it starts here, at a huge page if it is that large.
    start: NonNull<u8>,
    usable: usize,
    /// The whole, a little more than that.
    base: usize,
    size: usize,
}

// SAFETY: a mapping is owned memory; writes go through destinations handed out while it is being filled.
unsafe impl Send for Mapping {}
// SAFETY: shared access only reads, or writes disjoint destinations (see `client::plan`).
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(len: usize) -> std::io::Result<Self> {
        if len == 0 {
            return Ok(Self { start: NonNull::dangling(), usable: 0, base: 0, size: 0 });
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
        Ok(Self { start, usable: len, base: base as usize, size })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.size > 0 {
            // SAFETY: exactly the mapping made in `new`; whoever holds it holds no slice of it any more.
            unsafe { libc::munmap(self.base as *mut libc::c_void, self.size) };
        }
    }
}

/// Memory that earlier receives have let go of, kept for later ones: it has its pages already, and page faults, not the
/// network, bound a receive into fresh memory (docs/performance.md).
#[derive(Debug)]
pub struct Pool {
    limit: usize,
    /// The one kept longest is in front.
    kept: Mutex<VecDeque<Mapping>>,
}

impl Pool {
    /// A pool that keeps at most `limit` bytes.
    #[must_use]
    pub fn new(limit: usize) -> Arc<Self> {
        Arc::new(Self { limit, kept: Mutex::default() })
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
    /// Memory for `len` bytes: kept by `pool` if it has some that fits, else fresh zeros; 0 bytes take none. From 2 MiB
    /// on fresh memory asks for huge pages. It goes to `pool` when it is dropped.
    ///
    /// # Errors
    /// [`ErrorKind::System`] when the machine has not so much memory, or the system refuses a mapping of that size.
    pub fn new(len: u64, pool: Option<Arc<Pool>>) -> Result<Self, Error> {
        check_machine_has(len, "the received state")?;
        let refused = |cause: std::io::Error| {
            Error::caused(ErrorKind::System, format!("cannot map {len} bytes for the received state"), cause)
        };
        let len = usize::try_from(len).map_err(|_| refused(std::io::ErrorKind::OutOfMemory.into()))?;
        let kept = pool.as_ref().and_then(|pool| pool.take(len));
        let fresh = kept.is_none();
        let mapping = match kept {
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
        // SAFETY: the mapping is at least `len` bytes long, readable and initialised (zeroed by the kernel) until drop.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        if let (Some(pool), Some(mapping)) = (&self.pool, self.mapping.take_if(|m| m.size > 0)) {
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
}
