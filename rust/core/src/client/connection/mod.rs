//! One blocking HTTP/1.1 connection to a source.
//!
//! The head of an answer is parsed here and the payload is received straight into its place: measured faster than
//! reading bodies through an asynchronous client.
//!
//! Invariants:
//!
//! * no call blocks longer than the limits allow; the socket's timeout is set before each;
//! * a connection is used again only when the last answer was read to its end and did not close it;
//! * an answer with a `Transfer-Encoding`, two lengths or an overlong head is refused: there is one way to read each
//!   answer.

mod body;
mod connect;
mod head;
mod session;

use std::io::{self, IoSliceMut, Read, Write};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::Duration;

use socket2::Socket;
use tensorferry_wire::proof::{self, Nonce};

use self::body::Ring;
use self::head::ParsedHead;
pub(crate) use self::head::{Head, Offers};
use self::session::Session;
use super::limits::{Limits, StallDetector};
use super::url::SourceUrl;
use crate::error::{Error, ErrorKind, Hint};
use crate::fork::CloseOnFork;
use crate::trust::random;

/// A response head longer than this is refused.
const MAX_HEAD: usize = 16 << 10;
/// Where the kernel's `struct tcp_info` has the shortest round trip, in microseconds; the libc crate's ends before it.
const MIN_RTT: usize = 148;
/// The most answers of a status below 200 before the one that counts.
const MOST_INTERIM: u32 = 100;

/// How far a source has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Connected,
    Asked,
    Answering,
}

/// A connection that is between two answers, or in the body of one.
pub(crate) struct Connection {
    stream: Arc<CloseOnFork<Socket>>,
    tls: Option<Box<Session>>,
    url: Arc<SourceUrl>,
    /// The address at the other end, if it goes over the network.
    peer: Option<SocketAddr>,
    /// The addresses at both ends, where they are not those that the URL leads to.
    at: Option<(Option<IpAddr>, SocketAddr)>,
    limits: Limits,
    /// How long it may be silent where another address would be tried; the limits count for a source that copies.
    hurry: Option<Duration>,
    /// Bytes received behind the last head that belong to the body.
    ahead: Vec<u8>,
    taken: usize,
    /// Body bytes not yet read.
    remaining: u64,
    reusable: bool,
    /// Whether the source had not yet copied all of the body when it began to send it.
    filling: bool,
    /// Whether it was so for any answer.
    copying: bool,
    timeout: Option<Duration>,
    /// The last thing the source did, for the message when nothing more comes.
    stage: Stage,
    stall_detector: StallDetector,
    /// The memory shared with a source on this machine.
    ring: Option<Ring>,
    /// The nonce and the path of the last request, where there is a secret to prove.
    asked: Option<(Nonce, String)>,
}

/// The most characters of a source's refusal that a message repeats.
const MAX_SAID: usize = 2000;

impl Connection {
    /// A connection over `stream`, on which nothing was sent yet. What cancels `limits` ends it.
    pub(super) fn over(stream: Arc<CloseOnFork<Socket>>, url: &Arc<SourceUrl>, limits: &Limits) -> Self {
        limits.cancel.watch(&stream);
        Self {
            peer: stream.peer_addr().ok().and_then(|peer| peer.as_socket()),
            stream,
            tls: None,
            url: Arc::clone(url),
            at: None,
            limits: limits.clone(),
            hurry: None,
            ahead: Vec::new(),
            taken: 0,
            remaining: 0,
            reusable: true,
            filling: false,
            timeout: None,
            copying: false,
            stage: Stage::Connected,
            stall_detector: StallDetector::default(),
            ring: None,
            asked: None,
        }
    }

    /// Whether this connection does without the network.
    pub(crate) fn is_same_host(&self) -> bool {
        self.ring.is_some()
    }

    /// The addresses on both ends, if it goes over the network.
    pub(crate) fn route(&self) -> Option<(IpAddr, IpAddr)> {
        let here = self.stream.local_addr().ok()?.as_socket()?.ip();
        let there = self.stream.peer_addr().ok()?.as_socket()?.ip();
        Some((here.to_canonical(), there.to_canonical()))
    }

