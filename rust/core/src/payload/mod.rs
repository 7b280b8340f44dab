//! The payload of a container: how items are laid out in it, which of its bytes go where, and in which order.

mod checksums;
mod layout;
mod plan;
mod queue;
mod segments;
pub(crate) mod slices;

pub(crate) use self::checksums::{Checksums, checksum_blocks};
pub use self::layout::Item;
pub(crate) use self::layout::Layout;
pub(crate) use self::plan::{Piece, Plan};
pub(crate) use self::queue::{Queue, Taken};
pub(crate) use self::segments::Segments;
pub use self::slices::{Repeat, Slice};
