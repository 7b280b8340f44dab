//! Containers in files, and in memory that another process has filled.
//!
//! A file is written from memory by several threads under a temporary name, with a checksum for every block of 512
//! bytes, and put in its place by a rename. It is read slice by slice, or whole like a checkpoint of a server
//! ([`Stored`]), and no block that has a checksum is used unverified. A file can be checked without keeping its bytes
//! (`check`), and one that a receive has filled gets its checksums afterwards ([`seal_file`]). Of files that a server
//! publishes, [`ServedFiles`] tells what they were.
//!
//! Invariants:
//!
//! * a file that [`write_file`] renames to its final name is complete and on the disk;
//! * a file that is being written is locked, so that others can tell it from one whose writer was killed;
//! * what is checksummed is what is written: bytes are copied first, so a change of the memory in between does no harm.

mod check;
mod origin;
mod output;
mod parts;
mod read;
mod read_ahead;
mod seal;
mod served;
mod stored;
mod write;

use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use rustix::fs::{CWD, RenameFlags, renameat_with};

pub use self::origin::Ranges;
pub use self::parts::Parts;
pub use self::read::Container;
pub use self::seal::seal_file;
pub use self::served::ServedFiles;
pub use self::stored::{Stored, StoredWaves};
pub use self::write::{FileWriting, Written, write_file};
use crate::cancel::Cancel;
use crate::error::{Error, ErrorKind};
use crate::payload::Plan;
use crate::sync::{Locked, parallel};

/// Bytes that a thread writes or reads at a time.
const CHUNK: u64 = 4 << 20;
/// Bytes that are copied and checksummed in one go on their way from or to the page cache: they stay in the cache of a
/// core.
const PIECE: usize = 256 << 10;

/// Has several threads read the blocks that `plan` wants, a chunk at a time; says how many bytes that took. Each thread
/// makes its own reader with `start`, and calls it with the first block of a chunk and the one behind its last. The
/// first error of any thread, or the cancellation, ends it.
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
    let step = usize::try_from(most).unwrap_or(usize::MAX);
    let of =
        |&(first, end): &(u64, u64)| (first..end).step_by(step).map(move |at| (at, end.min(at.saturating_add(most))));
    let chunks = runs.iter().map(|(first, end)| (end - first).div_ceil(most)).sum();
    let waiting = Mutex::new(Ok(runs.iter().flat_map(of)));
    let bytes = AtomicU64::new(0);
    // Nothing is taken after a failure, of which the first counts.
    let next = || waiting.locked().as_mut().ok().and_then(Iterator::next);
    let work = || -> Result<(), Error> {
        let mut read = start()?;
        while let Some((at, end)) = next() {
            options.check()?;
            let taken = read(at, end)?;
            bytes.fetch_add(taken, Ordering::Relaxed);
            options.progress.fetch_add(taken, Ordering::Relaxed);
        }
        Ok(())
    };
    parallel("tensorferry-read", options.threads_for(chunks), || {
        if let Err(e) = work() {
            let mut waiting = waiting.locked();
            if waiting.is_ok() {
                *waiting = Err(e);
            }
        }
    });
    waiting.into_value().map(|_| bytes.into_inner())
}

/// An error of the system about `path`; where it is too short for what is read of it, that it is damaged.
fn refused(path: &Path, what: &str, cause: io::Error) -> Error {
    if cause.kind() == io::ErrorKind::UnexpectedEof {
        let message = format!("{}: corrupt: it was cut off while it was read", path.display());
        return Error::new(ErrorKind::Corrupt, message);
    }
    Error::caused(ErrorKind::System, format!("{}: {what}", path.display()), cause)
}

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
    fn threads_for(&self, chunks: u64) -> usize {
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
    /// Bytes of the file that were written or read, checksums included, and the header, but where [`crate::Stored`] has
    /// read that before.
    pub bytes: u64,
    /// Bytes of payload that had a destination; of a file that was written, all but the checksums.
    pub wanted: u64,
    /// Bytes that were written past the page cache.
    pub direct: u64,
}

/// Renames the file or folder `path` to `target`, which must not exist: whatever appeared there meanwhile stays.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let folder = std::env::temp_dir().join(format!("tensorferry-place-{}", std::process::id()));
/// # std::fs::create_dir_all(&folder)?;
/// let (path, target) = (folder.join("new"), folder.join("name"));
/// std::fs::write(&path, "new")?;
/// std::fs::write(&target, "taken")?;
/// let refused = tensorferry_core::rename_new(&path, &target).unwrap_err();
/// assert_eq!(refused.kind(), std::io::ErrorKind::AlreadyExists);
/// assert_eq!(std::fs::read(&target)?, b"taken");
///
/// std::fs::remove_file(&target)?;
/// tensorferry_core::rename_new(&path, &target)?;
/// assert_eq!(std::fs::read(&target)?, b"new");
/// # std::fs::remove_dir_all(&folder)?;
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// The system's: `AlreadyExists` where something has the name, a link that leads nowhere included, `InvalidInput` where
/// the file system has no such rename.
pub fn rename_new(path: &Path, target: &Path) -> io::Result<()> {
    Ok(renameat_with(CWD, path, CWD, target, RenameFlags::NOREPLACE)?)
}
