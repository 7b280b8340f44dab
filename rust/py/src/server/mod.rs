//! `Server`, `Shelf` and `Receive`: publish tensors' memory and serve it.
//!
//! A server owns sockets and uses threads of the runtime; it is dropped without the interpreter, and not at all in a
//! forked child, where there is nothing to stop.

mod frontend;
pub(crate) mod readiness;

use std::any::Any;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use tensorferry_core::{
    Alternate, Error, Memory, Publication, Receive, Rendered, ServedFiles, Server, ServerConfig, Shelf, Stability,
    Store, Withdrawn,
};

use self::frontend::PythonFrontend;
use self::readiness::PyReadiness;
use crate::errors;
use crate::fetch::remote::PyRemote;
use crate::memory::{Owner, PyFilePages, borrowed};
use crate::report::{PyReport, seconds};
use crate::rows::PyRows;
use crate::runtime::{self, Process, SIGNAL_POLL};
use crate::secret::PySecret;

/// A server for one checkpoint at a time. Every method raises `ForkedProcess` in a forked child.
#[pyclass(name = "Server", module = "tensorferry._native", frozen)]
pub(crate) struct PyServer {
    process: Process,
    // Taken only by Drop.
    inner: Option<Server>,
}

impl PyServer {
    fn server(&self, py: Python<'_>) -> PyResult<&Server> {
        self.process.check(py)?;
        self.inner.as_ref().ok_or_else(|| errors::invalid(py, "this server is gone"))
    }
}

