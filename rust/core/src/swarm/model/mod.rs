//! A simulator: members with links of their own rates run the code of this room against one another.
//!
//! Bytes flow like water: a link's rate is shared evenly by what uses it, and what one cannot use by the others. Time
//! goes in ticks, a fraction of what a block takes on a link of rate 1. A copy is the time that all blocks take on such
//! a link, and the unit of every result.

mod talk;
mod trials;

use std::time::Duration;

use tensorferry_wire::digest::BLOCK_SIZE;
use tensorferry_wire::swarm::{Nearness, Place, RelayAddress};

use self::talk::{carve, hear, question};
use super::picker::mix;
use super::{BlockMap, BlockSet, FromSource, Handout, Member, Receiver};

/// Real time that one copy takes where nothing else is said: what patience counts in.
const COPY: Duration = Duration::from_secs(10);
/// Ticks for each block.
const TICKS: u32 = 4;
const SOURCE_LANES: usize = 4;
/// The first block, and the number of the relay of the flow that brings it, which is none.
const OPENING: (u64, u64) = (0, 1);
const NO_RELAY: usize = usize::MAX;

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
}

impl Link {
    const FAIR: Self = Self { start: 0.0, up: 1.0, down: 1.0, dies: f64::INFINITY, reachable: true, host: None };
}

/// What surrounds the members.
#[derive(Clone, Copy, Debug)]
struct World {
    /// Real time that one copy takes.
    copy: Duration,
    source_up: f64,
    /// From a question to its answer.
    latency: Duration,
    /// Whether flows get unequal parts of a link, as connections do.
    is_uneven: bool,
    /// What is random follows from it.
    seed: u64,
}

impl World {
    const EVEN: Self = Self { copy: COPY, source_up: 1.0, latency: Duration::ZERO, is_uneven: false, seed: 0 };

    /// Links as those of `make bench-fleet`: with queues of 100 ms, half full as a rule, at both of their ends.
    fn shaped(blocks: u64, mbit: u64) -> Self {
        let copy = Duration::from_secs_f64((blocks * BLOCK_SIZE * 8) as f64 / (mbit * 1_000_000) as f64);
        Self { copy, latency: Duration::from_millis(100), is_uneven: true, ..Self::EVEN }
    }
}

/// What a tracker has told a member.
struct Told {
    grant: Vec<(u64, u64)>,
    wait: Duration,
    place: Option<Place>,
    /// The numbers of others, and how far they are.
    peers: Vec<(usize, Nearness)>,
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
    /// Its part of a link, in those of other flows.
    weight: f64,
    /// What it gets, and what the pass adds to that.
    rate: f64,
    more: f64,
}

struct Node {
    link: Link,
    /// When the first block was there, which each receiver fetches from the source before anything else: the manifest is
    /// in it.
    opened: f64,
    map: BlockMap,
    receiver: Receiver,
    waiting: Vec<(u64, u64)>,
    /// What lanes have brought, in blocks.
    came: f64,
    /// The members it knows, with whether a lane to that one is busy.
    relays: Vec<(usize, bool)>,
    source_lanes: usize,
    ended: Option<f64>,
    /// Whether the tracker has noticed that.
    gone: bool,
    /// What the tracker has answered, and when that is here.
    answer: Option<(f64, Told)>,
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
    /// Copies that came to each host from outside, at most.
    to_host: f64,
    /// Requests to the tracker.
    asked: u64,
}

impl Outcome {
    fn longest(&self) -> f64 {
        self.took.iter().flatten().copied().fold(0.0, f64::max)
    }
}

fn simulate(links: &[Link], blocks: u64) -> Outcome {
    simulate_in(&World::EVEN, links, blocks)
}

