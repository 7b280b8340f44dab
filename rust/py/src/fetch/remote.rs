//! `Remote`: a checkpoint at its source, and fetching it; `ArenaPool`: memory kept from one receive for the next.
//!
//! A `Remote` is fetched once. Its header outlives the fetch, so the columns (`names`, `dtypes`, `shapes`, `sizes`)
//! stay readable; the manifest and the pickle are part of what is handed over, and are not.

use std::ops::Range;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyString};
use tensorferry_core::{ArenaPool, Arrived, Cancel, Destination, Error, FetchOptions, Remote, Server};
use tensorferry_wire::container::{self, Header};

use crate::errors;
use crate::fetch::entries::{PyEntries, find_tree, without_tree};
use crate::fetch::progress::ProgressReporter;
use crate::fetch::staged::{PyStagedFetch, WavesOf};
use crate::memory::{PyArena, given, pool_with_allocator};
use crate::report::{PyReport, seconds};
use crate::runtime::{self, OnTick, Process};
use crate::server::PyServer;
use crate::trust::PySecret;
use tensorferry_core::Locked;

/// A checkpoint whose header is here and whose payload is still at its source.
#[pyclass(name = "Remote", module = "tensorferry._native", extends = PyEntries, frozen)]
pub(crate) struct PyRemote {
    process: Process,
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

/// Memory of earlier receives, kept for later ones. Several transports may share one pool.
#[pyclass(name = "ArenaPool", module = "tensorferry._native", frozen)]
pub(crate) struct PyPool(Arc<ArenaPool>);

#[pymethods]
impl PyPool {
    /// A pool that keeps at most `limit` bytes. `make`, if given, is asked for new memory: called with a number of
    /// bytes, it returns an address and the object that holds the memory there, or `None` where an ordinary mapping
    /// will do. An exception of it is reported as unraisable and counts as `None`.
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

impl PyRemote {
    /// Reads something of the checkpoint while it has not been fetched.
    ///
    /// # Errors
    /// `InvalidArgument` once it was fetched, `ForkedProcess` in a forked child.
    fn with<T>(&self, py: Python<'_>, read: impl FnOnce(&Remote) -> PyResult<T>) -> PyResult<T> {
        self.process.check(py)?;
        match &*self.remote.locked() {
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

    /// The count of bytes of payload that are here, and how many there will be.
    pub(crate) fn progress(&self) -> (Arc<AtomicU64>, u64) {
        (Arc::clone(&self.received), self.header.payload_len())
    }

    /// The checkpoint itself, to be fetched once, and what reports the progress of that.
    ///
    /// # Errors
    /// `InvalidArgument` once it was fetched, `ForkedProcess` in a forked child.
    fn take(&self, py: Python<'_>) -> PyResult<(Remote, ProgressReporter)> {
        self.process.check(py)?;
        let remote = self.remote.locked().take();
        let remote = remote.ok_or_else(|| errors::invalid(py, "this checkpoint was fetched already"))?;
        let reporter = ProgressReporter {
            received: Arc::clone(&self.received),
            total: remote.header().payload_len(),
            progress: self.progress.as_ref().map(|call| call.clone_ref(py)),
        };
        Ok((remote, reporter))
    }
}

#[pymethods]
impl PyRemote {
    /// Opens a checkpoint: waits until one of `urls` serves `step`, or without one anything, and reads its header and
    /// manifest.
    ///
    /// `timeout` seconds is the one deadline of the receive, fetching included. `lanes` is the number of connections,
    /// `pool` provides memory, `progress` is called with the bytes here and the bytes in all, `secret` signs requests.
    /// A source that announces more than `most_described` bytes of header and control entries is refused. `relay` is a
    /// server of this process: it serves on what is received while it is, where the source has a swarm.
    ///
    /// # Errors
    /// The engine's errors as exceptions, `ProtocolError` for a manifest that is not valid among them.
    #[staticmethod]
    #[allow(clippy::too_many_arguments, reason = "keywords in Python")]
    #[pyo3(signature = (urls, step, *, timeout, lanes = None, same_host = true, pool = None, progress = None,
                        secret = None, most_described = None, relay = None))]
    fn open(
        py: Python<'_>,
        urls: Vec<String>,
        step: Option<i64>,
        timeout: f64,
        lanes: Option<usize>,
        same_host: bool,
        pool: Option<&PyPool>,
        progress: Option<Py<PyAny>>,
        secret: Option<&PySecret>,
        most_described: Option<u64>,
        relay: Option<&PyServer>,
    ) -> PyResult<Py<Self>> {
        let timeout = seconds(py, timeout.max(0.0))?;
        let cancel = Cancel::new();
        let received = Arc::<AtomicU64>::default();
        let options = FetchOptions {
            lanes,
            same_host,
            secret: secret.map(|s| s.0.clone()),
            most_described: most_described.unwrap_or(u64::MAX),
            pool: pool.map(|p| Arc::clone(&p.0)),
            progress: Arc::clone(&received),
            cancel: cancel.clone(),
            relay: relay.map(|server| server.server(py).map(Server::relay_host)).transpose()?,
            ..FetchOptions::within(timeout)
        };
        let (remote, tree) = runtime::run(py, &cancel, None, move || {
            let urls: Vec<_> = urls.iter().map(String::as_str).collect();
            let remote = Remote::open(&urls, step, options)?;
            let tree =
                find_tree(remote.reserved(container::MANIFEST_ENTRY), remote.header()).map_err(Error::protocol)?;
            Ok((remote, tree))
        })?;
        let header = Arc::clone(remote.header());
        let entries = PyEntries::new(Arc::clone(&header));
        let remote = Mutex::new(Some(remote));
        let this = Self { process: Process::current(), cancel, received, progress, header, tree, remote };
        Py::new(py, (this, entries))
    }

