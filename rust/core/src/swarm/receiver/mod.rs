//! What a receiver does next: fetch from the source or a relay, ask the tracker, or wait.
//!
//! The source is spared: only blocks that it has granted are fetched from it, and grants are asked for blocks that no
//! relay offers. A receiver that gets nothing that way, or next to nothing, is not bound by it. So no relay and no
//! tracker holds up a receive for longer than [`from_source::STARVED`], or where the source is gone, twice that. It
//! begins as if there were no swarm, and takes part once that is worth it (`joining`); where there are no others, the
//! tracker grants it everything.

mod from_relays;
mod from_source;
mod joining;
mod source_lost;

use std::time::Duration;

use tensorferry_wire::request::MAX_RUNS;
use tensorferry_wire::swarm::{Nearness, Place};

use self::from_source::{STARVED, STARVED_FREE};
use self::joining::{Pace, Phase, within};
use super::BlockSet;
use super::picker::Picker;

const FIRST_HEARTBEAT: Duration = Duration::from_millis(50);

/// What a lane to the source is to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum FromSource {
    /// Fetch these blocks of the range of this number.
    Take(usize, (u64, u64)),
    /// Ask the tracker for these blocks.
    Ask(Vec<(u64, u64)>),
    Wait(Duration),
}

/// What the tracker is asked about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Question {
    Blocks,
    /// It is only to hear of the receiver.
    Heartbeat,
}

impl Question {
    fn of(need: &[(u64, u64)]) -> Self {
        if need.is_empty() { Self::Heartbeat } else { Self::Blocks }
    }
}

/// What the source is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rule {
    /// What its tracker grants.
    Swarm,
    /// Everything, since there is no tracker any more: as by a receiver without a swarm.
    Alone,
    /// Nothing: it is gone.
    Free,
}

/// The state of one receive in a swarm. Times count from its beginning.
#[derive(Debug)]
pub(crate) struct Receiver {
    picker: Picker,
    /// Blocks that the tracker has granted, in runs, the next one last.
    granted: Vec<(u64, u64)>,
    /// What it began with without a grant, which the next question names.
    took: Vec<(u64, u64)>,
    phase: Phase,
    pace: Pace,
    /// Bytes a second of a source that is so fast that a swarm would be no help.
    fast: u64,
    /// The blocks that it wants, as ascending runs.
    wanted: Vec<(u64, u64)>,
    asking: bool,
    /// What the question that is under way, or the last one, was about.
    question: Question,
    asked: Duration,
    heartbeat: Duration,
    ask_at: Duration,
    /// Answers of the tracker since it last fetched something from the source.
    in_vain: u32,
    /// Relays that are not set aside.
    relays: usize,
    /// What lanes fetch from the source, and since when.
    coming: Vec<((u64, u64), Duration)>,
    /// How long the source took for a block of late.
    block_took: Duration,
    /// How often nothing came for so long that the source was asked for everything, and when the last time began.
    starved: u32,
    starves: Option<Duration>,
    /// The bytes that have come, when the last of them came, and when there was last something that no relay offers.
    bytes: u64,
    came: Duration,
    unoffered: Duration,
    /// How long it waits for a byte where the source is gone.
    patience_free: Duration,
    /// When enough bytes had last come, how many there were then, and how many a second are enough: a member that lets them
    /// drip does not feed anybody.
    fed: Duration,
    fed_bytes: u64,
    least: u64,
    rule: Rule,
    /// Whether the digests of all blocks are here, so that blocks can be verified without the source.
    has_table: bool,
    /// Where it is, if it was told.
    place: Option<Place>,
    /// Blocks are shared out in groups of so many.
    group: u64,
    /// Since when it finds only what others are to bring, and whether it waits for that no longer.
    held: Option<Duration>,
    impatient: bool,
    /// How often in a row the tracker has not answered.
    unanswered: u32,
}

