//! Fresh memory for what arrives: one anonymous mapping, untouched until its bytes come.

use std::ptr::NonNull;

use crate::error::{Error, ErrorKind};

/// Where each tensor starts in an arena: torch's own CPU allocator aligns to the same.
pub(crate) const ALIGNMENT: u64 = 64;

/// An anonymous, zeroed, private memory mapping. Pages are taken from the system only when they are touched.
#[derive(Debug)]
pub struct Arena {
    ptr: NonNull<u8>,
    len: usize,
}

// SAFETY: an arena owns its mapping; writes go through destinations handed out while it is being filled.
unsafe impl Send for Arena {}
// SAFETY: shared access only reads, or writes disjoint destinations (see `client::plan`).
unsafe impl Sync for Arena {}

impl Arena {
    /// Maps `len` bytes of zeros; `len` 0 maps nothing.
    ///
    /// # Errors
    /// [`ErrorKind::System`] when the system refuses a mapping of that size.
    pub fn new(len: u64) -> Result<Self, Error> {
        let too_big = || Error::new(ErrorKind::System, format!("cannot map {len} bytes for the received state"));
        let len = usize::try_from(len).map_err(|_| too_big())?;
        if len == 0 {
            return Ok(Self { ptr: NonNull::dangling(), len });
        }
        // SAFETY: a fresh anonymous mapping with no address hint touches no existing memory.
        let ptr = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if ptr == libc::MAP_FAILED {
            return Err(Error::caused(
                ErrorKind::System,
                format!("cannot map {len} bytes for the received state"),
                std::io::Error::last_os_error(),
            ));
        }
        let ptr = NonNull::new(ptr.cast::<u8>()).ok_or_else(too_big)?;
        Ok(Self { ptr, len })
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
        if self.len > 0 {
            // SAFETY: exactly the mapping made in `new`; whoever holds the arena holds no slice of it any more.
            unsafe { libc::munmap(self.ptr.as_ptr().cast(), self.len) };
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
