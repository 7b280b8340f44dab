//! Anonymous mappings, and memory from an allocator in their place.
//!
//! A [`Mapping`] owns its memory and gives it back when it is dropped: to the kernel if it mapped it, to the
//! allocator's owner otherwise. From 2 MiB on one that is filled starts where a huge page can; `fresh` decides which
//! pages it gets.

use std::any::Any;
use std::fmt;
use std::ptr::NonNull;

use bytes::Bytes;

/// A huge page where the kernel has them (x86-64, and aarch64 with 4 KiB pages).
pub(super) const HUGE: usize = 2 << 20;

/// Memory of one or more receives.
pub(super) struct Mapping {
    /// The start of the usable part: at a huge page if the mapping is our own and large enough for one.
    pub(super) start: NonNull<u8>,
    pub(super) usable: usize,
    pub(super) held: Held,
}

/// How a mapping is returned when it is dropped.
pub(super) enum Held {
    Nothing,
    /// An anonymous, private mapping, a little larger than what is used of it: zeros, whose pages are taken from the
    /// system only when they are touched.
    Own {
        base: usize,
        size: usize,
    },
    /// Only to be dropped.
    Allocation {
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
// SAFETY: shared access only reads, or writes disjoint destinations (see `payload::plan`).
unsafe impl Sync for Mapping {}

impl Mapping {
    /// `len` zeroed bytes. `dense` says that all of them will be touched: from 2 MiB on they then begin where a huge
    /// page can.
    pub(super) fn new(len: u64, dense: bool) -> std::io::Result<Self> {
        let len = usize::try_from(len).map_err(|_| std::io::ErrorKind::OutOfMemory)?;
        if len == 0 {
            return Ok(Self { start: NonNull::dangling(), usable: 0, held: Held::Nothing });
        }
        let slack = if dense && len >= HUGE { HUGE } else { 0 };
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

/// `len` zeros that take no memory for as long as nobody reads them.
pub(crate) fn untouched(len: u64) -> std::io::Result<Bytes> {
    struct Zeros(Mapping);

    impl AsRef<[u8]> for Zeros {
        fn as_ref(&self) -> &[u8] {
            // SAFETY: a mapping of `usable` zeros of its own, to which nobody writes.
            unsafe { std::slice::from_raw_parts(self.0.start.as_ptr(), self.0.usable) }
        }
    }

    Mapping::new(len, false).map(|mapping| Bytes::from_owner(Zeros(mapping)))
}

/// How many pages of `[address, address + len)`, a mapped range of whole pages, are present.
#[cfg(test)]
pub(super) fn resident(address: usize, len: usize) -> usize {
    let mut pages = vec![0_u8; len.div_ceil(super::PAGE)];
    // SAFETY: a mapped range of whole pages, and a byte for each of them.
    assert_eq!(unsafe { libc::mincore(address as *mut _, len, pages.as_mut_ptr()) }, 0);
    pages.iter().filter(|&&page| page & 1 == 1).count()
}
