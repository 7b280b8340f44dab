//! Receiving works for every size, every destination and any number of lanes.

use crate::common::{BLOCK, Rig, STEP, State, lanes, noise};
use tensorferry_core::{Destination, ErrorKind, Remote};
use tensorferry_wire::container::{MANIFEST_ENTRY, PICKLE_ENTRY};

/// Sizes on both sides of every boundary: of a block, of the first read, of the pieces that are gathered when sent.
fn sizes() -> Vec<usize> {
    let mut sizes = vec![0, 1, 2, 3, 63, 64, 65, 4095, 4097, 16_383, 16_384, 16_385, 262_143];
    for blocks in 1..=2 {
        sizes.extend([blocks * BLOCK - 1, blocks * BLOCK, blocks * BLOCK + 1, 0, 7]);
    }
    sizes.extend([19 * BLOCK + 77, 0]);
    sizes
}

#[test]
fn every_size_arrives_in_fresh_memory_over_any_number_of_lanes() {
    let state = State::of(&sizes(), 1);
    let rig = Rig::serving(&state);
    for count in [1, 2, 4, 7] {
        let arrived = state.fetch(&[&rig.url()], lanes(count)).unwrap();
        let report = arrived.report();
        assert_eq!((report.retries, report.lanes), (0, count));
        assert!(arrived.offsets().iter().all(|o| o.is_some_and(|o| o % 64 == 0)));
    }
    let default = state.fetch(&[&rig.url()], tensorferry_core::FetchOptions::within(crate::common::PATIENCE)).unwrap();
    assert!((2..=8).contains(&default.report().lanes));
}

#[test]
fn containers_of_one_entry_of_any_size_arrive() {
    for len in [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK - 1, 17 * BLOCK + 1, 33 * BLOCK, 90 * BLOCK + 5]
    {
        let state = State::of(&[len], len as u64);
        let rig = Rig::serving(&state);
        let arrived = state.fetch(&[&rig.url()], lanes(3)).unwrap();
        assert!(arrived.report().bytes >= len as u64, "{len}");
    }
    let nothing = State(Vec::new());
    let rig = Rig::serving(&nothing);
    assert!(nothing.fetch(&[&rig.url()], lanes(2)).unwrap().arena().is_empty());
}

#[test]
fn given_destinations_are_filled_in_place_and_nothing_around_them() {
    const MARGIN: usize = 24;
    let state = State::of(&sizes(), 5);
    let rig = Rig::serving(&state);
    for count in [1, 2, 4, 7] {
        let remote = Remote::open(&[&rig.url()], STEP, lanes(count)).unwrap();
        let entries = remote.header().entries().to_vec();
        // The given addresses are not aligned, and every third entry is left to the arena.
        let length = |e: &tensorferry_wire::container::Entry| usize::try_from(e.nbytes()).unwrap();
        let mut buffers: Vec<Vec<u8>> = entries.iter().map(|e| vec![0xEE; length(e) + 2 * MARGIN]).collect();
        let addresses: Vec<_> = (0..entries.len())
            .map(|i| (i % 3 != 2).then(|| buffers[i].as_mut_ptr() as usize + MARGIN + i % 3))
            .collect();
        // SAFETY: each address lies in a buffer of its own that is long enough and is not touched until the fetch ends.
        let arrived = remote.fetch(unsafe { Destination::given(addresses.clone()) }).unwrap();
        for (i, (entry, buffer)) in entries.iter().zip(&buffers).enumerate() {
            let expected = state.bytes(&entry.name);
            let found = if addresses[i].is_some() {
                let start = MARGIN + i % 3;
                let (before, rest) = buffer.split_at(start);
                let (found, after) = rest.split_at(expected.len());
                assert!(before.iter().chain(after).all(|b| *b == 0xEE), "{} was written beside", entry.name);
                assert_eq!(arrived.offsets()[i], None);
                found
            } else {
                arrived.arena().bytes(arrived.offsets()[i].unwrap(), expected.len())
            };
            assert!(found == &expected[..], "{} arrived with wrong bytes", entry.name);
        }
    }
}

#[test]
fn a_wrong_number_of_destinations_is_refused() {
    let state = State::of(&[1, 2], 1);
    let rig = Rig::serving(&state);
    for count in [0, 1, 3] {
        let remote = Remote::open(&[&rig.url()], STEP, lanes(1)).unwrap();
        // SAFETY: no address is given.
        let refused = remote.fetch(unsafe { Destination::given(vec![None; count]) }).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Invalid, "{count}");
    }
}

#[test]
fn twenty_thousand_tiny_entries_arrive() {
    // The header is also larger than the first read.
    let sizes: Vec<usize> = (0..20_000).map(|i| [0, 1, 2, 64, 333, 1024, 100][i % 7]).collect();
    let state = State::of(&sizes, 11);
    let rig = Rig::serving(&state);
    for count in [1, 4] {
        state.fetch(&[&rig.url()], lanes(count)).unwrap();
    }
}

#[test]
fn reserved_entries_are_there_before_the_payload_whatever_their_size() {
    for (manifest, pickle) in [(10, 0), (0, 10), (300, 70), (3 * BLOCK + 7, 2 * BLOCK), (BLOCK, BLOCK), (BLOCK / 2, 1)]
    {
        let state = State::of(&[3 * BLOCK, 9], 1)
            .with(MANIFEST_ENTRY, noise(manifest, 2))
            .with(PICKLE_ENTRY, noise(pickle, 3))
            .with("last", noise(5, 4));
        let rig = Rig::serving(&state);
        let remote = Remote::open(&[&rig.url()], STEP, lanes(2)).unwrap();
        for name in [MANIFEST_ENTRY, PICKLE_ENTRY] {
            assert!(remote.reserved(name) == Some(&state.bytes(name)[..]), "{name} of {manifest} and {pickle}");
        }
        assert_eq!(remote.reserved("__tensorferry__/other"), None);
        let arrived = state.fetch_from(remote).unwrap();
        assert_eq!(arrived.offsets().iter().filter(|o| o.is_none()).count(), 2, "reserved entries need no arena");
    }
}

#[test]
fn sources_that_are_no_urls_or_none_at_all_are_refused() {
    assert_eq!(Remote::open(&[], STEP, lanes(1)).unwrap_err().kind(), ErrorKind::Invalid);
    assert_eq!(Remote::open(&["https://h/"], STEP, lanes(1)).unwrap_err().kind(), ErrorKind::Invalid);
    let forever = tensorferry_core::FetchOptions::within(std::time::Duration::MAX);
    assert_eq!(Remote::open(&["http://127.0.0.1:9/"], STEP, forever).unwrap_err().kind(), ErrorKind::Invalid);
}
