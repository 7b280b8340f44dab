//! Where a container is: at a path, or with a Python object that reads ranges of its bytes, such as those of an object in
//! a store.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use pyo3::intern;
use pyo3::prelude::*;
use tensorferry_core::{Cancel, Container, Error, Ranges};

use crate::memory::kept;
use crate::runtime::{self, OnTick};
use tensorferry_core::Locked;

/// Where a container is.
#[derive(Clone)]
pub(crate) enum Place {
    Path(PathBuf),
    Ranges(PyRanges),
}

impl Place {
    /// What `place` is: a path, or an object whose `_ranges()` returns the name of what it reads, its length, and an
    /// object with `cancel()` and with `get(at, nbytes)`, which returns those bytes in buffers that nobody changes.
    ///
    /// # Errors
    /// Whatever `_ranges()` raises, and `TypeError` for anything else.
    pub(crate) fn of(place: &Bound<'_, PyAny>) -> PyResult<Self> {
        let py = place.py();
        let Some(open) = place.getattr_opt(intern!(py, "_ranges"))? else { return Ok(Self::Path(place.extract()?)) };
        let (name, len, reader): (String, u64, Py<PyAny>) = open.call0()?.extract()?;
        let shared =
            Arc::new(Reader { object: reader, failure: Mutex::default(), is_cancelled: AtomicBool::new(false) });
        Ok(Self::Ranges(PyRanges { name: name.into(), len, shared }))
    }

    /// What messages call it.
    pub(crate) fn name(&self) -> &Path {
        match self {
            Self::Path(path) => path,
            Self::Ranges(ranges) => &ranges.name,
        }
    }

    /// Opens the container; without checksums it is opened, too. Called without the interpreter, in [`Self::run`].
    ///
    /// # Errors
    /// As [`Container::open_any`].
    pub(crate) fn open(&self) -> Result<Container, Error> {
        match self {
            Self::Path(path) => Container::open_any(path),
            Self::Ranges(ranges) => Container::open_ranges(&ranges.name, Box::new(ranges.clone())),
        }
    }

    /// Runs `work`, which reads the container, as [`runtime::run`] does. What the reader has raised is raised.
    ///
    /// # Errors
    /// As [`runtime::run`], and whatever the reader raises.
    pub(crate) fn run<T: Send>(
        &self,
        py: Python<'_>,
        cancel: &Cancel,
        watch: Option<&OnTick<'_>>,
        work: impl FnOnce() -> Result<T, Error> + Send,
    ) -> PyResult<T> {
        let Self::Ranges(ranges) = self else { return runtime::run(py, cancel, watch, work) };
        let end = || {
            cancel.cancel();
            ranges.shared.cancel();
        };
        let done = runtime::run_until(py, end, watch, work);
        let raised = ranges.shared.failure.locked().take();
        match raised {
            Some(raised) if done.is_err() && !cancel.is_cancelled() => Err(raised),
            _ => done,
        }
    }
}

/// Bytes that a Python object reads.
#[derive(Clone)]
pub(crate) struct PyRanges {
    name: PathBuf,
    len: u64,
    shared: Arc<Reader>,
}

struct Reader {
    object: Py<PyAny>,
    /// The first exception of a read.
    failure: Mutex<Option<PyErr>>,
    is_cancelled: AtomicBool,
}

impl Reader {
    /// Ends all reads.
    fn cancel(&self) {
        if self.is_cancelled.swap(true, Ordering::SeqCst) {
            return;
        }
        Python::try_attach(|py| {
            if let Err(e) = self.object.call_method0(py, intern!(py, "cancel")) {
                e.write_unraisable(py, None);
            }
        });
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        Python::try_attach(|py| {
            let none = py.None();
            std::mem::replace(&mut self.object, none).drop_ref(py);
        });
    }
}

impl std::fmt::Debug for PyRanges {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PyRanges").field("name", &self.name).field("len", &self.len).finish_non_exhaustive()
    }
}

impl Ranges for PyRanges {
    fn len(&self) -> u64 {
        self.len
    }

    fn get(&self, at: u64, len: usize) -> Result<Bytes, Error> {
        let done = Python::try_attach(|py| {
            let got = self.shared.object.bind(py).call_method1(intern!(py, "get"), (at, len));
            got.and_then(|bytes| kept(bytes.extract()?))
                .map_err(|e| self.shared.failure.locked().get_or_insert(e).to_string())
        });
        match done {
            Some(Ok(bytes)) => Ok(bytes),
            Some(Err(why)) => {
                self.shared.cancel();
                Err(std::io::Error::other(why).into())
            }
            None => Err(std::io::Error::other("the interpreter ends").into()),
        }
    }
}
