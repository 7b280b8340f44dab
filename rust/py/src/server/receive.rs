//! `Receive`: what a server shows of a receive of its own process.

use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;
use tensorferry_core::{Failure, Receive};

use crate::fetch::remote::PyRemote;
use crate::report::{PyReport, seconds};
use crate::runtime::Process;
use tensorferry_core::Locked;

/// A receive of this process, for the counters of its server. One that is dropped before `end` counts as failed. In a
/// forked child its methods record nothing.
#[pyclass(name = "Receive", module = "tensorferry._native", frozen)]
pub(crate) struct PyReceive {
    process: Process,
    // None once it has ended.
    inner: Mutex<Option<Receive>>,
}

impl PyReceive {
    pub(super) fn new(receive: Receive) -> Self {
        Self { process: Process::current(), inner: Mutex::new(Some(receive)) }
    }

    /// The receive, in the process it belongs to; in a forked child another thread of the parent may hold its locks.
    fn inner(&self) -> Option<MutexGuard<'_, Option<Receive>>> {
        self.process.is_current().then(|| self.inner.locked())
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
    /// Records that the source has answered: from now on it is known how much there is, and how much has arrived.
    fn opened(&self, remote: &PyRemote) {
        let (received, total) = remote.progress();
        if let Some(inner) = self.inner()
            && let Some(receive) = &*inner
        {
            receive.opened(received, total);
        }
    }

    /// Records that the receive has ended after `took` seconds in all: with `report`, as `Remote.fetch` returns it, or
    /// without one with an error of the class `failed`, which counters show as `counted_as`. Further calls do nothing.
    ///
    /// # Errors
    /// `InvalidArgument` when `took` is no length of time; the receive has not ended then.
    #[pyo3(signature = (took, report = None, failed = "", counted_as = "other"))]
    fn end(
        &self,
        py: Python<'_>,
        took: f64,
        report: Option<&PyReport>,
        failed: &str,
        counted_as: &str,
    ) -> PyResult<()> {
        let took = seconds(py, took)?;
        if let Some(receive) = self.inner().and_then(|mut inner| inner.take()) {
            receive.end(report.map(|report| &report.0).ok_or(Failure { class: failed, counted_as }), took);
        }
        Ok(())
    }
}
