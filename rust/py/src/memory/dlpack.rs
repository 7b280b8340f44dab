//! The structures of `DLPack` as C lays them out.

use std::ffi::{c_int, c_void};

use pyo3::ffi;
use tensorferry_core::Hold;

/// The table of C functions that `DLPack` defines and newer versions of torch have: one plain call describes a tensor,
/// instead of a call through the interpreter for each of its properties.
/// <https://dmlc.github.io/dlpack/latest/c_api.html>
#[repr(C)]
pub(super) struct ExchangeTable {
    pub(super) major: u32,
    pub(super) minor: u32,
    pub(super) older: *const c_void,
    pub(super) allocate: *const c_void,
    pub(super) from_object: *const c_void,
    pub(super) to_object: Option<ToObject>,
    pub(super) describe: Option<Describe>,
    pub(super) stream: *const c_void,
}

/// Fills in a description of a tensor; returns something else than 0, with an exception set, where it cannot.
pub(super) type Describe = unsafe extern "C" fn(*mut c_void, *mut DlTensor) -> c_int;
/// Makes a tensor and takes over the memory; returns something else than 0, with an exception set, where it cannot.
pub(super) type ToObject = unsafe extern "C" fn(*mut DlManaged, *mut *mut ffi::PyObject) -> c_int;

/// A tensor as `DLPack` describes it. `shape` and `strides` have `rank` numbers each, counted in elements.
#[repr(C)]
pub(super) struct DlTensor {
    pub(super) data: *mut c_void,
    pub(super) device: c_int,
    pub(super) device_number: i32,
    pub(super) rank: i32,
    pub(super) code: u8,
    pub(super) bits: u8,
    pub(super) lanes: u16,
    pub(super) shape: *const i64,
    pub(super) strides: *const i64,
    pub(super) byte_offset: u64,
}

/// Host memory, among the kinds of devices.
pub(super) const DL_CPU: c_int = 1;

/// A tensor whose memory lives until `deleter` is called.
#[repr(C)]
pub(super) struct DlManaged {
    pub(super) major: u32,
    pub(super) minor: u32,
    pub(super) context: *mut c_void,
    pub(super) deleter: unsafe extern "C" fn(*mut DlManaged),
    pub(super) flags: u64,
    pub(super) tensor: DlTensor,
    /// Behind what `DLPack` knows of: keeps the memory.
    pub(super) _hold: Hold,
}

/// Torch calls this when the last tensor over the memory is gone, on any thread, with or without the interpreter.
pub(super) unsafe extern "C" fn dlpack_deleter(managed: *mut DlManaged) {
    // SAFETY: made by `Box::into_raw` in `over`, and a deleter is called once.
    drop(unsafe { Box::from_raw(managed) });
}
