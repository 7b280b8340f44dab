//! A container that is handed out part by part, in order, for a destination that is no file.
//!
//! Small items are copied together, and then checksummed. Large ones are handed out where they lie, checksummed in passing:
//! whoever gets them may read them later, and more than once. If somebody changes that memory meanwhile, what was read may
//! be something else than what was checksummed. So each is compared with its checksums when it is given back
//! ([`Parts::give_back`]), while others are on their way still, and the rest at the end ([`Parts::is_unchanged`]).

use std::collections::BTreeMap;

use bytes::Bytes;
use tensorferry_wire::container::DIGESTS_ENTRY;
use tensorferry_wire::digest::{self, Algorithm, DigestTable, FILE_BLOCK_SIZE, TableHead};
use tensorferry_wire::dtype::Dtype;

use super::{BLOCK, PIECE};
use crate::error::{Error, ErrorKind};
use crate::memory::{PAGE, Region, zeroed};
use crate::payload::{Item, Layout, checksum_blocks};

/// The least bytes in one piece that are handed out where they lie: to copy fewer costs less than a piece of their own.
const LARGE: usize = 1 << 20;

/// What [`Parts::next`] has handed out.
#[derive(Debug)]
pub enum Part {
    /// So many bytes, copied into the memory of the caller.
    Copied(usize),
    /// Memory of an item, where it lies.
    InPlace(Lent),
}

/// Memory of an item that was handed out where it lies, until it is given back.
#[derive(Debug)]
pub struct Lent {
    region: Region,
    /// The number of its first block.
    first: usize,
}

impl Lent {
    /// Where it lies.
    #[must_use]
    pub fn address(&self) -> usize {
        self.region.address()
    }

    /// How many bytes it has.
    #[must_use]
    #[allow(clippy::len_without_is_empty, reason = "it is never empty")]
    pub fn len(&self) -> usize {
        self.region.len()
    }

    /// Whether its blocks have these checksums.
    ///
    /// # Safety
    /// As for [`Parts::fill`].
    #[must_use]
    pub unsafe fn has(&self, expected: &[u64]) -> bool {
        checksums(self.region).eq(expected.iter().copied())
    }

