//! Containers in files, and slices of them and of containers that other processes serve.
//!
//! The functions here take whole lists and make one call into the engine each: a reshard has tens of thousands of
//! slices.

use std::path::PathBuf;
use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};
use tensorferry_core::{Cancel, Container, Error, FetchOptions, FileOptions, Repeat, Slice, SliceRequest, Written};
use tensorferry_wire::dtype::Dtype;

use crate::errors;
use crate::fetch::staged::ProgressReporter;
use crate::memory;
use crate::report::{PyReport, seconds};
use crate::rows::PyTable;
use crate::runtime::{self, OnTick};
use crate::secret::PySecret;

/// `(entry, dtype, nbytes, start, run, address, [(count, from, to), ...])`.
type SliceTuple = (String, String, u64, u64, u64, usize, Vec<(u64, u64, u64)>);

/// Converts the slices that Python passed to the engine's.
///
/// # Errors
/// `InvalidArgument` for a dtype that no container has.
fn slices(py: Python<'_>, parts: Vec<SliceTuple>) -> PyResult<Vec<Slice>> {
    let slice = |(entry, dtype, nbytes, start, run, address, repeats): SliceTuple| {
        let known = Dtype::from_name(&dtype)
            .ok_or_else(|| errors::invalid(py, format!("{entry:?} is of an unknown dtype {dtype:?}")))?;
        let repeats = repeats
            .into_iter()
            .map(|(count, entry_stride, memory_stride)| Repeat { count, entry_stride, memory_stride })
            .collect();
        Ok(memory::slice(entry, (known, nbytes), (start, run), address, repeats))
    };
    parts.into_iter().map(slice).collect()
}

/// How many bytes `slices` are of.
fn total_len(slices: &[Slice]) -> u64 {
    slices.iter().map(Slice::len).fold(0, u64::saturating_add)
}

/// A file that was written, locked for as long as this lives.
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

/// Runs `work` as [`runtime::run`] does, and has `reporter` report while it runs and at its end.
///
/// # Errors
/// As [`runtime::run`]; an exception of the callback ends the work.
fn run_reporting<T: Send>(
    py: Python<'_>,
    cancel: &Cancel,
    reporter: &ProgressReporter,
    work: impl FnOnce() -> Result<T, Error> + Send,
) -> PyResult<T> {
    let notify = |py: Python<'_>| reporter.report(py);
    let done = runtime::run(py, cancel, reporter.progress.is_some().then_some(&notify as &OnTick<'_>), work)?;
    notify(py)?;
    Ok(done)
}

/// Writes `rows` and then `control`, name and bytes of each, as a container with checksums to `path`. Until it is
/// complete it is called `partial`, a name in the same folder that must be free. The caller holds the memory of the
/// rows. `progress` is called with the bytes of payload that are written and those in all.
///
/// # Errors
/// `InvalidArgument` when the rows make no valid container, `SystemRefused` when the system does; nothing is left
/// behind. And whatever `progress` raises.
#[pyfunction]
#[pyo3(name = "_write_file", signature = (path, *, partial, rows, control, metadata, threads = None, cached = None,
                                          progress = None))]
#[allow(clippy::too_many_arguments, reason = "Python's keywords")]
pub(crate) fn write_file(
    py: Python<'_>,
    path: PathBuf,
    partial: PathBuf,
    rows: &Bound<'_, PyTable>,
    control: Vec<(String, Vec<u8>)>,
    metadata: Vec<(String, String)>,
    threads: Option<usize>,
    cached: Option<bool>,
    progress: Option<Py<PyAny>>,
) -> PyResult<PyWritten> {
    let rows = &rows.get().0;
    let cancel = Cancel::new();
    let total = control.iter().map(|(_, bytes)| bytes.len()).fold(rows.nbytes(), usize::saturating_add) as u64;
    let reporter = ProgressReporter { received: Arc::default(), total, progress };
    let options = FileOptions { threads, cancel: cancel.clone(), cached, progress: Arc::clone(&reporter.received) };
    let written = run_reporting(py, &cancel, &reporter, move || {
        tensorferry_core::write_file(&path, &partial, metadata, rows.items(control), &options)
    })?;
    Ok(PyWritten(written))
}

/// The bytes of the entries called `names` of the container at `path`, verified; `None` for those it does not have.
///
/// # Errors
/// `CorruptCheckpoint` when a block does not match its checksum, `ProtocolError` when it is no container with
/// checksums.
#[pyfunction]
#[pyo3(name = "_file_entries")]
pub(crate) fn file_entries(
    py: Python<'_>,
    path: PathBuf,
    names: Vec<String>,
) -> PyResult<Vec<Option<Bound<'_, PyBytes>>>> {
    let cancel = Cancel::new();
    let options = FileOptions { threads: Some(1), cancel: cancel.clone(), ..FileOptions::default() };
    let found = runtime::run(py, &cancel, None, move || {
        let container = Container::open(&path)?;
        names.iter().map(|name| container.entry(name, &options)).collect::<Result<Vec<_>, _>>()
    })?;
    Ok(found.into_iter().map(|bytes| bytes.map(|bytes| PyBytes::new(py, &bytes))).collect())
}

