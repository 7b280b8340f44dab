//! Ending a transfer from another thread.
//!
//! A transfer blocks in system calls on its sockets, so a flag alone would be seen too late. A [`Cancel`] therefore
//! knows the sockets that take part: cancelling shuts them down, and the blocked calls return at once.
//!
//! Invariant: a socket that is watched after the cancellation is shut down as well. [`Cancel::watch`] looks at the flag
//! after it has noted the socket, and [`Cancel::cancel`] sets the flag before it goes through the sockets, so one of
//! the two sees the other.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};

use socket2::Socket;

use crate::fork::CloseOnFork;
use crate::sync::Locked;

/// Ends a transfer from another thread: every socket that takes part in it is shut down.
///
/// Clones are the same token. A token that was cancelled stays so: transfers that are begun with it end at once.
///
/// ```
/// use std::time::Duration;
/// use tensorferry_core::{Cancel, ErrorKind, FetchOptions, Remote};
///
/// let cancel = Cancel::new();
/// let options = FetchOptions { cancel: cancel.clone(), ..FetchOptions::within(Duration::from_secs(60)) };
/// cancel.cancel();
/// let error = Remote::open(&["http://127.0.0.1:1/"], 3, options).unwrap_err();
/// assert_eq!(error.kind(), ErrorKind::Cancelled);
/// ```
#[derive(Clone, Debug, Default)]
pub struct Cancel {
    inner: Arc<CancelState>,
}

#[derive(Debug, Default)]
struct CancelState {
    cancelled: AtomicBool,
    parent: Option<Cancel>,
    sockets: Mutex<Vec<Weak<CloseOnFork<Socket>>>>,
}

impl Cancel {
    /// A token that has not been cancelled.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// A token that is cancelled with this one, or alone.
    #[must_use]
    pub fn child(&self) -> Self {
        Self { inner: Arc::new(CancelState { parent: Some(self.clone()), ..CancelState::default() }) }
    }

    /// Cancels the transfers that use this token; they end with [`crate::ErrorKind::Cancelled`].
    pub fn cancel(&self) {
        self.inner.cancelled.store(true, Ordering::SeqCst);
        self.shut_down();
    }

    /// Whether it was cancelled.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        self.inner.cancelled.load(Ordering::SeqCst) || self.inner.parent.as_ref().is_some_and(Self::is_cancelled)
    }

    /// Shuts down all watched sockets, so that calls that block on them return.
    fn shut_down(&self) {
        let mut sockets = self.inner.sockets.locked();
        for socket in sockets.drain(..).filter_map(|s| s.upgrade()) {
            let _ = socket.shutdown(std::net::Shutdown::Both);
        }
    }

    /// Makes `socket` one of those that a cancellation shuts down; does so at once if it has happened. Sockets that are
    /// gone are forgotten.
    pub(crate) fn watch(&self, socket: &Arc<CloseOnFork<Socket>>) {
        let mut sockets = self.inner.sockets.locked();
        sockets.retain(|s| s.strong_count() > 0);
        sockets.push(Arc::downgrade(socket));
        drop(sockets);
        if self.is_cancelled() {
            self.shut_down();
        } else if let Some(parent) = &self.inner.parent {
            parent.watch(socket);
        }
    }
}
