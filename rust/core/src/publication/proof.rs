//! The one table of digests that serves all members of a swarm: computed once, and proven to be of one moment.
//!
//! Borrowed memory may change while it is read. Two passes over it with equal results, the second begun after the first
//! had ended, prove a moment: what was so in the first pass and is so again in the second was so when the first ended.
//! A receiver whose bytes have these digests has the state of that moment, whenever and from whomever they came, and
//! whatever has become of the memory since. A private copy does not change, and one pass does.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tensorferry_wire::digest::{BLOCK_SIZE, WideTable, block_count};
use tokio::sync::Notify;

use super::{Lease, LeasedSegments, Publication, Stability};

/// Passes over memory that is another one each time, after which it is left at that.
const MOST_PASSES: u32 = 6;

/// The table of one publication, and how far it is.
#[derive(Default)]
pub(super) struct Proof {
    state: Mutex<State>,
    news: Notify,
    /// Whether the memory is wanted back.
    wanted_back: AtomicBool,
}

#[derive(Default)]
enum State {
    #[default]
    Unknown,
    Running,
    Proven(Arc<WideTable>),
    /// The memory changes all the time.
    Given,
}

impl fmt::Debug for Proof {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Proof(..)")
    }
}

impl Proof {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What asking for the table leads to.
pub(crate) enum Asked {
    Proven,
    /// The one who asks is to compute it: [`Lease::prove`].
    Compute,
    /// Somebody computes it.
    Running,
    /// There will be none.
    Never,
}

impl Publication {
    /// Notes that the memory is wanted back: members of a swarm should do without it as soon as they can.
    pub(super) fn note_wanted_back(&self) {
        self.proof.wanted_back.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_wanted_back(&self) -> bool {
        self.proof.wanted_back.load(Ordering::Relaxed)
    }

    /// The table, if there is one.
    pub(crate) fn proven(&self) -> Option<Arc<WideTable>> {
        match &*self.proof.state() {
            State::Proven(table) => Some(Arc::clone(table)),
            _ => None,
        }
    }

    /// Asks for the table. There is none of memory that is still being filled, or that is checksummed by what stands
    /// behind it.
    pub(crate) fn ask_for_proof(&self) -> Asked {
        let mut state = self.proof.state();
        match &*state {
            State::Proven(_) => Asked::Proven,
            State::Running => Asked::Running,
            State::Unknown if self.backing.is_none() && self.is_ready(self.total_len()) => {
                *state = State::Running;
                Asked::Compute
            }
            State::Unknown | State::Given => Asked::Never,
        }
    }

    /// Waits until a proof that is running has ended.
    pub(crate) async fn proof_ended(&self) {
        loop {
            let news = self.proof.news.notified();
            tokio::pin!(news);
            news.as_mut().enable();
            if !matches!(*self.proof.state(), State::Running) {
                return;
            }
            news.await;
        }
    }
}

/// Ends a proof, also where its thread panics.
struct Ended<'a>(&'a Proof, Option<State>);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        *self.0.state() = self.1.take().unwrap_or_default();
        self.0.news.notify_waiters();
    }
}

impl Lease {
    /// Computes the table after [`Asked::Compute`]. Ends early at a withdrawal.
    pub(crate) fn prove(self: &Arc<Self>) {
        let publication = self.publication();
        let mut ended = Ended(&publication.proof, None);
        let content = self.content();
        ended.1 = match settled(|| content.pass(), publication.stability == Stability::Private) {
            Some(blocks) => {
                let (header, payload_len) = (publication.header_digest, publication.payload_len());
                Some(State::Proven(Arc::new(WideTable { header, payload_len, blocks })))
            }
            None if publication.is_withdrawn() => None,
            None => Some(State::Given),
        };
    }
}

