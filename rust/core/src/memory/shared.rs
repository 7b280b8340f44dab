//! Memory that two processes map: one writes to it, the other reads.
//!
//! The writer makes the memory and passes its descriptor; the reader maps it for reading alone. Seals make it safe for
//! the reader to touch: the memory cannot shrink, which would turn a read into a signal, and where the kernel knows how
//! (5.1 on), no further mapping can write to it.
//!
//! What the reader sees may change at any time if the writer breaks the rules. Nothing here therefore gives out a
//! reference to memory of another process: bytes are copied out, and only the copy is looked at.

use std::io;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

/// A shared mapping, unmapped when it is dropped.
#[derive(Debug)]
struct SharedMapping {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: a mapping belongs to no thread; the writer's bytes are only reached through `&mut`.
unsafe impl Send for SharedMapping {}

impl SharedMapping {
    fn new(fd: &OwnedFd, len: u64, protection: ProtFlags) -> io::Result<Self> {
        let len = usize::try_from(len).map_err(|_| io::ErrorKind::OutOfMemory)?;
        let flags = MapFlags::SHARED | MapFlags::POPULATE;
        // SAFETY: a new mapping with no address hint touches no existing memory.
        let start = unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, protection, flags, fd, 0)? };
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { start, len })
    }

    /// The address of `len` bytes at `at`, which must lie inside.
    fn address(&self, at: usize, len: usize) -> *mut u8 {
        assert!(at.checked_add(len).is_some_and(|end| end <= self.len), "{len} bytes at {at} of {}", self.len);
        // SAFETY: inside the mapping, as was just checked.
        unsafe { self.start.as_ptr().add(at) }
    }
}

impl Drop for SharedMapping {
    fn drop(&mut self) {
        // SAFETY: exactly the mapping made in `new`, of which no slice is left.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

/// The writer's end.
#[derive(Debug)]
pub(crate) struct SharedMemory(SharedMapping);

impl SharedMemory {
    /// New memory of `len` bytes, and the descriptor by which another process maps it. The memory has its final length,
    /// and this mapping is the last one that can write to it.
    pub(crate) fn new(len: u64) -> io::Result<(Self, OwnedFd)> {
        let fd = rustix::fs::memfd_create("tensorferry", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        rustix::fs::ftruncate(&fd, len)?;
        let mapping = SharedMapping::new(&fd, len, ProtFlags::READ | ProtFlags::WRITE)?;
        let fixed = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        match rustix::fs::fcntl_add_seals(&fd, fixed | SealFlags::FUTURE_WRITE) {
            // A kernel before 5.1: a receiver there can spoil what comes to itself, and nothing else.
            Err(rustix::io::Errno::INVAL) => rustix::fs::fcntl_add_seals(&fd, fixed)?,
            sealed => sealed?,
        }
        Ok((Self(mapping), fd))
    }

    /// The `len` bytes at `at`, to be written.
    ///
    /// # Panics
    /// When they do not lie inside.
    pub(crate) fn slice_mut(&mut self, at: usize, len: usize) -> &mut [u8] {
        // SAFETY: the bytes lie in the mapping, which this process alone writes to and only through this exclusive
        // reference. That the reader does not read them meanwhile is up to the protocol; if it does, only it is harmed.
        unsafe { std::slice::from_raw_parts_mut(self.0.address(at, len), len) }
    }
}

/// The reader's end.
#[derive(Debug)]
pub(crate) struct SharedView(SharedMapping);

impl SharedView {
    /// The first `len` bytes of the memory behind `fd`, `None` if it has fewer or could be made to have fewer.
    pub(crate) fn new(fd: &OwnedFd, len: u64) -> io::Result<Option<Self>> {
        let has = u64::try_from(rustix::fs::fstat(fd)?.st_size).unwrap_or(0);
        if !rustix::fs::fcntl_get_seals(fd)?.contains(SealFlags::SHRINK) || has < len {
            return Ok(None);
        }
        SharedMapping::new(fd, len, ProtFlags::READ).map(Self).map(Some)
    }

    /// Copies the bytes at `at` into `into`.
    ///
    /// # Panics
    /// When they do not lie inside.
    pub(crate) fn copy(&self, at: usize, into: &mut [u8]) {
        // SAFETY: source and length lie in the mapping, which cannot shrink; `into` is ours alone. A writer that breaks
        // the rules and writes meanwhile changes what is copied, which the checksum of the bytes then shows.
        unsafe { std::ptr::copy_nonoverlapping(self.0.address(at, into.len()), into.as_mut_ptr(), into.len()) };
    }
}