#[pymethods]
impl PyServer {
    /// Listens on the address `bind` (every interface by default), on the first free one of `ports` (first and last of
    /// them; 0 is any), and starts to serve; the gate is closed. On one of `metrics_ports` counters alone are served, to
    /// everybody. `patience` seconds is how long a request waits for the gate, `max_bandwidth` the limit in bytes per
    /// second.
    ///
    /// # Errors
    /// `InvalidArgument` for an address that cannot be parsed, `SystemRefused` when it cannot be listened on.
    #[new]
    #[pyo3(signature = (*, patience, bind = None, ports = (0, 0), metrics_ports = None, same_host = true,
                        max_bandwidth = None, secret = None, tls = false))]
    #[allow(clippy::too_many_arguments, reason = "keywords in Python")]
    fn new(
        py: Python<'_>,
        patience: f64,
        bind: Option<&str>,
        ports: (u16, u16),
        metrics_ports: Option<(u16, u16)>,
        same_host: bool,
        max_bandwidth: Option<u64>,
        secret: Option<&PySecret>,
        tls: bool,
    ) -> PyResult<Self> {
        let bind = bind
            .map(str::parse)
            .transpose()
            .map_err(|_| errors::invalid(py, format!("bind={bind:?} is not an address")))?;
        let (ports, metrics_ports) = (ports.0..=ports.1, metrics_ports.map(|(first, last)| first..=last));
        let patience = seconds(py, patience)?;
        let secret = secret.map(|s| s.0.clone());
        let frontend = Arc::new(PythonFrontend);
        let config = ServerConfig {
            bind,
            ports,
            metrics_ports,
            patience,
            same_host,
            max_bandwidth,
            secret,
            tls,
            frontend,
            ..ServerConfig::default()
        };
        let inner = py
            .detach(|| Server::bind(&config, &runtime::handle().map_err(tensorferry_core::Error::from)?))
            .map_err(|e| errors::to_py(py, &e))?;
        Ok(Self { process: Process::current(), inner: Some(inner) })
    }

    /// The URL prefix of checkpoints for peers that reach this machine as `host`.
    fn url(&self, py: Python<'_>, host: &str) -> PyResult<String> {
        Ok(self.server(py)?.url(host))
    }

    /// The URL of the port on which counters alone are served, for those who reach this machine as `host`; `None` if
    /// there is no such port.
    fn metrics_url(&self, py: Python<'_>, host: &str) -> PyResult<Option<String>> {
        Ok(self.server(py)?.metrics_url(host))
    }

    /// Publishes `rows` and then `control`, name and bytes of each, as `step`, and opens the gate.
    ///
    /// `owner` keeps the memory of all rows alive and is released when nobody reads it any more. `private` says that
    /// nothing writes to that memory. `alternate` renders other formats: called with a name, it returns a list of
    /// parts, the URL of a server that has the body, or `None`. Unless the memory is `filled`, the producer's handle is
    /// returned. `pages` are those of files in which rows lie: once one of them has changed, receivers get no checksums.
    ///
    /// # Errors
    /// `InvalidArgument` when the rows make no valid container.
    #[pyo3(signature = (step, *, rows, control, metadata, owner, private, alternate = None, filled = true,
                        pages = Vec::new()))]
    #[allow(clippy::too_many_arguments, reason = "keywords in Python")]
    fn publish(
        &self,
        py: Python<'_>,
        step: i64,
        rows: &Bound<'_, PyRows>,
        control: Vec<(String, Vec<u8>)>,
        metadata: Vec<(String, String)>,
        owner: Py<PyAny>,
        private: bool,
        alternate: Option<Py<PyAny>>,
        filled: bool,
        pages: Vec<Bound<'_, PyFilePages>>,
    ) -> PyResult<Option<PyReadiness>> {
        let server = self.server(py)?;
        let given = Published { step, rows, control, metadata, owner, private, alternate, filled, pages };
        publish(py, server.store(), given)
    }

    /// Makes room for a further checkpoint below a path of its own: a random one, or `name`.
    ///
    /// # Errors
    /// `InvalidArgument` for a name that is taken or is none.
    #[pyo3(signature = (name = None))]
    fn shelf(&self, py: Python<'_>, name: Option<&str>) -> PyResult<PyShelf> {
        let made = self.server(py)?.shelf(name).map_err(|e| errors::to_py(py, &e))?;
        Ok(PyShelf { process: Process::current(), inner: Mutex::new(Some(Arc::new(made))) })
    }

    /// Withdraws the publication of `filling`, whose memory cannot be completed, or is needed for something else. When
    /// this returns, it is not read any more.
    fn abandon(&self, py: Python<'_>, filling: &PyReadiness) -> PyResult<()> {
        let (server, filling) = (self.server(py)?, filling.take(py)?);
        py.detach(|| server.store().abandon(filling));
        Ok(())
    }

    /// Raises `ForkedProcess` in a forked child.
    fn check_process(&self, py: Python<'_>) -> PyResult<()> {
        self.server(py).map(drop)
    }

    /// A receive of this process begins; counters and status page show it.
    fn begin_receive(&self, py: Python<'_>, step: i64) -> PyResult<PyReceive> {
        let inner = Mutex::new(Some(self.server(py)?.begin_receive(step)));
        Ok(PyReceive { process: Process::current(), inner })
    }

    /// Opens the gate for what is published, which is served as `step` from now on.
    fn allow(&self, py: Python<'_>, step: i64) -> PyResult<()> {
        self.server(py)?.store().allow(step);
        Ok(())
    }

    /// Closes the gate and withdraws what is served; returns how many readers had to be cut off after `patience`
    /// seconds. A signal whose handler raises cuts them off at once. When this returns, borrowed memory is not read any
    /// more.
    fn withdraw(&self, py: Python<'_>, patience: f64) -> PyResult<usize> {
        let (server, patience) = (self.server(py)?, seconds(py, patience)?);
        // A trainer withdraws in every step, and hardly ever is anything read: nothing is to be waited for then.
        if server.store().withdraw_unread() {
            return Ok(0);
        }
        let cut = || {
            server.store().withdraw(Duration::ZERO);
        };
        Ok(match runtime::run_until(py, cut, None, || Ok(server.store().withdraw(patience)))? {
            Withdrawn::Clean | Withdrawn::Drained => 0,
            Withdrawn::Cut(readers) => readers,
        })
    }

    /// The step that is, or was last, served.
    #[getter]
    fn step(&self, py: Python<'_>) -> PyResult<Option<i64>> {
        Ok(self.server(py)?.store().step())
    }

    /// Whether the gate is open.
    #[getter]
    fn allowed(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.server(py)?.store().is_allowed())
    }

    /// Bytes of bodies sent so far.
    #[getter]
    fn bytes_served(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.server(py)?.bytes_served())
    }

    /// Ends all transfers and waits for at most `patience` seconds until the port is free. A signal ends only the wait.
    fn shutdown(&self, py: Python<'_>, patience: f64) -> PyResult<()> {
        let (server, patience) = (self.server(py)?, seconds(py, patience)?);
        // Everything is ended at once; a signal ends only the wait for the port.
        py.detach(|| server.shutdown(Duration::ZERO));
        let until = Instant::now() + patience;
        while !py.detach(|| server.is_down_within(until.saturating_duration_since(Instant::now()).min(SIGNAL_POLL))) {
            py.check_signals()?;
            if Instant::now() >= until {
                break;
            }
        }
        Ok(())
    }
}

