//! `Entries`: what the header of a container says of its entries, column by column. `Remote` and `Stored` are kinds of it.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyRange, PyString, PyTuple};
use tensorferry_wire::container::{Entry, Header};
use tensorferry_wire::manifest::{self, ManifestError};

/// The entries of a container, in the order of its header.
#[pyclass(name = "Entries", module = "tensorferry._native", subclass, frozen)]
pub(crate) struct PyEntries {
    header: Arc<Header>,
}

impl PyEntries {
    pub(crate) fn new(header: Arc<Header>) -> Self {
        Self { header }
    }

    /// One value for each entry, in the order of the header.
    fn column<'py, T>(&self, py: Python<'py>, value: impl FnMut(&Entry) -> PyResult<T>) -> PyResult<Bound<'py, PyList>>
    where
        T: IntoPyObject<'py>,
    {
        PyList::new(py, self.header.entries().iter().map(value).collect::<PyResult<Vec<T>>>()?)
    }
}

#[pymethods]
impl PyEntries {
    /// The names of the entries, in the order of the header, as are the columns that follow.
    #[getter]
    fn names<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        self.column(py, |e| Ok(PyString::new(py, &e.name)))
    }

    /// The dtype of each entry, by the name that a container has for it.
    #[getter]
    fn dtypes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        self.column(py, |e| Ok(PyString::intern(py, e.dtype.name())))
    }

    /// The shape of each entry.
    #[getter]
    fn shapes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        self.column(py, |e| PyTuple::new(py, e.shape.iter()))
    }

    /// The size of each entry in bytes.
    #[getter]
    fn sizes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        self.column(py, |e| Ok(e.end - e.start))
    }

    /// Where each entry begins in the payload.
    #[getter]
    fn starts<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        self.column(py, |e| Ok(e.start))
    }

    /// Keys and values of the container's `__metadata__`.
    #[getter]
    fn about(&self) -> Vec<(String, String)> {
        self.header.metadata().to_vec()
    }

    fn __len__(&self) -> usize {
        self.header.entries().len()
    }

    /// The numbers of the entries whose names the format does not keep for itself: a `range` if they all come first.
    #[getter]
    fn plain<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let entries = self.header.entries();
        let first = entries.iter().take_while(|e| e.is_plain()).count();
        if entries[first..].iter().any(Entry::is_plain) {
            let numbers = entries.iter().enumerate().filter(|(_, e)| e.is_plain()).map(|(number, _)| number);
            return Ok(PyList::new(py, numbers.collect::<Vec<_>>())?.into_any());
        }
        Ok(PyRange::new(py, 0, isize::try_from(first)?)?.into_any())
    }

    /// The dtypes of the plain entries, each once, with the first entry that has it.
    #[getter]
    fn kinds(&self) -> BTreeMap<&'static str, String> {
        let mut kinds = BTreeMap::new();
        for entry in self.header.entries().iter().filter(|e| e.is_plain()) {
            kinds.entry(entry.dtype.name()).or_insert_with(|| entry.name.clone());
        }
        kinds
    }

    /// Bytes of the entry of this number.
    ///
    /// # Errors
    /// `IndexError` when there is none.
    fn size(&self, number: usize) -> PyResult<u64> {
        let entry = self.header.entries().get(number).ok_or_else(|| PyIndexError::new_err("there is no such entry"))?;
        Ok(entry.end - entry.start)
    }
}

/// Checks the manifest `json` against the header; returns where its tree lies in it.
///
/// # Errors
/// What is wrong with it.
pub(crate) fn find_tree(json: Option<&[u8]>, header: &Header) -> Result<Option<Range<usize>>, ManifestError> {
    json.map(|json| manifest::validate(json, header).map(|manifest| manifest.tree)).transpose()
}

/// A manifest as JSON text, with `null` for its tree, which lies at `tree`.
pub(crate) fn without_tree<'py>(py: Python<'py>, json: &[u8], tree: Range<usize>) -> Bound<'py, PyBytes> {
    let end = json.iter().rposition(|b| !matches!(b, 0 | b' ')).map_or(0, |i| i + 1);
    PyBytes::new(py, &[&json[..tree.start], b"null", &json[tree.end..end]].concat())
}
