//! `Parts`: a container that is handed out part by part.

use std::sync::{Mutex, PoisonError};

use pyo3::prelude::*;
use tensorferry_core::{Lent, Part, Parts};

use crate::errors;
use crate::memory::{PyLent, fill_part, give_back, is_unchanged, next_part};
use crate::rows::PyTable;

/// The parts of a container with checksums, in order.
#[pyclass(name = "Parts", module = "tensorferry._native", frozen)]
pub(crate) struct PyParts {
    parts: Mutex<Parts>,
    nbytes: u64,
    header: u64,
    /// Whether nobody else writes to the memory of the rows, so that nothing is compared.
    private: bool,
    /// Keeps what the rows keep.
    _rows: Py<PyTable>,
}

#[pymethods]
impl PyParts {
    /// The container of `rows` and then `control`, name and bytes of each. The caller holds the memory of the rows, which is
    /// `private` if nobody else writes to it.
    ///
    /// # Errors
    /// `InvalidArgument` when they make no valid container.
    #[new]
    #[pyo3(signature = (*, rows, control, metadata, private = false))]
    fn new(
        py: Python<'_>,
        rows: Py<PyTable>,
        control: Vec<(String, Vec<u8>)>,
        metadata: Vec<(String, String)>,
        private: bool,
    ) -> PyResult<Self> {
        let of = &rows.get().0;
        let parts = py.detach(|| Parts::new(metadata, of.items(control))).map_err(|e| errors::to_py(py, &e))?;
        let (nbytes, header) = (parts.len(), parts.header());
        Ok(Self { parts: Mutex::new(parts), nbytes, header, private, _rows: rows })
    }

    /// The length of the container in bytes.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.nbytes
    }

    /// The checksum of its header.
    #[getter]
    fn header(&self) -> u64 {
        self.header
    }

    /// Copies the next bytes to `address`, at most `nbytes`, a multiple of 512; returns how many there were.
    ///
    /// # Errors
    /// `InvalidArgument` for another length.
    fn fill(&self, py: Python<'_>, address: usize, nbytes: usize) -> PyResult<usize> {
        py.detach(|| fill_part(&mut self.parts.lock().unwrap_or_else(PoisonError::into_inner), address, nbytes))
            .map_err(|e| errors::to_py(py, &e))
    }

    /// Hands out the next bytes, at most `nbytes`, a multiple of 512: the next ones of a large tensor where they lie, as a
    /// `Lent` that keeps `owner`; others copied to `address`, of which it returns how many. `owner` holds the memory of the
    /// rows.
    ///
    /// # Errors
    /// `InvalidArgument` for another length.
    fn next<'py>(
        slf: &Bound<'py, Self>,
        address: usize,
        nbytes: usize,
        owner: Py<PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (py, parts) = (slf.py(), &slf.get().parts);
        let part = py.detach(|| next_part(&mut parts.lock().unwrap_or_else(PoisonError::into_inner), address, nbytes));
        match part.map_err(|e| errors::to_py(py, &e))? {
            Part::Copied(len) => Ok(len.into_pyobject(py)?.into_any()),
            Part::InPlace(lent) => Ok(Bound::new(py, PyLent::new(lent, slf.clone().unbind(), owner))?.into_any()),
        }
    }

    /// Whether all memory that was handed out where it lies had the bytes that were checksummed when the last reader let it
    /// go, or has them still; to be asked when all bytes were handed out.
    fn is_unchanged(&self, py: Python<'_>) -> bool {
        self.private || py.detach(|| is_unchanged(&self.parts.lock().unwrap_or_else(PoisonError::into_inner)))
    }
}

impl PyParts {
    /// Takes back what nobody reads any more. To be called without the interpreter.
    pub(crate) fn give_back(&self, lent: &Lent) {
        if !self.private {
            give_back(&self.parts, lent);
        }
    }
}
