//! Items laid out as a container: the header, and the payload as regions of memory in their order.
//!
//! The order in the payload is not that of the items. Reserved entries come first, because a receiver needs them before
//! it can place anything; then entries of whole pages; then the rest by descending alignment; checksums last. So a file
//! that is mapped has every tensor aligned, and rows often begin where a block of checksums does.

use bytes::Bytes;
use tensorferry_wire::container::{self, Entry, Header, Shape};
use tensorferry_wire::dtype::Dtype;

use super::Segments;
use crate::error::{Error, ErrorKind};
use crate::memory::{Memory, PAGE, Region};

/// One entry of a container to publish: its name, type and shape as the header states them, and its memory.
///
/// ```
/// use bytes::Bytes;
/// use tensorferry_core::Item;
/// use tensorferry_wire::dtype::Dtype;
///
/// let item = Item::bytes("layer.0.bias", Dtype::F32, &[2], Bytes::from(vec![0; 8]));
/// # drop(item);
/// ```
#[derive(Clone, Debug)]
pub struct Item {
    pub(crate) name: String,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Shape,
    pub(crate) memory: Memory,
}

impl Item {
    /// An entry over `memory`. Whether its length fits `dtype` and `shape` is checked when it is published or written.
    pub fn new(name: impl Into<String>, dtype: Dtype, shape: &[u64], memory: Memory) -> Self {
        Self { name: name.into(), dtype, shape: Shape::from_slice(shape), memory }
    }

    /// An entry over owned bytes.
    pub fn bytes(name: impl Into<String>, dtype: Dtype, shape: &[u64], bytes: Bytes) -> Self {
        Self::new(name, dtype, shape, bytes.into())
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
    /// whose rows so often begin where a block of checksums does, and the rest by descending alignment: a mapped file
    /// has every tensor aligned. Checksums come last. The payload starts at a multiple of `align`.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] when items and metadata make no valid container.
    pub(crate) fn new(metadata: Vec<(String, String)>, items: Vec<Item>, align: u64) -> Result<Self, Error> {
        let invalid = |e: container::HeaderError| Error::caused(ErrorKind::Invalid, "cannot publish this state", e);
        let rank = |item: &Item| match item.name.as_str() {
            container::MANIFEST_ENTRY => 0,
            container::PICKLE_ENTRY => 1,
            container::DIGESTS_ENTRY => LAST,
            _ if (item.memory.len() as u64).is_multiple_of(PAGE as u64) => 2,
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
