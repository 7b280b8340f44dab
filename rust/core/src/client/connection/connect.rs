//! Connecting, within the limits of a transfer: TCP, TLS over it, and a socket of this machine.
//!
//! A connection attempt waits in short steps, so that a cancellation is noticed while a host does not answer at all.

use std::io::{self, Write};
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use socket2::{Domain, Protocol, Socket, Type};

use super::body::Ring;
use super::session::Session;
use super::{Connection, is_timeout};
use crate::client::limits::Limits;
use crate::client::resolver;
use crate::client::url::SourceUrl;
use crate::error::{Error, ErrorKind};
use crate::fork::CloseOnFork;
use crate::same_host::{self, GREETING, ring::RingReader};

/// How often a thread that waits for a connection looks whether it was cancelled.
const CANCEL_POLL: Duration = Duration::from_millis(50);
/// How long a source on this machine may take to greet us, before we go to it over the network.
const HELLO: Duration = Duration::from_millis(500);

impl Connection {
    /// Connects to the source at `url`, trying each of its addresses.
    pub(crate) fn open(url: &Arc<SourceUrl>, limits: &Limits) -> Result<Self, Error> {
        let failed = |e| refused(url.authority(), e);
        let addresses = match url.addresses() {
            Some(known) => known.to_vec(),
            None => resolver::addresses(url.host(), url.port(), limits)?.map_err(failed)?,
        };
        let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
        for &address in &addresses {
            match connect(address, limits)? {
                Ok(stream) => {
                    url.learn(&addresses);
                    return Self::over(stream, url, limits).secured();
                }
                Err(e) => last = e,
            }
        }
        Err(failed(last))
    }

    /// Connects to the source at `url` by its other `address`.
    pub(crate) fn open_at(url: &Arc<SourceUrl>, address: SocketAddr, limits: &Limits) -> Result<Self, Error> {
        let stream = connect(address, limits)?.map_err(|e| refused(&address.to_string(), e))?;
        Self { at: Some(address), ..Self::over(stream, url, limits) }.secured()
    }

    /// Connects to the source at `url` under the `name` it has on this machine.
    pub(crate) fn open_same_host(
        url: &Arc<SourceUrl>,
        name: &same_host::Name,
        limits: &Limits,
    ) -> Result<Self, io::Error> {
        let left = limits.left().map_err(|_| io::ErrorKind::TimedOut)?;
        let stream = CloseOnFork::make(|| name.connect())?;
        stream.set_read_timeout(Some(HELLO.min(limits.stall).min(left)))?;
        // From here on a cancellation ends the wait, too.
        let mut connection = Self::over(stream, url, limits);
        (&*connection.stream).write_all(GREETING)?;
        let reader = RingReader::receive(&*connection.stream)?;
        connection.ring = Some(Ring { reader, announced: 0, in_use: false });
        Ok(connection)
    }

    /// The same connection after the TLS handshake, where the source wants one.
    fn secured(mut self) -> Result<Self, Error> {
        let Some(config) = self.url.tls() else { return Ok(self) };
        let mut session = Session::new(config)?;
        self.wait_at_most(self.limits.stall)?;
        // As a whole: a peer can drip a handshake for ever.
        let limits = self.limits.at_most(self.limits.stall);
        match session.shake_hands(&self.stream, &limits, &mut self.timeout) {
            Ok(()) => {
                self.tls = Some(Box::new(session));
                Ok(self)
            }
            Err(e) => Err(self.refused_handshake(&e)),
        }
    }

    /// The error for a TLS handshake that failed with `e`.
    fn refused_handshake(&self, e: &io::Error) -> Error {
        let peer = self.url.authority();
        match e.get_ref().and_then(|inner| inner.downcast_ref()) {
            Some(rustls::Error::InvalidCertificate(why)) => {
                let why = match why {
                    rustls::CertificateError::Other(why) => why.to_string(),
                    why => format!("its certificate is not valid: {why}"),
                };
                Error::new(ErrorKind::Unproven, format!("{peer} is not the source its URL names: {why}"))
            }
            Some(why) => self.protocol(format!("it does not speak TLS as its URL says: {why}")),
            None if self.limits.left().is_ok() && is_timeout(e) => {
                let waited = self.limits.stall.as_secs_f64();
                Error::new(ErrorKind::Timeout, format!("timed out: no TLS handshake with {peer} within {waited:.3} s"))
            }
            None => self.broken(e),
        }
    }
}

/// The error for a connection to `peer` that could not be made.
fn refused(peer: &str, e: io::Error) -> Error {
    if matches!(e.raw_os_error(), Some(libc::EMFILE | libc::ENFILE)) {
        let message = format!("cannot connect to {peer}: no file descriptor is left here (ulimit -n)");
        return Error::caused(ErrorKind::System, message, e);
    }
    Error::caused(ErrorKind::Connect, format!("cannot connect to {peer}"), e)
}

/// Connects without blocking longer than it takes to notice a cancellation. A host that does not answer at all counts
/// as stuck after the stall limit. The outer error ends the whole transfer, the inner one only this address.
fn connect(address: SocketAddr, limits: &Limits) -> Result<io::Result<CloseOnFork<Socket>>, Error> {
    let mut connected = true;
    let start = || {
        let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
        socket.set_nonblocking(true)?;
        match socket.connect(&address.into()) {
            Err(e) if e.raw_os_error() == Some(libc::EINPROGRESS) => connected = false,
            result => result?,
        }
        Ok(socket)
    };
    let socket = match CloseOnFork::make(start) {
        Ok(started) => started,
        Err(e) => return Ok(Err(e)),
    };
    let started = Instant::now();
    while !connected {
        let waited = started.elapsed();
        let unanswered =
            || format!("{address} has not answered a connection attempt for {:.3} s", waited.as_secs_f64());
        let left = limits.left().map_err(|over| over.waiting_for(unanswered))?;
        if waited >= limits.stall {
            return Ok(Err(io::Error::new(io::ErrorKind::TimedOut, format!("timed out: {}", unanswered()))));
        }
        let left = left.min(CANCEL_POLL);
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
