//! What comes from relays, and what is left to others of the same host.

use std::time::Duration;

use tensorferry_wire::swarm::{Nearness, Place};

use super::Receiver;
use crate::swarm::hosts::owns;

/// A receiver that finds nothing of its share, only what others are to bring to its host, waits for them so long
/// without a byte, and no longer than `MOST_PATIENCE` and half of what it has taken until then: from then on it fetches
/// from anywhere, until it is told of another share.
const PATIENCE_FOR_OTHERS: Duration = Duration::from_secs(1);
const MOST_PATIENCE: Duration = Duration::from_secs(4);

impl Receiver {
    /// Where it is; `None` if it is alone. What others bring, it waits for anew if that has changed. Returns whether it has
    /// been alone until now.
    pub(crate) fn note_place(&mut self, place: Option<Place>) -> bool {
        let are_new = self.place.is_none() && place.is_some();
        let share = |place: Option<Place>| place.map(|place| place.host);
        if share(self.place) != share(place) {
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
        let fetches = fetches(self.place, self.impatient, self.group, from);
        let found = self.picker.pick_allowed(relay, waiting, most, |picker, block| {
            !is_bound || (fetches(block) && !picker.is_offered_nearer(block, from))
        });
        if found.is_some() {
            if from == Nearness::Far && self.place.is_some_and(|place| place.host.of > 1) {
                self.held = None;
            }
        } else if self.picker.pick(relay, waiting, 1).is_some() {
            self.wait_for_others(now);
        }
        found
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

    use super::super::fixtures::{at, begun, set};
    use super::*;

    /// A receiver that shares its host with another one, and relays here and elsewhere.
    fn shared() -> (Receiver, [usize; 2]) {
        let mut receiver = begun();
        let place = Place { source: Nearness::Far, host: Share { number: 0, of: 2 }, on_host: 1 };
        receiver.note_place(Some(place));
        receiver.note_answer(at(0), vec![], at(u64::MAX));
        let relays = [Nearness::Host, Nearness::Far].map(|near| receiver.add_relay_at(near));
        (receiver, relays)
    }

    #[test]
    fn from_elsewhere_comes_its_own_share_of_what_nobody_here_has() {
        let (mut receiver, [here, far]) = shared();
        receiver.learn(far, set(0..64));
        let own: Vec<u64> = (0..64).filter(|&block| owns(&receiver.place.unwrap(), Nearness::Far, block)).collect();
        assert!(own.len() > 16 && own.len() < 48, "{own:?}");
        let fetched = |receiver: &mut Receiver, relay| -> Vec<u64> {
            (0..64).filter(|&b| receiver.next_from_relay(at(1), relay, &[(b, b + 1)], 1).is_some()).collect()
        };
        assert_eq!(fetched(&mut receiver, far), own);
        receiver.learn(here, set(0..32));
        assert_eq!(fetched(&mut receiver, here), (0..32).collect::<Vec<_>>());
        assert!(fetched(&mut receiver, far).iter().all(|&block| block >= 32), "what is here is had from here");
    }

    #[test]
    fn others_are_waited_for_only_so_long() {
        let (mut receiver, [_, far]) = shared();
        receiver.learn(far, set(0..64));
        let theirs = (0..64).find(|&block| !owns(&receiver.place.unwrap(), Nearness::Far, block)).unwrap();
        let waiting = [(theirs, theirs + 1)];
        assert_eq!(receiver.next_from_relay(at(1), far, &waiting, 1), None);
        assert_eq!(receiver.next_from_relay(at(1000), far, &waiting, 1), None);
        receiver.next_from_relay(at(1001), far, &waiting, 1);
        assert_eq!(receiver.next_from_relay(at(1001), far, &waiting, 1), Some((0, waiting[0])), "nothing comes");
        // Where something comes all the time, it waits for longer, but not for ever.
        let (mut receiver, [_, far]) = shared();
        receiver.learn(far, set(0..64));
        let mut now = 1;
        while receiver.next_from_relay(at(now), far, &waiting, 1).is_none() {
            now += 100;
            receiver.note_bytes(at(now), now);
            assert!(now < 10_000, "it waits for ever");
        }
        assert!(now >= 4000, "{now}");
    }
}
