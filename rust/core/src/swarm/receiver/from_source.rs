//! What lanes to the source do: what they fetch, and when they ask the tracker.

use std::time::Duration;

use tensorferry_wire::request::MAX_RUNS;
use tensorferry_wire::swarm::Nearness;

use super::from_relays::fetches;
use super::joining::Phase;
use super::standing::Independence;
use super::{FIRST_HEARTBEAT, FromSource, Question, Receiver, Rule};
use crate::swarm::picker::Picker;

/// Without a new byte for so long, the receiver fetches from the source whatever it lacks, whether or not there are relays.
pub(crate) const STARVED: Duration = Duration::from_secs(5);
/// The same where the source is to go, or is gone.
const STARVED_FREE: Duration = Duration::from_secs(10);
/// The same as [`STARVED`] where no relay is left.
const STARVED_ALONE: Duration = Duration::from_millis(500);
/// Lanes to the source that find nothing but what relays offer wait for so long, then they ask for that.
const PATIENCE: Duration = Duration::from_millis(250);
/// A source hears of a receiver at least so often, even if relays bring everything: one that says nothing is taken to be
/// through. At first it is more often, since others begin at the same time.
pub(super) const HEARTBEAT: Duration = Duration::from_secs(1);
/// Lanes to the source that fetch at once where there are relays: a block that comes over one of few lanes is complete,
/// and passed on, sooner than one of many.
const LANES_BESIDE_RELAYS: usize = 2;
/// Beside so many relays it is one lane, where a block takes longer than the answer of a tracker.
const MANY_RELAYS: usize = 4;
/// Where a block comes so soon, the next ones are asked for meanwhile: else lanes would wait for the answer.
const SOON: Duration = Duration::from_millis(250);
/// However long a tracker wants it to wait.
const MOST_WAIT: Duration = Duration::from_secs(10);
/// How often a lane that waits looks again.
const LOOK: Duration = Duration::from_millis(50);

impl Receiver {
    /// What a lane to the source is to do while the ranges in `waiting` are to come.
    pub(crate) fn next_from_source(&mut self, now: Duration, waiting: &[(u64, u64)]) -> FromSource {
        let next = self.decide(now, waiting);
        match &next {
            FromSource::Take(_, run) => {
                self.fetching += 1;
                self.coming.push((*run, now));
            }
            FromSource::Ask(need) => (self.asking, self.question) = (true, Question::of(need)),
            FromSource::Wait(_) => {}
        }
        next
    }

