//! Memory as buffers of Python: the pages of a file, the host memory of a tensor, and memory that processes share.

use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use tensorferry_core::{FilePages, SharedBuffer, Stored};

use crate::errors;
use crate::fetch::stored::PyStored;

/// The bytes of `buffer`, to be filled.
///
/// # Errors
/// `BufferError` if it is not in one piece, or cannot be written to.
pub(crate) fn writable(buffer: &mut PyBuffer<u8>) -> PyResult<&mut [u8]> {
    if buffer.readonly() || !buffer.is_c_contiguous() {
        return Err(PyBufferError::new_err("a writable buffer in one piece is needed"));
    }
    let (start, len) = (buffer.buf_ptr().cast::<u8>(), buffer.len_bytes());
    if len == 0 {
        return Ok(&mut []);
    }
    // SAFETY: the exporter keeps this memory where it is, writable and in one piece, for as long as `buffer` exists. That
    // nobody else uses it meanwhile is the promise of who calls `readinto`, as it is with Python's own files.
    Ok(unsafe { std::slice::from_raw_parts_mut(start, len) })
}

/// The bytes of `buffer`, which nobody changes for as long as they exist, without a copy.
///
/// # Errors
/// `BufferError` if it is not in one piece.
pub(crate) fn kept(buffer: PyBuffer<u8>) -> PyResult<Bytes> {
    if !buffer.is_c_contiguous() {
        return Err(PyBufferError::new_err("a buffer in one piece is needed"));
    }
    Ok(Bytes::from_owner(Held(Some(buffer))))
}

/// A buffer that may be dropped on any thread that may wait for the interpreter.
struct Held(Option<PyBuffer<u8>>);

impl Drop for Held {
    fn drop(&mut self) {
        Python::try_attach(|_| drop(self.0.take()));
        // The interpreter exits, and it goes with the process.
        std::mem::forget(self.0.take());
    }
}

impl AsRef<[u8]> for Held {
    fn as_ref(&self) -> &[u8] {
        let Some(buffer) = &self.0 else { return &[] };
        let (start, len) = (buffer.buf_ptr().cast::<u8>(), buffer.len_bytes());
        if len == 0 {
            return &[];
        }
        // SAFETY: the exporter keeps this memory where it is, in one piece, for as long as `buffer` exists; that nobody
        // changes it is the promise of who handed it out.
        unsafe { std::slice::from_raw_parts(start, len) }
    }
}

/// The pages of a file as a writable buffer; what is written to it reaches the file only if that is to be filled.
#[pyclass(name = "FilePages", module = "tensorferry._native", frozen)]
pub(crate) struct PyFilePages {
    pub(crate) pages: Arc<FilePages>,
    /// The container in the file, if its checksums count.
    pub(crate) stored: OnceLock<Arc<Stored>>,
}

#[pymethods]
impl PyFilePages {
    /// Maps the file at `path`.
    ///
    /// # Errors
    /// `SystemRefused` when it is not a file, is empty, or cannot be mapped.
    #[new]
    #[allow(clippy::needless_pass_by_value, reason = "what the interpreter calls takes its arguments by value")]
    fn new(py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        let pages = py.detach(|| FilePages::map(&path)).map_err(|e| errors::to_py(py, &e))?;
        Ok(Self { pages: Arc::new(pages), stored: OnceLock::new() })
    }

    /// Maps `length` bytes of the file at `path`, which has room for them, to be filled: what is written reaches the
    /// file. If somebody has shortened it, or does so meanwhile, `is_unchanged` is false, and no signal ends the process.
    ///
    /// # Errors
    /// As the constructor.
    #[staticmethod]
    #[allow(clippy::needless_pass_by_value, reason = "what the interpreter calls takes its arguments by value")]
    fn fill(py: Python<'_>, path: PathBuf, length: u64) -> PyResult<Self> {
        let pages = py.detach(|| FilePages::fill(&path, length)).map_err(|e| errors::to_py(py, &e))?;
        Ok(Self { pages: Arc::new(pages), stored: OnceLock::new() })
    }

    /// Address of the first byte.
    #[getter]
    fn address(&self) -> usize {
        self.pages.address()
    }

    /// A descriptor of the file, valid for as long as this object.
    fn fileno(&self) -> i32 {
        self.pages.descriptor().as_raw_fd()
    }

    /// Whether what was read so far is what the file had when it was mapped, as far as its length and its time tell. A
    /// file that was shortened, and one that the disk fails to read, has zeros there. Of a file that is filled: whether
    /// it has kept its length, and what was written has reached it.
    #[getter]
    fn is_unchanged(&self, py: Python<'_>) -> bool {
        py.detach(|| self.pages.is_unchanged())
    }

    /// Has the pages served with the checksums of `stored`, which was opened in the same file: what receivers got is
    /// compared with them, so that a change is noticed whatever the file's time says. Nothing changes if it has none,
    /// and from the second call on.
    fn compare_with(&self, stored: &PyStored) {
        if stored.stored.is_verified() {
            let _ = self.stored.set(Arc::clone(&stored.stored));
        }
    }

    fn __len__(&self) -> usize {
        self.pages.len()
    }

