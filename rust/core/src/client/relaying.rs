//! Serving on what is being received.
//!
//! [`OpenRelay`] exists while a transfer fetches. It lets a server of this process read the destinations, block by block
//! as they are complete; when it is dropped, nothing is read any more, and only then the fetch returns.

use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use tensorferry_wire::digest::Hasher;
use tensorferry_wire::swarm::RelayAddress;

use super::remote::Remote;
use crate::payload::{Plan, blocks_of};
use crate::swarm::{BlockMap, RelayHost, Relayed, Relaying};

/// With fewer blocks to fetch, a receive takes no part in a swarm: it would be over before others knew of it.
const LEAST_BLOCKS: u64 = 8;

/// A relay of what is being received into the destinations of a plan.
pub(super) struct OpenRelay<'p> {
    host: Arc<dyn RelayHost>,
    plan: &'p Plan,
    step: i64,
    etag: String,
    payload_start: usize,
    blocks: Arc<BlockMap>,
    /// The blocks that are to come, and how many bytes these are.
    missing: Vec<(u64, u64)>,
    bytes: u64,
    /// Stands for the blocks that are wanted, where these are not all.
    part: Option<u64>,
    /// What others reach, once this takes part; `None` in it where that cannot be.
    relaying: OnceLock<Option<Box<dyn Relaying>>>,
}

impl<'p> OpenRelay<'p> {
    /// A relay of what `remote` receives as `plan` says, the wanted blocks being there already but those in `missing`.
    /// Nobody reaches it before [`OpenRelay::show`]. `None` where there is too little to fetch, or what comes encrypted
    /// would leave in the clear, or what a secret guards would be open.
    ///
    /// With `is_part`, the wanted blocks are not all: it takes part with those who want the same.
    pub(super) fn new(
        host: Arc<dyn RelayHost>,
        remote: &Remote,
        plan: &'p Plan,
        missing: &[(u64, u64)],
        is_part: bool,
    ) -> Option<Self> {
        if missing.iter().map(|(first, end)| end - first).sum::<u64>() < LEAST_BLOCKS {
            return None;
        }
        // What only some may see is shown to no others.
        if (remote.is_encrypted() && !host.is_encrypted()) || (remote.is_guarded() && !host.is_guarded()) {
            return None;
        }
        let [(_, total)] = remote.blocks();
        let blocks = Arc::new(BlockMap::new(total).ok()?);
        let wanted = plan.wanted_blocks(0);
        let here = [(0, remote.first_blocks())];
        for block in blocks_of(&here).chain(blocks_of(&wanted)) {
            if missing[..missing.partition_point(|run| run.0 <= block)].last().is_none_or(|run| run.1 <= block) {
                blocks.set(block);
            }
        }
        let part = is_part.then(|| {
            let mut hasher = Hasher::new();
            for (first, end) in &wanted {
                hasher.update(&first.to_le_bytes());
                hasher.update(&end.to_le_bytes());
            }
            hasher.finish()
        });
        Some(Self {
            step: remote.step(),
            etag: remote.etag()?.to_owned(),
            payload_start: remote.payload_start()?,
            bytes: plan.held(missing),
            missing: missing.to_vec(),
            host,
            plan,
            blocks,
            part,
            relaying: OnceLock::new(),
        })
    }

    /// Lets others reach it; `prefix` are the first bytes of the payload, which are here. Returns whether they can.
    pub(super) fn show(&self, prefix: &[u8]) -> bool {
        let relaying = || {
            // SAFETY: the relay is gone before the plan, as the lifetime says, and reads a block only once its bit is
            // set: `Transfer` does so when the block is complete, and nobody writes to it again while the relay exists
            // (`Remote::settle`, `settle_in_swarm` and `settle_with_source` end it first).
            let payload = unsafe { self.plan.readable(&Bytes::copy_from_slice(prefix)) }?;
            let relayed = Relayed {
                step: self.step,
                etag: self.etag.clone(),
                payload_start: self.payload_start,
                payload,
                blocks: Arc::clone(&self.blocks),
            };
            self.host.open(relayed).ok()
        };
        self.relaying.get_or_init(relaying).is_some()
    }

    fn relaying(&self) -> Option<&dyn Relaying> {
        self.relaying.get()?.as_deref()
    }

    /// `block` is complete, and is not written to any more.
    pub(super) fn note_complete(&self, block: u64) {
        self.blocks.set(block);
    }

    /// The blocks that were to come when it was made.
    pub(super) fn missing(&self) -> &[(u64, u64)] {
        &self.missing
    }

    /// How many bytes these have.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Stands for the blocks that are wanted, where these are not all.
    pub(super) fn part(&self) -> Option<u64> {
        self.part
    }

    /// How other members reach it; `None` before it is shown.
    pub(super) fn address(&self) -> Option<RelayAddress> {
        self.relaying().map(Relaying::address)
    }
}
