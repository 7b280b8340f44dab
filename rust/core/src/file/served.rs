//! Files behind a publication: their pages are what is sent, and their own checksums what receivers compare it with.
//!
//! A file can change without its length or its time showing it: through a mapping whose pages were written to before, or
//! by somebody who puts the time back. So the checksums that a server announces are taken from the file's table, and not
//! from its pages: a receiver that got other bytes than the table speaks of notices it. Where a part begins or ends
//! inside of a block of the table, and for keyed checksums, which the table does not have, bytes are read, and no block
//! of them is used that does not match the table.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use tensorferry_wire::digest::{self, Algorithm, FILE_BLOCK_SIZE, Hasher, Joiner};

use super::{Container, Stored};
use crate::error::Error;
use crate::memory::FilePages;
use crate::payload::Backing;

/// A part of so many bytes is checksummed from the table; of shorter ones the bytes are read, since looking up their two
/// ends would take longer.
const FROM_TABLE: u64 = 16 << 10;

/// The pages of files, each with the container in it if that has checksums.
pub struct ServedFiles {
    files: Vec<(Arc<FilePages>, Option<Arc<Stored>>)>,
    joiner: Joiner,
}

impl fmt::Debug for ServedFiles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServedFiles").field("files", &self.files).finish_non_exhaustive()
    }
}

impl ServedFiles {
    /// `files`: the pages of each, and what was opened as a container in the same file, whose checksums then count.
    #[must_use]
    pub fn new(files: Vec<(Arc<FilePages>, Option<Arc<Stored>>)>) -> Self {
        Self { files, joiner: Joiner::new(FILE_BLOCK_SIZE) }
    }

    /// The container that has checksums of `part`, and which bytes of its payload that is.
    fn place(&self, part: &[u8]) -> Option<ServedPlace<'_>> {
        let address = part.as_ptr().addr();
        self.files.iter().find_map(|(pages, stored)| {
            let container = stored.as_ref()?.container().filter(|container| container.has_checksums())?;
            let at = address.checked_sub(pages.address()).filter(|at| at + part.len() <= pages.len())? as u64;
            let start = at.checked_sub(container.payload_start)?;
            let end = start + part.len() as u64;
            (end <= container.covered).then_some(ServedPlace { container, range: start..end })
        })
    }
}

impl Backing for ServedFiles {
    fn is_unchanged(&self) -> bool {
        self.files.iter().all(|(pages, _)| pages.is_unchanged())
    }

    fn note_changed(&self) {
        self.files.iter().for_each(|(pages, _)| pages.note_changed());
    }

    fn digest(&self, algorithm: &Algorithm, parts: &[&[u8]]) -> Option<u64> {
        let mut sum = Sum::new(algorithm, &self.joiner);
        let places: Vec<_> = parts.iter().map(|part| self.place(part)).collect();
        let mut places = places.into_iter().zip(parts).peekable();
        while let Some((place, part)) = places.next() {
            let Some(ServedPlace { container, mut range }) = place else {
                sum.add(part);
                continue;
            };
            // What lies one behind the other is taken as one.
            while let Some((Some(next), _)) = places.peek()
                && std::ptr::eq(next.container, container)
                && next.range.start == range.end
            {
                range.end = next.range.end;
                places.next();
            }
            sum.add_stored(container, range).ok()?;
        }
        Some(sum.finish())
    }
}

/// Bytes of the payload of a container.
struct ServedPlace<'a> {
    container: &'a Container,
    range: Range<u64>,
}

/// A checksum that is put together from bytes in memory and parts of files.
struct Sum<'a> {
    algorithm: &'a Algorithm,
    joiner: &'a Joiner,
    /// Without a key, the checksum of what comes before the bytes of `hasher`.
    before: u64,
    hasher: Hasher,
    /// How many bytes `hasher` has seen.
    hashed: u64,
    buffer: Vec<u8>,
}

impl<'a> Sum<'a> {
    fn new(algorithm: &'a Algorithm, joiner: &'a Joiner) -> Self {
        let (before, hasher) = (digest::checksum(&[]), algorithm.hasher());
        Self { algorithm, joiner, before, hasher, hashed: 0, buffer: Vec::new() }
    }

    fn add(&mut self, bytes: &[u8]) {
        self.hasher.update(bytes);
        self.hashed += bytes.len() as u64;
    }

