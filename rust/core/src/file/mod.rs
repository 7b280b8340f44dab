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
mod options;
mod origin;
mod output;
mod parts;
mod place;
mod read;
mod read_ahead;
mod seal;
mod served;
mod stored;
mod stored_waves;
mod write;

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

pub use self::options::{DIRECT_FROM, FileOptions, FileReport};
pub use self::origin::Ranges;
pub use self::parts::Parts;
pub use self::place::rename_new;
pub use self::read::Container;
pub use self::seal::seal_file;
pub use self::served::ServedFiles;
pub use self::stored::Stored;
pub use self::stored_waves::StoredWaves;
pub use self::write::{FileWriting, Written, write_file};
use crate::error::{Error, ErrorKind};
use crate::payload::{Plan, Queue};
use crate::sync::parallel;

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
    parallel("tensorferry-read", options.threads_for(chunks), work);
    queue.finish()?;
    Ok(bytes.into_inner())
}

/// An error of the system about `path`; where it is too short for what is read of it, that it is damaged.
fn refused(path: &Path, what: &str, cause: std::io::Error) -> Error {
    if cause.kind() == std::io::ErrorKind::UnexpectedEof {
        let message = format!("{}: corrupt: it was cut off while it was read", path.display());
        return Error::new(ErrorKind::Corrupt, message);
    }
    Error::caused(ErrorKind::System, format!("{}: {what}", path.display()), cause)
}
