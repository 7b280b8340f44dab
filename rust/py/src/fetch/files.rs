//! Containers in files: written, renamed, checked, and read by the entry.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use tensorferry_core::{Cancel, FileOptions, FileWriting, Written};

use crate::fetch::place::Place;
use crate::fetch::progress::{ProgressReporter, run_reporting};
use crate::rows::PyTable;
use crate::runtime::{self, OnTick};

/// A file that was written, locked for as long as this lives, where the file system has locks.
#[pyclass(name = "Written", module = "tensorferry._native", frozen)]
pub(crate) struct PyWritten(Written);

#[pymethods]
impl PyWritten {
    /// The length of the file in bytes.
    #[getter]
    fn bytes(&self) -> u64 {
        self.0.report.bytes
    }

    /// How many bytes of the file went past the page cache.
    #[getter]
    fn direct(&self) -> u64 {
        self.0.report.direct
    }

    /// The checksum of the file's header.
    #[getter]
    fn header(&self) -> u64 {
        self.0.header
    }
}

/// A container of `rows` and then `control`, name and bytes of each, with checksums, that is written to `path`. Until it
/// is finished it is called `partial`, a name in the same folder that must be free; what is at `path` then is replaced.
/// `progress` is called with the bytes of payload that are written and those in all.
#[pyclass(name = "FileWriting", module = "tensorferry._native", frozen)]
pub(crate) struct PyFileWriting {
    writing: Mutex<Option<FileWriting>>,
    options: FileOptions,
    reporter: ProgressReporter,
}

#[pymethods]
impl PyFileWriting {
    /// Makes the file. The caller holds the memory of the rows, each while it is written.
    ///
    /// # Errors
    /// `InvalidArgument` when the rows make no valid container, `SystemRefused` when the system refuses, or `partial` is
    /// not free; nothing is left behind.
    #[new]
    #[pyo3(signature = (path, *, partial, rows, control, metadata, threads = None, cached = None, progress = None))]
    #[allow(clippy::too_many_arguments, clippy::needless_pass_by_value, reason = "Python's keywords")]
    fn new(
        py: Python<'_>,
        path: PathBuf,
        partial: PathBuf,
        rows: &Bound<'_, PyTable>,
        control: Vec<(String, Vec<u8>)>,
        metadata: Vec<(String, String)>,
        threads: Option<usize>,
        cached: Option<bool>,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<Self> {
        let rows = &rows.get().0;
        let total = control.iter().map(|(_, bytes)| bytes.len()).fold(rows.nbytes(), usize::saturating_add) as u64;
        let reporter = ProgressReporter { received: Arc::default(), total, progress };
        let progress = Arc::clone(&reporter.received);
        let options = FileOptions { threads, cancel: Cancel::new(), cached, progress };
        let writing = runtime::run(py, &options.cancel, None, || {
            FileWriting::begin(&path, &partial, metadata, rows.items(control), &options)
        })?;
        Ok(Self { writing: Mutex::new(Some(writing)), options, reporter })
    }

    /// Where each row begins in the container.
    #[getter]
    fn starts(&self) -> PyResult<Vec<u64>> {
        Ok(self.writing()?.as_ref().map(FileWriting::starts).unwrap_or_default())
    }

    /// Where the container's payload ends.
    #[getter]
    fn end(&self) -> PyResult<u64> {
        Ok(self.writing()?.as_ref().map(FileWriting::end).unwrap_or_default())
    }

    /// Writes the container up to `stop`. Each of `places` is a byte of the container that belongs to a row, and the
    /// address where it is now; those of its row that follow are behind it there.
    ///
    /// # Errors
    /// `SystemRefused` when the system refuses, and whatever `progress` raises.
    #[pyo3(signature = (stop, places = Vec::new()))]
    fn write(&self, py: Python<'_>, stop: u64, places: Vec<(u64, usize)>) -> PyResult<()> {
        let notify = |py: Python<'_>| self.reporter.report(py);
        let watch = self.reporter.progress.is_some().then_some(&notify as &OnTick<'_>);
        let mut writing = self.writing()?;
        let Some(writing) = writing.as_mut() else { return Err(closed()) };
        runtime::run(py, &self.options.cancel, watch, || {
            for (at, address) in places {
                writing.place(at, address);
            }
            writing.write(stop, &self.options)
        })
    }

    /// Gives the file its name; all of it is on the disk then. The last call of `progress` comes afterwards: when it
    /// raises, the file is at `path` all the same.
    ///
    /// # Errors
    /// As [`Self::write`].
    fn finish(&self, py: Python<'_>) -> PyResult<PyWritten> {
        let Some(writing) = self.writing()?.take() else { return Err(closed()) };
        let written = run_reporting(py, None, &self.options.cancel, &self.reporter, move || writing.finish())?;
        Ok(PyWritten(written))
    }

    /// Removes what is written, unless it is finished.
    fn close(&self) -> PyResult<()> {
        self.writing()?.take();
        Ok(())
    }
}

impl PyFileWriting {
    /// What is written. One thread at a time uses it.
    fn writing(&self) -> PyResult<MutexGuard<'_, Option<FileWriting>>> {
        self.writing.try_lock().map_err(|_| pyo3::exceptions::PyRuntimeError::new_err("it is being written"))
    }
}

fn closed() -> PyErr {
    pyo3::exceptions::PyRuntimeError::new_err("it was finished or closed")
}

/// The bytes of the entries called `names` of the container at `path`, verified; `None` for those it does not have.
///
/// # Errors
/// `CorruptCheckpoint` when a block or the header does not match its checksum or the file is cut short, `ProtocolError`
/// when it is no container with checksums, `SystemRefused` when it cannot be read. And whatever the reader of a place
/// raises.
#[pyfunction]
#[pyo3(name = "_file_entries")]
#[allow(clippy::needless_pass_by_value, reason = "what the interpreter calls takes its arguments by value")]
pub(crate) fn file_entries<'py>(
    path: &Bound<'py, PyAny>,
    names: Vec<String>,
) -> PyResult<Vec<Option<Bound<'py, PyBytes>>>> {
    let (py, place) = (path.py(), Place::of(path)?);
    let cancel = Cancel::new();
    let options = FileOptions { threads: Some(1), cancel: cancel.clone(), ..FileOptions::default() };
    let found = place.run(py, &cancel, None, || {
        let container = place.open()?.with_checksums()?;
        names.iter().map(|name| container.entry(name, &options)).collect::<Result<Vec<_>, _>>()
    })?;
    Ok(found.into_iter().map(|bytes| bytes.map(|bytes| PyBytes::new(py, &bytes))).collect())
}

