//! The server: it listens, authorises requests, and answers over HTTP/1.1.
//!
//! A connection passes through these modules:
//!
//! 1. `listeners` accepts it, once `connection_slots` has room for it;
//! 2. `connection` serves it, over hyper on the network or by `local` on this machine;
//! 3. `auth` checks each request's proof of the shared secret, where there is one;
//! 4. `handler` finds the resource, in the server's own store or on a `shelf`, waits for the gate, and takes a lease;
//! 5. `body` sends the publication's memory, within the limit of `throttle`;
//! 6. in `observe`, `metrics` counts, `transfers` and `receives` know what is under way; `figures` takes all of it at one
//!    moment, for `exposition` and `status`.
//!
//! The last two are also served on a port of their own, if there is one, to anyone who reaches it: nothing else is.
//!
//! Invariants: memory of a publication is sent only under a lease; a connection that is cut ends at its next poll;
//! nothing that a peer sends makes the server keep more than a bounded amount of memory for it.

mod auth;
mod body;
mod config;
mod connection;
mod connection_slots;
mod frontend;
mod handler;
mod listeners;
mod local;
mod observe;
mod relay;
mod shelf;
mod throttle;
mod write_timeout;

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

use hyper::header::HeaderValue;
use tensorferry_wire::rails::{self, Cards};
use tokio::runtime::Handle;
use tokio::sync::watch;

use self::auth::RequestAuth;
use self::body::Progress;
pub use self::config::ServerConfig;
use self::connection::ConnectionContext;
use self::connection_slots::ConnectionSlots;
pub use self::frontend::Frontend;
use self::listeners::{Listener, accept_local, accept_network, accept_observers, listen, listen_same_host};
use self::observe::metrics::Metrics;
use self::observe::program::Shown;
pub use self::observe::program::{ProgramFigures, ProgramTable, Series};
pub use self::observe::receive::{Failure, Receive};
use self::observe::receives::Receives;
use self::observe::strangers::Strangers;
use self::observe::transfers::Transfers;
pub use self::shelf::Shelf;
use self::shelf::Shelves;
use self::throttle::Throttle;
use crate::error::{Error, ErrorKind, Hint};
use crate::publication::Store;
use crate::same_host;
use crate::swarm::RelayHost;
use crate::sync::Locked;
use crate::trust::{Identity, random, secret};

/// Connections of this machine that have shown their right to ask: each has a thread and shared memory of its own.
/// Above this limit receivers of this machine take the network.
const MAX_LOCAL: usize = 32;
/// Those that have not.
const MAX_LOCAL_NEWCOMERS: usize = 32;
/// How long those keep their slot at least. A receiver asks as soon as it is greeted.
const LOCAL_GRACE: Duration = Duration::from_millis(10);
/// How long network connections without an authorised request keep their slot at least.
const GRACE: Duration = Duration::from_millis(50);

/// Connections at a time to the port for figures.
const MAX_OBSERVERS: usize = 16;

/// A running server. Dropping it ends it without waiting.
///
/// The threads are those of the runtime it was bound to. Nothing is served until the [`Store`] has a publication:
///
/// ```
/// use std::io::{Read, Write};
/// use std::time::Duration;
/// use tensorferry_core::{Server, ServerConfig};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let runtime = tokio::runtime::Runtime::new()?;
/// let config = ServerConfig { bind: Some([127, 0, 0, 1].into()), ..ServerConfig::default() };
/// let server = Server::bind(&config, runtime.handle())?;
/// let mut peer = std::net::TcpStream::connect(server.address())?;
/// peer.write_all(b"GET /healthz HTTP/1.1\r\nConnection: close\r\n\r\n")?;
/// let mut answer = String::new();
/// peer.read_to_string(&mut answer)?;
/// assert!(answer.starts_with("HTTP/1.1 200 OK"));
/// server.shutdown(Duration::from_secs(5));
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Server {
    handle: Handle,
    shared: Arc<Shared>,
    stop: watch::Sender<bool>,
    ended: Mutex<Receiver<()>>,
}

#[derive(Debug)]
struct Shared {
    address: SocketAddr,
    store: Arc<Store>,
    shelves: Shelves,
    token: String,
    auth: Option<RequestAuth>,
    identity: Option<Identity>,
    /// Where processes of this machine and user may fetch around the network.
    same_host: Option<same_host::Name>,
    patience: Duration,
    throttle: Option<Arc<Throttle>>,
    progress: Arc<Progress>,
    requests: AtomicU64,
    metrics: Metrics,
    transfers: Transfers,
    receives: Receives,
    /// Connections there are, and connections there have been.
    connections: AtomicUsize,
    accepted: AtomicU64,
    began: Instant,
    since: SystemTime,
    strangers: Strangers,
    program: Shown,
    /// The port on which counters alone are served.
    metrics_port: Option<u16>,
    frontend: Arc<dyn Frontend>,
    swarm: bool,
    /// The header field that names the addresses of this server, where it has several.
    rails: Option<HeaderValue>,
    /// The addresses that URLs name besides the host.
    cards: Cards,
}

