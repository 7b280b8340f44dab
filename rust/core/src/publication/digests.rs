//! The checksums of a publication's blocks.
//!
//! Those of a private copy are computed once, when they are first asked for or while the block is sent and is in cache
//! anyway. Borrowed memory may change, so its checksums are computed anew whenever they are asked for: a receiver that
//! compares them with what it got notices a change in the middle. Those of the pages of a file come from what stands
//! behind them ([`crate::Backing`]).
//!
//! Receivers that end together share a pass over the memory: a pass serves everybody who asked before it began, since it
//! reads each block later than they received it.
//!
//! Computing checks for a withdrawal after each MiB, so that a withdrawal waits for no more than that.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use tensorferry_wire::digest::{BLOCK_SIZE, DigestTable, Hasher};
use tokio::sync::OnceCell;
use tokio::task::{JoinError, spawn_blocking};

use super::{Abandoned, Lease, LeasedSegments, Stability};
use crate::payload::blocks_of;
use crate::sync::{Locked, parallel};

/// The number of bytes that justifies another thread; each thread takes `PART_BYTES` at a time.
const THREAD_BYTES: u64 = 64 << 20;
const PART_BYTES: u64 = 16 << 20;

/// Threads that compute the checksums of one answer: one for each core, up to four, and for one in two of more cores,
/// up to 16: a core of a large machine does not get all that its memory gives, and the trainer wants cores, too.
fn most_threads() -> u64 {
    most_threads_by(std::thread::available_parallelism().map_or(1, std::num::NonZero::get))
}

fn most_threads_by(cores: usize) -> u64 {
    cores.min(4).max((cores / 2).min(16)) as u64
}

/// A block's checksum, once it is known.
#[derive(Default)]
pub(super) struct BlockDigest {
    known: AtomicBool,
    value: AtomicU64,
}

impl BlockDigest {
    fn get(&self) -> Option<u64> {
        self.known.load(Ordering::Acquire).then(|| self.value.load(Ordering::Relaxed))
    }

    fn note(&self, value: u64) {
        self.value.store(value, Ordering::Relaxed);
        self.known.store(true, Ordering::Release);
    }
}

/// The passes over the memory of one publication that have not begun, and the turn of the one that runs.
#[derive(Default)]
pub(super) struct Passes {
    waiting: Mutex<Vec<Arc<Pass>>>,
    turn: tokio::sync::Mutex<()>,
}

/// One pass, and its table once it is over.
struct Pass {
    runs: Vec<(u64, u64)>,
    table: OnceCell<Option<Arc<DigestTable>>>,
}

impl Passes {
    /// The pass over `runs` that begins next.
    fn next(&self, runs: Vec<(u64, u64)>) -> Arc<Pass> {
        let mut waiting = self.waiting.locked();
        // Those whose receivers have all gone are asked for by nobody.
        waiting.retain(|pass| Arc::strong_count(pass) > 1);
        let joined = waiting.iter().find(|pass| pass.runs == runs).cloned();
        joined.unwrap_or_else(|| {
            let pass = Arc::new(Pass { runs, table: OnceCell::new() });
            waiting.push(Arc::clone(&pass));
            pass
        })
    }

    /// Notes that `pass` begins: nobody can join it any more.
    fn begin(&self, pass: &Arc<Pass>) {
        self.waiting.locked().retain(|other| !Arc::ptr_eq(other, pass));
    }
}

impl LeasedSegments {
    /// Returns the checksum of block `index` as it is now. That of a private copy, which cannot change, is computed once.
    fn digest_block(&self, index: usize) -> u64 {
        let publication = self.lease().publication();
        let known = publication.blocks[index].get();
        if let Some(known) = known.filter(|_| publication.stability == Stability::Private) {
            return known;
        }
        let value = self.digest_payload(index as u64 * BLOCK_SIZE, BLOCK_SIZE);
        publication.blocks[index].note(value);
        if let Some(backing) = publication.backing.as_ref().filter(|_| known.is_some_and(|known| known != value)) {
            backing.note_changed();
        }
        value
    }

    /// Puts the checksums of the blocks with these `numbers`, each of `block_size` bytes, into `digests`. Returns false if a
    /// withdrawal has ended that early.
    fn digest_blocks(&self, numbers: &[u64], block_size: u64, digests: &mut [u64]) -> bool {
        // A withdrawal is looked for once per MiB, so that it waits for no more than that.
        let blocks_per_check = usize::try_from(BLOCK_SIZE / block_size).unwrap_or(1);
        for (index, (&number, digest)) in numbers.iter().zip(digests).enumerate() {
            if index.is_multiple_of(blocks_per_check) && self.lease().publication().is_withdrawn() {
                return false;
            }
            *digest = match usize::try_from(number) {
                Ok(number) if block_size == BLOCK_SIZE => self.digest_block(number),
                _ => self.digest_payload(number * block_size, block_size),
            };
        }
        true
    }

