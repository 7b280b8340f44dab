//! The tracker: which of its own blocks a source hands out to whom, and which members know of one another.
//!
//! A source's uplink is what a swarm has least of. So a block is handed out once, and again only if nobody has it who
//! could pass it on: the member it went to is gone, or says that it still lacks it, or has had it for long ([`HOLD`]). A member is
//! told of a bounded number of others, chosen at random, so that a block is few hops from everybody and no answer grows
//! with the swarm. A member without others is granted everything, so that a receive alone waits for nobody.
//!
//! Everything here is bounded, since any peer that may fetch may ask: members by [`MOST_MEMBERS`] and
//! [`MOST_AT_ADDRESS`], memory for each block by [`Given`].

use std::net::IpAddr;
use std::time::Duration;

use tensorferry_wire::swarm::{Place, RelayAddress};

use super::BlockSet;
use super::zones::GIVES_WAY;
use crate::error::Error;
use crate::memory::make_room;

/// A member that has asked nothing for so long is gone.
pub(crate) const SILENCE: Duration = Duration::from_secs(15);
/// How long a block counts as on its way to a member that lives.
pub(crate) const HOLD: Duration = Duration::from_secs(2);
/// The same at most, where links are so slow that members take longer for what they are granted.
const MOST_HOLD: Duration = Duration::from_secs(8);
/// Members that are being sent granted blocks at once, so that a block does not leave beside too many others: it is
/// complete, and passed on, sooner. More than a few, so that slow members do not hold all places.
const MOST_SEEDS: usize = 12;
/// The same where there are members in other zones: with more, more crosses (in the simulator).
const MOST_SEEDS_FOR_ZONES: usize = 4;
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
    /// The zone that it says it is in.
    pub(crate) zone: Option<String>,
}

#[derive(Debug)]
pub(super) struct Known {
    pub(super) member: Member,
    pub(super) number: u32,
    pub(super) asked: Duration,
    /// When it was granted blocks, if it has not asked since.
    granted: Option<Duration>,
    /// When it was last granted blocks.
    pub(super) served: Option<Duration>,
    /// Whether it could finish without the source when it last asked.
    pub(super) ready: bool,
    /// Whether it has everything, and stays for the others.
    pub(super) stays: bool,
}

/// The last time that a block was handed out, in milliseconds, and the number of the member it went to.
#[derive(Clone, Copy, Debug, Default)]
struct Given {
    at: u32,
    to: u32,
}

/// What a member is told.
#[derive(Clone, Debug, Default)]
pub(crate) struct Told<'a> {
    /// Blocks that it may fetch from the source.
    pub(crate) grant: Vec<(u64, u64)>,
    /// When it should ask again.
    pub(crate) wait: Duration,
    /// When it should ask again if the answer may change at any time.
    pub(crate) again: Duration,
    /// Members that relay, the nearest first.
    pub(crate) neighbours: Vec<&'a Member>,
    /// Where it is among them; `None` without others.
    pub(crate) place: Option<Place>,
}

/// What a source has handed out of one snapshot, and to whom.
#[derive(Debug)]
pub(crate) struct Handout {
    /// Blocks that were never handed out.
    fresh: BlockSet,
    given: Vec<Given>,
    /// How many blocks members want.
    wanted: u64,
    pub(super) members: Vec<Known>,
    /// Numbers that members were given.
    numbers: u32,
    /// Questions so far.
    pub(super) asked: u64,
    /// The zone of the source.
    pub(super) zone: Option<String>,
    /// Whether members have been told to do without the source.
    pub(super) freed: bool,
    /// What the quicker ones of the members took of late from a grant to the next question.
    pace: Duration,
}

