//! How members part: from a source that is wanted back, and from one another.
//!
//! The source can go when every member has the digests of all blocks, and every block that it lacks is offered by relays
//! that it reaches itself: then all of them are at members, and whoever lacks some gets them there. Each member says so
//! of itself, so that the tracker need not know who has what. A member that leaves voids what the others have said, since
//! they may have counted on it.
//!
//! A member that is through while the source goes, or after that, stays for a while ([`Parting`]): others may need what
//! only it has.

use std::time::Duration;

use tensorferry_wire::swarm::Standing;

use super::handout::Known;
use super::{Handout, Member};

/// A member that has asked nothing for so long is not waited for.
const LIVELY: Duration = Duration::from_secs(2);
/// A relay that is asked for nothing for so long is needed no more: who lacks something asks all the time.
const QUIET: Duration = Duration::from_millis(300);
/// A member stays for others no longer than its own receive took, within these bounds.
const LEAST_STAY: Duration = Duration::from_secs(5);
const MOST_STAY: Duration = Duration::from_secs(30);

impl Handout {
    /// Notes how far `member` has come, which has just asked; returns whether it should do without the source from now
    /// on, whose memory may be `wanted_back`.
    pub(crate) fn stand(&mut self, now: Duration, member: &Member, standing: Standing, wanted_back: bool) -> bool {
        let is_ready = standing.has_table && standing.is_covered;
        let Some(known) = self.members.iter_mut().find(|known| known.member == *member) else { return false };
        known.ready = is_ready;
        let lively = |asked: Duration| now.saturating_sub(asked) < LIVELY;
        self.freed |= wanted_back && self.members.iter().filter(|known| lively(known.asked)).all(|known| known.ready);
        self.freed && is_ready
    }

    /// Notes that `member` has everything, and would leave; returns whether it should stay for others, since the source
    /// is to go or is gone.
    pub(crate) fn leave(&mut self, now: Duration, member: &Member, wanted_back: bool) -> bool {
        if wanted_back {
            let standing = Standing { has_table: true, is_covered: true, leaves: true };
            self.stand(now, member, standing, true);
            self.members.iter_mut().filter(|known| known.member == *member).for_each(|known| known.stays = true);
            return true;
        }
        self.forget(member);
        false
    }

    /// Notes that `member` has ended the connection by which it asked. One that was told to do without the source has
    /// done so, and still relays; any other one has gone.
    pub(crate) fn note_gone(&mut self, member: &Member) {
        let remains = |known: &Known| known.member == *member && (known.stays || (self.freed && known.ready));
        if !self.members.iter().any(remains) {
            self.forget(member);
        }
    }

    /// Forgets `member`, and what the others have said, since they may have counted on it.
    fn forget(&mut self, member: &Member) {
        let before = self.members.len();
        self.members.retain(|known| known.member != *member);
        // Nobody counts on a stranger.
        if self.members.len() < before {
            self.members.iter_mut().for_each(|known| known.ready = false);
        }
    }
}

/// How long a member that is through stays for the others. Times count from when it was through.
#[derive(Debug)]
pub(crate) struct Parting {
    most: Duration,
    /// The questions so far, and when the last of them came.
    questions: u64,
    asked: Duration,
}

impl Parting {
    /// For a member whose receive `took` so long.
    pub(crate) fn new(took: Duration, questions: u64) -> Self {
        Self { most: took.clamp(LEAST_STAY, MOST_STAY), questions, asked: Duration::ZERO }
    }

    /// Whether it stays: of `questions` so far some are new, or `busy` with answers, or that was so a moment ago.
    pub(crate) fn stays(&mut self, now: Duration, questions: u64, busy: bool) -> bool {
        if busy || questions != self.questions {
            (self.questions, self.asked) = (questions, now);
        }
        now < self.most && now.saturating_sub(self.asked) < QUIET
    }
}

#[cfg(test)]
mod tests {
    use tensorferry_wire::swarm::RelayAddress;

    use super::*;

    const READY: Standing = Standing { has_table: true, is_covered: true, leaves: false };

