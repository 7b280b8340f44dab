//! How a lane fetches a range: over a connection that is kept, block after block into its place, each with its checksum.

use std::sync::atomic::Ordering;

use tensorferry_wire::digest::BLOCK_SIZE;
use tensorferry_wire::request::MAX_RUNS;

use super::answers::{changed, check_blocks, check_range, read_digests};
use super::blocks::format_runs;
use super::connection::Connection;
use super::lane::{Lane, Origin, Transfer};
use super::source::{SILENCE, Source};
use super::swarm::Swarm;
use crate::error::{Error, ErrorKind};
use crate::payload::Checksums;

/// Pages are asked for this many blocks ahead of the bytes.
const POPULATE_BLOCKS: u64 = 4;

impl Lane<'_> {
    /// Fetches the first [`MAX_RUNS`] runs of the range that are missing by one request, over `connection` or a new one,
    /// moving the beginning of the range past each block that is complete.
    pub(super) fn fetch(
        &self,
        Origin { number, source, limits }: Origin<'_>,
        connection: &mut Option<Connection>,
        sink: &mut [u8],
    ) -> Result<(), Error> {
        let (transfer, end) = (self.transfer, self.end.get());
        let runs = transfer.received.within(self.at.get(), end);
        if runs.is_empty() {
            self.at.set(end);
            return Ok(());
        }
        // One that is of no use is kept until another one stands: a source that drains its snapshot takes a receiver
        // without a connection for one that is through.
        let old = connection.take();
        let ready = match old {
            Some(ours) if source.may_reuse(&ours) => ours,
            _old => source.connect(limits)?,
        };
        let connection = connection.insert(ready.in_hurry(SILENCE));
        if connection.is_same_host() {
            // The trainer over there needs these cores.
            crate::priority::lower_priority();
        }
        transfer.received.note_route(connection.route(), connection.is_same_host(), 0);
        self.begin(connection.socket());
        let etag = transfer.etag(source, connection)?;
        transfer.ask(connection, &runs, etag)?;
        for &(first, end) in &runs {
            self.at.set(first);
            let fetched = self.fetch_run(number, connection, end, sink);
            let at = self.at.get();
            if at > first {
                let bytes = transfer.plan.block_bounds(at - 1).1 - transfer.plan.block_bounds(first).0;
                transfer.received.note_route(connection.route(), false, bytes);
            }
            fetched?;
        }
        if runs.len() < MAX_RUNS {
            self.at.set(end);
        }
        Ok(())
    }

    /// Receives the blocks up to `end` from the source or relay of this number.
    fn fetch_run(&self, number: usize, connection: &mut Connection, end: u64, sink: &mut [u8]) -> Result<(), Error> {
        let Transfer { plan, received, .. } = self.transfer;
        let relays = self.transfer.swarm.filter(|_| number >= self.transfer.remote.sources.len());
        let algorithm = relays.map_or(&self.transfer.remote.algorithm, Swarm::algorithm);
        let mut populated = self.at.get();
        while self.at.get() < end {
            let at = self.at.get();
            if plan.fresh.is_some() && at == populated {
                populated = (at + POPULATE_BLOCKS).min(end);
                plan.populate(plan.block_bounds(at).0, plan.block_bounds(populated - 1).1);
            }
            let next = (at + plan.stride()).min(end);
            let (start, stop) = (plan.block_bounds(at).0, plan.block_bounds(next - 1).1);
            // Right after the receive, while the bytes are in cache.
            let mut checksums = Checksums::new(algorithm, plan.block_size());
            // All lanes write to these counters: not for each of many small parts.
            let counted = |bytes: u64| {
                received.count(bytes);
                self.got.fetch_add(bytes, Ordering::Relaxed);
            };
            let hash = |bytes: &[u8]| checksums.update(bytes);
            plan.with_slices(start, stop, sink, |slices| connection.fill(slices, hash, counted))?;
            for (block, digest) in (at..next).zip(checksums.finish_wide()) {
                received.note(block, digest, number);
                if let Some(swarm) = self.transfer.swarm {
                    swarm.note_block(block, digest, relays.is_some()).inspect_err(|_| received.note_refused())?;
                    self.at.set(block + 1);
                }
            }
            self.at.set(next);
            if self.transfer.has_failed() {
                return Err(Error::new(ErrorKind::Cancelled, "another lane failed"));
            }
        }
        Ok(())
    }
}

impl Transfer<'_> {
    /// Asks for `runs` of blocks, and reads the head of the answer.
    fn ask(&self, connection: &mut Connection, runs: &[(u64, u64)], etag: &str) -> Result<(), Error> {
        let bounds = |&(first, end): &(u64, u64)| (self.plan.block_bounds(first).0, self.plan.block_bounds(end - 1).1);
        if let [run] = runs {
            let (start, stop) = bounds(run);
            let (start, stop) = (self.remote.payload_start + start, self.remote.payload_start + stop);
            let head = connection.get(&self.path(), Some((start, stop)), Some(etag), None)?;
            return check_range(
                connection,
                &head,
                start,
                stop,
                self.remote.payload_start + self.remote.header().payload_len(),
            );
        }
        let path = format!("{}?blocks={}&grain={}", self.path(), format_runs(runs), self.plan.block_size());
        let head = connection.get(&path, None, Some(etag), None)?;
        check_blocks(connection, &head, runs.iter().map(bounds).map(|(start, stop)| stop - start).sum())
    }

    /// The entity tag of `source`, once it has shown that it serves the snapshot we fetch.
    fn etag<'p>(&self, source: &'p Source, connection: &mut Connection) -> Result<&'p str, Error> {
        if let Some(etag) = source.etag.get() {
            return Ok(etag);
        }
        let (table, head) = read_digests(connection, &self.remote.key, None, &[(0, 0)], BLOCK_SIZE)?;
        if table.header != self.remote.header_digest || table.payload_len != self.remote.header().payload_len() {
            return Err(changed().at(source.url.authority()));
        }
        source.learn(head.same_host);
        source.learn_rails(&head.rails, connection.route());
        Ok(source.etag.get_or_init(|| head.etag.unwrap_or_default()))
    }
}
