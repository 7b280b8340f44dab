//! A checkpoint at its source: fetched over lanes, verified against its digests.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tensorferry_wire::container::{self, Entry, Header};
use tensorferry_wire::digest::{Algorithm, BLOCK_SIZE, DigestTable};

use super::blocks::{Request, requests};
use super::connection::Connection;
use super::limits::Limits;
use super::open::{Opened, read_digests};
use super::plan::{Piece, Plan, Queue};
use super::received::Received;
use super::watch::Watch;
use super::{
    Addresses, Arrived, CORRUPT_RETRIES, Destination, FetchOptions, OPEN_ATTEMPTS, OPEN_PATIENCE, Peer, Report, lane,
};
use crate::arena::{ALIGNMENT, Arena, Pool};
use crate::error::{Error, ErrorKind};
use crate::secret;
use crate::slices::{self, Slice};

/// Blocks of 1 MiB in one request of a lane, at most.
const MAX_RANGE_BLOCKS: u64 = 16;
/// Where there are more runs of blocks than this, those with few bytes between them are asked for at once.
const MANY_RUNS: usize = 64;
const JOIN_GAP: u64 = 1 << 20;

/// A checkpoint at its source: the header is here and verified, the payload is not fetched yet.
pub struct Remote {
    peers: Vec<Peer>,
    /// The peer that answered first.
    primary: usize,
    key: String,
    header: Arc<Header>,
    header_digest: u64,
    algorithm: Algorithm,
    payload_start: u64,
    /// The first blocks of the payload, verified: what the header's reserved entries need, or all of a small one.
    prefix: Vec<u8>,
    limits: Limits,
    lanes: Option<usize>,
    pool: Option<Arc<Pool>>,
    progress: Arc<AtomicU64>,
    /// The way the header came.
    route: Option<(IpAddr, IpAddr)>,
    /// Those that can be used again.
    connections: Vec<Connection>,
    opening: Duration,
}

impl std::fmt::Debug for Remote {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Remote").field("peers", &self.peers).field("key", &self.key).finish_non_exhaustive()
    }
}

impl Remote {
    /// Asks the sources in `urls` for `step`; they must serve the same snapshot. Waits while nothing is allowed yet.
    ///
    /// # Errors
    /// [`ErrorKind::Timeout`] at the deadline; [`ErrorKind::Connect`] when no source can be reached;
    /// [`ErrorKind::Status`] when it refuses, 400 for a step it does not serve; [`ErrorKind::Foreign`] when it is a
    /// stock torchft server; [`ErrorKind::Unproven`] when it does not know the secret; [`ErrorKind::Protocol`] when what
    /// it says is not valid.
    pub fn open(urls: &[&str], step: i64, options: FetchOptions) -> Result<Self, Error> {
        let started = Instant::now();
        let deadline = started
            .checked_add(options.timeout)
            .ok_or_else(|| Error::new(ErrorKind::Invalid, "the timeout is too long to be counted"))?;
        let limits = Limits { started, deadline, stall: options.stall, cancel: options.cancel };
        let peers = urls.iter().map(|url| Peer::parse(url, options.same_host, options.secret.as_ref()));
        let peers = peers.collect::<Result<Vec<_>, Error>>()?;
        let mut last = Error::new(ErrorKind::Invalid, "no source was named");
        // Each in turn, so that one that is stuck costs a share of the time and not all of it.
        let mut standing: VecDeque<_> = (0..peers.len()).map(|index| (index, 0_u32, 0_u32)).collect();
        while let Some((primary, asked, failures)) = standing.pop_front() {
            if asked > 0 && !limits.pause(Duration::from_millis(20 << asked.min(5)), || false) {
                return Err(limits
                    .left()
                    .err()
                    .filter(|_| last.is_timeout() || limits.cancel.is_cancelled())
                    .unwrap_or(last));
            }
            let source = &peers[primary].source;
            let others = u32::try_from(standing.len()).unwrap_or(u32::MAX);
            let mut share = limits.share(others + 1);
            if others > 0 {
                share = share.at_most(limits.stall.saturating_mul(1 << asked.min(10)));
            }
            // One that says nothing may have nothing to serve yet, or be stuck: asked again, and given longer each time.
            let patience = if others == 0 { limits.stall } else { limits.stall.min(OPEN_PATIENCE) };
            let patience = patience.saturating_mul(1 << asked.min(10));
            let (opened, nobody) = match Connection::open(source, &share) {
                Ok(connection) => (Opened::read(connection, step, options.ahead, &share, patience), false),
                Err(e) => {
                    let nobody = e.kind() == ErrorKind::Connect;
                    (Err(e), nobody)
                }
            };
            match opened {
                Ok(opened) => {
                    let _ = peers[primary].etag.set(opened.etag);
                    peers[primary].learn(opened.same_host);
                    return Ok(Self {
                        peers,
                        primary,
                        key: step.to_string(),
                        payload_start: opened.payload_start,
                        header: Arc::new(opened.header),
                        header_digest: opened.header_digest,
                        algorithm: secret::algorithm(options.secret.as_ref()),
                        prefix: opened.prefix,
                        route: opened.connection.route(),
                        // One that was given a share of the time must not end with that.
                        connections: Some(opened.connection).filter(|_| others == 0).into_iter().collect(),
                        opening: started.elapsed(),
                        lanes: options.lanes,
                        pool: options.pool,
                        progress: options.progress,
                        limits,
                    });
                }
                Err(e) => {
                    // Not a refusal, which is what the source has to say. Nobody there is worth one more try and no more.
                    let refused = matches!(e.kind(), ErrorKind::Status(_));
                    let repairable = e.is_transient() || e.kind() == ErrorKind::Changed;
                    let most = if nobody { 2 } else { OPEN_ATTEMPTS };
                    let failures = if e.is_timeout() { failures } else { failures + 1 };
                    if repairable && !refused && failures < most {
                        standing.push_back((primary, asked + 1, failures));
                    }
                    last = e.at(&format!("step {step} from {}", source.authority()));
                }
            }
        }
        Err(last)
    }

