//! Zones and hosts: what a member brings to where it is, and whom it is told of.
//!
//! A block should come to a zone from outside once, and to a host once. So every member of a zone, and of a host, has a
//! share of the blocks, which follows from its number there ([`owns`]). From afar it fetches its share only, and gets the
//! rest from those near it. While members in the zone of the source are being served, the others give way to them, and
//! fetch their shares from them.
//!
//! A zone is what members say, a host is an address that requests come from. A member that lies about its zone takes a
//! share that it does not bring: the patience of [`super::Receiver`] bounds what that costs.

use std::time::Duration;

use tensorferry_wire::swarm::{Nearness, Place, Share};

use super::given::HOLD;
use super::handout::{Handout, Known, MOST_NEIGHBOURS, Member};
use super::picker::mix;

/// A member outside the zone of the source gives way to those in it only while they have been granted something in this
/// time, and of blocks only while they were handed out no longer ago.
pub(super) const GIVES_WAY: Duration = HOLD.saturating_mul(2);
/// So many of the members that are named are on the host of the member that asks, where there are many members, and so
/// many in other zones.
const ON_HOST: usize = 3;
const ELSEWHERE: usize = 4;
/// Hosts and zones share out the blocks differently.
const OF_HOST: u64 = 1 << 62;
const OF_ZONE: u64 = 1 << 63;

/// How far two zones are from one another. One that is not known is not far.
fn between(one: Option<&str>, other: Option<&str>) -> Nearness {
    if one.is_some() && other.is_some() && one != other { Nearness::Far } else { Nearness::Zone }
}

/// How far `other` is from `member`.
pub(super) fn nearness(member: &Member, other: &Member) -> Nearness {
    if member.ip == other.ip { Nearness::Host } else { between(member.zone.as_deref(), other.zone.as_deref()) }
}

/// Whether the member at `place` fetches the group of blocks of number `group` from where it is `from` that far.
pub(super) fn owns(place: &Place, from: Nearness, group: u64) -> bool {
    let (share, salt) = match from {
        Nearness::Host => return true,
        Nearness::Zone => (place.host, OF_HOST),
        Nearness::Far => (place.zone, OF_ZONE),
    };
    share.of <= 1 || mix(group ^ salt) % u64::from(share.of) == u64::from(share.number)
}

impl Handout {
    /// Notes the zone of the source.
    pub(crate) fn in_zone(mut self, zone: Option<&str>) -> Self {
        self.zone = zone.map(str::to_owned);
        self
    }

    /// Whether the member of number `number` is not in the zone of the source.
    pub(super) fn is_far(&self, number: u32) -> bool {
        let known = self.members.binary_search_by_key(&number, |known| known.number).ok();
        known.is_some_and(|index| {
            between(self.zone.as_deref(), self.members[index].member.zone.as_deref()) == Nearness::Far
        })
    }

    /// Whether there are members outside the zone of the source.
    pub(super) fn has_far_members(&self) -> bool {
        let is_far = |known: &Known| between(self.zone.as_deref(), known.member.zone.as_deref()) == Nearness::Far;
        self.members.iter().any(is_far)
    }

    /// Whether the member of number `number` is to fetch from members in the zone of the source, which are granted blocks
    /// before it.
    pub(super) fn gives_way(&self, now: Duration, number: u32) -> bool {
        let goes_first = |known: &Known| {
            known.served.is_some_and(|at| now.saturating_sub(at) < GIVES_WAY)
                && !known.stays
                && !self.is_far(known.number)
        };
        self.is_far(number) && self.members.iter().any(goes_first)
    }

