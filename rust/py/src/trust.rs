//! `Secret` and `Certificate`: what sources and receivers prove themselves with, held where Python cannot show it.

use crate::errors;
use pyo3::prelude::*;
use tensorferry_core::{Identity, Secret};

/// A shared secret. Nothing can be read from it, and it is not shown by `repr`.
#[pyclass(name = "Secret", module = "tensorferry._native", frozen)]
pub(crate) struct PySecret(pub(crate) Secret);

#[pymethods]
impl PySecret {
    /// The secret made of the bytes `secret`.
    ///
    /// # Errors
    /// `InvalidArgument` for fewer than 16 bytes.
    #[new]
    fn new(py: Python<'_>, secret: &[u8]) -> PyResult<Self> {
        Secret::new(secret).map(Self).map_err(|e| errors::to_py(py, &e))
    }
}

/// A certificate and its key. The key cannot be read from it, and is not shown by `repr`.
#[pyclass(name = "Certificate", module = "tensorferry._native", frozen)]
pub(crate) struct PyCertificate(pub(crate) Identity);

#[pymethods]
impl PyCertificate {
    /// The certificate and the key that two files in PEM form hold.
    ///
    /// # Errors
    /// `InvalidArgument` when one of them holds none, or they do not belong together.
    #[new]
    fn new(py: Python<'_>, certificate: &[u8], key: &[u8]) -> PyResult<Self> {
        Identity::from_pem(certificate, key).map(Self).map_err(|e| errors::to_py(py, &e))
    }

    /// The fingerprint in the URLs of a server that shows this certificate.
    #[getter]
    fn fingerprint(&self) -> String {
        self.0.fingerprint()
    }
}
