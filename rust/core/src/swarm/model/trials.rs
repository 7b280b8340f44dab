//! What the simulator says.

use super::{COPY, Link, Outcome, World, simulate, simulate_in};

#[test]
fn eight_equal_receivers_end_when_little_more_than_one_copy_has_left_the_source() {
    let outcome = simulate(&[Link::FAIR; 8], 256);
    println!("{outcome:?}");
    assert!(outcome.longest() < 1.2 && outcome.sent < 1.1, "{outcome:?}");
}

#[test]
fn a_receiver_alone_takes_one_copy() {
    let outcome = simulate(&[Link::FAIR], 256);
    assert!(outcome.longest() < 1.02 && outcome.asked <= 64, "{outcome:?}");
}

/// The copies that the first blocks of so many receivers are, but for the first of them.
fn openings(receivers: usize, blocks: usize) -> f64 {
    (receivers - 1) as f64 / blocks as f64
}

/// Eight members, of which two are slower by a factor of ten, or are killed at half.
fn troubled(trouble: &str) -> [Link; 8] {
    let mut links = [Link::FAIR; 8];
    for link in &mut links[3..5] {
        match trouble {
            "slow" => (link.up, link.down) = (0.1, 0.1),
            _ => link.dies = 0.5,
        }
    }
    links
}

/// Copies until the last of those members has ended that are not slow.
fn last_fast(outcome: &Outcome, links: &[Link]) -> f64 {
    let fast = outcome.took.iter().zip(links).filter(|(_, link)| link.down >= 1.0).filter_map(|(took, _)| *took);
    fast.fold(0.0, f64::max)
}

/// Copies until the last of those members has ended that are not slow, and copies that left the source: medians of
/// several runs.
fn typical(mbit: u64, blocks: u64, links: &[Link]) -> (f64, f64) {
    let run = |seed| {
        let outcome = simulate_in(&World { seed, ..World::shaped(blocks, mbit) }, links, blocks);
        (last_fast(&outcome, links), outcome.sent)
    };
    let (mut last, mut sent): (Vec<_>, Vec<_>) = (0..9).map(run).unzip();
    last.sort_by(f64::total_cmp);
    sent.sort_by(f64::total_cmp);
    (last[4], sent[4])
}

#[test]
#[ignore = "prints a table"]
fn on_equal_links() {
    let say = |name: &str, links: &[Link], blocks| {
        let outcome = simulate(links, blocks);
        println!("{name}, {blocks} blocks: last {:.2}, sent {:.2}", last_fast(&outcome, links), outcome.sent);
    };
    for (members, blocks) in [(2, 256), (8, 256), (8, 128), (8, 64), (16, 256), (128, 256)] {
        say(&format!("{members} receivers"), &vec![Link::FAIR; members], blocks);
    }
    say("8, two killed at half", &troubled("dying"), 256);
    let apart: Vec<_> = (0..8).map(|i| Link { start: 0.3 * f64::from(i), ..Link::FAIR }).collect();
    say("8, 0.3 copies apart", &apart, 256);
    say("8 that cannot reach one another", &[Link { reachable: false, ..Link::FAIR }; 8], 256);
    let slow = |index| if index < 5 { Link::FAIR } else { Link { up: 0.1, down: 0.1, ..Link::FAIR } };
    say("8, three of them ten times slower", &std::array::from_fn::<_, 8, _>(slow), 256);
}

/// `benches/fleet_model.py` reads the lines.
#[test]
#[ignore = "prints what `SWARM_MODEL=MBIT,BLOCKS,MEMBERS...` asks for"]
fn what_the_bench_measures() {
    let asked = std::env::var("SWARM_MODEL").unwrap_or_else(|_| "50,64,2,4,8".to_owned());
    let numbers: Vec<u64> = asked.split(',').map(|number| number.parse().unwrap()).collect();
    let [mbit, blocks, members @ ..] = &numbers[..] else { panic!("{asked}") };
    for &members in members {
        let (last, sent) = typical(*mbit, *blocks, &vec![Link::FAIR; usize::try_from(members).unwrap()]);
        println!("model {members} {last:.3} {sent:.3}");
    }
}

