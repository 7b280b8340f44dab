//! Where connections come from: the listening sockets, and the loops that accept.
//!
//! Without room for another connection nothing is accepted: connections then wait in the kernel's queue instead of in
//! the server's memory. Running out of descriptors is treated the same way, after ending one connection that has shown
//! nothing.

use std::future::poll_fn;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::ops::RangeInclusive;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use socket2::{Domain, Protocol, SockRef, Socket, Type};
use tokio::sync::{Semaphore, watch};

use super::Shared;
use super::connection::{serve_local, serve_network, serve_observer};
use super::connection_slots::{ConnectionSlots, Peer};
use crate::fork::CloseOnFork;
use crate::same_host;

/// The send buffer of a connection between two processes of this machine.
///
/// The kernel would let it grow to megabytes, since the other end takes bytes as fast as they come. Then they have left
/// the cache before they are read.
const OWN_MACHINE_BUFFER: usize = 256 << 10;
/// How many local connections may be ending at a time, beside those that hold a slot.
const ENDING: usize = 32;

/// How often another port is tried where the system picks one that is free at the first of several addresses only.
const PICKS: usize = 16;

/// A socket that listens for connections from the network.
pub(super) type Listener = CloseOnFork<tokio::net::TcpListener>;

/// Listens on the first port of `ports` that is free at all `addresses`, port 0 being any. Without an address, on all: on
/// one socket for both families where the system has IPv6, else on IPv4 alone. To be called on the runtime.
pub(super) fn listen(addresses: &[IpAddr], ports: &RangeInclusive<u16>) -> io::Result<Vec<Listener>> {
    let in_use = |e: &io::Error| e.kind() == io::ErrorKind::AddrInUse;
    let mut last = io::Error::from(io::ErrorKind::InvalidInput);
    let picks = if *ports.start() == 0 { PICKS } else { 1 };
    for port in ports.clone().flat_map(|port| std::iter::repeat_n(port, picks)) {
        let listening = match addresses {
            [] => match listen_on((Ipv6Addr::UNSPECIFIED, port).into()) {
                // IPv4 alone would listen beside whoever has the port.
                Err(e) if !in_use(&e) => listen_on((Ipv4Addr::UNSPECIFIED, port).into()),
                listening => listening,
            }
            .map(|listener| vec![listener]),
            [first, others @ ..] => listen_on((*first, port).into()).and_then(|first| {
                let port = first.local_addr()?.port();
                let others = others.iter().map(|&other| listen_on((other, port).into()));
                std::iter::once(Ok(first)).chain(others).collect()
            }),
        };
        match listening {
            Err(e) if in_use(&e) => last = e,
            listening => return listening,
        }
    }
    Err(last)
}

