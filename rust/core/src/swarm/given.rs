//! To whom each block was handed out, and whether it counts as on its way.
//!
//! A block that leaves a source twice costs all others what it takes, and nobody gains anything if it would have come: how
//! long that takes depends on the link, on how many blocks share it, and on its queues. So a member says which blocks it is
//! being sent, and each counts as on its way as long as it does, and for [`HOLD`] more, in which others should hear of it.
//! A member that is silent, or frozen, therefore loses what it was granted after that time; one that is slow, or says what
//! is not so, after several times what half of the blocks take at most.

use std::time::Duration;

use super::BlockSet;
use crate::error::Error;
use crate::memory::make_room;

/// How long a block counts as on its way from when it was handed out, or was last said to be so.
pub(super) const HOLD: Duration = Duration::from_secs(2);
/// How long at most it may be said to be so, in times that a block takes, and whatever these are.
const MOST_TIMES: u32 = 4;
const MOST_HOLD: Duration = Duration::from_secs(30);
/// The parts by which the pace moves.
const STEPS: u32 = 8;

/// When a block was handed out and when it was last heard of, in milliseconds, and the number of the member it went to.
#[derive(Clone, Copy, Debug, Default)]
struct Given {
    at: u32,
    heard: u32,
    to: u32,
}

/// To whom the blocks of a snapshot were handed out.
#[derive(Debug)]
pub(super) struct GivenBlocks {
    /// Blocks that were never handed out, or that came back.
    fresh: BlockSet,
    given: Vec<Given>,
    /// About what half of the blocks took of late at most.
    pace: Duration,
}

/// A time as it is kept for each block.
fn millis(time: Duration) -> u32 {
    u32::try_from(time.as_millis()).unwrap_or(u32::MAX)
}

impl GivenBlocks {
    /// None of so many.
    pub(super) fn new(blocks: u64) -> Result<Self, Error> {
        let mut given = Vec::new();
        let count = usize::try_from(blocks).unwrap_or(usize::MAX);
        make_room(&mut given, count)?;
        given.resize(count, Given::default());
        Ok(Self { fresh: BlockSet::all(blocks)?, given, pace: Duration::ZERO })
    }

    /// How many blocks there are.
    pub(super) fn blocks(&self) -> u64 {
        self.given.len() as u64
    }

    /// How long a block may be on its way.
    pub(super) fn hold(&self) -> Duration {
        (MOST_TIMES * self.pace).clamp(HOLD, MOST_HOLD)
    }

    /// Notes that a member took so long for a block. The pace moves by a part of itself each time, up or down, so that it
    /// comes to the middle of what members take, however long the slow ones take.
    pub(super) fn note_pace(&mut self, took: Duration) {
        if self.pace.is_zero() {
            self.pace = took;
        } else if took > self.pace {
            self.pace += self.pace / STEPS;
        } else {
            self.pace -= self.pace / STEPS;
        }
    }

    fn of(&self, block: u64) -> Option<&Given> {
        self.given.get(usize::try_from(block).ok()?)
    }

    /// The first block of `[first, end)` that was never handed out.
    pub(super) fn first_fresh(&self, first: u64, end: u64) -> Option<u64> {
        self.fresh.first_in(first, end)
    }

    /// The blocks of `runs` that there are.
    fn within(&self, runs: &[(u64, u64)]) -> impl Iterator<Item = u64> + use<> {
        let (runs, blocks) = (runs.to_vec(), self.blocks());
        runs.into_iter().flat_map(move |(first, end)| first..end.min(blocks))
    }

    /// Makes those blocks of `need` that went to the member of number `from` ones that were never handed out.
    pub(super) fn take_back(&mut self, from: u32, need: &[(u64, u64)]) {
        for block in self.within(need) {
            if self.of(block).is_some_and(|given| given.to == from) {
                self.fresh.insert(block);
            }
        }
    }

    /// The blocks of `runs` go to the member of number `to`; what it had before does not count as new to it, unless it
    /// `is_alone`.
    pub(super) fn hand_out(&mut self, now: Duration, to: u32, runs: &[(u64, u64)], is_alone: bool) {
        let heard = millis(now);
        for block in self.within(runs) {
            self.fresh.remove(block);
            if let Some(given) = usize::try_from(block).ok().and_then(|block| self.given.get_mut(block)) {
                let at = if given.to == to && !is_alone { given.at } else { heard };
                *given = Given { at, heard, to };
            }
        }
    }

    /// The member of number `to` has begun to fetch those blocks of `runs` that were never handed out.
    pub(super) fn note_taken(&mut self, now: Duration, to: u32, runs: &[(u64, u64)]) {
        for block in self.within(runs) {
            if self.fresh.first_in(block, block + 1).is_some() {
                self.hand_out(now, to, &[(block, block + 1)], false);
            }
        }
    }

    /// The member of number `to` says that it is being sent the blocks of `runs`.
    pub(super) fn note_coming(&mut self, now: Duration, to: u32, runs: &[(u64, u64)]) {
        for block in self.within(runs) {
            let given = usize::try_from(block).ok().and_then(|block| self.given.get_mut(block));
            if let Some(given) = given.filter(|given| given.to == to) {
                given.heard = millis(now);
            }
        }
    }

    /// To whom `block` was handed out last; `None` if it never was.
    pub(super) fn holder(&self, block: u64) -> Option<u32> {
        self.of(block).map(|given| given.to)
    }

    /// Whether `block`, which was handed out before, no longer counts as on its way.
    pub(super) fn is_overdue(&self, now: Duration, block: u64) -> bool {
        self.of(block).is_some_and(|given| {
            let since = |millis: u32| now.saturating_sub(Duration::from_millis(millis.into()));
            since(given.heard) >= HOLD || since(given.at) >= self.hold()
        })
    }
}
