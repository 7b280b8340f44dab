//! What members of a simulation say to its tracker and hear from it, and what they do then.

use std::time::Duration;

use tensorferry_wire::swarm::Nearness;

use super::{Flow, Node, Told};
use crate::swarm::{Handout, Member};

/// Asks the tracker for `member`; the answer comes at the time `comes`.
pub(super) fn question(
    node: &mut Node,
    handout: &mut Handout,
    (now, copy, comes): (f64, Duration, f64),
    member: &Member,
    need: &[(u64, u64)],
) {
    let took = node.receiver.take_taken();
    let most = handout.most();
    handout.note_coming(copy.mul_f64(now), member, &node.receiver.coming());
    let told = handout.ask(copy.mul_f64(now), member, need, most);
    let near = |index| told.place.map_or(Nearness::Far, |place| place.nearness(index));
    let of = |(index, known): (usize, &&Member)| (usize::from(known.relay.port), near(index));
    let peers: Vec<_> = told.neighbours.iter().enumerate().map(of).collect();
    node.answer = Some((comes, Told { grant: told.grant, wait: told.wait, place: told.place, peers }));
    handout.note_taken(copy.mul_f64(now), member, &took);
}

/// Does what the tracker has answered member number `index`.
pub(super) fn hear(node: &mut Node, flows: &mut Vec<Flow>, index: usize, (now, copy): (f64, Duration)) {
    let Some((_, told)) = node.answer.take_if(|(comes, _)| *comes <= now) else { return };
    let since = copy.mul_f64(now - node.opened);
    let are_new = node.receiver.note_place(told.place);
    node.receiver.note_answer(since, told.grant, told.wait);
    for (peer, nearness) in told.peers {
        if node.relays.iter().zip(&node.refreshed).filter(|(_, at)| **at < f64::INFINITY).count() < 12
            && !node.relays.iter().any(|&(known, _)| known == peer)
        {
            assert_eq!(node.receiver.add_relay_at(nearness), node.relays.len());
            node.relays.push((peer, false));
            node.refreshed.push(f64::NEG_INFINITY);
        }
    }
    if are_new {
        recall(node, flows, index, (now, copy));
    }
}

/// Ends what the source sends to `node`, of number `to`, but what will soon be there, as
/// `Scheduler::recall` does.
fn recall(node: &mut Node, flows: &mut Vec<Flow>, to: usize, (now, copy): (f64, Duration)) {
    let whole = |flow: &Flow| (flow.run.1 - flow.run.0) as f64;
    let is_of_source = |flow: &Flow| flow.to == to && flow.from.is_none();
    let came = |flow: &Flow| whole(flow) - flow.left;
    let most = flows.iter().filter(|flow| is_of_source(flow)).map(came).fold(0.0, f64::max);
    let mut kept = false;
    flows.retain(|flow| {
        let seconds = copy.as_secs_f64() * (now - flow.began) * flow.left / came(flow).max(1e-9);
        let is_first = !kept && came(flow) >= most;
        kept |= is_of_source(flow) && is_first;
        if !is_of_source(flow) || seconds <= if is_first { 2.0 } else { 0.5 } {
            return true;
        }
        node.waiting.insert(0, (flow.run.0 + came(flow) as u64, flow.run.1));
        node.source_lanes += 1;
        node.receiver.note_source_done(copy.mul_f64(now - node.opened), flow.run.0);
        node.came -= came(flow).fract();
        false
    });
}

/// Takes `run` out of the range of number `at`.
pub(super) fn carve(waiting: &mut Vec<(u64, u64)>, at: usize, run: (u64, u64)) {
    let (first, end) = waiting.remove(at);
    for left in [(run.1, end), (first, run.0)].into_iter().filter(|left| left.0 < left.1) {
        waiting.insert(at, left);
    }
}