/// A TCP socket that listens on `address`, closed in forked children. An IPv6 wildcard takes IPv4, too.
fn listen_on(address: SocketAddr) -> io::Result<Listener> {
    CloseOnFork::make(|| {
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
}

/// The socket for processes of this machine. To be called on the runtime.
pub(super) fn listen_same_host(name: &same_host::Name) -> io::Result<CloseOnFork<tokio::net::UnixListener>> {
    CloseOnFork::make(|| tokio::net::UnixListener::from_std(name.listen()?))
}

/// Accepts connections from the network until the server stops. Each gets a task, or is closed if there is no slot.
pub(super) async fn accept_network(
    listener: Listener,
    shared: Arc<Shared>,
    slots: Arc<ConnectionSlots>,
    mut stopped: watch::Receiver<bool>,
) {
    while let Some(stream) = next(&slots, |context| listener.poll_accept(context), &mut stopped).await {
        let _ = stream.set_nodelay(true);
        let from = stream.peer_addr().map(|address| address.ip().to_canonical());
        if let (Ok(peer), Ok(own)) = (&from, stream.local_addr()) {
            bound_buffer(&SockRef::from(&*stream), *peer, own.ip().to_canonical());
        }
        if let Some(slot) = slots.enter(from.map_or(Peer::Unknown, Peer::Address)) {
            tokio::spawn(serve_network(stream, Arc::clone(&shared), slot, stopped.clone()));
        }
    }
}

/// Accepts connections to the port for figures until the server stops.
pub(super) async fn accept_observers(
    listener: Listener,
    shared: Arc<Shared>,
    slots: Arc<ConnectionSlots>,
    mut stopped: watch::Receiver<bool>,
) {
    while let Some(stream) = next(&slots, |context| listener.poll_accept(context), &mut stopped).await {
        let peer = stream.peer_addr().map_or(Peer::Unknown, |from| Peer::Address(from.ip().to_canonical()));
        if let Some(slot) = slots.enter(peer) {
            tokio::spawn(serve_observer(stream, Arc::clone(&shared), slot, stopped.clone()));
        }
    }
}

/// Bounds the send buffer of a connection from `peer` to `own`, our address, if it comes from this machine. Others need
/// as much as is on its way at a time, and the kernel finds out how much that is.
fn bound_buffer(socket: &SockRef<'_>, peer: IpAddr, own: IpAddr) {
    if peer == own || peer.is_loopback() {
        // With any other size it works as well.
        let _ = socket.set_send_buffer_size(OWN_MACHINE_BUFFER);
    }
}

/// Accepts connections from processes of this machine, until the server stops. Only those of our own user get a slot.
pub(super) async fn accept_local(
    listener: CloseOnFork<tokio::net::UnixListener>,
    shared: Arc<Shared>,
    slots: Arc<ConnectionSlots>,
    mut stopped: watch::Receiver<bool>,
) {
    // A connection that is to end has given up its slot already, and holds its thread and its memory a little longer.
    let seats = Arc::new(Semaphore::new(slots.total() + ENDING));
    loop {
        let seat = tokio::select! {
            seat = Arc::clone(&seats).acquire_owned() => seat,
            _ = stopped.wait_for(|s| *s) => return,
        };
        let Some(stream) = next(&slots, |context| listener.poll_accept(context), &mut stopped).await else { return };
        if let Ok(peer) = same_host::peer(&*stream)
            && peer.uid == same_host::own_user()
            && let Some(slot) = slots.enter(Peer::Process(peer.pid))
        {
            let serving = serve_local(stream, Arc::clone(&shared), slot, stopped.clone());
            tokio::spawn(async move {
                serving.await;
                drop(seat);
            });
        }
    }
}

/// The next connection that `poll_accept` gives, once there is room for it; `None` when the server stops.
async fn next<S: AsRawFd, A>(
    slots: &ConnectionSlots,
    mut poll_accept: impl FnMut(&mut Context<'_>) -> Poll<io::Result<(S, A)>>,
    stopped: &mut watch::Receiver<bool>,
) -> Option<CloseOnFork<S>> {
    let accepted = async {
        loop {
            // Without room, connections wait in the kernel's queue instead of in our memory.
            slots.wait_for_room().await;
            let accepting =
                poll_fn(|context| CloseOnFork::poll_make(|| poll_accept(context).map_ok(|(stream, _)| stream)));
            match accepting.await {
                Ok(stream) => return stream,
                Err(_) => recover(slots).await,
            }
        }
    };
    tokio::select! {
        stream = accepted => Some(stream),
        _ = stopped.wait_for(|s| *s) => None,
    }
}

/// Out of descriptors, or a peer that left while queued: ends a newcomer's connection and gives the system a moment.
async fn recover(slots: &ConnectionSlots) {
    slots.make_room();
    tokio::time::sleep(Duration::from_millis(20)).await;
}

#[cfg(test)]
#[allow(clippy::disallowed_methods, reason = "tests are peers")]
mod tests {
    use std::net::TcpStream;

    use super::*;

    #[test]
    fn the_send_buffer_is_bounded_to_this_machine_alone() {
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        let most: usize = std::fs::read_to_string("/proc/sys/net/core/wmem_max").unwrap().trim().parse().unwrap();
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        for (peer, own, bounded) in [
            ("127.0.0.1", "127.0.0.1", true),
            ("127.0.0.2", "127.0.0.1", true),
            ("::1", "::1", true),
            ("10.0.0.1", "10.0.0.1", true),
            ("10.0.0.2", "10.0.0.1", false),
            ("fe80::2", "fe80::1", false),
        ] {
            let _peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let (stream, _) = listener.accept().unwrap();
            let before = SockRef::from(&stream).send_buffer_size().unwrap();
            bound_buffer(&SockRef::from(&stream), ip(peer), ip(own));
            // The kernel counts its own part, too.
            let expected = if bounded { 2 * OWN_MACHINE_BUFFER.min(most) } else { before };
            assert_eq!(SockRef::from(&stream).send_buffer_size().unwrap(), expected, "{peer} to {own}");
        }
    }
}
