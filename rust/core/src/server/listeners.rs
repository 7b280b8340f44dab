//! Where connections come from: the listening sockets, and the loop that accepts.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use socket2::{Domain, Protocol, Socket, Type};
use tokio::sync::{Semaphore, watch};

use super::Shared;
use super::connection::{serve_local, serve_network};
use crate::error::Error;
use crate::{random, same_host};

/// Connections of this machine at once: each has a thread and shared memory of its own.
const MAX_LOCAL: usize = 32;

/// One socket for both families where the system has IPv6, else IPv4 alone.
pub(super) fn listen(bind: Option<SocketAddr>) -> io::Result<TcpListener> {
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
pub(super) fn listen_same_host() -> Result<Option<(same_host::Name, std::os::unix::net::UnixListener)>, Error> {
    let name = same_host::Name::new(&random::token()?);
    Ok(name.listen().ok().map(|listener| (name, listener)))
}

/// The sockets a server listens on.
pub(super) struct Listeners {
    pub(super) tcp: tokio::net::TcpListener,
    pub(super) local: Option<tokio::net::UnixListener>,
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

/// Accepts until the server stops. Every connection gets a task.
pub(super) async fn accept(
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
