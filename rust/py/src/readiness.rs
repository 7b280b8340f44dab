//! `Readiness`: says how much of a publication's memory is final, while it is being filled.

use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;
use tensorferry_core::Readiness;

use crate::errors;

/// The end of a publication that fills its memory.
#[pyclass(name = "Filling", module = "tensorferry._native", frozen)]
pub(crate) struct PyReadiness(Mutex<Option<Readiness>>);

impl PyReadiness {
    pub(crate) fn new(filling: Readiness) -> Self {
        Self(Mutex::new(Some(filling)))
    }

    fn filling(&self) -> MutexGuard<'_, Option<Readiness>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn take(&self, py: Python<'_>) -> PyResult<Readiness> {
        self.filling().take().ok_or_else(|| errors::invalid(py, "this publication is filled, or was given up"))
    }
}

#[pymethods]
impl PyReadiness {
    /// Where each row starts in the payload, and behind the rows each control entry.
    #[getter]
    fn starts(&self) -> Vec<u64> {
        self.filling().as_ref().map_or_else(Vec::new, |filling| filling.starts().to_vec())
    }

    /// The first `nbytes` bytes of the payload are final. Returns whether anybody may still read the publication.
    fn ready(&self, nbytes: u64) -> bool {
        self.filling().as_ref().is_some_and(|filling| {
            filling.raise(nbytes);
            filling.is_wanted()
        })
    }

    /// All of it is final.
    fn finish(&self, py: Python<'_>) -> PyResult<()> {
        self.take(py)?.finish();
        Ok(())
    }
}
