//! Receivers of slices that bring each other what they want in common.

use std::sync::atomic::{AtomicBool, Ordering};
use tensorferry_core::{FetchOptions, Remote, SliceRequest, fetch_slices};

use tensorferry_wire::digest::Hasher;

use crate::common::raw::Raw;
use crate::common::{BLOCK, Rig, STEP, State, at_once, eventually, lanes};
use crate::slices::{expected, fetch, slices};
use crate::swarm::{ask, ask_by, count, etag, length_of, member, offering, relay_for, source, unfinished};

const MIB: u64 = BLOCK as u64;

/// The query of a member that wants these runs of blocks.
fn part_of(runs: &[(u64, u64)]) -> String {
    let mut hasher = Hasher::new();
    for (first, end) in runs {
        hasher.update(&first.to_le_bytes());
        hasher.update(&end.to_le_bytes());
    }
    format!("&part={:016x}", hasher.finish())
}

#[test]
fn slices_that_all_want_leave_the_source_about_once() {
    let state = State::of(&[70 * BLOCK], 1);
    let source = source(&state, 32);
    let rigs: Vec<_> = (0..4).map(|_| Rig::new()).collect();
    // Beginning and end within a block, and a hole: what nobody wants of these blocks is passed on as well.
    let (first, hole) = (3 * MIB + 1000, 40 * MIB + 99);
    let parts = [("w0", first, hole - first, vec![]), ("w0", hole + 5, 29 * MIB, vec![])];
    let before = source.server.bytes_served();
    let reports = at_once(&rigs, |rig| fetch(&source, &state, &parts, member(rig)).unwrap());
    let sent = source.server.bytes_served() - before;
    let relayed: u64 = reports.iter().map(|report| report.relayed).sum();
    assert!(sent < 3 * 66 * MIB && relayed > 66 * MIB, "{} MiB sent, {} MiB relayed", sent >> 20, relayed >> 20);
    let wanted = hole - first + 29 * MIB;
    for report in &reports {
        assert_eq!((report.wanted, report.refused), (wanted, 0));
        assert!(report.bytes >= wanted, "{report:?}");
    }
    // On a busy machine one may begin when the others are done.
    let helped = reports.iter().filter(|report| report.senders.len() > 1).count();
    assert!(helped >= 2, "{reports:?}");
}

#[test]
fn a_tracker_tells_members_of_those_that_want_the_same_and_grants_them_what_it_would_grant_all() {
    let state = State::of(&[128 * BLOCK], 1);
    let source = offering(&state, None);
    let mut members: Vec<_> = (0..4).map(|_| Raw::to(&source)).collect();
    let (one, other) = (part_of(&[(0, 64)]), part_of(&[(0, 65)]));
    let mut said = |index: usize, query: String| {
        let port = 1 + u16::try_from(index).unwrap();
        ask_by(&mut members[index], &source, port, &query).text().to_owned()
    };
    assert!(said(0, format!("&need=0-64{one}")).starts_with("grant 0-64\n"));
    let told = said(1, format!("&need=0-65{other}"));
    assert!(told.starts_with("grant 0-65\n") && !told.contains("peer "), "{told}");
    let told = said(2, "&need=0-128".to_owned());
    assert!(told.starts_with("grant 0-128\n") && !told.contains("peer "), "{told}");
    let told = said(3, format!("&need=0-64{one}"));
    assert!(told.starts_with("wait") && told.contains("peer http://127.0.0.1:1/") && !told.contains(":2/"), "{told}");
    // A sixteenth of what each of four wants, as of 64 blocks in all.
    assert!(said(0, format!("&need=8-64{one}")).starts_with("grant 8-9\n"));
}

#[test]
fn swarms_of_parts_are_bounded_and_end_with_their_members() {
    let state = State::of(&[16 * BLOCK], 1);
    let source = offering(&state, None);
    let query = |part: u64| format!("&need=0-4&part={part:016x}");
    let mut members: Vec<_> = (0..64).map(|_| Raw::to(&source)).collect();
    for (part, member) in (0..).zip(&mut members) {
        assert!(ask_by(member, &source, 1, &query(part)).text().starts_with("grant 0-4\n"));
    }
    let known = |part| {
        let told = ask(&source, 2, &query(part)).text().to_owned();
        assert!(told.contains("grant 0-4\n") || told.contains("peer "), "{told}");
        told.contains("peer ")
    };
    assert!(known(63), "the last one has a swarm");
    let mut beyond = Raw::to(&source);
    ask_by(&mut beyond, &source, 1, &query(64));
    assert!(!known(64), "and one more has none");
    members.clear();
    eventually("the others are gone", || {
        ask_by(&mut beyond, &source, 1, &query(64));
        known(64)
    });
}