    /// Members for `asker` to fetch from, the nearest first, and where it is among them: all where there are few, else
    /// some, and others each time, since those that were named before may have left.
    pub(super) fn neighbours(&self, number: u32, asker: &Member) -> (Vec<&Member>, Place) {
        let reaches =
            |known: &&Known| known.number != number && (!known.member.ip.is_loopback() || asker.ip.is_loopback());
        let mut chosen: Vec<&Known> = Vec::with_capacity(MOST_NEIGHBOURS);
        if self.members.len() <= MOST_NEIGHBOURS + 1 {
            chosen.extend(self.members.iter().filter(reaches));
        } else {
            let pick = |turn: u64| {
                let index = mix(mix(self.asked) ^ turn) % self.members.len() as u64;
                usize::try_from(index).unwrap_or(0)
            };
            let start = pick(u64::MAX);
            for (at, most) in [(Nearness::Host, ON_HOST), (Nearness::Far, ELSEWHERE)] {
                let all = self.members[start..].iter().chain(&self.members[..start]).filter(reaches);
                chosen.extend(all.filter(|known| nearness(asker, &known.member) == at).take(most));
            }
            // Others of the zone; then any, if it has not enough of them.
            for turn in 0..8 * MOST_NEIGHBOURS as u64 {
                let any = turn >= 4 * MOST_NEIGHBOURS as u64;
                let Some(known) = self.members.get(pick(turn)).filter(reaches) else { continue };
                let fits = any || nearness(asker, &known.member) == Nearness::Zone;
                if fits && !chosen.iter().any(|other| other.number == known.number) {
                    chosen.push(known);
                }
                if chosen.len() == MOST_NEIGHBOURS {
                    break;
                }
            }
        }
        chosen.sort_by_key(|known| nearness(asker, &known.member));
        let count = |near| chosen.iter().filter(|known| nearness(asker, &known.member) == near).count();
        let place = Place {
            source: if asker.ip.is_loopback() {
                Nearness::Host
            } else {
                between(self.zone.as_deref(), asker.zone.as_deref())
            },
            host: self.share(number, |member| member.ip == asker.ip),
            zone: self.share(number, |member| member.zone == asker.zone),
            on_host: count(Nearness::Host),
            in_zone: count(Nearness::Zone),
        };
        (chosen.into_iter().map(|known| &known.member).collect(), place)
    }

