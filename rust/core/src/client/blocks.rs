//! Blocks: their length, the checksums of those that came, and which of the source's to ask for.

use tensorferry_wire::digest::{Algorithm, BLOCK_SIZE, Hasher};
use tensorferry_wire::request::MAX_RUNS;

/// Digests in one request, at most, where blocks are smaller than 1 MiB.
const MAX_DIGESTS: u64 = 1 << 18;
/// Blocks of 1 MiB in one request for digests, at most: a source that reads its memory for them answers in good time.
const MAX_BLOCKS: u64 = 1 << 12;

/// A block's length as a memory size.
pub(super) const fn block_len() -> usize {
    // One MiB fits every usize there is.
    #[allow(clippy::cast_possible_truncation)]
    let len = BLOCK_SIZE as usize;
    len
}

/// `runs` as a request names them.
pub(super) fn named(runs: &[(u64, u64)]) -> String {
    let runs: Vec<_> = runs.iter().map(|(first, end)| format!("{first}-{end}")).collect();
    runs.join(",")
}

/// Takes the checksums of bytes as they come: one for each `grain` of them and one for the rest.
pub(crate) struct Checksums<'a> {
    algorithm: &'a Algorithm,
    grain: usize,
    digests: Vec<u64>,
    open: Hasher,
    filled: usize,
}

impl<'a> Checksums<'a> {
    pub(crate) fn new(algorithm: &'a Algorithm, grain: u64) -> Self {
        // A grain is at most 1 MiB.
        let grain = usize::try_from(grain).unwrap_or(usize::MAX);
        Self { algorithm, grain, digests: Vec::new(), open: algorithm.hasher(), filled: 0 }
    }

    pub(crate) fn update(&mut self, bytes: &[u8]) {
        let mut bytes = bytes;
        while !bytes.is_empty() {
            let (part, rest) = bytes.split_at(bytes.len().min(self.grain - self.filled));
            bytes = rest;
            if part.len() == self.grain {
                self.digests.push(self.algorithm.checksum(part));
                continue;
            }
            self.open.update(part);
            self.filled += part.len();
            if self.filled == self.grain {
                self.digests.push(std::mem::replace(&mut self.open, self.algorithm.hasher()).finish());
                self.filled = 0;
            }
        }
    }

    pub(crate) fn finish(mut self) -> Vec<u64> {
        if self.filled > 0 {
            self.digests.push(self.open.finish());
        }
        self.digests
    }
}

/// The checksums of bytes that lie in several slices, one for each `grain` of them and one for the rest.
pub(crate) fn checksum_blocks<'a>(
    algorithm: &Algorithm,
    slices: impl IntoIterator<Item = &'a [u8]>,
    grain: u64,
) -> Vec<u64> {
    let mut checksums = Checksums::new(algorithm, grain);
    slices.into_iter().for_each(|slice| checksums.update(slice));
    checksums.finish()
}

/// Which digests to ask for at a time: just those that are wanted, in parts.
pub(super) fn requests(runs: &[(u64, u64)], grain: u64) -> Vec<Vec<(u64, u64)>> {
    let most = if grain == BLOCK_SIZE { MAX_BLOCKS } else { MAX_DIGESTS };
    let mut requests = Vec::new();
    let (mut asked, mut left) = (Vec::new(), most);
    for &(start, end) in runs {
        let mut start = start;
        while start < end {
            let stop = end.min(start.saturating_add(left));
            asked.push((start, stop));
            left -= stop - start;
            start = stop;
            if left == 0 || asked.len() == MAX_RUNS {
                requests.push(std::mem::take(&mut asked));
                left = most;
            }
        }
    }
    if !asked.is_empty() {
        requests.push(asked);
    }
    requests
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_do_not_depend_on_how_the_bytes_are_cut() {
        let bytes: Vec<u8> = (0..20_000_u32).map(|i| (i * 31 % 251) as u8).collect();
        for algorithm in [Algorithm::Crc64, Algorithm::Keyed([7; 32])] {
            let expected: Vec<_> = bytes.chunks(4096).map(|block| algorithm.checksum(block)).collect();
            for cut in [1, 100, 4095, 4096, 4097, 9000, 20_000] {
                assert_eq!(checksum_blocks(&algorithm, bytes.chunks(cut), 4096), expected, "{cut}");
            }
        }
        assert!(checksum_blocks(&Algorithm::Crc64, [&[][..], &[]], 4096).is_empty());
    }

    #[test]
    fn requests_cover_every_run_once_and_no_gaps() {
        let mut runs = vec![(3, 5), (69, 70), (1000, 1000 + 2 * MAX_DIGESTS + 7)];
        let behind = runs[2].1 + 1;
        runs.extend((0..2 * MAX_RUNS as u64).map(|i| (behind + 3 * i, behind + 3 * i + 2)));
        let asked = requests(&runs, 4096);
        let blocks = |runs: &[(u64, u64)]| runs.iter().flat_map(|&(a, b)| a..b).collect::<Vec<_>>();
        let covered: Vec<_> = asked.iter().flat_map(|runs| blocks(runs)).collect();
        assert!(covered == blocks(&runs));
        for request in &asked {
            assert!(request.len() <= MAX_RUNS && blocks(request).len() as u64 <= MAX_DIGESTS);
        }
        assert_eq!(asked.len(), 5);
        assert_eq!(requests(&[(0, MAX_BLOCKS + 1)], BLOCK_SIZE), [[(0, MAX_BLOCKS)], [(MAX_BLOCKS, MAX_BLOCKS + 1)]]);
        assert!(requests(&[], BLOCK_SIZE).is_empty() && requests(&[], 4096).is_empty());
    }
}
