//! Publications that are served while their memory is still being written.
//!
//! A source that copies from a device publishes first and copies then; receivers get the bytes as they become final.
//! The producer holds a [`Readiness`] and moves one mark forward, from the first byte of the payload to the last.
//!
//! Invariants:
//!
//! * bytes before the mark are final: they are not written to any more;
//! * the mark never moves back;
//! * a request for bytes behind the mark waits, and fails when the [`Readiness`] is dropped before it was finished.

use std::fmt;

use tokio::sync::watch;

/// Beyond every byte of a container.
const ALL: u64 = u64::MAX;

/// Producer handle of a publication that is still being written (see [`crate::Publication::with_readiness`]).
///
/// If it is dropped before [`Readiness::finish`], every reader that comes to a byte that is not final fails;
/// [`crate::Store::abandon`] also withdraws the publication.
#[derive(Debug)]
pub struct Readiness {
    ready: watch::Sender<u64>,
    payload_start: u64,
    starts: Vec<u64>,
}

impl Readiness {
    /// For a container whose items start at `starts` of the payload, of which nothing is final but the header.
    pub(crate) fn new(payload_start: u64, starts: Vec<u64>) -> Self {
        Self { ready: watch::Sender::new(payload_start), payload_start, starts }
    }

    /// The other end of this handle, for the publication and its readers.
    pub(crate) fn readers(&self) -> ReadinessWatch {
        ReadinessWatch(self.ready.subscribe())
    }

    /// Where each item starts in the payload, in bytes, in the order in which they were given.
    #[must_use]
    pub fn starts(&self) -> &[u64] {
        &self.starts
    }

    /// Marks the first `len` bytes of the payload as final: they will not be written to. The mark never moves back.
    pub fn raise(&self, len: u64) {
        let end = self.payload_start.saturating_add(len);
        self.ready.send_if_modified(|ready| {
            let more = end > *ready;
            *ready = end.max(*ready);
            more
        });
    }

    /// All of the payload is final.
    pub fn finish(self) {
        self.ready.send_replace(ALL);
    }

    /// Whether the publication still exists. A producer may stop copying when it does not.
    #[must_use]
    pub fn is_wanted(&self) -> bool {
        !self.ready.is_closed()
    }
}

/// How much of a publication is final, as its readers see it. Clones watch the same mark.
#[derive(Clone, Debug)]
pub(crate) struct ReadinessWatch(watch::Receiver<u64>);

impl ReadinessWatch {
    /// Whether the first `end` bytes of the container are final.
    pub(crate) fn is_ready(&self, end: u64) -> bool {
        *self.0.borrow() >= end
    }

    /// Waits until the first `end` bytes of the container are final.
    pub(crate) async fn ready(mut self, end: u64) -> Result<(), Abandoned> {
        self.0.wait_for(|ready| *ready >= end).await.map(drop).map_err(|_| Abandoned)
    }

    /// Whether `filling` is the producer's end of this.
    pub(crate) fn is_by(&self, filling: &Readiness) -> bool {
        self.0.same_channel(&filling.ready.subscribe())
    }
}

/// The publication was given up before it was filled.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Abandoned;

impl fmt::Display for Abandoned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the source could not copy its state")
    }
}

impl std::error::Error for Abandoned {}

impl From<Abandoned> for std::io::Error {
    fn from(abandoned: Abandoned) -> Self {
        Self::other(abandoned)
    }
}