    /// What the container holds.
    #[must_use]
    pub fn header(&self) -> &Arc<Header> {
        &self.header
    }

    /// The bytes of a reserved entry (`__tensorferry__/manifest` or `/pickle`), verified.
    #[must_use]
    pub fn reserved(&self, name: &str) -> Option<&[u8]> {
        let entry = self.header.entries().iter().find(|e| e.name == name)?;
        self.prefix.get(usize::try_from(entry.start).ok()?..usize::try_from(entry.end).ok()?)
    }

    /// Fetches and verifies everything but the reserved entries.
    ///
    /// # Errors
    /// As [`Remote::open`]; also [`ErrorKind::Corrupt`] when bytes do not match their checksum time and again,
    /// [`ErrorKind::Changed`] when the source moved on, [`ErrorKind::System`] when there is no memory. Memory given as
    /// destination may then hold some of the new bytes.
    pub fn fetch(mut self, destination: Destination) -> Result<Arrived, Error> {
        let started = Instant::now();
        let addresses = match destination {
            Destination::Fresh => vec![None; self.header.entries().len()],
            Destination::Given(Addresses(addresses)) => addresses,
        };
        let (arena, offsets, pieces) = self.place(&addresses, &[])?;
        let fresh = arena.is_fresh() && offsets.iter().any(Option::is_some);
        let plan = Plan::new(pieces, self.header.payload_len(), fresh)?;
        let mut report = self.begin();
        let missing = self.missing(&plan);
        self.choose_way(plan.held(&missing));
        self.bring(&plan, &missing, &mut report)?;
        Ok(Arrived { arena, offsets, report: self.complete(report, started) })
    }

    /// The beginning of a receive of entries.
    pub(super) fn begin(&self) -> Report {
        self.progress.fetch_add(self.prefix.len() as u64, Ordering::Relaxed);
        self.report()
    }

    /// The blocks that `plan` wants and that did not come along with the header.
    pub(super) fn missing(&self, plan: &Plan) -> Vec<(u64, u64)> {
        plan.missing_blocks((self.prefix.len() as u64).div_ceil(BLOCK_SIZE))
    }

    /// Brings all that `plan` has a place for, verified; `missing` is what of it is not here yet.
    pub(super) fn bring(&mut self, plan: &Plan, missing: &[(u64, u64)], report: &mut Report) -> Result<(), Error> {
        self.copy_prefix(plan);
        self.transfer(plan, missing, report)
    }

    /// Whether more than one source was named.
    pub(super) fn has_several_sources(&self) -> bool {
        self.peers.len() > 1
    }

