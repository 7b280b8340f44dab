//! How another thread ends a transfer.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use socket2::Socket;

use crate::fork::Unshared;

/// Ends a transfer from another thread: every socket that takes part in it is shut down.
#[derive(Clone, Debug, Default)]
pub struct Cancel {
    inner: Arc<CancelState>,
}

#[derive(Debug, Default)]
struct CancelState {
    cancelled: AtomicBool,
    sockets: Mutex<Vec<Weak<Unshared<Socket>>>>,
}

impl Cancel {
    /// A token nobody has cancelled yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Cancels the transfers that use this token; they end with [`crate::ErrorKind::Cancelled`].
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

    pub(crate) fn watch(&self, socket: &Arc<Unshared<Socket>>) {
        let mut sockets = self.inner.sockets.lock().unwrap_or_else(PoisonError::into_inner);
        sockets.retain(|s| s.strong_count() > 0);
        sockets.push(Arc::downgrade(socket));
        drop(sockets);
        if self.is_cancelled() {
            self.shut_down();
        }
    }
}
