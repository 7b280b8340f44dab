//! Writing a container: several threads, each checksumming what it writes.
//!
//! The file grows under a temporary name and takes its room before the first byte, so that a full disk is known at
//! once. The rename at the end, and the synchronisation of the folder, are what commits it. After an error before the
//! rename nothing is left behind.

use std::collections::VecDeque;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use tensorferry_wire::digest::{self, Algorithm, DigestTable, FILE_BLOCK_SIZE};

use super::output::{Buffer, Output};
use super::parts::with_checksums;
use super::{CHUNK, DIRECT_FROM, FileOptions, FileReport, PIECE, refused};
use crate::error::Error;
use crate::payload::{Item, Layout, Segments, checksum_blocks};
use crate::sync::{Locked, parallel};

/// Writes `items` as a container to `path`, with checksums of all of it. The file appears under its name only when it
/// is complete and on the disk; until then it is `partial`, in the same folder, a name that must be free. What was at
/// `path` before is replaced at that moment. Where `partial` is `path` itself, the file has that name from the
/// beginning, and neither a rename nor a synchronisation of the folder follows: that is the caller's part.
///
/// From its creation on the file is locked (`flock`, shared) for as long as the [`Written`] that is returned lives,
/// where the file system has locks: so others can tell a file whose writer is at work from one whose writer was killed.
///
/// Borrowed memory of the items must stay readable until this returns.
///
/// ```
/// use bytes::Bytes;
/// use tensorferry_core::{Container, FileOptions, Item, write_file};
/// use tensorferry_wire::dtype::Dtype;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let folder = std::env::temp_dir().join(format!("tensorferry-doc-{}", std::process::id()));
/// # std::fs::create_dir_all(&folder)?;
/// let (path, partial) = (folder.join("a.safetensors"), folder.join(".a.partial"));
/// let items = vec![Item::bytes("w", Dtype::U8, &[4], Bytes::from_static(b"abcd"))];
/// let options = FileOptions::default();
/// let written = write_file(&path, &partial, Vec::new(), items, &options)?;
/// assert_eq!(written.report.bytes, std::fs::metadata(&path)?.len());
/// assert!(!partial.exists());
///
/// let container = Container::open(&path)?;
/// container.check_header_checksum(written.header)?;
/// assert_eq!(container.entry("w", &options)?.as_deref(), Some(&b"abcd"[..]));
/// # std::fs::remove_dir_all(&folder)?;
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// As [`FileWriting`]'s methods. Nothing is left behind then, and what was at `path` stays. Only where the folder
/// cannot be synchronised after the rename, the new file is at `path` already.
pub fn write_file(
    path: &Path,
    partial: &Path,
    metadata: Vec<(String, String)>,
    items: Vec<Item>,
    options: &FileOptions,
) -> Result<Written, Error> {
    let mut writing = FileWriting::begin(path, partial, metadata, items, options)?;
    writing.write(u64::MAX, options)?;
    writing.finish()
}

/// A container that is written to a file part after part, as [`write_file`] writes it; its memory needs to be there only
/// while it is written. Dropped before it is finished, it leaves nothing.
pub struct FileWriting {
    path: PathBuf,
    partial: Partial,
    layout: Layout,
    output: Output,
    /// Bytes of payload before the checksums.
    len: u64,
    /// Bytes of the container that are written.
    at: u64,
    header: u64,
    blocks: Vec<u64>,
}

impl std::fmt::Debug for FileWriting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FileWriting").field("path", &self.path).field("at", &self.at).finish_non_exhaustive()
    }
}

impl FileWriting {
    /// Makes the file `partial`, and writes the header.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Invalid`] when the items make no valid container; [`crate::ErrorKind::System`] when the
    /// system refuses, a full disk for one, or when `partial` exists, which then stays as it is.
    pub fn begin(
        path: &Path,
        partial: &Path,
        metadata: Vec<(String, String)>,
        items: Vec<Item>,
        options: &FileOptions,
    ) -> Result<Self, Error> {
        let (layout, len) = with_checksums(metadata, items)?;
        let file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .open(partial)
            .map_err(|e| refused(partial, "cannot be written", e))?;
        // On file systems without locks, other writers judge by the age of the files they find.
        let _ = file.try_lock_shared();
        let total = layout.content.len();
        let direct = if len < DIRECT_FROM { Some(false) } else { options.cached.map(|cached| !cached) };
        let output = Output::new(file, total, direct);
        let header = digest::checksum(&layout.header);
        let (path, partial) = (path.to_owned(), Partial(partial.to_owned()));
        let at = layout.header.len() as u64;
        let writing = Self { path, partial, layout, output, len, at, header, blocks: Vec::new() };
        let file = writing.output.cached();
        let no_room = format!("there is no room for its {total} bytes");
        reserve(file, total).map_err(|e| refused(&writing.partial.0, &no_room, e))?;
        file.write_all_at(&writing.layout.header, 0).map_err(|e| writing.failed(e))?;
        Ok(writing)
    }