    fn decide(&mut self, now: Duration, waiting: &[(u64, u64)]) -> FromSource {
        if self.phase == Phase::Member {
            let has_time = !self.granted.is_empty() || waiting.is_empty();
            if (has_time && self.is_due(now)) || (self.may_ask() && self.independence == Independence::News) {
                return FromSource::Ask(self.unoffered_of(now, waiting));
            }
        }
        let Some(&(first, end)) = waiting.first() else { return FromSource::Wait(LOOK) };
        let is_starved = self.is_starved(now);
        if is_starved && self.starves != Some(self.fed) {
            (self.starves, self.starved) = (Some(self.fed), self.starved + 1);
        }
        if self.phase != Phase::Member || self.rule == Rule::Alone || is_starved {
            return FromSource::Take(0, (first, end.min(first + self.pace.blocks(now, self.bytes))));
        }
        if self.rule == Rule::Free {
            return FromSource::Wait(LOOK);
        }
        if self.fetching >= self.most_lanes() {
            if self.asks_ahead(now) {
                let need = self.unoffered_of(now, waiting);
                if !need.is_empty() {
                    return FromSource::Ask(need);
                }
            }
            // Blocks may take longer than a source waits to hear of a receiver.
            return if self.is_due(now) { FromSource::Ask(Vec::new()) } else { FromSource::Wait(LOOK) };
        }
        if let Some((index, run)) = self.take_granted(now, waiting) {
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
        FromSource::Ask(need)
    }

    /// The blocks of `waiting` that nobody offers who is no farther than the source.
    pub(super) fn unoffered_of(&mut self, now: Duration, waiting: &[(u64, u64)]) -> Vec<(u64, u64)> {
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

    /// How many lanes fetch from the source at once.
    fn most_lanes(&self) -> usize {
        match self.relays {
            0 => usize::MAX,
            MANY_RELAYS.. if self.block_took > SOON => 1,
            _ => LANES_BESIDE_RELAYS,
        }
    }

    /// Whether to ask for more while all lanes are busy. Where zones are, what is held longer crosses more often.
    fn asks_ahead(&self, now: Duration) -> bool {
        let is_quick = self.block_took <= SOON && !self.picker.has_far_relays();
        self.granted.is_empty() && is_quick && !self.asking && now >= self.ask_at
    }

    fn may_ask(&self) -> bool {
        !self.asking && self.rule == Rule::Swarm
    }

    /// Whether the tracker should hear of the receiver again.
    fn is_due(&self, now: Duration) -> bool {
        self.may_ask() && now.saturating_sub(self.asked) >= self.heartbeat
    }

    /// What to ask the tracker for while all lanes are busy: a receiver that has been alone hears in time of others.
    pub(crate) fn next_question(&mut self, now: Duration, waiting: &[(u64, u64)]) -> Option<Vec<(u64, u64)>> {
        if self.phase != Phase::Member || !self.is_due(now) {
            return None;
        }
        let is_alone = self.place.is_none();
        // Of others it has heard, and all its lanes are busy: the source should go on hearing of it.
        let need = if is_alone { self.unoffered_of(now, waiting) } else { Vec::new() };
        let asks = is_alone || (self.granted.is_empty() && self.fetching > 0);
        if asks {
            (self.asking, self.question) = (true, Question::of(&need));
        }
        asks.then_some(need)
    }

    /// What the question to the tracker that is under way says was taken without a grant.
    pub(crate) fn take_taken(&mut self) -> Vec<(u64, u64)> {
        std::mem::take(&mut self.took)
    }

    /// Whether no byte has come for so long that the source is asked for whatever is lacking.
    pub(super) fn is_starved(&self, now: Duration) -> bool {
        let patience = match (self.relays, self.rule) {
            (0, _) => STARVED_ALONE,
            (_, Rule::Free) => STARVED_FREE,
            // Others that bring nothing again and again are waited for less and less.
            _ => STARVED / 2_u32.saturating_pow(self.starved),
        };
        now.saturating_sub(self.fed) >= patience
    }

    /// The part of a granted run that is still waiting, and the number of its range. What a relay has brought or brings
    /// is no longer granted.
    fn take_granted(&mut self, now: Duration, waiting: &[(u64, u64)]) -> Option<(usize, (u64, u64))> {
        while let Some((first, end)) = self.granted.pop() {
            let overlap = |&(from, to): &(u64, u64)| (from.max(first), to.min(end));
            let found = waiting.iter().map(overlap).enumerate().find(|(_, (from, to))| from < to);
            let Some((index, (from, to))) = found else { continue };
            let to = to.min(from + self.pace.blocks(now, self.bytes));
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
        (self.phase, self.asking, self.asked, self.unanswered) = (Phase::Member, false, now, 0);
        // Who could do without the source asks again soon: it may be let go at any time.
        let is_ready = self.independence == Independence::Told;
        self.heartbeat = if is_ready { wait } else { 2 * self.heartbeat }.clamp(FIRST_HEARTBEAT, HEARTBEAT);
        if self.question == Question::Blocks {
            self.ask_at = if grant.is_empty() { now.saturating_add(wait.min(MOST_WAIT)) } else { now };
        }
        grant.reverse();
        self.granted = grant;
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
    use tensorferry_wire::swarm::{Place, Share};

    use super::super::fixtures::{at, begun, set};
    use super::*;

    #[test]
    fn a_receiver_that_was_alone_asks_again_while_its_lanes_are_busy() {
        let mut receiver = begun();
        receiver.note_answer(at(0), vec![(0, 64)], at(1000));
        assert_eq!(receiver.next_question(at(99), &[(8, 64)]), None);
        assert_eq!(receiver.next_question(at(100), &[(8, 64)]), Some(vec![(8, 64)]));
        assert_eq!(receiver.next_question(at(900), &[(8, 64)]), None, "it has not been answered");
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
        receiver.note_source_done(at(0), 0);
        receiver.note_source_done(at(0), 0);
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
        receiver.note_source_done(at(0), 0);
        assert!(!takes(&mut receiver));
        receiver.note_source_done(at(0), 0);
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

    #[test]
    fn relays_that_bring_nothing_again_and_again_are_waited_for_less_and_less() {
        let mut receiver = begun();
        receiver.note_answer(at(0), vec![], at(u64::MAX));
        receiver.add_relay();
        let mut now = 0;
        for bytes in 1..100 {
            while !matches!(receiver.next_from_source(at(now), &[(3, 5)]), FromSource::Take(..)) {
                now += 10;
            }
            receiver.note_bytes(at(now), bytes);
        }
        assert!((10_000..11_000).contains(&now), "{now}");
    }

    #[test]
    fn a_source_hears_of_a_receiver_whose_lanes_are_busy_for_long() {
        let mut receiver = begun();
        receiver.note_answer(at(0), vec![(0, 9)], at(1));
        receiver.add_relay();
        let waiting: Vec<_> = (0..9).map(|block| (block, block + 1)).collect();
        for _ in 0..2 {
            assert!(matches!(receiver.next_from_source(at(0), &waiting), FromSource::Take(..)));
        }
        receiver.granted.clear();
        receiver.place =
            Some(Place { source: Nearness::Zone, host: Share::ALL, zone: Share::ALL, on_host: 0, in_zone: 1 });
        assert_eq!(
            (receiver.next_question(at(99), &waiting), receiver.next_question(at(100), &waiting)),
            (None, Some(vec![]))
        );
        receiver.asking = false;
        assert_eq!(receiver.coming(), [(0, 1), (1, 2)]);
        assert!(matches!(receiver.next_from_source(at(99), &waiting), FromSource::Wait(_)));
        assert_eq!(receiver.next_from_source(at(100), &waiting), FromSource::Ask(vec![]));
        receiver.note_answer(at(110), vec![], at(1000));
        receiver.note_source_done(at(120), 2);
        assert_eq!(receiver.coming(), [(0, 1)]);
        assert!(matches!(receiver.next_from_source(at(120), &waiting), FromSource::Ask(need) if !need.is_empty()));
    }

    #[test]
    fn where_blocks_come_soon_the_next_ones_are_asked_for_meanwhile() {
        for (took, asks) in [(250, true), (251, false)] {
            let mut receiver = begun();
            receiver.note_answer(at(0), vec![(0, 3)], at(1));
            receiver.add_relay();
            let waiting: Vec<_> = (0..9).map(|block| (block, block + 1)).collect();
            assert!(matches!(receiver.next_from_source(at(0), &waiting), FromSource::Take(_, (0, 1))));
            receiver.note_source_done(at(took), 1);
            receiver.heartbeat = at(10_000);
            for _ in 0..2 {
                assert!(matches!(receiver.next_from_source(at(took), &waiting[1..]), FromSource::Take(..)));
            }
            let next = receiver.next_from_source(at(took), &waiting[3..]);
            assert_eq!(matches!(next, FromSource::Ask(need) if need == [(3, 9)]), asks, "{took}");
        }
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
        assert_eq!(receiver.next_from_source(at(1001), &[(3, 5)]), FromSource::Take(0, (3, 4)));
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
}
