//! The receiving side: open a source, learn what it has, fetch it over several lanes into its final place, verify it.
//!
//! | module | holds |
//! |---|---|
//! | `remote` | [`Remote`]: a checkpoint at its sources, from the header to the verified payload |
//! | `fetch_slices` | parts of checkpoints from several sources at once |
//! | `staged` | [`StagedFetch`]: entries that pass through a bounded buffer |
//! | `scheduler` | which worker fetches what, from where, and what follows a failure: pure |
//! | `lane`, `range` | the workers, threads with one connection each; how one fetches a range |
//! | `ledger` | received blocks |
//! | `swarm`, `relaying` | fetching from other receivers, with the tracker of the source; serving on what has come |
//! | `source`, `url`, `targets`, `resolver` | where a source is, by which of its addresses, and how to reach it |
//! | `rails`, `routes` | its other addresses, and which of ours lead there |
//! | `get` | [`Get`]: one answer that is no container |
//! | `connection` | blocking HTTP/1.1 over TCP, TLS or shared memory |
//! | `limits` | one deadline for everything, and what counts as stuck |
//!
//! Everything here blocks and runs in threads of its own: measured faster than an asynchronous client, and it needs no
//! runtime.
//!
//! Invariants:
//!
//! * nothing is handed out as received before it matches digests of the source that are of one moment: asked for after
//!   the last byte has come, or, in a swarm, proven by the source;
//! * a receive ends at its deadline, whatever a source, a resolver or a handshake does;
//! * lengths that a source announces take no memory before bytes arrive.

mod answers;
mod blocks;
mod connection;
mod fetch_slices;
#[cfg(fuzzing)]
pub mod fuzzing;
mod get;
mod lane;
mod lane_count;
mod ledger;
mod limits;
mod rails;
mod range;
mod relaying;
mod remote;
mod resolver;
mod routes;
mod scheduler;
mod source;
mod staged;
mod swarm;
mod targets;
mod url;

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

pub use self::fetch_slices::{SliceRequest, fetch_slices};
pub use self::get::Get;
pub use self::remote::{RailRate, Remote};
pub use self::resolver::resolve;
use self::source::Source;
pub use self::staged::StagedFetch;
use crate::cancel::Cancel;
use crate::memory::{Arena, ArenaPool};
use crate::report::Report;
use crate::swarm::RelayHost;
use crate::trust::Secret;

/// How a receive is limited, and what it may use.
///
/// ```
/// use std::time::Duration;
/// use tensorferry_core::{ArenaPool, FetchOptions};
///
/// let options = FetchOptions {
///     lanes: Some(4),
///     pool: Some(ArenaPool::new(1 << 30)),
///     ..FetchOptions::within(Duration::from_secs(60))
/// };
/// assert_eq!(options.stall, Duration::from_secs(15));
/// ```
#[derive(Clone, Debug)]
pub struct FetchOptions {
    /// The one deadline of the whole receive, from [`Remote::open`] on. Retries, handshakes and name lookups are within
    /// it.
    pub timeout: Duration,
    /// No byte on a connection for this long, or next to nothing, means it is stuck, and its range goes to another
    /// lane.
    pub stall: Duration,
    /// Connections, of which more than 64 count as 64; `None` chooses by the number of cores, the delay of the network,
    /// and how much there is to fetch.
    pub lanes: Option<usize>,
    /// How many bytes the first request asks for, header included: a container that is not longer arrives in one
    /// answer.
    pub ahead: u64,
    /// Most bytes of the header and of the whole blocks up to the last control entry together: an announcement of more
    /// is refused before they come. A container that comes whole in the first answer is held to it by its header alone.
    pub most_described: u64,
    /// Whether to fetch through shared memory when the source runs on this machine as the same user.
    pub same_host: bool,
    /// The shared secret: requests are signed with it, and only a source that proves to know it is fetched from. `None`
    /// fetches without.
    pub secret: Option<Secret>,
    /// Where memory for what arrives comes from, and goes back to.
    pub pool: Option<Arc<ArenaPool>>,
    /// Counts the bytes of payload as they arrive, for another thread to look at: bytes that come again count again,
    /// and so do those that [`Remote::resume`] finds in their places.
    pub progress: Arc<AtomicU64>,
    /// Ends the transfer from another thread.
    pub cancel: Cancel,
    /// A server of this process that serves on what is received, while it is: the receive then takes part in a swarm, if
    /// its source, which must be the only one, has a tracker. Where a secret is shared, that server must have it, and
    /// where the source encrypts, that server must, too. `None` fetches from the sources alone.
    pub relay: Option<Arc<dyn RelayHost>>,
    /// Takes part in the swarm from the beginning, however fast the source is. Without it, a receive does so once it has
    /// shown to be slow, since others are of no help before.
    pub relays_at_once: bool,
    /// How many receives of this process share its cores and links with this one, itself among them.
    pub beside: usize,
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
            most_described: u64::MAX,
            same_host: true,
            secret: None,
            pool: None,
            progress: Arc::default(),
            cancel: Cancel::new(),
            relay: None,
            relays_at_once: false,
            beside: 1,
        }
    }
}

/// A finished and verified receive: the memory, where each entry lies in it, and a report.
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

    /// For each entry of the header, where it starts in the arena; `None` if it is not in it.
    #[must_use]
    pub fn offsets(&self) -> &[Option<u64>] {
        &self.offsets
    }

    /// How the transfer went.
    #[must_use]
    pub fn report(&self) -> &Report {
        &self.report
    }

    /// The arena, the offsets of the entries in it, and the report.
    #[must_use]
    pub fn into_parts(self) -> (Arena, Vec<Option<u64>>, Report) {
        (self.arena, self.offsets, self.report)
    }
}
