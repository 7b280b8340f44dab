//! Serving on what is being received.
//!
//! [`OpenRelay`] exists while a transfer fetches. It lets a server of this process read the destinations, block by block
//! as they are complete; when it is dropped, nothing is read any more, and only then the fetch returns.

use std::marker::PhantomData;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use tensorferry_wire::swarm::RelayAddress;

use super::limits::Limits;
use super::remote::Remote;
use crate::payload::Plan;
use crate::swarm::{BlockMap, Parting, RelayHost, Relayed, Relaying};

/// With fewer blocks to fetch, a receive takes no part in a swarm: it would be over before others knew of it.
const LEAST_BLOCKS: u64 = 8;

/// How often a member that stays for others looks whether it is still asked.
const LOOK: Duration = Duration::from_millis(20);

/// A relay of what is being received into the destinations of a plan.
pub(super) struct OpenRelay<'p> {
    relaying: Box<dyn Relaying>,
    zone: Option<String>,
    blocks: Arc<BlockMap>,
    _plan: PhantomData<&'p Plan>,
}

impl<'p> OpenRelay<'p> {
    /// Opens a relay at `host` of what `remote` receives as `plan` says, all but the blocks in `missing` being there
    /// already. `None` where there is too little to fetch, or nothing that could be served on, or what comes encrypted
    /// would leave in the clear, or what a secret guards would be open.
    pub(super) fn open(host: &dyn RelayHost, remote: &Remote, plan: &'p Plan, missing: &[(u64, u64)]) -> Option<Self> {
        if missing.iter().map(|(first, end)| end - first).sum::<u64>() < LEAST_BLOCKS {
            return None;
        }
        // What only some may see is shown to no others.
        if (remote.is_encrypted() && !host.is_encrypted()) || (remote.is_guarded() && !host.is_guarded()) {
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
        let zone = host.zone().map(str::to_owned);
        Some(Self { relaying, zone, blocks, _plan: PhantomData })
    }

    /// `block` is complete, and is not written to any more.
    pub(super) fn note_complete(&self, block: u64) {
        self.blocks.set(block);
    }

    /// The blocks that are not complete.
    pub(super) fn lacking(&self) -> impl Iterator<Item = u64> {
        (0..self.blocks.len()).filter(|&block| !self.blocks.has(block, block + 1))
    }

    /// Goes on relaying while others ask for something, everything having come in the time of `took`.
    pub(super) fn stay(&self, took: Duration, limits: &Limits) {
        let (began, mut parting) = (Instant::now(), Parting::new(took, self.blocks.questions().0));
        loop {
            let (questions, answering) = self.blocks.questions();
            let busy = answering || self.relaying.readers() > 0;
            if !parting.stays(began.elapsed(), questions, busy) || !limits.pause(LOOK, || false) {
                return;
            }
        }
    }

    /// The zone in which it is.
    pub(super) fn zone(&self) -> Option<String> {
        self.zone.clone()
    }

    /// How other members reach it.
    pub(super) fn address(&self) -> RelayAddress {
        self.relaying.address()
    }
}