    /// Where each item begins in the container.
    #[must_use]
    pub fn starts(&self) -> Vec<u64> {
        self.layout.starts.iter().map(|start| self.layout.header.len() as u64 + start).collect()
    }

    /// Where the container's payload ends, without the checksums.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.layout.header.len() as u64 + self.len
    }

    /// From now on the byte of the container at `at`, which belongs to borrowed memory, is at `address`, and those
    /// behind it follow. What lies before it is written.
    pub fn place(&mut self, at: u64, address: usize) {
        self.layout.content.place(at, address);
    }

    /// Writes the container up to `stop`, or to the end of the payload; what is less than a block comes with the next
    /// call.
    ///
    /// # Errors
    /// [`crate::ErrorKind::System`] when the system refuses; [`crate::ErrorKind::Cancelled`].
    pub fn write(&mut self, stop: u64, options: &FileOptions) -> Result<(), Error> {
        let stop = if stop >= self.end() { self.end() } else { stop / FILE_BLOCK_SIZE * FILE_BLOCK_SIZE };
        let blocks = write_payload(&self.output, &self.layout.content, self.at, stop.max(self.at), options);
        self.blocks.extend(blocks.map_err(|failure| match failure {
            WriteFailure::System(e) => self.failed(e),
            WriteFailure::Other(e) => e,
        })?);
        self.at = stop.max(self.at);
        Ok(())
    }

    /// Writes the checksums, and gives the file its name; all of the payload has been written.
    ///
    /// # Errors
    /// [`crate::ErrorKind::System`] when the system refuses. Only where the folder cannot be synchronised after the
    /// rename, the file is at its name already.
    pub fn finish(mut self) -> Result<Written, Error> {
        let blocks = std::mem::take(&mut self.blocks);
        let table = DigestTable { header: self.header, payload_len: self.len, blocks };
        let table = table.encode_with_block_size(&Algorithm::Crc64, FILE_BLOCK_SIZE);
        let at = self.layout.digests.map_or(self.len, |(at, _)| at);
        let file = self.output.cached();
        let written = file.write_all_at(&table, self.layout.header.len() as u64 + at).and_then(|()| file.sync_all());
        written.map_err(|e| self.failed(e))?;
        commit(&self.partial.0, &self.path)?;
        // It has its own name now; where that is the same, it stays as well.
        self.partial.0.clear();
        let direct = self.output.past_the_cache();
        let report = FileReport { bytes: self.layout.content.len(), wanted: self.len, direct };
        Ok(Written { report, header: self.header, _locked: self.output.into_cached() })
    }

    fn failed(&self, error: io::Error) -> Error {
        refused(&self.partial.0, "cannot be written", error)
    }
}

/// The name of a file that is removed when this is dropped, unless it is empty by then.
struct Partial(PathBuf);

impl Drop for Partial {
    fn drop(&mut self) {
        // An error of the removal is ignored: the first error is the one that matters.
        if !self.0.as_os_str().is_empty() {
            let _ = fs::remove_file(&self.0);
        }
    }
}

/// A file that was written, locked for as long as this lives.
#[derive(Debug)]
pub struct Written {
    /// How many bytes were written.
    pub report: FileReport,
    /// The checksum of its header.
    pub header: u64,
    _locked: File,
}

/// Takes the room for the file before the bytes come, so that a full disk is known at once.
fn reserve(file: &File, len: u64) -> io::Result<()> {
    let length = i64::try_from(len).map_err(|_| io::Error::from(io::ErrorKind::FileTooLarge))?;
    // SAFETY: a call on a file that is open; no memory is involved.
    if unsafe { libc::fallocate(file.as_raw_fd(), 0, 0, length) } == 0 {
        return Ok(());
    }
    match io::Error::last_os_error() {
        // The file system cannot do it: it will say later if it is full.
        e if matches!(e.raw_os_error(), Some(libc::EOPNOTSUPP | libc::ENOSYS)) => file.set_len(len),
        e => Err(e),
    }
}