    /// The socket, with which another thread can end this connection.
    pub(crate) fn socket(&self) -> &Arc<CloseOnFork<Socket>> {
        &self.stream
    }

    pub(crate) fn url(&self) -> &Arc<SourceUrl> {
        &self.url
    }

    /// Whether another request may be sent on this connection.
    pub(crate) fn is_reusable(&self) -> bool {
        self.reusable && self.remaining == 0
    }

    /// Sends one GET for `path` and reads the head of the answer, on a new connection where this one cannot be used
    /// again: the last answer ended it, or was not read to its end. `path` is below the source's prefix unless it
    /// begins with a slash. `patience` is how long the answer may take to begin: a source that has nothing to serve yet
    /// keeps the request waiting.
    pub(crate) fn get(
        &mut self,
        path: &str,
        range: Option<(u64, u64)>,
        if_match: Option<&str>,
        patience: Option<Duration>,
    ) -> Result<Head, Error> {
        self.send(path, range, if_match)?;
        self.stage = Stage::Asked;
        let head = self.read_head(patience)?;
        self.stage = Stage::Answering;
        self.remaining = head.content_length.unwrap_or(0);
        let here = (self.ahead.len() - self.taken) as u64;
        if !head.in_ring && head.content_length.is_some_and(|length| length < here) {
            return Err(self.protocol("it sent more than its answer has"));
        }
        self.filling = head.filling;
        self.copying |= head.filling;
        self.reusable = head.keep_alive && head.content_length.is_some();
        match &mut self.ring {
            Some(ring) => ring.in_use = head.in_ring,
            None if head.in_ring => return Err(self.protocol("it answers through memory that it does not share")),
            None => {}
        }
        Ok(head)
    }

    /// Sends a GET; over a new connection where this one cannot be used again.
    fn send(&mut self, path: &str, range: Option<(u64, u64)>, if_match: Option<&str>) -> Result<(), Error> {
        use std::fmt::Write as _;
        if !self.is_reusable() {
            // The last answer announced that it ends the connection, or was not read to its end.
            let opened = match self.at {
                Some(pair) => Self::open_at(&self.url, pair, &self.limits)?,
                None => Self::open(&self.url, &self.limits)?,
            };
            *self = Self { hurry: self.hurry, copying: self.copying, ..opened };
        }
        let path = if path.starts_with('/') { path.to_owned() } else { format!("{}{path}", self.url.prefix()) };
        let range = range.map(|(start, end)| format!("bytes={start}-{}", end - 1));
        let mut request = format!(
            "GET {path} HTTP/1.1\r\nHost: {}\r\nUser-Agent: tensorferry/{}\r\n",
            self.url.authority(),
            env!("CARGO_PKG_VERSION"),
        );
        if let Some(range) = &range {
            let _ = write!(request, "Range: {range}\r\n");
        }
        if let Some(etag) = if_match {
            let _ = write!(request, "If-Match: {etag}\r\n");
        }
        if let Some(secret) = self.url.secret() {
            let nonce: Nonce = random::bytes()?;
            let signed = proof::SignedRequest { method: "GET", path: &path, range: range.as_deref(), if_match };
            let _ = write!(request, "Authorization: {}\r\n", secret.key().sign_request(&signed, &nonce));
            self.asked = Some((nonce, path));
        }
        request.push_str("\r\n");
        (self.reusable, self.filling, self.stage) = (false, false, Stage::Connected);
        self.stall_detector = StallDetector::default();
        self.wait_at_most(self.stall())?;
        let sent = match &mut self.tls {
            None => (&*self.stream).write_all(request.as_bytes()),
            Some(tls) => tls.write_all(&self.stream, &self.limits, &mut self.timeout, request.as_bytes()),
        };
        sent.map_err(|e| self.io_error(&e))
    }

