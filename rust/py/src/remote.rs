//! `Remote`: a checkpoint at its source, and fetching it.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError};

use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList, PyRange, PyString, PyTuple};
use tensorferry_core::{ArenaPool, Arrived, Cancel, Destination, FetchOptions, Remote};
use tensorferry_wire::container::{self, Entry, Header};
use tensorferry_wire::manifest;

use crate::errors;
use crate::memory::{PyArena, given, pool_with_allocator};
use crate::report::{self, seconds};
use crate::runtime::{self, OnTick, Origin};
use crate::secret::PySecret;
use crate::staged::{ProgressReporter, PyStagedFetch};

/// A checkpoint whose header is here and whose payload is still at its source.
#[pyclass(name = "Remote", module = "tensorferry._native", frozen)]
pub(crate) struct PyRemote {
    origin: Origin,
    cancel: Cancel,
    received: Arc<AtomicU64>,
    /// Called with the bytes here and the bytes in all, now and then and at the end.
    progress: Option<Py<PyAny>>,
    header: Arc<Header>,
    /// Where the tree lies in the manifest, if there is one.
    tree: Option<Range<usize>>,
    /// `None` once it was fetched.
    remote: Mutex<Option<Remote>>,
}

/// Memory of earlier receives, kept for later ones.
#[pyclass(name = "Pool", module = "tensorferry._native", frozen)]
pub(crate) struct PyPool(Arc<ArenaPool>);

#[pymethods]
impl PyPool {
    /// Keeps at most `limit` bytes. `make` is asked for new memory: called with a number of bytes it returns an address
    /// and the object that holds the memory there, or `None` where an ordinary mapping will do.
    #[new]
    #[pyo3(signature = (limit, make = None))]
    fn new(limit: usize, make: Option<Py<PyAny>>) -> Self {
        Self(make.map_or_else(|| ArenaPool::new(limit), |make| pool_with_allocator(limit, make)))
    }

    /// Bytes kept now.
    #[getter]
    fn held(&self) -> usize {
        self.0.held()
    }
}

/// Raises `SystemRefused` where the machine, swap included, has less memory than `nbytes`; `what` is to have it.
#[pyfunction]
#[pyo3(name = "_check_machine_has")]
pub(crate) fn check_machine_has(py: Python<'_>, nbytes: u64, what: &str) -> PyResult<()> {
    tensorferry_core::check_machine_has(nbytes, what).map_err(|e| errors::to_py(py, &e))
}

impl PyRemote {
    fn with<T>(&self, py: Python<'_>, read: impl FnOnce(&Remote) -> PyResult<T>) -> PyResult<T> {
        self.origin.check(py)?;
        match &*self.remote.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(remote) => read(remote),
            None => Err(errors::invalid(py, "this checkpoint was fetched already")),
        }
    }

    /// Reads the manifest, if there is one; the range is where its tree lies.
    fn with_manifest<T>(&self, py: Python<'_>, read: impl FnOnce(&[u8], Range<usize>) -> T) -> PyResult<Option<T>> {
        self.with(py, |remote| {
            let found = remote.reserved(container::MANIFEST_ENTRY).zip(self.tree.clone());
            Ok(found.map(|(json, tree)| read(json, tree)))
        })
    }

    /// The checkpoint itself, to be fetched once.
    fn take(&self, py: Python<'_>) -> PyResult<(Remote, ProgressReporter)> {
        self.origin.check(py)?;
        let remote = self.remote.lock().unwrap_or_else(PoisonError::into_inner).take();
        let remote = remote.ok_or_else(|| errors::invalid(py, "this checkpoint was fetched already"))?;
        let teller = ProgressReporter {
            received: Arc::clone(&self.received),
            total: remote.header().payload_len(),
            progress: self.progress.as_ref().map(|call| call.clone_ref(py)),
        };
        Ok((remote, teller))
    }

    fn column<'py, T>(&self, py: Python<'py>, value: impl FnMut(&Entry) -> PyResult<T>) -> PyResult<Bound<'py, PyList>>
    where
        T: IntoPyObject<'py>,
    {
        PyList::new(py, self.header.entries().iter().map(value).collect::<PyResult<Vec<T>>>()?)
    }
}

