//! A connection as a publication sees it: whether its peer takes bytes, and the order to end it.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use tokio::sync::Notify;

/// How often a connection whose peer is waited for looks whether a byte has moved.
pub(crate) const LOOK: Duration = Duration::from_millis(100);
/// How many looks in a row have to find nothing before the peer counts as standing still: two seconds, as long as one
/// waits for a receiver that requests nothing. A busy one pauses for less.
const STILL_LOOKS: u32 = 20;

/// Ends a connection, and knows whether its peer stands still: a process that is stopped, or a machine that is gone,
/// takes no bytes and closes nothing.
///
/// Time alone says nothing of the peer, since the source itself may be slow. So the thread that serves the connection
/// counts: it looks at [`LOOK`]'s intervals while it has bytes that the peer does not take.
#[derive(Debug, Default)]
pub(crate) struct ConnectionHandle {
    end: Notify,
    /// Looks in a row at which nothing had moved.
    still: AtomicU32,
}

impl ConnectionHandle {
    /// Ends the connection at its next poll.
    pub(crate) fn cut(&self) {
        self.end.notify_one();
    }

    /// Returns when the connection is to end.
    pub(crate) async fn until_cut(&self) {
        self.end.notified().await;
    }

    /// Notes that bytes have moved since the last look, or that there is nothing to move.
    pub(crate) fn note_moved(&self) {
        self.still.store(0, Ordering::Relaxed);
    }

    /// Notes a look at which the peer was waited for and nothing had moved since the one before.
    pub(crate) fn note_still(&self) {
        self.still.fetch_add(1, Ordering::Relaxed);
    }

    /// Whether the peer has taken no byte for a while, although there are some for it.
    pub(super) fn stands_still(&self) -> bool {
        self.still.load(Ordering::Relaxed) >= STILL_LOOKS
    }
}
