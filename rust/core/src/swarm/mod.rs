//! The swarm: receivers of one snapshot bring each other its blocks. What is decided here is decided without sockets,
//! threads or clocks, so that a simulator drives the same code (`docs/explanation/architecture.md`).
//!
//! | module | holds |
//! |---|---|
//! | `block_map` | [`BlockMap`]: which blocks a receiver has; [`BlockSet`]: the same as another member has learned it |
//! | `given` | to whom each block was handed out, and whether it counts as on its way |
//! | `handout` | [`Handout`]: which of its own blocks a source hands out to whom, and the members |
//! | `picker` | [`Picker`]: which block a receiver fetches from which relay |
//! | `receiver` | [`Receiver`]: whether a receiver fetches from the source, asks the tracker, or waits |
//! | `relay` | [`RelayHost`]: what a server does for a receiver of its process |
//! | `hosts` | what members bring to their host, and whom they are told of |
//! | `model` | the simulator (tests) |

mod block_map;
mod given;
mod handout;
mod hosts;
#[cfg(test)]
#[allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::too_many_lines,
    reason = "blocks are few, and the model is one loop"
)]
mod model;
mod picker;
mod receiver;
mod relay;

pub(crate) use self::block_map::{BlockMap, BlockSet};
pub(crate) use self::handout::{Handout, Member};
pub(crate) use self::receiver::{FromSource, Receiver};
pub use self::relay::{RelayHost, Relayed, Relaying};
