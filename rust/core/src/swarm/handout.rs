//! The tracker: which of its own blocks a source hands out to whom, and which members know of one another.
//!
//! A source's uplink is what a swarm has least of. So a block is handed out once, and again only if nobody has it who
//! could pass it on: the member it went to is gone, or says that it still lacks it, or it counts as on its way no longer
//! (`given`). A member is told of a bounded number of others, chosen at random, so that a block is few hops from
//! everybody and no answer grows with the swarm. A member without others is granted everything, so that a receive alone
//! waits for nobody.
//!
//! Everything here is bounded, since any peer that may fetch may ask: members by [`MOST_MEMBERS`] and
//! [`MOST_AT_ADDRESS`], memory for each block by `given`.

use std::net::IpAddr;
use std::time::Duration;

use tensorferry_wire::swarm::{Place, RelayAddress};

use super::given::GivenBlocks;
use crate::error::Error;
use crate::payload::BlockRuns;

/// A member that has asked nothing for so long is gone.
pub(crate) const SILENCE: Duration = Duration::from_secs(15);
/// Members that are being sent granted blocks at once, so that a block does not leave beside too many others: it is
/// complete, and passed on, sooner. More than a few, so that slow members do not hold all places.
const MOST_SEEDS: usize = 12;
/// The members that one answer names.
pub(crate) const MOST_NEIGHBOURS: usize = 12;
/// The members of a swarm: what comes then is served without one.
const MOST_MEMBERS: usize = 4096;
/// Those of them at one address.
const MOST_AT_ADDRESS: usize = 64;
/// When a member that got nothing asks again, for each [`CROWD`] of members, so that many do not ask more often together
/// than few; and one that got something, at the latest.
const ASK_AGAIN: Duration = Duration::from_millis(50);
const CROWD: usize = 32;
const ASK_LATER: Duration = Duration::from_secs(1);
/// The most blocks that one answer hands out.
const MOST_GRANTED: u64 = 64;
/// Blocks that were handed out before, of which so many are looked at for one answer.
const LOOKS: usize = 1 << 16;

/// A member as others reach it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Member {
    /// Where its request came from.
    pub(crate) ip: IpAddr,
    pub(crate) relay: RelayAddress,
}

/// The first block of a grant.
#[derive(Debug)]
struct Granted {
    block: u64,
    at: Duration,
    /// Whether the member has just said that it is being sent it.
    is_coming: bool,
}

#[derive(Debug)]
pub(super) struct Known {
    pub(super) member: Member,
    pub(super) number: u32,
    pub(super) asked: Duration,
    /// What it was last granted, while it has that neither got nor named again.
    granted: Option<Granted>,
}

/// What a member is told.
#[derive(Clone, Debug, Default)]
pub(crate) struct Told<'a> {
    /// Blocks that it may fetch from the source.
    pub(crate) grant: Vec<(u64, u64)>,
    /// When it should ask again.
    pub(crate) wait: Duration,
    /// Members that relay, the nearest first.
    pub(crate) neighbours: Vec<&'a Member>,
    /// Where it is among them; `None` without others.
    pub(crate) place: Option<Place>,
}

/// What a source has handed out of one snapshot, and to whom.
#[derive(Debug)]
pub(crate) struct Handout {
    given: GivenBlocks,
    /// How many blocks members want.
    wanted: u64,
    pub(super) members: Vec<Known>,
    /// Numbers that members were given.
    numbers: u32,
    /// Questions so far.
    pub(super) asked: u64,
}

impl Handout {
    /// For a snapshot of `blocks` blocks.
    pub(crate) fn new(blocks: u64) -> Result<Self, Error> {
        Ok(Self { given: GivenBlocks::new(blocks)?, wanted: blocks, members: Vec::new(), numbers: 0, asked: 0 })
    }

    /// For members that all want the same `wanted` of the blocks.
    pub(crate) fn of_part(self, wanted: u64) -> Self {
        Self { wanted, ..self }
    }

    /// How many blocks one answer should hand out: few enough that all members soon have something to pass on.
    pub(crate) fn most(&self) -> u64 {
        let shares = 16 * self.members.len().max(4) as u64;
        (self.wanted / shares).clamp(1, MOST_GRANTED)
    }

    /// The members that are not gone at the time `now`, and how long ago each has asked.
    pub(crate) fn present(&self, now: Duration) -> impl Iterator<Item = (&Member, Duration)> {
        let known = self.members.iter().map(move |known| (&known.member, now.saturating_sub(known.asked)));
        known.filter(|(_, ago)| *ago < SILENCE)
    }

    /// Notes that `member` is gone.
    pub(crate) fn forget(&mut self, member: &Member) {
        self.members.retain(|known| known.member != *member);
    }

    /// The number of `member`, if it has a place.
    pub(crate) fn number_of(&self, member: &Member) -> Option<u32> {
        self.members.iter().find(|known| known.member == *member).map(|known| known.number)
    }

    /// Whether a member has this number.
    pub(crate) fn has_number(&self, number: u32) -> bool {
        self.members.binary_search_by_key(&number, |known| known.number).is_ok()
    }

    /// How many members there are.
    pub(crate) fn members(&self) -> usize {
        self.members.len()
    }

