//! What a receiver does next: fetch from the source or a relay, ask the tracker, or wait.
//!
//! The source is spared: only blocks that it has granted are fetched from it, and grants are asked for blocks that no
//! relay offers. A receiver that gets nothing that way is not bound by it. So no relay and no tracker holds up a receive
//! for longer than [`STARVED`] without a byte.

use std::time::Duration;

use tensorferry_wire::request::MAX_RUNS;
use tensorferry_wire::swarm::Standing;

use super::BlockSet;
use super::picker::Picker;

/// Without a new byte for so long, the receiver fetches from the source whatever it lacks, whether or not there are relays.
pub(crate) const STARVED: Duration = Duration::from_secs(5);
/// The same where the source is to go, or is gone.
const STARVED_FREE: Duration = Duration::from_secs(10);
/// Questions to the tracker without an answer after which the source counts as gone.
const MOST_UNANSWERED: u32 = 2;
/// The same as [`STARVED`] where no relay is left.
const STARVED_ALONE: Duration = Duration::from_millis(500);
/// Lanes to the source that find nothing but what relays offer wait for so long, then they ask for that.
const PATIENCE: Duration = Duration::from_millis(250);
/// A source hears of a receiver at least so often, even if relays bring everything: one that says nothing is taken to be
/// through. At first it is more often, since others begin at the same time.
const HEARTBEAT: Duration = Duration::from_secs(1);
const FIRST_HEARTBEAT: Duration = Duration::from_millis(50);
/// Lanes to the source that fetch at once where there are relays: a block that comes over one of few lanes is complete,
/// and passed on, sooner than one of many.
const LANES_BESIDE_RELAYS: usize = 2;
/// How often a lane that waits looks again.
const LOOK: Duration = Duration::from_millis(50);

/// What a lane to the source is to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum FromSource {
    /// Fetch these blocks of the range of this number.
    Take(usize, (u64, u64)),
    /// Ask the tracker for these blocks.
    Ask(Vec<(u64, u64)>),
    Wait(Duration),
}

/// What the source is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rule {
    /// What its tracker grants.
    Swarm,
    /// Everything, since there is no tracker any more: as by a receiver without a swarm.
    Alone,
    /// Nothing: it is to go, or is gone.
    Free,
}

/// The state of one receive in a swarm. Times count from its beginning.
#[derive(Debug)]
pub(crate) struct Receiver {
    picker: Picker,
    /// Blocks that the tracker has granted, in runs, the next one last.
    granted: Vec<(u64, u64)>,
    asking: bool,
    asked: Duration,
    heartbeat: Duration,
    ask_at: Duration,
    /// Relays that are not set aside, and lanes that fetch from the source.
    relays: usize,
    fetching: usize,
    /// The bytes that have come, when the last of them came, and when there was last something that no relay offers.
    bytes: u64,
    fed: Duration,
    unoffered: Duration,
    rule: Rule,
    /// Whether the digests of all blocks are here, so that blocks can be verified without the source.
    has_table: bool,
    /// How often in a row the tracker has not answered.
    unanswered: u32,
}

impl Receiver {
    /// For a payload of `blocks` blocks; `seed` should differ from receiver to receiver.
    pub(crate) fn new(blocks: usize, seed: u64) -> Self {
        let never = Duration::ZERO;
        let picker = Picker::new(blocks, seed);
        Self {
            picker,
            granted: Vec::new(),
            asking: false,
            asked: never,
            heartbeat: FIRST_HEARTBEAT,
            ask_at: never,
            relays: 0,
            fetching: 0,
            bytes: 0,
            fed: never,
            unoffered: never,
            rule: Rule::Swarm,
            has_table: false,
            unanswered: 0,
        }
    }

    /// Adds a relay, and returns its number.
    pub(crate) fn add_relay(&mut self) -> usize {
        self.relays += 1;
        self.picker.add()
    }

    /// Relay `relay` is fetched from no more.
    pub(crate) fn set_aside(&mut self, relay: usize) {
        self.relays = self.relays.saturating_sub(1);
        self.picker.learn(relay, BlockSet::default());
    }

