//! Places for connections. Connections that have made an authorised request have a share of their own, which others
//! cannot take; of the others, the newcomers, the oldest makes room for the newest.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

/// How long a connection may take to its first request that is answered with more than a refusal.
pub(super) const FIRST_REQUEST: Duration = Duration::from_secs(5);
/// How often a request that waits for a place looks again.
const LOOK: Duration = Duration::from_millis(10);

/// Where a connection comes from. When newcomers must make room, those of the most frequent origin do so first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Origin {
    Address(IpAddr),
    /// A process of this machine.
    Process(i32),
    Unknown,
}

/// The places of one listening socket.
#[derive(Debug)]
pub(super) struct Places {
    /// For connections that have shown nothing yet.
    newcomers: usize,
    /// For the others.
    proven: usize,
    /// Whether an authorised request may wait for a place among those.
    waits: bool,
    /// How long a newcomer keeps its place at least, even if others want it: good receivers can arrive as a crowd, too.
    grace: Duration,
    held: Mutex<Held>,
    freed: Notify,
}

#[derive(Debug, Default)]
struct Held {
    next: u64,
    connections: HashMap<u64, Holder>,
}

#[derive(Debug)]
struct Holder {
    from: Origin,
    /// When the connection was accepted; after its first authorised request, when its last answer was made.
    since: Instant,
    proven: bool,
    /// Authorised requests that wait for their answer, or for a place.
    asking: usize,
    /// Answers that are being sent.
    open: Arc<AtomicUsize>,
    cut: Arc<Notify>,
}

/// The place of one connection.
#[derive(Debug)]
pub(super) struct Place {
    places: Arc<Places>,
    number: u64,
    pub(super) since: Instant,
    pub(super) open: Arc<AtomicUsize>,
    /// Notified when the connection has to end.
    pub(super) cut: Arc<Notify>,
}

/// A good request that is being answered: its connection keeps its place for as long.
pub(super) struct Asking<'a>(&'a Place);

impl Places {
    /// Places for `newcomers`, which keep theirs for `grace` at least, and for `proven` connections.
    pub(super) fn new(newcomers: usize, grace: Duration, proven: usize, waits: bool) -> Arc<Self> {
        Arc::new(Self { newcomers, proven, waits, grace, held: Mutex::default(), freed: Notify::new() })
    }

    fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many connections can have a place at a time.
    pub(super) fn total(&self) -> usize {
        self.newcomers + self.proven
    }

    /// Waits until a newcomer can have a place.
    pub(super) async fn room(&self) {
        loop {
            {
                let held = self.held();
                if held.count(false) < self.newcomers || held.oldest_newcomer(self.grace).is_some() {
                    return;
                }
            }
            let _ = tokio::time::timeout(LOOK, self.freed.notified()).await;
        }
    }

    /// A place for a newcomer, possibly that of another one; `None` if no place is free or can be made free.
    pub(super) fn enter(self: &Arc<Self>, from: Origin) -> Option<Place> {
        let mut held = self.held();
        if held.count(false) >= self.newcomers {
            let oldest = held.oldest_newcomer(self.grace)?;
            held.evict(oldest);
        }
        let (number, since) = (held.next, Instant::now());
        held.next += 1;
        let (open, cut) = (Arc::<AtomicUsize>::default(), Arc::<Notify>::default());
        let holder = Holder { from, since, proven: false, asking: 0, open: Arc::clone(&open), cut: Arc::clone(&cut) };
        held.connections.insert(number, holder);
        drop(held);
        Some(Place { places: Arc::clone(self), number, since, open, cut })
    }

    /// Ends the connection of a newcomer, if there is one: descriptors have run out.
    pub(super) fn make_room(&self) {
        let mut held = self.held();
        if let Some(oldest) = held.oldest_newcomer(self.grace) {
            held.evict(oldest);
        }
    }
}