#[test]
fn of_few_blocks_on_slow_links_few_leave_the_source_twice() {
    let (last, sent) = typical(50, 64, &[Link::FAIR; 8]);
    assert!(last < 1.7 && sent < 1.25 + openings(8, 64), "last {last:.2}, sent {sent:.2}");
}

#[test]
fn nobody_takes_longer_for_starting_later() {
    let links: Vec<_> = (0..8).map(|i| Link { start: 0.3 * f64::from(i), ..Link::FAIR }).collect();
    let outcome = simulate(&links, 256);
    println!("{outcome:?}");
    assert!(outcome.longest() < 1.5, "{outcome:?}");
}

#[test]
fn a_second_receiver_is_no_later_than_with_the_source_alone() {
    for start in [0.0, 0.001, 0.1, 0.5, 0.9, 0.999, 1.001, 1.2] {
        let links = [Link::FAIR, Link { start, ..Link::FAIR }];
        let outcome = simulate(&links, 256);
        println!("{start}: {outcome:?}");
        // What they take that share the source's link, and one that has it for itself.
        let [first, second] = if start < 1.0 { [2.0 - start; 2] } else { [1.0; 2] };
        let took = |number: usize| outcome.took[number].unwrap();
        assert!(took(0) < first.max(1.0) + 0.03 && took(1) < second.max(1.0) + 0.03, "{start}: {outcome:?}");
        assert!(outcome.sent < (1.05 + start).min(2.01), "{start}: {outcome:?}");
    }
}

#[test]
fn slow_and_dying_members_hold_up_nobody_else() {
    let mut links = [Link::FAIR; 8];
    (links[1].dies, links[4].dies) = (0.5, 0.5);
    let outcome = simulate(&links, 256);
    println!("{outcome:?}");
    assert!(outcome.longest() < 1.2 && outcome.sent < 1.2, "{outcome:?}");

    let mut links = [Link::FAIR; 8];
    for slow in &mut links[5..] {
        (slow.up, slow.down) = (0.1, 0.1);
    }
    let outcome = simulate(&links, 256);
    println!("{outcome:?}");
    let fast = outcome.took[..5].iter().flatten().copied().fold(0.0, f64::max);
    assert!(fast < 1.6 && outcome.longest() < 12.0, "{outcome:?}");
}

#[test]
fn members_that_cannot_reach_one_another_take_what_they_took_without_a_swarm() {
    let outcome = simulate(&[Link { reachable: false, ..Link::FAIR }; 8], 256);
    println!("{outcome:?}");
    assert!(outcome.longest() < 8.5, "{outcome:?}");
}

#[test]
fn the_work_of_the_tracker_does_not_grow_with_the_square_of_the_members() {
    let run = |members| {
        let outcome = simulate(&vec![Link::FAIR; members], 256);
        println!("{members}: longest {:.2}, sent {:.2}, asked {}", outcome.longest(), outcome.sent, outcome.asked);
        outcome
    };
    for outcome in [run(16), run(128)] {
        let seconds = COPY.as_secs_f64() * outcome.longest();
        assert!((outcome.asked as f64) < 700.0 * seconds, "{outcome:?}");
        let most = 2.5 + openings(outcome.took.len(), 256);
        assert!(outcome.longest() < 3.0 && outcome.sent < most, "{outcome:?}");
    }
}

#[test]
#[ignore = "takes a minute"]
fn a_thousand_members() {
    let outcome = simulate(&vec![Link::FAIR; 1000], 512);
    println!("longest {:.2}, sent {:.2}, asked {}", outcome.longest(), outcome.sent, outcome.asked);
    // Two copies are the first blocks of all of them, and two more what they begin with, unasked.
    assert!(outcome.longest() < 8.0 && outcome.sent < 4.5, "{outcome:?}");
}

#[test]
fn little_more_than_one_copy_comes_to_a_host() {
    let links: Vec<_> = (0..8).map(|index| Link { host: Some(index / 2), ..Link::FAIR }).collect();
    let outcome = simulate(&links, 256);
    println!("longest {:.2}, sent {:.2}, to a host {:.2}", outcome.longest(), outcome.sent, outcome.to_host);
    assert!(outcome.to_host < 1.3 && outcome.sent < 1.3 && outcome.longest() < 1.6, "{outcome:?}");
}