/// What two passes have found, one right after the other, or one over what cannot change; `None` where a pass is cut
/// short, or none is like the one before.
fn settled(mut pass: impl FnMut() -> Option<Vec<u128>>, is_private: bool) -> Option<Vec<u128>> {
    let mut last = pass()?;
    for _ in 1..MOST_PASSES {
        if is_private {
            return Some(last);
        }
        let again = pass()?;
        if again == last {
            return Some(last);
        }
        last = again;
    }
    None
}

impl LeasedSegments {
    /// One pass over the payload; `None` where a withdrawal ends it.
    fn pass(&self) -> Option<Vec<u128>> {
        let publication = self.lease().publication();
        let (start, len) = (publication.payload_start, publication.payload_len());
        let mut digests = Vec::new();
        for block in 0..block_count(len) {
            if publication.is_withdrawn() {
                return None;
            }
            let from = start + block * BLOCK_SIZE;
            let mut hasher = publication.algorithm.hasher();
            self.visit(from, (from + BLOCK_SIZE).min(self.len()), |region| {
                hasher.update(region.bytes());
                true
            });
            digests.push(hasher.finish_wide());
        }
        Some(digests)
    }
}

#[cfg(test)]
mod tests {
    use tensorferry_wire::digest::Algorithm;
    use tensorferry_wire::dtype::Dtype;

    use super::*;
    use crate::payload::Item;

    fn publication(stability: Stability, bytes: Vec<u8>) -> Arc<Publication> {
        let item = Item::bytes("w", Dtype::U8, &[bytes.len() as u64], bytes.into());
        let mut publication = Publication::new(Vec::new(), vec![item], stability, Box::new(())).unwrap();
        publication.seal("\"a\"".to_owned(), &Algorithm::Keyed([3; 32]));
        Arc::new(publication)
    }

    fn prove(publication: &Arc<Publication>) {
        assert!(matches!(publication.ask_for_proof(), Asked::Compute));
        assert!(matches!(publication.ask_for_proof(), Asked::Running), "it is computed once");
        Lease::take(publication, &Arc::default(), false).unwrap().prove();
    }

    #[test]
    fn the_table_is_of_what_the_memory_holds() {
        for stability in [Stability::Private, Stability::Borrowed] {
            let bytes = vec![5; (1 << 20) + 7];
            let publication = publication(stability, bytes.clone());
            prove(&publication);
            let table = publication.proven().unwrap();
            let algorithm = Algorithm::Keyed([3; 32]);
            let payload = [&bytes[..], &vec![0; usize::try_from(table.payload_len).unwrap() - bytes.len()]].concat();
            let blocks: Vec<_> = payload.chunks(1 << 20).map(|block| algorithm.wide_checksum(block)).collect();
            assert_eq!((table.header, &table.blocks), (publication.header_digest, &blocks));
            assert!(matches!(publication.ask_for_proof(), Asked::Proven));
        }
    }

    #[test]
    fn only_two_equal_passes_in_a_row_prove_a_moment() {
        let run = |found: &[u128], is_private| {
            let mut passes = found.iter().map(|&found| vec![found]);
            settled(|| passes.next(), is_private)
        };
        assert_eq!(run(&[1, 1], false), Some(vec![1]));
        assert_eq!(run(&[1, 2, 1, 1], false), Some(vec![1]));
        assert_eq!(run(&[1, 2, 1, 2, 1, 2, 2], false), None, "it changes all the time");
        assert_eq!(run(&[1], false), None, "cut short");
        assert_eq!(run(&[1], true), Some(vec![1]));
    }

    #[test]
    fn what_is_withdrawn_is_not_read_for_a_proof() {
        let publication = publication(Stability::Borrowed, vec![5; 1 << 20]);
        assert!(matches!(publication.ask_for_proof(), Asked::Compute));
        let lease = Lease::take(&publication, &Arc::default(), false).unwrap();
        publication.close();
        lease.prove();
        assert!(publication.proven().is_none());
        assert!(matches!(publication.ask_for_proof(), Asked::Compute), "it has not failed for good");
    }
}