    /// Returns the checksum of up to `len` bytes from `start` of the payload on. If the pages of a file have changed, it is
    /// 0, and the publication is noted as changed.
    pub(super) fn digest_payload(&self, start: u64, len: u64) -> u64 {
        let publication = self.lease().publication();
        let start = publication.payload_start + start;
        let end = (start + len).min(self.len());
        let Some(backing) = &publication.backing else {
            let mut hasher = publication.algorithm.hasher();
            self.visit(start, end, |region| {
                hasher.update(region.bytes());
                true
            });
            return hasher.finish();
        };
        let mut parts = Vec::new();
        self.visit(start, end, |region| {
            parts.push(region.bytes());
            true
        });
        backing.digest(&publication.algorithm, &parts).unwrap_or_else(|| {
            backing.note_changed();
            0
        })
    }
}

impl Lease {
    /// The block that starts at byte `offset` of the container, if it ends before `end` and its checksum is taken when
    /// it is sent: of a private copy, and not yet known.
    pub(crate) fn block_to_digest(&self, offset: u64, end: u64) -> Option<usize> {
        let publication = self.publication();
        let relative = offset.checked_sub(publication.payload_start)?;
        let whole = (relative + BLOCK_SIZE).min(publication.payload_len());
        let wanted = relative.is_multiple_of(BLOCK_SIZE) && whole <= end - publication.payload_start;
        let index = usize::try_from(relative / BLOCK_SIZE).ok().filter(|_| wanted)?;
        let known = publication.blocks.get(index)?.get();
        (known.is_none() && publication.stability == Stability::Private).then_some(index)
    }

    /// Whether a block ends at byte `offset` of the container.
    pub(crate) fn is_block_end(&self, offset: u64) -> bool {
        let publication = self.publication();
        offset == publication.content.len()
            || offset.checked_sub(publication.payload_start).is_some_and(|o| o.is_multiple_of(BLOCK_SIZE))
    }

    /// A hasher for a block's checksum.
    pub(crate) fn hasher(&self) -> Hasher {
        self.publication().algorithm.hasher()
    }

    /// Block `index` was sent with this checksum.
    pub(crate) fn note_digest(&self, index: usize, value: u64) {
        self.publication().blocks[index].note(value);
    }

    /// Takes the checksum of the block at byte `offset` of the container where it has to be: called right before the
    /// block is sent, while it is in cache anyway.
    pub(crate) fn digest_before_sending(self: &Arc<Self>, offset: u64, end: u64) {
        if let Some(index) = self.block_to_digest(offset, end) {
            self.content().digest_block(index);
        }
    }

    /// As [`Lease::digests`], on a thread for blocking work. Where there is much to read, all who ask for the same runs
    /// before a pass over them begins get the table of that pass, and passes run one after another.
    pub(crate) async fn next_digests(
        self: Arc<Self>,
        runs: Vec<(u64, u64)>,
        block_size: u64,
    ) -> Result<Option<Arc<DigestTable>>, JoinError> {
        let compute = |lease: Arc<Self>, runs: Vec<_>| async move {
            Ok(spawn_blocking(move || lease.digests(&runs, block_size)).await?.map(Arc::new))
        };
        let nbytes = block_size * runs.iter().map(|run| run.1 - run.0).sum::<u64>();
        if block_size != BLOCK_SIZE || nbytes < THREAD_BYTES {
            return compute(self, runs).await;
        }
        let publication = self.publication_arc();
        let pass = publication.passes.next(runs);
        let run = || async {
            let _turn = publication.passes.turn.lock().await;
            publication.passes.begin(&pass);
            compute(self, pass.runs.clone()).await
        };
        pass.table.get_or_try_init(run).await.cloned()
    }

