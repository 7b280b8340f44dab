//! When a transfer must be over, and how another thread ends it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use socket2::Socket;

use crate::error::{Error, ErrorKind};

/// Ends a transfer from another thread: every socket that takes part in it is shut down.
#[derive(Clone, Debug, Default)]
pub struct Cancel {
    inner: Arc<CancelState>,
}

#[derive(Debug, Default)]
struct CancelState {
    cancelled: AtomicBool,
    sockets: Mutex<Vec<Weak<Socket>>>,
}

impl Cancel {
    /// A token nobody has cancelled yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Cancels the transfers that use this token; they end with [`ErrorKind::Cancelled`].
    pub fn cancel(&self) {
        self.inner.cancelled.store(true, Ordering::SeqCst);
        self.shut_down();
    }

    /// Whether it was cancelled.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        self.inner.cancelled.load(Ordering::SeqCst)
    }

    fn shut_down(&self) {
        let mut sockets = self.inner.sockets.lock().unwrap_or_else(PoisonError::into_inner);
        for socket in sockets.drain(..).filter_map(|s| s.upgrade()) {
            let _ = socket.shutdown(std::net::Shutdown::Both);
        }
    }

    pub(super) fn watch(&self, socket: &Arc<Socket>) {
        let mut sockets = self.inner.sockets.lock().unwrap_or_else(PoisonError::into_inner);
        sockets.retain(|s| s.strong_count() > 0);
        sockets.push(Arc::downgrade(socket));
        drop(sockets);
        if self.is_cancelled() {
            self.shut_down();
        }
    }
}

/// When an operation must be over, and how it ends early.
#[derive(Clone, Debug)]
pub(crate) struct Limits {
    pub(crate) started: Instant,
    pub(crate) deadline: Instant,
    /// No byte for this long means that the connection is stuck.
    pub(crate) stall: Duration,
    pub(crate) cancel: Cancel,
}

impl Limits {
    /// Time left, or the error that it is over.
    pub(crate) fn left(&self) -> Result<Duration, Error> {
        if self.cancel.is_cancelled() {
            return Err(Error::new(ErrorKind::Cancelled, "the transfer was cancelled"));
        }
        match self.deadline.checked_duration_since(Instant::now()) {
            Some(left) if !left.is_zero() => Ok(left),
            _ => Err(self.over()),
        }
    }

    /// Sleeps for `length`, or until `over` holds; says whether there is time left after it.
    pub(crate) fn pause(&self, length: Duration, over: impl Fn() -> bool) -> bool {
        let step = Duration::from_millis(20);
        let mut slept = Duration::ZERO;
        while slept < length && !over() && self.left().is_ok() {
            std::thread::sleep(step);
            slept += step;
        }
        self.left().is_ok()
    }

    pub(crate) fn over(&self) -> Error {
        let allowed = self.deadline.saturating_duration_since(self.started).as_secs_f64();
        Error::new(ErrorKind::Timeout, format!("timed out: the whole receive was given {allowed:.3} s"))
    }
}