impl Server {
    /// Binds and starts to serve on the runtime of `handle`. The gate is closed until something is published.
    ///
    /// # Errors
    /// [`ErrorKind::System`] when an address cannot be bound, no certificate can be made, or the system gives no random
    /// numbers.
    pub fn bind(config: &ServerConfig, handle: &Handle) -> Result<Self, Error> {
        let runtime = handle.enter();
        let addresses: Vec<_> = config.bind.into_iter().chain(config.also.iter().copied()).collect();
        let (listeners, address) = bound(&addresses, &config.ports, "checkpoint requests", Hint::ChoosePort)?;
        let observers = config.metrics_ports.as_ref();
        let observers = observers.map(|ports| bound(&addresses, ports, "scrapers", Hint::ChooseMetricsPort));
        let (observers, metrics_port) =
            observers.transpose()?.map_or((Vec::new(), None), |(listeners, address)| (listeners, Some(address.port())));
        let token = if config.capability { random::token()? } else { String::new() };
        // If the system lets us have one: everything works without.
        let name = same_host::Name::new(&random::token()?);
        let local = if config.same_host { listen_same_host(&name).ok() } else { None };
        drop(runtime);
        let shared = Arc::new(Shared {
            address,
            store: Arc::new(Store::new(secret::algorithm(config.secret.as_ref()))?),
            shelves: Shelves::default(),
            token,
            auth: config.secret.clone().map(RequestAuth::new),
            identity: match &config.identity {
                _ if !config.tls => None,
                Some(given) => Some(given.clone()),
                None => Some(Identity::new()?),
            },
            same_host: local.is_some().then_some(name),
            patience: config.patience,
            throttle: config.max_bandwidth.map(|limit| Arc::new(Throttle::new(limit))),
            progress: Arc::default(),
            requests: AtomicU64::new(0),
            metrics: Metrics::default(),
            transfers: Transfers::default(),
            receives: Receives::default(),
            connections: AtomicUsize::new(0),
            accepted: AtomicU64::new(0),
            began: Instant::now(),
            since: SystemTime::now(),
            strangers: Strangers::default(),
            program: Shown::default(),
            metrics_port,
            frontend: Arc::clone(&config.frontend),
            swarm: config.swarm,
            rails: HeaderValue::try_from(rails::format(&config.rails)).ok().filter(|named| !named.is_empty()),
            cards: config.named_cards(),
        });
        let (stop, stopped) = watch::channel(false);
        let (done, ended) = std::sync::mpsc::channel();
        let (sweeping, mut over) = (Arc::clone(&shared), stopped.clone());
        handle.spawn(async move {
            tokio::select! {
                () = sweeping.store.sweep() => {}
                _ = over.wait_for(|s| *s) => {}
            }
        });
        if let Some(local) = local {
            let slots = ConnectionSlots::new(MAX_LOCAL_NEWCOMERS, LOCAL_GRACE, MAX_LOCAL, false);
            let (accepting, done) = (accept_local(local, Arc::clone(&shared), slots, stopped.clone()), done.clone());
            handle.spawn(async move {
                accepting.await;
                drop(done);
            });
        }
        let slots = ConnectionSlots::new(MAX_OBSERVERS, GRACE, 1, false);
        for observers in observers {
            let accepting = accept_observers(observers, Arc::clone(&shared), Arc::clone(&slots), stopped.clone());
            let done = done.clone();
            handle.spawn(async move {
                accepting.await;
                drop(done);
            });
        }
        let newcomers = (config.max_connections / 4).max(1);
        let slots =
            ConnectionSlots::new(newcomers, GRACE, config.max_connections.saturating_sub(newcomers).max(1), true);
        for listener in listeners {
            let accepting = accept_network(listener, Arc::clone(&shared), Arc::clone(&slots), stopped.clone());
            let done = done.clone();
            handle.spawn(async move {
                accepting.await;
                drop(done);
            });
        }
        Ok(Self { handle: handle.clone(), shared, stop, ended: Mutex::new(ended) })
    }

