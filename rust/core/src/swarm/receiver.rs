//! What a receiver does next: fetch from the source or a relay, ask the tracker, or wait.
//!
//! The source is spared: only blocks that it has granted are fetched from it, and grants are asked for blocks that no
//! relay offers. A receiver that gets nothing that way is not bound by it. So no relay and no tracker holds up a receive
//! for longer than [`STARVED`] without a byte. Something of its own choice it fetches at once, so that its link is not
//! idle while it asks for the first time; where there are no others, the answer grants it everything.

use std::time::Duration;

use tensorferry_wire::request::MAX_RUNS;
use tensorferry_wire::swarm::{Nearness, Place, Standing};

use super::BlockSet;
use super::picker::{Picker, mix};
use super::zones::owns;

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
/// A receiver that finds nothing of its share, only what others are to bring to its host or zone, waits for them so long
/// without a byte, and no longer than `MOST_PATIENCE` and half of what it has taken until then: from then on it fetches
/// from anywhere, until it is told of another share.
const PATIENCE_FOR_OTHERS: Duration = Duration::from_secs(1);
const MOST_PATIENCE: Duration = Duration::from_secs(4);
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

/// Whether the receiver can do without the source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Independence {
    No,
    /// The tracker should hear of it now.
    News,
    Told,
}

/// The state of one receive in a swarm. Times count from its beginning.
#[derive(Debug)]
pub(crate) struct Receiver {
    picker: Picker,
    /// Blocks that the tracker has granted, in runs, the next one last.
    granted: Vec<(u64, u64)>,
    /// What it began with without a grant, which the next question names; `None` before.
    took: Option<Vec<(u64, u64)>>,
    seed: u64,
    asking: bool,
    asked: Duration,
    heartbeat: Duration,
    ask_at: Duration,
    independence: Independence,
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
    /// For a payload of `blocks` blocks; `seed` should differ from receiver to receiver.
    pub(crate) fn new(blocks: usize, seed: u64) -> Self {
        let never = Duration::ZERO;
        let picker = Picker::new(blocks, seed);
        Self {
            picker,
            granted: Vec::new(),
            took: None,
            seed,
            asking: false,
            asked: never,
            heartbeat: FIRST_HEARTBEAT,
            ask_at: never,
            independence: Independence::No,
            relays: 0,
            fetching: 0,
            bytes: 0,
            fed: never,
            unoffered: never,
            rule: Rule::Swarm,
            has_table: false,
            place: None,
            group: (blocks as u64 / 256).clamp(1, 16),
            held: None,
            impatient: false,
            unanswered: 0,
        }
    }

    /// Where it is. What others bring, it waits for anew if that has changed.
    pub(crate) fn note_place(&mut self, place: Option<Place>) {
        let shares = |place: Option<Place>| place.map(|place| (place.host, place.zone));
        if shares(self.place) != shares(place) {
            (self.held, self.impatient) = (None, false);
        }
        self.place = place;
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
        now: Duration,
        relay: usize,
        waiting: &[(u64, u64)],
        most: u64,
    ) -> Option<(usize, (u64, u64))> {
        let (from, is_bound) = (self.picker.nearness(relay), self.place.is_some() && !self.impatient);
        // What the source has it need not bring from afar.
        let passes = is_bound && from == Nearness::Far && self.rule == Rule::Swarm && self.is_near_source();
        let fetches = fetches(self.place, self.impatient, self.group, from);
        let found = self.picker.pick_allowed(relay, waiting, most, |picker, block| {
            !is_bound || (!passes && fetches(block) && !picker.is_offered_nearer(block, from))
        });
        if found.is_some() {
            let shares = self.place.map_or(1, |place| match from {
                Nearness::Host => 1,
                Nearness::Zone => place.host.of,
                Nearness::Far => place.zone.of,
            });
            if shares > 1 {
                self.held = None;
            }
        } else if !passes && self.picker.pick(relay, waiting, 1).is_some() {
            self.wait_for_others(now);
        }
        found
    }

