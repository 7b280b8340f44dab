//! `Readiness`: how much of a publication's memory is final, while it is being written.
//!
//! Python copies from a device in the background and reports each part as it lands. The engine's handle is consumed by
//! `finish` and by `Server.abandon`, so the Python object holds it in a mutex and is empty afterwards.

use std::sync::{Mutex, MutexGuard};

use pyo3::prelude::*;
use tensorferry_core::Readiness;

use crate::errors;
use tensorferry_core::Locked;

/// Producer handle of a publication that is still being written. Empty after `finish`, or when it was abandoned. If it
/// is dropped before, readers that come to bytes which are not final fail.
#[pyclass(name = "Readiness", module = "tensorferry._native", frozen)]
pub(crate) struct PyReadiness(Mutex<Option<Readiness>>);

impl PyReadiness {
    pub(crate) fn new(filling: Readiness) -> Self {
        Self(Mutex::new(Some(filling)))
    }

    fn filling(&self) -> MutexGuard<'_, Option<Readiness>> {
        self.0.locked()
    }

    /// Takes the engine's handle out, to end the publication with it.
    ///
    /// # Errors
    /// `InvalidArgument` when it was taken before.
    pub(crate) fn take(&self, py: Python<'_>) -> PyResult<Readiness> {
        self.filling().take().ok_or_else(|| errors::invalid(py, "this publication is filled, or was given up"))
    }
}

#[pymethods]
impl PyReadiness {
    /// Where each row starts in the payload, in bytes, and after the rows each control entry. Empty once it was taken.
    #[getter]
    fn starts(&self) -> Vec<u64> {
        self.filling().as_ref().map_or_else(Vec::new, |filling| filling.starts().to_vec())
    }

    /// Declares the first `nbytes` bytes of the payload final: they must not be written to any more, and a lower number
    /// later changes nothing. Returns whether the publication still exists: where it does not, nothing more needs to be
    /// copied. `False`, too, once it is empty.
    fn ready(&self, nbytes: u64) -> bool {
        self.filling().as_ref().is_some_and(|filling| {
            filling.raise(nbytes);
            filling.is_wanted()
        })
    }

    /// Declares all of the payload final.
    ///
    /// # Errors
    /// `InvalidArgument` when it was finished or abandoned before.
    fn finish(&self, py: Python<'_>) -> PyResult<()> {
        self.take(py)?.finish();
        Ok(())
    }
}
