//! The checksums of blocks, taken while the bytes pass and are in cache.
//!
//! One pass computes the checksums a receiver compares with its source, and those a file carries; only a block's size
//! differs. How the bytes are cut on their way does not change the result.

use tensorferry_wire::digest::{Algorithm, FILE_BLOCK_SIZE, Hasher};

use super::small_blocks;

/// Takes the checksums of bytes as they come: one for each `block_size` of them and one for the rest.
pub(crate) struct Checksums<'a> {
    algorithm: &'a Algorithm,
    block_size: usize,
    digests: Vec<u64>,
    /// The high halves of long checksums, where they have some.
    high: Vec<u64>,
    open: Hasher,
    filled: usize,
}

impl<'a> Checksums<'a> {
    pub(crate) fn new(algorithm: &'a Algorithm, block_size: u64) -> Self {
        // A block has at most 1 MiB.
        let block_size = usize::try_from(block_size).unwrap_or(usize::MAX);
        Self { algorithm, block_size, digests: Vec::new(), high: Vec::new(), open: algorithm.hasher(), filled: 0 }
    }

    /// Takes the next bytes. Whole blocks are checksummed in one call each, without the state of an unfinished one.
    pub(crate) fn update(&mut self, bytes: &[u8]) {
        let small = self.block_size as u64 == FILE_BLOCK_SIZE && matches!(self.algorithm, Algorithm::Crc64);
        let mut bytes = bytes;
        while !bytes.is_empty() {
            if small && self.filled == 0 && bytes.len() >= small_blocks::GROUP {
                let done = small_blocks::checksums(bytes, &mut self.digests);
                if done > 0 {
                    bytes = &bytes[done..];
                    continue;
                }
            }
            let (part, rest) = bytes.split_at(bytes.len().min(self.block_size - self.filled));
            bytes = rest;
            if part.len() == self.block_size {
                self.push(self.algorithm.wide_checksum(part));
                continue;
            }
            self.open.update(part);
            self.filled += part.len();
            if self.filled == self.block_size {
                let open = std::mem::replace(&mut self.open, self.algorithm.hasher());
                self.push(open.finish_wide());
                self.filled = 0;
            }
        }
    }

    /// Appends the checksum of a block, and its upper half where there is one.
    #[allow(clippy::cast_possible_truncation, reason = "each half is stored where it belongs")]
    fn push(&mut self, digest: u128) {
        self.digests.push(digest as u64);
        if !matches!(self.algorithm, Algorithm::Crc64) {
            self.high.push((digest >> 64) as u64);
        }
    }

    /// Appends the checksum of the bytes that do not fill a block, if there are some.
    fn finish_last_block(&mut self) {
        if self.filled > 0 {
            self.push(self.open.finish_wide());
        }
    }

    /// The checksums; the last one is of the remaining bytes if they are less than a whole block.
    pub(crate) fn finish(mut self) -> Vec<u64> {
        self.finish_last_block();
        self.digests
    }

    /// The checksums of [`Checksums::finish`] as long ones ([`Algorithm::wide_checksum`]).
    pub(crate) fn finish_wide(mut self) -> impl Iterator<Item = u128> {
        self.finish_last_block();
        let high = self.high.into_iter().chain(std::iter::repeat(0));
        self.digests.into_iter().zip(high).map(|(low, high)| u128::from(high) << 64 | u128::from(low))
    }
}

/// The checksums of bytes that lie in several slices, one for each `block_size` of them and one for the rest.
pub(crate) fn checksum_blocks<'a>(
    algorithm: &Algorithm,
    slices: impl IntoIterator<Item = &'a [u8]>,
    block_size: u64,
) -> Vec<u64> {
    let mut checksums = Checksums::new(algorithm, block_size);
    slices.into_iter().for_each(|slice| checksums.update(slice));
    checksums.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_do_not_depend_on_how_the_bytes_are_cut() {
        let bytes: Vec<u8> = (0..20_000_u32).map(|i| (i * 31 % 251) as u8).collect();
        for algorithm in [Algorithm::Crc64, Algorithm::Keyed([7; 32]), Algorithm::Blake3] {
            let expected: Vec<_> = bytes.chunks(4096).map(|block| algorithm.checksum(block)).collect();
            for cut in [1, 100, 4095, 4096, 4097, 9000, 20_000] {
                assert_eq!(checksum_blocks(&algorithm, bytes.chunks(cut), 4096), expected, "{cut}");
                let mut wide = Checksums::new(&algorithm, 4096);
                bytes.chunks(cut).for_each(|part| wide.update(part));
                assert!(wide.finish_wide().eq(bytes.chunks(4096).map(|block| algorithm.wide_checksum(block))), "{cut}");
            }
        }
        assert!(checksum_blocks(&Algorithm::Crc64, [&[][..], &[]], 4096).is_empty());
    }
}
