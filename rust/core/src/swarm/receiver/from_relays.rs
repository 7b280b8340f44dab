//! What comes from relays, and what is left to others of the same host or zone.

use std::time::Duration;

use tensorferry_wire::swarm::{Nearness, Place};

use super::{Receiver, Rule};
use crate::swarm::zones::owns;

/// A receiver that finds nothing of its share, only what others are to bring to its host or zone, waits for them so long
/// without a byte, and no longer than `MOST_PATIENCE` and half of what it has taken until then: from then on it fetches
/// from anywhere, until it is told of another share.
const PATIENCE_FOR_OTHERS: Duration = Duration::from_secs(1);
const MOST_PATIENCE: Duration = Duration::from_secs(4);

impl Receiver {
    /// Where it is; `None` if it is alone. What others bring, it waits for anew if that has changed. Returns whether it has
    /// been alone until now.
    pub(crate) fn note_place(&mut self, place: Option<Place>) -> bool {
        let are_new = self.place.is_none() && place.is_some();
        let shares = |place: Option<Place>| place.map(|place| (place.host, place.zone));
        if shares(self.place) != shares(place) {
            (self.held, self.impatient) = (None, false);
        }
        self.place = place;
        are_new
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

    pub(super) fn is_near_source(&self) -> bool {
        self.place.is_some_and(|place| place.source < Nearness::Far)
    }

    /// Notes that there is nothing to fetch but what others are to bring.
    pub(super) fn wait_for_others(&mut self, now: Duration) {
        let since = *self.held.get_or_insert(now);
        let idle = now.saturating_sub(since.max(self.came)) >= PATIENCE_FOR_OTHERS;
        self.impatient |= idle || now.saturating_sub(since) >= MOST_PATIENCE + since / 2;
    }
}

/// Which blocks a receiver at `place` fetches from where it is `from` that far, and does not leave to others near it.
pub(super) fn fetches(place: Option<Place>, impatient: bool, group: u64, from: Nearness) -> impl Fn(u64) -> bool {
    let place = place.filter(|_| !impatient);
    move |block| place.is_none_or(|place| owns(&place, from, block / group))
}

#[cfg(test)]
mod tests {
    use tensorferry_wire::swarm::Share;

    use super::super::FromSource;
    use super::super::fixtures::{at, begun, set};
    use super::*;

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
        assert_eq!(receiver.next_from_source(at(6), &[(0, 4)]), FromSource::Ask(vec![(0, 4)]));
        receiver.note_free();
        assert_eq!(receiver.next_from_relay(at(7), far, &[(0, 4)], 4), Some((0, (0, 4))));
    }
}
