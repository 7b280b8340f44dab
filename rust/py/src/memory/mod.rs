//! All unsafe code of the binding: memory that Python owns and Rust reads or fills, and the other way round.
//!
//! Four contracts meet here, and each `SAFETY` comment says which one it relies on:
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

mod arena;
mod buffers;
mod dlpack;
mod exchange;
mod getter;
mod owner;

use std::sync::Arc;

use pyo3::prelude::*;
use tensorferry_core::{
    Allocation, ArenaPool, Destination, EntryRef, Error, Memory, Parts, Repeat, Slice, StagedRun, Transfer, copy_all,
};
use tensorferry_wire::digest::checksum;
use tensorferry_wire::dtype::Dtype;

pub(crate) use self::arena::{PyArena, PyPart};
pub(crate) use self::buffers::{PyFilePages, PyHostView, PySharedBuffer, kept, writable};
pub(crate) use self::exchange::{Described, Exchange};
pub(crate) use self::getter::Getter;
pub(crate) use self::owner::Owner;
use crate::fetch::staged::WavesOf;

/// How many tensors are made or read before other threads of the interpreter have a turn: the training loop of a
/// healthy peer is among them.
pub(crate) const YIELD_INTERVAL: usize = 1024;

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

/// CRC-64/NVME of `nbytes` bytes at `address`, which the caller holds and nobody writes to; other threads of the
/// interpreter run meanwhile.
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
    // entry's, no memory occurs twice, and the caller holds the tensors for the length of the call, or until the last
    // wave has come.
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
    entry: EntryRef,
    kind: (Dtype, u64),
    part: (u64, u64),
    address: usize,
    repeats: Vec<Repeat>,
) -> Slice {
    // SAFETY: Python's part of the contract: all runs lie in tensors that the caller holds for the length of the call,
    // and no two slices write to the same memory.
    unsafe { Slice::new(entry, kind, part, address, repeats) }
}

/// Copies the next bytes of `parts` to `address`, in memory of `nbytes` bytes; says how many there were.
///
/// # Errors
/// As [`Parts::fill`].
pub(crate) fn fill_part(parts: &mut Parts, address: usize, nbytes: usize) -> Result<usize, Error> {
    if nbytes == 0 {
        return Ok(0);
    }
    // SAFETY: Python's part of the contract: address and length are those of a buffer that the caller holds for the
    // length of the call and that nobody else uses, and the caller holds the memory of the rows.
    unsafe { parts.fill(std::slice::from_raw_parts_mut(address as *mut u8, nbytes)) }
}

/// The kernel's id of the calling thread.
pub(crate) fn thread_id() -> u32 {
    // SAFETY: takes no argument and cannot fail.
    unsafe { libc::gettid() }.cast_unsigned()
}