    /// Receives and parses the head of an answer, interim answers before it included; keeps what came behind it.
    fn read_head(&mut self, patience: Option<Duration>) -> Result<Head, Error> {
        let mut buffer = vec![0_u8; MAX_HEAD];
        let mut filled = 0;
        let mut interim = 0;
        loop {
            match ParsedHead::read(&buffer[..filled]).map_err(|what| self.protocol(what))? {
                ParsedHead::Complete(head, length) => {
                    buffer.truncate(filled);
                    self.ahead = buffer;
                    self.taken = length;
                    return Ok(head);
                }
                ParsedHead::Interim(length) => {
                    // Maybe with the next one right behind it.
                    buffer.copy_within(length..filled, 0);
                    filled -= length;
                    interim += 1;
                    if interim > MOST_INTERIM {
                        return Err(self.protocol("it sends interim answers without end"));
                    }
                    self.limits.left()?;
                }
                ParsedHead::Partial if filled < MAX_HEAD => {
                    if filled > 0 {
                        self.stage = Stage::Answering;
                    }
                    // A source may take long to begin its answer, not to go on with it.
                    self.wait_at_most(patience.filter(|_| filled == 0).unwrap_or_else(|| self.stall()))?;
                    filled += self.receive(&mut [IoSliceMut::new(&mut buffer[filled..])])?;
                }
                ParsedHead::Partial => {
                    return Err(self.protocol(format!("its answer's head is longer than {MAX_HEAD} bytes")));
                }
            }
        }
    }

    /// Checks that the sender of `body`, the answer to the last request, knows the secret, where there is one.
    pub(crate) fn check_proof(&self, head: &Head, body: &[u8]) -> Result<(), Error> {
        let (Some(secret), Some((nonce, path))) = (self.url.secret(), &self.asked) else { return Ok(()) };
        let etag = head.etag.as_deref().unwrap_or("");
        let answer = proof::SignedAnswer { nonce, path, etag, body };
        match &head.proof {
            Some(proof) if secret.key().verify_answer(&answer, proof) => Ok(()),
            Some(_) => Err(Error::new(
                ErrorKind::Unproven,
                "the source's proof of the shared secret is wrong: it has another secret, or somebody in between \
                 changed what it said",
            )),
            None => Err(Error::new(
                ErrorKind::Unproven,
                "the source does not prove that it knows the shared secret: it was started without one, or somebody \
                 else answers at its address",
            )
            .hinting(Hint::SecretForSource)),
        }
    }

    /// Turns an answer that is not what was asked for into an error.
    pub(crate) fn refuse(&mut self, head: &Head) -> Error {
        let detail = self.body(head, 64 << 10).unwrap_or_default();
        let detail = String::from_utf8_lossy(&detail);
        let detail = printable(if detail.trim().is_empty() { head.reason.as_str() } else { detail.trim() });
        let kind = match head.status {
            412 => ErrorKind::Changed,
            // The source has no room for another connection now. Like a connection that cannot be made, that may be
            // over a moment later or be otherwise elsewhere, so it is tried again, while other refusals by status are
            // the source's answer and stay.
            503 if head.retry_after.is_some() => ErrorKind::Connect,
            status => ErrorKind::Status(status),
        };
        if head.status == 404 && detail == "not found" {
            let gone = "the URL is that of a server or a snapshot that is gone (ask for the latest metadata)";
            // The more likely one first: where one side has a secret, the other seldom has none.
            if self.url.secret().is_some() {
                let message = "not found: the source has another shared secret than this receiver, or";
                return Error::new(kind, format!("{message} {gone}"));
            }
            let message =
                format!("not found: {gone}, or the source asks for a shared secret, and this receiver has none");
            return Error::new(kind, message).hinting(Hint::SecretForReceiver);
        }
        match head.retry_after.filter(|_| kind == ErrorKind::Connect) {
            Some(pause) => {
                let message = format!("{detail} (it says to ask again in {} s)", pause.as_secs());
                Error::new(kind, message).retrying_after(pause)
            }
            None => Error::new(kind, detail),
        }
    }

