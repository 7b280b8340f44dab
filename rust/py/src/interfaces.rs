//! The addresses of this host.

use pyo3::prelude::*;

/// Name and address of each network interface that is up, loopback included.
#[pyfunction]
#[pyo3(name = "_interfaces")]
pub(crate) fn interfaces() -> PyResult<Vec<(String, String)>> {
    let found = if_addrs::get_if_addrs()?;
    Ok(found.into_iter().map(|interface| (interface.name.clone(), interface.ip().to_string())).collect())
}