fn simulate_in(world: &World, links: &[Link], blocks: u64) -> Outcome {
    let &World { copy, source_up, .. } = world;
    let latency = world.latency.as_secs_f64() / copy.as_secs_f64();
    let mut flowed = world.seed << 32;
    let mut flow = |from, to, relay, run: (u64, u64), now| {
        flowed += 1;
        // From a quarter to four times as much as the others, one as often as the other.
        let weight = if world.is_uneven { 4.0_f64.powf((mix(flowed) % 2001) as f64 / 1000.0 - 1.0) } else { 1.0 };
        let left = (run.1 - run.0) as f64;
        Flow { from, to, relay, run, left, began: now, weight, rate: 0.0, more: 0.0 }
    };
    let unit = (blocks / 256).clamp(1, 16);
    let host = |index: usize| links[index].host.unwrap_or(100_000 + u32::try_from(index).unwrap());
    let member = |index: usize| Member {
        ip: std::net::Ipv4Addr::from(0x0a00_0000 + host(index)).into(),
        relay: RelayAddress { port: u16::try_from(index).unwrap(), token: String::new(), fingerprint: None },
    };
    let mut handout = Handout::new(blocks).unwrap();
    let node = |(index, &link): (usize, &Link)| Node {
        link,
        opened: f64::INFINITY,
        map: BlockMap::new(blocks).unwrap(),
        receiver: Receiver::new(usize::try_from(blocks).unwrap(), world.seed << 32 | index as u64, u64::MAX)
            .wanting(&[(OPENING.1, blocks)]),
        waiting: {
            // As `Remote::run_lanes` cuts them.
            let each = ((blocks - 1) / (4 * SOURCE_LANES as u64)).clamp(1, 16);
            let cut = (OPENING.1..blocks).step_by(usize::try_from(each).unwrap());
            let mut ranges: Vec<_> = cut.map(|at| (at, (at + each).min(blocks))).collect();
            let first = mix(world.seed << 32 | index as u64) % ranges.len() as u64;
            ranges.rotate_left(usize::try_from(first).unwrap());
            ranges
        },
        came: 0.0,
        relays: Vec::new(),
        source_lanes: SOURCE_LANES,
        ended: None,
        gone: false,
        answer: None,
        refreshed: Vec::new(),
    };
    let mut nodes: Vec<Node> = links.iter().enumerate().map(node).collect();
    let mut flows: Vec<Flow> = Vec::new();
    // Of many members, nothing is left to speak of.
    let passes = if links.len() > 40 { 1 } else { 3 };
    let tick = 1.0 / (blocks as f64 * f64::from(TICKS));
    let (mut now, mut sent, mut asked) = (0.0, 0.0, 0);
    let mut into = std::collections::BTreeMap::<u32, f64>::new();
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
            if nodes[index].opened > now {
                if nodes[index].opened == f64::INFINITY {
                    nodes[index].opened = f64::MAX;
                    flows.push(flow(None, index, NO_RELAY, OPENING, now));
                }
                continue;
            }
            let since = copy.mul_f64(now - nodes[index].opened);
            // What no lane does.
            let node = &mut nodes[index];
            let (came, left) = (node.came, (blocks - OPENING.1) as f64 - node.came);
            let bytes = |blocks: f64| (blocks * BLOCK_SIZE as f64) as u64;
            let need = if node.receiver.is_worth_joining(since, bytes(came), bytes(left)) {
                Some(node.receiver.join(since, &node.waiting))
            } else {
                node.receiver.next_question(since, &node.waiting)
            };
            if let Some(need) = need {
                asked += 1;
                question(node, &mut handout, (now, copy, now + latency), &member(index), &need);
            }
            hear(node, &mut flows, index, (now, copy));
            // Lanes to the source.
            while nodes[index].source_lanes > 0 {
                let node = &mut nodes[index];
                match node.receiver.next_from_source(since, &node.waiting) {
                    FromSource::Take(at, run) => {
                        carve(&mut node.waiting, at, run);
                        node.source_lanes -= 1;
                        flows.push(flow(None, index, 0, run, now));
                    }
                    FromSource::Ask(need) => {
                        asked += 1;
                        question(node, &mut handout, (now, copy, now + latency), &member(index), &need);
                        hear(node, &mut flows, index, (now, copy));
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
                if now - nodes[index].refreshed[relay] >= (4.0 * tick).max(latency) {
                    let offered = BlockSet::decode(&nodes[peer].map.encode(), blocks).unwrap().1;
                    nodes[index].receiver.learn(relay, offered);
                    nodes[index].refreshed[relay] = now;
                }
                let node = &mut nodes[index];
                if let Some((at, run)) = node.receiver.next_from_relay(since, relay, &node.waiting, unit) {
                    carve(&mut node.waiting, at, run);
                    node.relays[relay].1 = true;
                    flows.push(flow(Some(peer), index, relay, run, now));
                }
            }
        }
        // The water of one tick: every flow gets what the fullest of its links has for it, and then of what is left.
        let mut up: Vec<(f64, f64)> = links.iter().map(|link| (link.up, 0.0)).collect();
        let mut down: Vec<(f64, f64)> = links.iter().map(|link| (link.down, 0.0)).collect();
        let mut source = (source_up, 0.0);
        for pass in 0..passes {
            let ends = |flow: &Flow| (flow.from.map(|from| first_on_host[from]), first_on_host[flow.to]);
            let open = |link: &(f64, f64)| link.0 > 1e-6;
            let is_open = |flow: &Flow| {
                let (from, to) = ends(flow);
                from.map_or(open(&source), |from| open(&up[from])) && open(&down[to])
            };
            let moving: Vec<bool> = flows.iter().map(|flow| !stays(flow) && is_open(flow)).collect();
            for link in up.iter_mut().chain(&mut down).chain([&mut source]) {
                link.1 = 0.0;
            }
            for flow in flows.iter().zip(&moving).filter_map(|(flow, moves)| moves.then_some(flow)) {
                let (from, to) = ends(flow);
                from.map_or(&mut source, |from| &mut up[from]).1 += flow.weight;
                down[to].1 += flow.weight;
            }
            let share = |link: &(f64, f64), weight: f64| link.0.max(0.0) * weight / link.1.max(weight);
            for (flow, moves) in flows.iter_mut().zip(moving) {
                let (from, to) = ends(flow);
                if pass == 0 {
                    flow.rate = if stays(flow) { 8.0 } else { 0.0 };
                }
                if moves {
                    flow.more =
                        share(from.map_or(&source, |from| &up[from]), flow.weight).min(share(&down[to], flow.weight));
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
            let is_opening = flow.relay == NO_RELAY;
            if there && !is_opening {
                node.came += before - flow.left;
                node.receiver.note_bytes(copy.mul_f64(now - node.opened), (node.came * BLOCK_SIZE as f64) as u64);
            }
            if there && flow.left > 0.0 {
                return true;
            }
            let done = first + has as u64;
            if done < flow.run.1 {
                node.waiting.push((done, flow.run.1));
            }
            if is_opening {
                node.opened = now;
            } else if flow.from.is_some() {
                node.relays[flow.relay].1 = false;
            } else {
                node.source_lanes += 1;
                node.receiver.note_source_done(copy.mul_f64(now - node.opened), flow.run.0);
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
                handout.forget(&member(index));
            }
        }
    }
    let took = nodes.iter().map(|node| Some(node.ended? - node.link.start)).collect();
    let to_host = into.into_values().fold(0.0, f64::max);
    Outcome { took, sent, to_host, asked }
}