    /// Adds bytes of the payload of `container` as its checksums have them.
    fn add_stored(&mut self, container: &Container, range: Range<u64>) -> Result<(), Error> {
        let (len, joins) = (range.end - range.start, matches!(self.algorithm, Algorithm::Crc64));
        let is_block_end = |at: u64| at.is_multiple_of(FILE_BLOCK_SIZE) || at == container.covered;
        let whole = range.start.is_multiple_of(FILE_BLOCK_SIZE) && is_block_end(range.end);
        if !joins || (len < FROM_TABLE && !whole) {
            let Self { hasher, buffer, .. } = self;
            container.verified_blocks(range, buffer, |bytes| hasher.update(bytes))?;
            self.hashed += len;
            return Ok(());
        }
        self.settle();
        self.buffer.resize(usize::try_from(FILE_BLOCK_SIZE).unwrap_or(usize::MAX), 0);
        let joined = container.joined(range.start, range.end, self.joiner, &mut self.buffer)?;
        self.before = digest::join(self.before, joined, len);
        Ok(())
    }

    /// Adds what was hashed to what comes before it.
    fn settle(&mut self) {
        if self.hashed > 0 {
            self.before = digest::join(self.before, self.hasher.finish(), self.hashed);
            (self.hasher, self.hashed) = (self.algorithm.hasher(), 0);
        }
    }

    /// The checksum of all that was added.
    fn finish(mut self) -> u64 {
        if !matches!(self.algorithm, Algorithm::Crc64) {
            return self.hasher.finish();
        }
        self.settle();
        self.before
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on should panic")]
mod tests {
    use std::io::{Seek, SeekFrom, Write};

    use tensorferry_wire::dtype::Dtype;

    use super::*;
    use crate::file::{FileOptions, write_file};
    use crate::payload::Item;

    const LEN: usize = 300_000;

    /// A file with one tensor, what serves it, and where the tensor's bytes begin in the file.
    fn served(name: &str) -> (std::path::PathBuf, ServedFiles, usize) {
        let path = std::env::temp_dir().join(format!("tensorferry-served-{name}-{}", std::process::id()));
        let bytes: Vec<u8> = (0..LEN).map(|i| u8::try_from(i * i % 251).unwrap()).collect();
        let item = Item::bytes("w", Dtype::U8, &[LEN as u64], bytes.into());
        write_file(&path, &path.with_extension("partial"), Vec::new(), vec![item], &FileOptions::default()).unwrap();
        let stored = Stored::open(&path, None, true, &FileOptions::default()).unwrap();
        let start = usize::try_from(stored.container().unwrap().payload_start).unwrap();
        let pages = Arc::new(FilePages::map(&path).unwrap());
        (path, ServedFiles::new(vec![(pages, Some(Arc::new(stored)))]), start)
    }

    fn pages(files: &ServedFiles) -> &[u8] {
        let pages = &files.files[0].0;
        // SAFETY: the mapping is as long and lives as long, and nothing is done with the bytes but checksums.
        unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance(pages.address()), pages.len()) }
    }

    #[test]
    fn checksums_come_from_the_table_wherever_a_part_begins_and_ends() {
        let (path, files, start) = served("parts");
        let payload = &pages(&files)[start..start + LEN];
        let other = b"what is in no file".to_vec();
        for algorithm in [Algorithm::Crc64, Algorithm::Keyed([7; 32])] {
            for (from, to) in
                [(0, LEN), (0, 512), (512, 1024), (1, 2), (511, 513), (700, 40_000), (1024, LEN), (LEN, LEN)]
            {
                let split = from + (to - from) / 3;
                let parts: [&[u8]; 4] = [&other, &payload[from..split], &payload[split..to], &other];
                let found = files.digest(&algorithm, &parts).unwrap();
                assert_eq!(found, algorithm.checksum(&parts.concat()), "{algorithm:?} {from}..{to}");
            }
            assert_eq!(files.digest(&algorithm, &[&other]), Some(algorithm.checksum(&other)));
            assert_eq!(files.digest(&algorithm, &[]), Some(algorithm.checksum(b"")));
        }
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn what_has_changed_has_the_checksum_of_before_or_none() {
        let (path, files, start) = served("changed");
        let before = Algorithm::Crc64.checksum(&pages(&files)[start..start + LEN]);
        let mut file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
        file.seek(SeekFrom::Start(start as u64 + 1000)).unwrap();
        file.write_all(b"changed").unwrap();
        let payload = &pages(&files)[start..start + LEN];
        assert_ne!(Algorithm::Crc64.checksum(payload), before, "the pages are those of the file");
        assert_eq!(files.digest(&Algorithm::Crc64, &[payload]), Some(before), "the table is as it was");
        // Where bytes have to be read, no block that has changed is used.
        assert_eq!(files.digest(&Algorithm::Crc64, &[&payload[600..1001]]), None);
        assert_eq!(files.digest(&Algorithm::Crc64, &[&payload[..300]]), Some(checksum(&payload[..300])));
        assert_eq!(files.digest(&Algorithm::Keyed([7; 32]), &[payload]), None);
        std::fs::remove_file(path).unwrap();
    }

    fn checksum(bytes: &[u8]) -> u64 {
        Algorithm::Crc64.checksum(bytes)
    }
}
