//! When a receiver takes part, and how much it asks for at a time.
//!
//! Others are of help where links are slow. Where they are so fast that processors are the limit, hashing and serving
//! cost more than others bring, and a receive that is over in a moment is over before others could bring anything. So a
//! receiver looks at what the source brings, and until it takes part it does what it would do without a swarm.

use std::time::Duration;

use tensorferry_wire::digest::BLOCK_SIZE;

use super::{Question, Receiver};

/// A receive that is over by then is none of a swarm.
const AT_FIRST: Duration = Duration::from_millis(100);
/// Nor is one of which the rest comes in this time.
const LEAST_LEFT: Duration = Duration::from_millis(500);
/// A rate is that of so long, or twice that.
const WINDOW: Duration = Duration::from_secs(1);
/// What a lane asks the source for comes in this time: what it has asked for when others come is not asked for by them.
const LONGEST: Duration = Duration::from_millis(250);
/// Lanes among which the rate is taken to be shared, and the most blocks of one request.
const LANES: u64 = 4;
const MOST_BLOCKS: u64 = 16;

/// A member that gets so many times less than the source has brought it alone is not fed by what it gets.
const DRIPS: u64 = 16;

/// Whether a receiver takes part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// It takes no notice of the swarm.
    Quiet,
    /// The tracker has been asked, and has not answered.
    Joining,
    Member,
}

/// How fast bytes come.
#[derive(Debug, Default)]
pub(super) struct Pace {
    /// Two moments, and the bytes that had come.
    old: (Duration, u64),
    new: (Duration, u64),
}

impl Pace {
    pub(super) fn note(&mut self, now: Duration, bytes: u64) {
        if now.saturating_sub(self.new.0) >= WINDOW {
            (self.old, self.new) = (self.new, (now, bytes));
        }
    }

    /// Bytes a second, of late.
    fn rate(&self, now: Duration, bytes: u64) -> u64 {
        let (since, before) = self.old;
        let millis = u64::try_from(now.saturating_sub(since).as_millis()).unwrap_or(u64::MAX);
        bytes.saturating_sub(before).saturating_mul(1000) / millis.max(1)
    }

    /// Blocks that one lane should ask for at a time.
    pub(super) fn blocks(&self, now: Duration, bytes: u64) -> u64 {
        (within(self.rate(now, bytes), LONGEST) / LANES / BLOCK_SIZE).clamp(1, MOST_BLOCKS)
    }
}

/// The bytes that come in `time`.
pub(super) fn within(rate: u64, time: Duration) -> u64 {
    let millis = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    rate.saturating_mul(millis) / 1000
}

impl Receiver {
    /// Whether it should take part from now on, when `bytes` have come and so many are `left`.
    pub(crate) fn is_worth_joining(&mut self, now: Duration, bytes: u64, left: u64) -> bool {
        self.note_bytes(now, bytes);
        let rate = self.pace.rate(now, bytes);
        let is_slow = bytes > 0 && rate <= self.fast && left > within(rate, LEAST_LEFT);
        self.phase == Phase::Quiet && now >= AT_FIRST && is_slow
    }

    /// Takes part, while the ranges in `waiting` are not begun; returns what to ask the tracker for.
    pub(crate) fn join(&mut self, now: Duration, waiting: &[(u64, u64)]) -> Vec<(u64, u64)> {
        (self.phase, self.asking, self.question) = (Phase::Joining, true, Question::Blocks);
        self.took = others(waiting, &self.wanted);
        self.least = self.pace.rate(now, self.bytes) / DRIPS;
        self.unoffered_of(now, waiting)
    }

    /// Whether it takes part, or has asked to.
    pub(crate) fn has_joined(&self) -> bool {
        self.phase != Phase::Quiet
    }
}

