//! Slots limit how many connections a listening socket serves at a time. Connections that have made an authorised
//! request have a share of their own, which others cannot take; of the others, the newcomers, the oldest makes room for
//! the newest.

use std::collections::HashMap;
use std::fmt;
use std::net::IpAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

use crate::publication::ConnectionHandle;
use crate::sync::Locked;

/// How long a connection may take to its first authorised request. One for liveness, counters or the status page does
/// not count.
pub(super) const FIRST_REQUEST: Duration = Duration::from_secs(5);
/// How often a request that waits for a slot looks again.
const LOOK: Duration = Duration::from_millis(10);

/// The other end of a connection. When newcomers must make room, those of the peer that has most of them do so first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Peer {
    Address(IpAddr),
    /// A process of this machine.
    Process(i32),
    Unknown,
}

/// The slots of one listening socket.
#[derive(Debug)]
pub(super) struct ConnectionSlots {
    /// For connections that have shown nothing yet.
    newcomers: usize,
    /// For the others.
    proven: usize,
    /// Whether an authorised request may wait for a slot among those.
    waits: bool,
    /// How long a newcomer keeps its slot at least, even if others want it: good receivers can arrive as a crowd, too.
    grace: Duration,
    held: Mutex<HeldSlots>,
    freed: Notify,
}

#[derive(Debug, Default)]
struct HeldSlots {
    next: u64,
    connections: HashMap<u64, Holder>,
}

#[derive(Debug)]
struct Holder {
    peer: Peer,
    /// When the connection was accepted; after its first authorised request, when its last answer was made.
    since: Instant,
    proven: bool,
    /// Authorised requests that wait for their answer, or for a slot.
    asking: usize,
    /// Answers that are being sent.
    open: Arc<AtomicUsize>,
    cut: Arc<ConnectionHandle>,
}

/// The slot of one connection.
#[derive(Debug)]
pub(super) struct ConnectionSlot {
    slots: Arc<ConnectionSlots>,
    number: u64,
    pub(super) peer: Peer,
    pub(super) since: Instant,
    pub(super) open: Arc<AtomicUsize>,
    /// Notified when the connection has to end.
    pub(super) cut: Arc<ConnectionHandle>,
}

/// A good request that is being answered: its connection keeps its slot for as long.
pub(super) struct Asking<'a>(&'a ConnectionSlot);

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address(address) => write!(f, "{address}"),
            Self::Process(pid) => write!(f, "process {pid} of this machine"),
            Self::Unknown => write!(f, "an unknown address"),
        }
    }
}

impl ConnectionSlots {
    /// Slots for `newcomers`, which keep theirs for `grace` at least, and for `proven` connections.
    pub(super) fn new(newcomers: usize, grace: Duration, proven: usize, waits: bool) -> Arc<Self> {
        Arc::new(Self { newcomers, proven, waits, grace, held: Mutex::default(), freed: Notify::new() })
    }

    /// How many connections can have a slot at a time.
    pub(super) fn total(&self) -> usize {
        self.newcomers + self.proven
    }

    /// Waits until a newcomer can have a slot.
    pub(super) async fn wait_for_room(&self) {
        loop {
            {
                let held = self.held.locked();
                if held.count(false) < self.newcomers || held.oldest_newcomer(self.grace).is_some() {
                    return;
                }
            }
            let _ = tokio::time::timeout(LOOK, self.freed.notified()).await;
        }
    }

    /// A slot for a newcomer, possibly that of another one; `None` if no slot is free or can be made free.
    pub(super) fn enter(self: &Arc<Self>, peer: Peer) -> Option<ConnectionSlot> {
        let mut held = self.held.locked();
        if held.count(false) >= self.newcomers {
            let oldest = held.oldest_newcomer(self.grace)?;
            held.evict(oldest);
        }
        let (number, since) = (held.next, Instant::now());
        held.next += 1;
        let (open, cut) = (Arc::<AtomicUsize>::default(), Arc::<ConnectionHandle>::default());
        let holder = Holder { peer, since, proven: false, asking: 0, open: Arc::clone(&open), cut: Arc::clone(&cut) };
        held.connections.insert(number, holder);
        drop(held);
        Some(ConnectionSlot { slots: Arc::clone(self), number, peer, since, open, cut })
    }