    /// What relay `relay` has now.
    pub(crate) fn learn(&mut self, relay: usize, set: BlockSet) {
        self.picker.learn(relay, set);
    }

    /// So many bytes have come in all.
    pub(crate) fn note_bytes(&mut self, now: Duration, bytes: u64) {
        if bytes != self.bytes {
            (self.bytes, self.fed) = (bytes, now);
        }
    }

    /// A lane no longer fetches from the source what [`FromSource::Take`] has told it.
    pub(crate) fn note_source_done(&mut self) {
        self.fetching = self.fetching.saturating_sub(1);
    }

    /// Of the ranges in `waiting`, which to fetch from relay `relay`, at most `most` blocks of it.
    pub(crate) fn next_from_relay(
        &mut self,
        relay: usize,
        waiting: &[(u64, u64)],
        most: u64,
    ) -> Option<(usize, (u64, u64))> {
        self.picker.pick(relay, waiting, most)
    }

    /// What a lane to the source is to do while the ranges in `waiting` are to come.
    pub(crate) fn next_from_source(&mut self, now: Duration, waiting: &[(u64, u64)]) -> FromSource {
        let next = self.decide(now, waiting);
        self.fetching += usize::from(matches!(next, FromSource::Take(..)));
        next
    }

    fn decide(&mut self, now: Duration, waiting: &[(u64, u64)]) -> FromSource {
        let silent = !self.asking && self.rule == Rule::Swarm && now.saturating_sub(self.asked) >= self.heartbeat;
        if silent && (!self.granted.is_empty() || waiting.is_empty()) {
            self.asking = true;
            return FromSource::Ask(Vec::new());
        }
        let Some(&first) = waiting.first() else { return FromSource::Wait(LOOK) };
        if self.rule == Rule::Alone || self.is_starved(now) {
            return FromSource::Take(0, first);
        }
        if self.rule == Rule::Free {
            return FromSource::Wait(LOOK);
        }
        if self.relays > 0 && self.fetching >= LANES_BESIDE_RELAYS {
            return FromSource::Wait(LOOK);
        }
        if let Some((index, run)) = self.take_granted(waiting) {
            return FromSource::Take(index, run);
        }
        if self.asking || now < self.ask_at {
            return FromSource::Wait(self.ask_at.saturating_sub(now).clamp(Duration::from_millis(1), LOOK));
        }
        let mut need = merged(waiting, |block| self.picker.is_unoffered(block));
        if !need.is_empty() {
            self.unoffered = now;
        } else if now.saturating_sub(self.unoffered) >= PATIENCE {
            need = merged(waiting, |_| true);
        } else {
            return FromSource::Wait(LOOK);
        }
        self.asking = true;
        FromSource::Ask(need)
    }

    /// Whether no byte has come for so long that the source is asked for whatever is lacking.
    fn is_starved(&self, now: Duration) -> bool {
        let patience = match (self.relays, self.rule) {
            (0, _) => STARVED_ALONE,
            (_, Rule::Free) => STARVED_FREE,
            _ => STARVED,
        };
        now.saturating_sub(self.fed) >= patience
    }

    /// How the member stands that lacks the blocks in `lacks`.
    pub(crate) fn standing(&self, mut lacks: impl Iterator<Item = u64>) -> Standing {
        let is_covered = lacks.all(|block| !self.picker.is_unoffered(block));
        Standing { has_table: self.has_table, is_covered, leaves: false }
    }

    /// The digests of all blocks are here.
    pub(crate) fn note_table(&mut self) {
        self.has_table = true;
    }

    /// The tracker wants the source to be left alone.
    pub(crate) fn note_free(&mut self) {
        self.rule = Rule::Free;
        self.granted.clear();
    }

    /// Whether the source is left alone.
    pub(crate) fn is_free(&self) -> bool {
        self.rule == Rule::Free
    }

