//! The connections that read a publication, and whether their receives are over.

use std::sync::Weak;
use std::time::{Duration, Instant};

use super::{ConnectionHandle, LINGER};

/// How long one waits for a receiver that closed a connection between two answers to come by another one.
const RECONNECT: Duration = Duration::from_millis(100);
/// How long one waits for a receiver whose connection ended in the middle of an answer. One that lives reconnects within
/// a few round trips, and most that do not come back are gone: their trainer must not wait as long as for a silent one.
const RESUME: Duration = Duration::from_millis(500);

/// The readers of one publication: how many leases there are, and the connections that hold or held them.
#[derive(Default)]
pub(super) struct Readers {
    pub(super) active: usize,
    /// When the last one left; `None` if there never was one.
    pub(super) left: Option<Instant>,
    pub(super) withdrawn: bool,
    pub(super) connections: Vec<ReadingConnection>,
}

/// A connection that holds leases, or held some.
pub(super) struct ReadingConnection {
    /// Ends the connection when notified; the last strong reference is dropped with the connection.
    pub(super) cut: Weak<ConnectionHandle>,
    pub(super) active: usize,
    /// Whether it serves a receive, whose next request may be still to come.
    pub(super) receives: bool,
    /// When its last lease ended.
    pub(super) left: Instant,
    /// Whether that was in the middle of an answer.
    pub(super) broken: bool,
    /// Whether the answer was one with which a receive ends: digests up to the last block.
    pub(super) through: bool,
    /// When a drain found the connection gone.
    pub(super) gone: Option<Instant>,
}

impl ReadingConnection {
    pub(super) fn is(&self, cut: &Weak<ConnectionHandle>) -> bool {
        self.cut.ptr_eq(cut)
    }

    pub(super) fn is_gone(&self) -> bool {
        self.cut.strong_count() == 0
    }

    /// Whether its receiver may be expected to make further requests. `over` is when a receiver that is gone had
    /// finished: other closed connections without a request since then are taken to be that receiver's.
    fn is_awaited(&self, now: Instant, over: Option<Instant>) -> bool {
        let (since, patience) = match self.gone {
            None => (self.left, LINGER),
            Some(gone) if self.broken => (gone, RESUME),
            Some(_) if over.is_some_and(|over| self.left <= over) => return false,
            Some(gone) => (gone, RECONNECT),
        };
        self.receives && now.saturating_duration_since(since) < patience
    }
}

impl Readers {
    /// Notes which connections are gone; those that were before the drain began count as gone since their last lease.
    pub(super) fn look(&mut self, begin: bool) {
        let now = Instant::now();
        for reader in self.connections.iter_mut().filter(|reader| reader.gone.is_none() && reader.is_gone()) {
            reader.gone = Some(if begin { reader.left } else { now });
        }
    }

    /// Ends the connections that read and stand still; returns how many readers that concerns.
    pub(super) fn cut_still(&mut self) -> usize {
        let mut cut = 0;
        self.connections.retain(|reader| {
            let handle = reader.cut.upgrade().filter(|handle| reader.active > 0 && handle.stands_still());
            if let Some(handle) = &handle {
                handle.cut();
                cut += reader.active;
            }
            handle.is_none()
        });
        cut
    }

    /// Whether a receive that was begun is not over, judging by its connections.
    pub(super) fn is_amid_receive(&self) -> bool {
        let now = Instant::now();
        let over =
            self.connections.iter().filter(|reader| reader.through && reader.gone.is_some()).map(|r| r.left).max();
        self.active > 0 || self.connections.iter().any(|reader| reader.is_awaited(now, over))
    }
}