    /// The digests of the blocks in `runs`, of `block_size` bytes each, of which there must be so many: of borrowed
    /// memory as it is now. `None` when the publication was withdrawn meanwhile, or its memory is not what was published
    /// any more. Takes several threads where there is much to read.
    pub(crate) fn digests(self: &Arc<Self>, runs: &[(u64, u64)], block_size: u64) -> Option<DigestTable> {
        let (publication, content) = (self.publication(), self.content());
        let numbers: Vec<u64> = blocks_of(runs).collect();
        let mut blocks = vec![0; numbers.len()];
        let threads = if self.digests_known(runs, block_size) {
            1
        } else {
            (numbers.len() as u64 * block_size / THREAD_BYTES).clamp(1, most_threads())
        };
        let part = usize::try_from(PART_BYTES / block_size).unwrap_or(1);
        let parts: Mutex<Vec<_>> = Mutex::new(numbers.chunks(part).zip(blocks.chunks_mut(part)).collect());
        let whole = AtomicBool::new(true);
        let compute = || loop {
            let next = parts.locked().pop();
            let Some((numbers, digests)) = next else { return };
            whole.fetch_and(content.digest_blocks(numbers, block_size, digests), Ordering::Relaxed);
        };
        parallel("tensorferry-digest", usize::try_from(threads).unwrap_or(1), compute);
        drop(parts);
        let whole = whole.into_inner() && publication.is_intact();
        whole.then(|| DigestTable { header: publication.header_digest, payload_len: publication.payload_len(), blocks })
    }

    /// Waits until the first `end` blocks of `block_size` bytes are final.
    pub(crate) fn blocks_ready(
        &self,
        end: u64,
        block_size: u64,
    ) -> impl Future<Output = Result<(), Abandoned>> + Send + use<> {
        let publication = self.publication();
        let end = publication.payload_start.saturating_add(end.saturating_mul(block_size));
        publication.ready(end.min(publication.content.len()))
    }

    /// How many blocks of `block_size` bytes the payload has.
    pub(crate) fn block_count(&self, block_size: u64) -> u64 {
        self.publication().payload_len().div_ceil(block_size)
    }

    /// Whether the digests of these blocks are known already and cannot have changed, so that asking costs nothing.
    pub(crate) fn digests_known(&self, runs: &[(u64, u64)], block_size: u64) -> bool {
        let known = |&(first, end): &(u64, u64)| {
            let (Ok(first), Ok(end)) = (usize::try_from(first), usize::try_from(end)) else { return false };
            self.publication().blocks[first..end].iter().all(|b| b.get().is_some())
        };
        block_size == BLOCK_SIZE && self.publication().stability == Stability::Private && runs.iter().all(known)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;
    use std::time::Duration;

    use tensorferry_wire::digest::Algorithm;

    use super::super::fixtures;
    use super::*;
    use crate::payload::Backing;

    /// Memory that counts how many of its blocks are read.
    struct Counting(Arc<AtomicUsize>);

    impl Backing for Counting {
        fn is_unchanged(&self) -> bool {
            true
        }

        fn note_changed(&self) {}

        fn digest(&self, _: &Algorithm, _: &[&[u8]]) -> Option<u64> {
            Some(self.0.fetch_add(1, Ordering::Relaxed) as u64)
        }
    }

    #[tokio::test]
    async fn all_who_ask_before_a_pass_begins_get_its_table_and_who_asks_later_another_one() {
        let (read, blocks) = (Arc::new(AtomicUsize::new(0)), THREAD_BYTES / BLOCK_SIZE);
        let memory = vec![0; usize::try_from(THREAD_BYTES).unwrap()];
        let mut publication =
            fixtures::publication(Stability::Borrowed, memory).with_backing(Box::new(Counting(Arc::clone(&read))));
        publication.seal("\"a\"".to_owned(), &Algorithm::Crc64);
        let publication = Arc::new(publication);
        let ask = || {
            let lease = Lease::take(&publication, &Arc::default(), true).unwrap();
            tokio::spawn(lease.next_digests(vec![(0, blocks)], BLOCK_SIZE))
        };
        let turn = publication.passes.turn.lock().await;
        let asked: Vec<_> = std::iter::repeat_with(ask).take(8).collect();
        let joined = || publication.passes.waiting.locked().first().is_some_and(|pass| Arc::strong_count(pass) > 8);
        let all_joined = async {
            while !joined() {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), all_joined).await.expect("they share a pass");
        // The first to ask, who would make the pass, goes away.
        asked[0].abort();
        drop(turn);
        let mut tables = Vec::new();
        for one in asked.into_iter().skip(1) {
            tables.push(one.await.unwrap().unwrap().unwrap().blocks.clone());
        }
        assert!(tables.iter().all(|table| *table == tables[0]));
        assert_eq!(read.load(Ordering::Relaxed) as u64, blocks, "one pass serves them all");
        assert_ne!(ask().await.unwrap().unwrap().unwrap().blocks, tables[0], "this one asked after the pass had begun");
        assert!(publication.passes.waiting.locked().is_empty());
    }
}
