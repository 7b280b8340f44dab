//! Comparing received blocks with the digests of the source.
//!
//! A block that does not match is fetched again. [`Passes`] tells two causes apart: if the source's own digests stay
//! the same, bytes are damaged on their way, and a few attempts must do; if they change, the source changes its state
//! while it serves it, and gets more attempts, since it may stop changing it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tensorferry_wire::container::Header;
use tensorferry_wire::digest::{BLOCK_SIZE, DigestTable, Hasher, WideTable};

use super::Remote;
use super::transfer::PlannedFetch;
use crate::client::answers::{changed, read_digests, read_long_digests};
use crate::client::blocks::{block_len, requests};
use crate::client::connection::Connection;
use crate::client::swarm::matches;
use crate::error::{Error, ErrorKind, Hint};
use crate::payload::{BlockRuns, blocks_of, slices};
use crate::report::Report;

/// How often a block that does not match its checksum is fetched again before the transfer fails.
const CORRUPT_RETRIES: u32 = 3;
/// The same where the source's own checksums change from one pass to the next: such a source may stop changing its state.
const CHANGE_RETRIES: u32 = 8;
/// As many bytes, or twice those of the receive, are fetched again from such a source at most.
const CHANGE_BYTES: u64 = 1 << 30;

/// The results of passes over all digests of a receive, the last of which found blocks that differ.
#[derive(Debug, Default)]
pub(in crate::client) struct Passes {
    count: u32,
    /// How often the source's own digests were others than the time before.
    changes: u32,
    /// Bytes of blocks that differed, added up: they are fetched again.
    refetched: u64,
    /// The snapshot of the last pass, and all its digests in one.
    last: Option<(String, u64)>,
}

impl Passes {
    /// Notes a pass over the snapshot `etag` that found blocks that differ; `digests` are all those of the source.
    pub(super) fn note(&mut self, etag: &str, digests: &Hasher) {
        let now = (etag.to_owned(), digests.finish());
        self.count += 1;
        self.changes += u32::from(self.last.as_ref().is_some_and(|last| last.0 == now.0 && last.1 != now.1));
        self.last = Some(now);
    }

    /// Why blocks still differ, the first being `[start, end)` of the payload.
    pub(super) fn error(&self, header: &Header, (start, end): (u64, u64)) -> Error {
        let (times, block) = (self.count, start / BLOCK_SIZE);
        let of = format!("payload bytes {start}-{end}: {}", slices::names(header, start, end));
        if self.changes == 0 {
            let message = format!(
                "corrupt: block {block} ({of}) did not match its checksum {times} times: the network or memory flips \
                 bytes"
            );
            return Error::new(ErrorKind::Corrupt, message);
        }
        let message = format!(
            "torn: the source changes its state while it serves it, and what came was of no one moment {times} times \
             (the first block that differs: {of})"
        );
        Error::new(ErrorKind::Torn, message).hinting(Hint::WithdrawBeforeChange)
    }
}

/// Adds digests to the hash that stands for all of them.
pub(super) fn hash_digests(all: &mut Hasher, digests: &[u64]) {
    for digest in digests {
        all.update(&digest.to_le_bytes());
    }
}

