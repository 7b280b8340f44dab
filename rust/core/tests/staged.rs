//! Receives in waves: bytes pass through memory that the next wave reuses, and are verified before they are handed on.

use crate::common::faults::{ALWAYS, Fault, Proxy};
use crate::common::{BLOCK, Rig, STEP, State, lanes};
use tensorferry_core::{Arrived, Destination, Error, ErrorKind, FetchOptions, Remote, Stability, StagedFetch};

const POISON: u8 = 0xA5;

/// Fetches all waves through memory that is poisoned before each. Returns the bytes that passed, the number of waves
/// and the finished receive.
fn run(mut waves: StagedFetch, most: usize, count: usize) -> Result<(Vec<Vec<u8>>, usize, Arrived), Error> {
    let (mut passed, mut turns) = (vec![Vec::new(); count], 0);
    loop {
        let mut memory = vec![POISON; most];
        // SAFETY: as many bytes as the receive was begun with, and nobody else's.
        let Some(parts) = (unsafe { waves.fetch(memory.as_mut_ptr() as usize) })? else { break };
        turns += 1;
        for part in parts {
            let (start, len, at) = [part.start, part.len, part.at].map(|n| usize::try_from(n).unwrap()).into();
            let into: &mut Vec<u8> = &mut passed[part.entry];
            assert_eq!(into.len(), start, "bytes of an entry come in order, each once");
            into.extend_from_slice(&memory[at..at + len]);
        }
    }
    Ok((passed, turns, waves.finish()?))
}

#[test]
fn what_passes_and_what_stays_are_complete() {
    // Large and small entries, some in host memory between them, and more than one wave.
    let state = State::of(&[5 * BLOCK + 17, 3, 700, 9 * BLOCK, 0, BLOCK, 40, 6 * BLOCK - 1, 2 * BLOCK], 1);
    let rig = Rig::new();
    for (stability, same_host, passing) in [
        (Stability::Private, false, vec![0, 3, 5, 7]),
        (Stability::Borrowed, true, vec![7, 4, 3, 1, 6]),
        (Stability::Borrowed, false, (0..9).collect()),
        (Stability::Private, true, vec![2]),
        (Stability::Private, true, vec![]),
    ] {
        rig.server.store().publish(STEP, state.publication(stability));
        for most in [BLOCK, 4 * BLOCK + 1, 64 * BLOCK] {
            let options = FetchOptions { same_host, ..lanes(2) };
            let remote = Remote::open(&[&rig.url()], STEP, options).unwrap();
            let header = remote.header().clone();
            let waves = remote.staged(Destination::Fresh, &passing, most as u64).unwrap();
            let (passed, turns, arrived) = run(waves, most, header.entries().len()).unwrap();
            state.check(&header, &arrived);
            for (index, entry) in header.entries().iter().enumerate() {
                let through = passing.contains(&index);
                assert!(arrived.offsets()[index].is_none() == through);
                let expected = if through { &state.bytes(&entry.name)[..] } else { &[] };
                assert!(passed[index] == expected, "{} arrived with wrong bytes", entry.name);
            }
            let bytes: usize = passed.iter().map(Vec::len).sum();
            assert!(turns >= bytes.div_ceil(most).max(1) && (most < 64 * BLOCK || turns == 1));
            let report = arrived.report();
            let total = header.payload_len();
            assert_eq!((report.retries, report.same_host), (0, same_host));
            assert_eq!(report.bytes, total, "every block once");
        }
    }
}

#[test]
fn a_small_checkpoint_that_came_with_its_header_passes_too() {
    let state = State::of(&[100, 5000, 7], 1);
    let rig = Rig::serving(&state);
    let remote = Remote::open(&[&rig.url()], STEP, lanes(1)).unwrap();
    let header = remote.header().clone();
    let waves = remote.staged(Destination::Fresh, &[0, 1], BLOCK as u64).unwrap();
    let (passed, turns, arrived) = run(waves, BLOCK, 3).unwrap();
    state.check(&header, &arrived);
    assert!(turns == 1 && passed[0] == *state.bytes("w0") && passed[1] == *state.bytes("w1"));
}

#[test]
fn damage_never_passes() {
    let state = State::of(&[12 * BLOCK], 1);
    let rig = Rig::serving(&state);
    let receive = |proxy: &Proxy, times| {
        let options = FetchOptions { same_host: false, ..lanes(1) };
        let remote = Remote::open(&[proxy.url()], STEP, options).unwrap();
        proxy.arm(times);
        run(remote.staged(Destination::Fresh, &[0], 4 * BLOCK as u64).unwrap(), 4 * BLOCK, 1)
    };
    let (passed, _, arrived) = receive(&Proxy::new(&rig.url(), Fault::Flip(5 * BLOCK + 123), 0), 1).unwrap();
    assert!(passed[0] == *state.bytes("w0") && arrived.report().retries == 1);
    let failed = receive(&Proxy::new(&rig.url(), Fault::FlipEvery(BLOCK / 2), 0), ALWAYS).map(drop).unwrap_err();
    assert_eq!(failed.kind(), ErrorKind::Corrupt, "{failed}");
}

#[test]
fn connections_are_used_again_from_wave_to_wave() {
    let state = State::of(&[32 * BLOCK], 1);
    let rig = Rig::serving(&state);
    let proxy = Proxy::new(&rig.url(), Fault::None, 0);
    let options = FetchOptions { same_host: false, ..lanes(2) };
    let remote = Remote::open(&[proxy.url()], STEP, options).unwrap();
    let waves = remote.staged(Destination::Fresh, &[0], 2 * BLOCK as u64).unwrap();
    let (passed, turns, _) = run(waves, 2 * BLOCK, 1).unwrap();
    assert!(turns == 16 && passed[0] == *state.bytes("w0"));
    assert_eq!(proxy.connections(), 2, "as many as there are lanes");
}

#[test]
fn what_makes_no_sense_is_refused() {
    let state = State::of(&[BLOCK, 5], 1);
    let rig = Rig::serving(&state);
    let waves = |urls: &[&str], passing: &[usize], most| {
        Remote::open(urls, STEP, lanes(1)).unwrap().staged(Destination::Fresh, passing, most)
    };
    let (url, other) = (rig.url(), Rig::serving(&state));
    for refused in [
        waves(&[&url], &[0], BLOCK as u64 - 1),
        waves(&[&url], &[2], BLOCK as u64),
        waves(&[&url], &[1, 1], BLOCK as u64),
        waves(&[&url, &other.url()], &[0], BLOCK as u64),
    ] {
        assert_eq!(refused.unwrap_err().kind(), ErrorKind::Invalid);
    }
    let unfinished = waves(&[&url], &[0], BLOCK as u64).unwrap();
    assert_eq!(unfinished.finish().unwrap_err().kind(), ErrorKind::Invalid);
}
