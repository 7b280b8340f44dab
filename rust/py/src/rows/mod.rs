//! The tensors of a state as the rows of a container, column by column, and what keeps their memory.
//!
//! Invariants:
//!
//! * row `i` of every column is about the same tensor;
//! * `owners[i]` keeps the memory of row `i`, whatever becomes of the tensor it was read from; not of a row that
//!   [`PyTable`]'s `place` has moved, whose memory the caller keeps.

pub(crate) mod columns;
mod owned;
mod table;

use std::sync::{Arc, Mutex};

use pyo3::exceptions::{PyIndexError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyString, PyTuple};
use tensorferry_core::Transfer;
use tensorferry_wire::dtype::Dtype;

use self::columns::Row;
pub(crate) use self::owned::Rows;
use self::table::Place;
use crate::errors;
use crate::memory::{self, PySharedBuffer};

/// A table of rows that the caller describes, or another process has described.
#[pyclass(name = "Table", module = "tensorferry._native", frozen, subclass)]
pub(crate) struct PyTable(pub(crate) Arc<Rows>);

#[pymethods]
impl PyTable {
    /// No rows yet.
    #[new]
    fn new(py: Python<'_>) -> Self {
        Self(Arc::new(Rows::new(py)))
    }

    fn __len__(&self) -> usize {
        self.0.columns().ends.len()
    }

    /// The object each row was read from.
    #[getter]
    fn memory(&self, py: Python<'_>) -> Py<PyList> {
        self.0.memory.clone_ref(py)
    }

    /// Keeps the memory of each row alive, even if the tensor it was read from is freed or gets other memory.
    #[getter]
    fn owners(&self, py: Python<'_>) -> Py<PyList> {
        self.0.owners.clone_ref(py)
    }

    /// One digit per row: 1 for a Parameter, plus 2 if it requires grad.
    #[getter]
    fn flags(&self) -> String {
        self.0.columns().flags.clone()
    }

    /// Bytes of all rows.
    #[getter]
    fn nbytes(&self) -> usize {
        self.0.nbytes()
    }

