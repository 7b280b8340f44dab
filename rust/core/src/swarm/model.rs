//! A simulator: members with links of their own rates run the code of this room against one another.
//!
//! Bytes flow like water: a link's rate is shared evenly by what uses it. Time goes in ticks, a fraction of what a block
//! takes on the fastest link. A copy is the time that all blocks take on a link of rate 1, and the unit of every result.

use std::time::Duration;

use tensorferry_wire::swarm::RelayAddress;

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
}

impl Link {
    const FAIR: Self = Self { start: 0.0, up: 1.0, down: 1.0, dies: f64::INFINITY, reachable: true };
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
}

struct Node {
    link: Link,
    map: BlockMap,
    receiver: Receiver,
    waiting: Vec<(u64, u64)>,
    /// The members it knows, with whether a lane to that one is busy.
    relays: Vec<(usize, bool)>,
    source_lanes: usize,
    /// Counts whenever something comes.
    bytes: u64,
    ended: Option<f64>,
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
    /// Requests to the tracker.
    asked: u64,
}

impl Outcome {
    fn longest(&self) -> f64 {
        self.took.iter().flatten().copied().fold(0.0, f64::max)
    }
}

fn simulate(links: &[Link], blocks: u64, source_up: f64) -> Outcome {
    let unit = (blocks / 256).clamp(1, 16);
    let member = |index: usize| Member {
        ip: std::net::Ipv4Addr::from(0x0a00_0000 + u32::try_from(index).unwrap()).into(),
        relay: RelayAddress { port: 1, token: String::new(), fingerprint: None },
    };
    let mut handout = Handout::new(blocks).unwrap();
    let node = |(index, &link): (usize, &Link)| Node {
        link,
        map: BlockMap::new(blocks).unwrap(),
        receiver: Receiver::new(usize::try_from(blocks).unwrap(), index as u64),
        waiting: (0..blocks).step_by(16).map(|at| (at, (at + 16).min(blocks))).collect(),
        relays: Vec::new(),
        source_lanes: SOURCE_LANES,
        bytes: 0,
        ended: None,
        refreshed: Vec::new(),
    };
    let mut nodes: Vec<Node> = links.iter().enumerate().map(node).collect();
    let mut flows: Vec<Flow> = Vec::new();
    let tick = 1.0 / (blocks as f64 * f64::from(TICKS));
    let (mut now, mut sent, mut asked) = (0.0, 0.0, 0);
    while nodes.iter().any(|node| node.ended.is_none() && now < node.link.dies) {
        assert!(now < 60.0, "no end");
        for index in 0..nodes.len() {
            let alive = |node: &Node| node.link.start <= now && now < node.link.dies;
            if nodes[index].ended.is_some() || !alive(&nodes[index]) {
                continue;
            }
            let since = COPY.mul_f64(now - nodes[index].link.start);
            // Lanes to the source.
            while nodes[index].source_lanes > 0 {
                let node = &mut nodes[index];
                match node.receiver.next_from_source(since, &node.waiting) {
                    FromSource::Take(at, run) => {
                        carve(&mut node.waiting, at, run);
                        node.source_lanes -= 1;
                        flows.push(Flow { from: None, to: index, relay: 0, run, left: (run.1 - run.0) as f64 });
                    }
                    FromSource::Ask(need) => {
                        asked += 1;
                        let most = handout.most();
                        let told = handout.ask(COPY.mul_f64(now), &member(index), &need, most);
                        let of = |known: &&Member| {
                            let std::net::IpAddr::V4(ip) = known.ip else { panic!("an address of this model") };
                            usize::try_from(u32::from(ip) - 0x0a00_0000).unwrap()
                        };
                        let peers: Vec<usize> = told.neighbours.iter().map(of).collect();
                        node.receiver.note_answer(since, told.grant, told.wait);
                        for peer in peers {
                            if node.relays.iter().zip(&node.refreshed).filter(|(_, at)| **at < f64::INFINITY).count()
                                < 12
                                && !node.relays.iter().any(|&(known, _)| known == peer)
                            {
                                assert_eq!(node.receiver.add_relay(), node.relays.len());
                                node.relays.push((peer, false));
                                node.refreshed.push(f64::NEG_INFINITY);
                            }
                        }
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
                if let Some((at, run)) = node.receiver.next_from_relay(relay, &node.waiting, unit) {
                    carve(&mut node.waiting, at, run);
                    node.relays[relay].1 = true;
                    flows.push(Flow { from: Some(peer), to: index, relay, run, left: (run.1 - run.0) as f64 });
                }
            }
        }
        // The water of one tick.
        let (mut up, mut down, mut source) = (vec![0_u32; nodes.len()], vec![0_u32; nodes.len()], 0_u32);
        for flow in &flows {
            down[flow.to] += 1;
            match flow.from {
                Some(from) => up[from] += 1,
                None => source += 1,
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
                let share = match flow.from {
                    Some(from) => nodes[from].link.up / f64::from(up[from]),
                    None => source_up / f64::from(source),
                };
                let rate = share.min(nodes[flow.to].link.down / f64::from(down[flow.to]));
                flow.left -= rate / f64::from(TICKS);
                if flow.left < 1e-9 {
                    flow.left = 0.0;
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
                node.bytes += 1;
                node.receiver.note_bytes(COPY.mul_f64(now - node.link.start), node.bytes);
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
    }
    let took = nodes.iter().map(|node| Some(node.ended? - node.link.start)).collect();
    Outcome { took, sent, asked }
}

/// Takes `run` out of the range of number `at`.
fn carve(waiting: &mut Vec<(u64, u64)>, at: usize, run: (u64, u64)) {
    let (first, end) = waiting.swap_remove(at);
    waiting.extend([(first, run.0), (run.1, end)].into_iter().filter(|range| range.0 < range.1));
}

#[test]
fn eight_equal_receivers_end_when_little_more_than_one_copy_has_left_the_source() {
    let outcome = simulate(&[Link::FAIR; 8], 256, 1.0);
    println!("{outcome:?}");
    assert!(outcome.longest() < 1.4 && outcome.sent < 1.3, "{outcome:?}");
}

#[test]
fn a_receiver_alone_takes_one_copy() {
    let outcome = simulate(&[Link::FAIR], 256, 1.0);
    assert!(outcome.longest() < 1.02 && outcome.asked <= 64, "{outcome:?}");
}

#[test]
fn nobody_takes_longer_for_starting_later() {
    let links: Vec<_> = (0..8).map(|i| Link { start: 0.3 * f64::from(i), ..Link::FAIR }).collect();
    let outcome = simulate(&links, 256, 1.0);
    println!("{outcome:?}");
    assert!(outcome.longest() < 1.5, "{outcome:?}");
}

#[test]
fn slow_and_dying_members_hold_up_nobody_else() {
    let mut links = [Link::FAIR; 8];
    (links[1].dies, links[4].dies) = (0.5, 0.5);
    let outcome = simulate(&links, 256, 1.0);
    println!("{outcome:?}");
    assert!(outcome.longest() < 1.8 && outcome.sent < 1.6, "{outcome:?}");

    let mut links = [Link::FAIR; 8];
    for slow in &mut links[5..] {
        (slow.up, slow.down) = (0.1, 0.1);
    }
    let outcome = simulate(&links, 256, 1.0);
    println!("{outcome:?}");
    let fast = outcome.took[..5].iter().flatten().copied().fold(0.0, f64::max);
    assert!(fast < 2.5 && outcome.longest() < 12.0, "{outcome:?}");
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
    assert!(outcome.longest() < 4.0, "{outcome:?}");
}
