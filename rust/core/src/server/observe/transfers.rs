//! What is being sent, to whom and how fast: noted once for each answer, and looked at by `figures`.
//!
//! An answer costs the table one lock at its beginning and one at its end; the bytes in between are counted by the
//! connection anyway.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use crate::server::body::Progress;
use crate::server::connection_slots::Peer;
use crate::sync::Locked;

/// How long a connection that is between two answers of a receive still counts as one that is sent to.
const BETWEEN: Duration = Duration::from_secs(2);

/// The connections that bodies of checkpoints went to, by number.
#[derive(Debug, Default)]
pub(in crate::server) struct Transfers(Mutex<BTreeMap<u64, Sent>>);

/// What one connection was sent of one snapshot.
#[derive(Debug)]
struct Sent {
    peer: Peer,
    step: i64,
    etag: String,
    /// Length of the container.
    total: u64,
    began: Instant,
    progress: Arc<Progress>,
    /// What `progress` stood at when the snapshot began.
    before: u64,
    /// When the latest answer ended, and what `progress` stood at then.
    ended: Option<(Instant, u64)>,
}

/// The snapshot that the body of an answer is part of.
pub(in crate::server) struct Snapshot<'a> {
    pub(in crate::server) step: i64,
    pub(in crate::server) etag: &'a str,
    /// Length of the container.
    pub(in crate::server) total: u64,
}

/// What one peer is being sent of one snapshot, over all of its connections.
#[derive(Clone, Debug)]
pub(in crate::server) struct Transfer {
    pub(in crate::server) peer: Peer,
    pub(in crate::server) step: i64,
    pub(in crate::server) connections: usize,
    pub(in crate::server) sent: u64,
    pub(in crate::server) total: u64,
    /// How long it has been going on, up to the end of the latest answer if none runs.
    pub(in crate::server) took: Duration,
}

impl Transfer {
    /// How fast it has gone since it began. A cap on what is sent lets single answers leave at once or not at all, so that
    /// no shorter time tells the rate.
    pub(in crate::server) fn bytes_per_second(&self) -> f64 {
        self.sent as f64 / self.took.as_secs_f64().max(1e-3)
    }
}

impl Sent {
    /// Whether nothing was sent for so long that the next answer begins another transfer.
    fn is_over(&self) -> bool {
        self.ended.is_some_and(|(ended, _)| ended.elapsed() > BETWEEN)
    }
}

