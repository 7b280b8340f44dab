//! A transfer: lanes bring blocks, and blocks that do not match their digests are brought again.
//!
//! How many lanes and how large their requests are follows from the number of cores and blocks; both are measured
//! choices.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tensorferry_wire::digest::BLOCK_SIZE;

use super::Remote;
use super::verify::Passes;
use crate::client::connection::Connection;
use crate::client::lane::Transfer;
use crate::client::lane_count;
use crate::client::ledger::BlockLedger;
use crate::client::limits::Limits;
use crate::client::rails;
use crate::client::relaying::OpenRelay;
use crate::client::scheduler::Scheduler;
use crate::client::swarm::{Swarm, SwarmEnd};
use crate::error::Error;
use crate::payload::{BlockRuns, Plan, blocks_of};
use crate::report::Report;
use crate::trust::random;

/// Blocks of 1 MiB in one request of a lane, at most.
const MAX_RANGE_BLOCKS: u64 = 16;
/// Where there are more runs of blocks than this, those with few bytes between them are asked for at once.
const MANY_RUNS: usize = 64;
const JOIN_GAP: u64 = 1 << 20;
/// How often blocks that relays have made up are fetched from the source before they are held against what it has now.
const LONG_RETRIES: u32 = 3;

/// How long a lane to a further address may get no byte at all.
const RAIL_STALL: Duration = Duration::from_secs(1);

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
    /// match at one moment: the digests of all are requested after the last byte has arrived, or in a swarm are those
    /// that the source has proven. Where no block is missing, nothing is compared.
    pub(in crate::client) fn transfer(
        &mut self,
        fetches: &[PlannedFetch<'_>],
        relay: Option<OpenRelay<'_>>,
        report: &mut Report,
    ) -> Result<(), Error> {
        if fetches.iter().all(|fetch| fetch.missing.is_empty()) {
            return Ok(());
        }
        let mut end = None;
        for fetch in fetches {
            let joined = fetch.missing.len() > MANY_RUNS && fetch.plan.block_size() < BLOCK_SIZE;
            let ranges = if joined { &fetch.plan.wanted_blocks(JOIN_GAP)[..] } else { fetch.missing };
            end = self.run_lanes(fetch.plan, ranges, (true, relay.as_ref()), fetch.received, report)?;
            if relay.is_some() {
                let (bytes, relays) = self.relayed(fetch);
                report.relayed += bytes;
                report.relays += relays;
            }
        }
        match (relay, end) {
            (Some(relay), Some(end)) => self.settle_in_swarm(fetches, relay, end, report)?,
            (relay, _) => self.settle(fetches, relay, report)?,
        }
        for fetch in fetches {
            self.note_senders(fetch, report);
        }
        Ok(())
    }

    /// Settles after a swarm: by the digests of all blocks that have come already, or by those of the source now.
    fn settle_in_swarm(
        &mut self,
        fetches: &[PlannedFetch<'_>],
        relay: OpenRelay<'_>,
        mut end: SwarmEnd,
        report: &mut Report,
    ) -> Result<(), Error> {
        let mut relay = Some(relay);
        if report.relayed > 0 && end.table.is_none() {
            end.table = self.long_digests().ok().map(Arc::new);
        }
        let Some(table) = end.table.clone() else {
            // Nobody is to count on this member from now on.
            drop(end);
            return self.settle_with_source(fetches, relay, report);
        };
        for _ in 0..=LONG_RETRIES {
            let mut whole = true;
            for fetch in fetches {
                let (differing, of_source) = self.differing_from(&table, fetch);
                fetch.received.report_to(report);
                if differing.is_empty() {
                    continue;
                }
                whole = false;
                report.retries += differing.len() as u64;
                drop(relay.take());
                self.run_lanes(fetch.plan, &differing, (false, None), fetch.received, report)?;
                if of_source {
                    // It has changed what it serves: what it has now decides.
                    return self.settle_with_source(fetches, None, report);
                }
            }
            if whole {
                return Ok(());
            }
        }
        self.settle_with_source(fetches, None, report)
    }

    /// Settles as without a swarm. Digests of 64 bits are too short for what relays have brought: that comes again, from
    /// the source.
    fn settle_with_source(
        &mut self,
        fetches: &[PlannedFetch<'_>],
        mut relay: Option<OpenRelay<'_>>,
        report: &mut Report,
    ) -> Result<(), Error> {
        for fetch in fetches {
            let runs = self.relayed_runs(fetch);
            if !runs.is_empty() {
                drop(relay.take());
                self.run_lanes(fetch.plan, &runs, (false, None), fetch.received, report)?;
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

    /// Runs of blocks that came from relays.
    fn relayed_runs(&self, fetch: &PlannedFetch<'_>) -> Vec<(u64, u64)> {
        let is_relayed = |block: &u64| fetch.received.source_of(*block) >= self.sources.len();
        blocks_of(fetch.missing).filter(is_relayed).collect::<BlockRuns>().into_vec()
    }

    /// Bytes that came from relays, and how many relays brought them.
    fn relayed(&self, fetch: &PlannedFetch<'_>) -> (u64, usize) {
        let runs = self.relayed_runs(fetch);
        let bytes =
            runs.iter().map(|&(first, end)| fetch.plan.block_bounds(end - 1).1 - fetch.plan.block_bounds(first).0);
        let relays: BTreeSet<_> = blocks_of(&runs).map(|block| fetch.received.source_of(block)).collect();
        (bytes.sum(), relays.len())
    }

    fn run_lanes(
        &mut self,
        plan: &Plan,
        runs: &[(u64, u64)],
        (spread, relay): (bool, Option<&OpenRelay<'_>>),
        received: &BlockLedger,
        report: &mut Report,
    ) -> Result<Option<SwarmEnd>, Error> {
        let blocks: u64 = runs.iter().map(|(a, b)| b - a).sum();
        let wanted = self.lanes.unwrap_or_else(|| self.default_lanes(plan.held(runs))).clamp(1, 64) as u64;
        let most = MAX_RANGE_BLOCKS * plan.stride();
        let per_range = (blocks / (wanted * 4)).clamp(plan.stride().div_ceil(4), most);
        let wanted = wanted.min(blocks.div_ceil(per_range)).max(1);
        let is_large = plan.held(runs) >= rails::LEAST_BYTES;
        let rails = if is_large { self.other_addresses() } else { 0 };
        // As many connections in all, but at least two at each address: one waits for a request while the other receives.
        let each = wanted.div_ceil(rails + 1).max(2);
        let lanes = if rails == 0 { wanted } else { each * self.sources.len() as u64 };
        let lanes = usize::try_from(lanes).unwrap_or(1);
        let mut scheduler = Scheduler::new(runs, per_range, self.sources.len());
        let over_rails = usize::try_from(each * rails).unwrap_or(0);
        scheduler.expected = (over_rails > 0).then_some(lanes + over_rails);
        if relay.is_some() && self.sources[self.primary].is_full() {
            // Receivers that begin together do not fetch the same at first; a source that is still copying has the beginning.
            scheduler.begin_at(u64::from_ne_bytes(random::bytes()?));
        }
        let (began, help) = (Instant::now(), self.limits.cancel.child());
        let connections = std::mem::take(&mut self.connections);
        let this = &*self;
        let swarm = relay.map(|relay| Swarm::new(relay, this, plan, began, &help)).transpose()?.flatten();
        scheduler.unit = swarm.as_ref().map_or(1, |swarm| swarm.unit);
        let rail_limits = Limits { stall: self.limits.stall.min(RAIL_STALL), cancel: help, ..self.limits.clone() };
        let transfer = Transfer::new(this, (plan, received), swarm.as_ref(), rail_limits, (scheduler, began));
        let origin = |lane| (self.primary + if spread { lane } else { 0 }) % self.sources.len();
        let origins: Vec<_> = (0..lanes).map(origin).collect();
        let each = if is_large { usize::try_from(each).unwrap_or(1) } else { 0 };
        let connections = transfer.run(&origins, connections, each);
        let scheduler = transfer.into_scheduler();
        report.lanes = report.lanes.max(scheduler.on_sources());
        received.report_to(report);
        let end = swarm.and_then(Swarm::end);
        self.connections = connections;
        scheduler.finish()?;
        Ok(end)
    }

    /// How many other addresses the sources have.
    fn other_addresses(&self) -> u64 {
        self.sources.iter().filter(|source| source.has_rails()).map(|source| source.rails.others().len() as u64).sum()
    }

    /// How many lanes bring `bytes`, if the user leaves it to us.
    fn default_lanes(&self, bytes: u64) -> usize {
        if self.sources.len() == 1 && self.sources[0].same_host().is_some() {
            return lane_count::same_host(bytes);
        }
        let delay = self.connections.iter().filter_map(Connection::delay).min();
        // The same number for each source: on the link of the receiver, one with more of them would send more.
        lane_count::over_network(bytes, delay).next_multiple_of(self.sources.len())
    }
}

impl Remote {
    /// Adds to `report` what each source and relay has sent of the blocks of `fetch`; a block that came more than once
    /// counts for its last sender.
    pub(super) fn note_senders(&self, fetch: &PlannedFetch<'_>, report: &mut Report) {
        let mut sent: BTreeMap<usize, u64> = BTreeMap::new();
        for block in blocks_of(fetch.missing) {
            let (start, end) = fetch.plan.block_bounds(block);
            *sent.entry(fetch.received.source_of(block)).or_default() += end - start;
        }
        for (origin, bytes) in sent {
            let source = self.sources.get(origin).map(|source| source.url.authority().to_owned());
            if let Some(sender) = source.or_else(|| fetch.received.relay(origin)) {
                *report.senders.entry(sender).or_default() += bytes;
            }
        }
    }
}
