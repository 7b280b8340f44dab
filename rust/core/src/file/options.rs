//! How files are written and read, and what that moved.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use crate::cancel::Cancel;
use crate::error::{Error, ErrorKind};

/// Files with so many bytes of payload may be written past the page cache, where the file system can: that is less work
/// for the processor and takes no memory from others (docs/explanation/decisions.md). Smaller ones save little, and
/// their next reader finds them in the cache.
pub const DIRECT_FROM: u64 = 64 << 20;

/// How a file is written or read. The defaults choose the number of threads, and how large files are written.
#[derive(Clone, Debug, Default)]
pub struct FileOptions {
    /// Threads: 1 to 64, whatever is asked for. `None` takes as many as there are cores, but 2 to 8, and always 8 for a
    /// container that is read through [`crate::Ranges`].
    pub threads: Option<usize>,
    /// Ends it from another thread.
    pub cancel: Cancel,
    /// Whether a file of [`DIRECT_FROM`] or more is written through the page cache. By default it is, for its next
    /// reader, as long as it is small beside the available memory and that memory is no slower than a disk.
    pub cached: Option<bool>,
    /// Counts the bytes of payload as they are written, or those of whole blocks as they are read, with checksums that
    /// are read beside them, for another thread to look at.
    pub progress: Arc<AtomicU64>,
}

impl FileOptions {
    /// How many threads share work on so many chunks.
    pub(super) fn threads_for(&self, chunks: u64) -> usize {
        let cores = || std::thread::available_parallelism().map_or(2, |n| n.get().clamp(2, 8));
        let most = usize::try_from(chunks).unwrap_or(usize::MAX);
        self.threads.unwrap_or_else(cores).clamp(1, 64).min(most.max(1))
    }

    /// Fails once the work with the file was cancelled.
    pub(super) fn check(&self) -> Result<(), Error> {
        if self.cancel.is_cancelled() {
            return Err(Error::new(ErrorKind::Cancelled, "it was cancelled"));
        }
        Ok(())
    }
}

/// How many bytes were written or read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FileReport {
    /// Bytes of the file that were written or read, checksums included, and the header, but where [`crate::Stored`] has
    /// read that before.
    pub bytes: u64,
    /// Bytes of payload that had a destination; of a file that was written, all but the checksums.
    pub wanted: u64,
    /// Bytes that were written past the page cache.
    pub direct: u64,
}
