//! Slices of containers in files, and of those that other processes serve.
//!
//! The functions here take whole lists and make one call into the engine each: a reshard has tens of thousands of
//! slices.

use std::collections::HashSet;
use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::PyDict;
use tensorferry_core::{Cancel, EntryRef, FetchOptions, FileOptions, Repeat, Server, Slice, SliceRequest};
use tensorferry_wire::dtype::Dtype;

use crate::errors;
use crate::fetch::place::Place;
use crate::fetch::progress::{ProgressReporter, run_reporting};
use crate::memory;
use crate::report::{PyReport, seconds};
use crate::server::PyServer;
use crate::trust::PySecret;

/// The name of an entry, or its number in the header.
#[derive(FromPyObject)]
pub(crate) enum Entry {
    Number(u32),
    Name(String),
}

/// `(entry, dtype, nbytes, start, run, address, [(count, from, to), ...])`.
type SliceTuple = (Entry, String, u64, u64, u64, usize, Vec<(u64, u64, u64)>);

/// Converts the slices that Python passed to the engine's.
///
/// # Errors
/// `InvalidArgument` for a dtype that no container has.
fn slices(py: Python<'_>, parts: Vec<SliceTuple>) -> PyResult<Vec<Slice>> {
    let slice = |(entry, dtype, nbytes, start, run, address, repeats): SliceTuple| {
        let entry = match entry {
            Entry::Number(number) => EntryRef::Number(number),
            Entry::Name(name) => EntryRef::Name(name),
        };
        let known = Dtype::from_name(&dtype)
            .ok_or_else(|| errors::invalid(py, format!("{entry} is of an unknown dtype {dtype:?}")))?;
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

/// Reads slices of the container at `path` into their places, verified. With `header`, only if that is the checksum of
/// its header. Returns the bytes read and the bytes wanted. `progress` is called with the bytes of `parts` that are here
/// and those in all; what is read around them counts until the second is reached. The caller holds the memory of all
/// places, which do not overlap, until this returns.
///
/// # Errors
/// `CorruptCheckpoint` when a block, or the header, is not what was written; `ProtocolError` when it is no container
/// with checksums, or has other entries than `parts` speak of; `InvalidArgument` for an unknown dtype; `SystemRefused`
/// when it cannot be read. And whatever `progress`, or the reader of a place, raises. The memory may hold anything
/// then.
#[pyfunction]
#[pyo3(name = "_read_file", signature = (path, parts, *, threads = None, header = None, progress = None))]
pub(crate) fn read_file<'py>(
    path: &Bound<'py, PyAny>,
    parts: Vec<SliceTuple>,
    threads: Option<usize>,
    header: Option<u64>,
    progress: Option<Py<PyAny>>,
) -> PyResult<Bound<'py, PyDict>> {
    let (py, place) = (path.py(), Place::of(path)?);
    let slices = slices(py, parts)?;
    let cancel = Cancel::new();
    let reporter = ProgressReporter { received: Arc::default(), total: total_len(&slices), progress };
    let received = Arc::clone(&reporter.received);
    let options = FileOptions { threads, cancel: cancel.clone(), progress: received, ..FileOptions::default() };
    let report = run_reporting(py, Some(&place), &cancel, &reporter, || {
        let container = place.open()?.with_checksums()?;
        header.map_or(Ok(()), |header| container.check_header_checksum(header))?;
        container.read(&slices, &options)
    })?;
    let figures = PyDict::new(py);
    figures.set_item("bytes", report.bytes)?;
    figures.set_item("wanted", report.wanted)?;
    Ok(figures)
}

/// Fetches slices from several sources at once: `(urls, step, parts)` for each. Returns one report for all of them.
///
/// Those at the places in `shared`, other processes fetch at the same time: they and this one bring them to each other,
/// this one by its server `relay`.
///
/// `ahead` is how many bytes the first request to each source asks for, header included. `progress`, and what the
/// caller holds, are as for `_read_file`.
///
/// # Errors
/// The first error of any source, as an exception; the others are cancelled. `InvalidArgument` for an unknown dtype,
/// `ForkedProcess` for a `relay` of another process. And whatever `progress` raises. The memory may hold anything then.
#[pyfunction]
#[pyo3(name = "_fetch_slices", signature = (orders, *, timeout, lanes = None, same_host = false, ahead = None,
                                            secret = None, progress = None, relay = None,
                                            shared = HashSet::new()))]
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
    relay: Option<&PyServer>,
    mut shared: HashSet<usize>,
) -> PyResult<PyReport> {
    let timeout = seconds(py, timeout.max(0.0))?;
    let order = |(index, (urls, step, parts))| {
        Ok(SliceRequest { urls, step, slices: slices(py, parts)?, is_shared: shared.remove(&index) })
    };
    let orders = orders.into_iter().enumerate().map(order).collect::<PyResult<Vec<_>>>()?;
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
        relay: relay.map(|server| server.server(py).map(Server::relay_host)).transpose()?,
        ..defaults
    };
    run_reporting(py, None, &cancel, &reporter, move || tensorferry_core::fetch_slices(orders, &options)).map(PyReport)
}
