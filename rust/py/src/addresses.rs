//! Addresses of this host, and of others by name.
//!
//! Python's own resolver calls know no deadline; the engine's do.

use pyo3::prelude::*;
use tensorferry_core::Cancel;

use crate::report::seconds;
use crate::runtime;

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
