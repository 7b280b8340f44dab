//! A simulator: members with links of their own rates run the code of this room against one another.
//!
//! Bytes flow like water: a link's rate is shared evenly by what uses it, and what one cannot use by the others. Time goes in ticks, a fraction of what a block
//! takes on the fastest link. A copy is the time that all blocks take on a link of rate 1, and the unit of every result.

use std::time::Duration;

use tensorferry_wire::swarm::{Nearness, RelayAddress};

use tensorferry_wire::digest::BLOCK_SIZE;

use super::picker::mix;
use super::{BlockMap, BlockSet, FromSource, Handout, Member, Receiver};

/// Real time that one copy takes: what patience counts in.
const COPY: Duration = Duration::from_secs(10);
/// Ticks for each block.
const TICKS: u32 = 4;
const SOURCE_LANES: usize = 4;

/// A member of the simulation.
#[derive(Clone, Copy, Debug)]
struct Link {
    /// When it starts, in copies.
    start: f64,
    up: f64,
    down: f64,
    /// When it is killed.
    dies: f64,
    /// Whether others reach it.
    reachable: bool,
    /// Members with the same one are on one host, which shares its links.
    host: Option<u32>,
    zone: &'static str,
}

impl Link {
    const FAIR: Self =
        Self { start: 0.0, up: 1.0, down: 1.0, dies: f64::INFINITY, reachable: true, host: None, zone: "a" };
}

#[derive(Debug)]
struct Flow {
    /// `None` is the source.
    from: Option<usize>,
    to: usize,
    /// The relay's number at the receiver.
    relay: usize,
    run: (u64, u64),
    /// Blocks that are to come of `run`, the last one in part.
    left: f64,
    began: f64,
    /// What it gets, and what the pass adds to that.
    rate: f64,
    more: f64,
}

struct Node {
    link: Link,
    map: BlockMap,
    receiver: Receiver,
    waiting: Vec<(u64, u64)>,
    /// What has come, in blocks.
    came: f64,
    /// The members it knows, with whether a lane to that one is busy.
    relays: Vec<(usize, bool)>,
    source_lanes: usize,
    ended: Option<f64>,
    /// Whether the tracker has noticed that.
    gone: bool,
    /// For each of `relays`: when its map was last asked for; infinite when it is set aside.
    refreshed: Vec<f64>,
}

/// How a simulation ended, in copies.
#[derive(Debug)]
struct Outcome {
    /// For each member how long its receive took; `None` for those that were killed.
    took: Vec<Option<f64>>,
    /// Copies that left the source.
    sent: f64,
    /// Copies that crossed the border of zones, and that came to each host from outside, at most.
    crossed: f64,
    to_host: f64,
    /// Requests to the tracker.
    asked: u64,
}

impl Outcome {
    fn longest(&self) -> f64 {
        self.took.iter().flatten().copied().fold(0.0, f64::max)
    }
}

fn simulate(links: &[Link], blocks: u64, source_up: f64) -> Outcome {
    simulate_zones(links, blocks, source_up, f64::INFINITY)
}