impl Handout {
    /// For a snapshot of `blocks` blocks.
    pub(crate) fn new(blocks: u64) -> Result<Self, Error> {
        let mut given = Vec::new();
        let count = usize::try_from(blocks).unwrap_or(usize::MAX);
        make_room(&mut given, count)?;
        given.resize(count, Given::default());
        Ok(Self {
            fresh: BlockSet::all(blocks)?,
            given,
            wanted: blocks,
            members: Vec::new(),
            numbers: 0,
            asked: 0,
            zone: None,
            freed: false,
            pace: Duration::ZERO,
        })
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

    /// How many members there are.
    pub(crate) fn members(&self) -> usize {
        self.members.len()
    }

    /// Answers `member`, which needs the blocks in `need` at the time `now`, with at most `most` of them. Times count
    /// from any moment that stays the same.
    ///
    /// What it was granted before and names again, it has not begun to fetch, and may go to another one.
    pub(crate) fn ask(&mut self, now: Duration, member: &Member, need: &[(u64, u64)], most: u64) -> Told<'_> {
        self.members.retain(|known| now.saturating_sub(known.asked) < SILENCE || known.member == *member);
        let Some(number) = self.admit(now, member, !need.is_empty()) else {
            // It is served like a receiver that knows of no swarm.
            return Told {
                grant: need.to_vec(),
                wait: ASK_LATER,
                again: ASK_LATER,
                neighbours: Vec::new(),
                place: None,
            };
        };
        self.take_back(number, need);
        let hold = self.hold();
        let seeds = self.members.iter().filter(|known| known.granted.is_some_and(|at| now.saturating_sub(at) < hold));
        let most_seeds = if self.has_far_members() { MOST_SEEDS_FOR_ZONES } else { MOST_SEEDS };
        let has_room = seeds.count() < most_seeds;
        let grant = if has_room { self.grant(now, number, need, most) } else { Vec::new() };
        if let Some(known) = self.members.iter_mut().find(|known| known.number == number) {
            let granted = (!grant.is_empty()).then_some(now);
            (known.granted, known.served) = (known.granted.or(granted), granted.or(known.served));
        }
        self.asked = self.asked.wrapping_add(1);
        let crowds = u32::try_from(self.members.len().div_ceil(CROWD)).unwrap_or(u32::MAX);
        let again = ASK_AGAIN.saturating_mul(crowds).min(ASK_LATER);
        let starves = grant.is_empty() && !need.is_empty();
        let (neighbours, place) = self.neighbours(number, member);
        Told {
            grant,
            wait: if starves { again } else { ASK_LATER },
            again,
            neighbours,
            place: (self.members.len() > 1).then_some(place),
        }
    }

    /// The number of `member`, which has just asked, for blocks or not; `None` if there is no room for it.
    fn admit(&mut self, now: Duration, member: &Member, asks: bool) -> Option<u32> {
        if let Some(known) = self.members.iter_mut().find(|known| known.member == *member) {
            known.asked = now;
            if let Some(at) = known.granted.take_if(|_| asks) {
                let took = now.saturating_sub(at);
                // A slow one moves it little, and a quick one at once.
                self.pace = if self.pace.is_zero() || took < self.pace {
                    took
                } else {
                    self.pace + took.saturating_sub(self.pace) / 16
                };
            }
            return Some(known.number);
        }
        let here = self.members.iter().filter(|known| known.member.ip == member.ip).count();
        if self.members.len() >= MOST_MEMBERS || here >= MOST_AT_ADDRESS {
            return None;
        }
        // Ascending, so that a member is found by its number.
        self.numbers = self.numbers.checked_add(1)?;
        self.members.push(Known {
            member: member.clone(),
            number: self.numbers,
            asked: now,
            granted: None,
            served: None,
            ready: false,
            stays: false,
        });
        Some(self.numbers)
    }

    /// How long a block counts as on its way.
    fn hold(&self) -> Duration {
        (4 * self.pace).clamp(HOLD, MOST_HOLD)
    }