    /// The source brings nothing any more; returns whether the receive may end well even so. It does from then on without
    /// the source, as long as relays bring something.
    pub(crate) fn note_source_lost(&mut self, now: Duration) -> bool {
        let goes_on = self.has_table && self.relays > 0 && !self.is_starved(now);
        if goes_on {
            self.note_free();
        }
        goes_on
    }

    /// The part of a granted run that is still waiting, and the number of its range. What a relay has brought or brings
    /// is no longer granted.
    fn take_granted(&mut self, waiting: &[(u64, u64)]) -> Option<(usize, (u64, u64))> {
        while let Some((first, end)) = self.granted.pop() {
            let overlap = |&(from, to): &(u64, u64)| (from.max(first), to.min(end));
            let found = waiting.iter().map(overlap).enumerate().find(|(_, (from, to))| from < to);
            let Some((index, (from, to))) = found else { continue };
            if to < end {
                self.granted.push((to, end));
            }
            if first < from {
                self.granted.push((first, from));
            }
            return Some((index, (from, to)));
        }
        None
    }

    /// The tracker has granted blocks, or none, and wants to be asked again after `wait`.
    pub(crate) fn note_answer(&mut self, now: Duration, mut grant: Vec<(u64, u64)>, wait: Duration) {
        (self.asking, self.asked, self.unanswered) = (false, now, 0);
        self.heartbeat = (2 * self.heartbeat).min(HEARTBEAT);
        self.ask_at = if grant.is_empty() { now.saturating_add(wait) } else { now };
        grant.reverse();
        grant.append(&mut self.granted);
        self.granted = grant;
    }

    /// The tracker does not answer, or nothing that makes sense. Without the digests, the source must be there, and is
    /// asked for everything; with them, it may be gone.
    pub(crate) fn note_no_tracker(&mut self, now: Duration) {
        if !self.has_table || self.relays == 0 {
            self.rule = Rule::Alone;
            return;
        }
        self.unanswered += 1;
        (self.asking, self.asked, self.ask_at) = (false, now, now.saturating_add(HEARTBEAT));
        if self.unanswered >= MOST_UNANSWERED {
            self.note_free();
        }
    }
}

