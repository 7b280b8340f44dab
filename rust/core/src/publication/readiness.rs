//! A publication whose memory is still being filled, from the first byte of the payload to the last: its readers get what
//! is final, and wait for the rest.

use std::fmt;

use tokio::sync::watch;

/// Beyond every byte of a container.
const ALL: u64 = u64::MAX;

/// Held by whoever fills the memory of a publication (see [`crate::Publication::with_readiness`]): says how much of it is final.
///
/// Dropped before [`Readiness::finish`], it ends every reader that comes to what is missing;
/// [`crate::Store::abandon`] withdraws the publication besides.
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

    /// What its readers wait on.
    pub(crate) fn readers(&self) -> ReadinessWatch {
        ReadinessWatch(self.ready.subscribe())
    }

    /// Where each item starts in the payload, in bytes, in the order in which they were given.
    #[must_use]
    pub fn starts(&self) -> &[u64] {
        &self.starts
    }

    /// The first `len` bytes of the payload are final: nobody writes to them any more. What was final stays so.
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

    /// Whether the publication is still there for somebody to read.
    #[must_use]
    pub fn is_wanted(&self) -> bool {
        !self.ready.is_closed()
    }
}

/// How far a publication is filled, as its readers see it.
#[derive(Clone, Debug)]
pub(crate) struct ReadinessWatch(watch::Receiver<u64>);

impl ReadinessWatch {
    /// Whether the first `end` bytes of the container are final.
    pub(crate) fn is_ready(&self, end: u64) -> bool {
        *self.0.borrow() >= end
    }

    /// Waits until they are.
    pub(crate) async fn ready(mut self, end: u64) -> Result<(), Abandoned> {
        self.0.wait_for(|ready| *ready >= end).await.map(drop).map_err(|_| Abandoned)
    }

    /// Whether `filling` is the other end.
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
