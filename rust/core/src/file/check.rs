//! Checking a file without keeping its bytes: which blocks are damaged, and what the checksum of each entry is.
//!
//! Both take memory for a few pieces of the file, however long it is. The checksum of an entry comes from those of the
//! blocks it fills, where the file has some; only the blocks in which it begins and ends are read then.

use std::ops::Range;
use std::sync::Mutex;

use tensorferry_wire::digest::{Algorithm, FILE_BLOCK_SIZE, Hasher, Joiner, checksum, whole_blocks};

use super::read::Container;
use super::{FileOptions, PIECE, by_runs};
use crate::error::Error;
use crate::memory::zeroed;
use crate::payload::{BlockRuns, checksum_blocks};
use crate::sync::Locked;

/// Blocks whose checksums are read at a time.
const BATCH: u64 = 1 << 13;

impl Container {
    /// The blocks of 512 bytes that do not match their checksums, as ascending runs of payload bytes; none in a file
    /// without checksums. If all of them match, but not the checksum of their table, that is the run. All of the file is
    /// read.
    ///
    /// # Errors
    /// [`crate::ErrorKind::System`] when it cannot be read or there is no memory, [`crate::ErrorKind::Cancelled`], and
    /// those of [`crate::Ranges::get`].
    pub fn damaged(&self, options: &FileOptions) -> Result<Vec<(u64, u64)>, Error> {
        if !self.has_checksums() {
            return Ok(Vec::new());
        }
        let found: Mutex<Vec<u64>> = Mutex::default();
        let blocks = self.covered.div_ceil(FILE_BLOCK_SIZE);
        let options = &self.origin.options(options);
        by_runs(&[(0, blocks)], self.origin.chunk() / FILE_BLOCK_SIZE, options, || {
            let mut buffer = zeroed(self.origin.piece())?;
            let found = &found;
            Ok(move |first: u64, end: u64| {
                let expected = self.block_digests(first, end)?;
                let mut got = Vec::with_capacity(expected.len());
                let (mut at, stop) = (first * FILE_BLOCK_SIZE, (end * FILE_BLOCK_SIZE).min(self.covered));
                while at < stop {
                    let bytes = self.bytes(&mut buffer, at, stop)?;
                    got.extend(checksum_blocks(&Algorithm::Crc64, [bytes], FILE_BLOCK_SIZE));
                    at += bytes.len() as u64;
                }
                let bad = (first..).zip(expected.iter().zip(&got)).filter(|(_, (a, b))| a != b).map(|(block, _)| block);
                found.locked().extend(bad);
                Ok(stop - first * FILE_BLOCK_SIZE)
            })
        })?;
        let bad: BlockRuns = found.into_value().into_iter().map(|block| (block, block + 1)).collect();
        let bytes = |&(first, end): &(u64, u64)| (first * FILE_BLOCK_SIZE, (end * FILE_BLOCK_SIZE).min(self.covered));
        let mut runs: Vec<_> = bad.iter().map(bytes).collect();
        if runs.is_empty() {
            runs.extend(self.damaged_table(options)?);
        }
        Ok(runs)
    }

    /// Where the checksum of the table of checksums is, if it does not match. A reader of slices does not need it.
    fn damaged_table(&self, options: &FileOptions) -> Result<Option<(u64, u64)>, Error> {
        let (start, end) = (self.header.payload_len() - 8, self.header.payload_len());
        let mut buffer = zeroed(self.origin.piece())?;
        let found = self.hashed(Hasher::new(), self.covered, start, &mut buffer, options)?.finish();
        let expected = self.bytes(&mut buffer, start, end)?;
        Ok((expected != found.to_le_bytes()).then_some((start, end)))
    }

    /// CRC-64/NVME of the bytes of each entry, in the order of the header.
    ///
    /// Of a file with checksums, the blocks that an entry fills are not read: what is returned is what was written. The
    /// entry of the checksums itself is read.
    ///
    /// # Errors
    /// As [`Container::damaged`]; [`crate::ErrorKind::Corrupt`] when a block in which an entry begins or ends is
    /// damaged.
    pub fn entry_digests(&self, options: &FileOptions) -> Result<Vec<u64>, Error> {
        let entries = self.header.entries();
        let digests: Mutex<Vec<u64>> = Mutex::new(vec![0; entries.len()]);
        let joiner = Joiner::new(FILE_BLOCK_SIZE);
        let options = &self.origin.options(options);
        by_runs(&[(0, entries.len() as u64)], 16, options, || {
            let mut buffer = zeroed(self.origin.piece())?;
            let (digests, joiner) = (&digests, &joiner);
            Ok(move |first: u64, end: u64| {
                for number in first..end {
                    let number = usize::try_from(number).unwrap_or(usize::MAX);
                    let Some(entry) = entries.get(number) else { break };
                    let digest = if self.has_checksums() && entry.start < self.covered {
                        self.joined(entry.start, entry.end, joiner, &mut buffer)?
                    } else {
                        self.hashed(Hasher::new(), entry.start, entry.end, &mut buffer, options)?.finish()
                    };
                    digests.locked()[number] = digest;
                }
                Ok(0)
            })
        })?;
        Ok(digests.into_value())
    }

