//! How a receive went: what the client counts, the binding hands to Python, and a server shows under `/metrics`.
//!
//! It is a module of its own because both the client, which makes reports, and the server, which counts them, use it, and
//! neither of these may import the other.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

use crate::error::{Error, Hint};

/// How a transfer went. Counters cover the payload; headers and digests of 1 MiB blocks are not in them.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Bytes of payload received, those that had to be fetched again included.
    pub bytes: u64,
    /// The part of them that other receivers have sent.
    pub relayed: u64,
    /// The receivers that these came from.
    pub relays: usize,
    /// Blocks from other receivers that did not match the source's digests, and were fetched again.
    pub refused: u64,
    /// How many bytes came from each source and each other receiver, by its host and port. Bytes that came more than once
    /// count for who sent them last.
    pub senders: BTreeMap<String, u64>,
    /// Bytes that had a destination, where only slices were asked for.
    pub wanted: u64,
    /// Connections used for them.
    pub lanes: usize,
    /// Whether a connection did without the network.
    pub same_host: bool,
    /// Ranges that had to be given to another connection, those of opening included, and runs of blocks that came damaged.
    pub retries: u64,
    /// The routes that bytes took over the network: the address here, and the source's.
    pub routes: BTreeSet<(IpAddr, IpAddr)>,
    /// Bytes by route, headers and digests left out.
    pub route_bytes: BTreeMap<(IpAddr, IpAddr), u64>,
    /// For each source that a range had to be taken from and given to another connection, the last reason.
    pub troubles: BTreeMap<String, Trouble>,
    /// Time in [`crate::Remote::open`]: waiting for the source, and its header.
    pub opening: Duration,
    /// Time in [`crate::Remote::fetch`].
    pub fetching: Duration,
    /// The part of it that went to comparing digests after the last byte had come.
    pub verifying: Duration,
}

/// Why a source did not bring something that another connection brought then.
#[derive(Clone, Debug)]
pub struct Trouble {
    /// The message of the error.
    pub message: String,
    /// Its [`crate::Error::hint`].
    pub hint: Option<Hint>,
}

impl Trouble {
    pub(crate) fn of(error: &Error) -> Self {
        Self { message: error.to_string(), hint: error.hint() }
    }
}

impl Report {
    /// Adds the bytes that came by each route.
    pub(crate) fn add_routes(&mut self, bytes: impl IntoIterator<Item = ((IpAddr, IpAddr), u64)>) {
        for (route, bytes) in bytes {
            self.routes.insert(route);
            *self.route_bytes.entry(route).or_default() += bytes;
        }
    }

    /// Adds what another transfer brought at the same time: counts are summed, and of the times to open and to
    /// verify the longer one counts. The caller sets the time of fetching, since only it knows when all of them began.
    pub(crate) fn add(&mut self, other: Self) {
        self.bytes += other.bytes;
        self.relayed += other.relayed;
        self.relays += other.relays;
        self.refused += other.refused;
        for (sender, bytes) in other.senders {
            *self.senders.entry(sender).or_default() += bytes;
        }
        self.wanted += other.wanted;
        self.lanes += other.lanes;
        self.same_host |= other.same_host;
        self.retries += other.retries;
        self.routes.extend(other.routes);
        self.add_routes(other.route_bytes);
        self.troubles.extend(other.troubles);
        self.opening = self.opening.max(other.opening);
        self.verifying = self.verifying.max(other.verifying);
    }
}
