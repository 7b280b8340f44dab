//! What lanes to the source do: what they fetch, and when they ask the tracker.

use std::time::Duration;

use tensorferry_wire::request::MAX_RUNS;

use super::from_relays::fetches;
use super::joining::Phase;
use super::{FIRST_HEARTBEAT, FromSource, Question, Receiver, Rule};
use crate::payload::{BlockRuns, blocks_of};
use crate::swarm::picker::Picker;

/// With no or next to no new bytes for so long, the receiver fetches from the source whatever it lacks, whether or not
/// there are relays. It is half as long each time after that.
pub(crate) const STARVED: Duration = Duration::from_secs(5);
/// The same where the source is gone: without a new byte, and each time.
pub(super) const STARVED_FREE: Duration = Duration::from_secs(10);
/// The same as [`STARVED`] where no relay is left, or where the source is gone and none has what is lacking.
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
/// However long a tracker wants it to wait, or however short, and if what it grants is of no use: nobody asks again and
/// again without a pause.
const MOST_WAIT: Duration = Duration::from_secs(10);
const LEAST_WAIT: Duration = Duration::from_millis(5);
/// Grants in a row that may be of no use, since relays have overtaken them.
const MOST_IN_VAIN: u32 = 8;
/// How often a lane that waits looks again.
const LOOK: Duration = Duration::from_millis(50);

impl Receiver {
    /// What a lane to the source is to do while the ranges in `waiting` are to come.
    pub(crate) fn next_from_source(&mut self, now: Duration, waiting: &[(u64, u64)]) -> FromSource {
        let next = self.decide(now, waiting);
        match &next {
            FromSource::Take(_, run) => {
                self.in_vain = 0;
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
            if has_time && self.is_due(now) {
                return FromSource::Ask(self.unoffered_of(now, waiting));
            }
        }
        let Some(&(first, end)) = waiting.first() else { return FromSource::Wait(LOOK) };
        if self.rule == Rule::Free {
            self.patience_free = if self.is_unoffered(waiting) { STARVED_ALONE } else { STARVED_FREE };
        }
        let is_starved = self.is_starved(now);
        if is_starved && self.starves != Some(self.fed) {
            (self.starves, self.starved) = (Some(self.fed), self.starved + 1);
            // Where the source brings no more than that, what comes has to be enough.
            self.least /= 2;
        }
        if self.phase != Phase::Member || self.rule == Rule::Alone || is_starved {
            return FromSource::Take(0, (first, end.min(first + self.pace.blocks(now, self.bytes))));
        }
        if self.rule == Rule::Free {
            return FromSource::Wait(LOOK);
        }
        if self.coming.len() >= self.most_lanes() {
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

    /// Whether no relay has any block of `waiting`.
    fn is_unoffered(&self, waiting: &[(u64, u64)]) -> bool {
        blocks_of(waiting).all(|block| self.picker.is_unoffered(block))
    }

    /// The blocks of `waiting` that nobody offers.
    pub(super) fn unoffered_of(&mut self, now: Duration, waiting: &[(u64, u64)]) -> Vec<(u64, u64)> {
        self.needed(now, waiting, Picker::is_unoffered)
    }

    /// The blocks of `waiting` that are `wanted` of the source, and are not left to others near it.
    fn needed(
        &mut self,
        now: Duration,
        waiting: &[(u64, u64)],
        wanted: impl Fn(&Picker, u64) -> bool,
    ) -> Vec<(u64, u64)> {
        let fetches = self.place.map(|place| fetches(self.place, self.impatient, self.group, place.source));
        let fetches = |block| fetches.as_ref().is_none_or(|fetches| fetches(block));
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

    /// Whether to ask for more while all lanes are busy.
    fn asks_ahead(&self, now: Duration) -> bool {
        self.granted.is_empty() && self.block_took <= SOON && !self.asking && now >= self.ask_at
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
        let asks = is_alone || (self.granted.is_empty() && !self.coming.is_empty());
        if asks {
            (self.asking, self.question) = (true, Question::of(&need));
        }
        asks.then_some(need)
    }

    /// What the question to the tracker that is under way says was taken without a grant.
    pub(crate) fn take_taken(&mut self) -> Vec<(u64, u64)> {
        std::mem::take(&mut self.took)
    }

    /// Whether no byte, or too few, has come for so long that the source is asked for whatever is lacking.
    pub(super) fn is_starved(&self, now: Duration) -> bool {
        let patience = match (self.relays, self.rule) {
            (0, _) => STARVED_ALONE,
            (_, Rule::Free) => self.patience_free,
            // Others that bring nothing again and again are waited for less and less.
            _ => STARVED / 2_u32.saturating_pow(self.starved),
        };
        // Of a source that is gone nothing better can be had than what drips.
        let since = if self.rule == Rule::Free { self.came } else { self.fed };
        now.saturating_sub(since) >= patience
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
        self.heartbeat = (2 * self.heartbeat).clamp(FIRST_HEARTBEAT, HEARTBEAT);
        if self.question == Question::Blocks {
            self.in_vain += 1;
            let is_useful = !grant.is_empty() && self.in_vain <= MOST_IN_VAIN;
            let (wait, least) = if is_useful { (Duration::ZERO, Duration::ZERO) } else { (wait, LEAST_WAIT) };
            self.ask_at = now.saturating_add(wait.clamp(least, MOST_WAIT));
        }
        grant.reverse();
        self.granted = grant;
    }
}

/// The blocks of `waiting` that are `wanted`, as at most [`MAX_RUNS`] ascending runs.
fn merged(waiting: &[(u64, u64)], wanted: impl Fn(u64) -> bool) -> Vec<(u64, u64)> {
    let sorted: BlockRuns = waiting.iter().copied().collect();
    let runs: BlockRuns = blocks_of(&sorted).filter(|&block| wanted(block)).collect();
    let mut runs = runs.into_vec();
    runs.truncate(MAX_RUNS);
    runs
}

#[cfg(test)]
mod tests;
