//! Where connections come from: the listening sockets, and the loops that accept.
//!
//! Without room for another connection nothing is accepted: connections then wait in the kernel's queue instead of in
//! the server's memory. Running out of descriptors is treated the same way, after ending one connection that has shown
//! nothing.

use std::future::poll_fn;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use socket2::{Domain, Protocol, Socket, Type};
use tokio::sync::{Semaphore, watch};

use super::Shared;
use super::connection::{serve_local, serve_network};
use super::places::{Origin, Places};
use crate::fork::Unshared;
use crate::same_host;

/// How many local connections may be ending at a time, beside those that hold a place.
const ENDING: usize = 32;

/// One socket for both families where the system has IPv6, else IPv4 alone. To be called on the runtime.
pub(super) fn listen(bind: Option<SocketAddr>) -> io::Result<Unshared<tokio::net::TcpListener>> {
    let listen_on = |address: SocketAddr| {
        Unshared::make(|| {
            let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
            if address.is_ipv6() {
                socket.set_only_v6(false)?;
            }
            socket.set_reuse_address(true)?;
            socket.set_nonblocking(true)?;
            socket.bind(&address.into())?;
            socket.listen(1024)?;
            tokio::net::TcpListener::from_std(TcpListener::from(socket))
        })
    };
    match bind {
        Some(address) => listen_on(address),
        None => listen_on((Ipv6Addr::UNSPECIFIED, 0).into()).or_else(|_| listen_on((Ipv4Addr::UNSPECIFIED, 0).into())),
    }
}

/// The socket for processes of this machine. To be called on the runtime.
pub(super) fn listen_same_host(name: &same_host::Name) -> io::Result<Unshared<tokio::net::UnixListener>> {
    Unshared::make(|| tokio::net::UnixListener::from_std(name.listen()?))
}

/// Accepts connections from the network until the server stops. Every connection gets a task.
pub(super) async fn accept_network(
    listener: Unshared<tokio::net::TcpListener>,
    shared: Arc<Shared>,
    places: Arc<Places>,
    mut stopped: watch::Receiver<bool>,
) {
    loop {
        let accepting =
            poll_fn(|context| Unshared::poll_make(|| listener.poll_accept(context).map_ok(|(stream, _)| stream)));
        match next(&places, accepting, &mut stopped).await {
            Some(Ok(stream)) => {
                let _ = stream.set_nodelay(true);
                let from = stream.peer_addr().map(|address| Origin::Address(address.ip().to_canonical()));
                if let Some(place) = places.enter(from.unwrap_or(Origin::Unknown)) {
                    tokio::spawn(serve_network(stream, Arc::clone(&shared), place, stopped.clone()));
                }
            }
            Some(Err(_)) => recover(&places).await,
            None => return,
        }
    }
}

/// The same for processes of this machine. Only those of our own user get a place.
pub(super) async fn accept_local(
    listener: Unshared<tokio::net::UnixListener>,
    shared: Arc<Shared>,
    places: Arc<Places>,
    mut stopped: watch::Receiver<bool>,
) {
    // A connection that is to end has given up its place already, and holds its thread and its memory a little longer.
    let seats = Arc::new(Semaphore::new(places.total() + ENDING));
    loop {
        let seat = tokio::select! {
            seat = Arc::clone(&seats).acquire_owned() => seat,
            _ = stopped.wait_for(|s| *s) => return,
        };
        let accepting =
            poll_fn(|context| Unshared::poll_make(|| listener.poll_accept(context).map_ok(|(stream, _)| stream)));
        match next(&places, accepting, &mut stopped).await {
            Some(Ok(stream)) => {
                if let Ok(peer) = same_host::peer(&*stream)
                    && peer.uid == same_host::own_user()
                    && let Some(place) = places.enter(Origin::Process(peer.pid))
                {
                    let serving = serve_local(stream, Arc::clone(&shared), place, stopped.clone());
                    tokio::spawn(async move {
                        serving.await;
                        drop(seat);
                    });
                }
            }
            Some(Err(_)) => recover(&places).await,
            None => return,
        }
    }
}

/// The next connection, once there is room for it; `None` when the server stops.
async fn next<S>(
    places: &Places,
    accepting: impl Future<Output = io::Result<S>>,
    stopped: &mut watch::Receiver<bool>,
) -> Option<io::Result<S>> {
    let accepted = async {
        // Without room, connections wait in the kernel's queue instead of in our memory.
        places.room().await;
        accepting.await
    };
    tokio::select! {
        accepted = accepted => Some(accepted),
        _ = stopped.wait_for(|s| *s) => None,
    }
}

/// Out of descriptors, or a peer that left while queued: gives the system a moment.
async fn recover(places: &Places) {
    places.make_room();
    tokio::time::sleep(Duration::from_millis(20)).await;
}
