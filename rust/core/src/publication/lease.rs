//! The readers of a publication: while one holds a lease, its memory may be read; who withdraws it waits for them, or
//! ends their connections.

use std::sync::{Arc, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

use super::Publication;

/// Who reads.
#[derive(Default)]
pub(super) struct Readers {
    active: usize,
    /// When the last one left; `None` if there never was one.
    left: Option<Instant>,
    withdrawn: bool,
    connections: Vec<Weak<Notify>>,
}

/// A reader's hold on a publication: while one exists, its memory may be read.
pub(crate) struct Lease {
    publication: Arc<Publication>,
}

impl Lease {
    /// A lease for the connection that `cut` ends, or `None` when the publication was withdrawn.
    pub(crate) fn take(publication: &Arc<Publication>, cut: &Arc<Notify>) -> Option<Arc<Self>> {
        let mut readers = publication.readers();
        if readers.withdrawn {
            return None;
        }
        readers.active += 1;
        readers.connections.retain(|c| c.strong_count() > 0);
        if !readers.connections.iter().any(|c| std::ptr::eq(c.as_ptr(), Arc::as_ptr(cut))) {
            readers.connections.push(Arc::downgrade(cut));
        }
        drop(readers);
        Some(Arc::new(Self { publication: Arc::clone(publication) }))
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
        let mut readers = self.publication.readers();
        readers.active -= 1;
        readers.left = Some(Instant::now());
        if readers.active == 0 {
            self.publication.idle.notify_all();
        }
    }
}

impl Publication {
    fn readers(&self) -> MutexGuard<'_, Readers> {
        self.readers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// No lease is given from here on.
    pub(crate) fn close(&self) {
        self.readers().withdrawn = true;
    }

    /// Whether that is so.
    pub(super) fn is_withdrawn(&self) -> bool {
        self.readers().withdrawn
    }

    /// How long nobody has read; `None` while somebody does.
    pub(crate) fn idle_for(&self) -> Option<Duration> {
        let readers = self.readers();
        let left = readers.left.filter(|_| readers.active == 0);
        (readers.active == 0).then(|| left.map_or(Duration::MAX, |left| left.elapsed()))
    }

    /// Whether there ever was a reader.
    pub(crate) fn was_read(&self) -> bool {
        let readers = self.readers();
        readers.active > 0 || readers.left.is_some()
    }

    /// How many readers hold a lease.
    pub(crate) fn active(&self) -> usize {
        self.readers().active
    }

    /// Waits until no reader is left, at most until `deadline`; says whether that is so.
    pub(crate) fn drain(&self, deadline: Instant) -> bool {
        let mut readers = self.readers();
        while readers.active > 0 {
            let Some(left) = deadline.checked_duration_since(Instant::now()) else { return false };
            readers = self.idle.wait_timeout(readers, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// Ends the connections of all readers.
    pub(crate) fn cut(&self) {
        for connection in self.readers().connections.drain(..).filter_map(|c| c.upgrade()) {
            connection.notify_one();
        }
    }

    /// Cuts until the last lease is gone. Connections end at their next poll, so this takes no longer than a poll does.
    pub(crate) fn cut_and_wait(&self) {
        self.cut();
        let mut readers = self.readers();
        while readers.active > 0 {
            readers = self.idle.wait(readers).unwrap_or_else(PoisonError::into_inner);
        }
    }
}