    /// The address that the server listens on.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.shared.address
    }

    /// The store with the publications that it serves.
    #[must_use]
    pub fn store(&self) -> &Store {
        &self.shared.store
    }

    /// The URL prefix to which `{step}.safetensors` and its like are appended, as seen by peers that reach `host`.
    #[must_use]
    pub fn url(&self, host: &str) -> String {
        self.shared.url(host, &self.shared.token)
    }

    /// Makes room for a further publication, which is served beside the others: see [`Shelf`].
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] when `name` is not 1 to 64 letters and digits, is that of a resource, or is taken;
    /// [`ErrorKind::System`] when the system gives no random numbers.
    pub fn shelf(&self, name: Option<&str>) -> Result<Shelf, Error> {
        Shelf::put_up(&self.shared, name, &self.handle)
    }

    /// Bytes of bodies served so far.
    #[must_use]
    pub fn bytes_served(&self) -> u64 {
        self.shared.progress.bytes.load(Ordering::Relaxed)
    }

    /// The URL of the port on which counters alone are served, as seen by those who reach `host`; `None` if there is no
    /// such port.
    #[must_use]
    pub fn metrics_url(&self, host: &str) -> Option<String> {
        self.shared.metrics_port.map(|port| format!("http://{}:{port}/metrics", in_url(host)))
    }

    /// Puts what the program around this server says of itself onto counters and status page, in place of what it said
    /// before: see [`ProgramFigures`].
    pub fn show(&self, figures: ProgramFigures) {
        self.shared.program.show(figures);
    }

    /// The addresses whose requests were refused last because they have not shown a right to ask, why, and how often: at
    /// most 16 for each of three reasons, those that knew the path first.
    #[must_use]
    pub fn strangers(&self) -> Vec<(String, &'static str, u64)> {
        let latest = self.shared.strangers.latest();
        latest.into_iter().map(|one| (one.peer.to_string(), one.reason.text(), one.count)).collect()
    }

    /// Notes that a receive of this process begins, for counters and status page to show.
    #[must_use]
    pub fn begin_receive(&self, step: i64) -> Receive {
        Receive::begin(&self.shared, step)
    }

    /// What lets this server serve on what its process receives, as [`crate::FetchOptions::relay`].
    #[must_use]
    pub fn relay_host(&self) -> Arc<dyn RelayHost> {
        Arc::new(relay::Host { shared: Arc::clone(&self.shared), handle: self.handle.clone() })
    }

    /// Stops accepting, ends all transfers and, for at most `patience`, waits until the listening sockets
    /// are closed: [`Server::is_down_within`] tells whether they are.
    pub fn shutdown(&self, patience: Duration) {
        self.stop.send_replace(true);
        self.shared.close_stores();
        self.is_down_within(patience);
    }

    /// Waits for at most `patience` until the listening sockets are closed; says whether they are. They are not before
    /// [`Server::shutdown`].
    pub fn is_down_within(&self, patience: Duration) -> bool {
        let ended = self.ended.locked();
        // Nothing is ever sent: the channel closes when the accept loops have ended.
        ended.recv_timeout(patience) == Err(RecvTimeoutError::Disconnected)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.send_replace(true);
        self.shared.close_stores();
    }
}

impl Shared {
    /// The URL prefix of what is served below `token`.
    fn url(&self, host: &str, token: &str) -> String {
        let slash = if token.is_empty() { "" } else { "/" };
        let token = if token.is_empty() { String::new() } else { rails::with_cards(token, &self.cards_besides(host)) };
        let host = in_url(host);
        let scheme = match &self.identity {
            Some(identity) => format!("https://{}@", identity.fingerprint),
            None => "http://".to_owned(),
        };
        format!("{scheme}{host}:{}{slash}{token}/checkpoint/", self.address.port())
    }

    /// The addresses that a URL with this host names.
    fn cards_besides(&self, host: &str) -> Cards {
        let host =
            host.trim_start_matches('[').trim_end_matches(']').parse().ok().map(|host: IpAddr| host.to_canonical());
        let mut cards = self.cards.clone();
        cards.others.retain(|&other| Some(other) != host);
        cards
    }

    /// Whether there is a tracker for what is served here.
    fn offers_swarm(&self) -> bool {
        self.swarm
    }

    /// Refuses every request from now on, for whatever is served here, and ends all transfers.
    fn close_stores(&self) {
        self.store.close();
        for store in self.shelves.stores() {
            store.close();
        }
    }
}

/// `host` as URLs have it: IPv6 addresses in brackets.
fn in_url(host: &str) -> String {
    if host.contains(':') && !host.starts_with('[') { format!("[{host}]") } else { host.to_owned() }
}

/// Listens for `purpose` at `addresses`, or at all, on a port of `ports`; `hint` says what can be done where none of
/// them is free.
fn bound(
    addresses: &[IpAddr],
    ports: &RangeInclusive<u16>,
    purpose: &str,
    hint: Hint,
) -> Result<(Vec<Listener>, SocketAddr), Error> {
    let listeners = listen(addresses, ports).and_then(|listeners| {
        let first = listeners.first().ok_or(io::ErrorKind::InvalidInput)?.local_addr()?;
        Ok((listeners, first))
    });
    listeners.map_err(|e| {
        let message = match (ports.start(), ports.end()) {
            (0, _) => format!("cannot listen for {purpose}"),
            (first, last) if first == last => format!("cannot listen for {purpose} on port {first}"),
            (first, last) => format!("cannot listen for {purpose} on any port from {first} to {last}"),
        };
        let in_use = e.kind() == io::ErrorKind::AddrInUse;
        let error = Error::caused(ErrorKind::System, message, e);
        if in_use { error.hinting(hint) } else { error }
    })
}
