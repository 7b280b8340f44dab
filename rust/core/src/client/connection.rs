//! One blocking HTTP/1.1 connection to a source. The head is parsed here and the payload is received straight into its
//! place: measured faster than reading bodies through an asynchronous client.

use std::io::{self, IoSliceMut, Read, Write};
use std::net::{IpAddr, ToSocketAddrs};
use std::sync::Arc;
use std::time::Duration;

use socket2::Socket;
use tensorferry_wire::proof::{self, Nonce};
use tensorferry_wire::request;

use super::connect::{connect, refused};
use super::limits::{Limits, Pace};
use super::session::Session;
use super::url::Source;
use crate::error::{Error, ErrorKind};
use crate::same_host::{self, ring::Reader};
use crate::secret;

/// A response head longer than this is refused.
const MAX_HEAD: usize = 16 << 10;
/// How long a source on this machine may take to greet us, before we go to it over the network.
const HELLO: Duration = Duration::from_secs(2);
/// How a server begins that was spoken to in plain HTTP and expects TLS.
const TLS_ALERT: &[u8] = &[21, 3];
/// As many slices as the system takes in one call.
const MAX_SLICES: usize = 1024;

/// What a source on this machine shares with us, and how much of it may be read.
struct Ring {
    reader: Reader,
    /// Slots that are filled.
    announced: u64,
    /// Whether the body of the last answer comes through it.
    in_use: bool,
}

/// A response head.
#[derive(Debug)]
#[allow(clippy::struct_excessive_bools, reason = "each says whether a header is there")]
pub(crate) struct Head {
    pub(crate) status: u16,
    pub(crate) reason: String,
    pub(crate) content_length: Option<u64>,
    /// `(start, end, total)` of a 206 answer.
    pub(crate) content_range: Option<(u64, u64, u64)>,
    pub(crate) etag: Option<String>,
    /// What shows that the source knows the shared secret.
    pub(crate) proof: Option<String>,
    /// Where the source can be reached without the network, if it says so.
    pub(crate) same_host: Option<same_host::Name>,
    /// Whether the body comes through shared memory.
    in_ring: bool,
    /// Whether the source still copies some of the body.
    filling: bool,
    /// Whether the server speaks HTTP/1.0, as Python's `http.server` does.
    pub(crate) http_10: bool,
    keep_alive: bool,
}

/// A connection that is between two answers, or in the body of one.
pub(crate) struct Connection {
    stream: Arc<Socket>,
    tls: Option<Box<Session>>,
    source: Arc<Source>,
    limits: Limits,
    /// Bytes received behind the last head that belong to the body.
    ahead: Vec<u8>,
    taken: usize,
    /// Body bytes not yet read.
    remaining: u64,
    reusable: bool,
    /// Whether the source had not yet copied all of the body when it began to send it.
    filling: bool,
    timeout: Option<Duration>,
    pace: Pace,
    /// What is shared with a source on this machine.
    ring: Option<Ring>,
    /// The nonce and the path of the last request, where there is a secret to prove.
    asked: Option<(Nonce, String)>,
}

impl Connection {
    /// Connects to `source`, trying each of its addresses.
    pub(crate) fn open(source: &Arc<Source>, limits: &Limits) -> Result<Self, Error> {
        limits.left()?;
        let failed = |e| refused(source.authority(), e);
        let addresses: Vec<_> = (source.host(), source.port()).to_socket_addrs().map_err(failed)?.collect();
        let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
        for address in addresses {
            match connect(address, limits)? {
                Ok(stream) => return Self::over(stream, source, limits).secured(),
                Err(e) => last = e,
            }
        }
        Err(failed(last))
    }

    /// Connects to `source` under the `name` it has on this machine.
    pub(crate) fn open_same_host(
        source: &Arc<Source>,
        name: &same_host::Name,
        limits: &Limits,
    ) -> Result<Self, io::Error> {
        let stream = name.connect()?;
        stream.set_read_timeout(Some(HELLO.min(limits.stall)))?;
        let reader = Reader::receive(&stream)?;
        let mut connection = Self::over(stream, source, limits);
        connection.ring = Some(Ring { reader, announced: 0, in_use: false });
        Ok(connection)
    }