    fn at(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    fn swarm(members: u16) -> (Handout, Vec<Member>) {
        let mut handout = Handout::new(8).unwrap();
        let relay = |port| RelayAddress { port, token: "0".repeat(32), fingerprint: None };
        let members: Vec<_> = (0..members).map(|n| Member { ip: [10, 0, 0, 1].into(), relay: relay(n) }).collect();
        for member in &members {
            handout.ask(at(0), member, &[(0, 8)], 1);
        }
        (handout, members)
    }

    #[test]
    fn the_source_goes_when_every_member_can_do_without_it_and_its_memory_is_wanted() {
        let (mut handout, members) = swarm(3);
        for member in &members {
            assert!(!handout.stand(at(1), member, READY, false), "nobody wants it back");
        }
        for short in [Standing { has_table: false, ..READY }, Standing { is_covered: false, ..READY }] {
            assert!(!handout.stand(at(2), &members[1], short, true));
            assert!(!handout.stand(at(2), &members[0], READY, true), "another one needs the source");
        }
        assert!(handout.stand(at(3), &members[1], READY, true));
        assert!(handout.stand(at(3), &members[0], READY, true));
        // From then on it is so, and who says that it needs the source is not sent away.
        assert!(!handout.stand(at(4), &members[2], Standing { is_covered: false, ..READY }, true));
        assert!(handout.stand(at(4), &members[0], READY, true));
        let stranger = Member { ip: [10, 0, 0, 9].into(), ..members[0].clone() };
        assert!(!handout.stand(at(5), &stranger, READY, true));
    }

    #[test]
    fn a_member_that_is_silent_holds_nobody_up() {
        let (mut handout, members) = swarm(2);
        handout.ask(at(1999), &members[0], &[], 1);
        assert!(!handout.stand(at(1999), &members[0], READY, true));
        assert!(handout.stand(at(2000), &members[0], READY, true));
    }

    #[test]
    fn what_a_member_takes_along_voids_what_others_have_said() {
        let (mut handout, members) = swarm(3);
        assert!(!handout.stand(at(1), &members[0], READY, false));
        assert!(!handout.leave(at(1), &members[1], false), "the source stays");
        assert_eq!(handout.members(), 2);
        assert!(!handout.stand(at(1), &members[2], READY, true), "the first one may have counted on who left");
        assert!(handout.stand(at(1), &members[0], READY, true));
    }

    #[test]
    fn a_stranger_that_leaves_voids_nothing() {
        let (mut handout, members) = swarm(2);
        assert!(!handout.stand(at(1), &members[0], READY, false));
        let stranger = Member { ip: [10, 0, 0, 9].into(), ..members[0].clone() };
        assert!(!handout.leave(at(1), &stranger, false));
        assert!(handout.stand(at(1), &members[1], READY, true));
    }

    #[test]
    fn a_member_whose_connection_ends_has_gone_unless_it_was_let_go() {
        let (mut handout, members) = swarm(4);
        assert!(!handout.stand(at(1), &members[0], READY, false));
        handout.note_gone(&members[1]);
        assert_eq!(handout.members(), 3);
        assert!(!handout.stand(at(1), &members[2], READY, true), "the first one may have counted on who has gone");
        assert!(handout.leave(at(1), &members[3], true));
        handout.note_gone(&members[3]);
        assert_eq!(handout.members(), 3, "it stays for the others");
        assert!(handout.stand(at(1), &members[0], READY, true));
        handout.note_gone(&members[0]);
        assert!(handout.stand(at(2), &members[2], READY, true), "who was let go still relays");
    }

    #[test]
    fn who_is_through_stays_when_the_source_goes() {
        let (mut handout, members) = swarm(2);
        assert!(handout.leave(at(1), &members[1], true));
        assert!(handout.stand(at(1), &members[0], READY, true), "and others may count on it");
        assert!(handout.leave(at(2), &members[0], true));
    }

    #[test]
    fn what_was_handed_to_a_member_that_leaves_is_handed_out_again_at_once() {
        let (mut handout, members) = swarm(3);
        assert!(handout.ask(at(1), &members[1], &[(0, 1)], 1).grant.is_empty(), "the first one has it");
        handout.leave(at(1), &members[0], false);
        assert_eq!(handout.ask(at(2), &members[1], &[(0, 1)], 1).grant, [(0, 1)]);
    }

    #[test]
    fn a_member_stays_while_it_is_asked_within_bounds() {
        let mut parting = Parting::new(at(5000), 7);
        assert!(parting.stays(at(299), 7, false));
        assert!(!parting.stays(at(300), 7, false));
        let mut parting = Parting::new(at(5000), 7);
        assert!(parting.stays(at(250), 8, false) && parting.stays(at(549), 8, false));
        assert!(parting.stays(at(549), 8, true) && parting.stays(at(848), 8, false));
        assert!(!parting.stays(at(849), 8, false));
        for (took, bound) in [(at(10), LEAST_STAY), (at(7000), at(7000)), (at(90_000), MOST_STAY)] {
            let mut parting = Parting::new(took, 7);
            assert!(parting.stays(bound.saturating_sub(at(1)), 8, true));
            assert!(!parting.stays(bound, 9, true));
        }
    }
}