impl Held {
    fn count(&self, proven: bool) -> usize {
        self.connections.values().filter(|holder| holder.proven == proven).count()
    }

    /// The newcomer that goes first: of those from the origin that has most of them, the oldest.
    fn oldest_newcomer(&self, grace: Duration) -> Option<u64> {
        let newcomers = || self.connections.iter().filter(|(_, holder)| !holder.proven && holder.asking == 0);
        let mut from = HashMap::new();
        for (_, holder) in newcomers() {
            *from.entry(holder.from).or_insert(0_usize) += 1;
        }
        // Only newcomers of the most frequent origin are candidates, even at a moment when none of them is old enough.
        let most = from.values().copied().max();
        let crowd = newcomers().filter(|(_, holder)| from.get(&holder.from).copied() == most);
        let ripe = crowd.filter(|(_, holder)| holder.since.elapsed() >= grace);
        ripe.max_by_key(|(_, holder)| holder.since.elapsed()).map(|(number, _)| *number)
    }

    /// Of the connections that are idle, the one that has been idle for longest.
    fn longest_idle(&self) -> Option<u64> {
        let idle = |holder: &Holder| holder.proven && holder.asking == 0 && holder.open.load(Ordering::Relaxed) == 0;
        let idle = self.connections.iter().filter(|(_, holder)| idle(holder));
        idle.min_by_key(|(_, holder)| holder.since).map(|(number, _)| *number)
    }

    fn evict(&mut self, number: u64) {
        if let Some(holder) = self.connections.remove(&number) {
            holder.cut.notify_one();
        }
    }
}

impl Place {
    /// Marks the beginning of an authorised request; its connection is no longer a newcomer then. If all places of such
    /// connections are taken and none is idle, the request waits for one, or gets none.
    pub(super) async fn begin(&self) -> Option<Asking<'_>> {
        let asking = {
            let mut held = self.places.held();
            let holder = held.connections.get_mut(&self.number)?;
            holder.asking += 1;
            Asking(self)
        };
        loop {
            {
                let mut held = self.places.held();
                if held.connections.get(&self.number)?.proven {
                    return Some(asking);
                }
                if held.count(true) >= self.places.proven
                    && let Some(idle) = held.longest_idle()
                {
                    held.evict(idle);
                }
                if held.count(true) < self.places.proven {
                    held.connections.get_mut(&self.number)?.proven = true;
                    return Some(asking);
                }
            }
            if !self.places.waits {
                return None;
            }
            let _ = tokio::time::timeout(LOOK, self.places.freed.notified()).await;
        }
    }

    /// Ends when the connection has not asked for anything in time; never if it has.
    pub(super) async fn wasted(&self) {
        tokio::time::sleep_until((self.since + FIRST_REQUEST).into()).await;
        let newcomer = |holder: &Holder| !holder.proven && holder.asking == 0;
        if !self.places.held().connections.get(&self.number).is_some_and(newcomer) {
            std::future::pending::<()>().await;
        }
    }
}

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        if let Some(holder) = self.0.places.held().connections.get_mut(&self.0.number) {
            holder.asking -= 1;
            holder.since = Instant::now();
        }
        self.0.places.freed.notify_waiters();
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.places.held().connections.remove(&self.number);
        self.places.freed.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_origin_that_holds_most_places_loses_one_first() {
        let places = Places::new(4, Duration::ZERO, 1, false);
        let crowd = Origin::Process(1);
        let _held: Vec<_> = (0..4).map(|_| places.enter(crowd).unwrap()).collect();
        // The oldest of all from here on, but the only one of its process.
        let other = places.enter(Origin::Process(2)).unwrap();
        for _ in 0..20 {
            places.enter(crowd).unwrap();
        }
        let _more: Vec<_> = (0..20).map(|_| places.enter(crowd).unwrap()).collect();
        assert!(places.held().connections.contains_key(&other.number));
        assert_eq!(places.held().count(false), 4);
    }
}