    /// The step that was opened.
    ///
    /// # Errors
    /// `InvalidArgument` once it was fetched, `ForkedProcess` in a forked child.
    #[getter]
    fn step(&self, py: Python<'_>) -> PyResult<i64> {
        self.with(py, |remote| Ok(remote.step()))
    }

    /// The addresses that the source has named, each with the speed of its link in Mbit/s, 0 if not known.
    ///
    /// # Errors
    /// As `step`.
    #[getter]
    fn rails(&self, py: Python<'_>) -> PyResult<Vec<(String, u32)>> {
        let named = |remote: &Remote| remote.rails().iter().map(|rail| (rail.address.to_string(), rail.mbit)).collect();
        self.with(py, |remote| Ok(named(remote)))
    }

    /// The address of the source by which it was opened; `None` if that did not go over the network.
    ///
    /// # Errors
    /// As `step`.
    #[getter]
    fn address(&self, py: Python<'_>) -> PyResult<Option<String>> {
        self.with(py, |remote| Ok(remote.address().map(|address| address.to_string())))
    }

    /// Receives by the address `there` alone for about `duration` seconds, again and again, and drops what comes without
    /// a check. Returns the number of bytes, the seconds it took, and the address here. The checkpoint can be fetched
    /// afterwards, but not meanwhile, nor after a signal has interrupted this.
    ///
    /// # Errors
    /// As `fetch`; `InvalidArgument` for what is no address, and after a fetch.
    fn measure(&self, py: Python<'_>, there: &str, duration: f64) -> PyResult<(u64, f64, String)> {
        let address = there.parse().map_err(|_| errors::invalid(py, format!("{there:?} is not an address")))?;
        let duration = seconds(py, duration)?;
        let (remote, _) = self.take(py)?;
        let (remote, rate) = runtime::run(py, &self.cancel, None, move || {
            let rate = remote.measure(address, duration);
            Ok((remote, rate))
        })?;
        *self.remote.locked() = Some(remote);
        let rate = rate.map_err(|e| errors::to_py(py, &e))?;
        Ok((rate.bytes, rate.elapsed.as_secs_f64(), rate.here.to_string()))
    }

    /// The manifest as JSON text, with `null` for its tree; `None` for a container tensorferry did not write.
    ///
    /// # Errors
    /// As `step`.
    #[getter]
    fn manifest<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyBytes>>> {
        self.with_manifest(py, |json, tree| without_tree(py, json, tree))
    }

    /// The tree as JSON text, `None` for a container tensorferry did not write.
    ///
    /// # Errors
    /// As `step`.
    #[getter]
    fn tree<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyString>>> {
        let tree = self.with_manifest(py, |json, tree| PyString::from_bytes(py, &json[tree]))?;
        tree.transpose()
    }

