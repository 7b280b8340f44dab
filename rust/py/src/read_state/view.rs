//! One tensor that is no row: a view of its storage, or the local part of a `DTensor`.

use pyo3::prelude::*;
use tensorferry_wire::dtype::Dtype;

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
    pub(super) dims: usize,
    pub(super) rank: u8,
    pub(super) itemsize: u8,
    pub(super) is_dense: bool,
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
    pub(super) fn dims<'a>(&self, all: &'a [u64]) -> (&'a [u64], &'a [u64]) {
        let rank = usize::from(self.rank);
        all[self.dims..self.dims + 2 * rank].split_at(rank)
    }

    /// Whether elements may share memory; true in some cases where they do not. `dims` are all there are.
    pub(super) fn may_overlap_itself(&self, dims: &[u64]) -> bool {
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
