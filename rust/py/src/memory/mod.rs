//! All unsafe code of the binding: memory that Python owns and Rust reads or fills, and the other way round.
//!
//! Three contracts meet here, and each `SAFETY` comment says which one it relies on:
//!
//! * **Python to Rust.** The Python package passes addresses and lengths that it read off tensors. It keeps the
//!   tensors, or their storages, alive: through the `owner` of a publication, or by holding them for the length of a
//!   call.
//! * **Rust to Python.** Tensors laid over received memory keep the region they lie in (`Hold`), and Rust does not
//!   write to it any more.
//! * **`DLPack`.** Torch's exchange table describes tensors and makes them without a call through the interpreter for
//!   each property. It is looked up at run time, and everything works without it.
//! * **Torch's own classes.** What that table lacks is asked by the C functions behind attributes and methods, which the
//!   interpreter tells by its stable interface ([`Getter`]). Where there is none, they are looked up by name.
//!
//! Objects are released where the interpreter may be waited for, never on a thread of the runtime.

use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyList, PyString, PyType};
use tensorferry_core::{
    Allocation, Arena, ArenaPool, Destination, Error, FilePages, Hold, Memory, Repeat, SharedBuffer, Slice, StagedRun,
    Stored, Transfer, copy_all,
};
use tensorferry_wire::container::{Entry, Header};
use tensorferry_wire::digest::checksum;
use tensorferry_wire::dtype::Dtype;

use crate::errors;
use crate::fetch::staged::WavesOf;
use crate::fetch::stored::PyStored;

/// Memory a transfer filled, or is going to fill. A tensor over an entry keeps the region of it that the entry lies in,
/// and this object all of them.
#[pyclass(name = "Arena", module = "tensorferry._native", frozen)]
pub(crate) struct PyArena {
    arena: Arena,
    /// Describes the entries; those of storages that were only announced have no header.
    header: Option<Arc<Header>>,
    /// Where each lies and its length in bytes, `None` if it is not here.
    places: Vec<Option<(u64, u64)>>,
}

impl PyArena {
    pub(crate) fn new(arena: Arena, header: Arc<Header>, offsets: Vec<Option<u64>>) -> Self {
        let sizes = header.entries().iter().map(Entry::nbytes);
        let places = offsets.into_iter().zip(sizes).map(|(at, nbytes)| Some((at?, nbytes))).collect();
        Self { arena, header: Some(header), places }
    }
}

#[pymethods]
impl PyArena {
    /// Memory for storages of `sizes` bytes, all zero. The system gives a page when it is first touched, so storages
    /// that a source only announced cost nothing.
    ///
    /// # Errors
    /// `SystemRefused` when the machine has less memory than all of them together.
    #[new]
    fn sparse(py: Python<'_>, sizes: Vec<u64>) -> PyResult<Self> {
        let (arena, offsets) = Arena::sparse(&sizes).map_err(|e| errors::to_py(py, &e))?;
        let places = offsets.into_iter().zip(sizes).map(Some).collect();
        Ok(Self { arena, header: None, places })
    }

    /// The memory of entry `number`, `None` if the entry is not in this arena or has no bytes.
    fn part(&self, number: usize) -> Option<PyPart> {
        let (at, nbytes) = self.places.get(number).copied().flatten()?;
        let (address, hold) = self.arena.hold(at, nbytes)?;
        Some(PyPart { address, nbytes: usize::try_from(nbytes).ok()?, _hold: hold })
    }

    /// Tensors over the plain entries, each with a storage of its own; `tensor` is torch's class.
    ///
    /// `None` stands for an entry that is not in the arena, is empty, or cannot be made without Python; the indices of
    /// those entries are returned as well. Other threads of the interpreter get a turn after every `TURN` tensors.
    fn tensors<'py>(&self, tensor: &Bound<'py, PyType>) -> PyResult<(Bound<'py, PyList>, Vec<usize>)> {
        let py = tensor.py();
        let exchange = Exchange::of(tensor);
        let (made, mut missing) = (PyList::empty(py), Vec::new());
        let entries = self.header.as_ref().map_or(&[][..], |header| header.entries());
        let plain = entries.iter().zip(&self.places).filter(|(entry, _)| entry.is_plain());
        for (count, (entry, &place)) in plain.enumerate() {
            let held = place.and_then(|(at, nbytes)| self.arena.hold(at, nbytes));
            let value = exchange.as_ref().zip(held).and_then(|(exchange, held)| exchange.over(py, held, entry));
            if value.is_none() {
                missing.push(count);
            }
            made.append(value)?;
            if count % TURN == TURN - 1 {
                py.detach(std::thread::yield_now);
            }
        }
        Ok((made, missing))
    }
}

