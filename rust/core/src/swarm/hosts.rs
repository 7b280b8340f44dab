//! Hosts: what a member brings to its host, and whom it is told of.
//!
//! A block should come to a host from outside once. So every member of a host has a share of the blocks, which follows from
//! its number there ([`owns`]): from other hosts it fetches its share only, and gets the rest from those beside it. A host is
//! an address that requests come from.

use tensorferry_wire::swarm::{Nearness, Place, Share};

use super::handout::{Handout, Known, MOST_NEIGHBOURS, Member};
use super::picker::mix;

/// So many of the members that are named are on the host of the member that asks, where there are many members.
const ON_HOST: usize = 3;

/// How far `other` is from `member`.
pub(super) fn nearness(member: &Member, other: &Member) -> Nearness {
    if member.ip == other.ip { Nearness::Host } else { Nearness::Far }
}

/// Whether the member at `place` fetches the group of blocks of number `group` from where it is `from` that far.
pub(super) fn owns(place: &Place, from: Nearness, group: u64) -> bool {
    let share = place.host;
    from == Nearness::Host || share.of <= 1 || mix(group) % u64::from(share.of) == u64::from(share.number)
}

impl Handout {
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
            let all = self.members[start..].iter().chain(&self.members[..start]).filter(reaches);
            chosen.extend(all.filter(|known| known.member.ip == asker.ip).take(ON_HOST));
            // Others of other hosts; then any, if there are not enough of them.
            for turn in 0..8 * MOST_NEIGHBOURS as u64 {
                let any = turn >= 4 * MOST_NEIGHBOURS as u64;
                let Some(known) = self.members.get(pick(turn)).filter(reaches) else { continue };
                let fits = any || known.member.ip != asker.ip;
                if fits && !chosen.iter().any(|other| other.number == known.number) {
                    chosen.push(known);
                }
                if chosen.len() == MOST_NEIGHBOURS {
                    break;
                }
            }
        }
        chosen.sort_by_key(|known| nearness(asker, &known.member));
        let place = Place {
            source: if asker.ip.is_loopback() { Nearness::Host } else { Nearness::Far },
            host: self.share(number, asker),
            on_host: chosen.iter().filter(|known| known.member.ip == asker.ip).count(),
        };
        (chosen.into_iter().map(|known| &known.member).collect(), place)
    }

    /// What of the blocks the member of number `number` is to bring to the host of `asker`, which it is.
    fn share(&self, number: u32, asker: &Member) -> Share {
        let mut share = Share { number: 0, of: 0 };
        for known in self.members.iter().filter(|known| known.member.ip == asker.ip) {
            share.number += u32::from(known.number < number);
            share.of += 1;
        }
        share
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;
    use std::time::Duration;

    use tensorferry_wire::swarm::RelayAddress;

    use super::*;

    fn at(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    /// Members with so many on each host, and a tracker that they have asked for nothing.
    fn swarm(members: u8, on_host: u8) -> (Handout, Vec<Member>) {
        let relay = |port| RelayAddress { port, token: "0".repeat(32), fingerprint: None };
        let member = |n: u8| Member { ip: [10, 0, 0, n / on_host].into(), relay: relay(n.into()) };
        let members: Vec<_> = (0..members).map(member).collect();
        let mut handout = Handout::new(64).unwrap();
        for member in &members {
            handout.ask(at(0), member, &[], 4);
        }
        (handout, members)
    }

    #[test]
    fn every_block_is_brought_to_a_host_by_one_member() {
        let (mut handout, members) = swarm(12, 2);
        let place = |handout: &mut Handout, member| handout.ask(at(1), member, &[], 4).place.unwrap();
        let places: Vec<_> = members.iter().map(|member| place(&mut handout, member)).collect();
        for block in 0..64 {
            for host in 0..6 {
                let there = members.iter().zip(&places).filter(|(it, _)| it.ip == IpAddr::from([10, 0, 0, host]));
                assert_eq!(there.filter(|(_, place)| owns(place, Nearness::Far, block)).count(), 1);
            }
            assert!(places.iter().all(|place| owns(place, Nearness::Host, block)));
        }
        handout.forget(&members[0]);
        assert_eq!(place(&mut handout, &members[1]).host, Share::ALL, "the other one is gone");
    }

    #[test]
    fn members_of_the_host_are_named_first_and_some_others_always() {
        let (mut handout, members) = swarm(200, 4);
        for asker in [&members[0], &members[100]] {
            let told = handout.ask(at(1), asker, &[], 4);
            let place = told.place.unwrap();
            let named: Vec<_> = told.neighbours.iter().map(|other| nearness(asker, other)).collect();
            assert!(named.is_sorted() && named.len() == MOST_NEIGHBOURS, "{named:?}");
            assert!((0..named.len()).all(|index| place.nearness(index) == named[index]), "{named:?}");
            assert!((2..6).contains(&place.on_host), "{named:?}");
        }
    }
}
