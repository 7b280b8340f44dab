//! `StagedFetch`: a receive of which some entries pass through memory of Python's, wave by wave.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;
use pyo3::types::PyDict;
use tensorferry_core::{Cancel, StagedFetch, StagedRun};
use tensorferry_wire::container::Header;

use crate::errors;
use crate::memory::{PyArena, fetch_wave};
use crate::remote::handed_over;
use crate::runtime::{self, OnTick, Origin};

/// A receive that brings its bytes in waves.
#[pyclass(name = "Waves", module = "tensorferry._native", frozen)]
pub(crate) struct PyStagedFetch {
    origin: Origin,
    cancel: Cancel,
    tell: ProgressReporter,
    header: Arc<Header>,
    waves: Mutex<Option<StagedFetch>>,
}

/// Entry, first byte, bytes, and where they lie in the memory of the wave.
type Run = (usize, u64, u64, u64);

/// Tells Python how far a receive is.
pub(crate) struct ProgressReporter {
    pub(crate) received: Arc<AtomicU64>,
    pub(crate) total: u64,
    /// Called with the bytes here and the bytes in all, now and then and at the end.
    pub(crate) progress: Option<Py<PyAny>>,
}

impl ProgressReporter {
    pub(crate) fn tell(&self, py: Python<'_>) -> PyResult<()> {
        // Bytes that had to be fetched again count once.
        let received = self.received.load(Ordering::Relaxed).min(self.total);
        self.progress.as_ref().map_or(Ok(()), |call| call.call1(py, (received, self.total)).map(drop))
    }
}

impl PyStagedFetch {
    pub(crate) fn new(cancel: Cancel, tell: ProgressReporter, header: Arc<Header>, waves: StagedFetch) -> Self {
        Self { origin: Origin::here(), cancel, tell, header, waves: Mutex::new(Some(waves)) }
    }

    fn waves(&self) -> MutexGuard<'_, Option<StagedFetch>> {
        self.waves.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The receive; after a failure there is none.
    fn take(&self, py: Python<'_>) -> PyResult<StagedFetch> {
        self.origin.check(py)?;
        self.waves().take().ok_or_else(|| errors::invalid(py, "this receive is over"))
    }
}

#[pymethods]
impl PyStagedFetch {
    /// Brings the next wave to `address`: `(entry, first byte, bytes, offset from the address)` for each run of an entry's
    /// bytes that is there now, verified. `None` when everything has come.
    fn fetch(&self, py: Python<'_>, address: usize) -> PyResult<Option<Vec<Run>>> {
        let mut waves = self.take(py)?;
        let tell = |py: Python<'_>| self.tell.tell(py);
        let watch = self.tell.progress.is_some().then_some(&tell as &OnTick<'_>);
        let (waves, parts) = runtime::run(py, &self.cancel, watch, move || {
            let parts = fetch_wave(&mut waves, address)?;
            Ok((waves, parts))
        })?;
        *self.waves() = Some(waves);
        let told = |part: StagedRun| (part.entry, part.start, part.len, part.at);
        Ok(parts.map(|parts| parts.into_iter().map(told).collect()))
    }

    /// After the last wave: what `Remote.fetch` returns.
    fn finish<'py>(&self, py: Python<'py>) -> PyResult<(PyArena, Bound<'py, PyDict>)> {
        let arrived = self.take(py)?.finish().map_err(|e| errors::to_py(py, &e))?;
        self.tell.tell(py)?;
        handed_over(py, arrived, &self.header)
    }
}
