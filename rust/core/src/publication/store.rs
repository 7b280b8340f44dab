//! The snapshot store of a server: at most one publication, behind a gate that is open or closed.
//!
//! A request names a step and, from its second on, the entity tag of the snapshot it began with. What it finds:
//!
//! | the gate | the request names no tag | it names the tag of what is served | it names another tag |
//! |---|---|---|---|
//! | open | the publication if the step is right, else 400 | the publication | 412 |
//! | closed | waits | the publication while it drains or lingers | 412 |
//!
//! A publication that is withdrawn in the middle of transfers is *drained* (borrowed memory: the withdrawal waits) or
//! *lingers* (a private copy: the withdrawal returns, the transfers finish from it). At most [`MAX_RETIRED`] linger.
//!
//! Publications are dropped outside the lock, since dropping runs the owner's code.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::{Duration, Instant};

use tensorferry_wire::digest::Algorithm;
use tokio::sync::Notify;

use super::{LINGER, Publication, Readiness, Stability};
use crate::error::Error;
use crate::sync::Locked;
use crate::trust::random;

/// Withdrawn private snapshots that may still be finishing transfers; the oldest is cut when there are more.
const MAX_RETIRED: usize = 2;

/// The snapshot store of one server. Its methods never wait for a receiver, except [`Store::withdraw`], which does for
/// at most the time it is given. [`Store::abandon`] and [`Store::close`] wait until the
/// connections that they cut have ended.
///
/// ```
/// use std::time::Duration;
/// use tensorferry_core::{Publication, Server, ServerConfig, Stability, Withdrawn};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let runtime = tokio::runtime::Runtime::new()?;
/// let server = Server::bind(&ServerConfig::default(), runtime.handle())?;
/// let store = server.store();
/// assert!(!store.is_allowed());
/// store.publish(7, Publication::new(Vec::new(), Vec::new(), Stability::Borrowed, Box::new(()))?);
/// assert_eq!((store.step(), store.is_allowed()), (Some(7), true));
/// // From here on the trainer may change the memory: it is not read any more.
/// assert_eq!(store.withdraw(Duration::from_secs(5)), Withdrawn::Clean);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Store {
    generation: String,
    /// How everything published here is checksummed.
    algorithm: Algorithm,
    sequence: AtomicU64,
    state: Mutex<StoreState>,
    pub(super) changed: Notify,
    /// Told when something lingers.
    lingering: Notify,
}

#[derive(Debug, Default)]
pub(super) struct StoreState {
    pub(super) allowed: bool,
    pub(super) closed: bool,
    pub(super) step: Option<i64>,
    pub(super) current: Option<Arc<Publication>>,
    // Weak: a reader's lease keeps its publication alive, and nothing else should.
    retired: Vec<Weak<Publication>>,
    /// Private snapshots that were withdrawn in the middle of transfers, oldest first.
    pub(super) lingering: VecDeque<Former>,
    /// Borrowed memory whose withdrawal waits for receives to end.
    pub(super) draining: Vec<Former>,
}

/// A snapshot that is withdrawn and still answers receives it has begun.
#[derive(Debug)]
pub(super) struct Former {
    /// The step it was served as.
    pub(super) step: Option<i64>,
    pub(super) publication: Arc<Publication>,
}

/// How a withdrawal ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Withdrawn {
    /// No reader was in the middle of a transfer, or readers may go on with a private copy.
    Clean,
    /// Readers of borrowed memory were waited for, and finished.
    Drained,
    /// This many readers were cut off: they stood still, or the time was over.
    Cut(usize),
}

impl Store {
    pub(crate) fn new(algorithm: Algorithm) -> Result<Self, Error> {
        Ok(Self {
            generation: format!("{:016x}", u64::from_be_bytes(random::bytes()?)),
            algorithm,
            sequence: AtomicU64::new(1),
            state: Mutex::default(),
            changed: Notify::new(),
            lingering: Notify::new(),
        })
    }

