//! The one table of digests that serves all members of a swarm: computed once, and proven to be of one moment.
//!
//! Borrowed memory may change while it is read. Two passes over it with equal results, the second begun after the first
//! had ended, prove a moment: what was so in the first pass and is so again in the second was so when the first ended.
//! A receiver whose bytes have these digests has the state of that moment, whenever and from whomever they came, and
//! whatever has become of the memory since. A private copy does not change, and one pass does.
//!
//! The long checksum of a block is taken in the second pass, right before the short one that is compared with that of the
//! first. It is therefore of the same moment, and the slower of the two is computed once.

use std::fmt;
use std::sync::{Arc, Mutex};

use tensorferry_wire::digest::{Algorithm, BLOCK_SIZE, BlockDigests, Hasher, WideTable, block_count};
use tokio::sync::Notify;

use super::{Lease, LeasedSegments, Publication, Stability};
use crate::sync::Locked;

/// Passes over memory that is another one each time, after which it is left at that.
const MOST_PASSES: u32 = 6;

/// The table of one publication, and how far it is.
#[derive(Default)]
pub(super) struct Proof {
    state: Mutex<State>,
    news: Notify,
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

/// What asking for the table leads to.
pub(crate) enum Asked {
    Proven,
    /// The one who asks is to compute it: [`Lease::prove`].
    Compute,
    /// Somebody computes it.
    Running,
    /// There is none, and nobody computes one: the memory is still being filled, or changes all the time.
    Never,
}

impl Publication {
    /// The table, if there is one.
    pub(crate) fn proven(&self) -> Option<Arc<WideTable>> {
        match &*self.proof.state.locked() {
            State::Proven(table) => Some(Arc::clone(table)),
            _ => None,
        }
    }

