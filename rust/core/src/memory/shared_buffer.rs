//! Memory for a whole state that processes share; `shared` says what makes that safe.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::mm::{MapFlags, ProtFlags};

use super::machine::check_machine_has;
use super::shared::{SharedMapping, create, populate, sealed_len};
use crate::error::{Error, ErrorKind};

/// Memory for a whole state that other processes can map.
///
/// ```
/// use tensorferry_core::SharedBuffer;
///
/// let filled = SharedBuffer::new(1 << 20, 1)?;
/// let received = SharedBuffer::open(filled.descriptor().try_clone_to_owned().unwrap())?;
/// assert_eq!(received.len(), 1 << 20);
/// assert!(filled.is_writable() && !received.is_writable());
/// # Ok::<(), tensorferry_core::Error>(())
/// ```
#[derive(Debug)]
pub struct SharedBuffer {
    mapping: SharedMapping,
    fd: OwnedFd,
    writable: bool,
}

impl SharedBuffer {
    /// New memory of `len` bytes, at least one, zeros, which this process alone can write to. Its pages are taken from
    /// the system at once, by up to `threads` threads.
    ///
    /// # Errors
    /// [`ErrorKind::System`] if the system refuses, or has less memory than that.
    pub fn new(len: u64, threads: usize) -> Result<Self, Error> {
        check_machine_has(len, "a copy of the state")?;
        let refused = |cause| Error::caused(ErrorKind::System, format!("no {len} bytes of shared memory"), cause);
        let (mapping, fd) = create(len.max(1), MapFlags::empty()).map_err(refused)?;
        populate(&mapping, &fd, threads).map_err(refused)?;
        Ok(Self { mapping, fd, writable: true })
    }

    /// The memory behind a descriptor that another process has sent, mapped for reading. Its length is what the kernel
    /// says.
    ///
    /// # Errors
    /// [`ErrorKind::Protocol`] if it is empty or not sealed against shrinking: a read would kill this process
    /// otherwise. [`ErrorKind::System`] if the system refuses to map it.
    pub fn open(fd: OwnedFd) -> Result<Self, Error> {
        let refused = |cause| Error::caused(ErrorKind::System, "memory of another process cannot be mapped", cause);
        let wrong = || Error::new(ErrorKind::Protocol, "a descriptor is not one of memory that cannot shrink");
        // A descriptor of anything else has no seals.
        let len = sealed_len(&fd).ok().flatten().filter(|&len| len > 0).ok_or_else(wrong)?;
        let mapping = SharedMapping::new(&fd, len, ProtFlags::READ, MapFlags::empty()).map_err(refused)?;
        Ok(Self { mapping, fd, writable: false })
    }

    /// Where the memory starts in this process.
    #[must_use]
    pub fn address(&self) -> usize {
        self.mapping.start.as_ptr() as usize
    }

    /// The length of the memory in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.mapping.len
    }

    /// Never: memory has at least one byte.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Whether this process may write to it.
    #[must_use]
    pub fn is_writable(&self) -> bool {
        self.writable
    }

    /// What another process maps it by.
    #[must_use]
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