    /// Ends the connection of a newcomer, if one has had its grace: descriptors have run out.
    pub(super) fn make_room(&self) {
        let mut held = self.held.locked();
        if let Some(oldest) = held.oldest_newcomer(self.grace) {
            held.evict(oldest);
        }
    }
}

impl HeldSlots {
    fn count(&self, proven: bool) -> usize {
        self.connections.values().filter(|holder| holder.proven == proven).count()
    }

    /// The newcomer that goes first: of those of the peer that has most of them, the oldest.
    fn oldest_newcomer(&self, grace: Duration) -> Option<u64> {
        let newcomers = || self.connections.iter().filter(|(_, holder)| !holder.proven && holder.asking == 0);
        let mut count_of = HashMap::new();
        for (_, holder) in newcomers() {
            *count_of.entry(holder.peer).or_insert(0_usize) += 1;
        }
        // Only newcomers of the most frequent peer are candidates, even at a moment when none of them is old enough.
        let most = count_of.values().copied().max();
        let crowd = newcomers().filter(|(_, holder)| count_of.get(&holder.peer).copied() == most);
        let ripe = crowd.filter(|(_, holder)| holder.since.elapsed() >= grace);
        ripe.max_by_key(|(_, holder)| holder.since.elapsed()).map(|(number, _)| *number)
    }

    /// Of the connections that are idle, the one that has been idle for longest.
    fn longest_idle(&self) -> Option<u64> {
        let idle = |holder: &Holder| holder.proven && holder.asking == 0 && holder.open.load(Ordering::Relaxed) == 0;
        let idle = self.connections.iter().filter(|(_, holder)| idle(holder));
        idle.min_by_key(|(_, holder)| holder.since).map(|(number, _)| *number)
    }

    /// Cuts the connection with this number, and frees its slot.
    fn evict(&mut self, number: u64) {
        if let Some(holder) = self.connections.remove(&number) {
            holder.cut.cut();
        }
    }
}

impl ConnectionSlot {
    /// Marks the beginning of an authorised request; its connection is no longer a newcomer then. If all slots of such
    /// connections are taken and none is idle, the request waits for one, or gets none.
    pub(super) async fn begin(&self) -> Option<Asking<'_>> {
        let asking = {
            let mut held = self.slots.held.locked();
            let holder = held.connections.get_mut(&self.number)?;
            holder.asking += 1;
            Asking(self)
        };
        loop {
            {
                let mut held = self.slots.held.locked();
                if held.connections.get(&self.number)?.proven {
                    return Some(asking);
                }
                if held.count(true) >= self.slots.proven
                    && let Some(idle) = held.longest_idle()
                {
                    held.evict(idle);
                }
                if held.count(true) < self.slots.proven {
                    held.connections.get_mut(&self.number)?.proven = true;
                    return Some(asking);
                }
            }
            if !self.slots.waits {
                return None;
            }
            let _ = tokio::time::timeout(LOOK, self.slots.freed.notified()).await;
        }
    }

    /// Returns when the connection has made no authorised request in time; never if it has.
    pub(super) async fn first_request_timeout(&self) {
        tokio::time::sleep_until((self.since + FIRST_REQUEST).into()).await;
        let newcomer = |holder: &Holder| !holder.proven && holder.asking == 0;
        if !self.slots.held.locked().connections.get(&self.number).is_some_and(newcomer) {
            std::future::pending::<()>().await;
        }
    }
}

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        if let Some(holder) = self.0.slots.held.locked().connections.get_mut(&self.0.number) {
            holder.asking -= 1;
            holder.since = Instant::now();
        }
        self.0.slots.freed.notify_waiters();
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        self.slots.held.locked().connections.remove(&self.number);
        self.slots.freed.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peer_that_holds_most_slots_loses_one_first() {
        let slots = ConnectionSlots::new(4, Duration::ZERO, 1, false);
        let crowd = Peer::Process(1);
        let _held: Vec<_> = (0..4).map(|_| slots.enter(crowd).unwrap()).collect();
        // The oldest of all from here on, but the only one of its process.
        let other = slots.enter(Peer::Process(2)).unwrap();
        for _ in 0..20 {
            slots.enter(crowd).unwrap();
        }
        let _more: Vec<_> = (0..20).map(|_| slots.enter(crowd).unwrap()).collect();
        assert!(slots.held.locked().connections.contains_key(&other.number));
        assert_eq!(slots.held.locked().count(false), 4);
    }
}
