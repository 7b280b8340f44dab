//! Going on with a receive that was interrupted: which blocks are in their places already.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use tensorferry_wire::digest::BLOCK_SIZE;

use super::Remote;
use crate::client::blocks::{block_len, requests};
use crate::client::lane_count;
use crate::client::ledger::BlockLedger;
use crate::error::Error;
use crate::memory::zeroed;
use crate::payload::{BlockRuns, Plan, blocks_of};
use crate::sync::parallel;

impl Remote {
    /// `missing` without the blocks whose bytes are at their destinations already, as the source's digests show. These
    /// are noted in `received`, and count as progress.
    pub(super) fn without_present(
        &mut self,
        plan: &Plan,
        missing: &[(u64, u64)],
        received: &BlockLedger,
    ) -> Result<Vec<(u64, u64)>, Error> {
        let mut left = BlockRuns::default();
        for asked in requests(missing, BLOCK_SIZE) {
            let table = self.digests(&asked, BLOCK_SIZE)?;
            let blocks: Vec<u64> = blocks_of(&asked).collect();
            let present = self.present(plan, &blocks, &table.blocks)?;
            for (&block, present) in blocks.iter().zip(present) {
                if let Some(digest) = present {
                    received.note(block, digest, self.primary);
                    let (start, end) = plan.block_bounds(block);
                    self.progress.fetch_add(end - start, Ordering::Relaxed);
                    continue;
                }
                left.push_block(block);
            }
        }
        Ok(left.into_vec())
    }

    /// For each of `blocks` the long checksum of the bytes at its destination, if they have the checksum in `digests`.
    #[allow(clippy::cast_possible_truncation, reason = "the low half is the checksum of 64 bits")]
    fn present(&self, plan: &Plan, blocks: &[u64], digests: &[u64]) -> Result<Vec<Option<u128>>, Error> {
        let found: Vec<OnceLock<u128>> = blocks.iter().map(|_| OnceLock::new()).collect();
        let next = AtomicUsize::new(0);
        let work = || -> Result<(), Error> {
            let mut sink = zeroed(block_len())?;
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                let (Some(&block), Some(&digest)) = (blocks.get(index), digests.get(index)) else { return Ok(()) };
                self.limits.left()?;
                let (start, end) = plan.block_bounds(block);
                let ours = plan.with_slices(start, end, &mut sink, |slices| {
                    let mut hasher = self.algorithm.hasher();
                    for slice in slices.iter() {
                        hasher.update(slice);
                    }
                    hasher.finish_wide()
                });
                if ours as u64 == digest {
                    let _ = found[index].set(ours);
                }
            }
        };
        // An error in another thread is a limit that this one meets as well.
        parallel("tensorferry-present", lane_count::few(), work)?;
        Ok(found.into_iter().map(OnceLock::into_inner).collect())
    }
}