/// The same with a link of rate `border` between zones, in either direction; the source is in zone `a`.
fn simulate_zones(links: &[Link], blocks: u64, source_up: f64, border: f64) -> Outcome {
    let unit = (blocks / 256).clamp(1, 16);
    let host = |index: usize| links[index].host.unwrap_or(100_000 + u32::try_from(index).unwrap());
    let member = |index: usize| Member {
        ip: std::net::Ipv4Addr::from(0x0a00_0000 + host(index)).into(),
        relay: RelayAddress { port: u16::try_from(index).unwrap(), token: String::new(), fingerprint: None },
        zone: Some(links[index].zone.to_owned()),
    };
    let mut handout = Handout::new(blocks).unwrap().in_zone(Some("a"));
    let node = |(index, &link): (usize, &Link)| Node {
        link,
        map: BlockMap::new(blocks).unwrap(),
        receiver: Receiver::new(usize::try_from(blocks).unwrap(), index as u64, u64::MAX),
        waiting: {
            let mut ranges: Vec<_> = (0..blocks).step_by(16).map(|at| (at, (at + 16).min(blocks))).collect();
            let first = mix(index as u64) % ranges.len() as u64;
            ranges.rotate_left(usize::try_from(first).unwrap());
            ranges
        },
        came: 0.0,
        relays: Vec::new(),
        source_lanes: SOURCE_LANES,
        ended: None,
        gone: false,
        refreshed: Vec::new(),
    };
    let mut nodes: Vec<Node> = links.iter().enumerate().map(node).collect();
    let mut flows: Vec<Flow> = Vec::new();
    // Of many members, nothing is left to speak of.
    let passes = if links.len() > 40 { 1 } else { 3 };
    let tick = 1.0 / (blocks as f64 * f64::from(TICKS));
    let (mut now, mut sent, mut asked, mut abroad) = (0.0, 0.0, 0, 0.0);
    let mut into = std::collections::BTreeMap::<u32, f64>::new();
    let crosses = |flow: &Flow| flow.from.map_or("a", |from| links[from].zone) != links[flow.to].zone;
    let direction = |flow: &Flow| usize::from(links[flow.to].zone == "a");
    // Members of a host share its links, and what stays on a host takes none of them.
    let stays = |flow: &Flow| flow.from.is_some_and(|from| host(from) == host(flow.to));
    let first_on_host: Vec<usize> =
        (0..links.len()).map(|index| (0..=index).find(|&other| host(other) == host(index)).unwrap_or(index)).collect();
    while nodes.iter().any(|node| node.ended.is_none() && now < node.link.dies) {
        assert!(now < 60.0, "no end");
        for index in 0..nodes.len() {
            let alive = |node: &Node| node.link.start <= now && now < node.link.dies;
            if nodes[index].ended.is_some() || !alive(&nodes[index]) {
                continue;
            }
            let since = COPY.mul_f64(now - nodes[index].link.start);
            // What no lane does.
            let node = &mut nodes[index];
            let (came, left) = (node.came, blocks as f64 - node.came);
            let bytes = |blocks: f64| (blocks * BLOCK_SIZE as f64) as u64;
            let need = if node.receiver.is_worth_joining(since, bytes(came), bytes(left)) {
                Some(node.receiver.join(since, &node.waiting))
            } else {
                node.receiver.next_question(since, &node.waiting)
            };
            if let Some(need) = need {
                asked += 1;
                question(node, &mut flows, &mut handout, (now, &member(index)), &need);
            }
            // Lanes to the source.
            while nodes[index].source_lanes > 0 {
                let node = &mut nodes[index];
                match node.receiver.next_from_source(since, &node.waiting) {
                    FromSource::Take(at, run) => {
                        carve(&mut node.waiting, at, run);
                        node.source_lanes -= 1;
                        flows.push(Flow {
                            from: None,
                            to: index,
                            relay: 0,
                            run,
                            left: (run.1 - run.0) as f64,
                            began: now,
                            rate: 0.0,
                            more: 0.0,
                        });
                    }
                    FromSource::Ask(need) => {
                        asked += 1;
                        question(&mut nodes[index], &mut flows, &mut handout, (now, &member(index)), &need);
                    }
                    FromSource::Wait(_) => break,
                }
            }
            // One lane for each relay.
            for relay in 0..nodes[index].relays.len() {
                let (peer, busy) = nodes[index].relays[relay];
                if busy || nodes[index].refreshed[relay] == f64::INFINITY {
                    continue;
                }
                if nodes[peer].ended.is_some() || !alive(&nodes[peer]) || !nodes[peer].link.reachable {
                    nodes[index].receiver.set_aside(relay);
                    nodes[index].refreshed[relay] = f64::INFINITY;
                    continue;
                }
                if now - nodes[index].refreshed[relay] >= 4.0 * tick {
                    let offered = BlockSet::decode(&nodes[peer].map.encode(), blocks).unwrap().1;
                    nodes[index].receiver.learn(relay, offered);
                    nodes[index].refreshed[relay] = now;
                }
                let node = &mut nodes[index];
                if let Some((at, run)) = node.receiver.next_from_relay(since, relay, &node.waiting, unit) {
                    carve(&mut node.waiting, at, run);
                    node.relays[relay].1 = true;
                    flows.push(Flow {
                        from: Some(peer),
                        to: index,
                        relay,
                        run,
                        left: (run.1 - run.0) as f64,
                        began: now,
                        rate: 0.0,
                        more: 0.0,
                    });
                }
            }
        }
        // The water of one tick: every flow gets what the fullest of its links has for it, and then of what is left.
        let mut up: Vec<(f64, u32)> = links.iter().map(|link| (link.up, 0)).collect();
        let mut down: Vec<(f64, u32)> = links.iter().map(|link| (link.down, 0)).collect();
        let (mut source, mut crossing) = ((source_up, 0), [(border, 0); 2]);
        for pass in 0..passes {
            let ends = |flow: &Flow| (flow.from.map(|from| first_on_host[from]), first_on_host[flow.to]);
            let open = |link: &(f64, u32)| link.0 > 1e-6;
            let is_open =
                |flow: &Flow, up: &[(f64, u32)], down: &[(f64, u32)], source: &(f64, u32), crossing: &[(f64, u32)]| {
                    let (from, to) = ends(flow);
                    from.map_or(open(source), |from| open(&up[from]))
                        && open(&down[to])
                        && (!crosses(flow) || open(&crossing[direction(flow)]))
                };
            let moving: Vec<bool> =
                flows.iter().map(|flow| !stays(flow) && is_open(flow, &up, &down, &source, &crossing)).collect();
            for link in up.iter_mut().chain(&mut down).chain(&mut crossing).chain([&mut source]) {
                link.1 = 0;
            }
            for flow in flows.iter().zip(&moving).filter_map(|(flow, moves)| moves.then_some(flow)) {
                let (from, to) = ends(flow);
                from.map_or(&mut source, |from| &mut up[from]).1 += 1;
                down[to].1 += 1;
                crossing[direction(flow)].1 += u32::from(crosses(flow));
            }
            let share = |link: &(f64, u32)| link.0.max(0.0) / f64::from(link.1.max(1));
            for (flow, moves) in flows.iter_mut().zip(moving) {
                let (from, to) = ends(flow);
                if pass == 0 {
                    flow.rate = if stays(flow) { 8.0 } else { 0.0 };
                }
                if moves {
                    let border = if crosses(flow) { share(&crossing[direction(flow)]) } else { f64::INFINITY };
                    flow.more = share(from.map_or(&source, |from| &up[from])).min(share(&down[to])).min(border);
                } else {
                    flow.more = 0.0;
                }
            }
            for flow in &mut flows {
                let (from, to) = ends(flow);
                flow.rate += flow.more;
                if !stays(flow) {
                    from.map_or(&mut source, |from| &mut up[from]).0 -= flow.more;
                    down[to].0 -= flow.more;
                    crossing[direction(flow)].0 -= if crosses(flow) { flow.more } else { 0.0 };
                }
            }
        }
        now += tick;
        flows.retain_mut(|flow| {
            let there = flow.from.is_none_or(|from| nodes[from].ended.is_none() && now < nodes[from].link.dies);
            if now >= nodes[flow.to].link.dies {
                return false;
            }
            let before = flow.left;
            if there {
                flow.left -= flow.rate / f64::from(TICKS);
                if flow.left < 1e-9 {
                    flow.left = 0.0;
                }
                let came = (before - flow.left) / blocks as f64;
                if crosses(flow) {
                    abroad += came;
                }
                if !stays(flow) {
                    *into.entry(host(flow.to)).or_default() += came;
                }
                if flow.from.is_none() {
                    sent += (before - flow.left) / blocks as f64;
                }
            }
            let whole = (flow.run.1 - flow.run.0) as f64;
            let node = &mut nodes[flow.to];
            let (had, has) = (whole - before.ceil(), whole - flow.left.ceil());
            let first = flow.run.0;
            (first + had as u64..first + has as u64).for_each(|block| node.map.set(block));
            if there {
                node.came += before - flow.left;
                node.receiver.note_bytes(COPY.mul_f64(now - node.link.start), (node.came * BLOCK_SIZE as f64) as u64);
            }
            if there && flow.left > 0.0 {
                return true;
            }
            let done = first + has as u64;
            if done < flow.run.1 {
                node.waiting.push((done, flow.run.1));
            }
            if flow.from.is_some() {
                node.relays[flow.relay].1 = false;
            } else {
                node.source_lanes += 1;
                node.receiver.note_source_done();
            }
            false
        });
        for node in nodes.iter_mut().filter(|node| node.ended.is_none() && now < node.link.dies) {
            node.ended = (node.map.count() == blocks).then_some(now);
        }
        for (index, node) in nodes.iter_mut().enumerate() {
            // The connection to the tracker ends.
            if !node.gone && (node.ended.is_some() || now >= node.link.dies) {
                node.gone = true;
                handout.note_gone(&member(index));
            }
        }
    }
    let took = nodes.iter().map(|node| Some(node.ended? - node.link.start)).collect();
    let to_host = into.into_values().fold(0.0, f64::max);
    Outcome { took, sent, crossed: abroad, to_host, asked }
}

