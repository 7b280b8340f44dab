//! The checksums of a publication's blocks.
//!
//! Those of a private copy are computed once, when they are first asked for or while the block is sent and is in cache
//! anyway. Borrowed memory may change, so its checksums are computed anew whenever they are asked for: a receiver that
//! compares them with what it got notices a change in the middle. Those of the pages of a file come from what stands
//! behind them ([`crate::Backing`]).
//!
//! Computing checks for a withdrawal after each MiB, so that a withdrawal waits for no more than that.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use tensorferry_wire::digest::{BLOCK_SIZE, DigestTable, Hasher};

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