    /// The checksum of payload `[start, end)` from those of its blocks.
    pub(super) fn joined(&self, start: u64, end: u64, joiner: &Joiner, buffer: &mut [u8]) -> Result<u64, Error> {
        let (first, behind) = whole_blocks(start, end, FILE_BLOCK_SIZE);
        let mut edges = Hasher::new();
        if first == behind {
            // It begins and ends in one block, or in two neighbours.
            self.verified(start, end, buffer, |bytes| edges.update(bytes))?;
            return Ok(edges.finish());
        }
        self.verified(start, first * FILE_BLOCK_SIZE, buffer, |bytes| edges.update(bytes))?;
        let mut digest = edges.finish();
        for from in (first..behind).step_by(usize::try_from(BATCH).unwrap_or(usize::MAX)) {
            for block in self.block_digests(from, (from + BATCH).min(behind))? {
                digest = joiner.join(digest, block);
            }
        }
        let mut tail = Hasher::new();
        self.verified(behind * FILE_BLOCK_SIZE, end, buffer, |bytes| tail.update(bytes))?;
        let rest = end - behind * FILE_BLOCK_SIZE;
        Ok(if rest > 0 { Joiner::new(rest).join(digest, tail.finish()) } else { digest })
    }

    /// Calls `with` with the parts of payload `[start, end)`, which is less than two blocks, each in a verified block.
    fn verified(&self, start: u64, end: u64, buffer: &mut [u8], mut with: impl FnMut(&[u8])) -> Result<(), Error> {
        let mut at = start;
        while at < end {
            let block = at / FILE_BLOCK_SIZE;
            let (low, high) = (block * FILE_BLOCK_SIZE, ((block + 1) * FILE_BLOCK_SIZE).min(self.covered));
            let expected = self.block_digests(block, block + 1)?;
            let bytes = self.bytes(buffer, low, high)?;
            if expected.first() != Some(&checksum(bytes)) {
                return Err(self.damaged_block(block));
            }
            let stop = end.min(high);
            let inside = |at: u64| usize::try_from(at - low).unwrap_or(usize::MAX);
            with(&bytes[inside(at)..inside(stop)]);
            at = stop;
        }
        Ok(())
    }

    /// Calls `with` with the parts of payload `range`, none of which lies in a block that does not match its checksum.
    pub(super) fn verified_blocks(
        &self,
        range: Range<u64>,
        buffer: &mut Vec<u8>,
        mut with: impl FnMut(&[u8]),
    ) -> Result<(), Error> {
        let behind = range.end.div_ceil(FILE_BLOCK_SIZE);
        let mut first = range.start / FILE_BLOCK_SIZE;
        while first < behind {
            let end = behind.min(first + PIECE as u64 / FILE_BLOCK_SIZE);
            let (low, high) = (first * FILE_BLOCK_SIZE, (end * FILE_BLOCK_SIZE).min(self.covered));
            buffer.resize(buffer.len().max(usize::try_from(high - low).unwrap_or(PIECE)), 0);
            let expected = self.block_digests(first, end)?;
            let bytes = self.bytes(buffer, low, high)?;
            let found = checksum_blocks(&Algorithm::Crc64, [bytes], FILE_BLOCK_SIZE);
            if let Some(bad) =
                (first..).zip(found.iter().zip(&expected)).find(|(_, (found, expected))| found != expected)
            {
                return Err(self.damaged_block(bad.0));
            }
            let inside = |at: u64| usize::try_from(at.clamp(low, high) - low).unwrap_or(usize::MAX);
            with(&bytes[inside(range.start)..inside(range.end)]);
            first = end;
        }
        Ok(())
    }

    /// `hasher` with payload `[start, end)` added.
    fn hashed(
        &self,
        mut hasher: Hasher,
        start: u64,
        end: u64,
        buffer: &mut [u8],
        options: &FileOptions,
    ) -> Result<Hasher, Error> {
        let mut at = start;
        while at < end {
            options.check()?;
            let bytes = self.bytes(buffer, at, end)?;
            hasher.update(bytes);
            at += bytes.len() as u64;
        }
        Ok(hasher)
    }

    /// The checksums of blocks `[first, end)` in the file's table.
    fn block_digests(&self, first: u64, end: u64) -> Result<Vec<u64>, Error> {
        let Some(at) = self.digests_at else { return Ok(Vec::new()) };
        let mut table = vec![0; usize::try_from(8 * (end - first)).unwrap_or(usize::MAX)];
        self.origin.read(&self.path, &mut table, at + 8 * first)?;
        Ok(table.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word)).collect())
    }

    /// The bytes of payload `[at, end)`, or as many of them as fit into `buffer`.
    fn bytes<'a>(&self, buffer: &'a mut [u8], at: u64, end: u64) -> Result<&'a [u8], Error> {
        let len = usize::try_from(end - at).unwrap_or(usize::MAX).min(buffer.len());
        let bytes = &mut buffer[..len];
        self.origin.read(&self.path, bytes, self.payload_start + at)?;
        Ok(bytes)
    }
}
