//! Buffers of the engine, allocated so that a refusal of the system is an error and not the end of the process.
//!
//! A process may have little address space left (`RLIMIT_AS`), and then even a buffer of a MiB is refused. `vec![0; n]`
//! aborts there. Small values of a fixed size are still allocated in the usual way.

use std::alloc::{Layout, alloc_zeroed};

use super::check_machine_has;
use super::mapping::Mapping;
use crate::error::{Error, ErrorKind};

/// `len` zeros, of which the system gives no page of a long buffer before it is touched.
///
/// # Errors
/// [`ErrorKind::System`] when the system refuses.
pub(crate) fn zeroed(len: usize) -> Result<Vec<u8>, Error> {
    if len == 0 {
        return Ok(Vec::new());
    }
    let layout = Layout::array::<u8>(len).map_err(|_| refused(len as u64))?;
    // SAFETY: `len` is not zero.
    let start = unsafe { alloc_zeroed(layout) };
    if start.is_null() {
        return Err(refused(len as u64));
    }
    // SAFETY: allocated just now by the global allocator with the layout that a `Vec<u8>` of this capacity has, and all
    // bytes of it are zeros.
    #[allow(clippy::same_length_and_capacity, reason = "the allocation is full from the beginning")]
    let bytes = unsafe { Vec::from_raw_parts(start, len, len) };
    Ok(bytes)
}

/// As [`zeroed`], for a length that a source or a file has announced for `what`: it is compared with the memory that
/// this process can have before anything is allocated.
///
/// # Errors
/// [`ErrorKind::System`] when there is less memory, or the system refuses.
pub(crate) fn zeroed_for(len: u64, what: &str) -> Result<Vec<u8>, Error> {
    check_machine_has(len, what)?;
    zeroed(usize::try_from(len).map_err(|_| refused(len))?)
}

/// Makes room for `more` values behind those of `list`.
///
/// # Errors
/// [`ErrorKind::System`] when the system refuses.
pub(crate) fn make_room<T>(list: &mut Vec<T>, more: usize) -> Result<(), Error> {
    list.try_reserve(more).map_err(|_| refused((more as u64).saturating_mul(size_of::<T>() as u64)))
}

/// Checks that this process can have `len` bytes for `what` and has the address space for them now. They are not
/// reserved: this is for what is made of many small parts, none of which is worth a check of its own.
///
/// # Errors
/// [`ErrorKind::System`] when there is less memory, or less address space.
pub(crate) fn check_room(len: u64, what: &str) -> Result<(), Error> {
    check_machine_has(len, what)?;
    Mapping::new(len, false).map(drop).map_err(|e| {
        Error::caused(ErrorKind::System, format!("{what} needs {len} bytes, and this process has no room for them"), e)
    })
}

fn refused(len: u64) -> Error {
    Error::new(ErrorKind::System, format!("cannot allocate {len} bytes: the system refuses"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_zeros_of_their_length_or_an_error() {
        assert_eq!(zeroed(0).unwrap(), []);
        assert!(zeroed(1 << 20).unwrap().iter().all(|&byte| byte == 0));
        for len in [isize::MAX as usize, usize::MAX] {
            assert_eq!(zeroed(len).unwrap_err().kind(), ErrorKind::System);
        }
        assert!(zeroed_for(u64::MAX, "a table").unwrap_err().to_string().starts_with("a table has"));
        assert!(make_room::<u64>(&mut Vec::new(), usize::MAX).is_err());
        assert!(check_room(4096, "a list").is_ok() && check_room(1 << 60, "a list").is_err());
    }
}