/// A receive of this process, for the counters of its server.
#[pyclass(name = "Receive", module = "tensorferry._native", frozen)]
pub(crate) struct PyReceive {
    process: Process,
    // None once it has ended.
    inner: Mutex<Option<Receive>>,
}

impl PyReceive {
    /// The receive, in the process it belongs to; in a forked child another thread of the parent may hold its locks.
    fn inner(&self) -> Option<MutexGuard<'_, Option<Receive>>> {
        self.process.is_current().then(|| self.inner.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Drop for PyReceive {
    fn drop(&mut self) {
        if !self.process.is_current() {
            std::mem::forget(self.inner.get_mut().unwrap_or_else(PoisonError::into_inner).take());
        }
    }
}

#[pymethods]
impl PyReceive {
    /// The source has answered: from now on it is known how much there is, and how much of it is here.
    fn opened(&self, remote: &PyRemote) {
        let (received, total) = remote.progress();
        if let Some(inner) = self.inner()
            && let Some(receive) = &*inner
        {
            receive.opened(received, total);
        }
    }

    /// The receive is over after `took` seconds in all, with `report` as `Remote.fetch` gives it, or with an error of
    /// the class `failed`. Only the first call counts.
    #[pyo3(signature = (took, report = None, failed = ""))]
    fn end(&self, py: Python<'_>, took: f64, report: Option<&PyReport>, failed: &str) -> PyResult<()> {
        let took = seconds(py, took)?;
        if let Some(receive) = self.inner().and_then(|mut inner| inner.take()) {
            receive.end(report.map(|report| &report.0).ok_or(failed), took);
        }
        Ok(())
    }
}

/// What [`publish`] is given.
struct Published<'a, 'py> {
    step: i64,
    rows: &'a Bound<'py, PyRows>,
    control: Vec<(String, Vec<u8>)>,
    metadata: Vec<(String, String)>,
    owner: Py<PyAny>,
    private: bool,
    alternate: Option<Py<PyAny>>,
    filled: bool,
    pages: Vec<Bound<'py, PyFilePages>>,
}

/// Publishes in `store`; see [`PyServer::publish`].
fn publish(py: Python<'_>, store: &Store, given: Published<'_, '_>) -> PyResult<Option<PyReadiness>> {
    let Published { step, rows, control, metadata, owner, private, alternate, filled, pages } = given;
    let stability = if private { Stability::Private } else { Stability::Borrowed };
    let owner = Box::new(Owner::new(owner));
    let alternate = alternate.map(|callable| Box::new(PyAlternate(Owner::new(callable))) as Box<dyn Alternate>);
    let rows = rows.get();
    let files: Vec<_> =
        pages.iter().map(|pages| (Arc::clone(&pages.get().pages), pages.get().stored.get().cloned())).collect();
    rows.detached(py, || {
        let items = rows.items(control);
        let (mut publication, filling) = if filled {
            (Publication::new(metadata, items, stability, owner)?, None)
        } else {
            let (publication, filling) = Publication::with_readiness(metadata, items, stability, owner)?;
            (publication, Some(PyReadiness::new(filling)))
        };
        if !files.is_empty() {
            publication = publication.with_backing(Box::new(ServedFiles::new(files)));
        }
        if let Some(alternate) = alternate {
            publication = publication.with_alternate(alternate);
        }
        store.publish(step, publication);
        Ok(filling)
    })
    .map_err(|e: Error| errors::to_py(py, &e))
}

/// A further store of a server, with a URL of its own.
#[pyclass(name = "Shelf", module = "tensorferry._native", frozen)]
pub(crate) struct PyShelf {
    process: Process,
    // None once it was closed.
    inner: Mutex<Option<Arc<Shelf>>>,
}

impl PyShelf {
    fn shelf(&self, py: Python<'_>) -> PyResult<Arc<Shelf>> {
        self.process.check(py)?;
        let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner).clone();
        inner.ok_or_else(|| errors::invalid(py, "this shelf is closed"))
    }

    fn take(&self) -> Option<Arc<Shelf>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

#[pymethods]
impl PyShelf {
    /// The URL prefix of what lies here for peers that reach this machine as `host`.
    fn url(&self, py: Python<'_>, host: &str) -> PyResult<String> {
        Ok(self.shelf(py)?.url(host))
    }

    /// As `Server.publish`.
    ///
    /// # Errors
    /// `InvalidArgument` when the rows make no valid container.
    #[pyo3(signature = (step, *, rows, control, metadata, owner, private, alternate = None, filled = true,
                        pages = Vec::new()))]
    #[allow(clippy::too_many_arguments, reason = "keywords in Python")]
    fn publish(
        &self,
        py: Python<'_>,
        step: i64,
        rows: &Bound<'_, PyRows>,
        control: Vec<(String, Vec<u8>)>,
        metadata: Vec<(String, String)>,
        owner: Py<PyAny>,
        private: bool,
        alternate: Option<Py<PyAny>>,
        filled: bool,
        pages: Vec<Bound<'_, PyFilePages>>,
    ) -> PyResult<Option<PyReadiness>> {
        let inner = self.shelf(py)?;
        let given = Published { step, rows, control, metadata, owner, private, alternate, filled, pages };
        publish(py, inner.store(), given)
    }

    /// Takes no new receives of what lies here; those that have begun finish from a private copy.
    fn withdraw(&self, py: Python<'_>, patience: f64) -> PyResult<usize> {
        let (inner, patience) = (self.shelf(py)?, seconds(py, patience)?);
        Ok(match py.detach(|| inner.store().withdraw(patience)) {
            Withdrawn::Clean | Withdrawn::Drained => 0,
            Withdrawn::Cut(readers) => readers,
        })
    }

    /// Transfers running now.
    #[getter]
    fn active(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.shelf(py)?.store().active())
    }

    /// Ends all transfers of what lies here, and releases it.
    fn close(&self, py: Python<'_>) {
        if self.process.check(py).is_ok() {
            let inner = self.take();
            py.detach(|| drop(inner));
        }
    }
}

