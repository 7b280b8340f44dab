//! Memory: what is borrowed to be read, what is made for bytes that arrive, and the copies between the two.

mod arena;
pub(crate) mod nontemporal;
mod region;

pub(crate) use self::arena::{ALIGNMENT, Places, populate};
pub use self::arena::{Arena, Hold, Made, Pool, check_machine_has};
pub(crate) use self::region::Region;
pub use self::region::{Item, Memory};
