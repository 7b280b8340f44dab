//! `Server`: publishes tensors' memory and serves it.

use std::any::Any;
use std::time::Duration;

use bytes::Bytes;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use tensorferry_core::{
    Alternate, Error, Item, Memory, Publication, Rendered, Server, ServerConfig, Stability, Withdrawn,
};
use tensorferry_wire::dtype::Dtype;

use crate::errors;
use crate::memory::{Owner, borrowed};
use crate::runtime::{self, Origin};

/// A server for one checkpoint at a time.
#[pyclass(name = "Server", module = "tensorferry._native", frozen)]
pub(crate) struct PyServer {
    origin: Origin,
    // Taken only by Drop.
    inner: Option<Server>,
}

impl PyServer {
    fn server(&self, py: Python<'_>) -> PyResult<&Server> {
        self.origin.check(py)?;
        self.inner.as_ref().ok_or_else(|| errors::invalid(py, "this server is gone"))
    }
}

#[pymethods]
impl PyServer {
    #[new]
    #[pyo3(signature = (*, patience, bind = None, capability = true, same_host = true, max_bandwidth = None))]
    fn new(
        py: Python<'_>,
        patience: f64,
        bind: Option<&str>,
        capability: bool,
        same_host: bool,
        max_bandwidth: Option<u64>,
    ) -> PyResult<Self> {
        let bind = bind
            .map(str::parse)
            .transpose()
            .map_err(|_| errors::invalid(py, format!("bind={bind:?} is not an address and port")))?;
        let patience = seconds(py, patience)?;
        let config = ServerConfig { bind, patience, capability, same_host, max_bandwidth, ..ServerConfig::default() };
        let inner = py
            .detach(|| Server::bind(&config, &runtime::handle().map_err(tensorferry_core::Error::from)?))
            .map_err(|e| errors::to_py(py, &e))?;
        Ok(Self { origin: Origin::here(), inner: Some(inner) })
    }

    #[getter]
    fn port(&self, py: Python<'_>) -> PyResult<u16> {
        Ok(self.server(py)?.address().port())
    }

    fn url(&self, py: Python<'_>, host: &str) -> PyResult<String> {
        Ok(self.server(py)?.url(host))
    }

    /// Publishes entries given as columns. `owner` keeps all their memory alive.
    #[pyo3(signature = (step, *, names, dtypes, dtype_names, ranks, dims, addresses, sizes, control, metadata, owner,
                        private, alternate = None))]
    #[allow(clippy::too_many_arguments)]
    fn publish(
        &self,
        py: Python<'_>,
        step: i64,
        names: &[u8],
        dtypes: &[u8],
        dtype_names: Vec<String>,
        ranks: &[u8],
        dims: &[u8],
        addresses: &[u8],
        sizes: &[u8],
        control: Vec<(String, Vec<u8>)>,
        metadata: Vec<(String, String)>,
        owner: Py<PyAny>,
        private: bool,
        alternate: Option<Py<PyAny>>,
    ) -> PyResult<()> {
        let server = self.server(py)?;
        let stability = if private { Stability::Private } else { Stability::Borrowed };
        let owner = Box::new(Owner::new(owner));
        let alternate = alternate.map(|callable| Box::new(PyAlternate(Owner::new(callable))) as Box<dyn Alternate>);
        let columns = Columns { names, dtypes, dtype_names, ranks, dims, addresses, sizes };
        py.detach(|| {
            let mut items = columns.items()?;
            items.extend(control.into_iter().map(|(name, bytes)| {
                let shape = [bytes.len() as u64];
                Item::bytes(name, Dtype::U8, &shape, Bytes::from(bytes))
            }));
            let mut publication = Publication::new(metadata, items, stability, owner)?;
            if let Some(alternate) = alternate {
                publication = publication.with_alternate(alternate);
            }
            server.store().publish(step, publication);
            Ok(())
        })
        .map_err(|e: Error| errors::to_py(py, &e))
    }

    /// Raises `ForkedProcess` in a forked child.
    fn check_process(&self, py: Python<'_>) -> PyResult<()> {
        self.server(py).map(drop)
    }

    fn allow(&self, py: Python<'_>, step: i64) -> PyResult<()> {
        self.server(py)?.store().allow(step);
        Ok(())
    }

    /// Closes the gate; says how many readers had to be cut off.
    fn withdraw(&self, py: Python<'_>, patience: f64) -> PyResult<usize> {
        let (server, patience) = (self.server(py)?, seconds(py, patience)?);
        Ok(match py.detach(|| server.store().withdraw(patience)) {
            Withdrawn::Clean | Withdrawn::Drained => 0,
            Withdrawn::Cut(readers) => readers,
        })
    }

    #[getter]
    fn step(&self, py: Python<'_>) -> PyResult<Option<i64>> {
        Ok(self.server(py)?.store().step())
    }

    #[getter]
    fn allowed(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.server(py)?.store().is_allowed())
    }

    #[getter]
    fn active(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.server(py)?.store().active())
    }

    #[getter]
    fn bytes_served(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.server(py)?.bytes_served())
    }

    fn shutdown(&self, py: Python<'_>, patience: f64) -> PyResult<()> {
        let (server, patience) = (self.server(py)?, seconds(py, patience)?);
        py.detach(|| server.shutdown(patience));
        Ok(())
    }
}

