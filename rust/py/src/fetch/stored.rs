//! `Stored`: a container in a file, or in memory that another process filled, fetched like a `Remote`.

use std::ffi::OsStr;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyString};
use tensorferry_core::{Arena, Cancel, Destination, FileOptions, FileReport, Report, Stored};
use tensorferry_wire::container::{self, Header};

use crate::errors;
use crate::fetch::entries::{PyEntries, find_tree, without_tree};
use crate::fetch::place::Place;
use crate::fetch::progress::ProgressReporter;
use crate::fetch::staged::{PyStagedFetch, WavesOf};
use crate::memory::{Owner, PyArena, given};
use crate::report::PyReport;
use crate::rows::PyTable;
use crate::runtime;
use tensorferry_core::Locked;

/// A container in a file or in memory, whose header, manifest and pickle were read.
#[pyclass(name = "Stored", module = "tensorferry._native", extends = PyEntries, frozen)]
pub(crate) struct PyStored {
    pub(crate) stored: Arc<Stored>,
    tree: Option<Range<usize>>,
    threads: Option<usize>,
    /// Where it is, unless it is in memory.
    place: Option<Place>,
    /// The entries that are not fetched.
    without: Mutex<Vec<usize>>,
    cancel: Cancel,
}

impl PyStored {
    /// The object for an opened container, after checking its manifest, if it has one.
    fn new(
        py: Python<'_>,
        stored: Stored,
        place: Option<Place>,
        threads: Option<usize>,
        cancel: Cancel,
    ) -> PyResult<Py<Self>> {
        let manifest = stored.reserved(container::MANIFEST_ENTRY);
        let tree = find_tree(manifest, stored.header()).map_err(|e| {
            let at = place.as_ref().map(|place| format!("{}: ", place.name().display())).unwrap_or_default();
            errors::protocol(py, format!("{at}its manifest is not valid: {e}"))
        })?;
        let entries = PyEntries::new(Arc::clone(stored.header()));
        let without = Mutex::default();
        Py::new(py, (Self { stored: Arc::new(stored), tree, threads, place, without, cancel }, entries))
    }

    fn manifest_and_tree(&self) -> Option<(&[u8], Range<usize>)> {
        self.stored.reserved(container::MANIFEST_ENTRY).zip(self.tree.clone())
    }

    fn options(&self) -> FileOptions {
        FileOptions { threads: self.threads, cancel: self.cancel.clone(), ..FileOptions::default() }
    }

    fn without(&self) -> Vec<usize> {
        self.without.locked().clone()
    }
}

#[pymethods]
impl PyStored {
    /// Opens the container in the file at `path`, and reads its header, manifest and pickle, verified. With `header`,
    /// only if that is the checksum of its header. Without `checksums` the file may be one that has none.
    ///
    /// # Errors
    /// `CorruptCheckpoint` when a block does not match its checksum, the file is cut short or its header has another
    /// checksum than `header`, `ProtocolError` when it is no container, has no `checksums` or its manifest is not
    /// valid, `SystemRefused` when it cannot be read. And whatever the reader of a place, or a signal handler, raises.
    #[staticmethod]
    #[pyo3(signature = (path, *, threads = None, header = None, checksums = true))]
    fn open(
        path: &Bound<'_, PyAny>,
        threads: Option<usize>,
        header: Option<u64>,
        checksums: bool,
    ) -> PyResult<Py<Self>> {
        let (py, place) = (path.py(), Place::of(path)?);
        let cancel = Cancel::new();
        let options = FileOptions { threads, cancel: cancel.clone(), ..FileOptions::default() };
        let open = || Stored::of(place.open()?, header, checksums, &options);
        let stored = place.run(py, &cancel, None, open)?;
        Self::new(py, stored, Some(place), threads, cancel)
    }

    /// A container of `rows` and then `control`, name and bytes of each, in memory that `owner` keeps. `digests` is the
    /// CRC-64 of each MiB of its payload, 8 bytes each, the lowest first; with it, all that is fetched is verified.
    ///
    /// # Errors
    /// `InvalidArgument` when the rows make no valid container or the checksums are those of another one,
    /// `ProtocolError` when its manifest is not valid.
    #[staticmethod]
    #[pyo3(signature = (rows, control, owner, *, digests = None, threads = None))]
    fn over(
        py: Python<'_>,
        rows: &Bound<'_, PyTable>,
        control: Vec<(String, Vec<u8>)>,
        owner: Py<PyAny>,
        digests: Option<&[u8]>,
        threads: Option<usize>,
    ) -> PyResult<Py<Self>> {
        let words = digests.map(|digests| digests.as_chunks());
        if words.is_some_and(|(_, rest)| !rest.is_empty()) {
            return Err(errors::invalid(py, "checksums have 8 bytes each"));
        }
        let digests = words.map(|(words, _)| words.iter().map(|word| u64::from_le_bytes(*word)).collect());
        let (rows, owner) = (&rows.get().0, Owner::new(owner));
        let stored = py.detach(move || Stored::over(rows.items(control), digests, Box::new(owner)));
        Self::new(py, stored.map_err(|e| errors::to_py(py, &e))?, None, threads, Cancel::new())
    }

