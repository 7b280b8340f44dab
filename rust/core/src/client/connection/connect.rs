//! Connecting, within the limits of a transfer: TCP, TLS over it, and a socket of this machine.
//!
//! A connection attempt waits in short steps, so that a cancellation is noticed while a host does not answer at all.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use socket2::{Domain, Protocol, Socket, Type};

use super::body::Ring;
use super::session::Session;
use super::{Connection, is_timeout};
use crate::client::limits::Limits;
use crate::client::url::SourceUrl;
use crate::client::{resolver, routes};
use crate::error::{Error, ErrorKind};
use crate::fork::CloseOnFork;
use crate::same_host::{self, GREETING, ring::RingReader};

/// How often a thread that waits for a connection looks whether it was cancelled.
const CANCEL_POLL: Duration = Duration::from_millis(50);
/// How long an address is waited for before the next one is tried beside it, as RFC 8305 recommends; and where it is not
/// known to be reached at all.
const HEAD_START: Duration = Duration::from_millis(250);
const SHORT_START: Duration = Duration::from_millis(20);
/// How long a name server is waited for where there are addresses to be tried beside it.
const LOOKUP: Duration = Duration::from_millis(250);
/// How long a TLS handshake may take where there is another address, the first time.
const HANDSHAKE: Duration = Duration::from_secs(2);
/// How long a source on this machine may take to greet us, before we go to it over the network.
const HELLO: Duration = Duration::from_millis(500);

impl Connection {
    /// Connects to the source at `url` by one of its addresses. Those that do not answer at once are tried beside each
    /// other; one at which a TLS handshake fails makes room for the next.
    pub(crate) fn open(url: &Arc<SourceUrl>, limits: &Limits) -> Result<Self, Error> {
        let targets = url.targets();
        let mut tried = Vec::new();
        loop {
            let (stream, address) = reach(url, limits)?;
            let at = address.ip().to_canonical();
            let connection = Self::over(stream, url, limits);
            if url.tls().is_none() {
                return Ok(connection);
            }
            match connection.in_hurry(HANDSHAKE).secured() {
                Err(e) if limits.left().is_ok() && !tried.contains(&at) && targets.are_several() => {
                    targets.note_error(at, &e);
                    tried.push(at);
                    let is_tried = |other: &SocketAddr| tried.contains(&other.ip().to_canonical());
                    if targets.knows_host() && targets.in_order().iter().all(is_tried) {
                        return Err(e);
                    }
                }
                result => return result.map(|connection| connection.within(limits)),
            }
        }
    }

    /// Connects to the source at `url` at one address, from one of ours or from any.
    pub(crate) fn open_at(
        url: &Arc<SourceUrl>,
        (from, there): (Option<IpAddr>, SocketAddr),
        limits: &Limits,
    ) -> Result<Self, Error> {
        let mut race = Race { from, ..Race::new(limits) };
        race.enter([(there, false)]);
        match race.run(None)? {
            Some((stream, _)) => Self { at: Some((from, there)), ..Self::over(stream, url, limits) }.secured(),
            None => Err(refused(&there.to_string(), race.failed.unwrap_or_else(|| io::ErrorKind::NotConnected.into()))),
        }
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
        let mut connection = Self::over(Arc::new(stream), url, limits);
        (&*connection.stream).write_all(GREETING)?;
        let reader = RingReader::receive(&*connection.stream)?;
        connection.ring = Some(Ring { reader, announced: 0, in_use: false });
        Ok(connection)
    }

    /// The same connection after the TLS handshake, where the source wants one.
    fn secured(mut self) -> Result<Self, Error> {
        let Some(config) = self.url.tls() else { return Ok(self) };
        let mut session = Session::new(config)?;
        self.wait_at_most(self.stall())?;
        // As a whole: a peer can drip a handshake for ever.
        let limits = self.limits.at_most(self.stall());
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
                let waited = self.stall().as_secs_f64();
                Error::new(ErrorKind::Timeout, format!("timed out: no TLS handshake with {peer} within {waited:.3} s"))
            }
            None => self.io_error(e),
        }
    }
}