/// The checksum of the header of the container at `path`.
///
/// # Errors
/// As `_file_entries`; no block of the payload is read.
#[pyfunction]
#[pyo3(name = "_file_header")]
pub(crate) fn file_header(path: &Bound<'_, PyAny>) -> PyResult<u64> {
    let place = Place::of(path)?;
    place.run(path.py(), &Cancel::new(), None, || Ok(place.open()?.with_checksums()?.checksum()))
}

/// The damaged parts of the container at `path`, as ascending runs of payload bytes, first and end of each; `None` for
/// a file without checksums. All of it is read.
///
/// # Errors
/// `CorruptCheckpoint` when its header is damaged or it is cut short, `ProtocolError` when it is no container,
/// `SystemRefused` when it cannot be read. And whatever the reader of a place raises.
#[pyfunction]
#[pyo3(name = "_file_damage")]
pub(crate) fn file_damage(path: &Bound<'_, PyAny>) -> PyResult<Option<Vec<(u64, u64)>>> {
    let (place, options) = (Place::of(path)?, FileOptions::default());
    place.run(path.py(), &options.cancel.clone(), None, || {
        let container = place.open()?;
        container.has_checksums().then(|| container.damaged(&options)).transpose()
    })
}

/// CRC-64/NVME of the bytes of each entry of the container at `path`, in the order of its header.
///
/// # Errors
/// As `_file_damage`; `CorruptCheckpoint` also when a block in which an entry begins or ends is damaged. The blocks
/// between are not read if they have checksums.
#[pyfunction]
#[pyo3(name = "_file_entry_digests")]
pub(crate) fn file_entry_digests(path: &Bound<'_, PyAny>) -> PyResult<Vec<u64>> {
    let (place, options) = (Place::of(path)?, FileOptions::default());
    place.run(path.py(), &options.cancel.clone(), None, || place.open()?.entry_digests(&options))
}

/// Renames the file or folder `path` to `target`, which must not exist, in one step. Returns 0, or the number of the
/// system's error: `EEXIST` where something is there, `EINVAL` where the file system has no such rename.
#[pyfunction]
#[pyo3(name = "_rename_new")]
#[allow(clippy::needless_pass_by_value, reason = "what the interpreter calls takes its arguments by value")]
pub(crate) fn rename_new(py: Python<'_>, path: PathBuf, target: PathBuf) -> i32 {
    match py.detach(|| tensorferry_core::rename_new(&path, &target)) {
        Ok(()) => 0,
        Err(e) => e.raw_os_error().unwrap_or(libc::EIO),
    }
}

/// Writes the checksums of the container at `path`, which a receive has filled, into the entry that is there for them,
/// and brings the file to the disk. Returns the checksum of its header.
///
/// # Errors
/// `InvalidArgument` when it is no container with room for them, `SystemRefused` when the system refuses.
#[pyfunction]
#[pyo3(name = "_seal_file")]
pub(crate) fn seal_file(py: Python<'_>, path: PathBuf) -> PyResult<u64> {
    let options = FileOptions::default();
    runtime::run(py, &options.cancel.clone(), None, move || tensorferry_core::seal_file(&path, &options))
}
