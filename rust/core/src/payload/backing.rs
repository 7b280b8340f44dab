//! What stands behind memory that its owner does not write to, and that may change nevertheless: the pages of a file.

use tensorferry_wire::digest::Algorithm;

/// Tells whether memory is still what was published, and what it was.
///
/// A server asks it before it answers, and again for the checksums with which a receive ends: what a receiver has got is
/// compared with these, whatever the memory held meanwhile.
pub trait Backing: Send + Sync {
    /// Whether the memory is still what was published, as far as this can be told at little cost.
    fn is_unchanged(&self) -> bool;

    /// Notes that it is not: [`Backing::is_unchanged`] says so from then on.
    fn note_changed(&self);

    /// The checksum of `parts`, one behind the other, as they were published; `None` if that cannot be told any more,
    /// because they have changed. Of memory of which nothing was written down, it is the checksum as they are.
    fn digest(&self, algorithm: &Algorithm, parts: &[&[u8]]) -> Option<u64>;
}
