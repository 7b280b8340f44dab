//! `StagedFetch`: a receive of which some entries pass through memory that Python gives, wave by wave.
//!
//! It is what a receive onto a device uses: Python copies one wave from pinned memory while the next one arrives.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use pyo3::prelude::*;
use tensorferry_core::{Cancel, Error, StagedFetch, StagedRun, StoredWaves};
use tensorferry_wire::container::Header;

use crate::errors;
use crate::fetch::place::Place;
use crate::fetch::progress::{ProgressReporter, run_reporting};
use crate::fetch::remote::handed_over;
use crate::fetch::stored::read;
use crate::memory::{PyArena, fetch_wave};
use crate::report::PyReport;
use crate::runtime::Process;
use tensorferry_core::Locked;

/// The waves of a receive, or of a read of a container from a file or from memory.
pub(crate) enum WavesOf {
    Remote(Box<StagedFetch>),
    Stored(Box<StoredWaves>),
}

impl WavesOf {
    /// Ends the receive after its last wave; returns what Python gets of it.
    fn finish(self, header: &Arc<Header>) -> Result<(PyArena, PyReport), Error> {
        match self {
            Self::Remote(waves) => Ok(handed_over(waves.finish()?, header)),
            Self::Stored(waves) => Ok(read(waves.finish()?, header, Duration::ZERO)),
        }
    }
}

/// A receive through a buffer, wave by wave. After an exception it is over.
#[pyclass(name = "StagedFetch", module = "tensorferry._native", frozen)]
pub(crate) struct PyStagedFetch {
    process: Process,
    /// Where the container is, if it is read at a place.
    place: Option<Place>,
    cancel: Cancel,
    reporter: ProgressReporter,
    header: Arc<Header>,
    waves: Mutex<Option<WavesOf>>,
}

/// Entry, first byte, bytes, and where they lie in the memory of the wave.
type Run = (usize, u64, u64, u64);

impl PyStagedFetch {
    pub(crate) fn new(
        place: Option<Place>,
        cancel: Cancel,
        reporter: ProgressReporter,
        header: Arc<Header>,
        waves: WavesOf,
    ) -> Self {
        Self { process: Process::current(), place, cancel, reporter, header, waves: Mutex::new(Some(waves)) }
    }

    /// The receive, which the caller puts back unless it fails.
    ///
    /// # Errors
    /// `InvalidArgument` when there is none any more, `ForkedProcess` in a forked child.
    fn take(&self, py: Python<'_>) -> PyResult<WavesOf> {
        self.process.check(py)?;
        self.waves.locked().take().ok_or_else(|| errors::invalid(py, "this receive is over"))
    }
}

#[pymethods]
impl PyStagedFetch {
    /// Brings the next wave to `address`: `(entry, first byte, bytes, offset from the address)` for each run of an
    /// entry's bytes that is there now, verified. `None` when everything has come. A run may come again in a later
    /// wave, if the source has changed it. The caller holds the `most` bytes at `address`, which nobody else uses,
    /// until this returns.
    ///
    /// # Errors
    /// The engine's errors as exceptions, `InvalidArgument` when the receive is over, `ForkedProcess` in a forked
    /// child, and whatever `progress`, the reader of a place or a signal handler raises; the receive is over then.
    fn fetch(&self, py: Python<'_>, address: usize) -> PyResult<Option<Vec<Run>>> {
        let mut waves = self.take(py)?;
        let (waves, parts) = run_reporting(py, self.place.as_ref(), &self.cancel, &self.reporter, move || {
            let parts = fetch_wave(&mut waves, address)?;
            Ok((waves, parts))
        })?;
        *self.waves.locked() = Some(waves);
        let fields = |part: StagedRun| (part.entry, part.start, part.len, part.at);
        Ok(parts.map(|parts| parts.into_iter().map(fields).collect()))
    }

    /// After the last wave: the arena and the report that `fetch` would have returned. Of a `Stored`, the report has no
    /// time of fetching. The receive is over, after an exception, too.
    ///
    /// # Errors
    /// `InvalidArgument` when there are waves that were not fetched, or the receive is over; `ForkedProcess` in a
    /// forked child; whatever `progress` raises.
    fn finish(&self, py: Python<'_>) -> PyResult<(PyArena, PyReport)> {
        let finished = self.take(py)?.finish(&self.header).map_err(|e| errors::to_py(py, &e))?;
        self.reporter.report(py)?;
        Ok(finished)
    }
}