#[test]
fn what_is_not_wanted_is_not_served_and_after_the_return_nothing_is() {
    let (state, rig) = (State::of(&[48 * BLOCK], 1), Rig::new());
    let (source, readiness) = unfinished(&state, 20);
    let wanted = [("w0", 2 * MIB, 40 * MIB, vec![])];
    let (bytes, mut buffer) = expected(&state, &wanted[0]);
    let slices = slices(&state, &wanted, std::slice::from_mut(&mut buffer));
    let returned = AtomicBool::new(false);
    let path = std::thread::scope(|scope| {
        let receive = scope.spawn(|| {
            let result = Remote::open(&[&source.url()], STEP, member(&rig)).unwrap().fetch_slices(&slices);
            returned.store(true, Ordering::SeqCst);
            result
        });
        let (mut relay, path) = relay_for(&source, &part_of(&[(2, 42)]));
        eventually("there is some", || count(&mut relay, &path) >= 8);
        let (tag, start) = (etag(&source), length_of(&source) - 48 * BLOCK);
        for (block, status) in [(1, 416), (2, 206), (41, 416), (42, 416), (47, 416)] {
            let first = start + block * BLOCK;
            let range = format!("bytes={first}-{}", first + BLOCK - 1);
            eventually("the block is there, or is not", || {
                relay.send("GET", &format!("{path}7.safetensors"), &[("Range", &range), ("If-Match", &tag)]);
                let answer = relay.answer();
                assert!(answer.status != 206 || answer.body == state.bytes("w0")[block * BLOCK..][..BLOCK]);
                answer.status == status
            });
        }
        assert!(!returned.load(Ordering::SeqCst));
        readiness.finish();
        receive.join().unwrap().unwrap();
        path
    });
    assert!(buffer == bytes);
    let mut again = Raw::to(&rig);
    again.send("GET", &format!("{path}7/have"), &[]);
    assert_eq!(again.answer().status, 404, "its path is gone");
}

#[test]
fn of_many_sources_those_that_are_shared_are_relayed() {
    let states: Vec<_> = (0..2).map(|i| State::of(&[24 * BLOCK], i)).collect();
    let sources: Vec<_> = states.iter().map(|state| source(state, 8)).collect();
    let rigs: Vec<_> = (0..3).map(|_| Rig::new()).collect();
    let one = |rig: &Rig| {
        let part = [("w0", 0, 24 * MIB, vec![])];
        let mut buffers: Vec<_> = states.iter().map(|state| expected(state, &part[0]).1).collect();
        let order = |(i, buffer): (usize, &mut Vec<u8>)| SliceRequest {
            urls: vec![sources[i].url()],
            step: STEP,
            slices: slices(&states[i], &part, std::slice::from_mut(buffer)),
            is_shared: i == 1,
        };
        let orders = buffers.iter_mut().enumerate().map(order).collect();
        let options = FetchOptions { ahead: 4096, ..member(rig) };
        let report = fetch_slices(orders, &FetchOptions { lanes: lanes(4).lanes, ..options }).unwrap();
        for (state, buffer) in states.iter().zip(&buffers) {
            assert!(*buffer == state.bytes("w0")[..]);
        }
        report
    };
    let before: Vec<_> = sources.iter().map(|source| source.server.bytes_served()).collect();
    let relayed: u64 = at_once(&rigs, one).into_iter().map(|report| report.relayed).sum();
    let sent: Vec<_> =
        sources.iter().zip(before).map(|(source, before)| (source.server.bytes_served() - before) >> 20).collect();
    assert!(relayed > 0 && sent[0] >= 72 && sent[1] < 72, "{sent:?} MiB sent, {} MiB relayed", relayed >> 20);
}
