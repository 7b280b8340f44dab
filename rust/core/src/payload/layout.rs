//! Items laid out as a container: the header, and the payload as pieces of memory in their order.

use bytes::Bytes;
use tensorferry_wire::container::{self, Entry, Header};

use crate::error::{Error, ErrorKind};
use crate::memory::{Item, Memory, Region};

/// A page of memory, and of a file.
pub(crate) const PAGE: u64 = 4096;

/// Contiguous bytes in memory pieces, addressed by offset.
pub(crate) struct Segments {
    starts: Vec<u64>,
    regions: Vec<Region>,
    len: u64,
    /// What owns some of the regions; others belong to the publication's owner.
    _owned: Vec<Bytes>,
}

impl Segments {
    /// The `parts` in order.
    pub(crate) fn new(mut parts: Vec<Memory>) -> Self {
        let owned = parts.iter_mut().filter_map(Memory::take_owned).collect();
        Self::over(parts.iter().map(Memory::region), owned)
    }

    /// The `regions` in order; `owned` is the memory of those that nobody else keeps.
    fn over(regions: impl Iterator<Item = Region>, owned: Vec<Bytes>) -> Self {
        let (mut starts, mut taken, mut len) = (Vec::new(), Vec::new(), 0);
        for region in regions.filter(|region| region.len() > 0) {
            starts.push(len);
            taken.push(region);
            len += region.len() as u64;
        }
        Self { starts, regions: taken, len, _owned: owned }
    }

    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// Calls `visit` with the regions that make up `[start, end)`, in order, until it returns false.
    pub(crate) fn visit(&self, start: u64, end: u64, mut visit: impl FnMut(Region) -> bool) {
        let mut at = start;
        let mut index = self.starts.partition_point(|&s| s <= start).saturating_sub(1);
        while at < end && index < self.regions.len() {
            let (first, region) = (self.starts[index], self.regions[index]);
            let last = first + region.len() as u64;
            let stop = end.min(last);
            if at < stop {
                // Differences within one region fit usize, since its length is one.
                #[allow(clippy::cast_possible_truncation)]
                let part = region.slice((at - first) as usize, (stop - first) as usize);
                if !visit(part) {
                    return;
                }
                at = stop;
            }
            index += 1;
        }
    }
}

/// A container over memory.
pub(crate) struct Layout {
    /// The header as it is written.
    pub(crate) header: Bytes,
    /// All of the container, header included.
    pub(crate) content: Segments,
    /// Where each item starts in the payload.
    pub(crate) starts: Vec<u64>,
    /// Where in the payload the checksums lie, if it has some.
    pub(crate) digests: Option<(u64, u64)>,
}

/// The rank of the checksums among the entries.
const LAST: u32 = u32::MAX;

impl Layout {
    /// Items keep their order in the header; in the payload the reserved entries come first, then those of whole pages,
    /// whose rows so often begin where a block of checksums does, and the rest by descending alignment: a mapped file has
    /// every tensor aligned. Checksums come last. The payload starts at a multiple of `align`.
    pub(crate) fn new(metadata: Vec<(String, String)>, items: Vec<Item>, align: u64) -> Result<Self, Error> {
        let invalid = |e: container::HeaderError| Error::caused(ErrorKind::Invalid, "cannot publish this state", e);
        let rank = |item: &Item| match item.name.as_str() {
            container::MANIFEST_ENTRY => 0,
            container::PICKLE_ENTRY => 1,
            container::DIGESTS_ENTRY => LAST,
            _ if (item.memory.len() as u64).is_multiple_of(PAGE) => 2,
            _ => 6 - item.dtype.alignment().trailing_zeros(),
        };
        // There may be a million items: what is noted of each is small, and what was noted is used again.
        let ranks: Vec<u32> = items.iter().map(rank).collect();
        let mut order: Vec<usize> = (0..items.len()).collect();
        order.sort_by_key(|&i| ranks[i]);
        let mut starts = vec![0; items.len()];
        let mut at = 0_u64;
        for &i in &order {
            starts[i] = at;
            at += items[i].memory.len() as u64;
        }
        let digests = ranks.iter().position(|&rank| rank == LAST);
        let digests = digests.map(|i| (starts[i], starts[i] + items[i].memory.len() as u64));
        let regions: Vec<Region> = order.into_iter().map(|i| items[i].memory.region()).collect();
        let mut owned = Vec::new();
        let entry = |(mut item, &start): (Item, &u64)| {
            owned.extend(item.memory.take_owned());
            let end = start + item.memory.len() as u64;
            Entry { name: item.name, dtype: item.dtype, shape: item.shape, start, end }
        };
        // Collected in the memory of the items.
        let entries: Vec<Entry> = items.into_iter().zip(&starts).map(entry).collect();
        let header = Header::new(metadata, entries).map_err(invalid)?;
        let header = Bytes::from(header.encode(align).map_err(invalid)?);
        let first = Memory::from(header.clone()).region();
        owned.push(header.clone());
        Ok(Self { header, content: Segments::over(std::iter::once(first).chain(regions), owned), starts, digests })
    }
}
