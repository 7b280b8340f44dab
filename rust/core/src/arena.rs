//! Fresh memory for what arrives: one anonymous mapping, untouched until its bytes come.

use std::ptr::NonNull;

use crate::error::{Error, ErrorKind};

/// Where each tensor starts in an arena: torch's own CPU allocator aligns to the same.
pub(crate) const ALIGNMENT: u64 = 64;

/// A huge page where the kernel has them (x86-64, and aarch64 with 4 KiB pages).
const HUGE: usize = 2 << 20;

/// An anonymous, zeroed, private memory mapping. Pages are taken from the system only when they are touched.
#[derive(Debug)]
pub struct Arena {
    ptr: NonNull<u8>,
    len: usize,
    /// The whole mapping, a little more than what is used of it.
    mapping: (usize, usize),
}

// SAFETY: an arena owns its mapping; writes go through destinations handed out while it is being filled.
unsafe impl Send for Arena {}
// SAFETY: shared access only reads, or writes disjoint destinations (see `client::plan`).
unsafe impl Sync for Arena {}

impl Arena {
    /// Maps `len` bytes of zeros; `len` 0 maps nothing. From 2 MiB on the mapping asks for huge pages: page faults, not
    /// the network, bound a receive into fresh memory (docs/performance.md).
    ///
    /// # Errors
    /// [`ErrorKind::System`] when the system refuses a mapping of that size.
    pub fn new(len: u64) -> Result<Self, Error> {
        let refused = |cause: std::io::Error| {
            Error::caused(ErrorKind::System, format!("cannot map {len} bytes for the received state"), cause)
        };
        let len = usize::try_from(len).map_err(|_| refused(std::io::ErrorKind::OutOfMemory.into()))?;
        if len == 0 {
            return Ok(Self { ptr: NonNull::dangling(), len, mapping: (0, 0) });
        }
        let slack = if len >= HUGE { HUGE } else { 0 };
        let size = len.checked_add(slack).ok_or_else(|| refused(std::io::ErrorKind::OutOfMemory.into()))?;
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
            return Err(refused(std::io::Error::last_os_error()));
        }
        let mut start = base.cast::<u8>();
        if slack > 0 {
            let ahead = (base as usize).next_multiple_of(HUGE) - base as usize;
            // SAFETY: `ahead` is below the slack the mapping was made longer by.
            start = unsafe { start.add(ahead) };
            // SAFETY: inside our own mapping, and only advice: a kernel without huge pages ignores it.
            unsafe { libc::madvise(start.cast(), len, libc::MADV_HUGEPAGE) };
        }
        let ptr = NonNull::new(start).ok_or_else(|| refused(std::io::ErrorKind::OutOfMemory.into()))?;
        Ok(Self { ptr, len, mapping: (base as usize, size) })
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
        self.ptr.as_ptr() as usize
    }

    /// The bytes of the arena.
    #[must_use]
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: the mapping is `len` bytes long, readable and initialised (zeroed by the kernel) until drop.
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr(), self.len) }
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        if self.mapping.1 > 0 {
            // SAFETY: exactly the mapping made in `new`; whoever holds the arena holds no slice of it any more.
            unsafe { libc::munmap(self.mapping.0 as *mut libc::c_void, self.mapping.1) };
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
