//! The tensors of a state that have no row of their own, but lie in host memory and are described completely by dtype,
//! shape, strides and storage: views, tensors over a part of a storage, the local parts of `DTensor`s.
//!
//! Their storages are sent as far as some tensor reaches, so `Stores` notes what is reached while the objects are
//! pickled.

use tensorferry_wire::dtype::Dtype;

use super::reached::ReachedStorage;
use super::text::write_number;
use super::view::View;
use crate::memory::Described;
use crate::rows::columns::{ByAddress, Span};

/// All views of a state, and the storages to which its objects refer.
#[derive(Default)]
pub(crate) struct Views {
    pub(crate) all: Vec<View>,
    /// Shape and strides of all views, one after the other: a view has no room for eight dimensions, since a state has many
    /// views, of few.
    dims: Vec<u64>,
    /// Address of a tensor's object, of a `DTensor` that of its local part, to the first view of it. The state keeps all
    /// of them alive.
    of: ByAddress<usize>,
    pub(crate) stores: Vec<ReachedStorage>,
    /// Identity of a storage to its place.
    pub(crate) by_key: ByAddress<usize>,
    /// The shape and the dtype that each spec of a `DTensor` says.
    pub(crate) specs: Vec<(Vec<u64>, Dtype)>,
    /// The storages in the order of their numbers in the pickle.
    pub(crate) numbered: Vec<usize>,
}

impl Views {
    /// A view of bytes that begin at `start` in the storage `store`; no leaf yet.
    pub(crate) fn view(&mut self, store: usize, start: usize, told: &Described, dtype: Dtype) -> Option<View> {
        let dims = self.dims.len();
        self.dims.extend_from_slice(told.shape());
        self.dims.extend_from_slice(told.strides());
        Some(View {
            leaf: 0,
            store,
            start,
            end: start + told.extent(),
            address: told.address,
            dims,
            rank: u8::try_from(told.shape().len()).ok()?,
            itemsize: u8::try_from(told.itemsize).ok()?,
            is_dense: told.is_dense,
            dtype,
            requires_grad: false,
            parameter: false,
            is_shared: false,
            first: 0,
            global: None,
        })
    }

    /// Adds the view of a leaf, whose object is at `id`.
    pub(crate) fn add(&mut self, id: usize, mut view: View) {
        let id = view.global.as_ref().map_or(id, |global| global.local.as_ptr() as usize);
        let number = self.all.len();
        view.first = *self.of.entry(id).or_insert(number);
        if let Some(first) = self.all.get_mut(view.first) {
            first.is_shared = true;
        }
        self.all.push(view);
    }

    /// Whether the object at `id`, which has this number if it is a leaf, is described here, or is a local part of one
    /// that is.
    pub(crate) fn is_described(&self, id: usize, leaf: Option<i64>) -> bool {
        self.of.contains_key(&id) || leaf.is_some_and(|leaf| self.leaf(leaf).is_some())
    }

    /// The shape and the strides of a view.
    pub(crate) fn dims_of(&self, view: &View) -> (&[u64], &[u64]) {
        view.dims(&self.dims)
    }

    /// The shape of the whole tensor.
    pub(crate) fn shape_of(&self, view: &View) -> &[u64] {
        match &view.global {
            Some(global) => self.specs.get(global.spec).map_or(&[], |(shape, _)| shape),
            None => self.dims_of(view).0,
        }
    }

    /// The view of the leaf with this number.
    pub(crate) fn leaf(&self, leaf: i64) -> Option<&View> {
        // Objects are numbered downwards from -1 as they are met.
        self.all.get(self.all.binary_search_by(|view| leaf.cmp(&view.leaf)).ok()?)
    }

    /// The place of the storage with the identity `key`, which `make` makes if it is met for the first time.
    pub(crate) fn store(&mut self, key: usize, make: impl FnOnce() -> ReachedStorage) -> usize {
        *self.by_key.entry(key).or_insert_with(|| {
            self.stores.push(make());
            self.stores.len() - 1
        })
    }

    /// Notes that the pickle refers to these bytes of a storage; returns what the pickle calls it.
    pub(crate) fn reach(&mut self, store: usize, span: (usize, usize)) -> usize {
        let numbered = &mut self.numbered;
        let store_ = &mut self.stores[store];
        store_.reach(span);
        *store_.number.get_or_insert_with(|| {
            numbered.push(store);
            numbered.len() - 1
        })
    }

    /// Forgets to what the pickle refers, since it is written again.
    pub(crate) fn restart(&mut self) {
        for store in self.numbered.drain(..) {
            self.stores[store].number = None;
            self.stores[store].first_reached = None;
            self.stores[store].more_reached.clear();
        }
    }

    /// The memory of all leaves, as [`crate::rows::columns::Columns::overlapping`] takes it.
    pub(crate) fn spans(&self) -> impl Iterator<Item = Span> {
        self.all.iter().filter(|view| view.leaf < 0).map(|view| {
            let address = self.stores[view.store].address;
            (view.leaf, 0, address + view.start, address + view.end)
        })
    }

    /// The leaves whose own elements may share memory.
    pub(crate) fn self_overlapping(&self) -> Vec<i64> {
        let overlaps = |view: &&View| view.leaf < 0 && view.may_overlap_itself(&self.dims);
        self.all.iter().filter(overlaps).map(|view| view.leaf).collect()
    }

    /// Of a `DTensor`'s local part, where it lies in the whole and in its storage, as a JSON object. `beginning` says
    /// where such parts of its spec lie in the whole, up to their shape.
    pub(crate) fn shard(&self, text: &mut String, view: &View, beginning: &str) {
        let (shape, strides) = self.dims_of(view);
        text.push_str(beginning);
        numbers(text, shape);
        text.push_str(",\"stride\":");
        numbers(text, strides);
        text.push_str(",\"storage\":");
        match self.stores[view.store].number {
            Some(number) => write_number(text, number as u64),
            None => text.push_str("null"),
        }
        text.push_str(",\"storage_offset\":");
        write_number(text, view.offset() as u64);
        text.push('}');
    }
}

/// `values` as a JSON array.
pub(crate) fn numbers(text: &mut String, values: &[u64]) {
    text.push('[');
    for (index, &value) in values.iter().enumerate() {
        if index > 0 {
            text.push(',');
        }
        write_number(text, value);
    }
    text.push(']');
}