    /// Fetches and verifies parts of entries, and as little besides as whole blocks of digests allow.
    ///
    /// # Errors
    /// As [`Remote::fetch`]; [`ErrorKind::Protocol`] when the container has other entries than the slices speak of.
    pub fn fetch_slices(mut self, slices: &[Slice]) -> Result<Report, Error> {
        let started = Instant::now();
        let mut report = self.report();
        let mut layers = Vec::new();
        for layer in slices::place(slices, &self.header)? {
            let plan = Plan::new(layer, self.header.payload_len(), false)?;
            report.wanted += plan.wanted();
            if self.prefix.len() as u64 == self.header.payload_len() {
                // All of it came along with the header.
                self.copy_prefix(&plan);
                continue;
            }
            let grain = plan.fitting_grain();
            let plan = plan.grained(grain);
            let wanted = plan.wanted_blocks(0);
            layers.push((plan, wanted));
        }
        self.choose_way(layers.iter().map(|(plan, wanted)| plan.held(wanted)).sum());
        for (plan, wanted) in layers {
            self.transfer(&plan, &wanted, &mut report)?;
        }
        Ok(self.complete(report, started))
    }

    fn report(&self) -> Report {
        Report { opening: self.opening, ..Report::default() }
    }

    /// `report` with what came along with the header.
    pub(super) fn complete(&self, report: Report, started: Instant) -> Report {
        let mut report = Report { fetching: started.elapsed(), ..report };
        report.bytes += self.prefix.len() as u64;
        if report.lanes == 0 {
            // Nothing was left to fetch.
            report.lanes = 1;
            report.routes.extend(self.route);
        }
        report
    }

    /// Leaves shared memory alone where all that is still to come has so few bytes.
    pub(super) fn choose_way(&self, bytes: u64) {
        if bytes < SAME_HOST_BYTES {
            self.peers.iter().for_each(Peer::give_up_same_host);
        }
    }

    /// Brings the blocks in `wanted`: over lanes, and again where one does not match its digest.
    fn transfer(&mut self, plan: &Plan, wanted: &[(u64, u64)], report: &mut Report) -> Result<(), Error> {
        let joined = wanted.len() > MANY_RUNS && plan.grain() < BLOCK_SIZE;
        let asked = if joined { plan.wanted_blocks(JOIN_GAP) } else { wanted.to_vec() };
        let received = Received::new(wanted, Arc::clone(&self.progress))
            .ok_or_else(|| Error::new(ErrorKind::System, "too many blocks for this machine"))?;
        let mut runs = wanted.to_vec();
        for round in 0.. {
            if runs.is_empty() {
                break;
            }
            self.run_lanes(plan, if round == 0 { &asked } else { &runs }, round == 0, &received, report)?;
            // Sources with equal headers may still differ in their bytes: with several, everything is held against the
            // digests of one, so that the result is never made of two snapshots.
            let held_against = if self.peers.len() > 1 { wanted } else { &runs };
            if plan.grain() < BLOCK_SIZE {
                report.bytes += 8 * held_against.iter().map(|(a, b)| b - a).sum::<u64>();
            }
            runs = self.mismatched(held_against, plan.grain(), &received)?;
            report.retries += runs.len() as u64;
            report.troubles.append(&mut received.take_troubles());
            if let (Some(&(first, _)), true) = (runs.first(), round >= CORRUPT_RETRIES) {
                return Err(self.corrupt(plan, first));
            }
        }
        Ok(())
    }