/// The blocks of `waiting` that are `wanted`, as at most [`MAX_RUNS`] ascending runs.
fn merged(waiting: &[(u64, u64)], wanted: impl Fn(u64) -> bool) -> Vec<(u64, u64)> {
    let mut sorted = waiting.to_vec();
    sorted.sort_unstable();
    let mut runs: Vec<(u64, u64)> = Vec::new();
    for block in sorted.into_iter().flat_map(|(first, end)| first..end).filter(|&block| wanted(block)) {
        if let Some(run) = runs.last_mut().filter(|run| run.1 == block) {
            run.1 += 1;
        } else if runs.len() < MAX_RUNS {
            runs.push((block, block + 1));
        } else {
            break;
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::super::BlockMap;
    use super::*;

    fn at(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    fn set(blocks: std::ops::Range<u64>) -> BlockSet {
        let map = BlockMap::new(64).unwrap();
        blocks.for_each(|block| map.set(block));
        BlockSet::decode(&map.encode(), 64).unwrap().1
    }

    #[test]
    fn the_source_is_asked_for_what_nobody_offers() {
        let mut receiver = Receiver::new(64, 1);
        let waiting = [(40, 44), (0, 4), (4, 8)];
        assert_eq!(receiver.next_from_source(at(0), &waiting), FromSource::Ask(vec![(0, 8), (40, 44)]));
        assert!(matches!(receiver.next_from_source(at(0), &waiting), FromSource::Wait(_)), "one lane asks");
        receiver.note_answer(at(1), vec![(2, 6)], at(1000));
        assert_eq!(receiver.next_from_source(at(1), &waiting), FromSource::Take(1, (2, 4)));
        assert_eq!(receiver.next_from_source(at(1), &[(40, 44), (0, 2), (4, 8)]), FromSource::Take(2, (4, 6)));
        receiver.note_source_done();
        receiver.note_source_done();
        let relay = receiver.add_relay();
        receiver.learn(relay, set(0..42));
        let left = [(40, 44), (0, 2), (6, 8)];
        assert_eq!(receiver.next_from_source(at(2), &left), FromSource::Ask(vec![(42, 44)]));
        receiver.note_answer(at(2), vec![], at(100));
        assert!(matches!(receiver.next_from_source(at(101), &left), FromSource::Wait(_)));
        assert_eq!(receiver.next_from_source(at(102), &left), FromSource::Ask(vec![(42, 44)]));
    }

    #[test]
    fn beside_relays_few_lanes_fetch_from_the_source() {
        let mut receiver = Receiver::new(64, 1);
        let waiting: Vec<_> = (0..9).map(|block| (block, block + 1)).collect();
        let takes =
            |receiver: &mut Receiver| matches!(receiver.next_from_source(at(0), &waiting), FromSource::Take(..));
        receiver.note_answer(at(0), vec![(0, 9)], at(1));
        receiver.note_answer(at(0), vec![], at(1));
        assert!(takes(&mut receiver) && takes(&mut receiver) && takes(&mut receiver));
        receiver.add_relay();
        assert!(!takes(&mut receiver));
        receiver.note_source_done();
        assert!(!takes(&mut receiver));
        receiver.note_source_done();
        assert!(takes(&mut receiver));
    }

    #[test]
    fn a_grant_that_a_relay_has_overtaken_is_void() {
        let mut receiver = Receiver::new(64, 1);
        receiver.note_answer(at(0), vec![(0, 4), (10, 14)], at(1000));
        assert_eq!(receiver.next_from_source(at(0), &[(11, 12), (20, 21)]), FromSource::Take(0, (11, 12)));
        assert!(matches!(receiver.next_from_source(at(0), &[(20, 21)]), FromSource::Ask(_)));
    }

    #[test]
    fn offered_blocks_are_asked_for_when_relays_do_not_bring_them() {
        let mut receiver = Receiver::new(64, 1);
        let relay = receiver.add_relay();
        receiver.learn(relay, set(0..64));
        for millis in [0, 100, 249] {
            receiver.note_bytes(at(millis), millis + 1);
            assert!(matches!(receiver.next_from_source(at(millis), &[(0, 4)]), FromSource::Wait(_)));
        }
        assert_eq!(receiver.next_from_source(at(250), &[(0, 4)]), FromSource::Ask(vec![(0, 4)]));
    }

    #[test]
    fn the_source_hears_of_a_receiver_that_waits_for_relays() {
        let mut receiver = Receiver::new(64, 1);
        let mut now = 10;
        for pause in [100, 200, 400, 800, 1000, 1000] {
            receiver.note_answer(at(now), vec![], at(1));
            assert!(matches!(receiver.next_from_source(at(now + pause - 1), &[]), FromSource::Wait(_)), "{pause}");
            now += pause;
            assert_eq!(receiver.next_from_source(at(now), &[]), FromSource::Ask(vec![]));
            assert!(matches!(receiver.next_from_source(at(now), &[]), FromSource::Wait(_)), "one lane asks");
        }
        receiver.note_no_tracker(at(1000));
        assert!(matches!(receiver.next_from_source(at(9000), &[]), FromSource::Wait(_)));
    }

    /// A receiver that has the digests, and a relay with everything.
    fn independent() -> (Receiver, usize) {
        let mut receiver = Receiver::new(64, 1);
        let relay = receiver.add_relay();
        receiver.learn(relay, set(0..64));
        receiver.note_table();
        (receiver, relay)
    }

    #[test]
    fn a_source_that_is_let_go_is_asked_for_nothing_until_the_receiver_starves() {
        let (mut receiver, relay) = independent();
        receiver.note_answer(at(0), vec![(0, 4)], at(1));
        receiver.note_free();
        for millis in [0, 1500, 9999] {
            assert!(matches!(receiver.next_from_source(at(millis), &[(0, 4)]), FromSource::Wait(_)), "{millis}");
            assert!(matches!(receiver.next_from_source(at(millis), &[]), FromSource::Wait(_)), "{millis}");
        }
        assert_eq!(receiver.next_from_source(at(10_000), &[(0, 4)]), FromSource::Take(0, (0, 4)));
        assert!(!receiver.note_source_lost(at(10_000)), "that was the last hope");
        receiver.note_bytes(at(11_000), 1);
        receiver.set_aside(relay);
        assert!(matches!(receiver.next_from_source(at(11_500), &[(0, 4)]), FromSource::Take(..)));
    }

    #[test]
    fn a_receiver_says_how_it_stands() {
        let (mut receiver, relay) = independent();
        let all = Standing { has_table: true, is_covered: true, leaves: false };
        assert_eq!(receiver.standing(3..9), all);
        receiver.learn(relay, set(4..64));
        assert_eq!(receiver.standing(3..9), Standing { is_covered: false, ..all });
        assert_eq!(receiver.standing(4..9), all);
        assert_eq!(Receiver::new(64, 1).standing(0..1), Standing::default());
        assert_eq!(Receiver::new(64, 1).standing(0..0), Standing { is_covered: true, ..Standing::default() });
    }

    #[test]
    fn a_source_that_is_gone_is_done_without_by_who_has_the_digests_and_relays() {
        let (mut receiver, relay) = independent();
        assert!(receiver.note_source_lost(at(1)));
        assert!(receiver.is_free());
        let (mut receiver, _) = independent();
        receiver.note_no_tracker(at(1));
        assert!(!receiver.is_free() && !matches!(receiver.next_from_source(at(1), &[(0, 4)]), FromSource::Take(..)));
        receiver.note_no_tracker(at(1001));
        assert!(receiver.is_free());
        let (mut receiver, _) = independent();
        receiver.set_aside(relay);
        assert!(!receiver.note_source_lost(at(1)) && !receiver.is_free());
        let mut receiver = Receiver::new(64, 1);
        receiver.add_relay();
        assert!(!receiver.note_source_lost(at(1)), "without the digests nothing could be verified");
        receiver.note_no_tracker(at(1));
        assert!(matches!(receiver.next_from_source(at(1), &[(0, 4)]), FromSource::Take(..)));
    }

    #[test]
    fn nothing_holds_up_a_receiver_that_starves() {
        let mut receiver = Receiver::new(64, 1);
        receiver.note_answer(at(0), vec![], at(u64::MAX));
        assert!(matches!(receiver.next_from_source(at(499), &[(3, 5)]), FromSource::Wait(_)));
        assert_eq!(receiver.next_from_source(at(500), &[(3, 5)]), FromSource::Take(0, (3, 5)));
        receiver.note_bytes(at(500), 1);
        receiver.note_bytes(at(900), 1);
        assert!(matches!(receiver.next_from_source(at(999), &[(3, 5)]), FromSource::Wait(_)));
        receiver.note_bytes(at(1000), 2);
        receiver.note_no_tracker(at(1000));
        assert_eq!(receiver.next_from_source(at(1001), &[(3, 5)]), FromSource::Take(0, (3, 5)));
        // A relay that lives is waited for, and one that is set aside is not.
        let mut receiver = Receiver::new(64, 1);
        receiver.note_answer(at(0), vec![], at(u64::MAX));
        let relay = receiver.add_relay();
        assert!(!matches!(receiver.next_from_source(at(4999), &[(3, 5)]), FromSource::Take(..)));
        assert!(matches!(receiver.next_from_source(at(5000), &[(3, 5)]), FromSource::Take(..)));
        receiver.note_bytes(at(5000), 1);
        receiver.set_aside(relay);
        assert!(!matches!(receiver.next_from_source(at(5499), &[(3, 5)]), FromSource::Take(..)));
        assert!(matches!(receiver.next_from_source(at(5500), &[(3, 5)]), FromSource::Take(..)));
    }
}
