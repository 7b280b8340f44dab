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
    // Owned bytes among the parts; borrowed ones belong to the publication's owner.
    _parts: Vec<Memory>,
}

impl Segments {
    pub(crate) fn new(parts: Vec<Memory>) -> Self {
        let (mut starts, mut regions, mut len) = (Vec::with_capacity(parts.len()), Vec::with_capacity(parts.len()), 0);
        for part in &parts {
            let region = part.region();
            if region.len() > 0 {
                starts.push(len);
                regions.push(region);
                len += region.len() as u64;
            }
        }
        let owned = parts.into_iter().filter(Memory::is_owned).collect();
        Self { starts, regions, len, _parts: owned }
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

impl Layout {
    /// Items keep their order in the header; in the payload the reserved entries come first, then those of whole pages,
    /// whose rows so often begin where a block of checksums does, and the rest by descending alignment: a mapped file has
    /// every tensor aligned. Checksums come last. The payload starts at a multiple of `align`.
    pub(crate) fn new(metadata: Vec<(String, String)>, items: Vec<Item>, align: u64) -> Result<Self, Error> {
        let invalid = |e: container::HeaderError| Error::caused(ErrorKind::Invalid, "cannot publish this state", e);
        let mut order: Vec<usize> = (0..items.len()).collect();
        order.sort_by_cached_key(|&i| match items[i].name.as_str() {
            container::MANIFEST_ENTRY => 0,
            container::PICKLE_ENTRY => 1,
            container::DIGESTS_ENTRY => u64::MAX,
            _ if (items[i].memory.region().len() as u64).is_multiple_of(PAGE) => 2,
            _ => 19 - items[i].dtype.alignment(),
        });
        let mut offsets = vec![(0, 0); items.len()];
        let mut at = 0_u64;
        for &i in &order {
            let end = at + items[i].memory.region().len() as u64;
            offsets[i] = (at, end);
            at = end;
        }
        let starts = offsets.iter().map(|&(start, _)| start).collect();
        let mut memories: Vec<Option<Memory>> = Vec::with_capacity(items.len());
        let mut entries = Vec::with_capacity(items.len());
        let mut digests = None;
        for (item, (start, end)) in items.into_iter().zip(offsets) {
            if item.name == container::DIGESTS_ENTRY {
                digests = Some((start, end));
            }
            entries.push(Entry { name: item.name, dtype: item.dtype, shape: item.shape, start, end });
            memories.push(Some(item.memory));
        }
        let header = Header::new(metadata, entries).map_err(invalid)?;
        let header = Bytes::from(header.encode(align).map_err(invalid)?);
        let mut parts = vec![Memory::from(header.clone())];
        parts.extend(order.into_iter().filter_map(|i| memories[i].take()));
        Ok(Self { header, content: Segments::new(parts), starts, digests })
    }
}
