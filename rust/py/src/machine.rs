//! How much memory this process can have.

use pyo3::prelude::*;

use crate::errors;

/// Checks that this process can have `nbytes` bytes of memory, swap included; `what` names their purpose in the message.
///
/// # Errors
/// `SystemRefused` where the machine, a control group or the limit of the address space has fewer.
#[pyfunction]
#[pyo3(name = "_check_machine_has")]
pub(crate) fn check_machine_has(py: Python<'_>, nbytes: u64, what: &str) -> PyResult<()> {
    tensorferry_core::check_machine_has(nbytes, what).map_err(|e| errors::to_py(py, &e))
}

/// The most bytes of memory that this process can have, without swap; `None` if the system does not say.
#[pyfunction]
#[pyo3(name = "_memory_limit")]
pub(crate) fn memory_limit() -> Option<u64> {
    tensorferry_core::memory_limit()
}

/// How many bytes of memory this process can have now; `None` if the system does not say.
#[pyfunction]
#[pyo3(name = "_available_memory")]
pub(crate) fn available_memory() -> Option<u64> {
    tensorferry_core::available_memory()
}
