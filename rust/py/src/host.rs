//! What this host has, addresses and memory, and the dtypes of a container.
//!
//! Python's own resolver calls know no deadline; the engine's do.

use crate::errors;
use crate::report::seconds;
use crate::runtime;
use pyo3::prelude::*;
use tensorferry_core::Cancel;
use tensorferry_wire::dtype::Dtype;

/// The addresses of the host called `name`, looked up within `timeout` seconds, as text.
///
/// # Errors
/// `FetchTimeout` when no name server answers in time, `ConnectError` when the name is unknown, `SystemRefused` when
/// the system gives no thread for the lookup.
#[pyfunction]
#[pyo3(name = "_resolve", signature = (name, *, timeout))]
pub(crate) fn resolve(py: Python<'_>, name: &str, timeout: f64) -> PyResult<Vec<String>> {
    let (timeout, cancel) = (seconds(py, timeout.max(0.0))?, Cancel::new());
    let found = runtime::run(py, &cancel, None, || tensorferry_core::resolve(name, timeout, &cancel))?;
    Ok(found.iter().map(ToString::to_string).collect())
}

/// Name and address of each network interface that has one, loopback included, up or not; one with several occurs as
/// often.
///
/// # Errors
/// `OSError` when the system does not list them.
#[pyfunction]
#[pyo3(name = "_interfaces")]
pub(crate) fn interfaces() -> PyResult<Vec<(String, String)>> {
    let found = if_addrs::get_if_addrs()?;
    Ok(found.into_iter().map(|interface| (interface.name.clone(), interface.ip().to_string())).collect())
}

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

/// The name of each dtype that an entry can have, and what torch calls it, `None` if torch has none.
#[pyfunction]
#[pyo3(name = "_dtypes")]
pub(crate) fn dtypes() -> Vec<(&'static str, Option<&'static str>)> {
    Dtype::ALL.iter().map(|dtype| (dtype.name(), dtype.array_name())).collect()
}
