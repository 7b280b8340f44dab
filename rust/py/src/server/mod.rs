//! `Server`, `Shelf` and `Receive`: publish tensors' memory and serve it.
//!
//! A server owns sockets and uses threads of the runtime; it is dropped without the interpreter, and not at all in a
//! forked child, where there is nothing to stop.

mod frontend;
mod publishing;
pub(crate) mod readiness;
mod receive;
mod shelf;

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use tensorferry_core::{ProgramFigures, ProgramTable, Rail, Series, Server, ServerConfig, Withdrawn};

use self::frontend::PythonFrontend;
use self::publishing::{Published, publish};
use self::readiness::PyReadiness;
pub(crate) use self::receive::PyReceive;
pub(crate) use self::shelf::PyShelf;
use crate::errors;
use crate::memory::PyFilePages;
use crate::report::seconds;
use crate::rows::PyTable;
use crate::runtime::{self, Process, SIGNAL_POLL};
use crate::trust::PyCertificate;
use crate::trust::PySecret;

/// A server for one checkpoint at a time. Every method raises `ForkedProcess` in a forked child.
#[pyclass(name = "Server", module = "tensorferry._native", frozen)]
pub(crate) struct PyServer {
    process: Process,
    // Taken only by Drop.
    inner: Option<Server>,
}

impl PyServer {
    pub(crate) fn server(&self, py: Python<'_>) -> PyResult<&Server> {
        self.process.check(py)?;
        self.inner.as_ref().ok_or_else(|| errors::invalid(py, "this server is gone"))
    }
}

