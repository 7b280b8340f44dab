//! Where the entries of a container go: memory that was given for them, or a fresh arena.

use std::sync::Arc;

use tensorferry_wire::container::{self, Entry, Header};

use super::{Extent, Plan};
use crate::error::{Error, ErrorKind};
use crate::memory::{Arena, ArenaLayout, ArenaPool};

/// Where the payload goes.
#[derive(Debug)]
pub enum Destination {
    /// Everything into a fresh arena.
    Fresh,
    /// Entries that have an address go there, the others into a fresh arena.
    Given(Addresses),
}

/// An address for each entry of a header, or none.
#[derive(Debug)]
pub struct Addresses(Vec<Option<usize>>);

impl Destination {
    /// Entry `i` goes to `addresses[i]`, as many bytes as the header says; entries without one into a fresh arena.
    ///
    /// # Safety
    /// Each address must be that of writable memory of the entry's length, which nobody else uses until
    /// [`crate::Remote::fetch`] or [`crate::Stored::fetch`] has returned, or a fetch by waves has ended. Two entries
    /// must not share memory.
    #[must_use]
    pub unsafe fn given(addresses: Vec<Option<usize>>) -> Self {
        Self::Given(Addresses(addresses))
    }

    /// Where each entry goes, `None` being the fresh arena; nothing where all of them go there.
    pub(crate) fn addresses(self) -> Option<Vec<Option<usize>>> {
        match self {
            Self::Fresh => None,
            Self::Given(Addresses(addresses)) => Some(addresses),
        }
    }
}

/// An arena, where each entry lies in it, and every destination.
pub(crate) struct ReceiveMemory {
    pub(crate) arena: Arena,
    pub(crate) offsets: Vec<Option<u64>>,
    pub(crate) extents: Vec<Extent>,
}

impl ReceiveMemory {
    /// Lays out the arena and lists every destination, neighbours as one. The entries numbered in `elsewhere`, all of
    /// which must be there, get none, and neither do control entries without an address.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] when there are not as many addresses as entries, [`ErrorKind::System`] when there is no
    /// memory for the arena.
    pub(crate) fn prepare(
        header: &Header,
        addresses: Option<&[Option<usize>]>,
        elsewhere: &[usize],
        pool: Option<Arc<ArenaPool>>,
    ) -> Result<Self, Error> {
        let entries = header.entries();
        if let Some(given) = addresses.map(<[_]>::len).filter(|&given| given != entries.len()) {
            let message = format!("{given} destinations for {} entries", entries.len());
            return Err(Error::new(ErrorKind::Invalid, message));
        }
        let mut here = vec![true; entries.len()];
        for &index in elsewhere {
            here[index] = false;
        }
        let address_of = |index: usize| addresses.filter(|_| here[index]).and_then(|addresses| addresses[index]);
        let mut offsets = vec![None; entries.len()];
        let mut layout = ArenaLayout::default();
        // In payload order, so that neighbours on the wire are neighbours in memory and one receive fills many.
        for (index, entry) in header.in_payload_order() {
            if address_of(index).is_none() && here[index] && !is_control(entry) {
                offsets[index] = Some(layout.add(entry.nbytes()));
            }
        }
        layout.close();
        let arena = Arena::of(&layout, pool)?;
        let mut extents: Vec<Extent> = Vec::new();
        for (index, entry) in header.in_payload_order() {
            let address = match (address_of(index), &mut offsets[index]) {
                (Some(address), _) => address,
                (None, Some(offset)) => {
                    *offset = layout.offset(*offset, entry.nbytes());
                    arena.address_of(*offset, entry.nbytes())
                }
                (None, None) => continue,
            };
            // SAFETY: the arena is ours, its entries do not overlap, and it is handed out only after the transfer;
            // for given addresses `Destination::given` took the promise.
            let extent = unsafe { Extent::new(entry.start, entry.end - entry.start, address) };
            if !extents.last_mut().is_some_and(|last| last.join(&extent)) {
                extents.push(extent);
            }
        }
        Ok(Self { arena, offsets, extents })
    }

    /// The plan of all destinations, the arena, and where each entry lies in it.
    pub(crate) fn plan(self, payload_len: u64) -> Result<(Plan, Arena, Vec<Option<u64>>), Error> {
        let fresh = self.arena.fresh_pages().cloned();
        let plan = Plan::new(self.extents, payload_len)?.with_fresh_pages(fresh);
        Ok((plan, self.arena, self.offsets))
    }
}

/// Whether an entry is read when the container is opened and has no destination.
pub(crate) fn is_control(entry: &Entry) -> bool {
    [container::MANIFEST_ENTRY, container::PICKLE_ENTRY].contains(&entry.name.as_str())
}
