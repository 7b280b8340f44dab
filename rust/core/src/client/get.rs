//! One GET of something that is no container: counters, or a state in another program's format.
//!
//! It goes through [`Connection`] like every other request, so a certificate is compared with the fingerprint in the URL
//! before a byte is sent, no proxy is asked, no redirection is followed, and one deadline covers the lookup of the name,
//! the connection attempts and the whole answer. Where the URL names several addresses and one is silent, another is asked.

use std::time::{Duration, Instant};

use super::connection::{Connection, Head};
use super::limits::Limits;
use super::source::Source;
use crate::cancel::Cancel;
use crate::error::{Error, ErrorKind};

/// An answer whose head is here.
///
/// ```
/// use std::time::Duration;
/// use tensorferry_core::{Cancel, Get, Server, ServerConfig};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let runtime = tokio::runtime::Runtime::new()?;
/// # let server = Server::bind(&ServerConfig::default(), runtime.handle())?;
/// let url = server.url("127.0.0.1");
/// let mut answer = Get::open(&url, "../healthz", Duration::from_secs(10), &Cancel::new())?;
/// assert_eq!(answer.status(), 400, "a path is sent as it is");
/// let mut first = [0; 7];
/// assert_eq!((answer.read(&mut first)?, &first), (7, b"invalid"));
/// # Ok(())
/// # }
/// ```
pub struct Get {
    connection: Connection,
    head: Head,
}

impl std::fmt::Debug for Get {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Get").field("status", &self.head.status).finish_non_exhaustive()
    }
}

impl Get {
    /// Asks the server at `url`, which ends with a slash, for `path` below it, and reads the head of the answer. All of
    /// it, body included, must be there within `timeout`.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] when `url` is none, `path` begins with a slash or holds a space, a control character or
    /// one beyond ASCII, or `timeout` is too long; [`ErrorKind::Unproven`] when the server shows another certificate
    /// than the URL names; [`ErrorKind::Connect`], [`ErrorKind::Timeout`], [`ErrorKind::Protocol`],
    /// [`ErrorKind::Cancelled`]; [`ErrorKind::System`] when there is no socket or thread for it.
    pub fn open(url: &str, path: &str, timeout: Duration, cancel: &Cancel) -> Result<Self, Error> {
        let started = Instant::now();
        let source = Source::parse(url, false, None)?;
        if path.bytes().any(|b| !b.is_ascii_graphic()) || path.starts_with('/') {
            return Err(Error::new(ErrorKind::Invalid, "the path holds characters that do not belong there"));
        }
        let deadline = started
            .checked_add(timeout)
            .ok_or_else(|| Error::new(ErrorKind::Invalid, "the timeout is too long to be counted"))?;
        let limits = Limits { started, deadline, stall: timeout, cancel: cancel.clone() };
        let (connection, head) = source.ask(None, &limits, |connection| connection.get(path, None, None, None))?;
        Ok(Self { connection, head })
    }

    /// The status of the answer.
    #[must_use]
    pub fn status(&self) -> u16 {
        self.head.status
    }

    /// The reason phrase of the answer, as the server worded it: it may be anything.
    #[must_use]
    pub fn reason(&self) -> &str {
        &self.head.reason
    }

    /// Receives some of the rest of the body, at least a byte; 0 at its end. Without a Content-Length the body ends with
    /// the connection.
    ///
    /// # Errors
    /// [`ErrorKind::Timeout`] at the deadline, [`ErrorKind::Connect`] when the connection breaks, or is closed before
    /// the end of a body with a Content-Length, [`ErrorKind::Cancelled`].
    pub fn read(&mut self, into: &mut [u8]) -> Result<usize, Error> {
        self.connection.read_some(&self.head, into)
    }
}