/// Asks the tracker for `member`, and does what it says.
fn question(
    node: &mut Node,
    flows: &mut Vec<Flow>,
    handout: &mut Handout,
    (now, member): (f64, &Member),
    need: &[(u64, u64)],
) {
    let since = COPY.mul_f64(now - node.link.start);
    let took = node.receiver.take_taken();
    let most = handout.most();
    let told = handout.ask(COPY.mul_f64(now), member, need, most);
    let near = |index| told.place.map_or(Nearness::Zone, |place| place.nearness(index));
    let of = |(index, known): (usize, &&Member)| (usize::from(known.relay.port), near(index));
    let peers: Vec<_> = told.neighbours.iter().enumerate().map(of).collect();
    let are_new = node.receiver.note_place(told.place);
    node.receiver.note_answer(since, told.grant, told.wait);
    handout.note_taken(COPY.mul_f64(now), member, &took);
    for (peer, nearness) in peers {
        if node.relays.iter().zip(&node.refreshed).filter(|(_, at)| **at < f64::INFINITY).count() < 12
            && !node.relays.iter().any(|&(known, _)| known == peer)
        {
            assert_eq!(node.receiver.add_relay_at(nearness), node.relays.len());
            node.relays.push((peer, false));
            node.refreshed.push(f64::NEG_INFINITY);
        }
    }
    if are_new {
        recall(node, flows, usize::from(member.relay.port), now);
    }
}