    fn blocks(&self) -> std::ops::Range<usize> {
        self.first..self.first + self.region.len().div_ceil(BLOCK)
    }
}

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
    /// What was handed out where it lies and was not given back, by its first block.
    lent: BTreeMap<usize, Region>,
    /// Whether something that was given back had changed.
    is_changed: bool,
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
    /// [`ErrorKind::Invalid`] when the items make no valid container.
    pub fn new(metadata: Vec<(String, String)>, items: Vec<Item>) -> Result<Self, Error> {
        let (layout, covered) = with_checksums(metadata, items)?;
        let header = digest::checksum(&layout.header);
        let (blocks, table, lent) = (Vec::new(), Vec::new(), BTreeMap::new());
        Ok(Self { layout, covered, header, blocks, at: 0, table, lent, is_changed: false })
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

    /// Hands out the next bytes, as many as `part` has at most: the next ones of a large item where they lie, others copied
    /// into `part`, whose length is a multiple of 512.
    ///
    /// # Errors
    /// As for [`Parts::fill`].
    ///
    /// # Safety
    /// As for [`Parts::fill`]; and whoever reads what is handed out in place holds these `Parts` and the memory of the items
    /// meanwhile.
    pub unsafe fn next(&mut self, part: &mut [u8]) -> Result<Part, Error> {
        let start = self.layout.header.len() as u64;
        let (from, stop) = (self.at.max(start), (start + self.covered).min(self.at + part.len() as u64));
        let (mut before, mut large) = (usize::try_from(from - self.at).unwrap_or(usize::MAX), None);
        self.layout.content.visit(from, stop.max(from), |region| {
            if region.len() >= LARGE {
                large = Some(region);
            } else {
                before += region.len();
            }
            large.is_none()
        });
        let Some(region) = large else {
            // SAFETY: the caller's promise.
            return unsafe { self.fill(part) }.map(Part::Copied);
        };
        if before > 0 {
            // With the bytes of the large one that lie in the same block.
            let len = before.next_multiple_of(BLOCK).min(part.len());
            // SAFETY: the caller's promise.
            return unsafe { self.fill(&mut part[..len]) }.map(Part::Copied);
        }
        let is_last = self.at + region.len() as u64 == start + self.covered;
        let len = if is_last { region.len() } else { region.len() / BLOCK * BLOCK };
        let lent = Lent { region: region.slice(0, len), first: self.blocks.len() };
        self.blocks.extend(checksums(lent.region));
        self.lent.insert(lent.first, lent.region);
        self.at += len as u64;
        Ok(Part::InPlace(lent))
    }

    /// The checksums that the blocks of `lent` had when it was handed out.
    #[must_use]
    pub fn expected(&self, lent: &Lent) -> Vec<u64> {
        if self.table.is_empty() {
            return self.blocks[lent.blocks()].to_vec();
        }
        // The blocks have moved there.
        let words = self.table.get(TableHead::LEN..).unwrap_or_default().as_chunks::<8>().0;
        words[lent.blocks()].iter().map(|word| u64::from_le_bytes(*word)).collect()
    }

    /// Takes back what nobody reads any more, and whether it had its checksums then ([`Lent::has`]).
    pub fn give_back(&mut self, lent: &Lent, is_same: bool) {
        self.lent.remove(&lent.first);
        self.is_changed |= !is_same;
    }

    /// Whether all memory that was handed out where it lies had the bytes that were checksummed when it was given back, or
    /// has them still.
    ///
    /// # Safety
    /// As for [`Parts::fill`].
    #[must_use]
    pub unsafe fn is_unchanged(&self) -> bool {
        let still_lent = self.lent.iter().map(|(&first, &region)| Lent { region, first });
        // SAFETY: the caller's promise.
        !self.is_changed && still_lent.into_iter().all(|lent| unsafe { lent.has(&self.expected(&lent)) })
    }

    /// Fills `part` with the next bytes, as far as there are some, and says how many there were. Its length is a multiple
    /// of 512.
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

/// The checksums of the blocks of `region`, which begins with one.
fn checksums(region: Region) -> impl Iterator<Item = u64> {
    (0..region.len()).step_by(PIECE).flat_map(move |from| {
        let part = region.slice(from, region.len().min(from + PIECE));
        // SAFETY: the promise of the caller of `Parts`; the bytes are only checksummed.
        checksum_blocks(&Algorithm::Crc64, [unsafe { part.as_slice() }], FILE_BLOCK_SIZE)
    })
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
    use crate::memory::Memory;

    /// Items of odd lengths, some of them large, in memory that is handed out in place.
    fn items(memory: &[Vec<u8>]) -> Vec<Item> {
        let item = |(number, bytes): (usize, &Vec<u8>)| {
            // SAFETY: the tests keep the memory.
            let memory = unsafe { Memory::borrowed(bytes.as_ptr().expose_provenance(), bytes.len()) };
            Item::new(number.to_string(), Dtype::U8, &[bytes.len() as u64], memory)
        };
        memory.iter().enumerate().map(item).collect()
    }

    fn filled(lengths: &[usize]) -> Vec<Vec<u8>> {
        lengths.iter().map(|&len| (0..=250).cycle().skip(len % 251).take(len).collect()).collect()
    }

    fn handed_out(parts: &mut Parts, most: usize) -> (Vec<u8>, Vec<Lent>) {
        let (mut buffer, mut all, mut lent) = (vec![0; most], Vec::new(), Vec::new());
        while parts.at < parts.len() {
            // SAFETY: the memory of the items is there.
            match unsafe { parts.next(&mut buffer) }.unwrap() {
                Part::Copied(len) => all.extend_from_slice(&buffer[..len]),
                Part::InPlace(part) => {
                    let start = std::ptr::with_exposed_provenance(part.address());
                    // SAFETY: what was handed out, of memory that is there.
                    all.extend_from_slice(unsafe { std::slice::from_raw_parts(start, part.len()) });
                    lent.push(part);
                }
            }
        }
        (all, lent)
    }

    fn give_back(parts: &mut Parts, lent: &Lent) {
        // SAFETY: as above.
        let is_same = unsafe { lent.has(&parts.expected(lent)) };
        parts.give_back(lent, is_same);
    }

    #[test]
    fn what_is_handed_out_in_place_makes_the_same_container() {
        const MIB: usize = 1 << 20;
        for lengths in [
            vec![],
            vec![5],
            vec![3 * MIB],
            vec![100, 2 * MIB + 77, 0, 3, 5 * MIB, 1],
            vec![MIB - 1, MIB, MIB + 1],
            vec![7 * MIB + 511],
        ] {
            let memory = filled(&lengths);
            let mut copied = Parts::new(Vec::new(), items(&memory)).unwrap();
            let mut expected = vec![0; usize::try_from(copied.len()).unwrap().next_multiple_of(512)];
            // SAFETY: as above.
            let len = unsafe { copied.fill(&mut expected) }.unwrap();
            for most in [512, MIB, 2 * MIB, 8 * MIB] {
                let mut parts = Parts::new(Vec::new(), items(&memory)).unwrap();
                let (all, lent) = handed_out(&mut parts, most);
                assert!(all == expected[..len], "{lengths:?}, {most}");
                if most != MIB {
                    let is_large = lengths.iter().any(|&len| len >= MIB);
                    assert_eq!(!lent.is_empty(), most > MIB && is_large, "{lengths:?}, {most}");
                }
                // Half of it is given back before the end is known, which makes no difference.
                lent.iter().step_by(2).for_each(|one| give_back(&mut parts, one));
                // SAFETY: as above.
                assert!(unsafe { parts.is_unchanged() });
            }
        }
    }

    #[test]
    fn a_change_after_it_was_handed_out_is_found() {
        let mut memory = filled(&[3 << 20, 10]);
        for (item, at) in [(0, 0), (0, 5000), (0, (3 << 20) - 1), (1, 0)] {
            let mut parts = Parts::new(Vec::new(), items(&memory)).unwrap();
            handed_out(&mut parts, 8 << 20);
            memory[item][at] ^= 1;
            // What was copied may change. SAFETY: the memory is there.
            assert_eq!(unsafe { parts.is_unchanged() }, item == 1, "{item}, {at}");
        }
    }

    #[test]
    fn a_change_is_found_when_it_is_given_back_and_not_after_that() {
        let mut memory = filled(&[2 << 20, 2 << 20]);
        for (is_before, all_out) in [(true, false), (true, true), (false, false), (false, true)] {
            let mut parts = Parts::new(Vec::new(), items(&memory)).unwrap();
            let (mut buffer, mut lent) = (vec![0; 8 << 20], Vec::new());
            while lent.is_empty() {
                // SAFETY: the memory of the items is there.
                if let Part::InPlace(part) = unsafe { parts.next(&mut buffer) }.unwrap() {
                    lent.push(part);
                }
            }
            if all_out {
                handed_out(&mut parts, 8 << 20);
            }
            if !is_before {
                give_back(&mut parts, &lent[0]);
            }
            memory[0][1 << 20] ^= 1;
            if is_before {
                give_back(&mut parts, &lent[0]);
                memory[0][1 << 20] ^= 1;
            }
            handed_out(&mut parts, 8 << 20);
            // SAFETY: as above.
            assert_eq!(unsafe { parts.is_unchanged() }, !is_before, "{is_before}, {all_out}");
        }
    }
}