    /// The name of each row.
    #[getter]
    fn names<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, self.0.columns().names().collect::<Vec<_>>())
    }

    /// The dtype of each row, by the name that a container has for it.
    #[getter]
    fn dtypes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, self.0.columns().dtypes.iter().map(|d| PyString::intern(py, d.name())))
    }

    /// The shape of each row.
    #[getter]
    fn shapes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let shapes: Vec<_> = self.0.columns().shapes().map(|s| PyTuple::new(py, s)).collect::<PyResult<_>>()?;
        PyList::new(py, shapes)
    }

    /// The size of each row in bytes.
    #[getter]
    fn sizes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, &self.0.columns().sizes)
    }

    /// Bytes of row `row`.
    ///
    /// # Errors
    /// `IndexError` when there is none.
    fn size(&self, row: usize) -> PyResult<usize> {
        self.0.columns().sizes.get(row).copied().ok_or_else(|| PyIndexError::new_err("there is no such row"))
    }

    /// Where the memory of row `row` starts.
    ///
    /// # Errors
    /// `IndexError` when there is none.
    fn address(&self, row: usize) -> PyResult<usize> {
        self.0.columns().addresses.get(row).copied().ok_or_else(|| PyIndexError::new_err("there is no such row"))
    }

    /// Adds a row as given and returns its number. `owner` keeps its memory, the `nbytes` bytes at `address`; by
    /// default `memory` does. Whether shape and size fit is checked when the rows are published or written.
    ///
    /// # Errors
    /// `ValueError` for a dtype that no container has, `OverflowError` for more than 255 dimensions.
    #[allow(clippy::too_many_arguments, clippy::needless_pass_by_value, reason = "what Python calls takes values")]
    #[pyo3(signature = (memory, name, dtype, shape, address, nbytes, flag, owner = None))]
    fn append(
        &self,
        memory: &Bound<'_, PyAny>,
        name: &str,
        dtype: &str,
        shape: Vec<u64>,
        address: usize,
        nbytes: usize,
        flag: u8,
        owner: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<i64> {
        let row = Row { dtype: named(dtype)?, shape: &shape, address, nbytes, flag };
        self.0.push([name, ""], &row, memory, owner.unwrap_or(memory))
    }

    /// Notes that row `row` was copied to `address`. Its owner stays: the caller keeps the memory there.
    ///
    /// # Errors
    /// `IndexError` when there is no such row.
    fn place(&self, row: usize, address: usize) -> PyResult<()> {
        let mut columns = self.0.columns();
        let place = columns.addresses.get_mut(row).ok_or_else(|| PyIndexError::new_err("there is no such row"))?;
        *place = address;
        Ok(())
    }

    /// The bytes of a buffer that [`Self::copy_into`] can copy all rows into but those in `without`.
    #[allow(clippy::needless_pass_by_value, reason = "what Python calls takes values")]
    fn copied_size(&self, py: Python<'_>, without: Vec<usize>) -> usize {
        py.detach(|| self.0.columns().laid_out(&without).1)
    }

    /// Copies all rows but those in `without`, which lie in host memory, with up to `threads` threads to `address`, and
    /// notes that they are there. `buffer`, which has the `nbytes` bytes there, becomes their owner.
    ///
    /// # Errors
    /// `ValueError` when they are more bytes than that; nothing is copied then.
    #[pyo3(signature = (buffer, address, nbytes, without, *, threads))]
    #[allow(clippy::needless_pass_by_value, reason = "what Python calls takes values")]
    fn copy_into(
        &self,
        buffer: &Bound<'_, PyAny>,
        address: usize,
        nbytes: usize,
        without: Vec<usize>,
        threads: usize,
    ) -> PyResult<()> {
        let py = buffer.py();
        let there = py.detach(|| {
            let (places, size) = self.0.columns().laid_out(&without);
            if size > nbytes {
                return None;
            }
            let transfers: Vec<_> = {
                let columns = self.0.columns();
                let transfer = |&(row, at): &(usize, usize)| Transfer {
                    from: columns.addresses[row],
                    to: address + at,
                    len: columns.sizes[row],
                };
                places.iter().map(transfer).collect()
            };
            memory::copy(&transfers, threads);
            let mut columns = self.0.columns();
            for &(row, at) in &places {
                columns.addresses[row] = address + at;
            }
            Some(places)
        });
        let there = there.ok_or_else(|| PyValueError::new_err("the rows do not fit into the buffer"))?;
        let owners = self.0.owners.bind(py);
        for (row, _) in there {
            owners.set_item(row, buffer)?;
            self.0.count_and_yield(py);
        }
        Ok(())
    }

    /// The rows as bytes for another process that maps `buffers`; [`Self::from_table`] reads them.
    ///
    /// # Errors
    /// `InvalidArgument` when a row lies in none of them.
    #[allow(clippy::needless_pass_by_value, reason = "what Python calls takes values")]
    fn table<'py>(&self, py: Python<'py>, buffers: Vec<Py<PySharedBuffer>>) -> PyResult<Bound<'py, PyBytes>> {
        let places = places(&buffers);
        let table = py.detach(|| table::encode(&self.0.columns(), &places)).map_err(|e| errors::invalid(py, e))?;
        Ok(PyBytes::new(py, &table))
    }

    /// The rows of a table that another process has made, which lie in `buffers`. Each row keeps its buffer.
    ///
    /// # Errors
    /// `ProtocolError` when it is not a table, or a row reaches beyond its buffer.
    #[staticmethod]
    #[allow(clippy::needless_pass_by_value, reason = "what Python calls takes values")]
    fn from_table(py: Python<'_>, table: &[u8], buffers: Vec<Py<PySharedBuffer>>) -> PyResult<Self> {
        let places = places(&buffers);
        let (columns, numbers) = py
            .detach(|| table::decode(table, &places))
            .map_err(|e| errors::protocol(py, format!("the table of a state cannot be used: {e}")))?;
        // A row without bytes may name any buffer.
        let owners = numbers.iter().map(|&number| buffers.get(number).map(|buffer| buffer.clone_ref(py)));
        let owners = PyList::new(py, owners)?.unbind();
        Ok(Self(Arc::new(Rows { owners, columns: Mutex::new(columns), ..Rows::new(py) })))
    }

    /// Whether every name can stand in a container as it is.
    fn names_are_regular(&self, py: Python<'_>) -> bool {
        self.0.detached(py, || self.0.columns().names_are_regular())
    }

    /// Gives every row the name at its place in `names`.
    ///
    /// # Errors
    /// `ValueError` unless there is one name for each row.
    #[allow(clippy::needless_pass_by_value, reason = "what Python calls takes values")]
    fn rename(&self, names: Vec<String>) -> PyResult<()> {
        let mut columns = self.0.columns();
        if names.len() != columns.ends.len() {
            return Err(PyValueError::new_err("there must be one name for each row"));
        }
        columns.names = names.concat();
        columns.ends = names
            .iter()
            .scan(0, |end, name| {
                *end += name.len();
                Some(*end)
            })
            .collect();
        Ok(())
    }
}

fn places(buffers: &[Py<PySharedBuffer>]) -> Vec<Place> {
    buffers.iter().map(|buffer| buffer.get().place()).collect()
}

/// The dtype that a container calls `dtype`.
pub(crate) fn named(dtype: &str) -> PyResult<Dtype> {
    Dtype::from_name(dtype).ok_or_else(|| PyValueError::new_err(format!("a container has no dtype {dtype}")))
}