    /// Answers `member`, which needs the blocks in `need` at the time `now`, with at most `most` of them; with all of
    /// them where there is no other member, or no place for it. Times count from any moment that stays the same.
    ///
    /// What it was granted before and names again, it has not begun to fetch, and may go to another one.
    pub(crate) fn ask(&mut self, now: Duration, member: &Member, need: &[(u64, u64)], most: u64) -> Told<'_> {
        self.members.retain(|known| now.saturating_sub(known.asked) < SILENCE || known.member == *member);
        let Some(number) = self.admit(now, member, need) else {
            // It is served like a receiver that knows of no swarm.
            return Told { grant: need.to_vec(), wait: ASK_LATER, neighbours: Vec::new(), place: None };
        };
        self.given.take_back(number, need);
        let hold = self.given.hold();
        let is_served = |granted: &Granted| now.saturating_sub(granted.at) < hold;
        let seeds = self.members.iter().filter(|known| known.granted.as_ref().is_some_and(is_served));
        let has_room = seeds.count() < MOST_SEEDS;
        let grant = if has_room { self.grant(now, number, need, most) } else { Vec::new() };
        if let Some(known) = self.members.iter_mut().find(|known| known.number == number)
            && let Some(&(block, _)) = grant.first()
        {
            known.granted.get_or_insert(Granted { block, at: now, is_coming: false });
        }
        self.asked = self.asked.wrapping_add(1);
        let crowds = u32::try_from(self.members.len().div_ceil(CROWD)).unwrap_or(u32::MAX);
        let again = ASK_AGAIN.saturating_mul(crowds).min(ASK_LATER);
        let starves = grant.is_empty() && !need.is_empty();
        let (neighbours, place) = self.neighbours(number, member);
        Told {
            grant,
            wait: if starves { again } else { ASK_LATER },
            neighbours,
            place: (self.members.len() > 1).then_some(place),
        }
    }

    /// The number of `member`, which has just asked for the blocks in `need`; `None` if there is no room for a new one.
    /// What a known one was granted before is over, unless it is just coming; a block of it that is needed no more has
    /// come, and its time counts for the pace.
    fn admit(&mut self, now: Duration, member: &Member, need: &[(u64, u64)]) -> Option<u32> {
        if let Some(known) = self.members.iter_mut().find(|known| known.member == *member) {
            known.asked = now;
            let has_ended = |granted: &mut Granted| !std::mem::take(&mut granted.is_coming);
            if let Some(Granted { block, at, .. }) = known.granted.take_if(has_ended)
                && !need.iter().any(|&(first, end)| (first..end).contains(&block))
            {
                self.given.note_pace(now.saturating_sub(at));
            }
            return Some(known.number);
        }
        let here = self.members.iter().filter(|known| known.member.ip == member.ip).count();
        if self.members.len() >= MOST_MEMBERS || here >= MOST_AT_ADDRESS {
            return None;
        }
        // Ascending, so that a member is found by its number.
        self.numbers = self.numbers.checked_add(1)?;
        self.members.push(Known { member: member.clone(), number: self.numbers, asked: now, granted: None });
        Some(self.numbers)
    }

    /// Notes that `member`, which is about to ask, is being sent the `runs` of blocks by the source.
    pub(crate) fn note_coming(&mut self, now: Duration, member: &Member, runs: &[(u64, u64)]) {
        if let Some(known) = self.members.iter_mut().find(|known| known.member == *member) {
            if let Some(granted) = &mut known.granted {
                granted.is_coming = runs.iter().any(|&(first, end)| (first..end).contains(&granted.block));
            }
            self.given.note_coming(now, known.number, runs);
        }
    }

    /// Notes that `member`, which has just asked, fetches `runs` of blocks from the source without having been granted
    /// them. Only of blocks that nobody was granted: who could say it of others, again and again, would hold them for ever.
    pub(crate) fn note_taken(&mut self, now: Duration, member: &Member, runs: &[(u64, u64)]) {
        if let Some(number) = self.number_of(member) {
            self.given.note_taken(now, number, runs);
        }
    }

    /// The blocks of `need` to hand out, in its order: all where there is no other member; else those that never were,
    /// or where there are none of these, those that nobody can be expected to pass on.
    fn grant(&mut self, now: Duration, to: u32, need: &[(u64, u64)], most: u64) -> Vec<(u64, u64)> {
        let blocks = self.given.blocks();
        let need = || need.iter().map(|&(first, end)| (first, end.min(blocks))).filter(|run| run.0 < run.1);
        if self.members.len() == 1 {
            let all: Vec<_> = need().collect();
            self.given.hand_out(now, to, &all, true);
            return all;
        }
        let mut grant = BlockRuns::default();
        let mut left = most;
        for (first, end) in need() {
            let mut at = first;
            while left > 0
                && let Some(block) = self.given.first_fresh(at, end)
            {
                grant.push_block(block);
                (at, left) = (block + 1, left - 1);
            }
        }
        if grant.is_empty() {
            let blocks = need().flat_map(|(first, end)| first..end).take(LOOKS);
            for block in blocks {
                if left == 0 {
                    break;
                }
                if self.is_due(now, to, block) {
                    grant.push_block(block);
                    left -= 1;
                }
            }
        }
        self.given.hand_out(now, to, &grant, false);
        grant.into_vec()
    }

    /// Whether a block that was handed out before may be so again: the member that has it is gone, or is slow to pass it
    /// on, or is the one that asks.
    fn is_due(&self, now: Duration, to: u32, block: u64) -> bool {
        let Some(holder) = self.given.holder(block) else { return false };
        holder == to || self.given.is_overdue(now, block) || !self.has_number(holder)
    }
}

#[cfg(test)]
mod tests;