/// The memory of one entry, as a writable buffer: `torch.frombuffer` lays tensors over it without copying.
#[pyclass(name = "ArenaPart", module = "tensorferry._native", frozen)]
pub(crate) struct PyPart {
    address: usize,
    nbytes: usize,
    _hold: Hold,
}

#[pymethods]
impl PyPart {
    /// Address of the first byte.
    #[getter]
    fn address(&self) -> usize {
        self.address
    }

    fn __len__(&self) -> usize {
        self.nbytes
    }

    /// # Safety
    /// Called by the interpreter, which passes a valid `view`.
    #[allow(clippy::needless_pass_by_value, reason = "what the interpreter calls takes its arguments by value")]
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let Self { address, nbytes, .. } = *slf.get();
        let len = ffi::Py_ssize_t::try_from(nbytes)?;
        // SAFETY: the memory lives as long as `slf`, of which the filled view takes a reference. Rust writes to it only
        // during a transfer that Python waits for, so Python may write to it.
        let status =
            unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), address as *mut std::ffi::c_void, len, 0, flags) };
        if status == 0 { Ok(()) } else { Err(PyErr::fetch(slf.py())) }
    }
}

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

    /// Maps the file at `path`, which has room for all of its bytes, to be filled: what is written reaches the file.
    /// If somebody shortens it meanwhile, `is_unchanged` turns false, and no signal ends the process.
    ///
    /// # Errors
    /// As the constructor.
    #[staticmethod]
    #[allow(clippy::needless_pass_by_value, reason = "what the interpreter calls takes its arguments by value")]
    fn fill(py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        let pages = py.detach(|| FilePages::fill(&path)).map_err(|e| errors::to_py(py, &e))?;
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

    /// Whether what was read so far is what the file had when it was mapped. A file that was shortened, and one that
    /// the disk fails to read, has zeros there.
    #[getter]
    fn is_unchanged(&self, py: Python<'_>) -> bool {
        py.detach(|| self.pages.is_unchanged())
    }

    /// Has the pages served with the checksums of `stored`, which was opened in the same file: what receivers got is
    /// compared with them, so that a change is noticed whatever the file's time says. Nothing changes if it has none.
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
        let len = ffi::Py_ssize_t::try_from(pages.len())?;
        // SAFETY: the mapping lives as long as `slf`, of which the filled view takes a reference. Rust writes to it only
        // during a receive that Python waits for, so Python may.
        let status =
            unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), pages.address() as *mut c_void, len, 0, flags) };
        if status == 0 { Ok(()) } else { Err(PyErr::fetch(slf.py())) }
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
    #[new]
    fn new(owner: Py<PyAny>, address: usize, nbytes: usize) -> Self {
        Self { address, nbytes, _owner: owner }
    }

    /// # Safety
    /// Called by the interpreter, which passes a valid `view`.
    #[allow(clippy::needless_pass_by_value, reason = "what the interpreter calls takes its arguments by value")]
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let memory = slf.get();
        let len = ffi::Py_ssize_t::try_from(memory.nbytes)?;
        // SAFETY: Python's part of the contract: address and length are those of the memory of `owner`, which lives as
        // long as `slf`, of which the filled view takes a reference.
        let status =
            unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), memory.address as *mut c_void, len, 0, flags) };
        if status == 0 { Ok(()) } else { Err(PyErr::fetch(slf.py())) }
    }
}

/// Memory for a whole state that other processes can map, as a buffer. The process that made it writes, others read.
#[pyclass(name = "SharedBuffer", module = "tensorferry._native", frozen, subclass)]
pub(crate) struct PySharedBuffer(SharedBuffer);

