//! `Secret`: the secret that sources and receivers of a job share, held where Python cannot show it.

use pyo3::prelude::*;
use tensorferry_core::Secret;

use crate::errors;

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

    /// Text that is the same for everyone with the same secret and the same 16 bytes `nonce`. It is no proof.
    fn comparison(&self, nonce: [u8; 16]) -> String {
        self.0.comparison(&nonce)
    }
}
