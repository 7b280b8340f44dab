//! How a receive went, as a dict for Python and back again; and lengths of time.

use std::net::IpAddr;
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::PyDict;
use tensorferry_core::Report;

use crate::errors;

/// A length of time that Python gave in seconds.
///
/// # Errors
/// `InvalidArgument` for a negative number, one that is not finite, or one that is too large.
pub(crate) fn seconds(py: Python<'_>, seconds: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(seconds)
        .map_err(|_| errors::invalid(py, format!("{seconds} is no length of time in seconds")))
}

/// `report` as a dict, times in seconds and addresses as text.
pub(crate) fn tell(py: Python<'_>, report: Report) -> PyResult<Bound<'_, PyDict>> {
    let told = PyDict::new(py);
    told.set_item("bytes", report.bytes)?;
    told.set_item("wanted", report.wanted)?;
    told.set_item("lanes", report.lanes)?;
    told.set_item("retries", report.retries)?;
    told.set_item("same_host", report.same_host)?;
    let text = |(here, there): (IpAddr, IpAddr)| (here.to_string(), there.to_string());
    told.set_item("routes", report.routes.into_iter().map(text).collect::<Vec<_>>())?;
    told.set_item("troubles", report.troubles)?;
    told.set_item("opening_seconds", report.opening.as_secs_f64())?;
    told.set_item("fetching_seconds", report.fetching.as_secs_f64())?;
    Ok(told)
}

/// The report that [`tell`] made a dict of, as far as a server counts it.
///
/// # Errors
/// `InvalidArgument` for a dict without one of the fields.
pub(crate) fn read(py: Python<'_>, told: &Bound<'_, PyDict>) -> PyResult<Report> {
    let missing = |name: &str| errors::invalid(py, format!("the report has no {name}"));
    let get = |name: &str| told.get_item(name)?.ok_or_else(|| missing(name));
    let routes: Vec<(String, String)> = get("routes")?.extract()?;
    Ok(Report {
        bytes: get("bytes")?.extract()?,
        lanes: get("lanes")?.extract()?,
        retries: get("retries")?.extract()?,
        same_host: get("same_host")?.extract()?,
        opening: seconds(py, get("opening_seconds")?.extract()?)?,
        fetching: seconds(py, get("fetching_seconds")?.extract()?)?,
        routes: routes.iter().filter_map(|(here, there)| Some((here.parse().ok()?, there.parse().ok()?))).collect(),
        ..Report::default()
    })
}