    pub(super) fn state(&self) -> MutexGuard<'_, StoreState> {
        self.state.locked()
    }

    /// Serves `publication` as `step` from now on and opens the gate. A publication that was served before goes on
    /// serving the transfers it has begun; no new one starts from it.
    pub fn publish(&self, step: i64, mut publication: Publication) {
        let sequence = self.sequence.fetch_add(1, Ordering::Relaxed);
        publication.seal(format!("\"{}-{sequence}\"", self.generation), &self.algorithm);
        self.replace_current(step, publication);
    }

    /// Serves what is being received, under the entity tag that it has at its source.
    pub(crate) fn publish_relayed(&self, step: i64, relayed: Publication) {
        self.replace_current(step, relayed);
    }

    /// Puts `publication` in the place of the one that is served, opens the gate, and wakes the requests that wait.
    fn replace_current(&self, step: i64, publication: Publication) {
        let mut state = self.state();
        let gone = state.take_current(|_| true).map(|old| state.retire(old));
        state.current = Some(Arc::new(publication));
        state.step = Some(step);
        state.allowed = true;
        let lingers = !state.lingering.is_empty();
        drop(state);
        drop(gone);
        self.changed.notify_waiters();
        if lingers {
            self.lingering.notify_one();
        }
    }

    /// Opens the gate and serves what is there under the number `step`.
    pub fn allow(&self, step: i64) {
        let mut state = self.state();
        state.step = Some(step);
        state.allowed = true;
        drop(state);
        self.changed.notify_waiters();
    }

    /// Closes the gate and withdraws what is served.
    ///
    /// A private copy is not waited for: receives that have begun, with their next requests, finish from it, and it is
    /// released when they are over, or at once if there are none. Borrowed memory is drained: receives that have begun
    /// may finish for at most `patience`, then their connections are cut. One whose receiver takes no byte for two
    /// seconds is cut then. When this returns, not one more byte of borrowed memory is read.
    pub fn withdraw(&self, patience: Duration) -> Withdrawn {
        let borrowed = self.close_gate();
        if borrowed.is_empty() {
            return Withdrawn::Clean;
        }
        let deadline = Instant::now().checked_add(patience);
        let (mut ended, mut cut) = (Withdrawn::Clean, 0);
        for publication in &borrowed {
            let waited_for = publication.is_amid_receive();
            let drain = match deadline {
                Some(deadline) => publication.drain(deadline),
                None => publication.drain(Instant::now() + Duration::from_hours(24 * 365)),
            };
            cut += drain.cut;
            if !drain.is_over {
                cut += publication.active();
                publication.cut_and_wait();
            } else if waited_for {
                ended = Withdrawn::Drained;
            }
        }
        self.forget_drained(borrowed);
        if cut > 0 { Withdrawn::Cut(cut) } else { ended }
    }

    /// As [`Store::withdraw`] if no reader has to be waited for: returns whether that was so, and then no borrowed
    /// memory is read any more. If not, the gate is closed and readers go on; `withdraw` then waits for them or cuts
    /// them off.
    #[must_use]
    pub fn withdraw_unread(&self) -> bool {
        let borrowed = self.close_gate();
        let unread = borrowed.iter().all(|publication| publication.close_unread());
        if unread {
            self.forget_drained(borrowed);
        }
        unread
    }

    /// Closes the gate, and takes back what is served. Returns the borrowed memory that may have readers.
    fn close_gate(&self) -> Vec<Arc<Publication>> {
        let mut state = self.state();
        state.allowed = false;
        let gone = match state.take_current(|_| true) {
            Some(current) if current.stability() == Stability::Borrowed => {
                let step = state.step;
                state.draining.push(Former { step, publication: current });
                None
            }
            current => current.map(|current| state.retire(current)),
        };
        let mut borrowed = state.retired();
        let lingers = !state.lingering.is_empty();
        drop(state);
        drop(gone);
        borrowed.retain(|p| p.stability() == Stability::Borrowed);
        if lingers {
            self.lingering.notify_one();
        }
        borrowed
    }

    /// Releases borrowed memory that nobody reads any more.
    fn forget_drained(&self, drained: Vec<Arc<Publication>>) {
        let is_drained = |former: &Former| drained.iter().any(|p| Arc::ptr_eq(p, &former.publication));
        let mut state = self.state();
        let (gone, left): (Vec<_>, Vec<_>) = state.draining.drain(..).partition(is_drained);
        state.draining = left;
        drop(state);
        // Outside the lock, too.
        drop((gone, drained));
    }

    /// Withdraws the publication of `filling`, whose memory cannot be completed, or is needed for something else. The
    /// gate is closed if that publication was the one served. If it was withdrawn or replaced before, what is served
    /// and the gate stay as they are. In any case its readers are cut off, and none of it lingers or is read any more.
    pub fn abandon(&self, filling: Readiness) {
        let is_it = |publication: &Arc<Publication>| publication.is_filled_by(&filling);
        let mut state = self.state();
        let current = state.take_current(is_it);
        state.allowed &= current.is_none();
        let mut gone = state.retired();
        state.lingering.retain(|former| !is_it(&former.publication));
        drop(state);
        gone.retain(is_it);
        // Requests that wait for bytes of it fail now.
        drop(filling);
        for publication in gone {
            publication.close();
            publication.cut_and_wait();
        }
    }

    /// Refuses every request from now on and ends all transfers.
    pub fn close(&self) {
        let mut state = self.state();
        state.closed = true;
        state.allowed = false;
        let gone = (state.take_current(|_| true), std::mem::take(&mut state.lingering));
        let all = state.retired();
        drop(state);
        drop(gone);
        self.changed.notify_waiters();
        for publication in all {
            publication.close();
            publication.cut_and_wait();
        }
    }

    /// Whether [`Store::close`] was called.
    pub(crate) fn is_closed(&self) -> bool {
        self.state().closed
    }

    /// The step served, whether or not the gate is open.
    #[must_use]
    pub fn step(&self) -> Option<i64> {
        self.state().step
    }

    /// Whether the gate is open.
    #[must_use]
    pub fn is_allowed(&self) -> bool {
        self.state().allowed
    }

    /// The size of the container that is served, header included; `None` if there is none.
    pub(crate) fn published_len(&self) -> Option<u64> {
        self.state().current.as_ref().map(|current| current.total_len())
    }

    /// The receivers that send each other what is published, and how long ago each asked the tracker.
    pub(crate) fn members(&self) -> Vec<(SocketAddr, Duration)> {
        self.state().current.as_ref().map(|current| current.members()).unwrap_or_default()
    }

    /// Transfers running now, withdrawn snapshots included.
    #[must_use]
    pub fn active(&self) -> usize {
        let state = self.state();
        let mut all = state.retired();
        all.extend(state.current.clone());
        drop(state);
        all.iter().map(|p| p.active()).sum()
    }

    /// Releases withdrawn snapshots whose transfers are over. Runs for as long as the server does.
    pub(crate) async fn sweep(&self) {
        loop {
            self.lingering.notified().await;
            while self.sweep_once() {
                tokio::time::sleep(LINGER / 4).await;
            }
        }
    }

    /// One look at the lingering snapshots; returns whether any is left.
    fn sweep_once(&self) -> bool {
        let over = |former: &Former| former.publication.idle_for().is_some_and(|idle| idle >= LINGER);
        let mut state = self.state();
        let (gone, kept): (VecDeque<_>, VecDeque<_>) = state.lingering.drain(..).partition(over);
        let left = !kept.is_empty();
        state.lingering = kept;
        drop(state);
        for former in &gone {
            former.publication.close();
        }
        // Outside the lock: dropping may run foreign code.
        drop(gone);
        left
    }
}

