//! Borrowed memory: addresses whose owner promises to keep them readable.
//!
//! [`Memory`] is what callers hand in; [`Region`] is what the engine passes around afterwards, a plain address and
//! length. A region carries no lifetime. These promises replace it:
//!
//! * the caller of [`Memory::borrowed`] keeps it readable until the owner given to the publication is dropped;
//! * the publication drops that owner only when the last lease on it is gone (see `publication::lease`);
//! * a reader through [`Region::as_slice`] holds such a lease (`publication::reading`), or runs inside
//!   [`crate::FileWriting`] or [`crate::Parts`], whose caller holds the memory, or inside [`crate::Stored`], which
//!   holds its owner.
//!
//! The bytes may change while they are read, if they are a trainer's. Readers copy or checksum them and never branch on
//! them; a change in the middle shows as a checksum that does not match.

use bytes::Bytes;

/// A readable region of memory: an address and a length in bytes.
///
/// A region says nothing about lifetime. The builder of a [`crate::Publication`] hands over an owner that
/// keeps it readable until the publication is gone or withdrawn.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Region {
    ptr: *const u8,
    len: usize,
}

// SAFETY: a region is an address; reading through it is `as_slice`, whose contract covers every thread.
unsafe impl Send for Region {}
// SAFETY: as above, no interior mutability.
unsafe impl Sync for Region {}

impl Region {
    pub(crate) fn len(self) -> usize {
        self.len
    }

    /// A part of this region.
    ///
    /// # Panics
    /// Unless `start <= end <= len`.
    pub(crate) fn slice(self, start: usize, end: usize) -> Self {
        assert!(start <= end && end <= self.len, "slice {start}..{end} of a region of {} bytes", self.len);
        Self { ptr: self.ptr.wrapping_add(start), len: end - start }
    }

    /// This region, if its byte `at` were at `address`.
    pub(crate) fn placed(self, at: usize, address: usize) -> Self {
        Self { ptr: (address as *const u8).wrapping_sub(at), ..self }
    }

    /// The bytes of this region.
    ///
    /// # Safety
    /// The owner of the memory must keep it readable for `'a`. Another thread may write to borrowed memory meanwhile
    /// (a trainer that mutates its tensors): callers only copy the bytes out or checksum them, never branch on them.
    pub(crate) unsafe fn as_slice<'a>(self) -> &'a [u8] {
        if self.len == 0 {
            return &[];
        }
        // SAFETY: non-empty regions come from `Memory`, whose constructor demands a valid pointer and length, or were
        // placed by a caller who promises the same of the part that is read.
        unsafe { std::slice::from_raw_parts(self.ptr, self.len) }
    }
}

/// Bytes a publication serves: owned by it, or borrowed from memory its owner keeps alive.
///
/// ```
/// use bytes::Bytes;
/// use tensorferry_core::Memory;
///
/// let owned = Memory::from(Bytes::from_static(b"weights"));
/// let weights = vec![0_u8; 1024];
/// // SAFETY: `weights` outlives the publication that this becomes part of.
/// let borrowed = unsafe { Memory::borrowed(weights.as_ptr() as usize, weights.len()) };
/// # drop((owned, borrowed));
/// ```
#[derive(Clone, Debug)]
pub struct Memory {
    region: Region,
    bytes: Option<Bytes>,
}

impl Memory {
    /// Memory at `address`, `len` bytes long. Zero-length memory may have any address, null included.
    ///
    /// # Safety
    /// The memory must stay readable until the owner given to the [`crate::Publication`] or [`crate::Stored`] it
    /// becomes part of is dropped, until [`crate::write_file`] has returned, or during each [`crate::Parts::fill`] and
    /// [`crate::FileWriting::write`] that reads it.
    #[must_use]
    pub unsafe fn borrowed(address: usize, len: usize) -> Self {
        Self { region: Region { ptr: address as *const u8, len }, bytes: None }
    }

    /// Takes out the owner of memory that is not borrowed; the caller keeps it for as long as it uses the region.
    pub(crate) fn take_owned(&mut self) -> Option<Bytes> {
        self.bytes.take()
    }

    pub(crate) fn len(&self) -> usize {
        self.region.len()
    }

    pub(crate) fn region(&self) -> Region {
        self.region
    }
}

impl From<Bytes> for Memory {
    fn from(bytes: Bytes) -> Self {
        Self { region: Region { ptr: bytes.as_ptr(), len: bytes.len() }, bytes: Some(bytes) }
    }
}