    fn is_near_source(&self) -> bool {
        self.place.is_some_and(|place| place.source < Nearness::Far)
    }

    /// Notes that there is nothing to fetch but what others are to bring.
    fn wait_for_others(&mut self, now: Duration) {
        let since = *self.held.get_or_insert(now);
        let idle = now.saturating_sub(since.max(self.fed)) >= PATIENCE_FOR_OTHERS;
        self.impatient |= idle || now.saturating_sub(since) >= MOST_PATIENCE + since / 2;
    }

    /// The blocks of `waiting` that nobody offers who is no farther than the source.
    fn unoffered_of(&mut self, now: Duration, waiting: &[(u64, u64)]) -> Vec<(u64, u64)> {
        if self.is_near_source() {
            self.needed(now, waiting, |picker, block| !picker.is_offered_nearer(block, Nearness::Far))
        } else {
            self.needed(now, waiting, Picker::is_unoffered)
        }
    }

    /// The blocks of `waiting` that are `wanted` of the source, and are not left to others near it.
    fn needed(
        &mut self,
        now: Duration,
        waiting: &[(u64, u64)],
        wanted: impl Fn(&Picker, u64) -> bool,
    ) -> Vec<(u64, u64)> {
        let from = self.place.map_or(Nearness::Host, |place| place.source);
        let fetches = fetches(self.place, self.impatient, self.group, from);
        let need = merged(waiting, |block| fetches(block) && wanted(&self.picker, block));
        if need.is_empty() && !waiting.is_empty() && !merged(waiting, |block| wanted(&self.picker, block)).is_empty() {
            self.wait_for_others(now);
        }
        need
    }

    /// What a lane to the source is to do while the ranges in `waiting` are to come.
    pub(crate) fn next_from_source(&mut self, now: Duration, waiting: &[(u64, u64)]) -> FromSource {
        let next = self.decide(now, waiting);
        self.fetching += usize::from(matches!(next, FromSource::Take(..)));
        next
    }