impl PySharedBuffer {
    /// Its address and its length.
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
    /// `ProtocolError` unless it is one of memory that cannot shrink, `SystemRefused` when the system refuses.
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
        let len = ffi::Py_ssize_t::try_from(memory.len())?;
        let (address, fixed) = (memory.address() as *mut c_void, c_int::from(!memory.is_writable()));
        // SAFETY: the mapping lives as long as `slf`, of which the filled view takes a reference, and cannot shrink.
        let status = unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), address, len, fixed, flags) };
        if status == 0 { Ok(()) } else { Err(PyErr::fetch(slf.py())) }
    }
}

/// Makes copies, `(from, to, nbytes)` each, with up to `threads` threads; other threads of the interpreter run
/// meanwhile. The caller holds all memory, and the destinations are apart.
#[pyfunction]
#[pyo3(name = "_copy_memory")]
#[allow(clippy::needless_pass_by_value, reason = "what Python calls takes values")]
pub(crate) fn copy_memory(py: Python<'_>, copies: Vec<(usize, usize, usize)>, threads: usize) {
    let transfers: Vec<_> = copies.into_iter().map(|(from, to, len)| Transfer { from, to, len }).collect();
    py.detach(|| copy(&transfers, threads));
}

/// Makes copies with up to `threads` threads. To be called without the interpreter.
pub(crate) fn copy(transfers: &[Transfer], threads: usize) {
    // SAFETY: Python's part of the contract: addresses and lengths are those of tensors and buffers that the caller
    // holds for the length of the call, and nobody else uses the destinations, which do not overlap.
    unsafe { copy_all(transfers, threads) }
}

/// CRC-64/NVME of `nbytes` bytes at `address`, which the caller holds; other threads of the interpreter run meanwhile.
#[pyfunction]
#[pyo3(name = "_checksum")]
pub(crate) fn checksum_memory(py: Python<'_>, address: usize, nbytes: usize) -> u64 {
    if nbytes == 0 {
        return checksum(&[]);
    }
    // SAFETY: Python's part of the contract: address and length are those of memory that the caller holds for the length
    // of the call, and nobody writes to it meanwhile.
    py.detach(|| checksum(unsafe { std::slice::from_raw_parts(address as *const u8, nbytes) }))
}

/// How many tensors are made or read before other threads of the interpreter have a turn: the training loop of a
/// healthy peer is among them.
pub(crate) const TURN: usize = 1024;

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

/// The table of C functions that `DLPack` defines and newer versions of torch have: one plain call describes a tensor,
/// instead of a call through the interpreter for each of its properties.
/// <https://dmlc.github.io/dlpack/latest/c_api.html>
#[repr(C)]
struct ExchangeTable {
    major: u32,
    minor: u32,
    older: *const c_void,
    allocate: *const c_void,
    from_object: *const c_void,
    to_object: Option<ToObject>,
    describe: Option<Describe>,
    stream: *const c_void,
}

/// Fills in a description of a tensor; returns something else than 0, with an exception set, where it cannot.
type Describe = unsafe extern "C" fn(*mut c_void, *mut DlTensor) -> c_int;
/// Makes a tensor and takes over the memory; returns something else than 0, with an exception set, where it cannot.
type ToObject = unsafe extern "C" fn(*mut DlManaged, *mut *mut ffi::PyObject) -> c_int;

/// A tensor as `DLPack` describes it. `shape` and `strides` have `rank` numbers each, counted in elements.
#[repr(C)]
struct DlTensor {
    data: *mut c_void,
    device: c_int,
    device_number: i32,
    rank: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

/// Host memory, among the kinds of devices.
const DL_CPU: c_int = 1;

/// A tensor whose memory lives until `deleter` is called.
#[repr(C)]
struct DlManaged {
    major: u32,
    minor: u32,
    context: *mut c_void,
    deleter: unsafe extern "C" fn(*mut DlManaged),
    flags: u64,
    tensor: DlTensor,
    /// Behind what `DLPack` knows of: keeps the memory.
    _hold: Hold,
}

/// Torch calls this when the last tensor over the memory is gone, on any thread, with or without the interpreter.
unsafe extern "C" fn dlpack_deleter(managed: *mut DlManaged) {
    // SAFETY: made by `Box::into_raw` in `over`, and a deleter is called once.
    drop(unsafe { Box::from_raw(managed) });
}

/// Torch's own [`ExchangeTable`].
pub(crate) struct Exchange {
    version: (u32, u32),
    describe: Describe,
    to_object: ToObject,
}

/// A tensor in host memory.
#[derive(Clone)]
pub(crate) struct Described {
    pub(crate) address: usize,
    /// Bytes of all its elements.
    pub(crate) nbytes: usize,
    pub(crate) itemsize: usize,
    /// `None` where elements are one byte each: `DLPack` does not distinguish all dtypes of that size that torch has.
    pub(crate) dtype: Option<Dtype>,
    /// Whether its elements lie one after the other, with the strides that its shape implies.
    pub(crate) is_dense: bool,
    dims: [u64; Self::MOST],
    steps: [u64; Self::MOST],
    rank: usize,
}

impl Described {
    /// Dimensions, at most: a tensor with more is described in Python.
    const MOST: usize = 8;

