//! A source as one receive knows it: its URL, the facts learned from its answers, and the route to it.
//!
//! Each fact is written once and shared by all lanes: the entity tag, the socket on this machine, and whether
//! that socket is out of use. A lane that fails over the socket makes all lanes take the network.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use super::connection::Connection;
use super::limits::Limits;
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
    /// Whether it has a tracker.
    offers_swarm: AtomicBool,
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
            offers_swarm: AtomicBool::new(false),
            wants_same_host: same_host,
            same_host_off: AtomicBool::new(!same_host),
        })
    }

    /// Notes what the first answer has said.
    pub(super) fn note_opened(&self, etag: String, same_host: Option<same_host::Name>, offers_swarm: bool) {
        let _ = self.etag.set(etag);
        self.learn(same_host);
        self.offers_swarm.store(offers_swarm, Ordering::Relaxed);
    }

    /// Whether it has a tracker.
    pub(super) fn offers_swarm(&self) -> bool {
        self.offers_swarm.load(Ordering::Relaxed)
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
        if let Some(name) = self.same_host() {
            match Connection::open_same_host(&self.url, name, limits) {
                Ok(connection) => return Ok(connection),
                // The source runs elsewhere, in another network namespace or as another user.
                Err(_) => self.give_up_same_host(),
            }
        }
        Connection::open(&self.url, limits)
    }

    /// Whether `connection` leads here, can be used again, and takes the best route there is.
    pub(super) fn may_reuse(&self, connection: &Connection) -> bool {
        connection.is_reusable()
            && Arc::ptr_eq(connection.url(), &self.url)
            && (connection.is_same_host() || self.same_host().is_none())
    }
}
