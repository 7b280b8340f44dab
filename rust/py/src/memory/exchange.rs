//! Tensors by `DLPack`'s table of C functions: described, and made over received memory.

use std::ffi::c_void;

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyType};
use tensorferry_core::Hold;
use tensorferry_wire::container::Entry;
use tensorferry_wire::dtype::Dtype;

use super::dlpack::{DL_CPU, Describe, DlManaged, DlTensor, ExchangeTable, ToObject, dlpack_deleter};

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

    /// The tensor's strides, in elements.
    pub(crate) fn strides(&self) -> &[u64] {
        &self.steps[..self.rank]
    }

    /// Bytes from the start of the tensor's first element to the end of its last one; it has at least one.
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
    /// bytes. `None` if it is empty, has a dtype that is not in `DLPACK` or more than eight dimensions, or torch
    /// refuses.
    pub(super) fn over<'py>(&self, py: Python<'py>, memory: (usize, Hold), entry: &Entry) -> Option<Bound<'py, PyAny>> {
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
