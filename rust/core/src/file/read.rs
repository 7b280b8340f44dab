//! Reading: slices or whole entries straight into memory, and no block of it unverified.
//!
//! [`Container::open`] verifies the header. [`Container::read`] reads whole blocks, those of the slices and no others,
//! and compares each with its checksum before it returns. What a server sent and somebody saved has no checksums
//! ([`Container::open_any`]): of that, only the lengths can be checked.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use tensorferry_wire::container::{self, DIGESTS_ENTRY, Header};
use tensorferry_wire::digest::{self, Algorithm, FILE_BLOCK_SIZE, TableHead};

use super::origin::{self, Origin, Ranges};
use super::output::Buffer;
use super::read_ahead::{AHEAD, Ahead, read_cached, request};
use super::{FileOptions, FileReport, PIECE, by_runs, refused};
use crate::error::{Error, ErrorKind};
use crate::memory::{check_room, nontemporal, zeroed_for};
use crate::payload::{BlockRuns, Plan, Slice, checksum_blocks, copy_with_checksums, slices};
use crate::sync::Locked;

/// Bytes of the checksum of a block.
const DIGEST: u64 = 8;
/// Blocks whose checksums are held at a time, of a container that is read by ranges: those of 4 GiB.
const WAVE: u64 = 1 << 23;

/// A container in a file: the header is read and verified.
#[derive(Debug)]
pub struct Container {
    pub(super) path: PathBuf,
    pub(super) origin: Origin,
    pub(super) header: Header,
    pub(super) payload_start: u64,
    /// Where in the file the checksums of the blocks begin, if it has some.
    pub(super) digests_at: Option<u64>,
    /// Bytes of payload that have checksums: all but those of the checksums themselves.
    pub(super) covered: u64,
    checksum: u64,
}

impl Container {
    /// Opens the file at `path`.
    ///
    /// # Errors
    /// [`ErrorKind::System`] when it cannot be read or there is no memory for its header; [`ErrorKind::Corrupt`] when
    /// it has another length than its header says, its header is not valid or does not match its checksum, or its table
    /// of checksums does not cover it; [`ErrorKind::Protocol`] when it is no container with checksums. The path is
    /// named.
    pub fn open(path: &Path) -> Result<Self, Error> {
        Self::open_any(path)?.with_checksums()
    }

    /// The same container, if it has checksums.
    ///
    /// # Errors
    /// [`ErrorKind::Protocol`] when it has none.
    pub fn with_checksums(self) -> Result<Self, Error> {
        if self.digests_at.is_some() {
            return Ok(self);
        }
        let why = "it has no checksums: tensorferry did not write it, or it was written by a server";
        Err(Error::new(ErrorKind::Protocol, format!("{}: {why}", self.path.display())))
    }

