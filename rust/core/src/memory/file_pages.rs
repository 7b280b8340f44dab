//! The pages of a file as memory that can be read whatever happens to the file.
//!
//! Behind the end of a file that was shortened, and where the disk fails, reading a page of it raises SIGBUS, which ends
//! the process. A handler of this module puts zeros there instead. What was read then is not what the file had, and
//! neither is it if the file was written to: readers ask [`FilePages::is_unchanged`] afterwards, and use nothing of what
//! they have read if it was not.
//!
//! Invariants:
//!
//! * the handler acts on addresses of [`FilePages`] that exist, and calls the handler before it for all others;
//! * it takes no lock and allocates nothing.

use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::ptr::{self, NonNull};
use std::sync::atomic::Ordering;

use super::guard::{Guard, install};
use crate::error::{Error, ErrorKind};

/// A mapping of a file: private to [`map`](Self::map), so that what is written to it does not reach the file, or shared
/// to [`fill`](Self::fill), so that it does.
///
/// ```
/// use tensorferry_core::FilePages;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let path = std::env::temp_dir().join(format!("tensorferry-pages-{}", std::process::id()));
/// std::fs::write(&path, [7; 10])?;
/// let pages = FilePages::map(&path)?;
/// assert!(pages.len() == 10 && pages.is_unchanged());
/// std::fs::OpenOptions::new().write(true).open(&path)?.set_len(5)?;
/// assert!(!pages.is_unchanged());
/// # std::fs::remove_file(&path)?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct FilePages {
    start: NonNull<u8>,
    len: usize,
    file: File,
    /// Of the file when it was mapped: its length, and when it was written to last. The second is not known of a file
    /// that is filled, since the mapping itself writes to it.
    before: (u64, Option<(i64, i64)>),
    guard: &'static Guard,
}

impl std::fmt::Debug for Guard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Guard").field("broken", &self.broken).finish_non_exhaustive()
    }
}

// SAFETY: the mapping belongs to no thread, and only its address is given out.
unsafe impl Send for FilePages {}
// SAFETY: as above; a guard has atomic fields and others that never change.
unsafe impl Sync for FilePages {}

impl FilePages {
    /// Maps the file at `path`.
    ///
    /// # Errors
    /// [`ErrorKind::System`] when it is not a file, is empty, or cannot be mapped.
    pub fn map(path: &Path) -> Result<Self, Error> {
        Self::try_map(path, None).map_err(|e| not_mapped(path, e))
    }

    /// Maps `len` bytes of the file at `path` to be written to by way of its pages. The file must have room for all of
    /// them; one that was shortened since it got that room is mapped as if it were whole, and is not unchanged.
    ///
    /// # Errors
    /// As [`FilePages::map`].
    pub fn fill(path: &Path, len: u64) -> Result<Self, Error> {
        Self::try_map(path, Some(len)).map_err(|e| not_mapped(path, e))
    }

