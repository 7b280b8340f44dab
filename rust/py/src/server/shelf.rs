//! `Shelf`: a further store of a server.

use std::sync::{Arc, Mutex, PoisonError};

use pyo3::prelude::*;
use tensorferry_core::{Shelf, Withdrawn};

use super::publishing::{Published, publish};
use super::readiness::PyReadiness;
use crate::errors;
use crate::memory::PyFilePages;
use crate::report::seconds;
use crate::rows::PyTable;
use crate::runtime::Process;
use tensorferry_core::Locked;

/// A further store of a server, with a URL of its own. Every method but `close` raises `InvalidArgument` once it was
/// closed, and `ForkedProcess` in a forked child.
#[pyclass(name = "Shelf", module = "tensorferry._native", frozen)]
pub(crate) struct PyShelf {
    process: Process,
    // None once it was closed.
    inner: Mutex<Option<Arc<Shelf>>>,
}

impl PyShelf {
    pub(super) fn new(shelf: Shelf) -> Self {
        Self { process: Process::current(), inner: Mutex::new(Some(Arc::new(shelf))) }
    }

    fn shelf(&self, py: Python<'_>) -> PyResult<Arc<Shelf>> {
        self.process.check(py)?;
        let inner = self.inner.locked().clone();
        inner.ok_or_else(|| errors::invalid(py, "this shelf is closed"))
    }

    fn take(&self) -> Option<Arc<Shelf>> {
        self.inner.locked().take()
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
        rows: &Bound<'_, PyTable>,
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

    /// Takes no new receives of what lies here; those that have begun finish from a private copy. Borrowed memory is
    /// withdrawn as by `Server.withdraw`, and the number of readers that were cut off is returned, but no signal ends
    /// the wait.
    ///
    /// # Errors
    /// `InvalidArgument` for a `patience` that is no length of time: nothing is withdrawn then.
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

    /// Ends all transfers of what lies here, and releases it; while another thread is in a method, not before that is
    /// over. Does nothing the second time, and in a forked child.
    fn close(&self, py: Python<'_>) {
        if self.process.check(py).is_ok() {
            let inner = self.take();
            py.detach(|| drop(inner));
        }
    }
}

impl Drop for PyShelf {
    fn drop(&mut self) {
        // Without the lock: in a forked child another thread of the parent may hold it.
        let inner = self.inner.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if self.process.is_current() {
            // As for a server.
            Python::attach(|py| py.detach(|| drop(inner)));
        } else {
            std::mem::forget(inner);
        }
    }
}
