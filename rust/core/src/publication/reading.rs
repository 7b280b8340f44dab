//! Reading a publication's memory: the one place where a lease turns addresses into slices.
//!
//! Only a [`Lease`] gives out [`LeasedSegments`], and these keep it: whoever has the bytes has the lease, so no reader
//! needs unsafe code of its own.
//!
//! Borrowed memory may be written to while it is read, and a slice of such bytes is more than Rust promises to work.
//! Reading each byte by an atomic operation would be within the rules, and would rule out `memcpy`, the kernel's own
//! copy and the vectorised checksum. Instead, readers keep to three things: they copy the bytes, checksum them or hand
//! them to the kernel; they never branch on them; and nothing relies on two reads of a byte being alike. A change in
//! the middle then makes bytes that match no checksum, which is what receivers look for.

use std::sync::Arc;

use bytes::Bytes;

use super::Lease;
use crate::memory::Region;
use crate::payload::Segments;

/// The bytes of a publication, or of a body rendered over its memory, and the lease under which they are read.
pub(crate) struct LeasedSegments {
    segments: Arc<Segments>,
    lease: Arc<Lease>,
}

/// A run of these bytes that lies in one piece of memory.
pub(crate) struct LeasedRegion<'a> {
    region: Region,
    lease: &'a Arc<Lease>,
}

/// Such a run as the owner of a `Bytes`: the lease ends when the last of them is dropped.
struct Frame {
    region: Region,
    lease: Arc<Lease>,
}

impl Lease {
    /// All of the container.
    pub(crate) fn content(self: &Arc<Self>) -> LeasedSegments {
        LeasedSegments { segments: Arc::clone(&self.publication().content), lease: Arc::clone(self) }
    }

    /// The alternate body called `name`, if it was rendered.
    pub(crate) fn rendered(self: &Arc<Self>, name: &str) -> Option<LeasedSegments> {
        let segments = self.publication().rendered.get(name)?;
        Some(LeasedSegments { segments, lease: Arc::clone(self) })
    }
}

impl LeasedSegments {
    pub(crate) fn lease(&self) -> &Arc<Lease> {
        &self.lease
    }

    pub(crate) fn len(&self) -> u64 {
        self.segments.len()
    }

    /// Calls `visit` with the regions that make up `[start, end)`, in order, until it returns false.
    pub(crate) fn visit<'a>(&'a self, start: u64, end: u64, mut visit: impl FnMut(LeasedRegion<'a>) -> bool) {
        self.segments.visit(start, end, |region| visit(LeasedRegion { region, lease: &self.lease }));
    }
}

impl<'a> LeasedRegion<'a> {
    pub(crate) fn len(&self) -> usize {
        self.region.len()
    }

    /// The bytes, which may change while they are read: see the top of this file.
    pub(crate) fn bytes(self) -> &'a [u8] {
        read(self.region, self.lease)
    }

    /// The bytes without a copy, with the lease for as long as they are used.
    pub(crate) fn into_frame(self) -> Bytes {
        Bytes::from_owner(Frame { region: self.region, lease: Arc::clone(self.lease) })
    }
}

impl AsRef<[u8]> for Frame {
    fn as_ref(&self) -> &[u8] {
        read(self.region, &self.lease)
    }
}

/// The bytes of `region`, which is of the memory that `_lease` is for.
fn read(region: Region, _lease: &Lease) -> &[u8] {
    // SAFETY: regions come here from `LeasedSegments` alone, whose segments are those of the lease's own publication.
    // The lease keeps that, and with it the owner of the memory, for as long as the slice. What readers may do with
    // bytes that change meanwhile is said at the top of this file, and they do no more.
    unsafe { region.as_slice() }
}