/// A connected socket to the source at `url`, and its address there: the first of them that answers.
///
/// Where the URL prefers a card, its host is looked up only if that does not answer, and no other address waits for a name
/// server that is silent.
fn reach(url: &SourceUrl, limits: &Limits) -> Result<Connected, Error> {
    let targets = url.targets();
    let mut race = Race::new(limits);
    let mut won = None;
    let mut is_looked_up = targets.knows_host();
    if !is_looked_up {
        if let Some(card) = targets.preferred() {
            race.enter([(card, true)]);
            won = race.run(Some(head_start(card.ip())))?;
        }
        if won.is_none() {
            let brief = if targets.in_order().is_empty() { limits.clone() } else { limits.at_most(LOOKUP) };
            is_looked_up = look_up(url, &brief, limits, &mut race)?;
        }
    }
    if won.is_none() {
        race.enter(targets.in_order().into_iter().map(|address| (address, !targets.is_host(address.ip()))));
        won = race.run(None)?;
    }
    if won.is_none() && !is_looked_up && look_up(url, limits, limits, &mut race)? {
        race.enter(targets.in_order().into_iter().map(|address| (address, false)));
        won = race.run(None)?;
    }
    let Some((stream, address)) = won else {
        let failed = race.failed.take();
        let failed = failed.unwrap_or_else(|| io::Error::new(io::ErrorKind::NotFound, "the name has no address"));
        return Err(refused(url.authority(), failed));
    };
    race.begun_with.retain(|other| *other != address);
    targets.note_connected(address.ip().to_canonical(), &race.begun_with);
    Ok((stream, address))
}

/// Looks up where the host of `url` is, within `brief`; says whether that came to an end.
fn look_up(url: &SourceUrl, brief: &Limits, limits: &Limits, race: &mut Race<'_>) -> Result<bool, Error> {
    match resolver::addresses(url.host(), url.port(), brief) {
        Ok(Ok(found)) => url.targets().learn_host(found),
        Ok(Err(e)) => race.failed = Some(e),
        Err(e) if e.is_timeout() && brief.deadline < limits.deadline && limits.left().is_ok() => return Ok(false),
        Err(e) => return Err(e),
    }
    Ok(true)
}

/// How long a card is waited for before another address is tried beside it. Where a gateway is on the way, it may not lead
/// there at all.
fn head_start(card: IpAddr) -> Duration {
    if routes::route(card, None).is_some_and(|route| route.direct) { HEAD_START } else { SHORT_START }
}

/// The error for a connection to `peer` that could not be made.
fn refused(peer: &str, e: io::Error) -> Error {
    if matches!(e.raw_os_error(), Some(libc::EMFILE | libc::ENFILE)) {
        let message = format!("cannot connect to {peer}: no file descriptor is left here (ulimit -n)");
        return Error::caused(ErrorKind::System, message, e);
    }
    Error::caused(ErrorKind::Connect, format!("cannot connect to {peer}"), e)
}

/// Connection attempts of which the first that succeeds counts (RFC 8305). None blocks for longer than it takes to
/// notice a cancellation, and a host that does not answer at all counts as stuck after the stall limit.
struct Race<'a> {
    limits: &'a Limits,
    /// The address of this host from which they are made, if not the kernel's choice.
    from: Option<IpAddr>,
    /// Those that are still to be made, and whether each is to a card.
    waiting: VecDeque<(SocketAddr, bool)>,
    /// To which addresses they were made so far.
    begun_with: Vec<SocketAddr>,
    /// How long one is waited for before the next one is begun.
    stagger: Duration,
    under_way: Vec<Attempt>,
    /// When the last one was begun.
    begun: Option<Instant>,
    /// The last failure.
    failed: Option<io::Error>,
}

/// A socket that is connected, and to where.
type Connected = (Arc<CloseOnFork<Socket>>, SocketAddr);

struct Attempt {
    socket: Arc<CloseOnFork<Socket>>,
    address: SocketAddr,
    started: Instant,
}

impl<'a> Race<'a> {
    fn new(limits: &'a Limits) -> Self {
        Self {
            limits,
            from: None,
            waiting: VecDeque::new(),
            begun_with: Vec::new(),
            stagger: Duration::ZERO,
            under_way: Vec::new(),
            begun: None,
            failed: None,
        }
    }

    /// Adds attempts to addresses to which none was made yet; each begins when the one before has had its head start.
    fn enter(&mut self, addresses: impl IntoIterator<Item = (SocketAddr, bool)>) {
        let begun_with = &self.begun_with;
        self.waiting.extend(addresses.into_iter().filter(|(address, _)| !begun_with.contains(address)));
        self.begun = None;
    }