/// The checksum of the header of the container at `path`.
///
/// # Errors
/// `CorruptCheckpoint` when the header does not match it, `ProtocolError` when it is no container with checksums.
#[pyfunction]
#[pyo3(name = "_file_header")]
pub(crate) fn file_header(py: Python<'_>, path: PathBuf) -> PyResult<u64> {
    runtime::run(py, &Cancel::new(), None, move || Container::open(&path).map(|container| container.checksum()))
}

/// The damaged parts of the container at `path`, as runs of payload bytes; `None` for a file without checksums.
///
/// # Errors
/// `CorruptCheckpoint` when its header is damaged, `ProtocolError` when it is no container.
#[pyfunction]
#[pyo3(name = "_file_damage")]
pub(crate) fn file_damage(py: Python<'_>, path: PathBuf) -> PyResult<Option<Vec<(u64, u64)>>> {
    let options = FileOptions::default();
    runtime::run(py, &options.cancel.clone(), None, move || {
        let container = Container::open_any(&path)?;
        container.has_checksums().then(|| container.damaged(&options)).transpose()
    })
}

/// CRC-64/NVME of the bytes of each entry of the container at `path`, in the order of its header.
///
/// # Errors
/// `CorruptCheckpoint` when a block that was read for it is damaged, `ProtocolError` when it is no container.
#[pyfunction]
#[pyo3(name = "_file_entry_digests")]
pub(crate) fn file_entry_digests(py: Python<'_>, path: PathBuf) -> PyResult<Vec<u64>> {
    let options = FileOptions::default();
    runtime::run(py, &options.cancel.clone(), None, move || Container::open_any(&path)?.entry_digests(&options))
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
/// `InvalidArgument` when it has no room for them, `SystemRefused` when the system refuses.
#[pyfunction]
#[pyo3(name = "_seal_file")]
pub(crate) fn seal_file(py: Python<'_>, path: PathBuf) -> PyResult<u64> {
    let options = FileOptions::default();
    runtime::run(py, &options.cancel.clone(), None, move || tensorferry_core::seal_file(&path, &options))
}

/// Reads slices of the container at `path` into their places, verified. With `header`, only if that is the checksum of
/// its header. Returns the bytes read and the bytes wanted. `progress` is called with the bytes of `parts` that are here
/// and those in all; what is read around them counts until the second is reached.
///
/// # Errors
/// `CorruptCheckpoint` when a block, or the header, is not what was written; the memory may hold anything then. And
/// whatever `progress` raises.
#[pyfunction]
#[pyo3(name = "_read_file", signature = (path, parts, *, threads = None, header = None, progress = None))]
pub(crate) fn read_file(
    py: Python<'_>,
    path: PathBuf,
    parts: Vec<SliceTuple>,
    threads: Option<usize>,
    header: Option<u64>,
    progress: Option<Py<PyAny>>,
) -> PyResult<Bound<'_, PyDict>> {
    let slices = slices(py, parts)?;
    let cancel = Cancel::new();
    let reporter = ProgressReporter { received: Arc::default(), total: total_len(&slices), progress };
    let received = Arc::clone(&reporter.received);
    let options = FileOptions { threads, cancel: cancel.clone(), progress: received, ..FileOptions::default() };
    let report = run_reporting(py, &cancel, &reporter, move || {
        let container = Container::open(&path)?;
        header.map_or(Ok(()), |header| container.expect(header))?;
        container.read(&slices, &options)
    })?;
    let figures = PyDict::new(py);
    figures.set_item("bytes", report.bytes)?;
    figures.set_item("wanted", report.wanted)?;
    Ok(figures)
}

/// Fetches slices from several sources at once: `(urls, step, parts)` for each. Returns one report for all of them.
///
/// `ahead` is how many bytes the first request to each source asks for, header included. `progress` is as for
/// `_read_file`.
///
/// # Errors
/// The first error of any source, as an exception; the others are cancelled. And whatever `progress` raises.
#[pyfunction]
#[pyo3(name = "_fetch_slices", signature = (orders, *, timeout, lanes = None, same_host = false, ahead = None,
                                            secret = None, progress = None))]
#[allow(clippy::too_many_arguments, reason = "Python's keywords")]
pub(crate) fn fetch_slices(
    py: Python<'_>,
    orders: Vec<(Vec<String>, i64, Vec<SliceTuple>)>,
    timeout: f64,
    lanes: Option<usize>,
    same_host: bool,
    ahead: Option<u64>,
    secret: Option<&PySecret>,
    progress: Option<Py<PyAny>>,
) -> PyResult<PyReport> {
    let timeout = seconds(py, timeout.max(0.0))?;
    let order = |(urls, step, parts)| Ok(SliceRequest { urls, step, slices: slices(py, parts)? });
    let orders = orders.into_iter().map(order).collect::<PyResult<Vec<_>>>()?;
    let cancel = Cancel::new();
    let total = orders.iter().map(|order| total_len(&order.slices)).fold(0, u64::saturating_add);
    let reporter = ProgressReporter { received: Arc::default(), total, progress };
    let defaults = FetchOptions::within(timeout);
    let options = FetchOptions {
        lanes,
        same_host,
        ahead: ahead.unwrap_or(defaults.ahead),
        secret: secret.map(|s| s.0.clone()),
        progress: Arc::clone(&reporter.received),
        cancel: cancel.clone(),
        ..defaults
    };
    run_reporting(py, &cancel, &reporter, move || tensorferry_core::fetch_slices(orders, &options)).map(PyReport)
}