    /// Makes those blocks of `need` that are on their way to the member of number `from` ones that were never handed out.
    fn take_back(&mut self, from: u32, need: &[(u64, u64)]) {
        let blocks = self.given.len() as u64;
        for block in need.iter().flat_map(|&(first, end)| first..end.min(blocks)) {
            let given = usize::try_from(block).ok().and_then(|block| self.given.get(block));
            if given.is_some_and(|given| given.to == from) {
                self.fresh.insert(block);
            }
        }
    }

    /// Notes that `member`, which has just asked, fetches `runs` of blocks from the source without having been granted
    /// them.
    pub(crate) fn note_taken(&mut self, now: Duration, member: &Member, runs: &[(u64, u64)]) {
        let Some(number) = self.members.iter().find(|known| known.member == *member).map(|known| known.number) else {
            return;
        };
        let blocks = self.given.len() as u64;
        self.hand_out(now, number, runs.iter().flat_map(|&(first, end)| first..end.min(blocks)));
    }

    /// The blocks of `need` to hand out, ascending: those that never were, or else those that nobody can be expected to
    /// pass on.
    fn grant(&mut self, now: Duration, to: u32, need: &[(u64, u64)], most: u64) -> Vec<(u64, u64)> {
        let blocks = self.given.len() as u64;
        let need = || need.iter().map(|&(first, end)| (first, end.min(blocks))).filter(|run| run.0 < run.1);
        if self.members.len() == 1 {
            let all: Vec<_> = need().collect();
            self.hand_out(now, to, all.iter().flat_map(|&(first, end)| first..end));
            return all;
        }
        let mut grant = Runs::default();
        let mut left = most;
        let gives_way = self.gives_way(now, to);
        for (first, end) in need().filter(|_| !gives_way) {
            let mut at = first;
            while left > 0
                && let Some(block) = self.fresh.first_in(at, end)
            {
                grant.push(block);
                (at, left) = (block + 1, left - 1);
            }
        }
        if grant.0.is_empty() {
            let blocks = need().flat_map(|(first, end)| first..end).take(LOOKS);
            for block in blocks {
                if left == 0 {
                    break;
                }
                if self.is_due(now, to, block, gives_way) {
                    grant.push(block);
                    left -= 1;
                }
            }
        }
        self.hand_out(now, to, grant.0.iter().flat_map(|&(first, end)| first..end));
        grant.0
    }

    fn hand_out(&mut self, now: Duration, to: u32, blocks: impl Iterator<Item = u64>) {
        let at = u32::try_from(now.as_millis()).unwrap_or(u32::MAX);
        for block in blocks {
            self.fresh.remove(block);
            if let Some(given) = usize::try_from(block).ok().and_then(|block| self.given.get_mut(block)) {
                *given = Given { at, to };
            }
        }
    }

    /// Whether a block that was handed out before may be so again: the member that has it is gone, or is slow to pass it
    /// on, or is the one that asks.
    fn is_due(&self, now: Duration, to: u32, block: u64, gives_way: bool) -> bool {
        let Some(given) = usize::try_from(block).ok().and_then(|block| self.given.get(block)) else { return false };
        let age = now.saturating_sub(Duration::from_millis(u64::from(given.at)));
        if gives_way {
            return given.to != 0 && age >= GIVES_WAY;
        }
        // What went to another zone is not to come back from there.
        if given.to != to && self.is_far(given.to) && !self.is_far(to) {
            return true;
        }
        given.to == to
            || age >= self.hold()
            || self.members.binary_search_by_key(&given.to, |known| known.number).is_err()
    }
}

/// Ascending runs of blocks.
#[derive(Default)]
struct Runs(Vec<(u64, u64)>);