impl StoreState {
    /// What was taken back and still has readers, or is waited for. The caller must drop it outside the lock.
    fn retired(&self) -> Vec<Arc<Publication>> {
        self.retired.iter().filter_map(Weak::upgrade).collect()
    }

    /// Takes back what is served, if `is_it` says so. The store remembers it for as long as it exists, so that whoever
    /// withdraws, abandons or closes at the same time waits for its readers as well.
    fn take_current(&mut self, is_it: impl FnOnce(&Arc<Publication>) -> bool) -> Option<Arc<Publication>> {
        let current = self.current.take_if(|current| is_it(current))?;
        self.retired.retain(|p| p.strong_count() > 0);
        self.retired.push(Arc::downgrade(&current));
        Some(current)
    }

    /// Takes no new transfer for `publication`, which was [taken back](Self::take_current). Returns what the caller must
    /// drop outside the lock, since dropping may run foreign code.
    fn retire(&mut self, publication: Arc<Publication>) -> Vec<Arc<Publication>> {
        let in_use = publication.idle_for().is_none_or(|idle| idle < LINGER);
        if publication.stability() == Stability::Borrowed || !publication.was_read() || !in_use {
            publication.close();
            return vec![publication];
        }
        self.lingering.push_back(Former { step: self.step, publication });
        let excess = self.lingering.len().saturating_sub(MAX_RETIRED);
        let gone: Vec<_> = self.lingering.drain(..excess).map(|former| former.publication).collect();
        for publication in &gone {
            publication.close();
            publication.cut();
        }
        gone
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;
    use std::sync::mpsc;
    use std::thread;

    use tensorferry_wire::dtype::Dtype;

    use super::super::Lease;
    use super::*;
    use crate::payload::Item;

    /// A store that serves borrowed memory which is being filled, a lease on it, and what fills it.
    fn read_store() -> (Store, Arc<Lease>, Readiness) {
        let store = Store::new(Algorithm::Crc64).unwrap();
        let items = vec![Item::bytes("w", Dtype::U8, &[1], vec![7].into())];
        let (publication, filling) =
            Publication::with_readiness(Vec::new(), items, Stability::Borrowed, Box::new(())).unwrap();
        store.publish(1, publication);
        let current = store.state().current.clone().unwrap();
        (store, Lease::take(&current, &Arc::default(), true).unwrap(), filling)
    }

    /// Says when it is dropped whether the lock of the store is free.
    struct Looking(Arc<Store>, mpsc::Sender<bool>);

    impl Drop for Looking {
        fn drop(&mut self) {
            let _ = self.1.send(self.0.state.try_lock().is_ok());
        }
    }

    #[test]
    fn an_owner_is_never_dropped_under_the_lock() {
        let (store, (dropped, free)) = (Arc::new(Store::new(Algorithm::Crc64).unwrap()), mpsc::channel());
        // Which thread drops the publication is a matter of chance.
        for _ in 0..200 {
            let item = Item::bytes("w", Dtype::U8, &[1], vec![7].into());
            let owner = Box::new(Looking(Arc::clone(&store), dropped.clone()));
            store.publish(1, Publication::new(Vec::new(), vec![item], Stability::Borrowed, owner).unwrap());
            let publication = store.state().current.clone().unwrap();
            assert_eq!(store.withdraw(Duration::ZERO), Withdrawn::Clean);
            thread::scope(|scope| {
                let readers = publication.readers.lock().unwrap();
                scope.spawn(|| assert_eq!(store.active(), 0));
                // The other thread has the publication, and waits for its readers.
                while Arc::strong_count(&publication) < 2 {
                    thread::yield_now();
                }
                drop(readers);
                drop(publication);
            });
            assert!(free.recv().unwrap(), "the owner's code ran under the lock");
        }
    }

    #[test]
    fn memory_that_is_read_is_not_forgotten_before_its_reader_is_through() {
        let (store, lease, _filling) = read_store();
        assert!(!store.withdraw_unread());
        assert_eq!(store.state().draining.len(), 1, "a withdrawal has to wait for it");
        lease.note_last();
        drop(lease);
        assert!(store.withdraw_unread());
        assert!(store.state().draining.is_empty());
    }

    #[test]
    fn memory_has_no_reader_when_a_withdrawal_returns_while_others_take_it_back() {
        let ways: [fn(&Store, &mut Option<Readiness>); 4] = [
            |store, _| store.close(),
            |store, filling| store.abandon(filling.take().unwrap()),
            |store, _| _ = store.withdraw(Duration::ZERO),
            |store, _| while !store.withdraw_unread() {},
        ];
        for (first, way) in ways.into_iter().enumerate() {
            for (second, other) in ways.into_iter().enumerate() {
                if first == second {
                    continue;
                }
                let (store, lease, filling) = read_store();
                let (mut filling, mut none) = if second == 1 { (None, Some(filling)) } else { (Some(filling), None) };
                let is_left = AtomicBool::new(false);
                thread::scope(|scope| {
                    scope.spawn(|| way(&store, &mut filling));
                    while store.state().current.is_some() {
                        thread::yield_now();
                    }
                    let ended = scope.spawn(|| {
                        other(&store, &mut none);
                        assert!(
                            is_left.load(Ordering::SeqCst),
                            "{second} returned before the reader left, after {first}"
                        );
                    });
                    // A slow machine can hide a return that is too early, and cannot make one.
                    thread::sleep(Duration::from_millis(50));
                    is_left.store(true, Ordering::SeqCst);
                    drop(lease);
                    ended.join().unwrap();
                });
            }
        }
    }
}