#[pymethods]
impl PyServer {
    /// Listens on the address `bind` and those in `also` (on all if there are none), on the first free one of `ports`
    /// (first and last of them; 0 is any), and starts to serve; the gate is closed. On one of `metrics_ports` counters
    /// and the status page alone are served, unencrypted and to everybody. `patience` seconds is how long a request
    /// waits for the gate, `max_bandwidth` the limit in bytes per second. `tls` encrypts, with `certificate` or else
    /// with one of its own. With `swarm`, receivers are told of one another, so that they send each other what is
    /// published. `rails` are the addresses that receivers may use besides the one in the URL, each with the speed of
    /// its link in Mbit/s, 0 if not known; `card` is the one by which they begin.
    ///
    /// # Errors
    /// `InvalidArgument` for an address that cannot be parsed or a `patience` that is no length of time,
    /// `SystemRefused` when the address cannot be listened on or the system gives no threads.
    #[new]
    #[pyo3(signature = (*, patience, bind = None, also = Vec::new(), ports = (0, 0), metrics_ports = None, same_host = true,
                        max_bandwidth = None, secret = None, tls = false, certificate = None,
                        swarm = false, rails = Vec::new(), card = None))]
    #[allow(clippy::too_many_arguments, clippy::needless_pass_by_value, reason = "keywords in Python")]
    fn new(
        py: Python<'_>,
        patience: f64,
        bind: Option<&str>,
        also: Vec<String>,
        ports: (u16, u16),
        metrics_ports: Option<(u16, u16)>,
        same_host: bool,
        max_bandwidth: Option<u64>,
        secret: Option<&PySecret>,
        tls: bool,
        certificate: Option<&PyCertificate>,
        swarm: bool,
        rails: Vec<(String, u32)>,
        card: Option<&str>,
    ) -> PyResult<Self> {
        let address = |text: &str| -> PyResult<IpAddr> {
            text.parse().map_err(|_| errors::invalid(py, format!("{text:?} is not an address")))
        };
        let bind = bind.map(address).transpose()?;
        let also = also.iter().map(|text| address(text)).collect::<PyResult<Vec<_>>>()?;
        let card = card.map(address).transpose()?;
        let (ports, metrics_ports) = (ports.0..=ports.1, metrics_ports.map(|(first, last)| first..=last));
        let rails = rails.iter().map(|(named, mbit)| Ok(Rail { address: address(named)?, mbit: *mbit }));
        let rails = rails.collect::<PyResult<Vec<_>>>()?;
        let patience = seconds(py, patience)?;
        let secret = secret.map(|s| s.0.clone());
        let frontend = Arc::new(PythonFrontend);
        let config = ServerConfig {
            bind,
            also,
            ports,
            metrics_ports,
            patience,
            same_host,
            max_bandwidth,
            secret,
            tls,
            identity: certificate.map(|given| given.0.clone()),
            swarm,
            rails,
            card,
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

    /// The URL of the counters on their own port, for those who reach this machine as `host`; `None` if there is no such
    /// port.
    fn metrics_url(&self, py: Python<'_>, host: &str) -> PyResult<Option<String>> {
        Ok(self.server(py)?.metrics_url(host))
    }

    /// Publishes `rows` and then `control`, name and bytes of each, as `step`, and opens the gate. What was served
    /// before is replaced: transfers that have begun go on reading it, so memory that is to change must be withdrawn
    /// first.
    ///
    /// `owner` keeps the memory of all rows alive and is released when nobody reads it any more. `private` says that
    /// nothing writes to that memory. `alternate` renders other formats: called with a name on a thread of the server,
    /// it returns a list that keeps the memory of its parts, the URL of a server that has the body, or `None`; what it
    /// raises is the text of the refusal. Unless the memory is `filled`, the producer's handle is returned. `pages` are
    /// those of files in which rows lie: once one of them has changed, receivers get no checksums.
    ///
    /// # Errors
    /// `InvalidArgument` when the rows make no valid container; nothing changes then.
    #[pyo3(signature = (step, *, rows, control, metadata, owner, private, alternate = None, filled = true,
                        pages = Vec::new()))]
    #[allow(clippy::too_many_arguments, reason = "keywords in Python")]
    fn publish(
        &self,
        py: Python<'_>,
        step: i64,
        rows: &Bound<'_, PyTable>,
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
    /// `InvalidArgument` for a name that is taken or is none, `SystemRefused` when the system gives no random numbers.
    #[pyo3(signature = (name = None))]
    fn shelf(&self, py: Python<'_>, name: Option<&str>) -> PyResult<PyShelf> {
        let made = self.server(py)?.shelf(name).map_err(|e| errors::to_py(py, &e))?;
        Ok(PyShelf::new(made))
    }

    /// Withdraws the publication of `filling`, whose memory cannot be completed, or is needed for something else;
    /// readers are cut off. When this returns, it is not read any more. It must be one of the server itself: of one on
    /// a shelf, only what is not final yet fails.
    ///
    /// # Errors
    /// `InvalidArgument` when it was finished or abandoned before.
    fn abandon(&self, py: Python<'_>, filling: &PyReadiness) -> PyResult<()> {
        let (server, filling) = (self.server(py)?, filling.take(py)?);
        py.detach(|| server.store().abandon(filling));
        Ok(())
    }

    /// Raises `ForkedProcess` in a forked child.
    fn check_process(&self, py: Python<'_>) -> PyResult<()> {
        self.server(py).map(drop)
    }

    /// Notes that a receive of this process begins; counters and status page show it.
    fn begin_receive(&self, py: Python<'_>, step: i64) -> PyResult<PyReceive> {
        Ok(PyReceive::new(self.server(py)?.begin_receive(step)))
    }

    /// Puts what the process says of itself onto counters and status page, in place of what it said before: a title,
    /// sentences, tables (heading, heads, rows of cells) and series (name, whether it counts, help, rows of labels and
    /// value).
    fn show(
        &self,
        py: Python<'_>,
        title: String,
        lines: Vec<String>,
        tables: Vec<GivenTable>,
        series: Vec<GivenSeries>,
    ) -> PyResult<()> {
        self.server(py)?.show(given(title, lines, tables, series));
        Ok(())
    }

    /// Opens the gate for what is published, which is served as `step` from now on.
    fn allow(&self, py: Python<'_>, step: i64) -> PyResult<()> {
        self.server(py)?.store().allow(step);
        Ok(())
    }

    /// Closes the gate and withdraws what is served. Readers of borrowed memory are waited for; returns how many had to
    /// be cut off, after `patience` seconds or because they took nothing for a while. A signal whose handler raises
    /// cuts them off at once. When this returns or such a handler has raised, borrowed memory is not read any more; a
    /// private copy may be, by receives that have begun.
    ///
    /// # Errors
    /// `InvalidArgument` for a `patience` that is no length of time: nothing is withdrawn then. And whatever a signal
    /// handler raises.
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

    /// The step that is, or was last, served or allowed; `None` before.
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

    /// Ends all transfers and waits for at most `patience` seconds until the port is free, which it may not be after
    /// that. A signal whose handler raises ends only the wait.
    ///
    /// # Errors
    /// `InvalidArgument` for a `patience` that is no length of time: nothing is ended then. And whatever a signal
    /// handler raises.
    fn shutdown(&self, py: Python<'_>, patience: f64) -> PyResult<()> {
        let (server, patience) = (self.server(py)?, seconds(py, patience)?);
        // Everything is ended at once; a signal ends only the wait for the port.
        py.detach(|| server.shutdown(Duration::ZERO));
        let started = Instant::now();
        let left = || patience.saturating_sub(started.elapsed());
        while !py.detach(|| server.is_down_within(left().min(SIGNAL_POLL))) {
            py.check_signals()?;
            if left().is_zero() {
                break;
            }
        }
        Ok(())
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

/// Heading, heads of columns, and the cells of each row.
type GivenTable = (String, Vec<String>, Vec<Vec<String>>);
/// Name, whether it is a counter, what it means, and the labels and the value of each row.
type GivenSeries = (String, bool, String, Vec<(Vec<(String, String)>, f64)>);

/// The figures that consist of these.
fn given(title: String, lines: Vec<String>, tables: Vec<GivenTable>, series: Vec<GivenSeries>) -> ProgramFigures {
    let tables = tables.into_iter().map(|(heading, heads, rows)| ProgramTable { heading, heads, rows });
    let series = series.into_iter().map(|(name, counts, help, rows)| Series { name, counts, help, rows });
    ProgramFigures { title, lines, tables: tables.collect(), series: series.collect() }
}
