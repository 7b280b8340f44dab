//! Serving on what is being received.
//!
//! [`OpenRelay`] exists while a transfer fetches. It lets a server of this process read the destinations, block by block
//! as they are complete; when it is dropped, nothing is read any more, and only then the fetch returns.

use std::marker::PhantomData;
use std::sync::Arc;

use bytes::Bytes;
use tensorferry_wire::swarm::RelayAddress;

use super::remote::Remote;
use crate::payload::Plan;
use crate::swarm::{BlockMap, RelayHost, Relayed, Relaying};

/// With fewer blocks to fetch, a receive takes no part in a swarm: it would be over before others knew of it.
const LEAST_BLOCKS: u64 = 8;

/// A relay of what is being received into the destinations of a plan.
pub(super) struct OpenRelay<'p> {
    relaying: Box<dyn Relaying>,
    blocks: Arc<BlockMap>,
    _plan: PhantomData<&'p Plan>,
}

impl<'p> OpenRelay<'p> {
    /// Opens a relay at `host` of what `remote` receives as `plan` says, all but the blocks in `missing` being there
    /// already. `None` where there is too little to fetch, or nothing that could be served on, or what comes encrypted
    /// would leave in the clear.
    pub(super) fn open(host: &dyn RelayHost, remote: &Remote, plan: &'p Plan, missing: &[(u64, u64)]) -> Option<Self> {
        if missing.iter().map(|(first, end)| end - first).sum::<u64>() < LEAST_BLOCKS {
            return None;
        }
        if remote.is_encrypted() && !host.is_encrypted() {
            return None;
        }
        let [(_, total)] = remote.blocks();
        let blocks = Arc::new(BlockMap::new(total).ok()?);
        let mut at = 0;
        for &(first, end) in missing.iter().chain([&(total, total)]) {
            (at..first).for_each(|block| blocks.set(block));
            at = end;
        }
        // SAFETY: the relay is gone before the plan, as the lifetime says, and reads a block only once its bit is set:
        // `Transfer` does so when the block is complete, and nobody writes to it again while the relay exists
        // (`Remote::settle` ends it first).
        let payload = unsafe { plan.readable(&Bytes::copy_from_slice(remote.prefix())) }?;
        let relayed = Relayed {
            step: remote.step(),
            etag: remote.etag()?.to_owned(),
            payload_start: remote.payload_start()?,
            payload,
            blocks: Arc::clone(&blocks),
        };
        let relaying = host.open(relayed).ok()?;
        Some(Self { relaying, blocks, _plan: PhantomData })
    }

    /// `block` is complete, and is not written to any more.
    pub(super) fn note_complete(&self, block: u64) {
        self.blocks.set(block);
    }

    /// How other members reach it.
    pub(super) fn address(&self) -> RelayAddress {
        self.relaying.address()
    }
}