impl Drop for PyServer {
    fn drop(&mut self) {
        let inner = self.inner.take();
        if self.origin.is_here() {
            // Ending transfers waits for runtime threads, which may be waiting for the interpreter.
            Python::attach(|py| py.detach(|| drop(inner)));
        } else {
            // In a forked child there is nobody to wait for.
            std::mem::forget(inner);
        }
    }
}

fn seconds(py: Python<'_>, seconds: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(seconds)
        .map_err(|_| errors::invalid(py, format!("{seconds} is no length of time in seconds")))
}

/// The rows of a publication, column by column: read without holding the interpreter, since a peer's training loop
/// would wait for as long as that takes.
struct Columns<'a> {
    /// Separated by NUL.
    names: &'a [u8],
    /// Indices into `dtype_names`.
    dtypes: &'a [u8],
    dtype_names: Vec<String>,
    /// Number of dimensions of each row.
    ranks: &'a [u8],
    /// The dimensions of all rows, one after the other.
    dims: &'a [u8],
    addresses: &'a [u8],
    sizes: &'a [u8],
}

impl Columns<'_> {
    fn items(&self) -> Result<Vec<Item>, Error> {
        let count = self.dtypes.len();
        let [dims, addresses, sizes] = [self.dims, self.addresses, self.sizes].map(|c| c.as_chunks::<8>().0);
        let total: usize = self.ranks.iter().map(|&r| usize::from(r)).sum();
        if [self.ranks.len(), addresses.len(), sizes.len()] != [count; 3] || dims.len() != total {
            return Err(Error::invalid("the columns of a publication differ in length"));
        }
        let names = std::str::from_utf8(self.names).map_err(|_| Error::invalid("a name is not UTF-8"))?;
        let dtypes: Vec<_> = self.dtype_names.iter().map(|n| Dtype::from_name(n)).collect();
        let word = |w: &[u8; 8]| u64::from_ne_bytes(*w);
        let size = |w| usize::try_from(word(w)).map_err(|_| Error::invalid("a size is beyond this machine"));
        let mut items = Vec::with_capacity(count + 2);
        let mut names = names.split('\0');
        let mut shape = Vec::new();
        let mut at = 0;
        for row in 0..count {
            let name = names.next().ok_or_else(|| Error::invalid("there are fewer names than rows"))?;
            let dtype = dtypes.get(usize::from(self.dtypes[row])).copied().flatten();
            let dtype = dtype.ok_or_else(|| Error::invalid("a container has no such dtype"))?;
            let rank = usize::from(self.ranks[row]);
            shape.clear();
            shape.extend(dims[at..at + rank].iter().map(word));
            at += rank;
            items.push(Item::new(name, dtype, &shape, borrowed(size(&addresses[row])?, size(&sizes[row])?)));
        }
        Ok(items)
    }
}

/// `bytes`, copied, or `(address, nbytes)`, borrowed.
fn memory(part: &Bound<'_, PyAny>) -> PyResult<Memory> {
    if let Ok(bytes) = part.cast::<PyBytes>() {
        return Ok(Bytes::copy_from_slice(bytes.as_bytes()).into());
    }
    let (address, nbytes) = part.extract()?;
    Ok(borrowed(address, nbytes))
}

/// A Python callable `name -> list of parts | None` as the source of alternate bodies.
struct PyAlternate(Owner);

impl Alternate for PyAlternate {
    fn render(&self, name: &str) -> Result<Option<Rendered>, String> {
        Python::try_attach(|py| {
            let Some(parts) = self.0.call(py, name)? else { return Ok(None) };
            let parts = parts.bind(py);
            let memories = parts.try_iter()?.map(|p| memory(&p?)).collect::<PyResult<_>>()?;
            let owner: Box<dyn Any + Send + Sync> = Box::new(Owner::new(parts.clone().unbind()));
            Ok(Some(Rendered { parts: memories, owner }))
        })
        .unwrap_or_else(|| Err(pyo3::exceptions::PyRuntimeError::new_err("the source is exiting")))
        .map_err(|e: PyErr| e.to_string())
    }
}
