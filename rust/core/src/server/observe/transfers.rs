//! What is being sent, to whom and how fast: noted once for each answer, and looked at by `figures`.
//!
//! An answer costs the table one lock at its beginning and one at its end; the bytes in between are counted by the
//! connection anyway.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::server::body::Progress;
use crate::server::connection_slots::Peer;

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
    /// The latest answer: when it began, what `progress` stood at then, and when and where it ended.
    since: Instant,
    from: u64,
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
    pub(in crate::server) bytes_per_second: f64,
    pub(in crate::server) took: Duration,
}

impl Transfers {
    fn sent(&self) -> MutexGuard<'_, BTreeMap<u64, Sent>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
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
        {
            (known.since, known.from, known.ended) = (now, at, None);
            return;
        }
        let Snapshot { step, etag, total } = *snapshot;
        let (etag, progress) = (etag.to_owned(), Arc::clone(progress));
        let new = Sent { peer, step, etag, total, began: now, progress, before: at, since: now, from: at, ended: None };
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
        for sent in self.sent().values() {
            if sent.ended.is_some_and(|(ended, _)| ended.elapsed() > BETWEEN) {
                continue;
            }
            let (until, at) =
                sent.ended.unwrap_or_else(|| (Instant::now(), sent.progress.bytes.load(Ordering::Relaxed)));
            let (bytes, took) = (at.saturating_sub(sent.before), sent.began.elapsed());
            let rate = at.saturating_sub(sent.from) as f64 / (until - sent.since).as_secs_f64().max(1e-3);
            let same = |(transfer, etag): (&Transfer, &String)| transfer.peer == sent.peer && *etag == sent.etag;
            if let Some(index) = transfers.iter().zip(&etags).position(same) {
                let known = &mut transfers[index];
                known.connections += 1;
                known.sent += bytes;
                known.bytes_per_second += rate;
                known.took = known.took.max(took);
            } else {
                let Sent { peer, step, total, .. } = *sent;
                etags.push(sent.etag.clone());
                transfers.push(Transfer {
                    peer,
                    step,
                    connections: 1,
                    sent: bytes,
                    total,
                    bytes_per_second: rate,
                    took,
                });
            }
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
}
