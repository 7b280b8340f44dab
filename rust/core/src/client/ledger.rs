//! The record of which blocks the lanes of a transfer have received.
//!
//! A [`BlockLedger`] keeps the checksum of each block that has come and the source it came from, besides the counters
//! of the transfer. Lanes write to it without a lock: the queue gives each block to one lane at a time, so the entry of
//! a block has one writer.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use tensorferry_wire::request::MAX_RUNS;

use crate::error::{Error, ErrorKind};
use crate::memory::make_room;
use crate::report::{Report, Trouble};
use crate::sync::Locked;

/// The record of a transfer's received blocks: the checksum of every block, and counters.
#[derive(Debug)]
pub(super) struct BlockLedger {
    /// Runs of blocks that are to come, and how many blocks come before each.
    runs: Vec<(u64, u64, usize)>,
    digests: Vec<AtomicU64>,
    /// The high halves of long checksums, where they are kept.
    high: Vec<AtomicU64>,
    /// The number of the source that each block came from.
    sources: Vec<AtomicUsize>,
    bytes: AtomicU64,
    /// All bytes of the receive so far, for a thread that reports progress.
    progress: Arc<AtomicU64>,
    /// The relays that blocks come from, whose numbers begin behind those of the sources.
    relays: Mutex<BTreeMap<usize, String>>,
    /// What there is to report since that was last done.
    report: Mutex<Report>,
}

impl BlockLedger {
    /// For the blocks in `wanted`, whose runs are ascending. Fails when there are too many for this machine to count,
    /// or no memory for them.
    pub(super) fn new(wanted: &[(u64, u64)], progress: Arc<AtomicU64>) -> Result<Self, Error> {
        let (mut runs, mut blocks) = (Vec::with_capacity(wanted.len()), 0_usize);
        for &(first, end) in wanted {
            runs.push((first, end, blocks));
            let more = usize::try_from(end - first).ok();
            blocks = more
                .and_then(|more| blocks.checked_add(more))
                .ok_or_else(|| Error::new(ErrorKind::System, "too many blocks for this machine"))?;
        }
        let (mut digests, mut sources) = (Vec::new(), Vec::new());
        make_room(&mut digests, blocks)?;
        make_room(&mut sources, blocks)?;
        digests.resize_with(blocks, AtomicU64::default);
        sources.resize_with(blocks, AtomicUsize::default);
        Ok(Self {
            runs,
            digests,
            high: Vec::new(),
            sources,
            bytes: AtomicU64::new(0),
            progress,
            relays: Mutex::default(),
            report: Mutex::default(),
        })
    }

    /// Keeps long checksums, which blocks have that relays bring.
    pub(super) fn keep_long(&mut self) -> Result<(), Error> {
        make_room(&mut self.high, self.digests.len())?;
        self.high.resize_with(self.digests.len(), AtomicU64::default);
        Ok(())
    }

    /// The runs that lie in `[at, end)`, as many as one request may ask for.
    pub(super) fn within(&self, at: u64, end: u64) -> Vec<(u64, u64)> {
        let first = self.runs.partition_point(|run| run.1 <= at);
        let runs = self.runs[first..].iter().map(|&(start, stop, _)| (start.max(at), stop.min(end)));
        runs.take_while(|run| run.0 < run.1).take(MAX_RUNS).collect()
    }

    /// The place of `block` among the blocks of the runs; `None` if it is in none.
    fn index_of(&self, block: u64) -> Option<usize> {
        let after = self.runs.partition_point(|run| run.0 <= block);
        let &(first, end, before) = self.runs.get(after.checked_sub(1)?)?;
        (block < end).then_some(before + usize::try_from(block - first).ok()?)
    }

    /// Notes that `block` has come, with this checksum, a long one or a short one as its source has them.
    #[allow(clippy::cast_possible_truncation, reason = "each half is stored where it belongs")]
    pub(super) fn note(&self, block: u64, digest: u128, source: usize) {
        let Some(index) = self.index_of(block) else { return };
        if let (Some(known), Some(from)) = (self.digests.get(index), self.sources.get(index)) {
            known.store(digest as u64, Ordering::Relaxed);
            from.store(source, Ordering::Relaxed);
        }
        if let Some(high) = self.high.get(index) {
            high.store((digest >> 64) as u64, Ordering::Relaxed);
        }
    }

    /// The long checksum of `block`; `None` where they are not kept.
    pub(super) fn long_digest(&self, block: u64) -> Option<u128> {
        let index = self.index_of(block)?;
        let half = |of: &[AtomicU64]| of.get(index).map(|half| u128::from(half.load(Ordering::Relaxed)));
        Some(half(&self.high)? << 64 | half(&self.digests)?)
    }

    /// The short checksum of `block`, 0 while it has not come; `None` if it is in none of the runs.
    pub(super) fn digest(&self, block: u64) -> Option<u64> {
        self.digests.get(self.index_of(block)?).map(|d| d.load(Ordering::Relaxed))
    }

    /// The number of the source or relay that `block` came from; 0 while it has not come.
    pub(super) fn source_of(&self, block: u64) -> usize {
        self.index_of(block).and_then(|i| self.sources.get(i)).map_or(0, |o| o.load(Ordering::Relaxed))
    }

    /// Bytes since they were last reported.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    pub(super) fn count(&self, bytes: u64) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        self.progress.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(super) fn note_retry(&self) {
        self.report.locked().retries += 1;
    }

    /// A block of a relay did not match the source's digests.
    pub(super) fn note_refused(&self) {
        self.report.locked().refused += 1;
    }

    /// So many `bytes` have come between the two addresses of `route`, or by shared memory of the same host.
    pub(super) fn note_route(&self, route: Option<(IpAddr, IpAddr)>, same_host: bool, bytes: u64) {
        let mut report = self.report.locked();
        report.same_host |= same_host;
        report.add_routes(route.map(|route| (route, bytes)));
    }

    /// The last trouble with a source counts.
    pub(super) fn note_trouble(&self, source: &str, error: &Error) {
        self.report.locked().troubles.insert(source.to_owned(), Trouble::of(error));
    }

    /// Blocks of the number `origin` are those of the relay at `authority`.
    pub(super) fn note_relay(&self, origin: usize, authority: &str) {
        self.relays.locked().insert(origin, authority.to_owned());
    }

    /// The relay with the number `origin`.
    pub(super) fn relay(&self, origin: usize) -> Option<String> {
        self.relays.locked().get(&origin).cloned()
    }

    /// Adds to `report` what has come, and what was noted, since this was last done.
    pub(super) fn report_to(&self, report: &mut Report) {
        let noted = std::mem::take(&mut *self.report.locked());
        report.add(Report { bytes: self.bytes.swap(0, Ordering::Relaxed), ..noted });
    }
}