impl Runs {
    fn push(&mut self, block: u64) {
        match self.0.last_mut() {
            Some(run) if run.1 == block => run.1 += 1,
            _ => self.0.push((block, block + 1)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(ip: [u8; 4], port: u16) -> Member {
        Member { ip: ip.into(), relay: RelayAddress { port, token: "0".repeat(32), fingerprint: None }, zone: None }
    }

    fn at(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    #[test]
    fn a_block_is_handed_out_once_while_its_holder_may_pass_it_on() {
        let mut handout = Handout::new(10).unwrap();
        let (one, two) = (member([10, 0, 0, 1], 1), member([10, 0, 0, 2], 1));
        handout.ask(at(0), &two, &[], 4);
        assert_eq!(handout.ask(at(0), &one, &[(0, 10)], 4).grant, [(0, 4)]);
        assert_eq!(handout.ask(at(1), &two, &[(0, 10)], 4).grant, [(4, 8)]);
        assert_eq!(handout.ask(at(2), &one, &[(4, 10)], 4).grant, [(8, 10)]);
        let told = handout.ask(at(3), &two, &[(0, 4), (8, 10)], 4);
        assert_eq!((told.grant, told.wait, told.neighbours), (vec![], ASK_AGAIN, vec![&one]));
        assert!(handout.ask(at(1999), &two, &[(0, 4)], 4).grant.is_empty());
        assert_eq!(handout.ask(at(2000), &two, &[(0, 4), (8, 10)], 6).grant, [(0, 4)], "held for long");
        assert_eq!(handout.ask(at(2000), &two, &[(8, 10)], 6).grant, []);
        assert_eq!(handout.ask(at(2001), &two, &[(0, 2)], 6).grant, [(0, 2)], "what it has lost itself");
    }

    #[test]
    fn on_slow_links_a_block_may_take_longer() {
        let mut handout = Handout::new(10).unwrap();
        let [one, two, three, slow] = [1, 2, 3, 4].map(|host| member([10, 0, 0, host], 1));
        for member in [&one, &two, &three, &slow] {
            handout.ask(at(0), member, &[], 4);
        }
        // A member that needs long for what it was granted says little of links.
        for (member, millis) in [(&one, 1000), (&slow, 9000)] {
            handout.ask(at(0), member, &[(0, 10)], 1);
            handout.ask(at(millis), member, &[], 1);
            handout.ask(at(millis), member, &[(5, 6)], 1);
        }
        assert_eq!(handout.ask(at(9000), &two, &[(9, 10)], 1).grant, [(9, 10)]);
        assert!(handout.ask(at(14_999), &three, &[(9, 10)], 1).grant.is_empty());
        assert_eq!(handout.ask(at(15_000), &three, &[(9, 10)], 1).grant, [(9, 10)]);
        handout.pace = at(60_000);
        assert_eq!(handout.hold(), MOST_HOLD);
    }

    #[test]
    fn what_a_member_took_along_is_handed_out_again() {
        let mut handout = Handout::new(4).unwrap();
        let (one, two, three) = (member([10, 0, 0, 1], 1), member([10, 0, 0, 2], 1), member([10, 0, 0, 3], 1));
        handout.ask(at(0), &one, &[(0, 4)], 4);
        handout.ask(at(10_000), &two, &[], 4);
        handout.ask(at(10_000), &three, &[], 4);
        // However late it was handed out: who has it is gone.
        handout.given.iter_mut().for_each(|given| given.at = 15_000);
        assert!(handout.ask(at(14_999), &two, &[(0, 4)], 4).grant.is_empty());
        assert_eq!(handout.ask(at(15_000), &two, &[(0, 4)], 4).grant, [(0, 4)]);
        assert_eq!(handout.members(), 2);
    }

    #[test]
    fn a_member_without_others_gets_what_it_asks_for() {
        let mut handout = Handout::new(4).unwrap();
        let one = member([10, 0, 0, 1], 1);
        for _ in 0..3 {
            assert_eq!(handout.ask(at(0), &one, &[(0, 4)], 9).grant, [(0, 4)]);
        }
        assert_eq!(handout.ask(at(0), &one, &[(2, 900)], 1).grant, [(2, 4)], "what there is not is not handed out");
    }

    #[test]
    fn what_a_member_was_granted_alone_is_shared_when_another_one_comes() {
        let mut handout = Handout::new(10).unwrap();
        let (one, two) = (member([10, 0, 0, 1], 1), member([10, 0, 0, 2], 1));
        assert_eq!(handout.ask(at(0), &one, &[(0, 10)], 2).grant, [(0, 10)]);
        let told = handout.ask(at(1), &two, &[(0, 10)], 2);
        assert_eq!((told.grant, told.neighbours), (vec![], vec![&one]), "it has them soon");
        // It has begun to fetch the first four.
        assert_eq!(handout.ask(at(2), &one, &[(4, 10)], 2).grant, [(4, 6)]);
        assert_eq!(handout.ask(at(3), &two, &[(0, 10)], 2).grant, [(6, 8)]);
        handout.leave(at(4), &one, false);
        assert_eq!(handout.ask(at(5), &two, &[(0, 6), (8, 10)], 2).grant, [(0, 6), (8, 10)]);
    }

    #[test]
    fn what_a_member_took_without_a_grant_is_not_handed_out_to_others() {
        let mut handout = Handout::new(4).unwrap();
        let (one, two) = (member([10, 0, 0, 1], 1), member([10, 0, 0, 2], 1));
        handout.note_taken(at(0), &one, &[(0, 1)]);
        handout.ask(at(0), &one, &[], 4);
        handout.note_taken(at(0), &one, &[(2, 900)]);
        assert_eq!(handout.ask(at(0), &two, &[(0, 4)], 4).grant, [(0, 2)], "a stranger takes nothing");
    }

    #[test]
    fn members_are_bounded_and_those_beyond_are_served_without_a_swarm() {
        let mut handout = Handout::new(4).unwrap();
        for port in 0..200 {
            handout.ask(at(0), &member([10, 0, 0, 1], port), &[], 4);
        }
        assert_eq!(handout.members(), MOST_AT_ADDRESS);
        let told = handout.ask(at(0), &member([10, 0, 0, 1], 999), &[(0, 4)], 1);
        assert_eq!((told.grant, told.neighbours.len()), (vec![(0, 4)], 0));
        for host in 0..100_u8 {
            for port in 0..60 {
                handout.ask(at(0), &member([10, 0, 1, host], port), &[], 4);
            }
        }
        assert_eq!(handout.members(), MOST_MEMBERS);
        handout.ask(SILENCE, &member([10, 0, 9, 9], 1), &[], 4);
        assert_eq!(handout.members(), 1, "the silent ones are forgotten");
    }

    #[test]
    fn neighbours_are_few_others_and_reach_everybody() {
        let mut handout = Handout::new(4).unwrap();
        let members: Vec<_> = (0..200).map(|host| member([10, 0, 0, host], 1)).collect();
        for one in &members {
            handout.ask(at(0), one, &[], 4);
        }
        let mut reached = [false; 200];
        let mut edge = vec![0_usize];
        reached[0] = true;
        while let Some(index) = edge.pop() {
            let told = handout.ask(at(0), &members[index], &[], 4);
            assert_eq!(told.neighbours.len(), MOST_NEIGHBOURS);
            for other in told.neighbours {
                assert_ne!(other, &members[index]);
                let IpAddr::V4(ip) = other.ip else { panic!("not one of them") };
                let other = usize::from(ip.octets()[3]);
                if !std::mem::replace(&mut reached[other], true) {
                    edge.push(other);
                }
            }
        }
        assert!(reached.iter().all(|&reached| reached));
    }

    #[test]
    fn members_on_a_loopback_address_are_named_to_such_only() {
        let mut handout = Handout::new(4).unwrap();
        let (here, beside, far) = (member([127, 0, 0, 1], 1), member([127, 0, 0, 1], 2), member([10, 0, 0, 2], 1));
        handout.ask(at(0), &here, &[], 4);
        handout.ask(at(0), &beside, &[], 4);
        assert!(handout.ask(at(0), &far, &[], 4).neighbours.is_empty());
        assert_eq!(handout.ask(at(0), &here, &[], 4).neighbours, [&beside, &far]);
    }
}