    /// Opens the file at `path`, which may be one without checksums: a safetensors file of another program, or a
    /// container that a server sent.
    ///
    /// # Errors
    /// As [`Container::open`], but for the checksums it does not have.
    pub fn open_any(path: &Path) -> Result<Self, Error> {
        let failed = |e| refused(path, "cannot be read", e);
        let foreign = |why: String| Error::new(ErrorKind::Protocol, format!("{}: {why}", path.display()));
        // A pipe would have us wait for somebody to write to it.
        let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path).map_err(failed)?;
        let metadata = file.metadata().map_err(failed)?;
        if !metadata.is_file() {
            return Err(foreign("it is no regular file".to_owned()));
        }
        Self::decode(path, Origin::File(file), metadata.len())
    }

    /// Opens the container whose bytes `ranges` reads, which may be one without checksums; `name` is what messages call
    /// it.
    ///
    /// # Errors
    /// As [`Container::open_any`], and those of [`Ranges::get`]; [`ErrorKind::Protocol`] too when that returns another
    /// number of bytes.
    pub fn open_ranges(name: &Path, ranges: Box<dyn Ranges>) -> Result<Self, Error> {
        let len = ranges.len();
        Self::decode(name, Origin::Ranges(ranges), len)
    }

    /// Reads the header of a container of `len` bytes.
    fn decode(path: &Path, origin: Origin, len: u64) -> Result<Self, Error> {
        let foreign = |why: String| Error::new(ErrorKind::Protocol, format!("{}: {why}", path.display()));
        let corrupt = |why: String| Error::new(ErrorKind::Corrupt, format!("{}: corrupt: {why}", path.display()));
        if len < 8 {
            return Err(corrupt(format!("it has {len} bytes, and its header is longer")));
        }
        let mut prefix = [0; 8];
        origin.read(path, &mut prefix, 0)?;
        let start = Header::total_len(prefix).map_err(|e| foreign(format!("it is no container: {e}")))?;
        if start > len {
            return Err(corrupt(format!("it has {len} bytes, and its header alone {start}")));
        }
        let mut bytes = zeroed_for(start, "the header").map_err(|e| e.at(&path.display().to_string()))?;
        origin.read(path, &mut bytes, 0)?;
        check_room(start * container::DECODED_COST, "the header").map_err(|e| e.at(&path.display().to_string()))?;
        let header = Header::decode(&bytes).map_err(|e| corrupt(format!("its header is not valid: {e}")))?;
        let expected = start.saturating_add(header.payload_len());
        if len != expected {
            return Err(corrupt(format!("it has {len} bytes instead of {expected}")));
        }
        let checksum = digest::checksum(&bytes);
        let path = path.to_owned();
        let Some(entry) = header.entries().iter().find(|e| e.name == DIGESTS_ENTRY) else {
            let covered = header.payload_len();
            return Ok(Self { path, origin, header, payload_start: start, digests_at: None, covered, checksum });
        };
        let covered = entry.start;
        let blocks = covered.div_ceil(FILE_BLOCK_SIZE);
        if entry.end != header.payload_len() || entry.nbytes() != digest::table_len(blocks) {
            return Err(corrupt("its checksums do not cover it".to_owned()));
        }
        let mut head = [0; TableHead::LEN];
        origin.read(&path, &mut head, start + covered)?;
        let head = TableHead::decode(&head, FILE_BLOCK_SIZE).map_err(|e| corrupt(format!("its checksums: {e}")))?;
        if head.payload_len != covered {
            let described = head.payload_len;
            return Err(corrupt(format!("its checksums are of {described} bytes, and it has {covered} before them")));
        }
        if head.header != checksum {
            return Err(corrupt("its header does not match its checksum".to_owned()));
        }
        let digests_at = Some(start + covered + TableHead::LEN as u64);
        Ok(Self { path, origin, header, payload_start: start, digests_at, covered, checksum })
    }

    /// Whether the bytes of the file have checksums.
    #[must_use]
    pub fn has_checksums(&self) -> bool {
        self.digests_at.is_some()
    }

    /// The header of the container.
    #[must_use]
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// The checksum of the header.
    #[must_use]
    pub fn checksum(&self) -> u64 {
        self.checksum
    }

    /// Checks that this is the file whose header had this checksum when it was written.
    ///
    /// # Errors
    /// [`ErrorKind::Corrupt`] when it is another one.
    pub fn check_header_checksum(&self, checksum: u64) -> Result<(), Error> {
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
        let mut bytes = zeroed_for(nbytes, name).map_err(|e| e.at(&self.path.display().to_string()))?;
        if nbytes > 0 {
            let address = bytes.as_mut_ptr().expose_provenance();
            // SAFETY: as many bytes as the entry has, which nobody else knows of until they have been read.
            let whole = unsafe { Slice::new(name, (entry.dtype, nbytes), (0, nbytes), address, Vec::new()) };
            self.read(&[whole], options)?;
        }
        Ok(Some(bytes))
    }

    /// Reads `slices` into their places, and no more of the file than the blocks of 512 bytes they lie in and the
    /// checksums of those; through [`Ranges`], also what little lies between two of them. Several threads share the
    /// work; each verifies what it has read before it goes on, where the container has checksums.
    ///
    /// # Errors
    /// [`ErrorKind::Corrupt`] when a block does not match its checksum: file, entry and block are named; or when the
    /// file was cut off meanwhile; [`ErrorKind::Protocol`] when the container has other entries than the slices speak of; [`ErrorKind::Invalid`]
    /// when a slice goes beyond its entry; [`ErrorKind::System`] when the file cannot be read or there is no memory;
    /// [`ErrorKind::Cancelled`]; and those of [`Ranges::get`]. The memory may hold anything then.
    pub fn read(&self, slices: &[Slice], options: &FileOptions) -> Result<FileReport, Error> {
        let mut report = FileReport { bytes: self.payload_start + TableHead::LEN as u64, ..FileReport::default() };
        let placed = slices::resolve(slices, &self.header).map_err(|e| e.at(&self.path.display().to_string()))?;
        for layer in placed {
            let plan = Plan::new(layer, self.covered)?.with_block_size(FILE_BLOCK_SIZE);
            report.bytes += self.read_plan(&plan, options)?;
            report.wanted += plan.wanted();
        }
        Ok(report)
    }

    /// Bytes of payload that have checksums, or could have some.
    pub(super) fn covered(&self) -> u64 {
        self.covered
    }

    /// Reads what `plan`, which has blocks of a file, wants; says how many bytes of the file that took.
    pub(super) fn read_plan(&self, plan: &Plan, options: &FileOptions) -> Result<u64, Error> {
        let options = self.origin.options(options);
        let runs = plan.wanted_blocks(self.origin.gap());
        let mut bytes = 0;
        for runs in self.waves(&runs) {
            let tables = self.tables(&runs, &options)?;
            bytes += tables.iter().map(|table| table.1.len() as u64).sum::<u64>();
            let ahead = Ahead { runs: &runs, requested: Mutex::new(0..0) };
            bytes += by_runs(&runs, self.origin.chunk() / FILE_BLOCK_SIZE, &options, || {
                let size = if self.origin.is_file() { PIECE } else { 0 };
                let (ahead, tables, mut buffer) = (&ahead, &tables[..], Buffer::new(size)?);
                Ok(move |first, end| self.read_blocks(plan, (first, end), (ahead, tables), &mut buffer))
            })?;
        }
        Ok(bytes)
    }

    /// `runs` of blocks, divided into those whose checksums are read at a time; all of them for a file, whose checksums
    /// are read with its blocks.
    fn waves(&self, runs: &[(u64, u64)]) -> Vec<Vec<(u64, u64)>> {
        if self.origin.is_file() || self.digests_at.is_none() {
            return vec![runs.to_vec()];
        }
        let mut waves = vec![Vec::new()];
        let mut room = WAVE;
        for &(mut first, end) in runs {
            while first < end {
                if room == 0 {
                    waves.push(Vec::new());
                    room = WAVE;
                }
                let stop = end.min(first + room);
                if let Some(wave) = waves.last_mut() {
                    wave.push((first, stop));
                }
                room -= stop - first;
                first = stop;
            }
        }
        waves
    }

    /// The checksums of the blocks in `runs`, in as few requests as that takes: the first block of each stretch, and its
    /// table. None for a file.
    fn tables(&self, runs: &[(u64, u64)], options: &FileOptions) -> Result<Vec<(u64, Vec<u8>)>, Error> {
        let Some(at) = self.digests_at.filter(|_| !self.origin.is_file()) else { return Ok(Vec::new()) };
        let near = self.origin.gap() / DIGEST;
        let mut joined = BlockRuns::default();
        for &run in runs {
            joined.push(run, near);
        }
        let tables: Mutex<Vec<(u64, Vec<u8>)>> = Mutex::default();
        by_runs(&joined, self.origin.chunk() / DIGEST, options, || {
            let tables = &tables;
            Ok(move |first: u64, end: u64| {
                let mut table = zeroed_for(DIGEST * (end - first), "checksums")?;
                self.origin.read(&self.path, &mut table, at + DIGEST * first)?;
                tables.locked().push((first, table));
                Ok(0)
            })
        })?;
        let mut tables = tables.into_value();
        tables.sort_unstable_by_key(|table| table.0);
        Ok(tables)
    }

    /// The checksums of blocks `[first, end)`, and how many bytes were read for them: those in `tables`, or the file's.
    fn table(&self, first: u64, end: u64, tables: &[(u64, Vec<u8>)]) -> Result<(Vec<u8>, u64), Error> {
        let Some(at) = self.digests_at else { return Ok((Vec::new(), 0)) };
        let len = DIGEST * (end - first);
        let mut table = Vec::new();
        if self.origin.is_file() {
            #[allow(clippy::cast_possible_truncation, reason = "a chunk has 8192 blocks at most")]
            table.resize(len as usize, 0);
            self.origin.read(&self.path, &mut table, at + DIGEST * first)?;
            return Ok((table, len));
        }
        let behind = tables.partition_point(|table| table.0 <= first);
        let mut block = first;
        for (start, held) in &tables[behind.saturating_sub(1)..] {
            let from = usize::try_from(DIGEST * (block - start)).unwrap_or(usize::MAX);
            let to = usize::try_from(DIGEST * (end - start)).unwrap_or(usize::MAX).min(held.len());
            table.extend_from_slice(held.get(from..to).unwrap_or_default());
            block = first + table.len() as u64 / DIGEST;
            if block >= end {
                break;
            }
        }
        Ok((table, 0))
    }

    /// Reads and verifies blocks `[first, end)`; says how many bytes of the file that took.
    ///
    /// Those of a file come through a buffer that stays in the processor's cache, and leave it with stores that go past
    /// the cache: a copy by the kernel straight to their places would bring those into the cache first. What comes by
    /// ranges is in memory already, and is copied once, from there.
    fn read_blocks(
        &self,
        plan: &Plan,
        (first, end): (u64, u64),
        (ahead, tables): (&Ahead<'_>, &[(u64, Vec<u8>)]),
        buffer: &mut Buffer,
    ) -> Result<u64, Error> {
        let (table, of_table) = self.table(first, end, tables)?;
        let mut expected = table.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word));
        let (start, stop) = (plan.block_bounds(first).0, plan.block_bounds(end - 1).1);
        plan.populate(start, stop);
        let (mut at, mut found) = (start, Vec::new());
        let mut place = |bytes: &[u8]| {
            found.clear();
            plan.scatter(at, bytes, |from, to| {
                if from.len() == bytes.len() && self.has_checksums() {
                    copy_with_checksums(from, to, &mut found);
                } else {
                    nontemporal::copy(from, to);
                }
            });
            if found.is_empty() && self.has_checksums() {
                found = checksum_blocks(&Algorithm::Crc64, [bytes], FILE_BLOCK_SIZE);
            }
            if let Some(bad) = found.iter().position(|&found| expected.next() != Some(found)) {
                return Err(self.damaged_block(at / FILE_BLOCK_SIZE + bad as u64));
            }
            at += bytes.len() as u64;
            Ok(())
        };
        #[allow(clippy::cast_possible_truncation, reason = "no more than a chunk")]
        let len = (stop - start) as usize;
        match &self.origin {
            Origin::Ranges(ranges) => {
                let bytes = origin::got(ranges.as_ref(), &self.path, self.payload_start + start, len)?;
                bytes.chunks(PIECE).try_for_each(place)?;
            }
            Origin::File(file) => {
                for from in (0..len).step_by(PIECE) {
                    let bytes = buffer.room(PIECE.min(len - from));
                    self.fill(file, bytes, start + from as u64, ahead)?;
                    place(bytes)?;
                }
            }
        }
        Ok(stop - start + of_table)
    }

    /// Fills `bytes` with those of the payload from `at` on. If they are not in the page cache, what is wanted of the
    /// next [`AHEAD`] bytes is requested first: the disk has more to do then than one read after the other gives it.
    fn fill(&self, file: &File, bytes: &mut [u8], at: u64, ahead: &Ahead<'_>) -> Result<(), Error> {
        let cached = read_cached(file, bytes, self.payload_start + at);
        if cached == bytes.len() {
            return Ok(());
        }
        let (rest, at) = (&mut bytes[cached..], at + cached as u64);
        ahead.take(at, (at + AHEAD).min(self.covered), |start, end| {
            request(file, self.payload_start + start, self.payload_start + end);
        });
        self.origin.read(&self.path, rest, self.payload_start + at)
    }

    /// The error for a `block` of the file that does not match its checksum.
    pub(super) fn damaged_block(&self, block: u64) -> Error {
        let (low, high) = (block * FILE_BLOCK_SIZE, ((block + 1) * FILE_BLOCK_SIZE).min(self.covered));
        let message = format!(
            "{}: corrupt: block {block} (payload bytes {low}-{high}: {}) does not match its checksum: the file was \
             damaged after it was written",
            self.path.display(),
            slices::names(&self.header, low, high),
        );
        Error::new(ErrorKind::Corrupt, message)
    }
}
