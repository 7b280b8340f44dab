//! The receiving side: open a source, learn what it has, fetch it over several lanes into its final place, verify it.

mod blocks;
mod connection;
#[cfg(fuzzing)]
pub mod fuzzing;
mod gather;
mod lane;
mod limits;
mod open;
mod plan;
mod received;
mod remote;
mod url;
mod watch;
mod waves;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

pub(crate) use self::blocks::checksum_blocks;
use self::connection::Connection;
pub use self::gather::{Order, gather};
pub use self::limits::Cancel;
use self::limits::Limits;
pub(crate) use self::plan::{Piece, Plan, Queue};
pub use self::remote::Remote;
use self::url::Source;
pub use self::waves::{Part, Waves};
use crate::arena::{Arena, Pool};
use crate::error::Error;
use crate::same_host;
use crate::secret::Secret;

/// How often a source is asked for its header before it is given up.
const OPEN_ATTEMPTS: u32 = 5;
/// How long one of several sources may be silent before the next one is asked; twice as long each time it is its turn.
const OPEN_PATIENCE: Duration = Duration::from_secs(1);
/// How often a block that does not match its checksum is fetched again before the transfer fails.
const CORRUPT_RETRIES: usize = 3;

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
    pub pool: Option<Arc<Pool>>,
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
}

/// How a transfer went.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Bytes of payload received, those that had to be fetched again included.
    pub bytes: u64,
    /// Bytes that had a destination, where only slices were asked for.
    pub wanted: u64,
    /// Connections used for them.
    pub lanes: usize,
    /// Whether a connection did without the network.
    pub same_host: bool,
    /// Ranges that had to be given to another connection, and runs of blocks that came damaged.
    pub retries: u64,
    /// The ways that bytes took over the network: the address here, and the source's.
    pub routes: BTreeSet<(IpAddr, IpAddr)>,
    /// For each source that a range had to be taken from and given to another connection, the last reason.
    pub troubles: BTreeMap<String, String>,
    /// Time in [`Remote::open`]: waiting for the source, and its header.
    pub opening: Duration,
    /// Time in [`Remote::fetch`].
    pub fetching: Duration,
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

/// A source, and what is learned of it.
#[derive(Debug)]
struct Peer {
    source: Arc<Source>,
    /// The entity tag its answers carry, once it is known to serve what we fetch.
    etag: OnceLock<String>,
    /// Where it can be reached without the network.
    same_host: OnceLock<same_host::Name>,
    /// Whether that is not wanted, or was tried and did not work.
    same_host_off: AtomicBool,
}

impl Peer {
    fn parse(url: &str, same_host: bool, secret: Option<&Secret>) -> Result<Self, Error> {
        Ok(Self {
            source: Arc::new(Source::parse(url)?.sharing(secret.cloned())),
            etag: OnceLock::new(),
            same_host: OnceLock::new(),
            same_host_off: AtomicBool::new(!same_host),
        })
    }

    /// Notes what the head of an answer says.
    fn learn(&self, same_host: Option<same_host::Name>) {
        if let Some(name) = same_host {
            let _ = self.same_host.set(name);
        }
    }

    fn same_host(&self) -> Option<&same_host::Name> {
        self.same_host.get().filter(|_| !self.same_host_off.load(Ordering::Relaxed))
    }

    /// From here on the source is only reached over the network.
    fn give_up_same_host(&self) {
        self.same_host_off.store(true, Ordering::Relaxed);
    }

    /// A new connection by the shortest way that works.
    fn connect(&self, limits: &Limits) -> Result<Connection, Error> {
        if let Some(name) = self.same_host() {
            match Connection::open_same_host(&self.source, name, limits) {
                Ok(connection) => return Ok(connection),
                // The source runs elsewhere, in another network namespace or as another user.
                Err(_) => self.give_up_same_host(),
            }
        }
        Connection::open(&self.source, limits)
    }

    /// Whether `connection` leads here, can be used again, and is the shortest way.
    fn may_reuse(&self, connection: &Connection) -> bool {
        connection.is_reusable()
            && Arc::ptr_eq(connection.source(), &self.source)
            && (connection.is_same_host() || self.same_host().is_none())
    }
}
