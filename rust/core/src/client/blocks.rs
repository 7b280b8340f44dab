//! Checksums of blocks: those of what came, and which of the source's to ask for.

use tensorferry_wire::digest::{Algorithm, BLOCK_SIZE, Hasher};

/// Digests in one request, at most, where blocks are smaller than 1 MiB.
const MAX_DIGESTS: u64 = 1 << 18;
/// Blocks nobody wants whose digests are asked for along with those on both sides: a request costs more.
const MAX_GAP: u64 = 64;

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

/// One request for the digests of blocks `first..end`, in which `runs` lie.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) first: u64,
    pub(super) end: u64,
    pub(super) runs: Vec<(u64, u64)>,
}

/// Which digests to ask for at a time: all at once for blocks of 1 MiB; smaller ones in parts, and not those of large
/// gaps.
pub(super) fn requests(runs: &[(u64, u64)], grain: u64) -> Vec<Request> {
    let (most, gap) = if grain == BLOCK_SIZE { (u64::MAX, u64::MAX) } else { (MAX_DIGESTS, MAX_GAP) };
    let mut requests: Vec<Request> = Vec::new();
    for &(start, end) in runs {
        let mut start = start;
        while start < end {
            let stop = match requests.last_mut() {
                Some(last) if start - last.first < most && start - last.end <= gap => {
                    last.end = end.min(last.first.saturating_add(most));
                    last.runs.push((start, last.end));
                    last.end
                }
                _ => {
                    let stop = end.min(start.saturating_add(most));
                    requests.push(Request { first: start, end: stop, runs: vec![(start, stop)] });
                    stop
                }
            };
            start = stop;
        }
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
    fn requests_cover_every_run_once_and_leave_large_gaps_out() {
        let runs = [(3, 5), (69, 70), (135, 136), (1000, 1000 + 2 * MAX_DIGESTS + 7)];
        let asked = requests(&runs, 4096);
        let covered: u64 = asked.iter().flat_map(|r| &r.runs).map(|(a, b)| b - a).sum();
        assert_eq!(covered, runs.iter().map(|(a, b)| b - a).sum::<u64>());
        for request in &asked {
            assert!(request.end - request.first <= MAX_DIGESTS);
            assert!(request.runs.iter().all(|run| request.first <= run.0 && run.1 <= request.end));
        }
        let ends: Vec<_> = asked.iter().map(|r| (r.first, r.end)).collect();
        assert_eq!(&ends[..2], [(3, 70), (135, 136)], "64 blocks between are bridged, 65 are not");
        let whole = requests(&runs, BLOCK_SIZE);
        assert_eq!((whole.len(), whole[0].first, whole[0].end), (1, 3, 1000 + 2 * MAX_DIGESTS + 7));
    }
}