    /// Asks for the table. Memory that is still being filled has none yet. After [`Asked::Compute`] the caller must
    /// call [`Lease::prove`]: until then everybody else waits.
    pub(crate) fn ask_for_proof(&self) -> Asked {
        let mut state = self.proof.state.locked();
        match &*state {
            State::Proven(_) => Asked::Proven,
            State::Running => Asked::Running,
            State::Unknown if self.is_ready(self.total_len()) => {
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
            if !matches!(*self.proof.state.locked(), State::Running) {
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
        *self.0.state.locked() = self.1.take().unwrap_or_default();
        self.0.news.notify_waiters();
    }
}

impl Lease {
    /// Computes the table after [`Asked::Compute`]. Ends early at a withdrawal.
    pub(crate) fn prove(self: &Arc<Self>) {
        let publication = self.publication();
        let mut ended = Ended(&publication.proof, None);
        let content = self.content();
        // What stands behind memory can change it, whoever else may write to it.
        let is_private = publication.stability == Stability::Private && publication.backing.is_none();
        let found = settled(|long| content.pass(long), is_private);
        ended.1 = match found.filter(|blocks| content.are_as_published(blocks)) {
            Some(blocks) => {
                let (header, payload_len) = (publication.header_digest, publication.payload_len());
                Some(State::Proven(Arc::new(WideTable { header, payload_len, blocks })))
            }
            None if publication.is_withdrawn() => None,
            None => Some(State::Given),
        };
    }
}

/// What the second of two equal passes has found, one right after the other, or one over what cannot change; `None` where
/// a pass is cut short, or none is like the one before. `pass` is told whether long checksums are wanted.
fn settled(mut pass: impl FnMut(bool) -> Option<Vec<BlockDigests>>, is_private: bool) -> Option<Vec<BlockDigests>> {
    if is_private {
        return pass(true);
    }
    let mut last = pass(false)?;
    for _ in 1..MOST_PASSES {
        let again = pass(true)?;
        if again.iter().map(|block| block.short).eq(last.iter().map(|block| block.short)) {
            return Some(again);
        }
        last = again;
    }
    None
}

impl LeasedSegments {
    /// One pass over the payload, for long checksums as well or, where they cost more, for short ones alone; `None` where
    /// a withdrawal ends it.
    fn pass(&self, long: bool) -> Option<Vec<BlockDigests>> {
        let publication = self.lease().publication();
        let len = publication.payload_len();
        let mut digests = Vec::new();
        for block in 0..block_count(len) {
            if publication.is_withdrawn() {
                return None;
            }
            digests.push(match &publication.algorithm {
                keyed @ Algorithm::Keyed(_) => BlockDigests::keyed(self.hash(block, keyed).finish_wide()),
                open => {
                    let long = if long { self.hash(block, &open.for_relayed()).finish_wide() } else { 0 };
                    BlockDigests { short: self.hash(block, open).finish(), long }
                }
            });
        }
        Some(digests)
    }

    /// Whether `blocks` are the checksums of what was published, as far as what stands behind the memory can tell.
    fn are_as_published(&self, blocks: &[BlockDigests]) -> bool {
        let publication = self.lease().publication();
        publication.backing.as_ref().is_none_or(|backing| {
            let mut starts = (0..).step_by(usize::try_from(BLOCK_SIZE).unwrap_or(usize::MAX));
            let same = |found: &BlockDigests| {
                !publication.is_withdrawn()
                    && starts.next().is_some_and(|start| self.digest_payload(start, BLOCK_SIZE) == found.short)
            };
            blocks.iter().all(same) && backing.is_unchanged()
        })
    }

    /// A block as it is now, hashed.
    fn hash(&self, block: u64, algorithm: &Algorithm) -> Hasher {
        let from = self.lease().publication().payload_start + block * BLOCK_SIZE;
        let mut hasher = algorithm.hasher();
        self.visit(from, (from + BLOCK_SIZE).min(self.len()), |region| {
            hasher.update(region.bytes());
            true
        });
        hasher
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::super::fixtures;
    use super::*;

    const ALGORITHMS: [Algorithm; 2] = [Algorithm::Crc64, Algorithm::Keyed([3; 32])];

    fn publication(stability: Stability, bytes: Vec<u8>, algorithm: &Algorithm) -> Arc<Publication> {
        let mut publication = fixtures::publication(stability, bytes);
        publication.seal("\"a\"".to_owned(), algorithm);
        Arc::new(publication)
    }

    fn prove(publication: &Arc<Publication>) {
        assert!(matches!(publication.ask_for_proof(), Asked::Compute));
        assert!(matches!(publication.ask_for_proof(), Asked::Running), "it is computed once");
        Lease::take(publication, &Arc::default(), false).unwrap().prove();
    }

    #[test]
    fn the_table_is_of_what_the_memory_holds() {
        let both = [Stability::Private, Stability::Borrowed];
        for (stability, algorithm) in both.into_iter().flat_map(|s| ALGORITHMS.map(|algorithm| (s, algorithm))) {
            let bytes = vec![5; (1 << 20) + 7];
            let publication = publication(stability, bytes.clone(), &algorithm);
            prove(&publication);
            let table = publication.proven().unwrap();
            let payload = [&bytes[..], &vec![0; usize::try_from(table.payload_len).unwrap() - bytes.len()]].concat();
            let long = algorithm.for_relayed();
            let digests = |block| BlockDigests { short: algorithm.checksum(block), long: long.wide_checksum(block) };
            let blocks: Vec<_> = payload.chunks(1 << 20).map(digests).collect();
            assert_eq!((table.header, &table.blocks), (publication.header_digest, &blocks));
            assert!(matches!(publication.ask_for_proof(), Asked::Proven));
        }
    }

    /// A file whose checksums were written down for `published`.
    struct File {
        published: Vec<u8>,
        changed: AtomicBool,
    }

    impl crate::payload::Backing for File {
        fn is_unchanged(&self) -> bool {
            !self.changed.load(Ordering::Relaxed)
        }

        fn note_changed(&self) {
            self.changed.store(true, Ordering::Relaxed);
        }

        fn digest(&self, algorithm: &Algorithm, parts: &[&[u8]]) -> Option<u64> {
            let len: usize = parts.iter().map(|part| part.len()).sum();
            (parts.concat() == self.published[..len]).then(|| algorithm.checksum(&self.published[..len]))
        }
    }

    #[test]
    fn of_a_file_only_what_was_published_is_proven() {
        for (served, proven) in [(5, true), (6, false)] {
            let mut publication = fixtures::publication(Stability::Private, vec![served; 4096])
                .with_backing(Box::new(File { published: vec![5; 4096], changed: AtomicBool::new(false) }));
            publication.seal("\"a\"".to_owned(), &Algorithm::Crc64);
            let publication = Arc::new(publication);
            prove(&publication);
            assert_eq!(publication.proven().is_some(), proven);
            assert_eq!(publication.backing.as_ref().unwrap().is_unchanged(), proven);
        }
    }

    #[test]
    fn only_two_equal_passes_in_a_row_prove_a_moment() {
        let run = |found: &[u64], is_private| {
            let mut passes = found.iter().copied();
            // The long one is that of the second pass, and of it alone.
            let digests = |short, long: bool| vec![BlockDigests { short, long: u128::from(short) * u128::from(long) }];
            settled(|long| passes.next().map(|short| digests(short, long)), is_private)
        };
        let proven = Some(vec![BlockDigests { short: 1, long: 1 }]);
        assert_eq!(run(&[1, 1], false), proven);
        assert_eq!(run(&[1, 2, 1, 1], false), proven);
        assert_eq!(run(&[1, 2, 1, 2, 1, 2, 2], false), None, "it changes all the time");
        assert_eq!(run(&[1], false), None, "cut short");
        assert_eq!(run(&[1], true), proven);
    }

    #[test]
    fn what_is_withdrawn_is_not_read_for_a_proof() {
        let publication = publication(Stability::Borrowed, vec![5; 1 << 20], &Algorithm::Crc64);
        assert!(matches!(publication.ask_for_proof(), Asked::Compute));
        let lease = Lease::take(&publication, &Arc::default(), false).unwrap();
        publication.close();
        lease.prove();
        assert!(publication.proven().is_none());
        assert!(matches!(publication.ask_for_proof(), Asked::Compute), "it has not failed for good");
    }
}
