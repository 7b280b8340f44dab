//! The receiving side: open a source, learn what it has, fetch it over several lanes into its final place, verify it.

mod answers;
mod blocks;
mod connection;
mod fetch_slices;
#[cfg(fuzzing)]
pub mod fuzzing;
mod lane;
mod ledger;
mod limits;
mod remote;
mod resolver;
mod source;
mod staged;
mod stragglers;
mod url;

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

pub use self::fetch_slices::{SliceRequest, fetch_slices};
pub use self::remote::Remote;
pub use self::resolver::resolve;
use self::source::Source;
pub use self::staged::{StagedFetch, StagedRun};
use crate::cancel::Cancel;
use crate::memory::{Arena, ArenaPool};
use crate::report::Report;
use crate::trust::Secret;

/// How a receive is limited.
#[derive(Clone, Debug)]
pub struct FetchOptions {
    /// The ONE deadline of the whole receive, from [`Remote::open`] on.
    pub timeout: Duration,
    /// No byte on a connection for this long means it is stuck, and its range goes to another lane.
    pub stall: Duration,
    /// Connections; `None` chooses by the number of cores.
    pub lanes: Option<usize>,
    /// Bytes that are asked for along with the header: a container that is no longer arrives in one answer.
    pub ahead: u64,
    /// Fetch around the network when the source runs on this machine under the same user.
    pub same_host: bool,
    /// With a secret, only who proves to know it is fetched from.
    pub secret: Option<Secret>,
    /// Where memory for what arrives comes from, and goes back to.
    pub pool: Option<Arc<ArenaPool>>,
    /// Counts the bytes of payload as they arrive, for another thread to look at.
    pub progress: Arc<AtomicU64>,
    /// Ends the transfer from another thread.
    pub cancel: Cancel,
}

impl FetchOptions {
    /// Defaults, with `timeout` for the whole receive.
    #[must_use]
    pub fn within(timeout: Duration) -> Self {
        Self {
            timeout,
            stall: (timeout / 4).min(Duration::from_secs(15)),
            lanes: None,
            ahead: 1 << 20,
            same_host: true,
            secret: None,
            pool: None,
            progress: Arc::default(),
            cancel: Cancel::new(),
        }
    }
}

/// Where the payload goes.
#[derive(Debug)]
pub enum Destination {
    /// Everything into a fresh arena.
    Fresh,
    /// Entries that have an address go there, the others into a fresh arena.
    Given(Addresses),
}

/// An address for each entry of a header, or none.
#[derive(Debug)]
pub struct Addresses(Vec<Option<usize>>);

impl Destination {
    /// Entry `i` goes to `addresses[i]`, as many bytes as the header says; entries without one into a fresh arena.
    ///
    /// # Safety
    /// Each address must be that of writable memory of the entry's length, which nobody else uses until
    /// [`Remote::fetch`] has returned. Two entries must not share memory.
    #[must_use]
    pub unsafe fn given(addresses: Vec<Option<usize>>) -> Self {
        Self::Given(Addresses(addresses))
    }

    /// Where each entry goes, `None` being the fresh arena; nothing where all of them go there.
    fn addresses(self) -> Option<Vec<Option<usize>>> {
        match self {
            Self::Fresh => None,
            Self::Given(Addresses(addresses)) => Some(addresses),
        }
    }
}

/// What has arrived and is verified.
#[derive(Debug)]
pub struct Arrived {
    arena: Arena,
    offsets: Vec<Option<u64>>,
    report: Report,
}

impl Arrived {
    /// The fresh memory; entries with an address of their own are not in it.
    #[must_use]
    pub fn arena(&self) -> &Arena {
        &self.arena
    }

    /// For each entry of the header, where it starts in the arena.
    #[must_use]
    pub fn offsets(&self) -> &[Option<u64>] {
        &self.offsets
    }

    /// How the transfer went.
    #[must_use]
    pub fn report(&self) -> &Report {
        &self.report
    }

    /// The arena and the offsets of the entries in it.
    #[must_use]
    pub fn into_parts(self) -> (Arena, Vec<Option<u64>>, Report) {
        (self.arena, self.offsets, self.report)
    }
}
