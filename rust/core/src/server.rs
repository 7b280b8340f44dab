//! The server: an accept loop, a guard and a handler, HTTP/1.1.

mod guard;
mod handler;
mod local;
mod metrics;

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use socket2::{Domain, Protocol, Socket, Type};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::runtime::Handle;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, watch};
use tokio_rustls::TlsAcceptor;

use self::guard::Guard;
use self::local::Local;
use self::metrics::Metrics;
use crate::body::Progress;
use crate::client::Report;
use crate::error::{Error, ErrorKind};
use crate::same_host;
use crate::secret::{self, Secret};
use crate::store::Store;
use crate::throttle::Throttle;
use crate::tls::Identity;

/// Connections of this machine at once: each has a thread and shared memory of its own.
const MAX_LOCAL: usize = 32;
/// How long a TLS handshake may take.
const HANDSHAKE: Duration = Duration::from_secs(10);

/// How a server is set up.
#[derive(Clone, Debug)]
pub struct ServerConfig {
    /// Where to listen; `None` is every interface, IPv6 and IPv4, on a port the system picks.
    pub bind: Option<SocketAddr>,
    /// How long a request waits for the gate to open, and how long a transfer may make no progress at all.
    pub patience: Duration,
    /// Whether paths carry a random part without which everything but `/healthz` is 404.
    pub capability: bool,
    /// With a secret, everything but `/healthz` and `/metrics` needs a proof of it, and answers with digests carry one.
    pub secret: Option<Secret>,
    /// Encrypt what goes over the network, with a certificate of its own whose fingerprint is in the URL.
    pub tls: bool,
    /// Connections held at once; further ones wait in the listen queue.
    pub max_connections: usize,
    /// Whether processes of this machine and user may fetch around the network.
    pub same_host: bool,
    /// Bytes per second that all connections together may send of checkpoints.
    pub max_bandwidth: Option<u64>,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            bind: None,
            patience: Duration::from_mins(1),
            capability: true,
            secret: None,
            tls: false,
            max_connections: 512,
            same_host: true,
            max_bandwidth: None,
        }
    }
}

/// A running server. Dropping it ends it without waiting.
#[derive(Debug)]
pub struct Server {
    address: SocketAddr,
    shared: Arc<Shared>,
    stop: watch::Sender<bool>,
    ended: Mutex<Option<std::sync::mpsc::Receiver<()>>>,
}

#[derive(Debug)]
struct Shared {
    store: Store,
    token: String,
    guard: Option<Guard>,
    identity: Option<Identity>,
    /// Where processes of this machine and user may fetch around the network.
    same_host: Option<same_host::Name>,
    patience: Duration,
    throttle: Option<Arc<Throttle>>,
    progress: Arc<Progress>,
    requests: AtomicU64,
    metrics: Metrics,
    connections: AtomicUsize,
}

/// One connection: how it is cut off, and how far it got.
struct Connection {
    shared: Arc<Shared>,
    cut: Arc<Notify>,
    same_host: bool,
    progress: Arc<[Arc<Progress>; 2]>,
    /// Requests of this connection whose response is not yet written out.
    open: AtomicUsize,
}

impl Server {
    /// Binds and starts to serve on the runtime of `handle`. The gate is closed until something is published.
    ///
    /// # Errors
    /// [`ErrorKind::System`] when the address cannot be bound.
    pub fn bind(config: &ServerConfig, handle: &Handle) -> Result<Self, Error> {
        let failed = |e: io::Error| Error::caused(ErrorKind::System, "cannot listen for checkpoint requests", e);
        let listener = listen(config.bind).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let token = if config.capability { random_token()? } else { String::new() };
        let local = if config.same_host { listen_same_host()? } else { None };
        let shared = Arc::new(Shared {
            store: Store::new(secret::algorithm(config.secret.as_ref()))?,
            token,
            guard: config.secret.clone().map(Guard::new),
            identity: if config.tls { Some(Identity::new()?) } else { None },
            same_host: local.as_ref().map(|(name, _)| name.clone()),
            patience: config.patience,
            throttle: config.max_bandwidth.map(|limit| Arc::new(Throttle::new(limit))),
            progress: Arc::default(),
            requests: AtomicU64::new(0),
            metrics: Metrics::default(),
            connections: AtomicUsize::new(0),
        });
        let (stop, stopped) = watch::channel(false);
        let (done, ended) = std::sync::mpsc::channel();
        let listeners = {
            let _guard = handle.enter();
            let local = local.map(|(_, listener)| tokio::net::UnixListener::from_std(listener));
            Listeners {
                tcp: tokio::net::TcpListener::from_std(listener).map_err(failed)?,
                local: local.transpose().map_err(failed)?,
            }
        };
        let (sweeping, mut over) = (Arc::clone(&shared), stopped.clone());
        handle.spawn(async move {
            tokio::select! {
                () = sweeping.store.sweep() => {}
                _ = over.wait_for(|s| *s) => {}
            }
        });
        let permits = Arc::new(Semaphore::new(config.max_connections));
        let accepting = Arc::clone(&shared);
        handle.spawn(async move {
            accept(listeners, accepting, permits, stopped).await;
            drop(done);
        });
        Ok(Self { address, shared, stop, ended: Mutex::new(Some(ended)) })
    }