impl Transfers {
    fn sent(&self) -> MutexGuard<'_, BTreeMap<u64, Sent>> {
        self.0.locked()
    }

    /// Notes that an answer of `connection` begins, whose bytes `progress` counts.
    pub(in crate::server) fn begin(
        &self,
        connection: u64,
        peer: Peer,
        snapshot: &Snapshot<'_>,
        progress: &Arc<Progress>,
    ) {
        let (now, at) = (Instant::now(), progress.bytes.load(Ordering::Relaxed));
        let mut sent = self.sent();
        if let Some(known) = sent.get_mut(&connection)
            && known.etag == snapshot.etag
            && known.step == snapshot.step
            && !known.is_over()
        {
            known.ended = None;
            return;
        }
        let Snapshot { step, etag, total } = *snapshot;
        let (etag, progress) = (etag.to_owned(), Arc::clone(progress));
        let new = Sent { peer, step, etag, total, began: now, progress, before: at, ended: None };
        sent.insert(connection, new);
    }

    /// Notes that the latest answer of `connection` is over.
    pub(in crate::server) fn end(&self, connection: u64) {
        if let Some(known) = self.sent().get_mut(&connection) {
            known.ended = Some((Instant::now(), known.progress.bytes.load(Ordering::Relaxed)));
        }
    }

    /// Notes that `connection` is closed.
    pub(in crate::server) fn leave(&self, connection: u64) {
        self.sent().remove(&connection);
    }

    /// The transfers that run now.
    pub(in crate::server) fn now(&self) -> Vec<Transfer> {
        let mut transfers: Vec<Transfer> = Vec::new();
        // By snapshot: two steps of different shelves may have the same number.
        let mut etags: Vec<String> = Vec::new();
        let mut spans: Vec<(Instant, Instant)> = Vec::new();
        for sent in self.sent().values() {
            if sent.is_over() {
                continue;
            }
            let (until, at) =
                sent.ended.unwrap_or_else(|| (Instant::now(), sent.progress.bytes.load(Ordering::Relaxed)));
            let bytes = at.saturating_sub(sent.before);
            let same = |(transfer, etag): (&Transfer, &String)| transfer.peer == sent.peer && *etag == sent.etag;
            if let Some(index) = transfers.iter().zip(&etags).position(same) {
                let known = &mut transfers[index];
                known.connections += 1;
                known.sent += bytes;
                spans[index] = (spans[index].0.min(sent.began), spans[index].1.max(until));
            } else {
                let Sent { peer, step, total, .. } = *sent;
                etags.push(sent.etag.clone());
                spans.push((sent.began, until));
                transfers.push(Transfer { peer, step, connections: 1, sent: bytes, total, took: Duration::ZERO });
            }
        }
        for (transfer, (began, until)) in transfers.iter_mut().zip(spans) {
            transfer.took = until - began;
        }
        transfers
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_of_one_peer_are_one_transfer_and_a_new_snapshot_is_a_new_one() {
        let transfers = Transfers::default();
        let (first, second) = (Arc::new(Progress::default()), Arc::new(Progress::default()));
        let peer = Peer::Process(7);
        let of = |etag| Snapshot { step: 1, etag, total: 100 };
        transfers.begin(1, peer, &of("a"), &first);
        transfers.begin(2, peer, &of("a"), &second);
        first.bytes.store(30, Ordering::Relaxed);
        second.bytes.store(20, Ordering::Relaxed);
        transfers.end(2);
        let now = transfers.now();
        assert_eq!((now.len(), now[0].connections, now[0].sent, now[0].total), (1, 2, 50, 100));
        transfers.begin(2, peer, &of("b"), &second);
        assert_eq!(transfers.now().iter().map(|t| (t.connections, t.sent)).collect::<Vec<_>>(), [(1, 30), (1, 0)]);
        transfers.leave(1);
        transfers.leave(2);
        assert!(transfers.now().is_empty());
    }

    #[test]
    fn the_rate_is_that_of_the_whole_transfer_and_not_of_its_latest_answer() {
        let transfers = Transfers::default();
        let progress = Arc::new(Progress::default());
        let snapshot = Snapshot { step: 1, etag: "a", total: 100_000 };
        let age = |by: Duration| {
            let mut sent = transfers.sent();
            let known = sent.get_mut(&1).unwrap();
            known.began = known.began.checked_sub(by).unwrap();
            known.ended = known.ended.map(|(ended, at)| (ended.checked_sub(by).unwrap(), at));
        };
        transfers.begin(1, Peer::Process(7), &snapshot, &progress);
        progress.bytes.store(40_000, Ordering::Relaxed);
        transfers.end(1);
        // The latest answer has just begun, and waits for its turn; then all of it leaves at once.
        transfers.begin(1, Peer::Process(7), &snapshot, &progress);
        age(Duration::from_secs(1000));
        for sent in [40_000, 80_000] {
            progress.bytes.store(sent, Ordering::Relaxed);
            let rate = transfers.now()[0].bytes_per_second();
            assert!(rate <= sent as f64 / 1000.0 && rate > sent as f64 / 2000.0, "{rate} of {sent}");
        }
        // A later receive over the same connection is another transfer.
        transfers.end(1);
        age(BETWEEN + Duration::from_secs(1));
        transfers.begin(1, Peer::Process(7), &snapshot, &progress);
        assert_eq!(transfers.now()[0].sent, 0);
    }
}