    /// # Safety
    /// Called by the interpreter, which passes a valid `view`.
    #[allow(clippy::needless_pass_by_value, reason = "what the interpreter calls takes its arguments by value")]
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let pages = &slf.get().pages;
        // SAFETY: the mapping lives as long as `slf`, of which the filled view takes a reference. Rust writes to it only
        // during a receive that Python waits for, so Python may.
        unsafe { expose(slf.as_any(), (pages.address(), pages.len()), false, view, flags) }
    }
}

/// Host memory of a tensor as a writable buffer, without numpy, which torch does not need and may not be there.
#[pyclass(name = "HostView", module = "tensorferry._native", frozen)]
pub(crate) struct PyHostView {
    address: usize,
    nbytes: usize,
    /// Keeps the memory.
    _owner: Py<PyAny>,
}

#[pymethods]
impl PyHostView {
    /// The `nbytes` bytes of host memory at `address`, which `owner` keeps where they are.
    #[new]
    fn new(owner: Py<PyAny>, address: usize, nbytes: usize) -> Self {
        Self { address, nbytes, _owner: owner }
    }

    /// # Safety
    /// Called by the interpreter, which passes a valid `view`.
    #[allow(clippy::needless_pass_by_value, reason = "what the interpreter calls takes its arguments by value")]
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let memory = slf.get();
        // SAFETY: Python's part of the contract: address and length are those of the memory of `owner`, which lives as
        // long as `slf`, of which the filled view takes a reference.
        unsafe { expose(slf.as_any(), (memory.address, memory.nbytes), false, view, flags) }
    }
}

/// Memory for a whole state that other processes can map, as a buffer. The process that made it writes, others read.
#[pyclass(name = "SharedBuffer", module = "tensorferry._native", frozen, subclass)]
pub(crate) struct PySharedBuffer(SharedBuffer);

impl PySharedBuffer {
    /// The address and the length of the memory.
    pub(crate) fn place(&self) -> (usize, usize) {
        (self.0.address(), self.0.len())
    }
}

#[pymethods]
impl PySharedBuffer {
    /// New memory of `nbytes` bytes, at least one, whose pages up to `threads` threads take from the system at once.
    ///
    /// # Errors
    /// `SystemRefused` when the machine does not have so much memory.
    #[new]
    #[pyo3(signature = (nbytes, *, threads = 1))]
    fn new(py: Python<'_>, nbytes: u64, threads: usize) -> PyResult<Self> {
        py.detach(|| SharedBuffer::new(nbytes, threads)).map(Self).map_err(|e| errors::to_py(py, &e))
    }

    /// The memory behind the descriptor `fd` of another process, to be read. The descriptor stays the caller's.
    ///
    /// # Errors
    /// `ProtocolError` unless it is one of memory that cannot shrink, `SystemRefused` when the system refuses to map
    /// it, `OSError` when it is not open, `InvalidArgument` for a negative number.
    #[staticmethod]
    fn open(py: Python<'_>, fd: i32) -> PyResult<Self> {
        if fd < 0 {
            return Err(errors::invalid(py, format!("{fd} is no descriptor")));
        }
        // SAFETY: not negative, and only duplicated: a number that is not open is refused by the system.
        let duplicate = unsafe { BorrowedFd::borrow_raw(fd) }.try_clone_to_owned();
        let fd = duplicate.map_err(PyErr::from)?;
        SharedBuffer::open(fd).map(Self).map_err(|e| errors::to_py(py, &e))
    }

    /// Address of the first byte.
    #[getter]
    fn address(&self) -> usize {
        self.0.address()
    }

    /// The descriptor by which another process maps it.
    fn fileno(&self) -> i32 {
        self.0.descriptor().as_raw_fd()
    }

    fn __len__(&self) -> usize {
        self.0.len()
    }

    /// # Safety
    /// Called by the interpreter, which passes a valid `view`.
    #[allow(clippy::needless_pass_by_value, reason = "what the interpreter calls takes its arguments by value")]
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let memory = &slf.get().0;
        // SAFETY: the mapping lives as long as `slf`, of which the filled view takes a reference, and cannot shrink.
        unsafe { expose(slf.as_any(), (memory.address(), memory.len()), !memory.is_writable(), view, flags) }
    }
}

/// Fills in `view`, which then keeps `owner`: the memory at an address and of a length, which is `fixed` if it must not be
/// written to.
///
/// # Safety
/// `view` is one that the interpreter has passed to `owner`, and the memory lives as long as `owner`.
pub(super) unsafe fn expose(
    owner: &Bound<'_, PyAny>,
    (address, nbytes): (usize, usize),
    fixed: bool,
    view: *mut ffi::Py_buffer,
    flags: c_int,
) -> PyResult<()> {
    let len = ffi::Py_ssize_t::try_from(nbytes)?;
    // SAFETY: the interpreter is held, and the caller promises the rest.
    let status =
        unsafe { ffi::PyBuffer_FillInfo(view, owner.as_ptr(), address as *mut c_void, len, c_int::from(fixed), flags) };
    if status == 0 { Ok(()) } else { Err(PyErr::fetch(owner.py())) }
}