impl Receiver {
    /// For a payload of `blocks` blocks; `seed` should differ from receiver to receiver. From a source that brings more
    /// than `fast` bytes a second it fetches as if there were no swarm.
    pub(crate) fn new(blocks: usize, seed: u64, fast: u64) -> Self {
        let never = Duration::ZERO;
        let picker = Picker::new(blocks, seed);
        Self {
            picker,
            granted: Vec::new(),
            took: Vec::new(),
            phase: Phase::Quiet,
            pace: Pace::default(),
            fast,
            wanted: vec![(0, blocks as u64)],
            asking: false,
            question: Question::Blocks,
            asked: never,
            heartbeat: FIRST_HEARTBEAT,
            ask_at: never,
            in_vain: 0,
            relays: 0,
            coming: Vec::new(),
            block_took: Duration::MAX,
            starved: 0,
            starves: None,
            bytes: 0,
            came: never,
            unoffered: never,
            patience_free: STARVED_FREE,
            fed: never,
            fed_bytes: 0,
            least: 0,
            rule: Rule::Swarm,
            has_table: false,
            place: None,
            group: (blocks as u64 / 256).clamp(1, 16),
            held: None,
            impatient: false,
            unanswered: 0,
        }
    }

    /// One that wants no other blocks than those in the ascending runs `wanted`.
    pub(crate) fn wanting(self, wanted: &[(u64, u64)]) -> Self {
        Self { wanted: wanted.to_vec(), ..self }
    }

    /// Adds a relay that is so far away, and returns its number.
    pub(crate) fn add_relay_at(&mut self, nearness: Nearness) -> usize {
        self.relays += 1;
        self.picker.add(nearness)
    }

    /// Relay `relay` is fetched from no more.
    pub(crate) fn set_aside(&mut self, relay: usize) {
        self.relays = self.relays.saturating_sub(1);
        self.picker.learn(relay, BlockSet::default());
        // What it was to bring may be had from the source now.
        self.ask_at = Duration::ZERO;
    }

    /// What relay `relay` has now.
    pub(crate) fn learn(&mut self, relay: usize, set: BlockSet) {
        self.picker.learn(relay, set);
    }

    /// So many bytes have come in all.
    pub(crate) fn note_bytes(&mut self, now: Duration, bytes: u64) {
        if bytes != self.bytes {
            (self.bytes, self.came) = (bytes, now);
            let enough = within(self.least, now.saturating_sub(self.fed).min(STARVED));
            if bytes.abs_diff(self.fed_bytes) >= enough {
                (self.fed, self.fed_bytes) = (now, bytes);
            }
        }
        self.pace.note(now, bytes);
    }

    /// Of what [`FromSource::Take`] has told it, a lane fetches the blocks before `end` only.
    pub(crate) fn note_source_begun(&mut self, (first, end): (u64, u64)) {
        if let Some((run, _)) = self.coming.iter_mut().find(|(run, _)| run.0 == first) {
            run.1 = end;
        }
    }

    /// A lane no longer fetches from the source what begins with block `first`.
    pub(crate) fn note_source_done(&mut self, now: Duration, first: u64) {
        if let Some(index) = self.coming.iter().position(|(run, _)| run.0 == first) {
            let ((_, end), since) = self.coming.swap_remove(index);
            let blocks = u32::try_from(end - first).unwrap_or(u32::MAX).max(1);
            self.block_took = now.saturating_sub(since) / blocks;
        }
    }

    /// The blocks that the source is sending, as ascending runs.
    pub(crate) fn coming(&self) -> Vec<(u64, u64)> {
        let mut runs: Vec<_> = self.coming.iter().map(|(run, _)| *run).collect();
        runs.sort_unstable();
        runs.truncate(MAX_RUNS);
        runs
    }
}

#[cfg(test)]
mod fixtures {
    use super::super::BlockMap;
    use super::*;

    impl Receiver {
        pub(super) fn add_relay(&mut self) -> usize {
            self.add_relay_at(Nearness::Far)
        }
    }

    pub(super) fn at(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    pub(super) fn set(blocks: std::ops::Range<u64>) -> BlockSet {
        let map = BlockMap::new(64).unwrap();
        blocks.for_each(|block| map.set(block));
        BlockSet::decode(&map.encode(), 64).unwrap().1
    }

    /// A receiver that takes part, and to which bytes come fast.
    pub(super) fn begun() -> Receiver {
        Receiver { phase: Phase::Member, bytes: 1 << 40, ..Receiver::new(64, 1, u64::MAX) }
    }
}
