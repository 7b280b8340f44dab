//! The payload of a container: how items are laid out in it, which of its bytes go where, and in which order they come.
//!
//! | module | holds |
//! |---|---|
//! | `layout` | [`Item`]s laid out as one container, header first |
//! | `segments` | contiguous bytes that lie in several regions of memory |
//! | `destination` | where entries go: memory that was given for them, or a fresh arena |
//! | `waves` | entries that pass through a bounded buffer |
//! | `plan` | destinations for bytes of a payload, in payload order |
//! | `runs` | runs of blocks |
//! | `slices` | parts of entries and their destinations, as a reshard asks for |
//! | `checksums` | the checksums of blocks, taken while the bytes pass |
//! | `backing` | [`Backing`]: what stands behind memory that may change by itself |
//! | `small_blocks` | those of blocks of 512 bytes, many at a time |
//!
//! Publications, the client and files all build on this module; it knows neither sockets nor files.

mod backing;
mod checksums;
mod destination;
mod layout;
mod plan;
mod runs;
mod segments;
pub(crate) mod slices;
mod small_blocks;
mod waves;

pub use self::backing::Backing;
pub(crate) use self::checksums::{Checksums, checksum_blocks};
pub use self::destination::Destination;
pub(crate) use self::destination::{ReceiveMemory, is_control};
pub use self::layout::Item;
pub(crate) use self::layout::Layout;
pub(crate) use self::plan::{Extent, Plan};
pub(crate) use self::runs::{BlockRuns, blocks_of};
pub(crate) use self::segments::Segments;
pub use self::slices::{EntryRef, Repeat, Slice};
pub(crate) use self::small_blocks::copy_with_checksums;
pub use self::waves::StagedRun;
pub(crate) use self::waves::Waves;
