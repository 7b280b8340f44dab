//! The readers of a publication.
//!
//! While a reader holds a [`Lease`], the memory of the publication may be read. Withdrawing waits for the leases to
//! end, or ends their connections: a lease belongs to a connection, named by the handle that cuts it.
//!
//! A receive is a sequence of requests, mostly over several connections, and HTTP does not say when it is over. The
//! drain therefore remembers connections whose lease has ended and judges by three signs: an answer with which receives
//! end (digests up to the last block), a connection that is closed, and silence for [`LINGER`].
//!
//! Invariants:
//!
//! * no lease is given after [`Publication::close`];
//! * [`Publication::cut_and_wait`] returns only when no lease is left;
//! * dropping the last lease wakes the threads that wait for it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, Weak};
use std::time::{Duration, Instant};

use super::readers::ReadingConnection;
use super::{ConnectionHandle, Publication};
use crate::sync::Locked;

/// How long a withdrawn snapshot waits for the next request of a receive that takes several.
pub(crate) const LINGER: Duration = Duration::from_secs(2);
/// How often a drain looks for connections that have ended or stand still.
const DRAIN_LOOK: Duration = Duration::from_millis(5);

/// How a drain ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Drain {
    /// Whether no reader is left.
    pub(crate) is_over: bool,
    /// How many readers were cut off because they stood still.
    pub(crate) cut: usize,
}

/// A reader's hold on a publication: while one exists, the publication's memory may be read, and its owner is kept.
pub(crate) struct Lease {
    publication: Arc<Publication>,
    connection: Weak<ConnectionHandle>,
    broken: AtomicBool,
    through: AtomicBool,
}

impl Lease {
    /// A lease for the connection that `cut` ends, or `None` when the publication was withdrawn. `receives` says that
    /// the request is one of a receive, which may take more of them.
    pub(crate) fn take(
        publication: &Arc<Publication>,
        cut: &Arc<ConnectionHandle>,
        receives: bool,
    ) -> Option<Arc<Self>> {
        let connection = Arc::downgrade(cut);
        let mut readers = publication.readers.locked();
        if readers.withdrawn {
            return None;
        }
        readers.active += 1;
        let now = Instant::now();
        if let Some(reader) = readers.connections.iter_mut().find(|reader| reader.is(&connection)) {
            reader.active += 1;
            reader.receives |= receives;
        } else {
            let over =
                |reader: &ReadingConnection| reader.is_gone() && now.saturating_duration_since(reader.left) >= LINGER;
            readers.connections.retain(|reader| reader.active > 0 || !over(reader));
            // This is taken to be the new connection of a receiver whose last one is gone.
            if let Some(gone) = readers.connections.iter().position(|r| r.active == 0 && receives && r.is_gone()) {
                readers.connections.swap_remove(gone);
            }
            let cut = connection.clone();
            let (broken, through, gone) = (false, false, None);
            readers.connections.push(ReadingConnection { cut, active: 1, receives, left: now, broken, through, gone });
        }
        drop(readers);
        let (broken, through) = Default::default();
        Some(Arc::new(Self { publication: Arc::clone(publication), connection, broken, through }))
    }

    /// Notes that this answer is one with which a receive ends if all is well.
    pub(crate) fn note_last(&self) {
        self.through.store(true, Ordering::Relaxed);
    }

    /// Notes that the answer read under this lease was broken off: its receiver may come back for the rest.
    pub(crate) fn break_off(&self) {
        self.broken.store(true, Ordering::Relaxed);
    }

    /// The connection that reads.
    pub(crate) fn connection(&self) -> &Weak<ConnectionHandle> {
        &self.connection
    }

    pub(crate) fn publication(&self) -> &Publication {
        &self.publication
    }

    pub(crate) fn publication_arc(&self) -> Arc<Publication> {
        Arc::clone(&self.publication)
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let (mut readers, now) = (self.publication.readers.locked(), Instant::now());
        readers.active -= 1;
        readers.left = Some(now);
        if let Some(reader) = readers.connections.iter_mut().find(|reader| reader.is(&self.connection)) {
            reader.active -= 1;
            reader.left = now;
            reader.broken = self.broken.load(Ordering::Relaxed);
            reader.through = self.through.load(Ordering::Relaxed);
        }
        if readers.active == 0 {
            self.publication.idle.notify_all();
        }
    }
}

impl Publication {
    /// Closes the publication: no lease is given from here on. Leases that exist go on.
    pub(crate) fn close(&self) {
        self.readers.locked().withdrawn = true;
    }

    /// Whether the publication was closed.
    pub(super) fn is_withdrawn(&self) -> bool {
        self.readers.locked().withdrawn
    }

    /// The time since the last reader left, [`Duration::MAX`] if there never was one; `None` while there is a reader.
    pub(crate) fn idle_for(&self) -> Option<Duration> {
        let readers = self.readers.locked();
        let left = readers.left.filter(|_| readers.active == 0);
        (readers.active == 0).then(|| left.map_or(Duration::MAX, |left| left.elapsed()))
    }