enum WriteFailure {
    System(io::Error),
    Other(Error),
}

/// Writes `[start, end)` of the content and returns the checksums of its blocks.
fn write_payload(
    output: &Output,
    content: &Segments,
    start: u64,
    end: u64,
    options: &FileOptions,
) -> Result<Vec<u64>, WriteFailure> {
    let chunks = (end - start).div_ceil(CHUNK);
    let next = AtomicU64::new(0);
    let parts: Mutex<Vec<(u64, Vec<u64>)>> = Mutex::default();
    let failure: Mutex<Option<WriteFailure>> = Mutex::new(None);
    let fail = |e| {
        next.store(chunks, Ordering::Relaxed);
        failure.locked().get_or_insert(e);
    };
    let work = || {
        let mut buffer = match Buffer::new(usize::try_from(CHUNK.min(end - start)).unwrap_or(usize::MAX)) {
            Ok(buffer) => buffer,
            Err(e) => return fail(WriteFailure::Other(e)),
        };
        let mut under_way = VecDeque::new();
        loop {
            let chunk = next.fetch_add(1, Ordering::Relaxed);
            if chunk >= chunks {
                return;
            }
            if let Err(e) = options.check() {
                return fail(WriteFailure::Other(e));
            }
            let at = start + chunk * CHUNK;
            let stop = (at + CHUNK).min(end);
            match write_chunk(output, content, (at, stop), &mut buffer, &mut under_way) {
                Ok(digests) => {
                    options.progress.fetch_add(stop - at, Ordering::Relaxed);
                    parts.locked().push((chunk, digests));
                }
                Err(e) => return fail(WriteFailure::System(e)),
            }
        }
    };
    parallel("tensorferry-write", options.threads_for(chunks), work);
    if let Some(failure) = failure.into_value() {
        return Err(failure);
    }
    let mut parts = parts.into_value();
    parts.sort_unstable_by_key(|part| part.0);
    Ok(parts.into_iter().flat_map(|part| part.1).collect())
}

/// Writes `[at, stop)` of the content and returns the checksums of its blocks. A write that bypasses the page cache is
/// a single large one, as disks prefer; through the page cache, writes are small enough for the copy to stay in the
/// processor's cache.
fn write_chunk(
    output: &Output,
    content: &Segments,
    (at, stop): (u64, u64),
    buffer: &mut Buffer,
    under_way: &mut VecDeque<(u64, u64)>,
) -> io::Result<Vec<u64>> {
    let past = output.goes_past();
    let piece = if past { CHUNK } else { PIECE as u64 };
    let mut digests = Vec::new();
    for from in (at..stop).step_by(usize::try_from(piece).unwrap_or(usize::MAX)) {
        // The copy is checksummed and written, so a change of the memory meanwhile does no harm.
        buffer.clear();
        content.visit(from, (from + piece).min(stop), |region| {
            // SAFETY: `write_file` asks for memory that stays readable until it returns; the bytes are copied.
            buffer.extend(unsafe { region.as_slice() });
            true
        });
        digests.extend(checksum_blocks(&Algorithm::Crc64, [buffer.filled()], FILE_BLOCK_SIZE));
        if past {
            output.write_past(buffer.filled(), from)?;
        } else {
            output.write_through(buffer.filled(), from)?;
        }
    }
    if !past {
        output.send(at, stop - at, under_way)?;
    }
    Ok(digests)
}

/// Gives the file its name, and makes sure that the name is on the disk: an error of the latter leaves the file under
/// its name. A file that has it already stays as it is.
fn commit(partial: &Path, path: &Path) -> Result<(), Error> {
    if partial == path {
        return Ok(());
    }
    fs::rename(partial, path).map_err(|e| refused(path, "cannot be put in its place", e))?;
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let synced = File::open(folder).and_then(|folder| folder.sync_all());
    match synced {
        // Some file systems of FUSE and of other machines cannot synchronise folders.
        Err(e) if e.raw_os_error() != Some(libc::EINVAL) => Err(refused(folder, "cannot be synchronised", e)),
        _ => Ok(()),
    }
}
