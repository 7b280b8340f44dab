//! Memory: what is borrowed to be read, what is made for bytes that arrive, and the copies between the two.

mod arena;
mod machine;
mod mapping;
pub(crate) mod nontemporal;
mod pool;
mod region;

pub(crate) use self::arena::{ALIGNMENT, ArenaLayout};
pub use self::arena::{Arena, Hold};
pub use self::machine::check_machine_has;
pub(crate) use self::mapping::populate;
pub use self::pool::{Allocation, ArenaPool};
pub use self::region::Memory;
pub(crate) use self::region::Region;

/// A page of memory, and of a file.
pub(crate) const PAGE: usize = 4096;