/// The blocks of `wanted` that are in none of `runs`.
fn others(runs: &[(u64, u64)], wanted: &[(u64, u64)]) -> Vec<(u64, u64)> {
    let mut sorted = runs.to_vec();
    sorted.sort_unstable();
    let mut found = Vec::new();
    for &(first, last) in wanted {
        let mut at = first;
        let within = &sorted[sorted.partition_point(|run| run.1 <= first)..];
        for &(from, end) in within.iter().take_while(|run| run.0 < last).chain([&(last, last)]) {
            if at < from {
                found.push((at, from));
            }
            at = at.max(end);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::super::FromSource;
    use super::super::fixtures::at;
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn a_receiver_takes_part_where_the_source_is_slow_and_much_is_left() {
        let joins = |millis, bytes, left| Receiver::new(64, 1, 200 * MIB).is_worth_joining(at(millis), bytes, left);
        assert!(joins(100, MIB, 60 * MIB));
        assert!(!joins(99, MIB, 60 * MIB), "it may be over soon");
        assert!(!joins(100, MIB, 5 * MIB), "the rest is here in half a second");
        assert!(joins(100, MIB, 5 * MIB + 1));
        assert!(!joins(100, 0, 60 * MIB), "the source has not begun");
        assert!(
            joins(1000, 200 * MIB, 60_000 * MIB) && !joins(1000, 201 * MIB, 60_000 * MIB),
            "processors are the limit"
        );
    }

    #[test]
    fn a_source_that_becomes_slow_is_noticed() {
        let mut receiver = Receiver::new(64, 1, 200 * MIB);
        let mut bytes = 0;
        for second in 1..5 {
            bytes += 300 * MIB;
            assert!(!receiver.is_worth_joining(at(1000 * second), bytes, 9000 * MIB));
        }
        assert!(!receiver.is_worth_joining(at(5000), bytes + 201 * MIB, 9000 * MIB), "it is fast still");
        assert!(receiver.is_worth_joining(at(6000), bytes + 401 * MIB, 9000 * MIB));
    }

    #[test]
    fn until_the_tracker_has_answered_it_fetches_as_without_a_swarm() {
        let mut receiver = Receiver::new(64, 1, 200 * MIB);
        let waiting = [(40, 64), (0, 4)];
        assert_eq!(receiver.next_from_source(at(0), &waiting), FromSource::Take(0, (40, 41)), "nothing has come yet");
        receiver.note_bytes(at(10), 4 * MIB);
        assert_eq!(receiver.next_from_source(at(10), &waiting), FromSource::Take(0, (40, 56)));
        assert!(!receiver.has_joined());
        assert_eq!(receiver.join(at(10), &waiting), [(0, 4), (40, 64)]);
        assert!(receiver.has_joined());
        assert!(matches!(receiver.next_from_source(at(11), &waiting), FromSource::Take(0, _)));
        assert_eq!(receiver.take_taken(), [(4, 40)]);
        assert!(receiver.take_taken().is_empty(), "it is said once");
        receiver.note_answer(at(12), vec![(2, 3)], at(1000));
        assert_eq!(receiver.next_from_source(at(12), &waiting), FromSource::Take(1, (2, 3)));
    }

    #[test]
    fn of_a_part_it_says_that_it_fetches_what_it_wants_and_does_not_wait_for() {
        for (wanted, waiting, took) in [
            (&[(4, 9), (20, 30)][..], &[(6, 9), (22, 24)][..], &[(4, 6), (20, 22), (24, 30)][..]),
            (&[(4, 9)], &[(4, 9)], &[]),
            (&[(4, 9), (10, 12)], &[], &[(4, 9), (10, 12)]),
            (&[(4, 9)], &[(7, 8), (5, 6)], &[(4, 5), (6, 7), (8, 9)]),
        ] {
            let mut receiver = Receiver::new(64, 1, 200 * MIB).wanting(wanted);
            receiver.join(at(0), waiting);
            assert_eq!(receiver.take_taken(), took, "{wanted:?} {waiting:?}");
        }
    }

    #[test]
    fn a_request_is_of_what_comes_in_a_quarter_of_a_second() {
        let pace = Pace::default();
        for (millis, bytes, blocks) in [(0, 0, 1), (1000, 31, 1), (1000, 32, 2), (1000, 257, 16), (1000, 9000, 16)] {
            assert_eq!(pace.blocks(at(millis), bytes * MIB), blocks, "{bytes} MiB");
        }
    }
}
