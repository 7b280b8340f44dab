//! A transfer: lanes bring blocks, and blocks that do not match their digests are brought again.
//!
//! How many lanes and how large their requests are follows from the number of cores and blocks; both are measured
//! choices.

use std::collections::BTreeSet;

use tensorferry_wire::digest::BLOCK_SIZE;

use super::Remote;
use super::verify::Passes;
use crate::client::lane;
use crate::client::ledger::BlockLedger;
use crate::client::relaying::OpenRelay;
use crate::client::stragglers::StragglerMonitor;
use crate::client::swarm::{MOST_RELAYS, Swarm};
use crate::error::Error;
use crate::payload::{Plan, Queue};
use crate::report::Report;

/// Blocks of 1 MiB in one request of a lane, at most.
const MAX_RANGE_BLOCKS: u64 = 16;
/// Where there are more runs of blocks than this, those with few bytes between them are asked for at once.
const MANY_RUNS: usize = 64;
const JOIN_GAP: u64 = 1 << 20;

/// What a transfer is to do for one plan.
#[derive(Clone, Copy)]
pub(in crate::client) struct PlannedFetch<'a> {
    pub(in crate::client) plan: &'a Plan,
    /// The blocks that are still to come.
    pub(in crate::client) missing: &'a [(u64, u64)],
    /// The blocks that have to be as they are at the source when the last of them has come.
    pub(in crate::client) held: &'a [(u64, u64)],
    pub(in crate::client) received: &'a BlockLedger,
}

impl Remote {
    /// Fetches the missing blocks of `fetches`, and again those that do not match their digests, until all held blocks
    /// match at one moment: the digests of all are requested after the last byte has arrived.
    pub(in crate::client) fn transfer(
        &mut self,
        fetches: &[PlannedFetch<'_>],
        relay: Option<OpenRelay<'_>>,
        report: &mut Report,
    ) -> Result<(), Error> {
        if fetches.iter().all(|fetch| fetch.missing.is_empty()) {
            return Ok(());
        }
        for fetch in fetches {
            let joined = fetch.missing.len() > MANY_RUNS && fetch.plan.block_size() < BLOCK_SIZE;
            let ranges = if joined { &fetch.plan.wanted_blocks(JOIN_GAP)[..] } else { fetch.missing };
            self.run_lanes(fetch.plan, ranges, (true, relay.as_ref()), fetch.received, report)?;
            if relay.is_some() {
                let (bytes, relays) = self.relayed(fetch);
                report.relayed += bytes;
                report.relays += relays;
            }
        }
        self.settle(fetches, relay, report)
    }

    /// Compares the digests of all blocks held, and fetches those that differ again, until all match at one moment.
    ///
    /// The relay, if there is one, ends with it, and before a block is written to again.
    pub(super) fn settle(
        &mut self,
        fetches: &[PlannedFetch<'_>],
        relay: Option<OpenRelay<'_>>,
        report: &mut Report,
    ) -> Result<(), Error> {
        let (mut passes, mut relay) = (Passes::default(), relay);
        loop {
            let differing = self.compare_digests(fetches, &mut passes, report)?;
            if differing.iter().all(Vec::is_empty) {
                return Ok(());
            }
            drop(relay.take());
            for (fetch, runs) in fetches.iter().zip(&differing).filter(|(_, runs)| !runs.is_empty()) {
                self.run_lanes(fetch.plan, runs, (false, None), fetch.received, report)?;
            }
        }
    }

    /// Bytes that came from relays, and how many relays brought them.
    fn relayed(&self, fetch: &PlannedFetch<'_>) -> (u64, usize) {
        let (mut bytes, mut relays) = (0, BTreeSet::new());
        for block in fetch.missing.iter().flat_map(|&(first, end)| first..end) {
            let origin = fetch.received.source_of(block);
            if origin >= self.sources.len() {
                let (start, end) = fetch.plan.block_bounds(block);
                bytes += end - start;
                relays.insert(origin);
            }
        }
        (bytes, relays.len())
    }

    fn run_lanes(
        &mut self,
        plan: &Plan,
        runs: &[(u64, u64)],
        (spread, relay): (bool, Option<&OpenRelay<'_>>),
        received: &BlockLedger,
        report: &mut Report,
    ) -> Result<(), Error> {
        let blocks: u64 = runs.iter().map(|(a, b)| b - a).sum();
        let wanted = self.lanes.unwrap_or_else(|| self.default_lanes()).clamp(1, 64) as u64;
        let most = MAX_RANGE_BLOCKS * plan.stride();
        let per_range = (blocks / (wanted * 4)).clamp(plan.stride().div_ceil(4), most);
        let queue = Queue::new(runs, per_range);
        let lanes = usize::try_from(wanted.min(blocks.div_ceil(per_range))).unwrap_or(1).max(1);
        report.lanes = report.lanes.max(lanes);
        let swarm = match relay {
            Some(relay) => Swarm::new(relay, &self.sources[self.primary], &self.key, plan, &self.limits)?,
            None => None,
        };
        let transfer = lane::Transfer {
            plan,
            queue: &queue,
            sources: &self.sources,
            primary: self.primary,
            spread,
            key: &self.key,
            payload_start: self.payload_start,
            payload_len: self.header.payload_len(),
            header_digest: self.header_digest,
            algorithm: &self.algorithm,
            limits: &self.limits,
            received,
            watch: StragglerMonitor::new(lanes, if swarm.is_some() { MOST_RELAYS } else { 0 }),
            swarm: swarm.as_ref(),
            alive: lanes.into(),
        };
        let builder = |index| std::thread::Builder::new().name(format!("tensorferry-lane-{index}"));
        self.connections = transfer.run_all(lanes, std::mem::take(&mut self.connections), builder);
        report.bytes += received.take_bytes();
        report.retries += received.take_retries();
        report.same_host |= received.came_same_host();
        report.troubles.append(&mut received.take_troubles());
        report.routes.append(&mut received.take_routes());
        queue.finish()
    }

    /// On one machine each lane has a thread on either side that copies: more of them than cores are in each other's
    /// way.
    fn default_lanes(&self) -> usize {
        let cores = std::thread::available_parallelism().map_or(2, std::num::NonZero::get);
        let local = self.sources.len() == 1 && self.sources[0].same_host().is_some();
        if local { cores.clamp(2, 4) } else { default_lanes() }
    }
}

/// Two lanes a core keep the source's threads evenly busy (measured); more than eight gain nothing on one link.
pub(crate) fn default_lanes() -> usize {
    std::thread::available_parallelism().map_or(4, |n| (2 * n.get()).clamp(2, 8))
}
