//! Reading: slices straight into memory, and no block of it unverified.
//!
//! [`Container::open`] verifies the header. [`Container::read`] reads whole blocks, those of the slices and no others,
//! and compares each with its checksum before it returns.

use std::fs::{File, OpenOptions};
use std::io::{self, IoSliceMut};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use tensorferry_wire::container::{DIGESTS_ENTRY, Header};
use tensorferry_wire::digest::{self, Algorithm, FILE_BLOCK_SIZE, TableHead};

use super::{CHUNK, FileOptions, FileReport, refused};
use crate::error::{Error, ErrorKind};
use crate::payload::{Plan, Queue, Slice, checksum_blocks, slices};

/// As many slices as the system takes in one call.
const MAX_SLICES: usize = 1024;

/// A container in a file: the header is read and verified.
#[derive(Debug)]
pub struct Container {
    path: PathBuf,
    file: File,
    header: Header,
    payload_start: u64,
    /// Where in the file the checksums of the blocks begin.
    digests_at: u64,
    /// Bytes of payload that have checksums: all but those of the checksums themselves.
    covered: u64,
    checksum: u64,
}

impl Container {
    /// Opens the file at `path`.
    ///
    /// # Errors
    /// [`ErrorKind::System`] when it cannot be read; [`ErrorKind::Corrupt`] when it is cut short or its header does not
    /// match its checksum; [`ErrorKind::Protocol`] when it is no container with checksums. The path is named.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let failed = |e| refused(path, "cannot be read", e);
        let foreign = |why: String| Error::new(ErrorKind::Protocol, format!("{}: {why}", path.display()));
        // A pipe would have us wait for somebody to write to it.
        let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path).map_err(failed)?;
        let metadata = file.metadata().map_err(failed)?;
        if !metadata.is_file() {
            return Err(foreign("it is no regular file".to_owned()));
        }
        let len = metadata.len();
        let corrupt = |why: String| Error::new(ErrorKind::Corrupt, format!("{}: corrupt: {why}", path.display()));
        if len < 8 {
            return Err(corrupt(format!("it has {len} bytes, and its header is longer")));
        }
        let mut prefix = [0; 8];
        file.read_exact_at(&mut prefix, 0).map_err(failed)?;
        let start = Header::total_len(prefix).map_err(|e| foreign(format!("it is no container: {e}")))?;
        if start > len {
            return Err(corrupt(format!("it has {len} bytes, and its header alone {start}")));
        }
        let mut bytes = vec![0; usize::try_from(start).map_err(|_| corrupt("its header is too long".to_owned()))?];
        file.read_exact_at(&mut bytes, 0).map_err(failed)?;
        let header = Header::decode(&bytes).map_err(|e| corrupt(format!("its header is not valid: {e}")))?;
        let expected = start.saturating_add(header.payload_len());
        if len != expected {
            return Err(corrupt(format!("it has {len} bytes instead of {expected}")));
        }
        let Some(entry) = header.entries().iter().find(|e| e.name == DIGESTS_ENTRY) else {
            return Err(foreign(
                "it has no checksums: tensorferry did not write it, or it was written by a server".to_owned(),
            ));
        };
        let covered = entry.start;
        let blocks = covered.div_ceil(FILE_BLOCK_SIZE);
        if entry.end != header.payload_len() || entry.nbytes() != digest::table_len(blocks) {
            return Err(corrupt("its checksums do not cover it".to_owned()));
        }
        let mut head = [0; TableHead::LEN];
        file.read_exact_at(&mut head, start + covered).map_err(failed)?;
        let head = TableHead::decode(&head, FILE_BLOCK_SIZE).map_err(|e| corrupt(format!("its checksums: {e}")))?;
        if head.payload_len != covered {
            return Err(corrupt("its checksums are of something else".to_owned()));
        }
        if head.header != digest::checksum(&bytes) {
            return Err(corrupt("its header does not match its checksum".to_owned()));
        }
        let digests_at = start + covered + TableHead::LEN as u64;
        Ok(Self {
            path: path.to_owned(),
            file,
            header,
            payload_start: start,
            digests_at,
            covered,
            checksum: head.header,
        })
    }

    /// The header of the container.
    #[must_use]
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// Makes sure that this is the file whose header had this checksum when it was written.
    ///
    /// # Errors
    /// [`ErrorKind::Corrupt`] when it is another one.
    pub fn expect(&self, checksum: u64) -> Result<(), Error> {
        if checksum == self.checksum {
            return Ok(());
        }
        let message = format!(
            "{}: corrupt: it is not the file that was written under this name, but another one: its header has the \
             checksum {:016x}, and the index says {checksum:016x}",
            self.path.display(),
            self.checksum,
        );
        Err(Error::new(ErrorKind::Corrupt, message))
    }

    /// The bytes of the entry called `name`, `None` if there is none.
    ///
    /// # Errors
    /// As [`Container::read`].
    pub fn entry(&self, name: &str, options: &FileOptions) -> Result<Option<Vec<u8>>, Error> {
        let Some(entry) = self.header.entries().iter().find(|e| e.name == name) else { return Ok(None) };
        // No longer than the file is.
        let nbytes = entry.nbytes();
        let mut bytes = vec![0; usize::try_from(nbytes).map_err(|_| self.too_large(name))?];
        if nbytes > 0 {
            let address = bytes.as_mut_ptr().expose_provenance();
            // SAFETY: as many bytes as the entry has, which nobody else knows of until they have been read.
            let whole = unsafe { Slice::new(name, (entry.dtype, nbytes), (0, nbytes), address, Vec::new()) };
            self.read(&[whole], options)?;
        }
        Ok(Some(bytes))
    }

    fn too_large(&self, name: &str) -> Error {
        Error::new(ErrorKind::Invalid, format!("{}: {name:?} is too large for this machine", self.path.display()))
    }

    /// Reads `slices` into their places, and no more of the file than the blocks of 512 bytes they lie in. Several
    /// threads share the work; each verifies what it has read before it goes on.
    ///
    /// # Errors
    /// [`ErrorKind::Corrupt`] when a block does not match its checksum: file, entry and block are named;
    /// [`ErrorKind::Protocol`] when the container has other entries than the slices speak of. The memory may hold
    /// anything then.
    pub fn read(&self, slices: &[Slice], options: &FileOptions) -> Result<FileReport, Error> {
        let mut report = FileReport { bytes: self.payload_start + TableHead::LEN as u64, ..FileReport::default() };
        let placed = slices::resolve(slices, &self.header).map_err(|e| e.at(&self.path.display().to_string()))?;
        for layer in placed {
            let plan = Plan::new(layer, self.covered)?.with_block_size(FILE_BLOCK_SIZE);
            let runs = plan.wanted_blocks(0);
            let chunks = runs.iter().map(|(first, end)| (end - first).div_ceil(CHUNK / FILE_BLOCK_SIZE)).sum();
            let queue = Queue::new(&runs, CHUNK / FILE_BLOCK_SIZE);
            let bytes = AtomicU64::new(0);
            let work = || {
                let mut sink = Vec::new();
                while let Some(mut range) = queue.take(|| {}) {
                    match options.check().and_then(|()| self.read_blocks(&plan, range.at, range.end, &mut sink)) {
                        Ok(read) => {
                            bytes.fetch_add(read, Ordering::Relaxed);
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
            report.bytes += bytes.into_inner();
            report.wanted += plan.wanted();
        }
        Ok(report)
    }

    /// Reads and verifies blocks `[first, end)`; says how many bytes of the file that took.
    fn read_blocks(&self, plan: &Plan, first: u64, end: u64, sink: &mut Vec<u8>) -> Result<u64, Error> {
        let failed = |e| refused(&self.path, "cannot be read", e);
        #[allow(clippy::cast_possible_truncation, reason = "a chunk has 8192 blocks at most")]
        let mut table = vec![0; 8 * (end - first) as usize];
        self.file.read_exact_at(&mut table, self.digests_at + 8 * first).map_err(failed)?;
        let (start, stop) = (plan.block_bounds(first).0, plan.block_bounds(end - 1).1);
        #[allow(clippy::cast_possible_truncation, reason = "no more than a chunk")]
        let len = (stop - start) as usize;
        if sink.len() < len {
            sink.resize(len, 0);
        }
        plan.with_slices(start, stop, sink, |parts| read_into(&self.file, parts, self.payload_start + start))
            .map_err(failed)?;
        let found = plan.with_slices(start, stop, sink, |parts| {
            checksum_blocks(&Algorithm::Crc64, parts.iter().map(|p| &**p), FILE_BLOCK_SIZE)
        });
        let expected = table.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word));
        if let Some(at) = expected.zip(&found).position(|(expected, &found)| expected != found) {
            return Err(self.corrupt(plan, first + at as u64));
        }
        Ok((len + table.len()) as u64)
    }

    fn corrupt(&self, plan: &Plan, block: u64) -> Error {
        let (start, end) = plan.block_bounds(block);
        let message = format!(
            "{}: corrupt: block {block} (payload bytes {start}-{end}: {}) does not match its checksum: the file was \
             damaged after it was written",
            self.path.display(),
            slices::names(&self.header, start, end),
        );
        Error::new(ErrorKind::Corrupt, message)
    }
}

/// Fills `parts` with the bytes of `file` from `at` on.
fn read_into(file: &File, parts: &mut [IoSliceMut<'_>], at: u64) -> io::Result<()> {
    let (mut parts, mut at) = (parts, at);
    loop {
        IoSliceMut::advance_slices(&mut parts, 0);
        if parts.is_empty() {
            return Ok(());
        }
        let count = i32::try_from(parts.len().min(MAX_SLICES)).map_err(|_| io::ErrorKind::InvalidInput)?;
        let offset = i64::try_from(at).map_err(|_| io::Error::from(io::ErrorKind::FileTooLarge))?;
        // SAFETY: `IoSliceMut` has the layout of `iovec`; the slices are writable memory that is borrowed for the call.
        let got = unsafe { libc::preadv(file.as_raw_fd(), parts.as_ptr().cast(), count, offset) };
        match usize::try_from(got) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(got) => {
                IoSliceMut::advance_slices(&mut parts, got);
                at += got as u64;
            }
            Err(_) => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
        }
    }
}