    pub(crate) fn shape(&self) -> &[u64] {
        &self.dims[..self.rank]
    }

    /// Its strides, in elements.
    pub(crate) fn strides(&self) -> &[u64] {
        &self.steps[..self.rank]
    }

    /// Bytes from the start of its first element to the end of its last one; it has at least one.
    pub(crate) fn extent(&self) -> usize {
        let steps = self.shape().iter().zip(self.strides());
        let last = steps.fold(0_u64, |sum, (dim, step)| sum.saturating_add((dim - 1).saturating_mul(*step)));
        usize::try_from(last).unwrap_or(usize::MAX).saturating_add(1).saturating_mul(self.itemsize)
    }
}

impl Exchange {
    /// The table of the class `tensor`, `None` if it has none that is understood here.
    pub(crate) fn of(tensor: &Bound<'_, PyType>) -> Option<Self> {
        let capsule = tensor.getattr(intern!(tensor.py(), "__dlpack_c_exchange_api__")).ok()?.cast_into::<PyCapsule>();
        let table = capsule.ok()?.pointer_checked(Some(c"dlpack_exchange_api")).ok()?.cast::<ExchangeTable>();
        // SAFETY: a capsule of this name points to such a table for as long as the process lives; its first two fields
        // are the same in every version, the others in every version with this major number.
        unsafe {
            let table = table.as_ptr();
            if (*table).major != 1 {
                return None;
            }
            let version = ((*table).major, (*table).minor);
            Some(Self { version, describe: (*table).describe?, to_object: (*table).to_object? })
        }
    }

