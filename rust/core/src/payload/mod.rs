//! The payload of a container: how items are laid out in it, which of its bytes go where, and in which order.

mod layout;
mod plan;
pub(crate) mod slices;

pub(crate) use self::layout::{Layout, PAGE, Segments};
pub(crate) use self::plan::{Piece, Plan, Queue, Taken};
pub use self::slices::{Repeat, Slice};
