//! Containers at rest.
//!
//! A file is written from memory by several threads under a temporary name, with a checksum for every block of 512
//! bytes, and put in its place by a rename. It is read slice by slice, or whole like a checkpoint of a server
//! ([`Stored`]), and no block is used unverified. A file can be checked without keeping its bytes (`check`), and one that
//! a receive has filled gets its checksums afterwards ([`seal_file`]). Of files that a server publishes, [`ServedFiles`]
//! tells what they were.
//!
//! Invariants:
//!
//! * a file under its final name is complete and on the disk;
//! * a file that is being written is locked, so that others can tell it from one whose writer was killed;
//! * what is checksummed is what is written: bytes are copied first, so a change of the memory in between does no harm.

mod check;
mod output;
mod place;
mod read;
mod read_ahead;
mod seal;
mod served;
mod stored;
mod stored_waves;
mod write;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

pub use self::place::rename_new;
pub use self::read::Container;
pub use self::seal::seal_file;
pub use self::served::ServedFiles;
pub use self::stored::Stored;
pub use self::stored_waves::StoredWaves;
pub use self::write::{Written, write_file};
use crate::cancel::Cancel;
use crate::error::{Error, ErrorKind};
use crate::payload::{Plan, Queue};

/// Bytes that a thread writes or reads at a time.
const CHUNK: u64 = 4 << 20;
/// Bytes that are copied and checksummed in one go on their way from or to the page cache: they stay in the cache of a
/// core.
const PIECE: usize = 256 << 10;

/// Files with so many bytes of payload may be written past the page cache, where the file system can: that is less work
/// for the processor and takes no memory from others (docs/explanation/decisions.md). Smaller ones save little, and
/// their next reader finds them in the cache.
pub const DIRECT_FROM: u64 = 64 << 20;

/// How a file is written or read. The defaults choose the number of threads, and how large files are written.
#[derive(Clone, Debug, Default)]
pub struct FileOptions {
    /// Threads; `None` chooses by the number of cores.
    pub threads: Option<usize>,
    /// Ends it from another thread.
    pub cancel: Cancel,
    /// Whether a file of [`DIRECT_FROM`] or more is written through the page cache. By default it is, for its next
    /// reader, as long as it is small beside the available memory and that memory is no slower than a disk.
    pub cached: Option<bool>,
    /// Counts the bytes of payload as they are written, or read in blocks, for another thread to look at.
    pub progress: Arc<AtomicU64>,
}

impl FileOptions {
    fn threads(&self, chunks: u64) -> usize {
        let cores = || std::thread::available_parallelism().map_or(2, |n| n.get().clamp(2, 8));
        let most = usize::try_from(chunks).unwrap_or(usize::MAX);
        self.threads.unwrap_or_else(cores).clamp(1, 64).min(most.max(1))
    }

    /// Fails once the work with the file was cancelled.
    fn check(&self) -> Result<(), Error> {
        if self.cancel.is_cancelled() {
            return Err(Error::new(ErrorKind::Cancelled, "it was cancelled"));
        }
        Ok(())
    }
}

/// How many bytes were written or read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FileReport {
    /// Bytes of the file that were written or read, header and checksums included.
    pub bytes: u64,
    /// Bytes that had a destination.
    pub wanted: u64,
    /// Bytes that were written past the page cache.
    pub direct: u64,
}

/// Has several threads read the blocks that `plan` wants, a chunk at a time; says how many bytes that took. Each thread
/// makes its own reader with `start`, and calls it with the first block of a chunk and the one behind its last.
fn by_chunks<R>(plan: &Plan, options: &FileOptions, start: impl Fn() -> Result<R, Error> + Sync) -> Result<u64, Error>
where
    R: FnMut(u64, u64) -> Result<u64, Error>,
{
    by_runs(&plan.wanted_blocks(0), CHUNK / plan.block_size(), options, start)
}

/// As [`by_chunks`], for the blocks in `runs`, at most `most` at a time.
fn by_runs<R>(
    runs: &[(u64, u64)],
    most: u64,
    options: &FileOptions,
    start: impl Fn() -> Result<R, Error> + Sync,
) -> Result<u64, Error>
where
    R: FnMut(u64, u64) -> Result<u64, Error>,
{
    let chunks = runs.iter().map(|(first, end)| (end - first).div_ceil(most)).sum();
    let queue = Queue::new(runs, most);
    let bytes = AtomicU64::new(0);
    let work = || {
        let mut read = match start() {
            Ok(read) => read,
            Err(e) => return queue.fail(e),
        };
        while let Some(mut range) = queue.take(|| {}) {
            match options.check().and_then(|()| read(range.at, range.end)) {
                Ok(taken) => {
                    bytes.fetch_add(taken, Ordering::Relaxed);
                    options.progress.fetch_add(taken, Ordering::Relaxed);
                }
                Err(e) => queue.fail(e),
            }
            range.at = range.end;
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..options.threads(chunks) {
            let thread = std::thread::Builder::new().name("tensorferry-read".to_owned());
            // With fewer threads it takes longer, and that is all.
            let _ = thread.spawn_scoped(scope, work);
        }
        work();
    });
    queue.finish()?;
    Ok(bytes.into_inner())
}

/// An error of the system about `path`.
fn refused(path: &Path, what: &str, cause: std::io::Error) -> Error {
    Error::caused(ErrorKind::System, format!("{}: {what}", path.display()), cause)
}
