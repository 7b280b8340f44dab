//! The engine of tensorferry: it publishes memory as one immutable container, serves it over HTTP/1.1 to many
//! receivers, and fetches such containers, or slices of many of them, over several lanes straight into given memory. A
//! container can be a file, too: written in parallel and committed by a rename, read by the verified slice. It knows
//! nothing of Python or tensors; `tensorferry._native` is a thin skin over it.
//!
//! # Modules
//!
//! Each module may use those to its right, and no others; a test holds this (`tests/project/test_rooms.py`).
//!
//! | module | what it does | uses |
//! |---|---|---|
//! | `server` | listens, authorises, answers | `publication`, `swarm`, `same_host`, `payload`, `trust`, `memory` |
//! | `client` | opens sources, fetches over lanes, verifies | `swarm`, `payload`, `same_host`, `trust`, `memory` |
//! | `file` | writes and reads containers in files | `payload`, `memory` |
//! | `publication` | containers over memory, their readers, the store | `swarm`, `payload`, `trust`, `memory` |
//! | `swarm` | which receiver fetches what from whom | `memory` |
//! | `same_host` | the route between processes of one machine | `memory` |
//! | `payload` | layout, plans, queues, slices, checksums | `memory` |
//! | `trust` | the shared secret, TLS, random numbers | |
//! | `memory` | borrowed regions, arenas, pools, copies | |
//!
//! Below them are `error`, `report`, `cancel`, `priority` and `fork`, which concern the whole process. Server, client
//! and file never use one another.
//!
//! # Example
//!
//! ```
//! use std::time::Duration;
//! use bytes::Bytes;
//! use tensorferry_core::{Destination, FetchOptions, Item, Publication, Remote, Server, ServerConfig, Stability};
//! use tensorferry_wire::dtype::Dtype;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let runtime = tokio::runtime::Runtime::new()?;
//! let server = Server::bind(&ServerConfig::default(), runtime.handle())?;
//! let item = Item::bytes("weights", Dtype::U8, &[4], Bytes::from_static(b"abcd"));
//! server.store().publish(7, Publication::new(Vec::new(), vec![item], Stability::Private, Box::new(()))?);
//!
//! let url = server.url("127.0.0.1");
//! let remote = Remote::open(&[url.as_str()], 7, FetchOptions::within(Duration::from_secs(10)))?;
//! let arrived = remote.fetch(Destination::Fresh)?;
//! assert_eq!(arrived.arena().bytes(0, 4), b"abcd");
//! # Ok(())
//! # }
//! ```

mod cancel;
mod client;
mod error;
mod file;
mod fork;
mod memory;
mod payload;
mod priority;
mod publication;
mod report;
mod same_host;
mod server;
mod swarm;
mod sync;
mod trust;

pub use cancel::Cancel;
#[cfg(fuzzing)]
pub use client::fuzzing;
pub use client::{Arrived, FetchOptions, Get, RailRate, Remote, SliceRequest, StagedFetch, fetch_slices, resolve};
pub use error::{Error, ErrorKind, Hint};
pub use file::{
    Container, DIRECT_FROM, FileOptions, FileReport, FileWriting, Parts, Ranges, ServedFiles, Stored, StoredWaves,
    Written, rename_new, seal_file, write_file,
};
pub use fork::without_fork;
pub use memory::{
    Allocation, Arena, ArenaPool, FilePages, Hold, Memory, SharedBuffer, Transfer, available_memory, check_machine_has,
    copy_all, memory_limit,
};
pub use payload::{Backing, Destination, EntryRef, Item, Repeat, Slice, StagedRun};
pub use priority::lower_priority;
pub use publication::{Alternate, Publication, Readiness, Rendered, Stability, Store, Withdrawn};
pub use report::{Report, Trouble};
pub use server::{Failure, Frontend, ProgramFigures, ProgramTable, Receive, Series, Server, ServerConfig, Shelf};
pub use swarm::{RelayHost, Relayed, Relaying};
pub use sync::Locked;
pub use tensorferry_wire::rails::Rail;
pub use trust::{Identity, Secret};
