//! Holding what came against the digests of the source.

use std::sync::Arc;

use tensorferry_wire::digest::{BLOCK_SIZE, DigestTable};

use super::Remote;
use crate::client::answers::{changed, read_digests};
use crate::client::blocks::{Request, block_len, requests};
use crate::client::connection::Connection;
use crate::client::plan::Plan;
use crate::client::received::Received;
use crate::error::{Error, ErrorKind};
use crate::slices;

/// How often a block that does not match its checksum is fetched again before the transfer fails.
pub(super) const CORRUPT_RETRIES: usize = 3;

impl Remote {
    /// Compares the checksums of the blocks in `runs` with the source's; returns the runs that differ.
    pub(super) fn mismatched(
        &mut self,
        runs: &[(u64, u64)],
        grain: u64,
        received: &Received,
    ) -> Result<Vec<(u64, u64)>, Error> {
        let mut differ: Vec<(u64, u64)> = Vec::new();
        // Of several sources, whichever answers has to serve what came along with the header, too.
        let several = self.peers.len() > 1 && grain == BLOCK_SIZE;
        let lead = if several { (self.prefix.len() as u64).div_ceil(BLOCK_SIZE) } else { 0 };
        for Request { asked, runs } in requests(lead, runs, grain) {
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
        let prefix: Vec<_> = match runs[0] {
            (0, end) if grain == BLOCK_SIZE => {
                let known = self.prefix.chunks(block_len()).take(usize::try_from(end).unwrap_or(usize::MAX));
                known.map(|block| self.algorithm.checksum(block)).collect()
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
                let (table, _) = read_digests(&mut connection, &self.key, etag, runs, grain)?;
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

    pub(super) fn corrupt(&self, plan: &Plan, block: u64) -> Error {
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