    /// A tensor over `entry`, whose memory is at an address that is held, with a storage of its own that holds just its
    /// bytes. `None` if it is empty or torch refuses.
    fn over<'py>(&self, py: Python<'py>, memory: (usize, Hold), entry: &Entry) -> Option<Bound<'py, PyAny>> {
        let (address, hold) = memory;
        let (_, code, bits) = DLPACK.into_iter().find(|known| known.0 == entry.dtype)?;
        let mut shape = [0_i64; Described::MOST];
        let mut strides = [0_i64; Described::MOST];
        let rank = entry.shape.len();
        let mut elements = 1_i64;
        for i in (0..rank).rev() {
            (*strides.get_mut(i)?, shape[i]) = (elements, i64::try_from(entry.shape[i]).ok()?);
            elements = elements.checked_mul(shape[i])?;
        }
        let nbytes = usize::try_from(elements).ok()?.checked_mul(usize::from(bits / 8))?;
        if nbytes == 0 || nbytes as u64 != entry.nbytes() {
            return None;
        }
        let tensor = DlTensor {
            data: address as *mut c_void,
            device: DL_CPU,
            device_number: 0,
            rank: i32::try_from(rank).ok()?,
            code,
            bits,
            lanes: 1,
            shape: shape.as_ptr(),
            strides: strides.as_ptr(),
            byte_offset: 0,
        };
        let (major, minor) = self.version;
        let context = std::ptr::null_mut();
        let managed = DlManaged { major, minor, context, deleter: dlpack_deleter, flags: 0, tensor, _hold: hold };
        let mut object = std::ptr::null_mut();
        // SAFETY: the interpreter is held. The tensor lies inside memory that `managed` keeps and to which Rust
        // does not write any more. Torch copies shape and strides. It takes `managed` over; should it refuse, nobody
        // says whose that is then, and it is left alone.
        unsafe {
            if (self.to_object)(Box::into_raw(Box::new(managed)), &raw mut object) != 0 {
                drop(PyErr::take(py));
                return None;
            }
            Bound::from_owned_ptr_or_opt(py, object)
        }
    }

    /// Describes `value`, a tensor of the class whose table this is or of a subclass of it. `None` for what a
    /// [`Described`] cannot say, and for more than eight dimensions.
    pub(crate) fn describe(&self, value: &Bound<'_, PyAny>) -> Option<Described> {
        let mut told = DlTensor {
            data: std::ptr::null_mut(),
            device: 0,
            device_number: 0,
            rank: 0,
            code: 0,
            bits: 0,
            lanes: 0,
            shape: std::ptr::null(),
            strides: std::ptr::null(),
            byte_offset: 0,
        };
        // SAFETY: the interpreter is held, `value` is a tensor, and `told` is ours to be written.
        if unsafe { (self.describe)(value.as_ptr().cast(), &raw mut told) } != 0 {
            drop(PyErr::take(value.py()));
            return None;
        }
        let rank = usize::try_from(told.rank).ok().filter(|&r| r <= Described::MOST)?;
        if told.device != DL_CPU || told.lanes != 1 || told.byte_offset != 0 {
            return None;
        }
        let mut dims = [0; Described::MOST];
        let mut steps = [0; Described::MOST];
        let mut is_dense = true;
        let mut step = 1_i64;
        for i in (0..rank).rev() {
            // SAFETY: both are arrays of `rank` numbers inside the tensor, which nobody changes while the interpreter
            // is held here.
            let (dim, stride) = unsafe { (*told.shape.add(i), *told.strides.add(i)) };
            is_dense &= stride == step;
            (dims[i], steps[i]) = (u64::try_from(dim).ok()?, u64::try_from(stride).ok()?);
            step = step.checked_mul(dim.max(1))?;
        }
        let dtype = match told.bits {
            8 => None,
            _ => Some(DLPACK.into_iter().find(|known| (known.1, known.2) == (told.code, told.bits))?.0),
        };
        let elements = dims[..rank].iter().try_fold(1_u64, |product, &dim| product.checked_mul(dim))?;
        let itemsize = usize::from(told.bits / 8);
        let nbytes = usize::try_from(elements).ok()?.checked_mul(itemsize)?;
        Some(Described { address: told.data as usize, nbytes, itemsize, dtype, is_dense, dims, steps, rank })
    }
}

/// An attribute of some classes, or one of their methods without arguments.
///
/// It is looked up once, and its C function is then called directly. Looking it up each time, and making the object that
/// stands for a bound method, takes longer than most of these functions do.
pub(crate) struct Getter {
    /// What has it: no object of another class is passed to the function.
    classes: Vec<Py<PyType>>,
    /// What the classes have in common, from which the function is.
    found: Option<Py<PyAny>>,
    function: Option<Function>,
    otherwise: Lookup,
}

enum Function {
    /// Of a method without arguments.
    Method(ffi::PyCFunction),
    /// Of a descriptor, and this.
    Descriptor(ffi::descrgetfunc, Py<PyAny>),
}

/// What is done where there is no C function, and for objects of other classes.
enum Lookup {
    Attribute(Py<PyString>),
    Method(Py<PyString>),
    /// Call this with the object.
    Call(Py<PyAny>),
}

