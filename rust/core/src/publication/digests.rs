//! The checksums of a publication's blocks: taken when they are first needed, or as they are sent.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use tensorferry_wire::digest::{BLOCK_SIZE, DigestTable, Hasher};

use super::{Lease, Publication, Stability};
use crate::filling::Abandoned;

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

impl Publication {
    /// Checksums block `index` as it is now.
    fn digest_block(&self, index: usize) -> u64 {
        let value = self.digest_payload(index as u64 * BLOCK_SIZE, BLOCK_SIZE);
        self.blocks[index].note(value);
        value
    }

    /// Checksums up to `len` bytes from `start` of the payload on.
    fn digest_payload(&self, start: u64, len: u64) -> u64 {
        let start = self.payload_start + start;
        let mut hasher = self.algorithm.hasher();
        self.content.visit(start, (start + len).min(self.content.len()), |region| {
            // SAFETY: a lease on this publication is held by every caller, and the owner outlives leases.
            hasher.update(unsafe { region.as_slice() });
            true
        });
        hasher.finish()
    }
}

impl Lease {
    /// The block that starts at byte `offset` of the container, if it ends before `end` and its checksum has to be taken
    /// when it is sent: not yet known, or of borrowed memory, which may have changed.
    pub(crate) fn block_to_digest(&self, offset: u64, end: u64) -> Option<usize> {
        let publication = self.publication();
        let relative = offset.checked_sub(publication.payload_start)?;
        let whole = (relative + BLOCK_SIZE).min(publication.payload_len());
        let wanted = relative.is_multiple_of(BLOCK_SIZE) && whole <= end - publication.payload_start;
        let index = usize::try_from(relative / BLOCK_SIZE).ok().filter(|_| wanted)?;
        let known = publication.blocks.get(index)?.get();
        (known.is_none() || publication.stability == Stability::Borrowed).then_some(index)
    }

    /// Whether a block ends at byte `offset` of the container.
    pub(crate) fn is_block_end(&self, offset: u64) -> bool {
        let publication = self.publication();
        offset == publication.content.len()
            || offset.checked_sub(publication.payload_start).is_some_and(|o| o.is_multiple_of(BLOCK_SIZE))
    }

    /// What takes a block's checksum.
    pub(crate) fn hasher(&self) -> Hasher {
        self.publication().algorithm.hasher()
    }

    /// Block `index` was sent with this checksum.
    pub(crate) fn note_digest(&self, index: usize, value: u64) {
        self.publication().blocks[index].note(value);
    }

    /// Takes the checksum of the block at byte `offset` of the container where it has to be: called right before the
    /// block is sent, while it is in cache anyway.
    pub(crate) fn digest_before_sending(&self, offset: u64, end: u64) {
        if let Some(index) = self.block_to_digest(offset, end) {
            self.publication().digest_block(index);
        }
    }

    /// The digests of the blocks in `runs`, of `grain` bytes each, of which there must be so many. `None` when the
    /// publication was withdrawn meanwhile.
    pub(crate) fn digests(&self, runs: &[(u64, u64)], grain: u64) -> Option<DigestTable> {
        let publication = self.publication();
        let mut blocks = Vec::new();
        for (first, index) in runs.iter().flat_map(|&(first, end)| (first..end).map(move |index| (first, index))) {
            let look = index == first || (index * grain).is_multiple_of(BLOCK_SIZE);
            if look && publication.stability == Stability::Borrowed && publication.is_withdrawn() {
                return None;
            }
            blocks.push(match usize::try_from(index) {
                Ok(index) if grain == BLOCK_SIZE => {
                    publication.blocks[index].get().unwrap_or_else(|| publication.digest_block(index))
                }
                _ => publication.digest_payload(index * grain, grain),
            });
        }
        Some(DigestTable { header: publication.header_digest, payload_len: publication.payload_len(), blocks })
    }

    /// Waits until the first `end` blocks of `grain` bytes are final.
    pub(crate) fn blocks_ready(
        &self,
        end: u64,
        grain: u64,
    ) -> impl Future<Output = Result<(), Abandoned>> + Send + use<> {
        let publication = self.publication();
        let end = publication.payload_start.saturating_add(end.saturating_mul(grain));
        publication.ready(end.min(publication.content.len()))
    }

    /// How many blocks of `grain` bytes the payload has.
    pub(crate) fn block_count(&self, grain: u64) -> u64 {
        self.publication().payload_len().div_ceil(grain)
    }

    /// Whether the digests of these blocks are known already, so that asking costs nothing.
    pub(crate) fn digests_known(&self, runs: &[(u64, u64)], grain: u64) -> bool {
        let known = |&(first, end): &(u64, u64)| {
            let (Ok(first), Ok(end)) = (usize::try_from(first), usize::try_from(end)) else { return false };
            self.publication().blocks[first..end].iter().all(|b| b.get().is_some())
        };
        grain == BLOCK_SIZE && runs.iter().all(known)
    }
}