    pub(super) fn over(stream: Socket, source: &Arc<Source>, limits: &Limits) -> Self {
        let stream = Arc::new(stream);
        limits.cancel.watch(&stream);
        Self {
            stream,
            tls: None,
            source: Arc::clone(source),
            limits: limits.clone(),
            ahead: Vec::new(),
            taken: 0,
            remaining: 0,
            reusable: true,
            filling: false,
            timeout: None,
            pace: Pace::default(),
            ring: None,
            asked: None,
        }
    }

    /// The same connection after the TLS handshake, where the source wants one.
    fn secured(mut self) -> Result<Self, Error> {
        let Some(config) = self.source.tls() else { return Ok(self) };
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

    fn refused_handshake(&self, e: &io::Error) -> Error {
        let peer = self.source.authority();
        match e.get_ref().and_then(|inner| inner.downcast_ref()) {
            Some(rustls::Error::InvalidCertificate(why)) => {
                let why = match why {
                    rustls::CertificateError::Other(why) => why.to_string(),
                    why => format!("its certificate is not valid: {why}"),
                };
                Error::new(ErrorKind::Unproven, format!("{peer} is not the source its metadata names: {why}"))
            }
            Some(why) => self.protocol(format!("it does not speak TLS as its metadata says: {why}")),
            None if self.limits.left().is_ok() && is_timeout(e) => {
                let waited = self.limits.stall.as_secs_f64();
                Error::new(ErrorKind::Timeout, format!("timed out: no TLS handshake with {peer} within {waited:.3} s"))
            }
            None => self.broken(e),
        }
    }

    /// Whether this connection does without the network.
    pub(crate) fn is_same_host(&self) -> bool {
        self.ring.is_some()
    }

    /// Whether the source said of the answer under way that it still copies what it is to send: it may be silent for as
    /// long as that takes.
    pub(crate) fn is_filling(&self) -> bool {
        self.filling
    }

    /// The addresses on both ends, if it goes over the network.
    pub(crate) fn route(&self) -> Option<(IpAddr, IpAddr)> {
        let here = self.stream.local_addr().ok()?.as_socket()?.ip();
        let there = self.stream.peer_addr().ok()?.as_socket()?.ip();
        Some((here.to_canonical(), there.to_canonical()))
    }

    /// What another thread ends this connection with.
    pub(crate) fn socket(&self) -> &Arc<Socket> {
        &self.stream
    }

    pub(crate) fn source(&self) -> &Arc<Source> {
        &self.source
    }

    /// Whether another request may be sent on this connection.
    pub(crate) fn is_reusable(&self) -> bool {
        self.reusable && self.remaining == 0
    }

    /// Sends one GET for `path` (below the source's prefix), on a new connection where the source ends each after one
    /// answer, and reads the head of the answer. `patience` is how long
    /// the answer may take to begin: a source that has nothing to serve yet keeps the request waiting.
    pub(crate) fn get(
        &mut self,
        path: &str,
        range: Option<(u64, u64)>,
        if_match: Option<&str>,
        patience: Option<Duration>,
    ) -> Result<Head, Error> {
        use std::fmt::Write as _;
        if !self.is_reusable() {
            // The last answer announced that it ends the connection.
            *self = Self::open(&self.source, &self.limits)?;
        }
        let path = format!("{}{path}", self.source.prefix());
        let range = range.map(|(start, end)| format!("bytes={start}-{}", end - 1));
        let mut request = format!(
            "GET {path} HTTP/1.1\r\nHost: {}\r\nUser-Agent: tensorferry/{}\r\n",
            self.source.authority(),
            env!("CARGO_PKG_VERSION"),
        );
        if let Some(range) = &range {
            let _ = write!(request, "Range: {range}\r\n");
        }
        if let Some(etag) = if_match {
            let _ = write!(request, "If-Match: {etag}\r\n");
        }
        if let Some(secret) = self.source.secret() {
            let nonce = secret::nonce()?;
            let asked = proof::Request { method: "GET", path: &path, range: range.as_deref(), if_match };
            let _ = write!(request, "Authorization: {}\r\n", secret.key().sign_request(&asked, &nonce));
            self.asked = Some((nonce, path));
        }
        request.push_str("\r\n");
        (self.reusable, self.filling) = (false, false);
        self.pace = Pace::default();
        self.wait_at_most(self.limits.stall)?;
        let sent = match &mut self.tls {
            None => (&*self.stream).write_all(request.as_bytes()),
            Some(tls) => tls.write_all(&self.stream, &self.limits, &mut self.timeout, request.as_bytes()),
        };
        sent.map_err(|e| self.broken(&e))?;
        let head = self.read_head(patience)?;
        self.remaining = head.content_length.unwrap_or(0);
        self.filling = head.filling;
        self.reusable = head.keep_alive && head.content_length.is_some();
        match &mut self.ring {
            Some(ring) => ring.in_use = head.in_ring,
            None if head.in_ring => return Err(self.protocol("it answers through memory that it does not share")),
            None => {}
        }
        Ok(head)
    }

    fn read_head(&mut self, patience: Option<Duration>) -> Result<Head, Error> {
        let mut buffer = vec![0_u8; MAX_HEAD];
        let mut filled = 0;
        loop {
            let mut headers = [httparse::EMPTY_HEADER; 64];
            let mut response = httparse::Response::new(&mut headers);
            match response.parse(&buffer[..filled]) {
                Ok(httparse::Status::Complete(length)) => {
                    if response.code.is_some_and(|code| (100..200).contains(&code)) {
                        // An interim answer, maybe with the next one right behind it; a peer that sends them for ever
                        // meets the deadline.
                        buffer.copy_within(length..filled, 0);
                        filled -= length;
                        self.limits.left()?;
                        continue;
                    }
                    let head = self.head(&response)?;
                    buffer.truncate(filled);
                    self.ahead = buffer;
                    self.taken = length;
                    return Ok(head);
                }
                Ok(httparse::Status::Partial) if filled < MAX_HEAD => {
                    // A source may take long to begin its answer, not to go on with it.
                    self.wait_at_most(patience.filter(|_| filled == 0).unwrap_or(self.limits.stall))?;
                    filled += self.receive(&mut [IoSliceMut::new(&mut buffer[filled..])])?;
                }
                Ok(httparse::Status::Partial) => {
                    return Err(self.protocol(format!("its answer's head is longer than {MAX_HEAD} bytes")));
                }
                Err(_) if buffer.starts_with(TLS_ALERT) => {
                    return Err(self.protocol("it speaks TLS, and its metadata does not say so"));
                }
                Err(e) => return Err(self.protocol(format!("its answer is not HTTP/1.1: {e}"))),
            }
        }
    }

    fn head(&self, response: &httparse::Response<'_, '_>) -> Result<Head, Error> {
        let mut head = Head {
            status: response.code.unwrap_or(0),
            reason: response.reason.unwrap_or("").to_owned(),
            content_length: None,
            content_range: None,
            etag: None,
            proof: None,
            same_host: None,
            in_ring: false,
            filling: false,
            http_10: response.version == Some(0),
            keep_alive: response.version == Some(1),
        };
        for header in response.headers.iter() {
            let value = || std::str::from_utf8(header.value).map_or("", str::trim);
            if header.name.eq_ignore_ascii_case("content-length") {
                let length = value().parse().map_err(|_| self.protocol("its Content-Length is no number"))?;
                if head.content_length.is_some_and(|l| l != length) {
                    return Err(self.protocol("it sent two Content-Length headers that differ"));
                }
                head.content_length = Some(length);
            } else if header.name.eq_ignore_ascii_case("content-range") {
                head.content_range = request::parse_content_range(value());
            } else if header.name.eq_ignore_ascii_case("etag") {
                head.etag = Some(value().to_owned());
            } else if header.name.eq_ignore_ascii_case(proof::PROOF_HEADER) {
                head.proof = Some(value().to_owned());
            } else if header.name.eq_ignore_ascii_case(request::SAME_HOST_HEADER) {
                head.same_host = same_host::Name::parse(value());
            } else if header.name.eq_ignore_ascii_case(request::RING_HEADER) {
                head.in_ring = true;
            } else if header.name.eq_ignore_ascii_case(request::FILLING_HEADER) {
                head.filling = true;
            } else if header.name.eq_ignore_ascii_case("connection") {
                head.keep_alive &= !value().eq_ignore_ascii_case("close");
            } else if header.name.eq_ignore_ascii_case("transfer-encoding") {
                return Err(self.protocol("it sent a Transfer-Encoding, which this protocol does not use"));
            }
        }
        Ok(head)
    }

    /// Fills `parts` (the next bytes of the body) in order. `received` is given what has just arrived, in order too.
    pub(crate) fn fill(&mut self, parts: &mut [IoSliceMut<'_>], mut received: impl FnMut(&[u8])) -> Result<(), Error> {
        let mut parts = parts;
        loop {
            IoSliceMut::advance_slices(&mut parts, 0);
            let wanted: u64 = parts.iter().map(|p| p.len() as u64).sum();
            if wanted == 0 {
                return Ok(());
            }
            if wanted > self.remaining {
                return Err(self.protocol("its answer ended before the bytes it announced"));
            }
            if self.ring.as_ref().is_some_and(|ring| ring.in_use) {
                let got = self.take_from_ring(&mut parts[0], &mut received)?;
                self.remaining -= got as u64;
                IoSliceMut::advance_slices(&mut parts, got);
                continue;
            }
            let got = if self.taken < self.ahead.len() {
                let ahead = &self.ahead[self.taken..];
                let n = ahead.len().min(parts[0].len());
                parts[0][..n].copy_from_slice(&ahead[..n]);
                self.taken += n;
                n
            } else {
                self.wait_at_most(self.limits.stall)?;
                let count = parts.len().min(MAX_SLICES);
                self.receive(&mut parts[..count])?
            };
            self.remaining -= got as u64;
            let mut left = got;
            for part in parts.iter() {
                let here = left.min(part.len());
                received(&part[..here]);
                left -= here;
                if left == 0 {
                    break;
                }
            }
            IoSliceMut::advance_slices(&mut parts, got);
        }
    }

    /// Copies what the slot in turn has for `into`; waits for the source to announce it.
    fn take_from_ring(&mut self, into: &mut [u8], received: impl FnMut(&[u8])) -> Result<usize, Error> {
        let remaining = self.remaining;
        while self.ring.as_ref().is_some_and(|ring| ring.announced == 0) {
            let marks = if self.taken < self.ahead.len() {
                let marks = self.ahead.len() - self.taken;
                self.taken = self.ahead.len();
                marks
            } else {
                self.wait_at_most(self.limits.stall)?;
                // One byte stands for a whole slot.
                self.receive_anything(&mut [IoSliceMut::new(&mut [0; 16])])?
            };
            let Some(ring) = &mut self.ring else { break };
            ring.announced = marks as u64;
            if ring.announced > ring.reader.parts(remaining) {
                return Err(self.protocol("it announced more than it has"));
            }
        }
        let Some(Ring { reader, announced, .. }) = &mut self.ring else { return Ok(0) };
        let n = into.len().min(reader.left());
        reader.copy(&mut into[..n], received);
        if reader.left() == 0 || n as u64 == remaining {
            reader.next();
            *announced -= 1;
            (&*self.stream).write_all(&[1]).map_err(|e| self.broken(&e))?;
        }
        Ok(n)
    }

    /// The whole body, which must not be longer than `limit` bytes.
    pub(crate) fn body(&mut self, head: &Head, limit: u64) -> Result<Vec<u8>, Error> {
        let length = head.content_length.ok_or_else(|| self.protocol("its answer has no Content-Length"))?;
        if length > limit {
            return Err(self.protocol(format!("its answer has {length} bytes where at most {limit} make sense")));
        }
        let mut body = Vec::new();
        while (body.len() as u64) < length {
            // Grown as bytes arrive: an announced length alone takes no memory.
            let at = body.len();
            let step = usize::try_from(length - at as u64).unwrap_or(usize::MAX).min(1 << 20);
            body.resize(at + step, 0);
            self.fill(&mut [IoSliceMut::new(&mut body[at..])], |_| ())?;
        }
        Ok(body)
    }

    /// Checks that whoever sent `body` in answer to the last request knows the secret, where there is one.
    pub(crate) fn check_proof(&self, head: &Head, body: &[u8]) -> Result<(), Error> {
        let (Some(secret), Some((nonce, path))) = (self.source.secret(), &self.asked) else { return Ok(()) };
        let etag = head.etag.as_deref().unwrap_or("");
        let answer = proof::Answer { nonce, path, etag, body };
        match &head.proof {
            Some(proof) if secret.key().verify_answer(&answer, proof) => Ok(()),
            Some(_) => Err(Error::new(
                ErrorKind::Unproven,
                "the source's proof of the shared secret is wrong: it has another secret, or somebody in between changed \
                 what it said",
            )),
            None => Err(Error::new(
                ErrorKind::Unproven,
                "the source does not prove that it knows the shared secret: it was started without one (secret=, \
                 TENSORFERRY_SECRET), or somebody else answers at its address",
            )),
        }
    }

    /// Turns an answer that is not what was asked for into an error.
    pub(crate) fn refuse(&mut self, head: &Head) -> Error {
        let detail = self.body(head, 64 << 10).unwrap_or_default();
        let detail = String::from_utf8_lossy(&detail);
        let detail = if detail.trim().is_empty() { head.reason.as_str() } else { detail.trim() };
        let kind = match head.status {
            412 => ErrorKind::Changed,
            status => ErrorKind::Status(status),
        };
        if head.status == 404 && detail == "not found" {
            let secret = match self.source.secret() {
                None => "asks for a shared secret (secret=, TENSORFERRY_SECRET), and this receiver has none",
                Some(_) => "has another shared secret than this receiver",
            };
            let message = format!("not found: the metadata is of a transport that is gone, or the source {secret}");
            return Error::new(kind, message);
        }
        Error::new(kind, detail.to_owned())
    }

    /// Receives into the first of `parts`, or into as many as it takes.
    fn receive(&mut self, parts: &mut [IoSliceMut<'_>]) -> Result<usize, Error> {
        let got = self.receive_anything(parts)?;
        if self.pace.is_stuck(got, self.limits.stall) {
            return Err(self.broken(&io::ErrorKind::TimedOut.into()));
        }
        Ok(got)
    }

    /// The same, however little it is.
    fn receive_anything(&mut self, parts: &mut [IoSliceMut<'_>]) -> Result<usize, Error> {
        let got = match &mut self.tls {
            None => (&mut &*self.stream).read_vectored(parts),
            Some(tls) => tls.read(&self.stream, &self.limits, &mut self.timeout, &mut parts[0]),
        };
        match got {
            Ok(0) => {
                self.limits.left()?;
                Err(Error::new(
                    ErrorKind::Connect,
                    format!("{} closed the connection in the middle of an answer", self.source.authority()),
                ))
            }
            Ok(n) => Ok(n),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => Ok(0),
            Err(e) => Err(self.broken(&e)),
        }
    }

    /// Sets the socket's timeout so that the next call ends at the deadline at the latest.
    fn wait_at_most(&mut self, patience: Duration) -> Result<(), Error> {
        let wanted = self.limits.left()?.min(patience).max(Duration::from_millis(1));
        // A system call per receive would cost; the old value will do unless it is later than it may be, or much sooner.
        if self.timeout.is_some_and(|set| set <= wanted && wanted < set * 2) {
            return Ok(());
        }
        let set = self.stream.set_read_timeout(Some(wanted)).and_then(|()| self.stream.set_write_timeout(Some(wanted)));
        set.map_err(|e| Error::caused(ErrorKind::System, "cannot set a socket timeout", e))?;
        self.timeout = Some(wanted);
        Ok(())
    }

    fn broken(&self, e: &io::Error) -> Error {
        if let Err(over) = self.limits.left() {
            return over;
        }
        let peer = self.source.authority();
        if is_timeout(e) {
            let waited = self.timeout.unwrap_or(self.limits.stall).as_secs_f64();
            return Error::new(
                ErrorKind::Timeout,
                format!("timed out: {peer} sent nothing, or next to nothing, for {waited:.3} s"),
            );
        }
        Error::new(ErrorKind::Connect, format!("the connection to {peer} broke: {e}"))
    }

    fn protocol(&self, what: impl AsRef<str>) -> Error {
        Error::new(ErrorKind::Protocol, format!("{} broke the protocol: {}", self.source.authority(), what.as_ref()))
    }
}

/// Whether a call on a socket ended because its time was over.
fn is_timeout(e: &io::Error) -> bool {
    matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}