impl Getter {
    /// The attribute `name` of objects of `classes`.
    pub(crate) fn attribute(classes: &[&Bound<'_, PyType>], name: &Bound<'_, PyString>) -> PyResult<Self> {
        let types = name.py().import("types")?;
        let kinds = [types.getattr("GetSetDescriptorType")?, types.getattr("MemberDescriptorType")?];
        let found = in_common(classes, name);
        let descriptor = found.clone().filter(|found| kinds.iter().any(|kind| found.get_type().is(kind)));
        let function = descriptor.and_then(|descriptor| {
            // SAFETY: the slot of a class of the interpreter, which is empty or a function of this type.
            let get = unsafe {
                let slot = ffi::PyType_GetSlot(descriptor.get_type_ptr(), ffi::Py_tp_descr_get);
                std::mem::transmute::<*mut c_void, Option<ffi::descrgetfunc>>(slot)
            };
            Some(Function::Descriptor(get?, descriptor.unbind()))
        });
        Ok(Self::new(classes, found, function, Lookup::Attribute(name.clone().unbind())))
    }

    /// The method `name` of objects of `classes`; `example` is one of them.
    pub(crate) fn method(
        classes: &[&Bound<'_, PyType>],
        name: &Bound<'_, PyString>,
        example: &Bound<'_, PyAny>,
    ) -> PyResult<Self> {
        let found = in_common(classes, name);
        let function = found.as_ref().map(|found| function_of(found, example)).transpose()?.flatten();
        Ok(Self::new(classes, found, function, Lookup::Method(name.clone().unbind())))
    }

    /// `method`, which all objects have, for those of `classes`, whatever these call by its name; `example` is one.
    pub(crate) fn base_method(
        classes: &[&Bound<'_, PyType>],
        method: &Bound<'_, PyAny>,
        example: &Bound<'_, PyAny>,
    ) -> PyResult<Self> {
        Ok(Self::new(classes, None, function_of(method, example)?, Lookup::Call(method.clone().unbind())))
    }

    fn new(
        classes: &[&Bound<'_, PyType>],
        found: Option<Bound<'_, PyAny>>,
        function: Option<Function>,
        otherwise: Lookup,
    ) -> Self {
        let classes = classes.iter().map(|&class| class.clone().unbind()).collect();
        Self { classes, found: found.map(Bound::unbind), function, otherwise }
    }

    /// Whether the classes still have what was looked up: a program may give them something else under that name.
    pub(crate) fn is_current(&self, py: Python<'_>) -> bool {
        let (Lookup::Attribute(name) | Lookup::Method(name)) = &self.otherwise else { return true };
        let classes: Vec<_> = self.classes.iter().map(|class| class.bind(py)).collect();
        match (&self.found, in_common(&classes, name.bind(py))) {
            (Some(known), Some(found)) => found.is(known),
            (known, found) => known.is_none() && found.is_none(),
        }
    }

    /// What it is of `value`.
    ///
    /// # Errors
    /// Whatever it raises.
    pub(crate) fn of<'py>(&self, value: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let py = value.py();
        let class = value.get_type_ptr();
        let is_known = || self.classes.iter().any(|known| known.as_ptr() == class.cast());
        // SAFETY: the interpreter is held, and `value` is of a class that has this descriptor, or whose method this
        // function is. Both return an object that is ours, or raise.
        unsafe {
            match self.function.as_ref().filter(|_| is_known()) {
                Some(Function::Method(function)) => {
                    return Bound::from_owned_ptr_or_err(py, function(value.as_ptr(), std::ptr::null_mut()));
                }
                Some(Function::Descriptor(get, descriptor)) => {
                    let found = get(descriptor.as_ptr(), value.as_ptr(), class.cast());
                    return Bound::from_owned_ptr_or_err(py, found);
                }
                None => {}
            }
        }
        match &self.otherwise {
            Lookup::Attribute(name) => value.getattr(name.bind(py)),
            Lookup::Method(name) => value.call_method0(name.bind(py)),
            Lookup::Call(method) => method.bind(py).call1((value,)),
        }
    }

    /// Whether it is true of `value`.
    ///
    /// # Errors
    /// Whatever it raises.
    pub(crate) fn is_true_of(&self, value: &Bound<'_, PyAny>) -> PyResult<bool> {
        self.of(value)?.is_truthy()
    }
}

/// The C function of `method`, a method without arguments that `example` has; `None` if it is not written in C.
fn function_of(method: &Bound<'_, PyAny>, example: &Bound<'_, PyAny>) -> PyResult<Option<Function>> {
    let kind = method.py().import("types")?.getattr("MethodDescriptorType")?;
    if !method.get_type().is(&kind) {
        return Ok(None);
    }
    let bound = method.call_method1("__get__", (example,))?;
    // SAFETY: the interpreter is held, and only a function written in C is asked what it is made of. One without
    // arguments is called with null in their place.
    let function = unsafe {
        let is_plain = ffi::PyCFunction_Check(bound.as_ptr()) != 0
            && ffi::PyCFunction_GetFlags(bound.as_ptr()) == ffi::METH_NOARGS;
        if is_plain { ffi::PyCFunction_GetFunction(bound.as_ptr()) } else { None }
    };
    Ok(function.map(Function::Method))
}

/// The attribute `name` of `classes`, `None` unless all have the same.
fn in_common<'py>(classes: &[&Bound<'py, PyType>], name: &Bound<'py, PyString>) -> Option<Bound<'py, PyAny>> {
    let (first, others) = classes.split_first()?;
    let found = first.getattr(name).ok()?;
    others.iter().all(|class| class.getattr(name).is_ok_and(|other| other.is(&found))).then_some(found)
}

/// What `DLPack` calls a dtype: a code and a number of bits. The float8 kinds are missing: not every version of torch
/// knows them, and memory it refuses is lost.
const DLPACK: [(Dtype, u8, u8); 14] = [
    (Dtype::F32, 2, 32),
    (Dtype::BF16, 4, 16),
    (Dtype::F16, 2, 16),
    (Dtype::F64, 2, 64),
    (Dtype::I64, 0, 64),
    (Dtype::I32, 0, 32),
    (Dtype::I16, 0, 16),
    (Dtype::I8, 0, 8),
    (Dtype::U64, 1, 64),
    (Dtype::U32, 1, 32),
    (Dtype::U16, 1, 16),
    (Dtype::U8, 1, 8),
    (Dtype::Bool, 6, 8),
    (Dtype::C64, 5, 64),
];

/// Memory of a tensor, by address and size in bytes, as Python reads them off it. The tensor belongs to the owner that
/// is published with the memory.
pub(crate) fn borrowed(address: usize, nbytes: usize) -> Memory {
    // SAFETY: Python's part of the contract: every publication has an owner that holds every tensor, and is
    // withdrawn before the trainer may free or reuse the memory.
    unsafe { Memory::borrowed(address, nbytes) }
}

/// A pool of memory that `make` makes: called with a number of bytes it returns an address and what holds the memory
/// there, or `None`. Where it fails, the pool maps memory itself.
pub(crate) fn pool_with_allocator(limit: usize, make: Py<PyAny>) -> Arc<ArenaPool> {
    let make = move |nbytes: usize| {
        Python::try_attach(|py| {
            let given = make.call1(py, (nbytes,)).and_then(|g| g.extract::<Option<(usize, Py<PyAny>)>>(py));
            let (address, owner) = given.inspect_err(|e| e.clone_ref(py).write_unraisable(py, None)).ok()??;
            Some(Allocation { address, owner: Box::new(Owner::new(owner)) })
        })?
    };
    // SAFETY: Python's part of the contract: `make` returns the address of a tensor of that size, which nobody
    // else knows, and the tensor as its owner.
    unsafe { ArenaPool::with_allocator(limit, make) }
}

/// Destinations inside tensors of the receiver, by address; sizes were compared with the header in Python.
pub(crate) fn given(addresses: Vec<Option<usize>>) -> Destination {
    // SAFETY: Python's part of the contract: the addresses are those of contiguous tensors whose byte size equals the
    // entry's, no memory occurs twice, and the caller holds the tensors for the length of the call.
    unsafe { Destination::given(addresses) }
}

/// Brings a wave to `address`, in memory of as many bytes as the receive was begun with.
pub(crate) fn fetch_wave(waves: &mut WavesOf, address: usize) -> Result<Option<Vec<StagedRun>>, Error> {
    // SAFETY: Python's part of the contract: the address is that of a buffer of that size, which the caller holds for
    // the length of the call, and from which no copy is under way any more.
    unsafe {
        match waves {
            WavesOf::Remote(waves) => waves.fetch(address),
            WavesOf::Stored(waves) => waves.fetch(address),
        }
    }
}

/// A part of an entry and its destination inside a tensor of the receiver.
pub(crate) fn slice(
    entry: String,
    kind: (Dtype, u64),
    part: (u64, u64),
    address: usize,
    repeats: Vec<Repeat>,
) -> Slice {
    // SAFETY: Python's part of the contract: all runs lie in tensors that the caller holds for the length of the call,
    // and no two slices write to the same memory.
    unsafe { Slice::new(entry, kind, part, address, repeats) }
}

/// The kernel's id of the calling thread.
pub(crate) fn thread_id() -> u32 {
    // SAFETY: takes no argument and cannot fail.
    unsafe { libc::gettid() }.cast_unsigned()
}