    /// The pickle of everything other than plain tensors, `None` if there is none.
    ///
    /// # Errors
    /// As `step`.
    #[getter]
    fn pickle<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyBytes>>> {
        self.with(py, |remote| Ok(remote.reserved(container::PICKLE_ENTRY).map(|b| PyBytes::new(py, b))))
    }

    /// Fetches and verifies the payload. Entries with an address go there, the others into a fresh arena, which is
    /// returned with a report.
    ///
    /// `addresses` has one item for each entry of the header. The caller holds the memory behind them until this
    /// returns, and the sizes fit; after an exception it may hold some of the new bytes. With `resume`, blocks that are
    /// there already, as the source's digests show, are not fetched. The checkpoint counts as fetched after an
    /// exception, too.
    ///
    /// # Errors
    /// The engine's errors as exceptions, `InvalidArgument` once it was fetched, `ForkedProcess` in a forked child, and
    /// whatever `progress` or a signal handler raises.
    #[pyo3(signature = (addresses = None, *, resume = false))]
    fn fetch(
        &self,
        py: Python<'_>,
        addresses: Option<Vec<Option<usize>>>,
        resume: bool,
    ) -> PyResult<(PyArena, PyReport)> {
        let (remote, reporter) = self.take(py)?;
        let destination = addresses.map_or(Destination::Fresh, given);
        let notify = |py: Python<'_>| reporter.report(py);
        let watch = reporter.progress.is_some().then_some(&notify as &OnTick<'_>);
        let arrived = runtime::run(py, &self.cancel, watch, move || {
            if resume { remote.resume(destination) } else { remote.fetch(destination) }
        })?;
        notify(py)?;
        Ok(handed_over(arrived, &self.header))
    }

    /// CRC-64/NVME of the bytes of each entry, `None` if the digests of the source are keyed with a secret. This counts
    /// as the fetch.
    ///
    /// # Errors
    /// As `fetch`.
    fn entry_digests(&self, py: Python<'_>) -> PyResult<Option<Vec<u64>>> {
        let (remote, _) = self.take(py)?;
        runtime::run(py, &self.cancel, None, move || remote.entry_digests())
    }

    /// Begins a receive like `fetch`, in which the entries numbered in `staged` come through a buffer of `most` bytes
    /// that is given to each call of `StagedFetch.fetch`. The caller holds the memory behind `addresses` until the last
    /// wave has come. This counts as the fetch, after an exception, too.
    ///
    /// # Errors
    /// `InvalidArgument` with several sources, for a buffer of less than 1 MiB, for entries that there are not or that
    /// are named twice, and once it was fetched; `SystemRefused` when there is no memory; `ForkedProcess` in a forked
    /// child.
    fn staged(
        &self,
        py: Python<'_>,
        addresses: Option<Vec<Option<usize>>>,
        staged: Vec<usize>,
        most: u64,
    ) -> PyResult<PyStagedFetch> {
        let (remote, reporter) = self.take(py)?;
        let destination = addresses.map_or(Destination::Fresh, given);
        let waves = py.detach(move || remote.staged(destination, &staged, most)).map_err(|e| errors::to_py(py, &e))?;
        Ok(PyStagedFetch::new(
            None,
            self.cancel.clone(),
            reporter,
            Arc::clone(&self.header),
            WavesOf::Remote(Box::new(waves)),
        ))
    }

    /// Ends every connection of this receive, also of its waves. A source would wait at a withdrawal for one that is
    /// open, and an exception keeps this object, and so the connections, for as long as somebody keeps its traceback.
    /// What is under way fails, and the checkpoint counts as fetched. Does nothing in a forked child.
    fn close(&self, py: Python<'_>) {
        // In a forked child they are the parent's.
        if self.process.check(py).is_ok() {
            drop(self.remote.locked().take());
            self.cancel.cancel();
        }
    }
}

/// Converts a finished receive for Python: the arena and a report.
pub(crate) fn handed_over(arrived: Arrived, header: &Arc<Header>) -> (PyArena, PyReport) {
    let (arena, offsets, report) = arrived.into_parts();
    (PyArena::new(arena, Arc::clone(header), offsets), PyReport(report))
}