#[pymethods]
impl PyRemote {
    /// Opens a checkpoint: waits until one of `urls` serves `step`, and reads its header.
    #[staticmethod]
    #[allow(clippy::too_many_arguments, reason = "keywords in Python")]
    #[pyo3(signature = (urls, step, *, timeout, lanes = None, same_host = true, pool = None, progress = None,
                        secret = None))]
    fn open(
        py: Python<'_>,
        urls: Vec<String>,
        step: i64,
        timeout: f64,
        lanes: Option<usize>,
        same_host: bool,
        pool: Option<&PyPool>,
        progress: Option<Py<PyAny>>,
        secret: Option<&PySecret>,
    ) -> PyResult<Self> {
        let timeout = seconds(py, timeout.max(0.0))?;
        let cancel = Cancel::new();
        let received = Arc::<AtomicU64>::default();
        let options = FetchOptions {
            lanes,
            same_host,
            secret: secret.map(|s| s.0.clone()),
            pool: pool.map(|p| Arc::clone(&p.0)),
            progress: Arc::clone(&received),
            cancel: cancel.clone(),
            ..FetchOptions::within(timeout)
        };
        let (remote, tree) = runtime::run(py, &cancel, None, move || {
            let urls: Vec<_> = urls.iter().map(String::as_str).collect();
            let remote = Remote::open(&urls, step, options)?;
            let tree = check_manifest(&remote)?;
            Ok((remote, tree))
        })?;
        let header = Arc::clone(remote.header());
        Ok(Self { origin: Origin::here(), cancel, received, progress, header, tree, remote: Mutex::new(Some(remote)) })
    }

    /// The manifest as JSON text, with `null` for its tree; `None` for a container tensorferry did not write.
    #[getter]
    fn manifest<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyBytes>>> {
        self.with_manifest(py, |json, tree| {
            let end = json.iter().rposition(|b| !matches!(b, 0 | b' ')).map_or(0, |i| i + 1);
            PyBytes::new(py, &[&json[..tree.start], b"null", &json[tree.end..end]].concat())
        })
    }

    /// The tree as JSON text, `None` for a container tensorferry did not write.
    #[getter]
    fn tree<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyString>>> {
        let tree = self.with_manifest(py, |json, tree| PyString::from_bytes(py, &json[tree]))?;
        tree.transpose()
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

    /// The dtypes of those entries, each once, with the first entry that has it.
    #[getter]
    fn kinds(&self) -> BTreeMap<&'static str, String> {
        let mut kinds = BTreeMap::new();
        for entry in self.header.entries().iter().filter(|e| e.is_plain()) {
            kinds.entry(entry.dtype.name()).or_insert_with(|| entry.name.clone());
        }
        kinds
    }

    /// Bytes of the entry of this number.
    fn size(&self, number: usize) -> PyResult<u64> {
        let entry = self.header.entries().get(number).ok_or_else(|| PyIndexError::new_err("there is no such entry"))?;
        Ok(entry.end - entry.start)
    }

    /// Fetches and verifies the payload. Entries with an address go there, the others into a fresh arena, which is
    /// returned with a report.
    #[pyo3(signature = (addresses = None))]
    fn fetch<'py>(
        &self,
        py: Python<'py>,
        addresses: Option<Vec<Option<usize>>>,
    ) -> PyResult<(PyArena, Bound<'py, PyDict>)> {
        let (remote, teller) = self.take(py)?;
        let destination = addresses.map_or(Destination::Fresh, given);
        let tell = |py: Python<'_>| teller.tell(py);
        let watch = teller.progress.is_some().then_some(&tell as &OnTick<'_>);
        let arrived = runtime::run(py, &self.cancel, watch, move || remote.fetch(destination))?;
        tell(py)?;
        handed_over(py, arrived, &self.header)
    }

    /// Begins a receive like `fetch`, in which the entries numbered in `passing` go by way of `most` bytes of memory that
    /// is given for each wave.
    fn waves(
        &self,
        py: Python<'_>,
        addresses: Option<Vec<Option<usize>>>,
        passing: Vec<usize>,
        most: u64,
    ) -> PyResult<PyStagedFetch> {
        let (remote, teller) = self.take(py)?;
        let destination = addresses.map_or(Destination::Fresh, given);
        let waves = py.detach(move || remote.waves(destination, &passing, most)).map_err(|e| errors::to_py(py, &e))?;
        Ok(PyStagedFetch::new(self.cancel.clone(), teller, Arc::clone(&self.header), waves))
    }
}

/// What has arrived, for Python: the arena and a report.
pub(crate) fn handed_over<'py>(
    py: Python<'py>,
    arrived: Arrived,
    header: &Arc<Header>,
) -> PyResult<(PyArena, Bound<'py, PyDict>)> {
    let (arena, offsets, report) = arrived.into_parts();
    Ok((PyArena::new(arena, Arc::clone(header), offsets), report::tell(py, report)?))
}

/// Checks the manifest and says where its tree lies.
fn check_manifest(remote: &Remote) -> Result<Option<Range<usize>>, tensorferry_core::Error> {
    let header: &Header = remote.header();
    let manifest = remote.reserved(container::MANIFEST_ENTRY).map(|json| manifest::validate(json, header));
    Ok(manifest.transpose().map_err(tensorferry_core::Error::protocol)?.map(|manifest| manifest.tree))
}