    /// The manifest as JSON text, with `null` for its tree; `None` if the container has none.
    #[getter]
    fn manifest<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyBytes>> {
        self.manifest_and_tree().map(|(json, tree)| without_tree(py, json, tree))
    }

    /// The tree as JSON text, `None` if the container has no manifest.
    #[getter]
    fn tree<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyString>>> {
        self.manifest_and_tree().map(|(json, tree)| PyString::from_bytes(py, &json[tree])).transpose()
    }

    /// The pickle of everything other than plain tensors, `None` if there is none.
    #[getter]
    fn pickle<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyBytes>> {
        self.stored.reserved(container::PICKLE_ENTRY).map(|bytes| PyBytes::new(py, bytes))
    }

    /// The path of the file, or the URL of the object; `None` if the container is in memory.
    #[getter]
    fn path(&self) -> Option<&OsStr> {
        self.stored.path().map(Path::as_os_str)
    }

    /// Whether every byte that is fetched is compared with a checksum.
    #[getter]
    fn is_verified(&self) -> bool {
        self.stored.is_verified()
    }

    /// The checksums that [`PyStored::over`] takes, of a container in memory; `None` for one in a file.
    fn digests<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyBytes>> {
        let digests = py.detach(|| self.stored.digests())?;
        let bytes: Vec<u8> = digests.iter().flat_map(|digest| digest.to_le_bytes()).collect();
        Some(PyBytes::new(py, &bytes))
    }

    /// Leaves the entries of these numbers out of every later fetch, in place of those that were left out before: they
    /// are neither read nor given memory. Numbers of entries that there are not make the fetch raise.
    fn leave_out(&self, numbers: Vec<usize>) {
        *self.without.locked() = numbers;
    }

    /// Fetches and verifies the payload. Entries with an address go there, the others into a fresh arena, which is
    /// returned with a report.
    ///
    /// `addresses` has one item for each entry of the header. The caller holds the memory behind them until this
    /// returns, and the sizes fit; after an exception it may hold some of the new bytes. Nothing is verified unless
    /// `is_verified`. Of the report, `bytes` (what was read, more than was wanted for the most part), `wanted` and the
    /// time of fetching are set.
    ///
    /// # Errors
    /// The engine's errors as exceptions, and whatever the reader of a place or a signal handler raises. After a signal
    /// handler has raised, every later fetch raises `TransferCancelled`.
    #[pyo3(signature = (addresses = None))]
    fn fetch(&self, py: Python<'_>, addresses: Option<Vec<Option<usize>>>) -> PyResult<(PyArena, PyReport)> {
        let destination = addresses.map_or(Destination::Fresh, given);
        let (stored, without, options) = (Arc::clone(&self.stored), self.without(), self.options());
        let started = Instant::now();
        let fetch = move || stored.fetch(destination, &without, &options);
        let arrived = match &self.place {
            Some(place) => place.run(py, &self.cancel, None, fetch)?,
            None => runtime::run(py, &self.cancel, None, fetch)?,
        };
        Ok(read(arrived, self.stored.header(), started.elapsed()))
    }

    /// Begins a fetch like `fetch`, in which the entries numbered in `staged` come through a buffer of `most` bytes
    /// that is given to each call of `StagedFetch.fetch`. The caller holds the memory behind `addresses` until the last
    /// wave has come.
    ///
    /// # Errors
    /// `InvalidArgument` for a buffer of less than 1 MiB, and for entries that there are not or that are named twice;
    /// `SystemRefused` when there is no memory.
    fn staged(
        &self,
        py: Python<'_>,
        addresses: Option<Vec<Option<usize>>>,
        staged: Vec<usize>,
        most: u64,
    ) -> PyResult<PyStagedFetch> {
        let destination = addresses.map_or(Destination::Fresh, given);
        let (stored, without, options) = (Arc::clone(&self.stored), self.without(), self.options());
        let waves = py.detach(move || stored.staged(destination, (&staged, &without), most, options));
        let waves = WavesOf::Stored(Box::new(waves.map_err(|e| errors::to_py(py, &e))?));
        let header = self.stored.header();
        let reporter = ProgressReporter { received: Arc::<AtomicU64>::default(), total: 0, progress: None };
        Ok(PyStagedFetch::new(self.place.clone(), self.cancel.clone(), reporter, Arc::clone(header), waves))
    }
}

/// Converts a finished read for Python: the arena and a report.
pub(crate) fn read(
    (arena, offsets, read): (Arena, Vec<Option<u64>>, FileReport),
    header: &Arc<Header>,
    fetching: Duration,
) -> (PyArena, PyReport) {
    let report = Report { bytes: read.bytes, wanted: read.wanted, fetching, ..Report::default() };
    (PyArena::new(arena, Arc::clone(header), offsets), PyReport(report))
}
