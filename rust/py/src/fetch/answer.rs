//! `HttpAnswer`: the answer to one GET, for counters and for states in other formats.
//!
//! It is the only way in which the package asks a server of HTTP anything that is no container. Object stores alone are
//! asked by another client, obstore.

use std::sync::Mutex;

use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use tensorferry_core::{Cancel, Error, Get};

use crate::memory::writable;
use crate::report::seconds;
use crate::runtime::{self, Process};
use tensorferry_core::Locked;

/// An answer whose head is here and whose body is still to be read.
#[pyclass(name = "HttpAnswer", module = "tensorferry._native", frozen)]
pub(crate) struct PyAnswer {
    process: Process,
    cancel: Cancel,
    status: u16,
    reason: String,
    /// `None` once it was closed.
    answer: Mutex<Option<Get>>,
}

impl PyAnswer {
    /// Runs `read` with the answer, without the interpreter.
    ///
    /// # Errors
    /// As [`runtime::run`]; `InvalidArgument` once it was closed, `ForkedProcess` in a forked child.
    fn with<T: Send>(&self, py: Python<'_>, read: impl FnOnce(&mut Get) -> Result<T, Error> + Send) -> PyResult<T> {
        self.process.check(py)?;
        runtime::run(py, &self.cancel, None, || match &mut *self.answer.locked() {
            Some(answer) => read(answer),
            None => Err(Error::invalid("this answer was closed")),
        })
    }
}

#[pymethods]
impl PyAnswer {
    /// Asks the server at `url` for `path` below it. The answer must be there, body included, within `timeout` seconds.
    ///
    /// A URL with a fingerprint is asked nothing unless the server shows that certificate. Redirections are not followed,
    /// and proxies not used.
    ///
    /// # Errors
    /// The engine's errors as exceptions.
    #[staticmethod]
    #[pyo3(signature = (url, path, *, timeout))]
    fn open(py: Python<'_>, url: &str, path: &str, timeout: f64) -> PyResult<Self> {
        let (timeout, cancel) = (seconds(py, timeout.max(0.0))?, Cancel::new());
        let answer = runtime::run(py, &cancel, None, || Get::open(url, path, timeout, &cancel))?;
        let (status, reason) = (answer.status(), answer.reason().to_owned());
        Ok(Self { process: Process::current(), cancel, status, reason, answer: Mutex::new(Some(answer)) })
    }

    /// The status.
    #[getter]
    fn status(&self) -> u16 {
        self.status
    }

    /// The reason phrase, which may be anything.
    #[getter]
    fn reason(&self) -> &str {
        &self.reason
    }

    /// Reads at most `most` bytes of the body, fewer only at its end.
    ///
    /// # Errors
    /// The engine's errors as exceptions, `InvalidArgument` once it was closed, `ForkedProcess` in a forked child.
    fn read<'py>(&self, py: Python<'py>, most: usize) -> PyResult<Bound<'py, PyBytes>> {
        let read = self.with(py, |answer| {
            // It grows with what has come.
            let (mut body, mut piece) = (Vec::new(), vec![0; most.min(1 << 16)]);
            while body.len() < most {
                let left = piece.len().min(most - body.len());
                match answer.read(&mut piece[..left])? {
                    0 => break,
                    got => body.extend_from_slice(&piece[..got]),
                }
            }
            Ok(body)
        })?;
        Ok(PyBytes::new(py, &read))
    }

    /// Reads the next bytes of the body into `buffer`: as many as have arrived, or with `whole`, as many as it holds. Says
    /// how many; 0, or fewer with `whole`, at the end.
    ///
    /// # Errors
    /// As `read`; `BufferError` if the buffer cannot be written to or is not in one piece. After any other error some
    /// of it may be filled.
    #[allow(clippy::needless_pass_by_value, reason = "the buffer is released when this returns")]
    fn readinto(&self, py: Python<'_>, mut buffer: PyBuffer<u8>, whole: bool) -> PyResult<usize> {
        let into = writable(&mut buffer)?;
        self.with(py, |answer| {
            let mut filled = 0;
            while filled < into.len() {
                match answer.read(&mut into[filled..])? {
                    0 => break,
                    got => filled += got,
                }
                if !whole {
                    break;
                }
            }
            Ok(filled)
        })
    }

    /// Ends the connection, and a read that is under way. Does nothing in a forked child.
    fn close(&self, py: Python<'_>) {
        // In a forked child it is the parent's.
        if self.process.check(py).is_ok() {
            self.cancel.cancel();
            drop(self.answer.locked().take());
        }
    }
}