    /// The address it listens on.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// What it serves.
    #[must_use]
    pub fn store(&self) -> &Store {
        &self.shared.store
    }

    /// The URL prefix to which `{step}.safetensors` and its like are appended, as seen by peers that reach `host`.
    #[must_use]
    pub fn url(&self, host: &str) -> String {
        let host = if host.contains(':') && !host.starts_with('[') { format!("[{host}]") } else { host.to_owned() };
        let token = &self.shared.token;
        let slash = if token.is_empty() { "" } else { "/" };
        let scheme = match &self.shared.identity {
            Some(identity) => format!("https://{}@", identity.fingerprint),
            None => "http://".to_owned(),
        };
        format!("{scheme}{host}:{}{slash}{token}/checkpoint/", self.address.port())
    }

    /// Bytes of bodies served so far.
    #[must_use]
    pub fn bytes_served(&self) -> u64 {
        self.shared.progress.bytes.load(Ordering::Relaxed)
    }

    /// Tells of a receive of this process, for `/metrics`: how it went, or that it failed, and what it took in all.
    pub fn note_receive(&self, report: Option<&Report>, took: Duration) {
        self.shared.metrics.note_receive(report, took);
    }

    /// Stops accepting, ends all transfers and, for at most `patience`, waits until the listening socket is closed.
    pub fn shutdown(&self, patience: Duration) {
        self.stop.send_replace(true);
        self.shared.store.close();
        let ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(ended) = ended {
            // Nothing is ever sent: the channel closes when the accept loop ends.
            let _ = ended.recv_timeout(patience);
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.send_replace(true);
        self.shared.store.close();
    }
}

fn random_token() -> Result<String, Error> {
    let mut bytes = [0_u8; 16];
    getrandom::fill(&mut bytes)
        .map_err(|e| Error::new(ErrorKind::System, format!("no random numbers from the system: {e}")))?;
    Ok(format!("{:032x}", u128::from_be_bytes(bytes)))
}

/// One socket for both families where the system has IPv6, else IPv4 alone.
fn listen(bind: Option<SocketAddr>) -> io::Result<TcpListener> {
    let listen_on = |address: SocketAddr| {
        let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
        if address.is_ipv6() {
            socket.set_only_v6(false)?;
        }
        socket.set_reuse_address(true)?;
        socket.set_nonblocking(true)?;
        socket.bind(&address.into())?;
        socket.listen(1024)?;
        Ok(TcpListener::from(socket))
    };
    match bind {
        Some(address) => listen_on(address),
        None => listen_on((Ipv6Addr::UNSPECIFIED, 0).into()).or_else(|_| listen_on((Ipv4Addr::UNSPECIFIED, 0).into())),
    }
}

/// The socket for processes of this machine, if the system lets us have one: everything works without.
fn listen_same_host() -> Result<Option<(same_host::Name, std::os::unix::net::UnixListener)>, Error> {
    let name = same_host::Name::new(&random_token()?);
    Ok(name.listen().ok().map(|listener| (name, listener)))
}

/// Where connections come from.
struct Listeners {
    tcp: tokio::net::TcpListener,
    local: Option<tokio::net::UnixListener>,
}

enum Accepted {
    Tcp(tokio::net::TcpStream),
    Local(tokio::net::UnixStream),
}

impl Listeners {
    async fn accept(&self) -> io::Result<Accepted> {
        let Some(local) = &self.local else { return Ok(Accepted::Tcp(self.tcp.accept().await?.0)) };
        tokio::select! {
            accepted = self.tcp.accept() => Ok(Accepted::Tcp(accepted?.0)),
            accepted = local.accept() => Ok(Accepted::Local(accepted?.0)),
        }
    }
}

async fn accept(
    listeners: Listeners,
    shared: Arc<Shared>,
    permits: Arc<Semaphore>,
    mut stopped: watch::Receiver<bool>,
) {
    // Above this limit receivers of this machine take the network.
    let local_permits = Arc::new(Semaphore::new(MAX_LOCAL));
    loop {
        // The permit comes first: above the limit, connections wait in the kernel's queue instead of in our memory.
        let permit = tokio::select! {
            permit = Arc::clone(&permits).acquire_owned() => permit,
            _ = stopped.wait_for(|s| *s) => return,
        };
        let Ok(permit) = permit else { return };
        let accepted = tokio::select! {
            accepted = listeners.accept() => accepted,
            _ = stopped.wait_for(|s| *s) => return,
        };
        match accepted {
            Ok(Accepted::Tcp(stream)) => {
                let _ = stream.set_nodelay(true);
                tokio::spawn(serve_network(stream, Arc::clone(&shared), permit, stopped.clone()));
            }
            Ok(Accepted::Local(stream)) => {
                let Ok(local_permit) = Arc::clone(&local_permits).try_acquire_owned() else { continue };
                if stream.peer_cred().is_ok_and(|peer| peer.uid() == same_host::own_user()) {
                    tokio::spawn(serve_local(stream, Arc::clone(&shared), (permit, local_permit), stopped.clone()));
                }
            }
            // Out of descriptors, or a peer that left while queued: give the system a moment, then go on.
            Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
        }
    }
}

/// Serves a connection from the network, after the handshake where there is one: a peer that does not get it done in
/// time, or does not speak TLS, is let go.
async fn serve_network(
    stream: tokio::net::TcpStream,
    shared: Arc<Shared>,
    permit: OwnedSemaphorePermit,
    mut stopped: watch::Receiver<bool>,
) {
    let Some(identity) = &shared.identity else { return serve(stream, shared, permit, stopped).await };
    let accepting = TlsAcceptor::from(Arc::clone(&identity.config)).accept(stream);
    let accepted = tokio::select! {
        accepted = tokio::time::timeout(HANDSHAKE, accepting) => accepted,
        _ = stopped.wait_for(|s| *s) => return,
    };
    if let Ok(Ok(stream)) = accepted {
        serve(stream, shared, permit, stopped).await;
    }
}

async fn serve(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    shared: Arc<Shared>,
    permit: OwnedSemaphorePermit,
    stopped: watch::Receiver<bool>,
) {
    let connection = Arc::new(Connection::new(shared, false));
    let serving =
        http1::Builder::new().timer(TokioTimer::new()).header_read_timeout(connection.patience()).serve_connection(
            TokioIo::new(stream),
            service_fn(|request| {
                let connection = Arc::clone(&connection);
                async move { handler::answer(&connection, &request).await }
            }),
        );
    tokio::select! {
        // How a connection ends is the peer's business; nothing of it concerns the trainer.
        _ = serving => {}
        () = connection.to_be_ended(stopped) => {}
    }
    drop(permit);
}

async fn serve_local(
    stream: tokio::net::UnixStream,
    shared: Arc<Shared>,
    permits: (OwnedSemaphorePermit, OwnedSemaphorePermit),
    stopped: watch::Receiver<bool>,
) {
    let connection = Arc::new(Connection::new(shared, true));
    let Ok(stream) = stream.into_std() else { return };
    let Ok(socket) = stream.try_clone() else { return };
    let (end, over) = watch::channel(false);
    let mut serving = tokio::task::spawn_blocking({
        let connection = Arc::clone(&connection);
        // As above: the peer's business.
        move || drop(Local::serve(stream, connection, over))
    });
    tokio::select! {
        _ = &mut serving => {}
        () = connection.to_be_ended(stopped) => {
            end.send_replace(true);
            local::shut_down(&socket);
            let _ = serving.await;
        }
    }
    drop(permits);
}

impl Connection {
    fn new(shared: Arc<Shared>, same_host: bool) -> Self {
        shared.connections.fetch_add(1, Ordering::Relaxed);
        let own = Arc::new(Progress::default());
        Self {
            cut: Arc::default(),
            same_host,
            progress: Arc::new([own, Arc::clone(&shared.progress)]),
            open: AtomicUsize::new(0),
            shared,
        }
    }

    /// How long the next request may take to come.
    fn patience(&self) -> Duration {
        self.shared.patience.max(Duration::from_secs(5))
    }

    /// Ends when the connection has to: the publication it reads is withdrawn, its transfer has stalled, or the server
    /// stops.
    async fn to_be_ended(&self, mut stopped: watch::Receiver<bool>) {
        tokio::select! {
            () = self.cut.notified() => {}
            () = self.stalled() => {}
            _ = stopped.wait_for(|s| *s) => {}
        }
    }

    async fn stalled(&self) {
        let mut before = (0, usize::MAX);
        loop {
            tokio::time::sleep(self.shared.patience).await;
            let now = (self.progress[0].bytes.load(Ordering::Relaxed), self.open.load(Ordering::Relaxed));
            if now == before && now.1 > 0 {
                return;
            }
            before = now;
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.shared.connections.fetch_sub(1, Ordering::Relaxed);
    }
}