    /// Lays out the arena and lists every destination. The entries numbered in `elsewhere` get none.
    pub(super) fn place(&self, addresses: &[Option<usize>], elsewhere: &[usize]) -> Result<Placed, Error> {
        let entries = self.header.entries();
        if addresses.len() != entries.len() {
            let message = format!("{} destinations for {} entries", addresses.len(), entries.len());
            return Err(Error::new(ErrorKind::Invalid, message));
        }
        let reserved = |e: &Entry| e.name == container::MANIFEST_ENTRY || e.name == container::PICKLE_ENTRY;
        let mut here = vec![true; entries.len()];
        for &index in elsewhere {
            here[index] = false;
        }
        let mut offsets = vec![None; entries.len()];
        let mut len = 0_u64;
        // In payload order, so that neighbours on the wire are neighbours in memory and one receive fills many.
        for (index, entry) in self.header.in_payload_order() {
            if addresses[index].is_none() && here[index] && !reserved(entry) {
                offsets[index] = Some(len);
                len = (len + (entry.end - entry.start)).next_multiple_of(ALIGNMENT);
            }
        }
        let arena = Arena::new(len, self.pool.clone())?;
        let mut pieces = Vec::with_capacity(entries.len());
        for (index, entry) in self.header.in_payload_order() {
            let address = match (addresses[index], offsets[index]) {
                (Some(address), _) => address,
                // An offset is below the length of a mapping that exists.
                #[allow(clippy::cast_possible_truncation)]
                (None, Some(offset)) => arena.address() + offset as usize,
                (None, None) => continue,
            };
            // SAFETY: the arena is ours, its entries do not overlap, and it is handed out only after the transfer;
            // for given addresses `Destination::given` took the promise.
            pieces.push(unsafe { Piece::new(entry.start, entry.end - entry.start, address) });
        }
        Ok((arena, offsets, pieces))
    }

    fn copy_prefix(&self, plan: &Plan) {
        let mut sink = vec![0; lane::block_len()];
        let have = (self.prefix.len() as u64).div_ceil(BLOCK_SIZE);
        for (first, end) in plan.wanted_blocks(0) {
            for block in first..end.min(have) {
                let (start, stop) = plan.block_bounds(block);
                plan.with_slices(start, stop, &mut sink, |slices| {
                    // The prefix holds whole blocks and lies in memory, so offsets into it fit.
                    #[allow(clippy::cast_possible_truncation)]
                    let mut at = start as usize;
                    for slice in slices {
                        let end = at + slice.len();
                        slice.copy_from_slice(&self.prefix[at..end]);
                        at = end;
                    }
                });
            }
        }
    }