/// Ends what the source sends to `node`, of number `to`, but what will soon be there, as
/// `StragglerMonitor::recall` does.
fn recall(node: &mut Node, flows: &mut Vec<Flow>, to: usize, now: f64) {
    let whole = |flow: &Flow| (flow.run.1 - flow.run.0) as f64;
    let is_of_source = |flow: &Flow| flow.to == to && flow.from.is_none();
    let came = |flow: &Flow| whole(flow) - flow.left;
    let most = flows.iter().filter(|flow| is_of_source(flow)).map(came).fold(0.0, f64::max);
    let mut kept = false;
    flows.retain(|flow| {
        let seconds = COPY.as_secs_f64() * (now - flow.began) * flow.left / came(flow).max(1e-9);
        let is_first = !kept && came(flow) >= most;
        kept |= is_of_source(flow) && is_first;
        if !is_of_source(flow) || seconds <= if is_first { 2.0 } else { 0.5 } {
            return true;
        }
        node.waiting.insert(0, (flow.run.0 + came(flow) as u64, flow.run.1));
        node.source_lanes += 1;
        node.receiver.note_source_done();
        node.came -= came(flow).fract();
        false
    });
}

/// Takes `run` out of the range of number `at`.
fn carve(waiting: &mut Vec<(u64, u64)>, at: usize, run: (u64, u64)) {
    let (first, end) = waiting.remove(at);
    for left in [(run.1, end), (first, run.0)].into_iter().filter(|left| left.0 < left.1) {
        waiting.insert(at, left);
    }
}

#[test]
fn eight_equal_receivers_end_when_little_more_than_one_copy_has_left_the_source() {
    let outcome = simulate(&[Link::FAIR; 8], 256, 1.0);
    println!("{outcome:?}");
    assert!(outcome.longest() < 1.2 && outcome.sent < 1.1, "{outcome:?}");
}

#[test]
fn a_receiver_alone_takes_one_copy() {
    let outcome = simulate(&[Link::FAIR], 256, 1.0);
    assert!(outcome.longest() < 1.02 && outcome.asked <= 64, "{outcome:?}");
}

#[test]
#[ignore = "prints what `make bench-fleet` measures on shaped links"]
fn what_the_bench_measures() {
    for blocks in [64, 192] {
        for members in [2, 4, 8] {
            let outcome = simulate(&vec![Link::FAIR; members], blocks, 1.0);
            println!("{members} of {blocks} blocks: longest {:.2}, sent {:.2}", outcome.longest(), outcome.sent);
        }
    }
}

#[test]
fn nobody_takes_longer_for_starting_later() {
    let links: Vec<_> = (0..8).map(|i| Link { start: 0.3 * f64::from(i), ..Link::FAIR }).collect();
    let outcome = simulate(&links, 256, 1.0);
    println!("{outcome:?}");
    assert!(outcome.longest() < 1.5, "{outcome:?}");
}