    /// The first that succeeds, within `at_most`; `None` if none has. The error ends the whole transfer.
    fn run(&mut self, at_most: Option<Duration>) -> Result<Option<Connected>, Error> {
        let started = Instant::now();
        loop {
            let due = self.under_way.is_empty() || self.begun.is_none_or(|begun| begun.elapsed() >= self.stagger);
            if due && let Some((address, is_card)) = self.waiting.pop_front() {
                self.begun = Some(Instant::now());
                self.begun_with.push(address);
                match self.begin(address) {
                    Ok((socket, true)) => return Ok(Some((socket, address))),
                    Ok((socket, false)) => {
                        self.stagger = if is_card { head_start(address.ip()) } else { HEAD_START };
                        self.under_way.push(Attempt { socket, address, started: Instant::now() });
                    }
                    Err(e) => self.failed = Some(e),
                }
                continue;
            }
            let Some(first) = self.under_way.first() else {
                if self.limits.cancel.is_cancelled() {
                    self.limits.left()?;
                }
                return Ok(None);
            };
            let (address, since) = (first.address, first.started.elapsed());
            let unanswered =
                || format!("{address} has not answered a connection attempt for {:.3} s", since.as_secs_f64());
            let left = self.limits.left().map_err(|over| over.waiting_for(unanswered))?;
            if since >= self.limits.stall {
                let message = format!("timed out: {}", unanswered());
                self.failed = Some(io::Error::new(io::ErrorKind::TimedOut, message));
                self.under_way.remove(0);
                continue;
            }
            let mut wait = left.min(CANCEL_POLL).min(self.limits.stall.saturating_sub(since));
            if let Some(most) = at_most {
                let Some(rest) = most.checked_sub(started.elapsed()).filter(|rest| !rest.is_zero()) else {
                    return Ok(None);
                };
                wait = wait.min(rest);
            }
            if let (false, Some(begun)) = (self.waiting.is_empty(), self.begun) {
                wait = wait.min(self.stagger.saturating_sub(begun.elapsed()));
            }
            if let Some(won) = self.poll(wait) {
                return Ok(Some(won));
            }
        }
    }

    /// Waits for at most `wait` until one has succeeded; those that fail are dropped.
    fn poll(&mut self, wait: Duration) -> Option<Connected> {
        let polled =
            |attempt: &Attempt| libc::pollfd { fd: attempt.socket.as_raw_fd(), events: libc::POLLOUT, revents: 0 };
        let mut polls: Vec<_> = self.under_way.iter().map(polled).collect();
        let millis = i32::try_from(wait.as_micros().div_ceil(1000)).unwrap_or(i32::MAX).max(1);
        let count = libc::nfds_t::try_from(polls.len()).unwrap_or(0);
        // SAFETY: as many valid pollfds as the count says.
        if unsafe { libc::poll(polls.as_mut_ptr(), count, millis) } <= 0 {
            return None;
        }
        for index in (0..polls.len()).rev().filter(|&index| polls[index].revents != 0) {
            let Attempt { socket, address, .. } = self.under_way.remove(index);
            match finish(&socket) {
                Ok(()) => return Some((socket, address)),
                Err(e) => self.failed = Some(e),
            }
        }
        None
    }

    /// Begins an attempt; says whether it has succeeded already.
    #[allow(clippy::disallowed_methods, reason = "the one place")]
    fn begin(&self, address: SocketAddr) -> io::Result<(Arc<CloseOnFork<Socket>>, bool)> {
        let mut connected = true;
        let socket = CloseOnFork::make(|| {
            let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
            socket.set_nonblocking(true)?;
            if let Some(from) = self.from {
                socket.bind(&SocketAddr::from((from, 0)).into())?;
            }
            match socket.connect(&address.into()) {
                Err(e) if e.raw_os_error() == Some(libc::EINPROGRESS) => connected = false,
                result => result?,
            }
            Ok(socket)
        })?;
        let socket = Arc::new(socket);
        // From here on a cancellation ends the wait at once.
        self.limits.cancel.watch(&socket);
        if connected {
            finish(&socket)?;
        }
        Ok((socket, connected))
    }
}

/// Prepares a socket for use whose connection attempt is over.
fn finish(socket: &Socket) -> io::Result<()> {
    if let Some(e) = socket.take_error()? {
        return Err(e);
    }
    // One that a cancellation has shut down has no error.
    socket.peer_addr()?;
    socket.set_nonblocking(false)?;
    socket.set_tcp_nodelay(true)
}
