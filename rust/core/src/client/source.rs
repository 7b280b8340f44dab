//! A source as one receive knows it: its URL, the facts learned from its answers, and the route to it.
//!
//! Each fact is written once and shared by all lanes: the entity tag, the socket on this machine, and whether
//! that socket is out of use. A lane that fails over the socket makes all lanes take the network.

use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use tensorferry_wire::rails::Rail;

use super::connection::{Connection, Offers};
use super::limits::Limits;
use super::rails::Rails;
use super::url::SourceUrl;
use crate::error::Error;
use crate::same_host;
use crate::trust::Secret;

/// A source of one receive, and what its answers have said about it.
#[derive(Debug)]
pub(super) struct Source {
    pub(super) url: Arc<SourceUrl>,
    /// The entity tag its answers carry, once it is known to serve what we fetch.
    pub(super) etag: OnceLock<String>,
    /// Where it can be reached without the network.
    same_host: OnceLock<same_host::Name>,
    /// Its other addresses.
    pub(super) rails: Rails,
    /// Whether it has a tracker.
    offers_swarm: AtomicBool,
    /// Whether it had all of the snapshot when it was opened.
    is_full: AtomicBool,
    /// Whether shared memory is wanted.
    pub(super) wants_same_host: bool,
    /// Whether that is not wanted, or was tried and did not work.
    same_host_off: AtomicBool,
}

impl Source {
    pub(super) fn parse(url: &str, same_host: bool, secret: Option<&Secret>) -> Result<Self, Error> {
        Ok(Self {
            url: Arc::new(SourceUrl::parse(url)?.sharing(secret.cloned())),
            etag: OnceLock::new(),
            same_host: OnceLock::new(),
            rails: Rails::default(),
            offers_swarm: AtomicBool::new(false),
            is_full: AtomicBool::new(false),
            wants_same_host: same_host,
            same_host_off: AtomicBool::new(!same_host),
        })
    }

    /// Notes what the first answer has said, which came by `route`.
    pub(super) fn note_opened(&self, etag: String, route: Option<(IpAddr, IpAddr)>, offers: Offers) {
        let _ = self.etag.set(etag);
        self.learn(offers.same_host);
        self.offers_swarm.store(offers.swarm, Ordering::Relaxed);
        self.is_full.store(offers.is_full, Ordering::Relaxed);
        if let Some((_, card)) = route.filter(|route| self.url.card() == Some(route.1)) {
            self.url.learn(&[(card, self.url.port()).into()]);
        }
        self.learn_rails(&offers.rails, route);
    }

    /// Notes the addresses that an answer names which came by `route`.
    pub(super) fn learn_rails(&self, rails: &[Rail], route: Option<(IpAddr, IpAddr)>) {
        if let Some(first) = route
            && !rails.is_empty()
        {
            self.rails.learn(rails, first);
        }
    }

    /// Whether it has other addresses, and is reached over the network.
    pub(super) fn has_rails(&self) -> bool {
        self.same_host().is_none() && !self.rails.others().is_empty()
    }

    /// Whether it has a tracker.
    pub(super) fn offers_swarm(&self) -> bool {
        self.offers_swarm.load(Ordering::Relaxed)
    }

    /// Whether it has all of the snapshot, for certain.
    pub(super) fn is_full(&self) -> bool {
        self.is_full.load(Ordering::Relaxed)
    }

    /// Notes what the head of an answer says.
    pub(super) fn learn(&self, same_host: Option<same_host::Name>) {
        if let Some(name) = same_host {
            let _ = self.same_host.set(name);
        }
    }

    pub(super) fn same_host(&self) -> Option<&same_host::Name> {
        self.same_host.get().filter(|_| !self.same_host_off.load(Ordering::Relaxed))
    }

    /// From here on the source is only reached over the network.
    pub(super) fn give_up_same_host(&self) {
        self.same_host_off.store(true, Ordering::Relaxed);
    }

    /// A new connection, over the socket of this machine where that works and over the network otherwise.
    pub(super) fn connect(&self, limits: &Limits) -> Result<Connection, Error> {
        self.connect_same_host(limits).map_or_else(|| self.connect_network(limits), Ok)
    }

    /// A new connection over the socket of this machine, unless that is out of use or does not work.
    pub(super) fn connect_same_host(&self, limits: &Limits) -> Option<Connection> {
        let connection = Connection::open_same_host(&self.url, self.same_host()?, limits).ok();
        if connection.is_none() {
            // The source runs elsewhere, in another network namespace or as another user.
            self.give_up_same_host();
        }
        connection
    }

    /// A new connection over the network.
    pub(super) fn connect_network(&self, limits: &Limits) -> Result<Connection, Error> {
        self.rails.connect(self, limits)
    }

    /// Whether `connection` leads here, can be used again, and takes the best route there is.
    pub(super) fn may_reuse(&self, connection: &Connection) -> bool {
        connection.is_reusable()
            && Arc::ptr_eq(connection.url(), &self.url)
            && (connection.is_same_host() || self.same_host().is_none())
    }
}