    fn decide(&mut self, now: Duration, waiting: &[(u64, u64)]) -> FromSource {
        let may_ask = !self.asking && self.rule == Rule::Swarm;
        let is_due =
            now.saturating_sub(self.asked) >= self.heartbeat && (!self.granted.is_empty() || waiting.is_empty());
        if may_ask && self.took.is_some() && (is_due || self.independence == Independence::News) {
            self.asking = true;
            return FromSource::Ask(self.unoffered_of(now, waiting));
        }
        let Some(&first) = waiting.first() else { return FromSource::Wait(LOOK) };
        if self.rule == Rule::Alone || self.is_starved(now) {
            return FromSource::Take(0, first);
        }
        if self.rule == Rule::Free {
            return FromSource::Wait(LOOK);
        }
        if self.took.is_none() {
            return self.first_of_own_choice(waiting);
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
        let mut need = self.unoffered_of(now, waiting);
        if !need.is_empty() {
            self.unoffered = now;
        } else if now.saturating_sub(self.unoffered) >= PATIENCE {
            need = self.needed(now, waiting, |_, _| true);
            if need.is_empty() {
                return FromSource::Wait(LOOK);
            }
        } else {
            return FromSource::Wait(LOOK);
        }
        self.asking = true;
        FromSource::Ask(need)
    }

    /// One block to begin with, any one, so that receivers that begin together do not all choose the same.
    fn first_of_own_choice(&mut self, waiting: &[(u64, u64)]) -> FromSource {
        let (chosen, within) = (mix(self.seed), mix(!self.seed));
        let index = usize::try_from(chosen % waiting.len() as u64).unwrap_or(0);
        let (first, end) = waiting[index];
        let block = first + within % (end - first);
        self.took = Some(vec![(block, block + 1)]);
        FromSource::Take(index, (block, block + 1))
    }

    /// What the question to the tracker that is under way says was taken without a grant.
    pub(crate) fn take_taken(&mut self) -> Vec<(u64, u64)> {
        self.took.replace(Vec::new()).unwrap_or_default()
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

    /// Notes that the tracker should hear at once how the member stands that lacks the blocks in `lacks`, if it can do
    /// without the source from now on; returns whether that is so.
    pub(crate) fn note_standing(&mut self, lacks: impl Iterator<Item = u64>) -> bool {
        let may_be_news = self.rule == Rule::Swarm && self.has_table && self.independence == Independence::No;
        let is_news = may_be_news && self.standing(lacks).is_covered;
        if is_news {
            self.independence = Independence::News;
        }
        is_news
    }

    /// How the member stands that lacks the blocks in `lacks`, which the tracker is about to hear.
    pub(crate) fn say_standing(&mut self, lacks: impl Iterator<Item = u64>) -> Standing {
        let standing = self.standing(lacks);
        let is_ready = standing.has_table && standing.is_covered;
        self.independence = if is_ready { Independence::Told } else { Independence::No };
        standing
    }

    fn standing(&self, mut lacks: impl Iterator<Item = u64>) -> Standing {
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

    /// The tracker has granted blocks, or none, instead of those that it has granted before, and wants to be asked again
    /// after `wait`.
    pub(crate) fn note_answer(&mut self, now: Duration, mut grant: Vec<(u64, u64)>, wait: Duration) {
        (self.asking, self.asked, self.unanswered) = (false, now, 0);
        // Who could do without the source asks again soon: it may be let go at any time.
        let is_ready = self.independence == Independence::Told;
        self.heartbeat = if is_ready { wait } else { 2 * self.heartbeat }.clamp(FIRST_HEARTBEAT, HEARTBEAT);
        self.ask_at = if grant.is_empty() { now.saturating_add(wait) } else { now };
        grant.reverse();
        self.granted = grant;
    }

    /// The tracker does not answer, or nothing that makes sense. Without the digests, the source must be there, and is
    /// asked for everything; with them, it may be gone.
    pub(crate) fn note_no_tracker(&mut self, now: Duration) {
        self.asking = false;
        if !self.has_table || self.relays == 0 {
            self.rule = Rule::Alone;
            return;
        }
        self.unanswered += 1;
        (self.asked, self.ask_at) = (now, now.saturating_add(HEARTBEAT));
        if self.unanswered >= MOST_UNANSWERED {
            self.note_free();
        }
    }
}

/// Which blocks a receiver at `place` fetches from where it is `from` that far, and does not leave to others near it.
fn fetches(place: Option<Place>, impatient: bool, group: u64, from: Nearness) -> impl Fn(u64) -> bool {
    let place = place.filter(|_| !impatient);
    move |block| place.is_none_or(|place| owns(&place, from, block / group))
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
    use tensorferry_wire::swarm::Share;

    use super::super::BlockMap;
    use super::*;

    impl Receiver {
        fn add_relay(&mut self) -> usize {
            self.add_relay_at(Nearness::Zone)
        }
    }

    fn at(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    fn set(blocks: std::ops::Range<u64>) -> BlockSet {
        let map = BlockMap::new(64).unwrap();
        blocks.for_each(|block| map.set(block));
        BlockSet::decode(&map.encode(), 64).unwrap().1
    }

    /// A receiver that has made its first choice.
    fn begun() -> Receiver {
        Receiver { took: Some(Vec::new()), ..Receiver::new(64, 1) }
    }

    #[test]
    fn one_block_of_its_own_choice_comes_while_the_tracker_is_asked() {
        let chosen: std::collections::HashSet<_> = (0..64)
            .map(|seed| {
                let mut receiver = Receiver::new(64, seed);
                let waiting = [(0, 16), (32, 64)];
                let FromSource::Take(index, (first, end)) = receiver.next_from_source(at(0), &waiting) else {
                    panic!("the link is idle")
                };
                assert!(waiting[index].0 <= first && end <= waiting[index].1 && end == first + 1);
                assert_eq!(receiver.next_from_source(at(0), &[(7, 9)]), FromSource::Ask(vec![(7, 9)]));
                assert_eq!(receiver.take_taken(), [(first, end)]);
                assert!(receiver.take_taken().is_empty(), "it is said once");
                first
            })
            .collect();
        assert!(chosen.len() > 20, "{chosen:?}");
    }

    #[test]
    fn the_tracker_hears_at_once_when_the_receiver_can_do_without_the_source() {
        let mut receiver = begun();
        let relay = receiver.add_relay();
        receiver.note_answer(at(0), vec![(0, 4)], at(1));
        receiver.learn(relay, set(0..64));
        assert!(!receiver.note_standing(0..9), "it has no digests yet");
        receiver.note_table();
        assert!(receiver.note_standing(0..9));
        assert_eq!(receiver.next_from_source(at(1), &[]), FromSource::Ask(vec![]));
        assert!(receiver.say_standing(0..9).is_covered);
        assert!(!receiver.note_standing(0..9), "it was said");
        // From then on it asks as often as it is told to, since it may be let go.
        receiver.note_answer(at(1), vec![], at(60));
        assert!(matches!(receiver.next_from_source(at(60), &[]), FromSource::Wait(_)));
        assert_eq!(receiver.next_from_source(at(61), &[]), FromSource::Ask(vec![]));
    }

    #[test]
    fn what_a_lost_relay_was_to_bring_is_asked_for_at_once() {
        let mut receiver = begun();
        let relay = receiver.add_relay();
        receiver.note_answer(at(0), vec![], at(1000));
        assert!(matches!(receiver.next_from_source(at(1), &[(0, 4)]), FromSource::Wait(_)));
        receiver.set_aside(relay);
        assert_eq!(receiver.next_from_source(at(1), &[(0, 4)]), FromSource::Ask(vec![(0, 4)]));
    }

    #[test]
    fn the_source_is_asked_for_what_nobody_offers() {
        let mut receiver = begun();
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
        let mut receiver = begun();
        let waiting: Vec<_> = (0..9).map(|block| (block, block + 1)).collect();
        let takes =
            |receiver: &mut Receiver| matches!(receiver.next_from_source(at(0), &waiting), FromSource::Take(..));
        receiver.note_answer(at(0), vec![(0, 9)], at(1));
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
        let mut receiver = begun();
        receiver.note_answer(at(0), vec![(0, 4), (10, 14)], at(1000));
        assert_eq!(receiver.next_from_source(at(0), &[(11, 12), (20, 21)]), FromSource::Take(0, (11, 12)));
        assert!(matches!(receiver.next_from_source(at(0), &[(20, 21)]), FromSource::Ask(_)));
    }

    #[test]
    fn offered_blocks_are_asked_for_when_relays_do_not_bring_them() {
        let mut receiver = begun();
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
        let mut receiver = begun();
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
        let mut receiver = begun();
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
        assert_eq!(begun().standing(0..1), Standing::default());
        assert_eq!(begun().standing(0..0), Standing { is_covered: true, ..Standing::default() });
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
        let mut receiver = begun();
        receiver.add_relay();
        assert!(!receiver.note_source_lost(at(1)), "without the digests nothing could be verified");
        receiver.note_no_tracker(at(1));
        assert!(matches!(receiver.next_from_source(at(1), &[(0, 4)]), FromSource::Take(..)));
    }

    #[test]
    fn nothing_holds_up_a_receiver_that_starves() {
        let mut receiver = begun();
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
        let mut receiver = begun();
        receiver.note_answer(at(0), vec![], at(u64::MAX));
        let relay = receiver.add_relay();
        assert!(!matches!(receiver.next_from_source(at(4999), &[(3, 5)]), FromSource::Take(..)));
        assert!(matches!(receiver.next_from_source(at(5000), &[(3, 5)]), FromSource::Take(..)));
        receiver.note_bytes(at(5000), 1);
        receiver.set_aside(relay);
        assert!(!matches!(receiver.next_from_source(at(5499), &[(3, 5)]), FromSource::Take(..)));
        assert!(matches!(receiver.next_from_source(at(5500), &[(3, 5)]), FromSource::Take(..)));
    }

    /// A receiver far from the source that shares its zone with another one, and a relay of each distance with everything.
    fn zoned() -> (Receiver, [usize; 3]) {
        let mut receiver = begun();
        let share = Share { number: 0, of: 2 };
        let place = Place { source: Nearness::Far, host: Share::ALL, zone: share, on_host: 1, in_zone: 1 };
        receiver.note_place(Some(place));
        receiver.note_answer(at(0), vec![], at(u64::MAX));
        let relays = [Nearness::Host, Nearness::Zone, Nearness::Far].map(|near| receiver.add_relay_at(near));
        (receiver, relays)
    }

    #[test]
    fn from_afar_comes_its_own_share_of_what_nobody_near_has() {
        let (mut receiver, [_, near, far]) = zoned();
        receiver.learn(far, set(0..64));
        let own: Vec<u64> = (0..64).filter(|&block| owns(&receiver.place.unwrap(), Nearness::Far, block)).collect();
        assert!(own.len() > 16 && own.len() < 48, "{own:?}");
        let fetched = |receiver: &mut Receiver, relay| -> Vec<u64> {
            (0..64).filter(|&b| receiver.next_from_relay(at(1), relay, &[(b, b + 1)], 1).is_some()).collect()
        };
        assert_eq!(fetched(&mut receiver, far), own);
        receiver.learn(near, set(0..32));
        assert_eq!(fetched(&mut receiver, near), (0..32).collect::<Vec<_>>());
        let rest: Vec<u64> = own.into_iter().filter(|&block| block >= 32).collect();
        assert_eq!(fetched(&mut receiver, far), rest);
    }

    #[test]
    fn others_are_waited_for_only_so_long() {
        let (mut receiver, [.., far]) = zoned();
        receiver.learn(far, set(0..64));
        let theirs = (0..64).find(|&block| !owns(&receiver.place.unwrap(), Nearness::Far, block)).unwrap();
        let waiting = [(theirs, theirs + 1)];
        assert_eq!(receiver.next_from_relay(at(1), far, &waiting, 1), None);
        assert_eq!(receiver.next_from_relay(at(1000), far, &waiting, 1), None);
        receiver.next_from_relay(at(1001), far, &waiting, 1);
        assert_eq!(receiver.next_from_relay(at(1001), far, &waiting, 1), Some((0, waiting[0])), "nothing comes");
        // Where something comes all the time, it waits for longer, but not for ever.
        let (mut receiver, [.., far]) = zoned();
        receiver.learn(far, set(0..64));
        let mut now = 1;
        while receiver.next_from_relay(at(now), far, &waiting, 1).is_none() {
            now += 100;
            receiver.note_bytes(at(now), now);
            assert!(now < 10_000, "it waits for ever");
        }
        assert!(now >= 4000, "{now}");
    }

    #[test]
    fn near_the_source_nothing_comes_from_afar_while_it_is_there() {
        let (mut receiver, [.., far]) = zoned();
        let place = receiver.place.map(|place| Place { source: Nearness::Zone, zone: Share::ALL, ..place });
        receiver.note_place(place);
        receiver.learn(far, set(0..64));
        assert_eq!(receiver.next_from_relay(at(1), far, &[(0, 4)], 4), None);
        receiver.note_answer(at(1), vec![], at(0));
        assert_eq!(receiver.next_from_source(at(2), &[(0, 4)]), FromSource::Ask(vec![(0, 4)]));
        receiver.note_free();
        assert_eq!(receiver.next_from_relay(at(3), far, &[(0, 4)], 4), Some((0, (0, 4))));
    }
}