    fn run_lanes(
        &mut self,
        plan: &Plan,
        runs: &[(u64, u64)],
        spread: bool,
        received: &Received,
        report: &mut Report,
    ) -> Result<(), Error> {
        let blocks: u64 = runs.iter().map(|(a, b)| b - a).sum();
        let wanted = self.lanes.unwrap_or_else(|| self.default_lanes()).clamp(1, 64) as u64;
        let most = MAX_RANGE_BLOCKS * plan.stride();
        let per_range = (blocks / (wanted * 4)).clamp(plan.stride().div_ceil(4), most);
        let queue = Queue::new(runs, per_range);
        let lanes = usize::try_from(wanted.min(blocks.div_ceil(per_range))).unwrap_or(1).max(1);
        report.lanes = report.lanes.max(lanes);
        let transfer = lane::Transfer {
            plan,
            queue: &queue,
            peers: &self.peers,
            primary: self.primary,
            spread,
            path: format!("{}.safetensors", self.key),
            digests_path: self.digests_path(&[(0, 0)], BLOCK_SIZE),
            payload_start: self.payload_start,
            payload_len: self.header.payload_len(),
            header_digest: self.header_digest,
            algorithm: &self.algorithm,
            limits: &self.limits,
            received,
            watch: Watch::new(lanes),
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

    /// Compares the checksums of the blocks in `runs` with the source's; returns the runs that differ.
    fn mismatched(&mut self, runs: &[(u64, u64)], grain: u64, received: &Received) -> Result<Vec<(u64, u64)>, Error> {
        let mut differ: Vec<(u64, u64)> = Vec::new();
        for Request { mut asked, runs } in requests(runs, grain) {
            if self.peers.len() > 1 && grain == BLOCK_SIZE {
                asked[0].0 = 0;
            }
            let table = self.digests(&asked, grain)?;
            let mut known = asked.iter().flat_map(|&(a, b)| a..b).zip(&table.blocks);
            for block in runs.iter().flat_map(|&(a, b)| a..b) {
                let theirs = known.find(|(number, _)| *number == block).map(|(_, &digest)| digest);
                if theirs.is_some() && received.digest(block) == theirs {
                    continue;
                }
                let from = &self.peers[received.origin(block)];
                // Whatever it was: the network is the way that has to work.
                from.give_up_same_host();
                received.note_trouble(
                    from.source.authority(),
                    format!(
                        "block {block} of its bytes did not match the checksum: damaged on the way, or another snapshot"
                    ),
                );
                match differ.last_mut() {
                    Some(run) if run.1 == block => run.1 += 1,
                    _ => differ.push((block, block + 1)),
                }
            }
        }
        Ok(differ)
    }

    /// The source's digests of `runs` of blocks, from any peer that serves this snapshot; that one is the primary from then
    /// on.
    fn digests(&mut self, runs: &[(u64, u64)], grain: u64) -> Result<DigestTable, Error> {
        let path = self.digests_path(runs, grain);
        let count = runs.iter().map(|(first, end)| end - first).sum();
        let prefix: Vec<_> = match runs[0].0 {
            0 if grain == BLOCK_SIZE => {
                self.prefix.chunks(lane::block_len()).map(|block| self.algorithm.checksum(block)).collect()
            }
            _ => Vec::new(),
        };
        let mut last = Error::new(ErrorKind::Connect, "no source is left");
        for turn in 0..=self.peers.len() {
            let index = (self.primary + turn.saturating_sub(1)) % self.peers.len();
            let peer = &self.peers[index];
            let ours = |c: &Connection| turn == 0 && c.is_reusable() && Arc::ptr_eq(c.source(), &peer.source);
            let reused = self.connections.iter().position(ours).map(|at| self.connections.swap_remove(at));
            let attempt = match reused {
                Some(connection) => Ok(connection),
                None if turn == 0 => continue,
                // It said nothing a moment ago, and there are others.
                None if turn == 1 && last.is_timeout() && self.peers.len() > 1 => continue,
                None => Connection::open(&peer.source, &self.limits),
            };
            let answer = attempt.and_then(|mut connection| {
                let etag = peer.etag.get().map(String::as_str);
                let (table, _) = read_digests(&mut connection, &path, etag, count, grain)?;
                Ok((connection, table))
            });
            match answer {
                Ok((connection, table))
                    if table.header == self.header_digest
                        && table.payload_len == self.header.payload_len()
                        && table.blocks.iter().zip(&prefix).all(|(theirs, ours)| theirs == ours) =>
                {
                    self.connections.push(connection);
                    self.primary = index;
                    return Ok(table);
                }
                Ok(_) => last = changed(),
                Err(e) if e.kind() == ErrorKind::Cancelled => return Err(e),
                Err(e) => last = e,
            }
        }
        Err(last.at("cannot verify what was received"))
    }

    /// On one machine each lane has a thread on either side that copies: more of them than cores are in each other's way.
    fn default_lanes(&self) -> usize {
        let cores = std::thread::available_parallelism().map_or(2, std::num::NonZero::get);
        let local = self.peers.len() == 1 && self.peers[0].same_host().is_some();
        if local { cores.clamp(2, 4) } else { default_lanes() }
    }

    fn digests_path(&self, runs: &[(u64, u64)], grain: u64) -> String {
        let runs: Vec<_> = runs.iter().map(|(first, end)| format!("{first}-{end}")).collect();
        let grain = if grain == BLOCK_SIZE { String::new() } else { format!("&grain={grain}") };
        format!("{}/digests?blocks={}{grain}", self.key, runs.join(","))
    }

    fn corrupt(&self, plan: &Plan, block: u64) -> Error {
        let (start, end) = plan.block_bounds(block);
        let message = format!(
            "corrupt: block {block} (payload bytes {start}-{end}: {}) did not match its checksum {} times; either the \
             network or memory flips bytes, or the source changes this memory while it serves it (then send from a \
             private copy: snapshot=\"copy\")",
            slices::names(&self.header, start, end),
            CORRUPT_RETRIES + 1,
        );
        Error::new(ErrorKind::Corrupt, message)
    }
}

pub(super) fn changed() -> Error {
    Error::new(ErrorKind::Changed, "the source went on to another snapshot while this one was being fetched")
}

/// With less to fetch, memory to share takes longer to set up than the network takes (measured).
const SAME_HOST_BYTES: u64 = 16 << 20;

/// Two lanes a core keep the source's threads evenly busy (measured); more than eight gain nothing on one link.
pub(super) fn default_lanes() -> usize {
    std::thread::available_parallelism().map_or(4, |n| (2 * n.get()).clamp(2, 8))
}

/// An arena, where each entry lies in it, and every destination.
type Placed = (Arena, Vec<Option<u64>>, Vec<Piece>);
