//! The one error type of the engine.
//!
//! An [`Error`] is opaque: callers see its [`ErrorKind`], which groups errors by what can be done about them, and a
//! message that names the source, the file or the argument concerned. Public functions of the crate that can fail
//! return this type, so that the binding needs a single conversion; [`crate::rename_new`] alone returns the system's
//! own error.
//!
//! Invariants, which whoever makes an error keeps:
//!
//! * a message never holds the shared secret or the random part of a path;
//! * a message states the fact in the engine's words. What a user can do about it depends on the program around the
//!   engine, which words that itself where an error has a [`Hint`];
//! * [`ErrorKind::Timeout`] is the only kind that says what was waited for;
//! * [`ErrorKind`] is exhaustive on purpose: a new kind must be given an exception class by the binding before it
//!   compiles.

use std::fmt;
use std::time::Duration;

/// The kind of a failure, grouped by what a caller can do about it.
///
/// Asking again, or asking another source, may help with [`Timeout`](Self::Timeout), [`Connect`](Self::Connect),
/// [`Protocol`](Self::Protocol), [`Corrupt`](Self::Corrupt), [`Torn`](Self::Torn) and [`System`](Self::System), and
/// with a [`Status`](Self::Status) from 500 on. The others stay as they are until the caller or the source changes
/// something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// The overall deadline passed, or no byte arrived for the stall limit. The message says what was waited for.
    Timeout,
    /// No connection to any source could be made, or every source went away.
    Connect,
    /// The source answered with an HTTP status other than the one asked for.
    Status(u16),
    /// The source does not speak this protocol at all: it is another program's server.
    Foreign,
    /// The source cannot prove that it is who it should be: it does not know the shared secret, or shows another
    /// certificate than its address names.
    Unproven,
    /// The source broke the protocol, or sent a header or manifest that is not valid.
    Protocol,
    /// Bytes did not match their checksum after repeated fetching.
    Corrupt,
    /// The source keeps changing its state while it serves it.
    Torn,
    /// The source moved on to another snapshot while this one was being fetched.
    Changed,
    /// The caller cancelled the transfer.
    Cancelled,
    /// An argument cannot be used.
    Invalid,
    /// The operating system refused something local: memory, a socket, a thread.
    System,
}

/// What can be done about a failure, where its kind does not say so. The program that calls the engine knows what its
/// users can change, and adds that to the message.
///
/// Exhaustive like [`ErrorKind`], so that no hint is left without a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hint {
    /// The source must not change memory before it has withdrawn it, or has to serve a private copy.
    WithdrawBeforeChange,
    /// The receiver was given no shared secret, and the source may ask for one.
    SecretForReceiver,
    /// The receiver insists on a shared secret, and the source may have been started without one.
    SecretForSource,
    /// The server at the address is that of another program.
    OtherProgram,
    /// A part of the source's address was lost: its fingerprint, or the scheme that goes with it.
    WholeAddress,
    /// Another program, or another server of this one, listens on the port.
    ChoosePort,
    /// The same for the port of counters.
    ChooseMetricsPort,
}

/// An error of the engine: a kind, a message for people, and the cause if there is one.
///
/// ```
/// use std::time::Duration;
/// use tensorferry_core::{ErrorKind, FetchOptions, Remote};
///
/// let options = FetchOptions::within(Duration::from_secs(1));
/// let error = Remote::open(&["ftp://node-7/"], 3, options).unwrap_err();
/// assert_eq!(error.kind(), ErrorKind::Invalid);
/// assert!(!error.is_timeout());
/// assert!(error.to_string().contains("node-7"));
/// ```
#[derive(Debug)]
pub struct Error {
    kind: ErrorKind,
    message: String,
    /// What was waited for when the time was over.
    waited_for: Option<String>,
    hint: Option<Hint>,
    /// When the source wants to be asked again.
    retry_after: Option<Duration>,
    cause: Option<Box<dyn std::error::Error + Send + Sync>>,
}

impl Error {
    pub(crate) fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), waited_for: None, hint: None, retry_after: None, cause: None }
    }

    pub(crate) fn caused(
        kind: ErrorKind,
        message: impl Into<String>,
        cause: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Self {
        Self {
            kind,
            message: message.into(),
            waited_for: None,
            hint: None,
            retry_after: None,
            cause: Some(cause.into()),
        }
    }

    /// An error for something a source sent that is not valid, with the reason as its cause. For callers that parse
    /// what they have received.
    pub fn protocol(cause: impl std::error::Error + Send + Sync + 'static) -> Self {
        Self::caused(ErrorKind::Protocol, "what the source sent is not valid", cause)
    }

    /// An error for an argument that cannot be used. For callers that check arguments before they reach the engine.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Invalid, message)
    }

    /// The group this error belongs to.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// What can be done about it, where more is known than the kind says.
    #[must_use]
    pub fn hint(&self) -> Option<Hint> {
        self.hint
    }

    /// Whether the deadline passed or the transfer stalled.
    #[must_use]
    pub fn is_timeout(&self) -> bool {
        self.kind == ErrorKind::Timeout
    }

    /// Whether a retry, or another source, may help. Resources that the system refuses now may be available a moment
    /// later, or to another lane.
    pub(crate) fn is_transient(&self) -> bool {
        match self.kind {
            ErrorKind::Timeout
            | ErrorKind::Connect
            | ErrorKind::Protocol
            | ErrorKind::Corrupt
            | ErrorKind::Torn
            | ErrorKind::System => true,
            ErrorKind::Status(code) => code >= 500,
            ErrorKind::Foreign
            | ErrorKind::Unproven
            | ErrorKind::Changed
            | ErrorKind::Cancelled
            | ErrorKind::Invalid => false,
        }
    }

    /// The same error, to which a timeout adds what was waited for.
    pub(crate) fn waiting_for(mut self, what: impl FnOnce() -> String) -> Self {
        if self.is_timeout() {
            self.waited_for = Some(what());
        }
        self
    }

    /// What was waited for, if it says so.
    pub(crate) fn waited_for(&self) -> Option<&str> {
        self.waited_for.as_deref()
    }

    /// The same error with a hint at what can be done about it.
    pub(crate) fn hinting(mut self, hint: Hint) -> Self {
        self.hint = Some(hint);
        self
    }

    /// The same error, of a source that wants to be asked again after `pause`.
    pub(crate) fn retrying_after(mut self, pause: Duration) -> Self {
        self.retry_after = Some(pause);
        self
    }

    /// When the source wants to be asked again, if it says so.
    pub(crate) fn retry_after(&self) -> Option<Duration> {
        self.retry_after
    }

    /// The same error with `context` put before its message.
    pub(crate) fn at(mut self, context: &str) -> Self {
        self.message = format!("{context}: {}", self.message);
        self
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        if let Some(what) = &self.waited_for {
            write!(f, ": {what}")?;
        }
        match &self.cause {
            Some(cause) => write!(f, ": {cause}"),
            None => Ok(()),
        }
    }
}

impl From<std::io::Error> for Error {
    fn from(cause: std::io::Error) -> Self {
        Self::caused(ErrorKind::System, "the system refused", cause)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.cause.as_ref().map(|c| c.as_ref() as _)
    }
}