#[test]
fn a_second_receiver_is_no_later_than_with_the_source_alone() {
    for start in [0.0, 0.001, 0.1, 0.5, 0.9, 0.999, 1.001, 1.2] {
        let links = [Link::FAIR, Link { start, ..Link::FAIR }];
        let outcome = simulate(&links, 256, 1.0);
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
    let outcome = simulate(&links, 256, 1.0);
    println!("{outcome:?}");
    assert!(outcome.longest() < 1.2 && outcome.sent < 1.2, "{outcome:?}");

    let mut links = [Link::FAIR; 8];
    for slow in &mut links[5..] {
        (slow.up, slow.down) = (0.1, 0.1);
    }
    let outcome = simulate(&links, 256, 1.0);
    println!("{outcome:?}");
    let fast = outcome.took[..5].iter().flatten().copied().fold(0.0, f64::max);
    assert!(fast < 1.6 && outcome.longest() < 12.0, "{outcome:?}");
}

#[test]
fn members_that_cannot_reach_one_another_take_what_they_took_without_a_swarm() {
    let outcome = simulate(&[Link { reachable: false, ..Link::FAIR }; 8], 256, 1.0);
    println!("{outcome:?}");
    assert!(outcome.longest() < 8.5, "{outcome:?}");
}

#[test]
fn the_work_of_the_tracker_does_not_grow_with_the_square_of_the_members() {
    let run = |members| {
        let outcome = simulate(&vec![Link::FAIR; members], 256, 1.0);
        println!("{members}: longest {:.2}, sent {:.2}, asked {}", outcome.longest(), outcome.sent, outcome.asked);
        outcome
    };
    for outcome in [run(16), run(128)] {
        let seconds = COPY.as_secs_f64() * outcome.longest();
        assert!((outcome.asked as f64) < 700.0 * seconds, "{outcome:?}");
        assert!(outcome.longest() < 3.0 && outcome.sent < 2.5, "{outcome:?}");
    }
}

#[test]
#[ignore = "takes a minute"]
fn a_thousand_members() {
    let outcome = simulate(&vec![Link::FAIR; 1000], 512, 1.0);
    println!("longest {:.2}, sent {:.2}, asked {}", outcome.longest(), outcome.sent, outcome.asked);
    // Two copies of it are what all of them begin with, unasked.
    assert!(outcome.longest() < 5.0, "{outcome:?}");
}

/// Half of the members in each of two zones.
fn two_zones(members: usize) -> Vec<Link> {
    (0..members).map(|index| Link { zone: if index % 2 == 0 { "a" } else { "b" }, ..Link::FAIR }).collect()
}

#[test]
fn between_two_zones_little_more_than_one_copy_crosses() {
    for (members, border) in [(8, 1.0), (8, 0.5), (8, 0.25), (32, 1.0), (32, 0.5), (32, 0.25)] {
        let outcome = simulate_zones(&two_zones(members), 256, 1.0, border);
        println!(
            "{members} over {border}: longest {:.2}, sent {:.2}, crossed {:.2}",
            outcome.longest(),
            outcome.sent,
            outcome.crossed
        );
        assert!(outcome.crossed < 1.3, "{members} over {border}: {outcome:?}");
    }
}

#[test]
fn members_that_die_let_little_more_cross_the_border() {
    for members in [8, 32] {
        let mut links = two_zones(members);
        // One of either zone, and one more of the other zone.
        (links[0].dies, links[1].dies, links[3].dies) = (0.6, 0.8, 1.2);
        let outcome = simulate_zones(&links, 256, 1.0, 0.5);
        println!(
            "{members}: longest {:.2}, sent {:.2}, crossed {:.2}",
            outcome.longest(),
            outcome.sent,
            outcome.crossed
        );
        assert!(outcome.crossed < 1.3, "{outcome:?}");
    }
}

#[test]
fn little_more_than_one_copy_comes_to_a_host() {
    let links: Vec<_> = (0..8).map(|index| Link { host: Some(index / 2), ..Link::FAIR }).collect();
    let outcome = simulate(&links, 256, 1.0);
    println!("longest {:.2}, sent {:.2}, to a host {:.2}", outcome.longest(), outcome.sent, outcome.to_host);
    assert!(outcome.to_host < 1.3 && outcome.sent < 1.3 && outcome.longest() < 1.6, "{outcome:?}");
}

#[test]
fn a_slow_member_of_a_zone_does_not_hold_up_the_others_for_long() {
    let mut links = two_zones(8);
    (links[1].up, links[1].down) = (0.05, 0.05);
    let outcome = simulate_zones(&links, 256, 1.0, 0.5);
    println!("{outcome:?}");
    let others = outcome.took.iter().skip(2).flatten().copied().fold(0.0, f64::max);
    // With the source alone, four would share the border: eight copies' time.
    assert!(others < 6.0, "{outcome:?}");
}
