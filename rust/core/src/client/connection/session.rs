//! TLS on a blocking connection, within the limits of its transfer.
//!
//! One TLS record can take many receives, so the deadline is checked before each of them, and bytes that drip are
//! noticed below TLS, where they can be counted.

use std::io::{self, Read, Write};
use std::sync::Arc;
use std::time::Duration;

use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, Stream};
use socket2::Socket;

use crate::client::limits::{Limits, StallDetector};
use crate::error::{Error, ErrorKind};
use crate::trust::tls;

/// Taken from the socket at once: many records, since TLS itself asks for a few KiB at a time.
const AHEAD: usize = 256 << 10;

/// A TLS session over a socket that is owned elsewhere.
pub(super) struct Session {
    tls: ClientConnection,
    received: RecordBuffer,
}

/// Bytes from the socket that TLS has not seen yet.
struct RecordBuffer {
    buffer: Vec<u8>,
    at: usize,
    end: usize,
    /// How they come: what TLS hands on comes in whole records, and one of them can drip for ever.
    stall_detector: StallDetector,
}

/// The socket as TLS sees it. One record can take many receives: each of them is kept within the deadline.
struct TimedSocket<'a> {
    socket: &'a Socket,
    limits: &'a Limits,
    /// The socket's current timeout.
    timeout: &'a mut Option<Duration>,
    received: &'a mut RecordBuffer,
}

impl Session {
    pub(super) fn new(config: &Arc<ClientConfig>) -> Result<Self, Error> {
        let failed = |e: &dyn std::error::Error| Error::new(ErrorKind::System, format!("cannot set up TLS: {e}"));
        let name = ServerName::try_from(tls::NAME).map_err(|e| failed(&e))?;
        let tls = ClientConnection::new(Arc::clone(config), name).map_err(|e| failed(&e))?;
        Ok(Self {
            tls,
            received: RecordBuffer { buffer: Vec::new(), at: 0, end: 0, stall_detector: StallDetector::default() },
        })
    }

    /// Agrees with the server on keys, and checks its certificate.
    pub(super) fn shake_hands(
        &mut self,
        socket: &Socket,
        limits: &Limits,
        timeout: &mut Option<Duration>,
    ) -> io::Result<()> {
        let mut timed = TimedSocket { socket, limits, timeout, received: &mut self.received };
        while self.tls.is_handshaking() {
            self.tls.complete_io(&mut timed)?;
        }
        // The last message of the handshake may still have to be sent.
        while self.tls.wants_write() {
            self.tls.write_tls(&mut timed)?;
        }
        Ok(())
    }

    pub(super) fn read(
        &mut self,
        socket: &Socket,
        limits: &Limits,
        timeout: &mut Option<Duration>,
        into: &mut [u8],
    ) -> io::Result<usize> {
        let mut timed = TimedSocket { socket, limits, timeout, received: &mut self.received };
        Stream::new(&mut self.tls, &mut timed).read(into)
    }

    pub(super) fn write_all(
        &mut self,
        socket: &Socket,
        limits: &Limits,
        timeout: &mut Option<Duration>,
        bytes: &[u8],
    ) -> io::Result<()> {
        self.received.stall_detector = StallDetector::default();
        let mut timed = TimedSocket { socket, limits, timeout, received: &mut self.received };
        let mut stream = Stream::new(&mut self.tls, &mut timed);
        stream.write_all(bytes)?;
        stream.flush()
    }
}

impl TimedSocket<'_> {
    /// Makes sure that the next call ends at the deadline.
    fn keep_within(&mut self) -> io::Result<()> {
        let left = self.limits.left().map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?;
        if self.timeout.is_none_or(|set| set > left) {
            let wanted = left.max(Duration::from_millis(1)).min(self.timeout.unwrap_or(self.limits.stall));
            self.socket.set_read_timeout(Some(wanted))?;
            self.socket.set_write_timeout(Some(wanted))?;
            *self.timeout = Some(wanted);
        }
        Ok(())
    }
}

impl Read for TimedSocket<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        while self.received.at == self.received.end {
            self.keep_within()?;
            self.received.buffer.resize(AHEAD, 0);
            match (&mut &*self.socket).read(&mut self.received.buffer) {
                Ok(0) => return Ok(0),
                Ok(got) if self.received.stall_detector.is_stuck(got, self.limits.stall) => {
                    return Err(io::ErrorKind::TimedOut.into());
                }
                Ok(got) => (self.received.at, self.received.end) = (0, got),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        let there = &self.received.buffer[self.received.at..self.received.end];
        let n = there.len().min(into.len());
        into[..n].copy_from_slice(&there[..n]);
        self.received.at += n;
        Ok(n)
    }
}

impl Write for TimedSocket<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.keep_within()?;
        (&mut &*self.socket).write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
