//! Blocks: their length, the checksums of those that came, and which of the source's to ask for.

use tensorferry_wire::digest::{Algorithm, BLOCK_SIZE, Hasher};
use tensorferry_wire::request::MAX_RUNS;

/// Digests in one request, at most.
const MAX_DIGESTS: u64 = 1 << 18;

/// So many blocks of 1 MiB between two runs are asked for with them: their digests are shorter than another request.
const JOINED_BLOCKS: u64 = 64;

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

/// One request for the digests of the blocks in `asked`, in which `runs` lie.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) asked: Vec<(u64, u64)>,
    pub(super) runs: Vec<(u64, u64)>,
}

/// Which digests to ask for at a time: those of the first `lead` blocks, and those of `runs`. Of blocks of 1 MiB those
/// between two runs come along where they are few. What a source answers is never longer than what is wanted here asks
/// for, whatever its header says of what lies between.
pub(super) fn requests(lead: u64, runs: &[(u64, u64)], grain: u64) -> Vec<Request> {
    let gap = if grain == BLOCK_SIZE { JOINED_BLOCKS } else { 0 };
    let mut joined: Vec<(u64, u64)> = Vec::new();
    for run in std::iter::once((0, lead)).chain(runs.iter().copied()).filter(|run| run.0 < run.1) {
        match joined.last_mut() {
            Some(last) if run.0 <= last.1.saturating_add(gap) => last.1 = run.1.max(last.1),
            _ => joined.push(run),
        }
    }
    let (mut requests, mut asked, mut left) = (Vec::new(), Vec::new(), MAX_DIGESTS);
    for (mut start, end) in joined {
        while start < end {
            let stop = end.min(start.saturating_add(left));
            asked.push((start, stop));
            left -= stop - start;
            start = stop;
            if left == 0 || asked.len() == MAX_RUNS {
                requests.push(Request { asked: std::mem::take(&mut asked), runs: Vec::new() });
                left = MAX_DIGESTS;
            }
        }
    }
    if !asked.is_empty() {
        requests.push(Request { asked, runs: Vec::new() });
    }
    let mut first = 0;
    for Request { asked, runs: within } in &mut requests {
        for &(start, stop) in &*asked {
            first += runs[first..].iter().take_while(|run| run.1 <= start).count();
            let overlapping = runs[first..].iter().take_while(|run| run.0 < stop);
            within.extend(overlapping.map(|run| (run.0.max(start), run.1.min(stop))).filter(|run| run.0 < run.1));
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
    fn requests_cover_every_run_once_and_no_gaps() {
        let mut runs = vec![(3, 5), (69, 70), (1000, 1000 + 2 * MAX_DIGESTS + 7)];
        let behind = runs[2].1 + 1;
        runs.extend((0..2 * MAX_RUNS as u64).map(|i| (behind + 3 * i, behind + 3 * i + 2)));
        let asked = requests(0, &runs, 4096);
        let blocks = |runs: &[(u64, u64)]| runs.iter().flat_map(|&(a, b)| a..b).collect::<Vec<_>>();
        let covered: Vec<_> = asked.iter().flat_map(|r| blocks(&r.runs)).collect();
        assert!(covered == blocks(&runs));
        for request in &asked {
            assert_eq!(request.asked, request.runs);
            assert!(request.asked.len() <= MAX_RUNS && blocks(&request.asked).len() as u64 <= MAX_DIGESTS);
        }
        assert_eq!(asked.len(), 5);
        assert!(requests(0, &[], BLOCK_SIZE).is_empty() && requests(0, &[], 4096).is_empty());
    }

    #[test]
    fn digests_between_runs_are_asked_for_only_where_they_are_few() {
        let one = |runs: &[(u64, u64)]| requests(0, runs, BLOCK_SIZE);
        assert_eq!(one(&[(3, 5), (69, 70)]), [Request { asked: vec![(3, 70)], runs: vec![(3, 5), (69, 70)] }]);
        // Terabytes of filler between two blocks, as a header may have them.
        let far = [(3, 5), (1 << 42, (1 << 42) + 1)];
        assert_eq!(one(&far), [Request { asked: far.to_vec(), runs: far.to_vec() }]);
        // With those in front, which are held against what came along with the header.
        let led = requests(2, &far, BLOCK_SIZE);
        assert_eq!(led, [Request { asked: vec![(0, 5), far[1]], runs: far.to_vec() }]);
        let led = requests(2, &far[1..], BLOCK_SIZE);
        assert_eq!(led, [Request { asked: vec![(0, 2), far[1]], runs: far[1..].to_vec() }]);
        // More than a request may have is cut, and so are the runs.
        let long = requests(1, &[(1, MAX_DIGESTS + 9), (MAX_DIGESTS + 11, MAX_DIGESTS + 12)], BLOCK_SIZE);
        let cut = [
            Request { asked: vec![(0, MAX_DIGESTS)], runs: vec![(1, MAX_DIGESTS)] },
            Request {
                asked: vec![(MAX_DIGESTS, MAX_DIGESTS + 12)],
                runs: vec![(MAX_DIGESTS, MAX_DIGESTS + 9), (MAX_DIGESTS + 11, MAX_DIGESTS + 12)],
            },
        ];
        assert_eq!(long, cut);
    }
}