    /// Receives into the first of `parts`, or into as many as it takes. Next to nothing for the stall limit is a
    /// time-out.
    fn receive(&mut self, parts: &mut [IoSliceMut<'_>]) -> Result<usize, Error> {
        let got = self.receive_anything(parts)?;
        if self.stall_detector.is_stuck(got, self.stall()) {
            return Err(self.io_error(&io::ErrorKind::TimedOut.into()));
        }
        Ok(got)
    }

    /// Receives into `parts` as [`Connection::receive_or_end`], but the end of the connection is an error.
    fn receive_anything(&mut self, parts: &mut [IoSliceMut<'_>]) -> Result<usize, Error> {
        self.receive_or_end(parts)?.ok_or_else(|| self.ended_early())
    }

    /// Receives into `parts`, however little comes: nothing where a signal interrupted it. `None` if the source has
    /// closed the connection.
    fn receive_or_end(&mut self, parts: &mut [IoSliceMut<'_>]) -> Result<Option<usize>, Error> {
        let got = match &mut self.tls {
            None => (&mut &*self.stream).read_vectored(parts),
            Some(tls) => tls.read(&self.stream, &self.limits, &mut self.timeout, &mut parts[0]),
        };
        match got {
            Ok(0) => {
                self.limits.left()?;
                Ok(None)
            }
            Ok(n) => Ok(Some(n)),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => Ok(Some(0)),
            Err(e) => Err(self.io_error(&e)),
        }
    }

    fn ended_early(&self) -> Error {
        let peer = self.url.authority();
        Error::new(ErrorKind::Connect, format!("{peer} closed the connection in the middle of an answer"))
    }

    /// Sets the socket's timeout so that the next call ends at the deadline at the latest.
    fn wait_at_most(&mut self, patience: Duration) -> Result<(), Error> {
        let wanted = self.limits.left()?.min(patience).max(Duration::from_millis(1));
        // A system call per receive would cost; the old value will do unless it is later than it may be, or much
        // sooner.
        if self.timeout.is_some_and(|set| set <= wanted && wanted < set * 2) {
            return Ok(());
        }
        let set = self.stream.set_read_timeout(Some(wanted)).and_then(|()| self.stream.set_write_timeout(Some(wanted)));
        set.map_err(|e| Error::caused(ErrorKind::System, "cannot set a socket timeout", e))?;
        self.timeout = Some(wanted);
        Ok(())
    }

    /// What an error of the socket means: the deadline or a time-out, or else that the connection broke.
    fn io_error(&self, e: &io::Error) -> Error {
        let peer = self.url.authority();
        if let Err(over) = self.limits.left() {
            return over.waiting_for(|| format!("{peer} {}", self.state()));
        }
        if is_timeout(e) {
            let waited = self.timeout.unwrap_or_else(|| self.stall()).as_secs_f64();
            let message = format!("timed out: {peer} sent nothing, or next to nothing, for {waited:.3} s");
            return Error::new(ErrorKind::Timeout, message).waiting_for(|| format!("{peer} {}", self.state()));
        }
        Error::new(ErrorKind::Connect, format!("the connection to {peer} broke: {e}"))
    }

    /// The source's state as far as this side knows it, for messages.
    fn state(&self) -> &'static str {
        match self.stage {
            Stage::Asked | Stage::Answering if self.copying => "was still copying its state when it last answered",
            Stage::Answering => "has not sent all of its answer",
            Stage::Asked => "was asked and has not begun to answer",
            Stage::Connected => "is connected and says nothing",
        }
    }

    fn protocol(&self, what: impl AsRef<str>) -> Error {
        Error::new(ErrorKind::Protocol, format!("{} broke the protocol: {}", self.url.authority(), what.as_ref()))
    }
}

/// Whether a call on a socket ended because its time was over.
fn is_timeout(e: &io::Error) -> bool {
    matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}

/// What a source said, for a message: on one line, of bounded length, and without characters that a terminal acts upon or
/// that change the order of a line. Messages end up in logs, in which a source must not write lines of its own.
fn printable(said: &str) -> String {
    let hidden = |c: char| {
        let moves =
            matches!(c, '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}');
        c.is_control() || moves || matches!(c, '\u{ad}' | '\u{feff}')
    };
    said.chars().take(MAX_SAID).map(|c| if hidden(c) { ' ' } else { c }).collect()
}

impl Connection {
    /// The same connection with other limits, and not in a hurry. Their cancellation must be the one it was made with,
    /// which alone knows its socket.
    pub(crate) fn within(self, limits: &Limits) -> Self {
        Self { limits: limits.clone(), hurry: None, ..self }
    }

    /// Whether the source said of the answer under way that it still copies what it is to send: it may be silent for as
    /// long as that takes.
    pub(crate) fn is_filling(&self) -> bool {
        self.filling
    }

    /// The same connection, which may be silent for as long as its address deserves: for `first` if that has not failed
    /// and the source has others.
    pub(crate) fn in_hurry(self, first: Duration) -> Self {
        let most = self.limits.stall;
        let hurry = self.address().and_then(|at| self.url.targets().patience(at, first, most));
        Self { hurry: hurry.filter(|hurry| *hurry < most), ..self }
    }

    /// Whether it would be waited for longer if its source had no other address.
    pub(crate) fn is_in_hurry(&self) -> bool {
        self.hurry.is_some() && !self.filling
    }

    /// For how long it may be silent.
    fn stall(&self) -> Duration {
        self.hurry.filter(|_| !self.filling).map_or(self.limits.stall, |hurry| hurry.min(self.limits.stall))
    }

    /// How long an answer may take to begin that is to be waited for during `patience`.
    pub(crate) fn patience(&self, patience: Duration) -> Duration {
        self.hurry.map_or(patience, |hurry| hurry.min(patience))
    }

    /// The address at the other end, if it goes over the network.
    pub(crate) fn address(&self) -> Option<IpAddr> {
        self.peer.map(|peer| peer.ip().to_canonical())
    }

    /// The address and the port at the other end.
    pub(crate) fn peer(&self) -> Option<SocketAddr> {
        self.peer
    }
}

impl Connection {
    /// The shortest time that something took there and back so far: the network's delay without what queues add to it.
    /// `None` where no TCP is used, or the kernel does not say.
    pub(crate) fn delay(&self) -> Option<Duration> {
        let mut info = [0_u8; MIN_RTT + 4];
        let mut len = libc::socklen_t::try_from(info.len()).unwrap_or(0);
        let (socket, start) = (self.stream.as_raw_fd(), info.as_mut_ptr().cast());
        // SAFETY: the descriptor is open as long as `self` is there, and the system writes at most `len` bytes.
        let failed = unsafe { libc::getsockopt(socket, libc::IPPROTO_TCP, libc::TCP_INFO, start, &raw mut len) };
        let micros = info[MIN_RTT..].first_chunk().map_or(0, |bytes| u32::from_ne_bytes(*bytes));
        // The kernel's word for a round trip that it has not measured is the greatest number.
        let known = failed == 0 && usize::try_from(len) == Ok(info.len()) && ![0, u32::MAX].contains(&micros);
        known.then(|| Duration::from_micros(micros.into()))
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::time::Instant;

    use super::*;
    use crate::cancel::Cancel;

    #[test]
    fn a_connection_that_is_made_anew_is_as_patient_as_before() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = Arc::new(SourceUrl::parse(&format!("http://{}/", listener.local_addr().unwrap())).unwrap());
        let source = std::thread::spawn(move || {
            // It ends the connection with its first answer, and says nothing on the next one.
            let (mut first, _) = listener.accept().unwrap();
            first.write_all(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n").unwrap();
            listener.accept().unwrap()
        });
        let (started, stall) = (Instant::now(), Duration::from_secs(5));
        let limits = Limits { started, deadline: started + 2 * stall, stall, cancel: Cancel::new() };
        let mut connection = Connection::open(&url, &limits).unwrap();
        let delay = connection.delay().unwrap();
        assert!(!delay.is_zero() && delay <= started.elapsed(), "{delay:?}");
        (connection.hurry, connection.copying) = (Some(Duration::from_millis(200)), true);
        connection.get("a", None, None, None).unwrap();
        let error = connection.get("b", None, None, None).unwrap_err();
        assert!(error.to_string().contains("for 0.200 s"), "{error}");
        assert_eq!(error.waited_for().map(|what| what.contains("copying")), Some(true));
        source.join().unwrap();
    }
}
