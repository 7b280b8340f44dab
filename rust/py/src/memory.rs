//! All unsafe code of the binding: memory that Python owns and Rust reads or fills, and the other way round.

use std::ffi::c_int;

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyList;
use tensorferry_core::{Arena, Destination, Memory};

/// Memory a transfer filled; it lives until the last tensor over it is gone.
#[pyclass(name = "Arena", module = "tensorferry._native", frozen)]
pub(crate) struct PyArena {
    arena: Arena,
}

impl PyArena {
    pub(crate) fn new(arena: Arena) -> Self {
        Self { arena }
    }
}

#[pymethods]
impl PyArena {
    /// Address of the first byte.
    #[getter]
    fn address(&self) -> usize {
        self.arena.address()
    }

    fn __len__(&self) -> usize {
        self.arena.len()
    }

    /// The arena as a writable buffer: `torch.frombuffer` lays tensors over it without copying.
    ///
    /// # Safety
    /// Called by the interpreter, which passes a valid `view`.
    #[allow(clippy::needless_pass_by_value)]
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let arena = &slf.get().arena;
        let len = ffi::Py_ssize_t::try_from(arena.len())?;
        // SAFETY: the mapping lives as long as `slf`, of which the filled view takes a reference. Rust does not touch
        // it any more: it is wrapped only after the transfer, so Python may write to it.
        let status = unsafe {
            ffi::PyBuffer_FillInfo(view, slf.as_ptr(), arena.address() as *mut std::ffi::c_void, len, 0, flags)
        };
        if status == 0 { Ok(()) } else { Err(PyErr::fetch(slf.py())) }
    }
}

/// How many entries of a list are let go of at a time.
const RELEASE_STEP: usize = 4096;

/// The object that keeps published memory alive. It may be let go of on any thread.
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

/// Memory of a tensor, by address and size in bytes, as `tensorferry.tensors` reads them off it. The tensor belongs to
/// the owner that is published with the memory.
pub(crate) fn borrowed(address: usize, nbytes: usize) -> Memory {
    // SAFETY: Python's part of the contract: `tensorferry.state` publishes an owner that holds every tensor, and
    // withdraws before the trainer may free or reuse the memory.
    unsafe { Memory::borrowed(address, nbytes) }
}

/// Destinations inside tensors of the receiver, by address; sizes were compared with the header in Python.
pub(crate) fn given(addresses: Vec<Option<usize>>) -> Destination {
    // SAFETY: Python's part of the contract: `tensorferry.state` passes addresses of contiguous tensors whose byte size
    // equals the entry's, no memory twice, and holds the tensors for the length of the call.
    unsafe { Destination::given(addresses) }
}

/// The kernel's id of the calling thread.
pub(crate) fn thread_id() -> u32 {
    // SAFETY: takes no argument and cannot fail.
    unsafe { libc::gettid() }.cast_unsigned()
}
