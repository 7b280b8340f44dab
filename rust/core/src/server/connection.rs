//! One connection, from the handshake to its end: served over the network, with or without TLS, or to a process of this
//! machine.
//!
//! A connection ends for one of six reasons: the peer leaves, it asks for nothing in time, its slot goes to another
//! one, a withdrawal cuts it, its transfer stalls, or the server stops. Whichever it is, dropping the
//! [`ConnectionContext`] counts it out.

use std::convert::Infallible;
use std::io;
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite, Interest};
use tokio::sync::watch;
use tokio_rustls::TlsAcceptor;

use super::body::Progress;
use super::connection_slots::{ConnectionSlot, FIRST_REQUEST};
use super::local::Local;
use super::write_timeout::{Outgoing, WriteTimeout};
use super::{Shared, handler};
use crate::fork::CloseOnFork;
use crate::publication::ConnectionHandle;

/// The state that requests of one connection share: the server, the handle that cuts the connection, its counters.
pub(super) struct ConnectionContext {
    /// Names the connection among all of this server.
    pub(super) number: u64,
    pub(super) shared: Arc<Shared>,
    pub(super) cut: Arc<ConnectionHandle>,
    pub(super) same_host: bool,
    pub(super) progress: Arc<[Arc<Progress>; 2]>,
    /// Requests of this connection whose response is not yet written out.
    pub(super) open: Arc<AtomicUsize>,
    pub(super) slot: ConnectionSlot,
}

/// Serves a connection from the network, after the handshake where there is one: a peer that does not complete it
/// in time, or does not speak TLS, is disconnected.
pub(super) async fn serve_network(
    stream: CloseOnFork<tokio::net::TcpStream>,
    shared: Arc<Shared>,
    slot: ConnectionSlot,
    mut stopped: watch::Receiver<bool>,
) {
    let Some(identity) = &shared.identity else { return serve(stream, shared, slot, stopped).await };
    let accepting = TlsAcceptor::from(Arc::clone(&identity.config)).accept(stream);
    let accepted = tokio::select! {
        accepted = accepting => accepted,
        () = slot.first_request_timeout() => return,
        () = slot.cut.until_cut() => return,
        _ = stopped.wait_for(|s| *s) => return,
    };
    if let Ok(stream) = accepted {
        serve(stream, shared, slot, stopped).await;
    }
}

/// Serves HTTP over `stream` until the connection ends or has to end.
async fn serve(
    stream: impl AsyncRead + AsyncWrite + Outgoing + Unpin,
    shared: Arc<Shared>,
    slot: ConnectionSlot,
    stopped: watch::Receiver<bool>,
) {
    let connection = Arc::new(ConnectionContext::new(shared, slot, false));
    let serving =
        http1::Builder::new().timer(TokioTimer::new()).header_read_timeout(connection.patience()).serve_connection(
            TokioIo::new(WriteTimeout::new(stream, connection.patience(), Arc::clone(&connection.cut))),
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
}

/// Serves a connection to the port for figures: one request, within the time that a newcomer has for its first.
pub(super) async fn serve_observer(
    stream: CloseOnFork<tokio::net::TcpStream>,
    shared: Arc<Shared>,
    slot: ConnectionSlot,
    mut stopped: watch::Receiver<bool>,
) {
    let serving = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(FIRST_REQUEST)
        .keep_alive(false)
        .serve_connection(
            TokioIo::new(stream),
            service_fn(|request| {
                let shared = Arc::clone(&shared);
                async move { Ok::<_, Infallible>(handler::observe(&shared, &request)) }
            }),
        );
    tokio::select! {
        // As for peers: how it ends is the observer's business.
        _ = serving => {}
        () = slot.first_request_timeout() => {}
        () = slot.cut.until_cut() => {}
        _ = stopped.wait_for(|s| *s) => {}
    }
}

/// Serves a process of this machine. It speaks first: one that never says anything costs no thread and no memory.
pub(super) async fn serve_local(
    socket: CloseOnFork<tokio::net::UnixStream>,
    shared: Arc<Shared>,
    slot: ConnectionSlot,
    mut stopped: watch::Receiver<bool>,
) {
    let spoken = tokio::select! {
        spoken = spoken(&socket) => spoken,
        () = slot.first_request_timeout() => return,
        () = slot.cut.until_cut() => return,
        _ = stopped.wait_for(|s| *s) => return,
    };
    let same = || CloseOnFork::make(|| socket.as_fd().try_clone_to_owned().map(UnixStream::from));
    let (Ok(()), Ok(stream), Ok(handle)) = (spoken, same(), same()) else { return };
    // The runtime must not watch the socket any more: it would wake up for every slot of the ring that comes back.
    drop(socket);
    let connection = Arc::new(ConnectionContext::new(shared, slot, true));
    let (over, is_over) = watch::channel(false);
    let end = LocalEnd { over, socket: handle };
    let mut serving = tokio::task::spawn_blocking({
        let connection = Arc::clone(&connection);
        // As above: the peer's business.
        move || drop(Local::serve(stream, connection, is_over))
    });
    tokio::select! {
        _ = &mut serving => {}
        () = connection.to_be_ended(stopped) => {
            drop(end);
            let _ = serving.await;
        }
    }
}

/// Ends the thread of a connection to a process of this machine when it is dropped: with the runtime, too.
struct LocalEnd {
    over: watch::Sender<bool>,
    socket: CloseOnFork<UnixStream>,
}

impl Drop for LocalEnd {
    fn drop(&mut self) {
        self.over.send_replace(true);
        let _ = self.socket.shutdown(Shutdown::Both);
    }
}

/// Waits until the other end has said something, which stays to be read.
async fn spoken(socket: &tokio::net::UnixStream) -> io::Result<()> {
    // A socket is called readable now and then when there is nothing to be read.
    let peek = || SockRef::from(socket).peek(&mut [MaybeUninit::uninit()]).map(drop);
    socket.async_io(Interest::READABLE, peek).await
}

impl ConnectionContext {
    fn new(shared: Arc<Shared>, slot: ConnectionSlot, same_host: bool) -> Self {
        shared.connections.fetch_add(1, Ordering::Relaxed);
        let own = Arc::new(Progress::default());
        Self {
            number: shared.accepted.fetch_add(1, Ordering::Relaxed),
            cut: Arc::clone(&slot.cut),
            same_host,
            progress: Arc::new([own, Arc::clone(&shared.progress)]),
            open: Arc::clone(&slot.open),
            slot,
            shared,
        }
    }

    /// How long the next request may take to come, and a write to be accepted.
    pub(super) fn patience(&self) -> Duration {
        self.shared.patience.max(Duration::from_secs(5))
    }

    /// Returns when the connection has to end: it has made no request in time, another one needs its slot, the
    /// publication it reads is withdrawn, its transfer has stalled, or the server stops.
    async fn to_be_ended(&self, mut stopped: watch::Receiver<bool>) {
        tokio::select! {
            () = self.cut.until_cut() => {}
            () = self.stalled() => {}
            () = self.slot.first_request_timeout() => {}
            _ = stopped.wait_for(|s| *s) => {}
        }
    }

    /// Returns when answers are open and not a byte of them has moved for the server's patience.
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

impl Drop for ConnectionContext {
    fn drop(&mut self) {
        self.shared.connections.fetch_sub(1, Ordering::Relaxed);
        self.shared.transfers.leave(self.number);
    }
}
