//! A checkpoint at its sources: opened, fetched over lanes, verified against its digests.
//!
//! [`Remote::open`] (module `open`) asks the sources in turn until one answers and reads header and reserved entries
//! (`first_fetch`). A fetch lays out the memory, makes a plan of it, finds what an interrupted one has left (`resume`),
//! lets lanes bring what is missing (`transfer`), and compares the checksums with those of the source until all match at
//! one moment (`verify`). Who has sent what is counted then (`senders`). The digests of their entries show in what two
//! sources differ (`entry_digests`), and a rail by itself how fast it is (`measure`).

mod entry_digests;
mod first_fetch;
mod measure;
mod open;
mod resume;
mod transfer;
mod verify;

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tensorferry_wire::container::Header;
use tensorferry_wire::digest::{Algorithm, BLOCK_SIZE};

#[cfg(fuzzing)]
pub(super) use self::first_fetch::FirstFetch;
pub use self::measure::RailRate;
pub(super) use self::transfer::PlannedFetch;
pub(super) use self::verify::Passes;
use super::blocks::block_len;
use super::connection::Connection;
use super::ledger::BlockLedger;
use super::limits::Limits;
use super::relaying::OpenRelay;
use super::{Arrived, Source};
use crate::error::Error;
use crate::memory::{ArenaPool, zeroed, zeroed_for};
use crate::payload::{Destination, Plan, ReceiveMemory, Slice, Waves, slices};
use crate::report::{Report, Trouble};
use crate::swarm::RelayHost;

/// With less to fetch, memory to share takes longer to set up than the network takes (measured).
const SAME_HOST_BYTES: u64 = 16 << 20;

/// A checkpoint at its source: the header is here and verified, the payload is not fetched yet.
pub struct Remote {
    pub(super) sources: Vec<Source>,
    /// The source that the others are held against.
    pub(super) primary: usize,
    /// The source that header and prefix came from.
    opener: usize,
    step: i64,
    /// The step as paths have it.
    pub(super) key: String,
    header: Arc<Header>,
    pub(super) header_digest: u64,
    pub(super) algorithm: Algorithm,
    pub(super) payload_start: u64,
    /// The first blocks of the payload, verified: what the header's reserved entries need, or all of a small one.
    pub(super) prefix: Vec<u8>,
    pub(super) limits: Limits,
    lanes: Option<usize>,
    pool: Option<Arc<ArenaPool>>,
    progress: Arc<AtomicU64>,
    /// Serves on what is received, where this takes part in a swarm.
    relay: Option<Arc<dyn RelayHost>>,
    /// Whether it takes part from the beginning, and how many receives of this process share its cores and links.
    pub(super) joining: (bool, usize),
    /// The addresses at both ends of the connection that brought the header, if it went over the network.
    route: Option<(IpAddr, IpAddr)>,
    /// Those that can be used again.
    connections: Vec<Connection>,
    opening: Duration,
    /// How often opening had to be begun anew after a connection had been made, and the last reason for each source.
    reopened: u64,
    troubles: BTreeMap<String, Trouble>,
}

impl std::fmt::Debug for Remote {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Remote").field("sources", &self.sources).field("key", &self.key).finish_non_exhaustive()
    }
}

impl Remote {
    /// The header of the container.
    #[must_use]
    pub fn header(&self) -> &Arc<Header> {
        &self.header
    }

