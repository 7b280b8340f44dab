//! What keeps published memory alive, and how it is released.

use pyo3::prelude::*;
use pyo3::types::PyList;

/// How many entries of a list are released at a time.
const RELEASE_STEP: usize = 4096;

/// The object that keeps published memory alive. It may be dropped on any thread, with or without the interpreter: on a
/// thread of the runtime the release moves to a blocking thread, since the interpreter may be held for long.
pub(crate) struct Owner(Option<Py<PyAny>>);

impl Owner {
    pub(crate) fn new(object: Py<PyAny>) -> Self {
        Self(Some(object))
    }

    /// Calls the object with one argument; `None` stays `None`.
    pub(crate) fn call(&self, py: Python<'_>, argument: &str) -> PyResult<Option<Py<PyAny>>> {
        match &self.0 {
            Some(object) => Ok(Some(object.call1(py, (argument,))?).filter(|o| !o.is_none(py))),
            None => Ok(None),
        }
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        let Some(object) = self.0.take() else { return };
        // Dropping needs the interpreter, and a thread of the runtime must never wait for that.
        match tokio::runtime::Handle::try_current() {
            Ok(runtime) => drop(runtime.spawn_blocking(move || release(object))),
            Err(_) => release(object),
        }
    }
}

/// Releases `object` under the interpreter; a long list a part at a time.
fn release(object: Py<PyAny>) {
    // While the interpreter exits this does nothing, and the object goes with the process.
    Python::try_attach(|py| {
        // Hundreds of thousands of tensors at once would hold up every other thread of the interpreter.
        if let Ok(list) = object.bind(py).cast::<PyList>() {
            while list.len() > RELEASE_STEP && list.del_slice(list.len() - RELEASE_STEP, list.len()).is_ok() {
                py.detach(std::thread::yield_now);
            }
        }
        object.drop_ref(py);
    });
}
