//! A source as one receive knows it: its URL, the facts learned from its answers, and the route to it.
//!
//! Each fact is written once and shared by all lanes: the entity tag, the socket on this machine, and whether
//! that socket is out of use. A lane that fails over the socket makes all lanes take the network.

use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tensorferry_wire::rails::Rail;

use super::connection::{Connection, Offers};
use super::limits::Limits;
use super::rails::Rails;
use super::url::SourceUrl;
use crate::error::{Error, ErrorKind};
use crate::same_host;
use crate::trust::Secret;

/// How long an address may be silent where the source has another one, the first time.
pub(super) const SILENCE: Duration = Duration::from_secs(2);
/// How long a source may take to say why an answer takes long.
const WHY: Duration = Duration::from_millis(500);

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
    /// Whether it has a tracker, and whether it had all of the snapshot when it was opened.
    swarm: OnceLock<(bool, bool)>,
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
            swarm: OnceLock::new(),
            wants_same_host: same_host,
            same_host_off: AtomicBool::new(!same_host),
        })
    }

    /// Notes what the first answer has said, which came by `route`.
    pub(super) fn note_opened(&self, etag: String, route: Option<(IpAddr, IpAddr)>, offers: Offers) {
        let _ = self.etag.set(etag);
        self.learn(offers.same_host);
        let _ = self.swarm.set((offers.swarm, offers.is_full));
        self.learn_rails(&offers.rails, route);
    }

    /// Notes the addresses that an answer names which came by `route`.
    pub(super) fn learn_rails(&self, rails: &[Rail], route: Option<(IpAddr, IpAddr)>) {
        if let Some(first) = route
            && !rails.is_empty()
        {
            self.rails.learn(rails, first);
            self.url.targets().learn_named(self.rails.others());
        }
    }

    /// Whether it has other addresses, and is reached over the network.
    pub(super) fn has_rails(&self) -> bool {
        self.same_host().is_none() && !self.rails.others().is_empty()
    }

    /// Whether it has a tracker.
    pub(super) fn offers_swarm(&self) -> bool {
        self.swarm.get().is_some_and(|known| known.0)
    }

    /// Whether it has all of the snapshot, for certain.
    pub(super) fn is_full(&self) -> bool {
        self.swarm.get().is_some_and(|known| known.1)
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

    /// A new connection over the socket of this machine; `None` if that is out of use, or does not work, which puts it
    /// out of use.
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
        Connection::open(&self.url, limits)
    }

    /// Does `work` over `connection` or, without one, over a new one, and returns both. A silent address makes room for
    /// another one of the source's, at which `work` is done from its beginning, and is waited for longer when it is its
    /// turn again, up to the limit.
    pub(super) fn ask<R>(
        &self,
        mut connection: Option<Connection>,
        limits: &Limits,
        mut work: impl FnMut(&mut Connection) -> Result<R, Error>,
    ) -> Result<(Connection, R), Error> {
        loop {
            let ready = match connection.take() {
                Some(ready) => ready.within(limits),
                None => self.connect_network(limits)?,
            };
            let mut ready = ready.in_hurry(SILENCE);
            match work(&mut ready) {
                Ok(result) => {
                    self.note_answered(&ready);
                    return Ok((ready.within(limits), result));
                }
                Err(e) => {
                    if !self.note_failed(&ready, &e) || limits.left().is_err() {
                        return Err(e);
                    }
                    if let (Some(there), Some(at)) = (ready.peer(), ready.address())
                        && state_at(&self.url, there, &limits.at_most(WHY)).is_some()
                    {
                        // It is there, and needs its time.
                        self.url.targets().note_waiting(at);
                    }
                }
            }
        }
    }

    /// Notes that `connection` has brought an answer.
    pub(super) fn note_answered(&self, connection: &Connection) {
        if let Some(at) = connection.address() {
            self.url.targets().note_answered(at);
        }
    }

    /// Notes that an answer over `connection` has ended with `error`; says whether that was for want of patience alone.
    pub(super) fn note_failed(&self, connection: &Connection, error: &Error) -> bool {
        let is_silent = error.is_timeout();
        if let Some(at) = connection.address().filter(|_| is_silent || error.kind() == ErrorKind::Connect) {
            self.url.targets().note_silent(at);
        }
        is_silent && connection.is_in_hurry()
    }

    /// Whether `connection` leads here, can be used again, and takes the best route there is.
    pub(super) fn may_reuse(&self, connection: &Connection) -> bool {
        connection.is_reusable()
            && Arc::ptr_eq(connection.url(), &self.url)
            && (connection.is_same_host() || self.same_host().is_none())
    }
}

/// What the counters of the source at `url` say of it, asked for at the address `there`: never published, withdrawn, or
/// serving; `None` if they cannot be read. They need no proof and no checkpoint.
pub(super) fn state_at(url: &Arc<SourceUrl>, there: SocketAddr, limits: &Limits) -> Option<String> {
    let path = format!("{}metrics", url.prefix().strip_suffix("checkpoint/")?);
    let mut connection = Connection::open_at(url, (None, there), limits).ok()?;
    let head = connection.get(&path, None, None, None).ok()?;
    let body = connection.body(&head, 1 << 20).ok().filter(|_| head.status == 200)?;
    let page = String::from_utf8_lossy(&body);
    let value = |name: &str| page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    Some(match (value("tensorferry_allowed")?, value("tensorferry_step")) {
        ("0", None) => "it has never published anything".to_owned(),
        ("0", Some(step)) => format!("it has withdrawn what it published last, step {}", step.parse::<i64>().ok()?),
        (_, step) => format!("it serves step {}", step?.parse::<i64>().ok()?),
    })
}