    /// What of the blocks the member of number `number` is to bring to those members that `are_there`.
    fn share(&self, number: u32, are_there: impl Fn(&Member) -> bool) -> Share {
        let mut share = Share { number: 0, of: 0 };
        for known in self.members.iter().filter(|known| !known.stays && are_there(&known.member)) {
            share.number += u32::from(known.number < number);
            share.of += 1;
        }
        // One that stays brings nothing more.
        if share.number < share.of { share } else { Share::ALL }
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use tensorferry_wire::swarm::RelayAddress;

    use super::*;

    fn member(host: u8, port: u16, zone: &str) -> Member {
        let relay = RelayAddress { port, token: "0".repeat(32), fingerprint: None };
        Member { ip: [10, 0, 0, host].into(), relay, zone: Some(zone.to_owned()).filter(|zone| !zone.is_empty()) }
    }

    fn at(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    /// A source in zone `a`, and `members`, which have asked for nothing.
    fn swarm(members: &[Member]) -> Handout {
        let mut handout = Handout::new(64).unwrap().in_zone(Some("a"));
        for member in members {
            handout.ask(at(0), member, &[], 4);
        }
        handout
    }

    fn place(handout: &mut Handout, member: &Member) -> Place {
        handout.ask(at(1), member, &[], 4).place.unwrap()
    }

    #[test]
    fn every_block_is_brought_to_a_zone_and_to_a_host_by_one_member() {
        let members: Vec<_> = (0..12).map(|n| member(n / 2, n.into(), ["a", "b"][usize::from(n / 2 % 2)])).collect();
        let mut handout = swarm(&members);
        let places: Vec<_> = members.iter().map(|member| place(&mut handout, member)).collect();
        for (one, other) in [(0, Nearness::Zone), (1, Nearness::Far)] {
            assert_eq!(places[2 * one].source, other);
        }
        for block in 0..64 {
            let bring = |from, are_there: &dyn Fn(&Member) -> bool| {
                let there = members.iter().zip(&places).filter(|(member, _)| are_there(member));
                there.filter(|(_, place)| owns(place, from, block)).count()
            };
            for zone in ["a", "b"] {
                assert_eq!(bring(Nearness::Far, &|member| member.zone.as_deref() == Some(zone)), 1);
            }
            for host in 0..6 {
                assert_eq!(bring(Nearness::Zone, &|member| member.ip == IpAddr::from([10, 0, 0, host])), 1);
            }
            assert_eq!(bring(Nearness::Host, &|_| true), 12);
        }
        handout.leave(at(1), &members[0], false);
        assert_eq!(place(&mut handout, &members[1]).host, Share::ALL, "the other one is gone");
    }

    #[test]
    fn near_members_are_named_first_and_some_others_always() {
        let members: Vec<_> = (0..200).map(|n| member(n / 4, n.into(), if n < 20 { "b" } else { "a" })).collect();
        let mut handout = swarm(&members);
        for asker in [&members[0], &members[100]] {
            let told = handout.ask(at(1), asker, &[], 4);
            let place = told.place.unwrap();
            let named: Vec<_> = told.neighbours.iter().map(|other| nearness(asker, other)).collect();
            assert!(named.is_sorted() && named.len() == MOST_NEIGHBOURS, "{named:?}");
            assert!((0..named.len()).all(|index| place.nearness(index) == named[index]), "{named:?}");
            assert!(named.iter().filter(|&&near| near == Nearness::Far).count() >= 2, "{named:?}");
            assert!(place.on_host >= 2 && place.in_zone >= 2, "{named:?}");
        }
    }

    #[test]
    fn a_member_of_another_zone_gives_way_while_those_of_the_source_are_served() {
        let (near, far) = (member(1, 1, "a"), member(2, 1, "b"));
        let mut handout = swarm(&[near.clone(), far.clone()]);
        assert_eq!(handout.ask(at(1), &near, &[(0, 64)], 4).grant, [(0, 4)]);
        assert!(handout.ask(at(2), &far, &[(0, 64)], 4).grant.is_empty());
        // What one in the zone was granted long ago, it does not pass on.
        assert_eq!(handout.ask(at(4000), &near, &[(4, 64)], 4).grant, [(4, 8)]);
        assert_eq!(handout.ask(at(4002), &far, &[(0, 64)], 2).grant, [(0, 2)]);
        assert!(handout.ask(at(4003), &far, &[(2, 64)], 64).grant.iter().all(|run| run.1 <= 4));
        // Nobody goes first who is granted nothing.
        assert_eq!(handout.ask(at(9000), &far, &[(20, 64)], 2).grant, [(20, 22)]);
        // What went to the other zone does not come back from there.
        assert_eq!(handout.ask(at(9001), &near, &[(20, 22)], 2).grant, [(20, 22)]);
    }

    #[test]
    fn one_whose_zone_is_not_known_is_not_far() {
        let (near, stranger) = (member(1, 1, "a"), member(2, 1, ""));
        let mut handout = swarm(&[near.clone(), stranger.clone()]);
        assert_eq!(place(&mut handout, &stranger).source, Nearness::Zone);
        assert_eq!(handout.ask(at(1), &near, &[(0, 64)], 4).grant, [(0, 4)]);
        assert_eq!(handout.ask(at(1), &stranger, &[(0, 64)], 4).grant, [(4, 8)]);
    }

    #[test]
    fn members_without_zones_and_on_hosts_of_their_own_bring_everything() {
        let members: Vec<_> = (0..9).map(|n| member(n, 1, "")).collect();
        let mut handout = swarm(&members);
        let place = place(&mut handout, &members[3]);
        assert_eq!((place.source, place.host, place.on_host, place.in_zone), (Nearness::Zone, Share::ALL, 0, 8));
    }
}
