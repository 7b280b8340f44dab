//! How a lane fetches a range: over a connection that is kept, block after block into its place, each with its checksum.

use tensorferry_wire::digest::BLOCK_SIZE;
use tensorferry_wire::request::MAX_RUNS;

use super::Source;
use super::answers::{changed, check_blocks, check_range, read_digests};
use super::blocks::format_runs;
use super::connection::Connection;
use super::lane::Transfer;
use super::limits::Limits;
use super::source::SILENCE;
use super::swarm::Swarm;
use crate::error::{Error, ErrorKind};
use crate::payload::{Checksums, Taken};

/// Pages are asked for this many blocks ahead of the bytes.
const POPULATE_BLOCKS: u64 = 4;

/// A range that a source is sending to a member of a swarm, until this is dropped, even by a panic.
struct Coming<'a> {
    swarm: &'a Swarm<'a>,
    first: u64,
}

impl<'a> Coming<'a> {
    fn begin(swarm: &'a Swarm<'a>, range: &Taken<'_>) -> Self {
        swarm.receiver().note_source_begun((range.at, range.end));
        Self { swarm, first: range.at }
    }
}

impl Drop for Coming<'_> {
    fn drop(&mut self) {
        let now = self.swarm.now();
        self.swarm.receiver().note_source_done(now, self.first);
    }
}

impl Transfer<'_> {
    /// Lane `index` fetches `range` from the source or relay of number `origin`, moving its beginning past each block that is
    /// complete. `known` is called once the source has shown that it serves the snapshot, before the first byte of the
    /// range; not at all where nothing of it is missing. Of more than [`MAX_RUNS`] runs the rest stays in `range`.
    pub(super) fn fetch_range(
        &self,
        index: usize,
        from: (usize, &Source, &Limits),
        connection: &mut Option<Connection>,
        (range, sink): (&mut Taken<'_>, &mut [u8]),
        known: impl FnOnce(),
    ) -> Result<(), Error> {
        let _coming = self.swarm.filter(|_| from.0 < self.sources.len()).map(|swarm| Coming::begin(swarm, range));
        self.fetch_runs(index, from, connection, (range, sink), known)
    }

    /// Fetches the first [`MAX_RUNS`] runs of `range` that are missing by one request, over `connection` or a new one,
    /// and moves `range.at` along.
    fn fetch_runs(
        &self,
        index: usize,
        (origin, source, limits): (usize, &Source, &Limits),
        connection: &mut Option<Connection>,
        (range, sink): (&mut Taken<'_>, &mut [u8]),
        known: impl FnOnce(),
    ) -> Result<(), Error> {
        let Taken { at, end, .. } = range;
        let end = *end;
        let runs = self.received.within(*at, end);
        if runs.is_empty() {
            *at = end;
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
        self.received.note_route(connection.route(), connection.is_same_host());
        let len = self.plan.held(&runs);
        self.watch.begin(index, (end, len), connection.socket());
        let etag = self.etag(source, connection)?;
        known();
        self.ask(connection, &runs, etag)?;
        for &(first, end) in &runs {
            *at = first;
            let fetched = self.fetch_run(index, origin, connection, (at, end), sink);
            if *at > first {
                let bytes = self.plan.block_bounds(*at - 1).1 - self.plan.block_bounds(first).0;
                self.received.note_route_bytes(connection.route(), bytes);
            }
            fetched?;
        }
        if runs.len() < MAX_RUNS {
            *at = end;
        }
        Ok(())
    }

    /// Asks for `runs` of blocks, and reads the head of the answer.
    fn ask(&self, connection: &mut Connection, runs: &[(u64, u64)], etag: &str) -> Result<(), Error> {
        let bounds = |&(first, end): &(u64, u64)| (self.plan.block_bounds(first).0, self.plan.block_bounds(end - 1).1);
        if let [run] = runs {
            let (start, stop) = bounds(run);
            let (start, stop) = (self.payload_start + start, self.payload_start + stop);
            let head = connection.get(&self.path(), Some((start, stop)), Some(etag), None)?;
            return check_range(connection, &head, start, stop, self.payload_start + self.payload_len);
        }
        let path = format!("{}?blocks={}&grain={}", self.path(), format_runs(runs), self.plan.block_size());
        let head = connection.get(&path, None, Some(etag), None)?;
        check_blocks(connection, &head, runs.iter().map(bounds).map(|(start, stop)| stop - start).sum())
    }

    /// Receives the blocks `[at, end)`, moving `at` past each that is complete.
    fn fetch_run(
        &self,
        index: usize,
        origin: usize,
        connection: &mut Connection,
        (at, end): (&mut u64, u64),
        sink: &mut [u8],
    ) -> Result<(), Error> {
        let relays = self.swarm.filter(|_| origin >= self.sources.len());
        let mut populated = *at;
        while *at < end {
            if self.plan.fresh.is_some() && *at == populated {
                populated = (*at + POPULATE_BLOCKS).min(end);
                self.plan.populate(self.plan.block_bounds(*at).0, self.plan.block_bounds(populated - 1).1);
            }
            let next = (*at + self.plan.stride()).min(end);
            let (start, stop) = (self.plan.block_bounds(*at).0, self.plan.block_bounds(next - 1).1);
            // Right after the receive, while the bytes are in cache.
            let algorithm = relays.map_or(self.algorithm, Swarm::algorithm);
            let mut checksums = Checksums::new(algorithm, self.plan.block_size());
            // All lanes write to these counters: not for each of many small parts.
            let counted = |bytes: u64| {
                self.received.count(bytes);
                self.watch.count(index, bytes);
            };
            let received = |bytes: &[u8]| checksums.update(bytes);
            self.plan.with_slices(start, stop, sink, |slices| connection.fill(slices, received, counted))?;
            for (block, digest) in (*at..next).zip(checksums.finish_wide()) {
                self.received.note(block, digest, origin);
                if let Some(swarm) = self.swarm {
                    let noted = swarm.note_block(block, digest, relays.is_some());
                    if noted.is_err() {
                        self.received.note_refused();
                    }
                    noted?;
                    *at = block + 1;
                }
            }
            *at = next;
            if self.queue.has_failed() {
                return Err(Error::new(ErrorKind::Cancelled, "another lane failed"));
            }
        }
        Ok(())
    }

    /// The entity tag of `source`, once it has shown that it serves the snapshot we fetch.
    fn etag<'p>(&self, source: &'p Source, connection: &mut Connection) -> Result<&'p str, Error> {
        if let Some(etag) = source.etag.get() {
            return Ok(etag);
        }
        let (table, head) = read_digests(connection, self.key, None, &[(0, 0)], BLOCK_SIZE)?;
        if table.header != self.header_digest || table.payload_len != self.payload_len {
            return Err(changed().at(source.url.authority()));
        }
        source.learn(head.same_host);
        source.learn_rails(&head.rails, connection.route());
        Ok(source.etag.get_or_init(|| head.etag.unwrap_or_default()))
    }
}