impl Remote {
    /// Makes one pass over all of `fetches` and returns, for each, the runs of blocks that differ from the source's
    /// current ones. Fails when blocks have kept differing for too long.
    pub(in crate::client) fn compare_digests(
        &mut self,
        fetches: &[PlannedFetch<'_>],
        passes: &mut Passes,
        report: &mut Report,
    ) -> Result<Vec<Vec<(u64, u64)>>, Error> {
        let started = Instant::now();
        let mut all = Hasher::new();
        let mut differing = Vec::with_capacity(fetches.len());
        for fetch in fetches {
            if fetch.plan.block_size() < BLOCK_SIZE {
                report.bytes += 8 * fetch.held.iter().map(|(a, b)| b - a).sum::<u64>();
            }
            let runs = self.differing_blocks(fetch, &mut all)?;
            report.retries += runs.len() as u64;
            fetch.received.report_to(report);
            differing.push(runs);
        }
        report.verifying += started.elapsed();
        let first =
            |(fetch, runs): (&PlannedFetch<'_>, &Vec<(u64, u64)>)| Some(fetch.plan.block_bounds(runs.first()?.0));
        let Some(first) = fetches.iter().zip(&differing).find_map(first) else { return Ok(differing) };
        let etag = self.sources[self.primary].etag.get().map_or("", String::as_str);
        passes.note(etag, &all);
        let most = if passes.changes > 0 { CHANGE_RETRIES } else { CORRUPT_RETRIES };
        let bytes = |fetch: &PlannedFetch<'_>, runs| fetch.plan.held(runs);
        passes.refetched += fetches.iter().zip(&differing).map(|(fetch, runs)| bytes(fetch, runs)).sum::<u64>();
        let enough = CHANGE_BYTES.max(2 * fetches.iter().map(|fetch| bytes(fetch, fetch.held)).sum::<u64>());
        if passes.count > most || (passes.changes > 0 && passes.refetched > enough) {
            return Err(passes.error(&self.header, first));
        }
        if passes.changes > 0 {
            self.limits.pause(Duration::from_millis(10 << passes.count.min(6)));
        }
        Ok(differing)
    }

    /// Compares the checksums of the blocks held with the source's, which are added to `all`; returns the runs that
    /// differ.
    fn differing_blocks(&mut self, fetch: &PlannedFetch<'_>, all: &mut Hasher) -> Result<Vec<(u64, u64)>, Error> {
        let (block_size, received) = (fetch.plan.block_size(), fetch.received);
        let mut differ = BlockRuns::default();
        for asked in requests(fetch.held, block_size) {
            let table = self.digests(&asked, block_size)?;
            hash_digests(all, &table.blocks);
            for (block, &theirs) in blocks_of(&asked).zip(&table.blocks) {
                if received.digest(block) == Some(theirs) {
                    continue;
                }
                let origin = received.source_of(block);
                let from = if let Some(source) = self.sources.get(origin) {
                    // Whatever the cause: the network is the route that has to work.
                    source.give_up_same_host();
                    source.url.authority().to_owned()
                } else {
                    received.note_refused();
                    received.relay(origin).unwrap_or_default()
                };
                let message = format!(
                    "block {block} of its bytes did not match the checksum: damaged on the way, of another snapshot, \
                     or changed while it was served"
                );
                let error = Error::new(ErrorKind::Corrupt, message).hinting(Hint::WithdrawBeforeChange);
                received.note_trouble(&from, &error);
                differ.push_block(block);
            }
        }
        Ok(differ.into_vec())
    }

    /// The long digests of all blocks, of one moment.
    pub(super) fn long_digests(&mut self) -> Result<WideTable, Error> {
        let source = &self.sources[self.primary];
        let [(_, blocks)] = self.blocks();
        let etag = source.etag.get().map(String::as_str);
        let read = |connection: &mut Connection| read_long_digests(connection, &self.key, etag, blocks);
        let (connection, table) = source.ask(None, &self.limits, read)?;
        self.connections.push(connection);
        if table.header != self.header_digest || table.payload_len != self.header.payload_len() {
            return Err(changed());
        }
        Ok(table)
    }

    /// The runs of blocks held whose checksums are not those of `table`, and whether the source sent one of them.
    pub(super) fn differing_from(&self, table: &WideTable, fetch: &PlannedFetch<'_>) -> (Vec<(u64, u64)>, bool) {
        let (mut differ, mut of_source) = (BlockRuns::default(), false);
        for block in blocks_of(fetch.held) {
            let origin = fetch.received.source_of(block);
            let expected = usize::try_from(block).ok().and_then(|index| table.blocks.get(index));
            let found = expected.zip(fetch.received.long_digest(block));
            if found.is_some_and(|(expected, digest)| matches(expected, digest, origin >= self.sources.len())) {
                continue;
            }
            let from =
                fetch.received.relay(origin).unwrap_or_else(|| self.sources[self.primary].url.authority().into());
            of_source |= origin < self.sources.len();
            if origin >= self.sources.len() {
                fetch.received.note_refused();
            }
            let message = format!("block {block} of its bytes is not the one that the source had");
            let error = Error::new(ErrorKind::Corrupt, message).hinting(Hint::WithdrawBeforeChange);
            fetch.received.note_trouble(&from, &error);
            differ.push_block(block);
        }
        (differ.into_vec(), of_source)
    }

    /// The long checksums of the blocks that came along with the header.
    pub(super) fn long_prefix_digests(&self) -> impl Iterator<Item = u128> + '_ {
        self.prefix.chunks(block_len()).map(|block| self.algorithm.wide_checksum(block))
    }

    /// The checksums of the blocks that came along with the header.
    pub(super) fn prefix_digests(&self) -> impl Iterator<Item = u64> + '_ {
        self.prefix.chunks(block_len()).map(|block| self.algorithm.checksum(block))
    }

    /// Whether the source behind `connection` has the blocks that came with the header from another source.
    fn has_prefix(&self, connection: &mut Connection, etag: Option<&str>) -> Result<bool, Error> {
        let blocks = (self.prefix.len() as u64).div_ceil(BLOCK_SIZE);
        let (table, _) = read_digests(connection, &self.key, etag, &[(0, blocks)], BLOCK_SIZE)?;
        Ok(self.prefix_digests().eq(table.blocks))
    }

    /// The source's digests of `runs` of blocks, from any source that serves this snapshot; that one is the primary
    /// from then on.
    pub(super) fn digests(&mut self, runs: &[(u64, u64)], block_size: u64) -> Result<DigestTable, Error> {
        let mut last = Error::new(ErrorKind::Connect, "no source is left");
        for turn in 0..=self.sources.len() {
            let index = (self.primary + turn.saturating_sub(1)) % self.sources.len();
            let source = &self.sources[index];
            let ours = |c: &Connection| turn == 0 && c.is_reusable() && Arc::ptr_eq(c.url(), &source.url);
            let reused = self.connections.iter().position(ours).map(|at| self.connections.swap_remove(at));
            // It said nothing a moment ago, and there are others.
            let is_silent = turn == 1 && last.is_timeout() && self.sources.len() > 1;
            if reused.is_none() && (turn == 0 || is_silent) {
                continue;
            }
            let etag = source.etag.get().map(String::as_str);
            let answer = source.ask(reused, &self.limits, |connection| {
                if index != self.opener && !self.has_prefix(connection, etag)? {
                    return Err(changed());
                }
                Ok(read_digests(connection, &self.key, etag, runs, block_size)?.0)
            });
            match answer {
                Ok((connection, table))
                    if table.header == self.header_digest && table.payload_len == self.header.payload_len() =>
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
}