    /// Maps the file at `path`: if it is to be `filled`, so many bytes of it, shared; else all of them, private.
    fn try_map(path: &Path, filled: Option<u64>) -> io::Result<Self> {
        let (expected, filled) = (filled, filled.is_some());
        // Not to wait for the other end of a pipe.
        let file = OpenOptions::new().read(true).write(filled).custom_flags(libc::O_NONBLOCK).open(path)?;
        let metadata = file.metadata()?;
        if !metadata.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a file"));
        }
        let nbytes = expected.unwrap_or(metadata.len());
        let len = usize::try_from(nbytes).map_err(|_| io::ErrorKind::OutOfMemory)?;
        install()?;
        // Writable, since some readers take only memory that is; private, and without memory of its own unless somebody
        // writes to it.
        let flags = if filled { libc::MAP_SHARED } else { libc::MAP_PRIVATE | libc::MAP_NORESERVE };
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping with no address hint touches no existing memory.
        let start = unsafe { libc::mmap(ptr::null_mut(), len, protection, flags, file.as_raw_fd(), 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = NonNull::new(start.cast::<u8>()).ok_or(io::ErrorKind::OutOfMemory)?;
        let first = start.as_ptr().expose_provenance();
        let before = (nbytes, (!filled).then(|| modified(&metadata)));
        Ok(Self { start, len, file, before, guard: Guard::add(first, first + len) })
    }

    /// Address of the first byte.
    #[must_use]
    pub fn address(&self) -> usize {
        self.start.as_ptr().expose_provenance()
    }

    /// A descriptor of the file, whatever its name leads to by now.
    #[must_use]
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Length in bytes.
    #[must_use]
    #[allow(clippy::len_without_is_empty, reason = "an empty file cannot be mapped")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether what was read so far is what the file had when it was mapped, as far as its length and its time tell. The
    /// system notes the time of a write before the bytes change; not of one through a mapping to a page that was written
    /// to before, and a time can be put back. Of a file that is filled: whether it still has its length, and what was
    /// written has reached it.
    #[must_use]
    pub fn is_unchanged(&self) -> bool {
        let (len, written) = self.before;
        let same = self
            .file
            .metadata()
            .is_ok_and(|now| now.len() == len && written.is_none_or(|written| modified(&now) == written));
        same && !self.guard.broken.load(Ordering::Acquire)
    }

    /// Notes that the pages are not what the file had when it was mapped: [`FilePages::is_unchanged`] says so from then on.
    pub fn note_changed(&self) {
        self.guard.broken.store(true, Ordering::Release);
    }
}

impl Drop for FilePages {
    fn drop(&mut self) {
        self.guard.start.store(0, Ordering::Release);
        // SAFETY: exactly the mapping made in `try_map`; nobody reads it any more.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

fn not_mapped(path: &Path, e: io::Error) -> Error {
    Error::caused(ErrorKind::System, format!("{}: cannot be mapped", path.display()), e)
}

/// When the content of a file was changed last.
fn modified(about: &Metadata) -> (i64, i64) {
    (about.mtime(), about.mtime_nsec())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_that_is_gone_reads_as_zeros_and_is_noticed() {
        let path = std::env::temp_dir().join(format!("tensorferry-file-pages-{}", std::process::id()));
        std::fs::write(&path, vec![7; 1 << 20]).unwrap();
        let pages = FilePages::map(&path).unwrap();
        let other = FilePages::map(&path).unwrap();
        assert!(pages.is_unchanged());
        let byte = |pages: &FilePages, at: usize| {
            assert!(at < pages.len());
            // SAFETY: inside the mapping.
            unsafe { ptr::read_volatile(pages.start.as_ptr().add(at)) }
        };
        assert_eq!(byte(&pages, 900_000), 7);
        OpenOptions::new().write(true).open(&path).unwrap().set_len(4096).unwrap();
        assert_eq!((byte(&pages, 100), byte(&pages, 900_000), byte(&pages, (1 << 20) - 1)), (7, 0, 0));
        // The file gets its bytes and its times back, and was still not there for a while.
        let file = OpenOptions::new().write(true).open(&path).unwrap();
        file.set_len(1 << 20).unwrap();
        let (seconds, nanoseconds) = pages.before.1.unwrap();
        let then = std::time::UNIX_EPOCH
            + std::time::Duration::new(seconds.cast_unsigned(), u32::try_from(nanoseconds).unwrap());
        file.set_modified(then).unwrap();
        assert!(!pages.is_unchanged());
        assert!(other.is_unchanged(), "nothing was read through this one");
        std::fs::remove_file(&path).unwrap();
        assert!(other.is_unchanged(), "a file without a name is still there");
    }

    #[test]
    fn a_file_that_is_filled_may_be_shortened_meanwhile() {
        let path = std::env::temp_dir().join(format!("tensorferry-filled-pages-{}", std::process::id()));
        std::fs::write(&path, vec![0; 1 << 20]).unwrap();
        let pages = FilePages::fill(&path, 1 << 20).unwrap();
        let put = |at: usize, value: u8| {
            assert!(at < pages.len());
            // SAFETY: inside the mapping.
            unsafe { ptr::write_volatile(pages.start.as_ptr().add(at), value) };
        };
        put(5, 9);
        assert!(pages.is_unchanged());
        assert_eq!(std::fs::read(&path).unwrap()[5], 9);
        OpenOptions::new().write(true).open(&path).unwrap().set_len(4096).unwrap();
        assert!(!pages.is_unchanged());
        put(900_000, 8);
        // What was written behind its end is not in the file, even if that gets its length back.
        OpenOptions::new().write(true).open(&path).unwrap().set_len(1 << 20).unwrap();
        assert!(!pages.is_unchanged());
        assert_eq!(std::fs::read(&path).unwrap()[900_000], 0);
        // Shortened before it is mapped.
        OpenOptions::new().write(true).open(&path).unwrap().set_len(4096).unwrap();
        let pages = FilePages::fill(&path, 1 << 20).unwrap();
        assert_eq!(pages.len(), 1 << 20);
        // SAFETY: inside the mapping.
        unsafe { ptr::write_volatile(pages.start.as_ptr().add(900_000), 8) };
        assert!(!pages.is_unchanged());
        std::fs::remove_file(&path).unwrap();
    }
}
