//! `Remote`: a checkpoint at its source, and fetching it.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList, PyString, PyTuple};
use tensorferry_core::{Cancel, Destination, FetchOptions, Remote};
use tensorferry_wire::container::{self, Header};
use tensorferry_wire::manifest;

use crate::errors;
use crate::memory::{PyArena, given};
use crate::runtime::{self, Origin};

/// A checkpoint whose header is here and whose payload is still at its source.
#[pyclass(name = "Remote", module = "tensorferry._native", frozen)]
pub(crate) struct PyRemote {
    origin: Origin,
    cancel: Cancel,
    remote: Mutex<Option<Remote>>,
}

impl PyRemote {
    fn with<T>(&self, py: Python<'_>, read: impl FnOnce(&Remote) -> PyResult<T>) -> PyResult<T> {
        self.origin.check(py)?;
        match &*self.remote.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(remote) => read(remote),
            None => Err(errors::invalid(py, "this checkpoint was fetched already")),
        }
    }

    fn column<'py, T>(
        &self,
        py: Python<'py>,
        value: impl FnMut(&container::Entry) -> PyResult<T>,
    ) -> PyResult<Bound<'py, PyList>>
    where
        T: IntoPyObject<'py>,
    {
        let values: Vec<T> =
            self.with(py, |remote| remote.header().entries().iter().map(value).collect::<PyResult<Vec<T>>>())?;
        PyList::new(py, values)
    }
}

#[pymethods]
impl PyRemote {
    /// Opens a checkpoint: waits until one of `urls` serves `step`, and reads its header.
    #[staticmethod]
    #[pyo3(signature = (urls, step, *, timeout, lanes = None, same_host = true))]
    fn open(
        py: Python<'_>,
        urls: Vec<String>,
        step: i64,
        timeout: f64,
        lanes: Option<usize>,
        same_host: bool,
    ) -> PyResult<Self> {
        let timeout = Duration::try_from_secs_f64(timeout.max(0.0))
            .map_err(|_| errors::invalid(py, format!("{timeout} is no length of time in seconds")))?;
        let cancel = Cancel::new();
        let options = FetchOptions { lanes, same_host, cancel: cancel.clone(), ..FetchOptions::within(timeout) };
        let remote = runtime::run(py, &cancel, move || {
            let urls: Vec<_> = urls.iter().map(String::as_str).collect();
            let remote = Remote::open(&urls, step, options)?;
            check_manifest(&remote)?;
            Ok(remote)
        })?;
        Ok(Self { origin: Origin::here(), cancel, remote: Mutex::new(Some(remote)) })
    }

    /// The manifest as JSON text, `None` for a container tensorferry did not write.
    #[getter]
    fn manifest<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyBytes>>> {
        self.with(py, |remote| {
            Ok(remote.reserved(container::MANIFEST_ENTRY).map(|json| {
                let end = json.iter().rposition(|b| !matches!(b, 0 | b' ')).map_or(0, |i| i + 1);
                PyBytes::new(py, &json[..end])
            }))
        })
    }

    /// The pickle of everything that is no plain tensor.
    #[getter]
    fn pickle<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyBytes>>> {
        self.with(py, |remote| Ok(remote.reserved(container::PICKLE_ENTRY).map(|b| PyBytes::new(py, b))))
    }

    #[getter]
    fn names<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        self.column(py, |e| Ok(PyString::new(py, &e.name)))
    }

    #[getter]
    fn dtypes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        self.column(py, |e| Ok(PyString::intern(py, e.dtype.name())))
    }

    #[getter]
    fn shapes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        self.column(py, |e| PyTuple::new(py, e.shape.iter()))
    }

    #[getter]
    fn sizes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        self.column(py, |e| Ok(e.end - e.start))
    }

    /// Fetches and verifies the payload. Entries with an address go there, the others into a fresh arena, which is
    /// returned with each entry's offset in it and a report.
    #[pyo3(signature = (addresses = None))]
    fn fetch<'py>(
        &self,
        py: Python<'py>,
        addresses: Option<Vec<Option<usize>>>,
    ) -> PyResult<(PyArena, Vec<Option<u64>>, Bound<'py, PyDict>)> {
        self.origin.check(py)?;
        let remote = self.remote.lock().unwrap_or_else(PoisonError::into_inner).take();
        let remote = remote.ok_or_else(|| errors::invalid(py, "this checkpoint was fetched already"))?;
        let destination = addresses.map_or(Destination::Fresh, given);
        let arrived = runtime::run(py, &self.cancel, move || remote.fetch(destination))?;
        let (arena, offsets, report) = arrived.into_parts();
        let told = PyDict::new(py);
        told.set_item("bytes", report.bytes)?;
        told.set_item("lanes", report.lanes)?;
        told.set_item("retries", report.retries)?;
        told.set_item("same_host", report.same_host)?;
        told.set_item("opening_seconds", report.opening.as_secs_f64())?;
        told.set_item("fetching_seconds", report.fetching.as_secs_f64())?;
        Ok((PyArena::new(arena), offsets, told))
    }
}

fn check_manifest(remote: &Remote) -> Result<(), tensorferry_core::Error> {
    let header: &Header = remote.header();
    match remote.reserved(container::MANIFEST_ENTRY) {
        Some(json) => manifest::validate(json, header).map(drop).map_err(tensorferry_core::Error::protocol),
        None => Ok(()),
    }
}
