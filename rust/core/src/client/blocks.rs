//! Blocks as the client asks for them: their length in memory, and how runs of them are cut into requests.
//!
//! Limits here follow from what a source is ready to do for one request: compute so many digests, name so many runs.

use tensorferry_wire::digest::BLOCK_SIZE;
use tensorferry_wire::request::MAX_RUNS;

/// Digests in one request, at most, where blocks are smaller than 1 MiB.
const MAX_DIGESTS: u64 = 1 << 18;
/// Blocks of 1 MiB in one request for digests, at most: a source that reads its memory for them answers in good time.
const MAX_BLOCKS: u64 = 1 << 12;

/// A block's length as a memory size.
pub(super) const fn block_len() -> usize {
    #[allow(clippy::cast_possible_truncation, reason = "one MiB fits every usize there is")]
    let len = BLOCK_SIZE as usize;
    len
}

/// `runs` as a request names them.
pub(super) fn format_runs(runs: &[(u64, u64)]) -> String {
    let runs: Vec<_> = runs.iter().map(|(first, end)| format!("{first}-{end}")).collect();
    runs.join(",")
}

/// Which digests to ask for at a time: just those that are wanted, in parts.
pub(super) fn requests(runs: &[(u64, u64)], block_size: u64) -> Vec<Vec<(u64, u64)>> {
    let most = if block_size == BLOCK_SIZE { MAX_BLOCKS } else { MAX_DIGESTS };
    let mut requests = Vec::new();
    let (mut batches, mut left) = (Vec::new(), most);
    for &(start, end) in runs {
        let mut start = start;
        while start < end {
            let stop = end.min(start.saturating_add(left));
            batches.push((start, stop));
            left -= stop - start;
            start = stop;
            if left == 0 || batches.len() == MAX_RUNS {
                requests.push(std::mem::take(&mut batches));
                left = most;
            }
        }
    }
    if !batches.is_empty() {
        requests.push(batches);
    }
    requests
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_cover_every_run_once_and_no_gaps() {
        let mut runs = vec![(3, 5), (69, 70), (1000, 1000 + 2 * MAX_DIGESTS + 7)];
        let behind = runs[2].1 + 1;
        runs.extend((0..2 * MAX_RUNS as u64).map(|i| (behind + 3 * i, behind + 3 * i + 2)));
        let batches = requests(&runs, 4096);
        let blocks = |runs: &[(u64, u64)]| runs.iter().flat_map(|&(a, b)| a..b).collect::<Vec<_>>();
        let covered: Vec<_> = batches.iter().flat_map(|runs| blocks(runs)).collect();
        assert!(covered == blocks(&runs));
        for request in &batches {
            assert!(request.len() <= MAX_RUNS && blocks(request).len() as u64 <= MAX_DIGESTS);
        }
        assert_eq!(batches.len(), 5);
        assert_eq!(requests(&[(0, MAX_BLOCKS + 1)], BLOCK_SIZE), [[(0, MAX_BLOCKS)], [(MAX_BLOCKS, MAX_BLOCKS + 1)]]);
        assert!(requests(&[], BLOCK_SIZE).is_empty() && requests(&[], 4096).is_empty());
    }
}
