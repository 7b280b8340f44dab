//! The checksums of a source's entries, from those of its blocks.
//!
//! An entry begins and ends somewhere in a block. The blocks it fills are not fetched: their checksums are joined to
//! that of the whole, together with those of the few bytes before and behind them.

use std::sync::Arc;

use tensorferry_wire::digest::{Algorithm, BLOCK_SIZES, Joiner, checksum, whole_blocks};

use super::Remote;
use crate::client::blocks::requests;
use crate::error::Error;
use crate::memory::{check_machine_has, zeroed};
use crate::payload::{BlockRuns, Slice};

impl Remote {
    /// CRC-64/NVME of the bytes of each entry, in the order of the header; `None` if the source's digests are keyed with
    /// a secret, which cannot be joined. They are of one moment only if the source does not change its state meanwhile.
    ///
    /// # Errors
    /// As [`Remote::fetch`].
    pub fn entry_digests(mut self) -> Result<Option<Vec<u64>>, Error> {
        if !matches!(self.algorithm, Algorithm::Crc64) {
            return Ok(None);
        }
        let header = Arc::clone(&self.header);
        let payload_len = header.payload_len();
        // The bytes around whole blocks, as entry, start in it and length.
        let edges = |block_size: u64| {
            let mut edges = Vec::new();
            for (number, entry) in header.entries().iter().enumerate() {
                let (first, behind) = whole_blocks(entry.start, entry.end, block_size);
                if first == behind {
                    edges.push((number, 0, entry.nbytes()));
                } else {
                    edges.push((number, 0, first * block_size - entry.start));
                    edges.push((number, behind * block_size - entry.start, entry.end - behind * block_size));
                }
            }
            edges
        };
        let total = |edges: &[(usize, u64, u64)]| edges.iter().map(|edge| edge.2).sum::<u64>();
        let few = |&block_size: &u64| total(&edges(block_size)) <= payload_len / 64;
        let block_size = BLOCK_SIZES.into_iter().find(few).unwrap_or(BLOCK_SIZES[BLOCK_SIZES.len() - 1]);
        let edges = edges(block_size);

        let whole: BlockRuns = header
            .entries()
            .iter()
            .map(|entry| whole_blocks(entry.start, entry.end, block_size))
            .filter(|(first, behind)| first < behind)
            .collect();
        let count = whole.iter().map(|(first, end)| end - first).sum::<u64>();
        check_machine_has(count.saturating_mul(8).saturating_add(total(&edges)), "the digests of the source")?;
        let mut blocks = Vec::new();
        for asked in requests(&whole, block_size) {
            blocks.extend(self.digests(&asked, block_size)?.blocks);
        }
        let mut bytes = zeroed(usize::try_from(total(&edges)).unwrap_or(usize::MAX))?;
        let mut at = bytes.as_mut_ptr().expose_provenance();
        let mut slices = Vec::with_capacity(edges.len());
        for &(number, start, len) in edges.iter().filter(|edge| edge.2 > 0) {
            let entry = &header.entries()[number];
            // SAFETY: the slices lie one after the other in `bytes`, which nobody else uses until they were fetched.
            slices
                .push(unsafe { Slice::new(&*entry.name, (entry.dtype, entry.nbytes()), (start, len), at, Vec::new()) });
            at += usize::try_from(len).unwrap_or(usize::MAX);
        }
        if !slices.is_empty() {
            self.fetch_slices(&slices)?;
        }

        // How many digests come before those of each run.
        let mut before = Vec::with_capacity(whole.len());
        whole.iter().fold(0, |sum, (first, end)| {
            before.push(sum);
            sum + end - first
        });
        let joiner = Joiner::new(block_size);
        let mut rest = &bytes[..];
        let mut take = |len: u64| {
            let (part, left) = rest.split_at(usize::try_from(len).unwrap_or(usize::MAX));
            rest = left;
            part
        };
        let mut digests = Vec::with_capacity(header.entries().len());
        for entry in header.entries() {
            let (first, behind) = whole_blocks(entry.start, entry.end, block_size);
            if first == behind {
                digests.push(checksum(take(entry.nbytes())));
                continue;
            }
            let mut digest = checksum(take(first * block_size - entry.start));
            let run = whole.partition_point(|run| run.1 <= first);
            let from = usize::try_from(before[run] + first - whole[run].0).unwrap_or(usize::MAX);
            let count = usize::try_from(behind - first).unwrap_or(usize::MAX);
            digest = blocks[from..from + count].iter().fold(digest, |digest, &block| joiner.join(digest, block));
            let tail = take(entry.end - behind * block_size);
            digests.push(if tail.is_empty() {
                digest
            } else {
                Joiner::new(tail.len() as u64).join(digest, checksum(tail))
            });
        }
        Ok(Some(digests))
    }
}
