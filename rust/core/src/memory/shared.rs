//! Memory that two processes map: one writes to it, the other reads.
//!
//! The writer makes the memory and passes its descriptor; the reader maps it for reading alone. Seals make it safe for
//! the reader to touch: the memory cannot shrink, which would turn a read into a signal, and where the kernel knows how
//! (5.1 on), no further mapping can write to it.
//!
//! What the reader sees may change at any time if the writer breaks the rules. Nothing here therefore gives out a
//! reference to memory of another process: bytes are copied out, and only the copy is looked at.
//!
//! A ring of a transfer is made of [`SharedMemory`] and [`SharedView`]. A [`SharedBuffer`](super::SharedBuffer) is
//! larger and lives longer: a whole state is copied into it, and other processes write that to a file, serve it, or
//! keep it after its writer is gone. They read it as any borrowed memory is read (see `region`).

use std::io;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};

use super::fresh::touch;
use crate::sync::{Locked, parallel};

/// Bytes that a thread populates at a time.
const POPULATED: usize = 4 << 20;

/// A shared mapping, unmapped when it is dropped.
#[derive(Debug)]
pub(super) struct SharedMapping {
    pub(super) start: NonNull<u8>,
    pub(super) len: usize,
}

// SAFETY: a mapping belongs to no thread; the writer's bytes are only reached through `&mut`, or by address.
unsafe impl Send for SharedMapping {}
// SAFETY: shared access gives out addresses alone.
unsafe impl Sync for SharedMapping {}

impl SharedMapping {
    /// Maps the first `len` bytes of the memory behind `fd`.
    pub(super) fn new(fd: &OwnedFd, len: u64, protection: ProtFlags, flags: MapFlags) -> io::Result<Self> {
        let len = usize::try_from(len).map_err(|_| io::ErrorKind::OutOfMemory)?;
        let flags = MapFlags::SHARED | flags;
        // SAFETY: a new mapping with no address hint touches no existing memory.
        let start = unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, protection, flags, fd, 0)? };
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { start, len })
    }

    /// The address of `len` bytes at `at`, which must lie inside.
    pub(super) fn address(&self, at: usize, len: usize) -> *mut u8 {
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

/// New memory of `len` bytes, mapped for writing as the last one that can, from Linux 5.1 on, and its descriptor. It
/// has no pages yet: [`populate`] has to follow before anything is written.
pub(super) fn create(len: u64, flags: MapFlags) -> io::Result<(SharedMapping, OwnedFd)> {
    let fd = rustix::fs::memfd_create("tensorferry", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&fd, len)?;
    let mapping = SharedMapping::new(&fd, len, ProtFlags::READ | ProtFlags::WRITE, flags)?;
    let fixed = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    match rustix::fs::fcntl_add_seals(&fd, fixed | SealFlags::FUTURE_WRITE) {
        // A kernel before 5.1: a receiver there can spoil what comes to itself, and nothing else.
        Err(rustix::io::Errno::INVAL) => rustix::fs::fcntl_add_seals(&fd, fixed)?,
        sealed => sealed?,
    }
    Ok((mapping, fd))
}

/// The length of the memory behind `fd`, `None` if it could still shrink.
pub(super) fn sealed_len(fd: &OwnedFd) -> io::Result<Option<u64>> {
    let len = u64::try_from(rustix::fs::fstat(fd)?.st_size).unwrap_or(0);
    Ok(rustix::fs::fcntl_get_seals(fd)?.contains(SealFlags::SHRINK).then_some(len))
}

/// The writer's end.
#[derive(Debug)]
pub(crate) struct SharedMemory(SharedMapping);

impl SharedMemory {
    /// New memory of `len` bytes, and the descriptor by which another process maps it. The memory has its final length,
    /// and this mapping is the last one that can write to it.
    pub(crate) fn new(len: u64) -> io::Result<(Self, OwnedFd)> {
        let (mapping, fd) = create(len, MapFlags::empty())?;
        // MAP_POPULATE would not say that there are no pages, and the first write would end the process.
        populate(&mapping, &fd, 1)?;
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
        if sealed_len(fd)?.is_none_or(|has| has < len) {
            return Ok(None);
        }
        SharedMapping::new(fd, len, ProtFlags::READ, MapFlags::POPULATE).map(Self).map(Some)
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

/// Takes the pages of a fresh mapping from the system: several threads are several times as fast as one, and a state
/// that is copied there finds them. Where there are none left, that is an error here, and no signal later.
pub(super) fn populate(mapping: &SharedMapping, fd: &OwnedFd, threads: usize) -> io::Result<()> {
    let next = AtomicUsize::new(0);
    let failed = Mutex::new(None);
    let fail = |e| {
        failed.locked().get_or_insert(e);
        next.store(mapping.len, Ordering::Relaxed);
    };
    let work = || loop {
        let at = next.fetch_add(POPULATED, Ordering::Relaxed);
        if at >= mapping.len {
            return;
        }
        let len = POPULATED.min(mapping.len - at);
        let start = mapping.address(at, len);
        // SAFETY: inside the mapping; contents do not change.
        match unsafe { rustix::mm::madvise(start.cast(), len, Advice::LinuxPopulateWrite) } {
            Ok(()) => {}
            // A kernel before 5.14.
            Err(rustix::io::Errno::INVAL) => {
                match rustix::fs::fallocate(fd, FallocateFlags::empty(), at as u64, len as u64) {
                    Ok(()) => touch(start as usize..start as usize + len),
                    Err(e) => fail(e),
                }
            }
            Err(e) => fail(e),
        }
    };
    parallel("tensorferry-pages", threads.min(mapping.len.div_ceil(POPULATED)), work);
    failed.into_value().map_or(Ok(()), |e| Err(e.into()))
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::super::SharedBuffer;
    use super::super::mapping::resident;
    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn a_buffer_is_populated_and_what_is_written_is_seen_by_whoever_maps_it() {
        let filled = SharedBuffer::new(9 << 20, 3).unwrap();
        assert_eq!(resident(filled.address(), filled.len()), (9 << 20) / 4096);
        // SAFETY: the last byte of memory that nobody else knows yet.
        unsafe { (filled.address() as *mut u8).add(filled.len() - 1).write(7) };
        let received = SharedBuffer::open(filled.descriptor().try_clone_to_owned().unwrap()).unwrap();
        drop(filled);
        // SAFETY: mapped, and its writer is gone.
        let bytes = unsafe { std::slice::from_raw_parts(received.address() as *const u8, received.len()) };
        assert_eq!((bytes.len(), bytes[0], bytes[(9 << 20) - 1]), (9 << 20, 0, 7));
    }

    #[test]
    fn a_ring_has_its_pages_before_it_is_written_to() {
        let (mut ring, _fd) = SharedMemory::new(1 << 20).unwrap();
        assert_eq!(resident(ring.slice_mut(0, 1).as_ptr() as usize, 1 << 20), (1 << 20) / 4096);
    }

    #[test]
    fn what_could_shrink_or_is_no_memory_is_refused() {
        let unsealed = rustix::fs::memfd_create("test", MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&unsealed, 4096).unwrap();
        let empty = rustix::fs::memfd_create("test", MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::fcntl_add_seals(&empty, SealFlags::SHRINK).unwrap();
        let file = OwnedFd::from(File::open("/proc/self/exe").unwrap());
        for fd in [unsealed, empty, file] {
            assert_eq!(SharedBuffer::open(fd).unwrap_err().kind(), ErrorKind::Protocol);
        }
        assert_eq!(SharedBuffer::new(1 << 60, 1).unwrap_err().kind(), ErrorKind::System);
    }
}
