//! Reports to Python of how far a receive, a read or a write is.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use pyo3::prelude::*;
use tensorferry_core::{Cancel, Error};

use crate::fetch::place::Place;
use crate::runtime::{self, OnTick};

/// Reports to Python how far a receive is.
pub(crate) struct ProgressReporter {
    pub(crate) received: Arc<AtomicU64>,
    pub(crate) total: u64,
    /// Called with the bytes here and the bytes in all, now and then and at the end.
    pub(crate) progress: Option<Py<PyAny>>,
}

impl ProgressReporter {
    /// Calls `progress`, if there is one, with the bytes here and the bytes in all.
    ///
    /// # Errors
    /// The exception that `progress` raised.
    pub(crate) fn report(&self, py: Python<'_>) -> PyResult<()> {
        // Bytes that had to be fetched again must not make it more than all.
        let received = self.received.load(Ordering::Relaxed).min(self.total);
        self.progress.as_ref().map_or(Ok(()), |call| call.call1(py, (received, self.total)).map(drop))
    }
}

/// Runs `work`, which reads at `place` if there is one, as [`Place::run`] does, and has `reporter` report while it runs
/// and once it has succeeded.
///
/// # Errors
/// As [`Place::run`]. An exception of the callback ends the work, unless that had succeeded.
pub(super) fn run_reporting<T: Send>(
    py: Python<'_>,
    place: Option<&Place>,
    cancel: &Cancel,
    reporter: &ProgressReporter,
    work: impl FnOnce() -> Result<T, Error> + Send,
) -> PyResult<T> {
    let notify = |py: Python<'_>| reporter.report(py);
    let watch = reporter.progress.is_some().then_some(&notify as &OnTick<'_>);
    let done = match place {
        Some(place) => place.run(py, cancel, watch, work)?,
        None => runtime::run(py, cancel, watch, work)?,
    };
    notify(py)?;
    Ok(done)
}
