//! Memory that transfers fill: an arena, and the tensors and buffers over its entries.

use std::ffi::c_int;
use std::sync::Arc;

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyType};
use tensorferry_core::{Arena, Hold};
use tensorferry_wire::container::{Entry, Header};

use super::YIELD_INTERVAL;
use super::buffers::expose;
use super::exchange::Exchange;
use crate::errors;

/// Memory a transfer filled, or is going to fill. A tensor over an entry keeps the region of it that the entry lies in,
/// and this object all of them.
#[pyclass(name = "Arena", module = "tensorferry._native", frozen)]
pub(crate) struct PyArena {
    arena: Arena,
    /// Describes the entries; those of storages that were only announced have no header.
    header: Option<Arc<Header>>,
    /// Where each lies and its length in bytes, `None` if it is not here.
    places: Vec<Option<(u64, u64)>>,
}

impl PyArena {
    pub(crate) fn new(arena: Arena, header: Arc<Header>, offsets: Vec<Option<u64>>) -> Self {
        let sizes = header.entries().iter().map(Entry::nbytes);
        let places = offsets.into_iter().zip(sizes).map(|(at, nbytes)| Some((at?, nbytes))).collect();
        Self { arena, header: Some(header), places }
    }
}

#[pymethods]
impl PyArena {
    /// Memory for storages of `sizes` bytes, all zero. The system gives a page when it is first touched, so storages
    /// that a source only announced cost nothing.
    ///
    /// # Errors
    /// `SystemRefused` when the machine has less memory than all of them together.
    #[new]
    fn sparse(py: Python<'_>, sizes: Vec<u64>) -> PyResult<Self> {
        let (arena, offsets) = Arena::sparse(&sizes).map_err(|e| errors::to_py(py, &e))?;
        let places = offsets.into_iter().zip(sizes).map(Some).collect();
        Ok(Self { arena, header: None, places })
    }

    /// The memory of entry `number`, `None` if the entry is not in this arena or has no bytes.
    fn part(&self, number: usize) -> Option<PyPart> {
        let (at, nbytes) = self.places.get(number).copied().flatten()?;
        let (address, hold) = self.arena.hold(at, nbytes)?;
        Some(PyPart { address, nbytes: usize::try_from(nbytes).ok()?, _hold: hold })
    }

    /// Tensors over the plain entries, each with a storage of its own; `tensor` is torch's class.
    ///
    /// `None` stands for an entry that is not in the arena, is empty, or cannot be made without Python; the places of
    /// `None` in the list are returned as well. Other threads of the interpreter get a turn after every
    /// `YIELD_INTERVAL` tensors.
    fn tensors<'py>(&self, tensor: &Bound<'py, PyType>) -> PyResult<(Bound<'py, PyList>, Vec<usize>)> {
        let py = tensor.py();
        let exchange = Exchange::of(tensor);
        let (made, mut missing) = (PyList::empty(py), Vec::new());
        let entries = self.header.as_ref().map_or(&[][..], |header| header.entries());
        let plain = entries.iter().zip(&self.places).filter(|(entry, _)| entry.is_plain());
        for (count, (entry, &place)) in plain.enumerate() {
            let held = place.and_then(|(at, nbytes)| self.arena.hold(at, nbytes));
            let value = exchange.as_ref().zip(held).and_then(|(exchange, held)| exchange.over(py, held, entry));
            if value.is_none() {
                missing.push(count);
            }
            made.append(value)?;
            if count % YIELD_INTERVAL == YIELD_INTERVAL - 1 {
                py.detach(std::thread::yield_now);
            }
        }
        Ok((made, missing))
    }
}

/// The memory of one entry, as a writable buffer: `torch.frombuffer` lays tensors over it without copying.
#[pyclass(name = "ArenaPart", module = "tensorferry._native", frozen)]
pub(crate) struct PyPart {
    address: usize,
    nbytes: usize,
    _hold: Hold,
}

#[pymethods]
impl PyPart {
    /// Address of the first byte.
    #[getter]
    fn address(&self) -> usize {
        self.address
    }

    fn __len__(&self) -> usize {
        self.nbytes
    }

    /// # Safety
    /// Called by the interpreter, which passes a valid `view`.
    #[allow(clippy::needless_pass_by_value, reason = "what the interpreter calls takes its arguments by value")]
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let Self { address, nbytes, .. } = *slf.get();
        // SAFETY: the memory lives as long as `slf`, of which the filled view takes a reference. Rust writes to it only
        // during a transfer that Python waits for, so Python may write to it.
        unsafe { expose(slf.as_any(), (address, nbytes), false, view, flags) }
    }
}