impl Drop for PyShelf {
    fn drop(&mut self) {
        let inner = self.take();
        if self.process.is_current() {
            // As for a server.
            Python::attach(|py| py.detach(|| drop(inner)));
        } else {
            std::mem::forget(inner);
        }
    }
}

impl Drop for PyServer {
    fn drop(&mut self) {
        let inner = self.inner.take();
        if self.process.is_current() {
            // Ending transfers waits for runtime threads, which may be waiting for the interpreter.
            Python::attach(|py| py.detach(|| drop(inner)));
        } else {
            // In a forked child there are no readers to wait for.
            std::mem::forget(inner);
        }
    }
}

/// A part of a rendered body: `bytes`, which are copied, or `(address, nbytes)`, borrowed from the list's owner.
fn memory(part: &Bound<'_, PyAny>) -> PyResult<Memory> {
    if let Ok(bytes) = part.cast::<PyBytes>() {
        return Ok(Bytes::copy_from_slice(bytes.as_bytes()).into());
    }
    let (address, nbytes) = part.extract()?;
    Ok(borrowed(address, nbytes))
}

/// A Python callable `name -> list of parts | URL | None` as the source of alternate bodies.
struct PyAlternate(Owner);

impl Alternate for PyAlternate {
    fn render(&self, name: &str) -> Result<Option<Rendered>, String> {
        Python::try_attach(|py| {
            let Some(parts) = self.0.call(py, name)? else { return Ok(None) };
            let parts = parts.bind(py);
            if let Ok(url) = parts.extract::<String>() {
                return Ok(Some(Rendered::Elsewhere(url)));
            }
            let memories = parts.try_iter()?.map(|p| memory(&p?)).collect::<PyResult<_>>()?;
            let owner: Box<dyn Any + Send + Sync> = Box::new(Owner::new(parts.clone().unbind()));
            Ok(Some(Rendered::Body { parts: memories, owner }))
        })
        .unwrap_or_else(|| Err(pyo3::exceptions::PyRuntimeError::new_err("the source is exiting")))
        .map_err(|e: PyErr| e.to_string())
    }
}
