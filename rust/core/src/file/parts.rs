//! A container that is handed out part by part, in order, for a destination that is no file.
//!
//! All bytes are copied before they are checksummed. Whoever sends a part may read it for as long as it likes, and more
//! than once: it reads what was checksummed, whatever the owner of the state does with the state's memory meanwhile.

use bytes::Bytes;
use tensorferry_wire::container::DIGESTS_ENTRY;
use tensorferry_wire::digest::{self, Algorithm, DigestTable, FILE_BLOCK_SIZE};
use tensorferry_wire::dtype::Dtype;

use super::PIECE;
use crate::error::{Error, ErrorKind};
use crate::memory::{PAGE, zeroed};
use crate::payload::{Item, Layout, checksum_blocks};

/// The parts of a container, with checksums of all of it in the last ones: the same bytes as [`crate::write_file`]
/// writes.
///
/// ```
/// use bytes::Bytes;
/// use tensorferry_core::{Item, Parts};
/// use tensorferry_wire::dtype::Dtype;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let items = vec![Item::bytes("w", Dtype::U8, &[4], Bytes::from_static(b"abcd"))];
/// let mut parts = Parts::new(Vec::new(), items)?;
/// let mut part = vec![0; 4096];
/// let mut got = 0;
/// while got < parts.len() {
///     // SAFETY: the memory of the items is their own.
///     got += unsafe { parts.fill(&mut part) }? as u64;
/// }
/// # Ok(())
/// # }
/// ```
pub struct Parts {
    layout: Layout,
    /// Bytes of payload before the checksums.
    covered: u64,
    header: u64,
    blocks: Vec<u64>,
    at: u64,
    table: Vec<u8>,
}

impl std::fmt::Debug for Parts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Parts").field("len", &self.len()).field("at", &self.at).finish_non_exhaustive()
    }
}

impl Parts {
    /// The parts of a container of `items`.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] when the items make no valid container, [`ErrorKind::System`] when there is no memory.
    pub fn new(metadata: Vec<(String, String)>, items: Vec<Item>) -> Result<Self, Error> {
        let (layout, covered) = with_checksums(metadata, items)?;
        let header = digest::checksum(&layout.header);
        Ok(Self { layout, covered, header, blocks: Vec::new(), at: 0, table: Vec::new() })
    }

    /// All bytes of the container.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.layout.content.len()
    }

    /// Whether there are none, which is never so.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The checksum of the container's header.
    #[must_use]
    pub fn header(&self) -> u64 {
        self.header
    }

    /// Where each item begins in the container.
    #[must_use]
    pub fn starts(&self) -> Vec<u64> {
        self.layout.starts.iter().map(|start| self.layout.header.len() as u64 + start).collect()
    }

    /// From now on the byte of the container at `at`, which belongs to borrowed memory, is at `address`, and those
    /// behind it follow. What lies before it has been handed out.
    pub fn place(&mut self, at: u64, address: usize) {
        self.layout.content.place(at, address);
    }

    /// Fills `part` with the next bytes, as far as there are some, and says how many there were: 0 behind the last. Its
    /// length is a multiple of 512.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] for a part of another length.
    ///
    /// # Safety
    /// Borrowed memory of the items must be readable.
    pub unsafe fn fill(&mut self, part: &mut [u8]) -> Result<usize, Error> {
        if !(part.len() as u64).is_multiple_of(FILE_BLOCK_SIZE) {
            return Err(Error::new(ErrorKind::Invalid, "the length of a part must be a multiple of 512"));
        }
        let start = self.layout.header.len() as u64;
        let (table_at, total) = (start + self.covered, self.len());
        let stop = total.min(self.at + part.len() as u64);
        let mut filled = 0;
        for from in (self.at..stop.min(table_at)).step_by(PIECE) {
            let to = (from + PIECE as u64).min(stop).min(table_at);
            let begun = filled;
            self.layout.content.visit(from, to, |region| {
                // SAFETY: the caller's promise; the bytes are copied.
                let bytes = unsafe { region.as_slice() };
                part[filled..filled + bytes.len()].copy_from_slice(bytes);
                filled += bytes.len();
                true
            });
            // The header ends with a block.
            let skip = usize::try_from(start.saturating_sub(from)).unwrap_or(usize::MAX).min(filled - begun);
            let payload = &part[begun + skip..filled];
            if !payload.is_empty() {
                self.blocks.extend(checksum_blocks(&Algorithm::Crc64, [payload], FILE_BLOCK_SIZE));
            }
        }
        if stop > table_at {
            if self.table.is_empty() {
                let blocks = std::mem::take(&mut self.blocks);
                let table = DigestTable { header: self.header, payload_len: self.covered, blocks };
                self.table = table.encode_with_block_size(&Algorithm::Crc64, FILE_BLOCK_SIZE);
            }
            let inside = |at: u64| usize::try_from(at - table_at).unwrap_or(usize::MAX);
            let rest = &self.table[inside(self.at.max(table_at))..inside(stop)];
            part[filled..filled + rest.len()].copy_from_slice(rest);
            filled += rest.len();
        }
        self.at = stop;
        Ok(filled)
    }
}

/// The layout of a container of `items` and their checksums, which are blank, and the bytes of payload before those.
///
/// # Errors
/// [`ErrorKind::Invalid`] when the items make no valid container, [`ErrorKind::System`] when there is no memory.
pub(super) fn with_checksums(metadata: Vec<(String, String)>, mut items: Vec<Item>) -> Result<(Layout, u64), Error> {
    let len: u64 = items.iter().map(|item| item.memory.region().len() as u64).sum();
    let table_len = digest::table_len(len.div_ceil(FILE_BLOCK_SIZE));
    let too_large = |_| Error::new(ErrorKind::Invalid, "too large for this machine");
    let blank = Bytes::from(zeroed(usize::try_from(table_len).map_err(too_large)?)?);
    items.push(Item::bytes(DIGESTS_ENTRY, Dtype::U8, &[table_len], blank));
    Ok((Layout::new(metadata, items, PAGE as u64)?, len))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_any_length_make_the_same_container() {
        const MIB: usize = 1 << 20;
        for lengths in [
            vec![],
            vec![5],
            vec![3 * MIB],
            vec![100, 2 * MIB + 77, 0, 3, 5 * MIB, 1],
            vec![MIB - 1, MIB, MIB + 1],
            vec![7 * MIB + 511],
        ] {
            let item = |(number, &len): (usize, &usize)| {
                let bytes: Vec<u8> = (0..=250).cycle().skip(len % 251).take(len).collect();
                Item::bytes(number.to_string(), Dtype::U8, &[len as u64], bytes.into())
            };
            let parts = || Parts::new(Vec::new(), lengths.iter().enumerate().map(item).collect()).unwrap();
            let mut expected = vec![0; usize::try_from(parts().len()).unwrap().next_multiple_of(512)];
            // SAFETY: the memory of the items is their own.
            let len = unsafe { parts().fill(&mut expected) }.unwrap();
            for most in [512, MIB, 2 * MIB, 8 * MIB] {
                let (mut parts, mut part, mut all) = (parts(), vec![0; most], Vec::new());
                while (all.len() as u64) < parts.len() {
                    // SAFETY: as above.
                    let filled = unsafe { parts.fill(&mut part) }.unwrap();
                    all.extend_from_slice(&part[..filled]);
                }
                assert!(all == expected[..len], "{lengths:?}, {most}");
            }
        }
    }
}
