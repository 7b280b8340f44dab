//! `Parts`: a container that is handed out part by part.

use std::sync::Mutex;

use pyo3::prelude::*;
use tensorferry_core::Parts;

use crate::errors;
use crate::memory::fill_part;
use crate::rows::PyTable;
use tensorferry_core::Locked;

/// The parts of a container with checksums, in order.
#[pyclass(name = "Parts", module = "tensorferry._native", frozen)]
pub(crate) struct PyParts {
    parts: Mutex<Parts>,
    nbytes: u64,
    header: u64,
    /// Keeps what the rows keep.
    _rows: Py<PyTable>,
}

#[pymethods]
impl PyParts {
    /// The container of `rows` and then `control`, name and bytes of each. The caller holds the memory of the rows.
    ///
    /// # Errors
    /// `InvalidArgument` when they make no valid container.
    #[new]
    #[pyo3(signature = (*, rows, control, metadata))]
    fn new(
        py: Python<'_>,
        rows: Py<PyTable>,
        control: Vec<(String, Vec<u8>)>,
        metadata: Vec<(String, String)>,
    ) -> PyResult<Self> {
        let of = &rows.get().0;
        let parts = py.detach(|| Parts::new(metadata, of.items(control))).map_err(|e| errors::to_py(py, &e))?;
        let (nbytes, header) = (parts.len(), parts.header());
        Ok(Self { parts: Mutex::new(parts), nbytes, header, _rows: rows })
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

    /// Where each row begins in the container.
    #[getter]
    fn starts(&self) -> Vec<u64> {
        self.parts.locked().starts()
    }

    /// Copies the next bytes to `address`, at most `nbytes`, a multiple of 512; returns how many there were, 0 at the
    /// end. The caller holds the `nbytes` bytes there, which nobody else uses meanwhile, and the memory of the rows that
    /// these bytes are of. `places` are as for `FileWriting.write`.
    ///
    /// # Errors
    /// `InvalidArgument` for another length.
    #[pyo3(signature = (address, nbytes, places = Vec::new()))]
    fn fill(&self, py: Python<'_>, address: usize, nbytes: usize, places: Vec<(u64, usize)>) -> PyResult<usize> {
        py.detach(|| {
            let mut parts = self.parts.locked();
            for (at, place) in places {
                parts.place(at, place);
            }
            fill_part(&mut parts, address, nbytes)
        })
        .map_err(|e| errors::to_py(py, &e))
    }
}
