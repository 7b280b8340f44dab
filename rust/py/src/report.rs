//! How a receive went; and lengths of time.

use std::collections::BTreeMap;
use std::time::Duration;

use pyo3::prelude::*;
use tensorferry_core::{Report, Trouble};

use crate::errors;

/// A length of time that Python gave in seconds.
///
/// # Errors
/// `InvalidArgument` for a negative number, one that is not finite, or one that is too large.
pub(crate) fn seconds(py: Python<'_>, seconds: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(seconds)
        .map_err(|_| errors::invalid(py, format!("{seconds} is no length of time in seconds")))
}

/// The engine's report of a receive; `tensorferry_core::Report` says what the fields are.
#[pyclass(name = "Report", module = "tensorferry._native", frozen)]
pub(crate) struct PyReport(pub(crate) Report);

#[pymethods]
impl PyReport {
    /// Bytes of payload received, those that had to be fetched again included.
    #[getter]
    fn bytes(&self) -> u64 {
        self.0.bytes
    }

    /// The part of `bytes` that other receivers have sent.
    #[getter]
    fn relayed(&self) -> u64 {
        self.0.relayed
    }

    /// How many other receivers have sent bytes of this receive.
    #[getter]
    fn relays(&self) -> usize {
        self.0.relays
    }

    /// Blocks from other receivers that did not match the source's digests.
    #[getter]
    fn refused(&self) -> u64 {
        self.0.refused
    }

    /// How many bytes came from each source and each other receiver, by its host and port.
    #[getter]
    fn senders(&self) -> BTreeMap<String, u64> {
        self.0.senders.clone()
    }

    /// Bytes that had a destination, where only slices were asked for.
    #[getter]
    fn wanted(&self) -> u64 {
        self.0.wanted
    }

    #[getter]
    fn lanes(&self) -> usize {
        self.0.lanes
    }

    #[getter]
    fn retries(&self) -> u64 {
        self.0.retries
    }

    #[getter]
    fn same_host(&self) -> bool {
        self.0.same_host
    }

    /// Pairs of addresses: the one here, and the source's.
    #[getter]
    fn routes(&self) -> Vec<(String, String)> {
        self.0.routes.iter().map(|(here, there)| (here.to_string(), there.to_string())).collect()
    }

    /// Bytes that came by each of `routes`; 0 where only a header did.
    #[getter]
    fn route_bytes(&self) -> Vec<u64> {
        self.0.routes.iter().map(|route| self.0.route_bytes.get(route).copied().unwrap_or(0)).collect()
    }

    /// For each source that a range was taken from, the last reason, with what can be done about it.
    #[getter]
    fn troubles(&self) -> BTreeMap<String, String> {
        let described = |trouble: &Trouble| errors::with_remedy(trouble.message.clone(), trouble.hint);
        self.0.troubles.iter().map(|(source, trouble)| (source.clone(), described(trouble))).collect()
    }

    #[getter]
    fn opening_seconds(&self) -> f64 {
        self.0.opening.as_secs_f64()
    }

    #[getter]
    fn fetching_seconds(&self) -> f64 {
        self.0.fetching.as_secs_f64()
    }

    /// The part of `fetching_seconds` that compared digests.
    #[getter]
    fn verifying_seconds(&self) -> f64 {
        self.0.verifying.as_secs_f64()
    }
}