    /// The step that was opened.
    #[must_use]
    pub fn step(&self) -> i64 {
        self.step
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
    /// [`ErrorKind::Torn`] when the source keeps changing what it serves, [`ErrorKind::Changed`] when the source moved
    /// on, [`ErrorKind::Invalid`] when there are not as many destinations as entries, [`ErrorKind::System`] when there
    /// is no memory. Memory given as destination may then hold some of the new bytes.
    pub fn fetch(self, destination: Destination) -> Result<Arrived, Error> {
        self.fetch_missing(destination, false)
    }

    /// As [`Remote::fetch`], into memory that may hold some of the bytes already, from a receive that was interrupted:
    /// blocks in it that match the source's digests are not fetched. [`Report::bytes`] does not count them. Memory
    /// given as destination is read, so it has to be initialised.
    ///
    /// # Errors
    /// As [`Remote::fetch`].
    pub fn resume(self, destination: Destination) -> Result<Arrived, Error> {
        self.fetch_missing(destination, true)
    }

    /// Does what [`Remote::fetch`] says, or with `resume` what [`Remote::resume`] says.
    fn fetch_missing(mut self, destination: Destination, resume: bool) -> Result<Arrived, Error> {
        let started = Instant::now();
        let memory = self.prepare_memory(destination.addresses().as_deref(), &[])?;
        let (plan, arena, offsets) = memory.plan(self.header.payload_len())?;
        let mut report = self.begin();
        let mut missing = self.missing(&plan);
        let is_small = missing.is_empty();
        self.choose_route(plan.held(&missing));
        let host = if is_small { None } else { self.relay_host() };
        let received = self.received(host.is_some())?;
        if resume {
            missing = self.without_present(&plan, &missing, &received)?;
        }
        self.copy_prefix(&plan)?;
        let fetch = PlannedFetch { plan: &plan, missing: &missing, held: &self.blocks(), received: &received };
        let relay = host.and_then(|host| OpenRelay::new(host, &self, &plan, &missing, false));
        if missing.is_empty() && !is_small {
            // Nothing is to be fetched, but what is here may have been at the source at different moments.
            self.settle(&[fetch], None, &mut report)?;
        } else {
            self.transfer(&[fetch], relay, &mut report)?;
        }
        Ok(Arrived { arena, offsets, report: self.complete(report, started) })
    }

    /// What serves on what is received, if this takes part in a swarm. Grants are of one source, and so are the digests
    /// that relays' blocks are compared with. Shared memory brings everything sooner than other receivers could.
    fn relay_host(&self) -> Option<Arc<dyn RelayHost>> {
        let [source] = &self.sources[..] else { return None };
        self.relay.clone().filter(|_| source.offers_swarm() && source.same_host().is_none())
    }

    /// Whether it comes encrypted.
    pub(super) fn is_encrypted(&self) -> bool {
        self.sources.iter().any(|source| source.url.tls().is_some())
    }

    /// Whether only those who share a secret may have it.
    pub(super) fn is_guarded(&self) -> bool {
        self.sources.iter().any(|source| source.url.secret().is_some())
    }

    /// The entity tag of what is received.
    pub(super) fn etag(&self) -> Option<&str> {
        self.sources.get(self.primary)?.etag.get().map(String::as_str)
    }

    /// Where the payload starts in the container, if memory can be so long.
    pub(super) fn payload_start(&self) -> Option<usize> {
        usize::try_from(self.payload_start).ok()
    }

    /// The report of a receive of entries that begins; what came with the header counts as progress from here on.
    pub(super) fn begin(&self) -> Report {
        self.progress.fetch_add(self.prefix.len() as u64, Ordering::Relaxed);
        self.report()
    }

    /// The blocks that `plan` wants and that did not come along with the header.
    pub(super) fn missing(&self, plan: &Plan) -> Vec<(u64, u64)> {
        plan.missing_blocks(self.first_blocks())
    }

    /// How many blocks came along with the header.
    pub(super) fn first_blocks(&self) -> u64 {
        (self.prefix.len() as u64).div_ceil(BLOCK_SIZE)
    }

    /// Whether all of the payload came along with the header.
    pub(super) fn came_with_header(&self) -> bool {
        self.prefix.len() as u64 == self.header.payload_len()
    }

    /// All blocks, as runs.
    pub(super) fn blocks(&self) -> [(u64, u64); 1] {
        [(0, self.header.payload_len().div_ceil(BLOCK_SIZE))]
    }

    /// A ledger of all blocks in which those that came with the header are marked as received; with
    /// `long` checksums, which a swarm compares.
    pub(super) fn received(&self, long: bool) -> Result<BlockLedger, Error> {
        let mut received = BlockLedger::new(&self.blocks(), Arc::clone(&self.progress))?;
        if long {
            received.keep_long()?;
        }
        for (block, digest) in (0..).zip(self.long_prefix_digests()) {
            received.note(block, digest, self.opener);
        }
        Ok(received)
    }

    /// Whether more than one source was named.
    pub(super) fn has_several_sources(&self) -> bool {
        self.sources.len() > 1
    }

    /// Fetches and verifies parts of entries, and as little besides as whole blocks of digests allow.
    ///
    /// # Errors
    /// As [`Remote::fetch`]; [`ErrorKind::Protocol`] when the container has other entries than the slices speak of.
    /// After an error the slices may hold some of the new bytes.
    pub fn fetch_slices(mut self, slices: &[Slice]) -> Result<Report, Error> {
        let started = Instant::now();
        let mut report = self.report();
        // What nobody wants of blocks that are relayed.
        let mut spare;
        let mut layers = Vec::new();
        for layer in slices::resolve(slices, &self.header)? {
            let plan = Plan::new(layer, self.header.payload_len())?;
            report.wanted += plan.wanted();
            if self.came_with_header() {
                // All of it came along with the header.
                self.copy_prefix(&plan)?;
                continue;
            }
            let block_size = plan.fitting_block_size();
            let plan = plan.with_block_size(block_size);
            let wanted = plan.wanted_blocks(0);
            let received = BlockLedger::new(&wanted, Arc::clone(&self.progress))?;
            layers.push((plan, wanted, received));
        }
        self.choose_route(layers.iter().map(|(plan, wanted, _)| plan.held(wanted)).sum());
        // Digests that no relay can forge are of whole blocks, and of one moment, so they have to be those of all.
        let mut host = None;
        if let [(plan, _, received)] = &mut layers[..]
            && plan.block_size() == BLOCK_SIZE
            && let Some(found) = self.relay_host()
        {
            spare = zeroed_for(plan.spare_len(), "what lies between the slices")?;
            // SAFETY: it is this plan's alone, which is dropped before it.
            unsafe { plan.fill_gaps(&mut spare) }?;
            received.keep_long()?;
            host = Some(found);
        }
        let fetch = |(plan, wanted, received)| PlannedFetch { plan, missing: wanted, held: wanted, received };
        let fetches: Vec<_> =
            layers.iter().map(|(plan, wanted, received)| fetch((plan, &wanted[..], received))).collect();
        let relay = host.zip(layers.first());
        let relay = relay.and_then(|(host, (plan, wanted, _))| OpenRelay::new(host, &self, plan, wanted, true));
        self.transfer(&fetches, relay, &mut report)?;
        Ok(self.complete(report, started))
    }

    fn report(&self) -> Report {
        let troubles = self.troubles.clone();
        Report { opening: self.opening, retries: self.reopened, troubles, ..Report::default() }
    }

    /// `report` with the bytes that came with the header added.
    pub(super) fn complete(&self, report: Report, started: Instant) -> Report {
        let mut report = Report { fetching: started.elapsed(), ..report };
        report.bytes += self.prefix.len() as u64;
        if !self.prefix.is_empty() {
            let opener = self.sources[self.opener].url.authority().to_owned();
            *report.senders.entry(opener).or_default() += self.prefix.len() as u64;
        }
        if report.lanes == 0 {
            // Nothing was left to fetch.
            report.lanes = 1;
            report.routes.extend(self.route);
        }
        report
    }

    /// Decides between the network and shared memory, which does not pay where only so few `bytes` are still to come.
    pub(super) fn choose_route(&mut self, bytes: u64) {
        if bytes < SAME_HOST_BYTES {
            self.sources.iter().for_each(Source::give_up_same_host);
        }
        // Whether a source is on this machine decides how many lanes there are, and over which of its addresses.
        for source in self.sources.iter().filter(|source| source.same_host().is_some()) {
            self.connections.extend(source.connect_same_host(&self.limits));
        }
    }

    /// The memory of a receive. The entries numbered in `elsewhere` get none.
    fn prepare_memory(&self, addresses: Option<&[Option<usize>]>, elsewhere: &[usize]) -> Result<ReceiveMemory, Error> {
        ReceiveMemory::prepare(&self.header, addresses, elsewhere, self.pool.clone())
    }

    /// Waves for a receive of which the entries numbered in `passing` go by way of memory of `most` bytes.
    pub(super) fn waves(&self, destination: Destination, passing: &[usize], most: u64) -> Result<Waves, Error> {
        Waves::new((&self.header, self.header.payload_len()), destination, (passing, &[]), most, self.pool.clone())
    }

    /// Copies the blocks that came along with the header to their destinations.
    pub(super) fn copy_prefix(&self, plan: &Plan) -> Result<(), Error> {
        let mut sink = zeroed(block_len())?;
        let have = (self.prefix.len() as u64).div_ceil(BLOCK_SIZE);
        for (first, end) in plan.wanted_blocks(0) {
            for block in first..end.min(have) {
                let (start, stop) = plan.block_bounds(block);
                plan.with_slices(start, stop, &mut sink, |slices| {
                    #[allow(
                        clippy::cast_possible_truncation,
                        reason = "the prefix holds whole blocks and lies in memory, so offsets into it fit"
                    )]
                    let mut at = start as usize;
                    for slice in slices {
                        let end = at + slice.len();
                        slice.copy_from_slice(&self.prefix[at..end]);
                        at = end;
                    }
                });
            }
        }
        Ok(())
    }
}
