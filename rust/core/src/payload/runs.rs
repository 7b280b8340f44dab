//! Runs of blocks.

use std::ops::Deref;

/// Ascending runs `[first, end)` of blocks, or of bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct BlockRuns(Vec<(u64, u64)>);

impl BlockRuns {
    /// Adds a run that begins no earlier than the last one; that becomes longer if at most `gap` lies between them.
    pub(crate) fn push(&mut self, (first, end): (u64, u64), gap: u64) {
        match self.0.last_mut() {
            Some(last) if first <= last.1.saturating_add(gap) => last.1 = last.1.max(end),
            _ => self.0.push((first, end)),
        }
    }

    /// Adds a block behind all others.
    pub(crate) fn push_block(&mut self, block: u64) {
        self.push((block, block + 1), 0);
    }

    pub(crate) fn into_vec(self) -> Vec<(u64, u64)> {
        self.0
    }
}

impl Deref for BlockRuns {
    type Target = [(u64, u64)];

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

/// From blocks in ascending order.
impl FromIterator<u64> for BlockRuns {
    fn from_iter<I: IntoIterator<Item = u64>>(blocks: I) -> Self {
        let mut runs = Self::default();
        for block in blocks {
            runs.push_block(block);
        }
        runs
    }
}

/// From runs in any order; those that touch or overlap become one.
impl FromIterator<(u64, u64)> for BlockRuns {
    fn from_iter<I: IntoIterator<Item = (u64, u64)>>(runs: I) -> Self {
        let mut sorted: Vec<_> = runs.into_iter().collect();
        sorted.sort_unstable();
        let mut runs = Self::default();
        for run in sorted {
            runs.push(run, 0);
        }
        runs
    }
}

/// The blocks of `runs`, one after the other.
pub(crate) fn blocks_of(runs: &[(u64, u64)]) -> impl Iterator<Item = u64> + Clone + '_ {
    runs.iter().flat_map(|&(first, end)| first..end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_that_touch_are_one() {
        assert_eq!(*BlockRuns::from_iter([0, 1, 2, 4, 7, 8]), [(0, 3), (4, 5), (7, 9)]);
        assert_eq!(*BlockRuns::from_iter([(7, 9), (0, 3), (2, 4), (4, 5)]), [(0, 5), (7, 9)]);
        let mut runs = BlockRuns::from_iter([(0, 5)]);
        runs.push((7, 8), 1);
        runs.push((9, 12), 1);
        assert_eq!((runs.clone().into_vec(), blocks_of(&runs).count()), (vec![(0, 5), (7, 12)], 10));
    }
}