    /// Whether there ever was a reader.
    pub(crate) fn was_read(&self) -> bool {
        let readers = self.readers.locked();
        readers.active > 0 || readers.left.is_some()
    }

    /// How many readers hold a lease.
    pub(crate) fn active(&self) -> usize {
        self.readers.locked().active
    }

    /// Whether there is a reader, or a receiver in the middle of a receive.
    pub(crate) fn is_amid_receive(&self) -> bool {
        let mut readers = self.readers.locked();
        readers.look(true);
        readers.is_amid_receive()
    }

    /// Closes the publication unless there is a reader, or a receiver in the middle of a receive; returns whether it is
    /// closed and nobody reads it.
    pub(crate) fn close_unread(&self) -> bool {
        let mut readers = self.readers.locked();
        readers.look(true);
        readers.withdrawn |= !readers.is_amid_receive();
        readers.withdrawn && readers.active == 0
    }

    /// Waits until the receives that were begun are over, at most until `deadline`, and gives no lease from then on.
    /// Readers that stand still are cut off meanwhile, and not expected to come back: a receiver that is stopped, or whose
    /// machine is gone, must not hold up the trainer.
    ///
    /// A receive is a sequence of requests. It counts as over when nothing is being read and its connections are closed
    /// (with a moment for the receiver to open another one, [`RESUME`] if an answer broke), or no request has come for
    /// [`LINGER`].
    pub(crate) fn drain(&self, deadline: Instant) -> Drain {
        let (mut readers, mut cut) = (self.readers.locked(), 0);
        readers.look(true);
        loop {
            cut += readers.cut_still();
            let left = deadline.saturating_duration_since(Instant::now());
            let goes_on = if readers.withdrawn { readers.active > 0 } else { readers.is_amid_receive() };
            if left.is_zero() || !goes_on {
                readers.withdrawn = true;
                return Drain { is_over: readers.active == 0, cut };
            }
            let look = left.min(DRAIN_LOOK);
            readers = self.idle.wait_timeout(readers, look).unwrap_or_else(PoisonError::into_inner).0;
            readers.look(false);
        }
    }

    /// Ends the connections of all readers.
    pub(crate) fn cut(&self) {
        for connection in self.readers.locked().connections.drain(..).filter_map(|reader| reader.cut.upgrade()) {
            connection.cut();
        }
    }

    /// Cuts all readers, and waits until the last lease is gone. To be called when the publication is closed: a lease
    /// that is taken later would be waited for and not cut. Connections end at their next poll, so this takes no longer
    /// than a poll does, or the checksum of a block that is being computed.
    pub(crate) fn cut_and_wait(&self) {
        self.cut();
        let mut readers = self.readers.locked();
        while readers.active > 0 {
            readers = self.idle.wait(readers).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

#[cfg(test)]
mod tests {
    use tensorferry_wire::digest::BLOCK_SIZE;

    use super::super::Stability;
    use super::super::fixtures::publication;
    use super::*;

    #[test]
    fn a_drain_ends_with_no_lease_to_be_had_and_no_digest_of_what_is_withdrawn() {
        let cut = Arc::default();
        for stability in [Stability::Private, Stability::Borrowed] {
            let publication = Arc::new(publication(stability, vec![7; 3 << 20]));
            let lease = Lease::take(&publication, &cut, true).unwrap();
            assert!(lease.digests(&[(0, 3)], BLOCK_SIZE).is_some());
            // The time is over before the reader is through.
            assert!(!publication.drain(Instant::now()).is_over);
            assert!(Lease::take(&publication, &cut, true).is_none(), "{stability:?}: one lease more");
            assert!(lease.digests(&[(0, 3)], BLOCK_SIZE).is_none(), "{stability:?}: read after the withdrawal");
            drop(lease);
            assert!(publication.drain(Instant::now() + LINGER).is_over);
            assert!(Lease::take(&publication, &cut, true).is_none());
        }
    }

    #[test]
    fn a_drain_that_waits_for_nobody_closes_as_well() {
        let publication = Arc::new(publication(Stability::Borrowed, vec![7]));
        assert!(publication.drain(Instant::now() + LINGER).is_over);
        assert!(Lease::take(&publication, &Arc::default(), true).is_none());
    }

    #[test]
    fn only_what_nobody_reads_is_closed_at_once() {
        let (publication, cut) = (Arc::new(publication(Stability::Borrowed, vec![7])), Arc::default());
        let lease = Lease::take(&publication, &cut, true).unwrap();
        assert!(!publication.close_unread(), "it is read");
        drop(lease);
        assert!(!publication.close_unread(), "the receive may go on");
        Lease::take(&publication, &cut, true).unwrap().note_last();
        drop(cut);
        assert!(publication.close_unread());
        assert!(Lease::take(&publication, &Arc::default(), true).is_none());
    }
}
