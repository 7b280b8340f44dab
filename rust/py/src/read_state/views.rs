//! The tensors of a state that are no rows, but lie in host memory and are described completely by dtype, shape, strides
//! and storage: views, tensors over a part of a storage, the local parts of `DTensor`s.
//!
//! Their storages are sent as far as some tensor reaches, so `Stores` notes what is reached while the objects are
//! pickled.

use pyo3::prelude::*;
use tensorferry_wire::dtype::Dtype;

use super::text::write_number;
use crate::memory::Described;
use crate::rows::columns::{ByAddress, Span};

/// Memory of a tensor inside its storage.
#[allow(clippy::struct_excessive_bools, reason = "each is a property of its own, and a state has many views")]
pub(crate) struct View {
    /// Its number in the tree, of a local part that of its `DTensor`.
    pub(crate) leaf: i64,
    pub(crate) store: usize,
    /// Where its first element is, in bytes from the start of the storage.
    pub(crate) start: usize,
    /// Bytes from the start of the storage to the end of what it can reach.
    pub(crate) end: usize,
    /// Where its first element is in memory.
    pub(crate) address: usize,
    /// Where its shape begins in `Views::dims`; its strides are behind it.
    dims: usize,
    rank: u8,
    itemsize: u8,
    is_dense: bool,
    pub(crate) dtype: Dtype,
    pub(crate) requires_grad: bool,
    pub(crate) parameter: bool,
    /// Whether several views are of the same object of Python, this one being the first of them.
    pub(crate) is_shared: bool,
    /// The first view of the same object of Python, of a `DTensor`: of its local part.
    pub(crate) first: usize,
    /// What only a `DTensor` has.
    pub(crate) global: Option<Global>,
}

/// What a `DTensor` has besides its local part.
pub(crate) struct Global {
    pub(crate) local: Py<PyAny>,
    pub(crate) local_requires_grad: bool,
    /// Its spec, among those that differ.
    pub(crate) spec: usize,
}

impl View {
    /// The view's first element in its storage, counted in elements.
    pub(crate) fn offset(&self) -> usize {
        self.start / usize::from(self.itemsize)
    }

    /// The view's shape and strides, out of `all` dimensions of all views.
    fn dims<'a>(&self, all: &'a [u64]) -> (&'a [u64], &'a [u64]) {
        let rank = usize::from(self.rank);
        all[self.dims..self.dims + 2 * rank].split_at(rank)
    }

    /// Whether elements may share memory; true in some cases where they do not. `dims` are all there are.
    fn may_overlap_itself(&self, dims: &[u64]) -> bool {
        if self.is_dense {
            return false;
        }
        let (shape, strides) = self.dims(dims);
        let mut steps: Vec<_> = strides.iter().zip(shape).filter(|(_, dim)| **dim > 1).collect();
        steps.sort_unstable();
        let mut end = 1;
        for (&step, &dim) in steps {
            if step < end {
                return true;
            }
            end = step.saturating_mul(dim);
        }
        false
    }
}

/// A storage to which objects refer.
pub(crate) struct Store {
    pub(crate) object: Py<PyAny>,
    pub(crate) address: usize,
    pub(crate) nbytes: usize,
    /// Whether it is known to lie in host memory.
    pub(crate) is_on_host: bool,
    /// What the pickle calls it.
    pub(crate) number: Option<usize>,
    /// The bytes that are reached: first and last (exclusive). Most storages are reached by one tensor, which needs no
    /// memory for a list.
    reached: Option<(usize, usize)>,
    reached_too: Vec<(usize, usize)>,
}

/// A gap of at most this many bytes that nothing reaches is sent along: a separate entry would cost as much.
const JOIN_GAP: usize = 512;

impl Store {
    pub(crate) fn new(object: Py<PyAny>, address: usize, nbytes: usize, is_on_host: bool) -> Self {
        Self { object, address, nbytes, is_on_host, number: None, reached: None, reached_too: Vec::new() }
    }

    /// Notes that the bytes `span` of the storage are reached.
    fn reach(&mut self, span: (usize, usize)) {
        if self.reached.is_none() {
            self.reached = Some(span);
        } else if self.reached != Some(span) {
            self.reached_too.push(span);
        }
    }

    /// Puts the runs of bytes to send into `runs`: the union of all spans, with runs joined over small gaps.
    pub(crate) fn covered(&mut self, runs: &mut Vec<(usize, usize)>) {
        runs.clear();
        if !self.reached_too.is_empty() {
            self.reached_too.extend(self.reached);
            self.reached_too.sort_unstable();
        }
        let one = self.reached.filter(|_| self.reached_too.is_empty());
        for &(start, end) in self.reached_too.iter().chain(&one) {
            match runs.last_mut() {
                Some(last) if start <= last.1 + JOIN_GAP => last.1 = last.1.max(end),
                _ if end > start => runs.push((start, end)),
                _ => {}
            }
        }
    }
}

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
    pub(crate) stores: Vec<Store>,
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

    /// The storage with the identity `key`, and whether it had been met before.
    pub(crate) fn store(&mut self, key: usize, make: impl FnOnce() -> Store) -> usize {
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
            self.stores[store].reached = None;
            self.stores[store].reached_too.clear();
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

    /// What the shards of `DTensor`s with the spec `spec` begin with: where they lie in the whole, whose element at
    /// `offsets` is their first.
    pub(crate) fn shard_of(&self, spec: usize, offsets: &[u64]) -> String {
        let mut text = String::from("{\"dtype\":\"torch.");
        if let Some((shape, dtype)) = self.specs.get(spec) {
            text.push_str(typed(*dtype).unwrap_or_default());
            text.push_str("\",\"global_shape\":");
            numbers(&mut text, shape);
        }
        text.push_str(",\"offsets\":");
        numbers(&mut text, offsets);
        text.push_str(",\"shape\":");
        text
    }

    /// Of a `DTensor`'s local part, where it lies in the whole and in its storage, as a JSON object. `beginning` is what
    /// `shard_of` returns for its spec.
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

/// What torch calls a dtype, `None` for those whose storages it pickles without a dtype.
pub(crate) fn typed(dtype: Dtype) -> Option<&'static str> {
    let is_typed = matches!(
        dtype,
        Dtype::Bool
            | Dtype::U8
            | Dtype::I8
            | Dtype::I16
            | Dtype::F16
            | Dtype::BF16
            | Dtype::I32
            | Dtype::F32
            | Dtype::C64
            | Dtype::F64
            | Dtype::I64
    );
    dtype.array_name().filter(|_| is_typed)
}
