//! What lanes to the source do, step by step.

use tensorferry_wire::swarm::{Nearness, Place, Share};

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
    receiver.note_source_done(at(0), 2);
    receiver.note_source_done(at(0), 4);
    let relay = receiver.add_relay();
    receiver.learn(relay, set(0..42));
    let left = [(40, 44), (0, 2), (6, 8)];
    assert_eq!(receiver.next_from_source(at(6), &left), FromSource::Ask(vec![(42, 44)]));
    receiver.note_answer(at(6), vec![], at(100));
    assert!(matches!(receiver.next_from_source(at(105), &left), FromSource::Wait(_)));
    assert_eq!(receiver.next_from_source(at(106), &left), FromSource::Ask(vec![(42, 44)]));
}

#[test]
fn beside_relays_few_lanes_fetch_from_the_source() {
    let mut receiver = begun();
    let waiting: Vec<_> = (0..9).map(|block| (block, block + 1)).collect();
    let takes = |receiver: &mut Receiver| matches!(receiver.next_from_source(at(0), &waiting), FromSource::Take(..));
    receiver.note_answer(at(0), vec![(0, 9)], at(1));
    assert!(takes(&mut receiver) && takes(&mut receiver) && takes(&mut receiver));
    receiver.add_relay();
    assert!(!takes(&mut receiver));
    receiver.note_source_done(at(0), 0);
    assert!(!takes(&mut receiver));
    receiver.note_source_done(at(0), 1);
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
    receiver.place = Some(Place { source: Nearness::Far, host: Share::ALL, on_host: 0 });
    assert_eq!(
        (receiver.next_question(at(99), &waiting), receiver.next_question(at(100), &waiting)),
        (None, Some(vec![]))
    );
    receiver.asking = false;
    assert_eq!(receiver.coming(), [(0, 1), (1, 2)]);
    assert!(matches!(receiver.next_from_source(at(99), &waiting), FromSource::Wait(_)));
    assert_eq!(receiver.next_from_source(at(100), &waiting), FromSource::Ask(vec![]));
    receiver.note_answer(at(110), vec![], at(1000));
    receiver.note_source_done(at(120), 1);
    assert_eq!(receiver.coming(), [(0, 1)]);
    assert!(matches!(receiver.next_from_source(at(120), &waiting), FromSource::Ask(need) if !need.is_empty()));
}

#[test]
fn what_comes_ends_with_its_range_wherever_that_was_cut() {
    let mut receiver = begun();
    receiver.note_answer(at(0), vec![(0, 4), (8, 12)], at(1));
    let waiting = [(0, 4), (8, 12)];
    assert!(matches!(receiver.next_from_source(at(0), &waiting), FromSource::Take(0, (0, 4))));
    assert!(matches!(receiver.next_from_source(at(0), &waiting[1..]), FromSource::Take(0, (8, 12))));
    receiver.note_source_begun((0, 2));
    assert_eq!(receiver.coming(), [(0, 2), (8, 12)]);
    receiver.note_source_done(at(100), 0);
    assert_eq!((receiver.coming(), receiver.block_took), (vec![(8, 12)], at(50)));
    receiver.note_source_done(at(200), 8);
    assert_eq!((receiver.coming(), receiver.block_took), (vec![], at(50)));
}

#[test]
fn where_blocks_come_soon_the_next_ones_are_asked_for_meanwhile() {
    for (took, asks) in [(250, true), (251, false)] {
        let mut receiver = begun();
        receiver.note_answer(at(0), vec![(0, 3)], at(1));
        receiver.add_relay();
        let waiting: Vec<_> = (0..9).map(|block| (block, block + 1)).collect();
        assert!(matches!(receiver.next_from_source(at(0), &waiting), FromSource::Take(_, (0, 1))));
        receiver.note_source_done(at(took), 0);
        receiver.heartbeat = at(10_000);
        for _ in 0..2 {
            assert!(matches!(receiver.next_from_source(at(took), &waiting[1..]), FromSource::Take(..)));
        }
        let next = receiver.next_from_source(at(took), &waiting[3..]);
        assert_eq!(matches!(next, FromSource::Ask(need) if need == [(3, 9)]), asks, "{took}");
    }
}

#[test]
fn bytes_that_drip_feed_nobody() {
    let mut receiver = Receiver { least: 1 << 20, ..begun() };
    receiver.note_answer(at(0), vec![], at(u64::MAX));
    receiver.add_relay();
    let next = |receiver: &mut Receiver, millis: u64, a_second: u64| {
        receiver.note_bytes(at(millis), (1 << 40) + millis * a_second / 1000);
        receiver.next_from_source(at(millis), &[(3, 5)])
    };
    receiver.fed_bytes = 1 << 40;
    let until =
        (0..60_000).step_by(50).find(|&millis| matches!(next(&mut receiver, millis, 12 << 10), FromSource::Take(..)));
    assert_eq!(until, Some(5000));
    // Of a source that brings no more any longer, that is enough before long.
    let after = (5050..60_000).step_by(50);
    let takes = after.filter(|&millis| matches!(next(&mut receiver, millis, 256 << 10), FromSource::Take(..)));
    let last = takes.last().unwrap();
    assert!(last < 20_000, "{last}");
    // Where the source is gone, nothing better can be had.
    receiver.note_free();
    receiver.least = 1 << 20;
    let mut after = (60_000..90_000).step_by(50);
    assert!(after.all(|millis| matches!(next(&mut receiver, millis, 256 << 10), FromSource::Wait(_))));
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

#[test]
fn a_tracker_is_asked_with_pauses_whatever_it_says() {
    // Nothing at all, what is here already, and to wait for ages.
    for (grant, wait, questions) in [(vec![], 0, 20..210), (vec![(0, 3)], 0, 20..210), (vec![], u64::MAX, 0..9)] {
        let mut receiver = begun();
        receiver.note_answer(at(0), grant.clone(), at(wait));
        receiver.add_relay();
        let mut asked = 0;
        for millis in 1..1000 {
            if let FromSource::Ask(_) = receiver.next_from_source(at(millis), &[(3, 64)]) {
                asked += 1;
                receiver.note_answer(at(millis), grant.clone(), at(wait));
            }
        }
        assert!(questions.contains(&asked), "{asked}");
    }
}
