//! Memory: what is borrowed to be read, what is allocated for bytes that arrive, and copies between the two.
//!
//! | module | holds |
//! |---|---|
//! | `region` | [`Memory`]: bytes a publication serves, owned or borrowed by address |
//! | `arena` | [`Arena`]: the memory of one receive, released region by region |
//! | `arena_layout` | where entries go in an arena |
//! | `pool` | [`ArenaPool`]: memory kept from one receive to the next |
//! | `mapping` | anonymous mappings, the only callers of `mmap` for received bytes |
//! | `fresh` | [`FreshPages`]: small or huge pages for memory that was never touched, by what they cost |
//! | `shared`, `shared_buffer` | memory that two processes map |
//! | `copies` | [`copy_all`]: many copies, made by several threads |
//! | `file_pages` | [`FilePages`]: the pages of a file, readable even when the file was shortened |
//! | `guard` | what keeps a page that cannot be read from ending the process |
//! | `machine` | how much memory this process can have, and refusal of lengths beyond that |
//! | `groups` | what its control groups allow |
//! | `room` | buffers whose refusal by the system is an error |
//! | `nontemporal` | copies that leave the cache alone |
//!
//! Most unsafe code of the engine is in this module. A caller that hands an address to it promises that the memory
//! stays readable, or writable by nobody else, for as long as the documentation of that function says.

mod arena;
mod arena_layout;
mod copies;
mod file_pages;
mod fresh;
mod groups;
mod guard;
mod machine;
mod mapping;
pub(crate) mod nontemporal;
mod pool;
mod region;
mod room;
mod shared;
mod shared_buffer;

pub use self::arena::{Arena, Hold};
pub(crate) use self::arena_layout::{ALIGNMENT, ArenaLayout};
pub use self::copies::{Transfer, copy_all};
pub use self::file_pages::FilePages;
pub(crate) use self::fresh::{FreshPages, timed};
pub use self::machine::{available_memory, check_machine_has, memory_limit};
pub(crate) use self::mapping::untouched;
pub use self::pool::{Allocation, ArenaPool};
pub use self::region::Memory;
pub(crate) use self::region::Region;
pub(crate) use self::room::{check_room, make_room, zeroed, zeroed_for};
pub(crate) use self::shared::{SharedMemory, SharedView};
pub use self::shared_buffer::SharedBuffer;

/// A page of a file, and of memory with most kernels. What depends on pages asks for [`rustix::param::page_size`].
pub(crate) const PAGE: usize = 4096;
