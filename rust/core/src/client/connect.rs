//! Making a connection, within the limits of its transfer.

use std::io;
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use socket2::{Domain, Protocol, Socket, Type};

use super::limits::Limits;
use crate::error::{Error, ErrorKind};

/// How often a thread that waits for a connection looks whether it was cancelled.
const CANCEL_POLL: Duration = Duration::from_millis(50);

/// The error for a connection to `peer` that could not be made.
pub(super) fn refused(peer: &str, e: io::Error) -> Error {
    if matches!(e.raw_os_error(), Some(libc::EMFILE | libc::ENFILE)) {
        let message = format!("cannot connect to {peer}: no file descriptor is left here (ulimit -n)");
        return Error::caused(ErrorKind::System, message, e);
    }
    Error::caused(ErrorKind::Connect, format!("cannot connect to {peer}"), e)
}

/// Connects without blocking longer than it takes to notice a cancellation. A host that does not answer at all counts as
/// stuck after the stall limit. The outer error ends the whole transfer, the inner one only this address.
pub(super) fn connect(address: SocketAddr, limits: &Limits) -> Result<io::Result<Socket>, Error> {
    let start = || {
        let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
        socket.set_nonblocking(true)?;
        match socket.connect(&address.into()) {
            Ok(()) => Ok((socket, true)),
            Err(e) if e.raw_os_error() == Some(libc::EINPROGRESS) => Ok((socket, false)),
            Err(e) => Err(e),
        }
    };
    let (socket, mut connected) = match start() {
        Ok(started) => started,
        Err(e) => return Ok(Err(e)),
    };
    let started = Instant::now();
    while !connected {
        let left = limits.left()?.min(CANCEL_POLL);
        if started.elapsed() >= limits.stall {
            return Ok(Err(io::ErrorKind::TimedOut.into()));
        }
        let mut poll = libc::pollfd { fd: socket.as_raw_fd(), events: libc::POLLOUT, revents: 0 };
        let millis = i32::try_from(left.as_millis()).unwrap_or(i32::MAX).max(1);
        // SAFETY: one valid pollfd, and the count says so.
        connected = unsafe { libc::poll(&raw mut poll, 1, millis) } > 0;
    }
    let finish = || {
        if let Some(e) = socket.take_error()? {
            return Err(e);
        }
        socket.set_nonblocking(false)?;
        socket.set_tcp_nodelay(true)?;
        Ok(socket)
    };
    Ok(finish())
}
