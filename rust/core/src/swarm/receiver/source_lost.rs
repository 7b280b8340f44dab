//! What a receiver does when the source or its tracker is gone.

use std::time::Duration;

use super::from_source::HEARTBEAT;
use super::joining::Phase;
use super::{Receiver, Rule};

/// Questions to the tracker without an answer after which the source counts as gone.
const MOST_UNANSWERED: u32 = 2;

impl Receiver {
    /// The digests of all blocks are here.
    pub(crate) fn note_table(&mut self) {
        self.has_table = true;
    }

    /// The source is left alone from now on.
    pub(super) fn note_free(&mut self) {
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

    /// The tracker does not answer, or nothing that makes sense. Without the digests, or without relays, the source
    /// must be there, and is asked for everything; with them, it may be gone, and counts as that after
    /// [`MOST_UNANSWERED`] times.
    pub(crate) fn note_no_tracker(&mut self, now: Duration) {
        (self.phase, self.asking) = (Phase::Member, false);
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

#[cfg(test)]
mod tests {
    use super::super::FromSource;
    use super::super::fixtures::{at, begun, set};
    use super::*;

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
    fn what_no_relay_has_is_not_waited_for_without_the_source() {
        let (mut receiver, relay) = independent();
        receiver.learn(relay, set(4..64));
        assert!(receiver.note_source_lost(at(0)));
        let both = [(0, 4), (8, 9)];
        assert!(matches!(receiver.next_from_source(at(499), &both), FromSource::Wait(_)));
        assert!(matches!(receiver.next_from_source(at(9999), &both), FromSource::Wait(_)), "a relay may bring some");
        receiver.note_bytes(at(9999), 1);
        assert!(matches!(receiver.next_from_source(at(10_498), &both[..1]), FromSource::Wait(_)));
        assert_eq!(receiver.next_from_source(at(10_499), &both[..1]), FromSource::Take(0, (0, 1)));
        assert!(!receiver.note_source_lost(at(10_499)));
        receiver.learn(relay, set(0..64));
        assert!(
            matches!(receiver.next_from_source(at(10_500), &both), FromSource::Wait(_)),
            "another member has it now"
        );
        assert!(receiver.note_source_lost(at(10_500)));
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
}
