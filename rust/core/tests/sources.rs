//! Several sources: one takes over for another, and bytes of two that differ are never mixed.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::common::faults::{ALWAYS, Fault, Liar, Proxy};
use crate::common::{BLOCK, PATIENCE, Rig, STEP, State, lanes, quick};
use tensorferry_core::{Destination, ErrorKind, FetchOptions, Remote, Stability};

#[test]
fn a_second_source_takes_over_when_the_first_dies() {
    let state = State::of(&[24 * BLOCK + 9], 1);
    let (first, second) = (Rig::serving(&state), Rig::serving(&state));
    // The first source is opened, sends a few megabytes on each connection, and cannot be reached afterwards.
    for place in [BLOCK + 40_000, 3 * BLOCK, 6 * BLOCK] {
        let dying = Proxy::new(&first.url(), Fault::Close(place), ALWAYS);
        for count in [1, 2, 4] {
            let arrived = state.fetch(&[dying.url(), &second.url()], lanes(count));
            let arrived = arrived.unwrap_or_else(|e| panic!("dies after {place}, {count} lanes: {e}"));
            assert!(count < 3 || arrived.report().bytes >= 24 << 20);
        }
    }
    // The first source disappears for good between open and fetch.
    let dying = Proxy::new(&first.url(), Fault::None, 0);
    let second_url = second.url();
    let remote = Remote::open(&[dying.url(), &second_url], STEP, lanes(2)).unwrap();
    dying.die();
    state.fetch_from(remote).unwrap();
}

#[test]
fn a_source_with_other_bytes_is_never_mixed_in() {
    // Names and sizes are equal, and so are the headers; the first block, where the manifest lies, is equal or not.
    let ours = State::of(&[24 * BLOCK], 1);
    let theirs = State::of(&[24 * BLOCK], 2);
    let alike = {
        let mut bytes = ours.bytes("w0").to_vec();
        bytes[11 * BLOCK + 5] ^= 1;
        bytes[23 * BLOCK + 5] ^= 1;
        State(vec![("w0".to_owned(), bytes.into())])
    };
    let first = Rig::serving(&ours);
    for (what, other) in [("all other bytes", &theirs), ("two other bytes", &alike)] {
        let second = Rig::serving(other);
        for count in [1, 2, 4] {
            // Both sources live: the bytes are those of the source that was opened.
            let arrived = ours.fetch(&[&first.url(), &second.url()], lanes(count));
            arrived.unwrap_or_else(|e| panic!("{what}, {count} lanes: {e}"));
        }
        for place in [BLOCK + 40_000, 5 * BLOCK, 9 * BLOCK] {
            for count in [1, 2] {
                // The first source dies midway: the result is an error or the second's bytes, but never some of each.
                let dying = Proxy::new(&first.url(), Fault::Close(place), ALWAYS);
                let second_url = second.url();
                let urls = [dying.url(), &second_url];
                let Ok(remote) = Remote::open(&urls, STEP, quick(PATIENCE, count)) else { continue };
                let Ok(arrived) = remote.fetch(Destination::Fresh) else { continue };
                let found = arrived.arena().bytes(0, 24 * BLOCK);
                let whole = found == &ours.bytes("w0")[..] || found == &other.bytes("w0")[..];
                assert!(whole, "{what}: bytes of both, dead after {place}, {count} lanes");
            }
        }
    }
}

/// Passes requests on to `rig`, slowly enough that other lanes get their share. It disappears after its answer to a
/// request for digests up to block `last`.
fn gone_after_the_digests(rig: &Rig, last: usize) -> Liar {
    let (address, gone) = (rig.server.address(), AtomicBool::new(false));
    let (ours, prefix) = ("/checkpoint/".to_owned(), rig.path(""));
    let last_request = format!("-{last} HTTP/1.1");
    Liar::new(move |mut stream, head, tracker| {
        if gone.load(Ordering::SeqCst) {
            return Err(std::io::ErrorKind::ConnectionReset.into());
        }
        let digests = head.contains("digests") && head.contains(&last_request);
        gone.store(digests, Ordering::SeqCst);
        let head = head.replacen(&ours, &prefix, 1).replacen("\r\n", "\r\nConnection: close\r\n", 1);
        tracker.sleep(Duration::from_millis(20));
        let mut upstream = TcpStream::connect(address)?;
        upstream.write_all(head.as_bytes())?;
        let mut answer = Vec::new();
        upstream.read_to_end(&mut answer)?;
        stream.write_all(&answer)?;
        Err(std::io::ErrorKind::ConnectionAborted.into())
    })
}

#[test]
fn a_source_that_ends_the_connection_with_every_answer_will_do() {
    // Some proxies do this. The manifest is longer than the first read, so that opening takes several requests.
    let state = State::of(&[8 * BLOCK], 1).with(tensorferry_wire::container::MANIFEST_ENTRY, vec![1; 2 * BLOCK]);
    let rig = Rig::serving(&state);
    let closing = gone_after_the_digests(&rig, usize::MAX);
    for count in [1, 3] {
        let options = FetchOptions { same_host: false, ..lanes(count) };
        assert_eq!(state.fetch(&[&closing.url()], options).unwrap().report().retries, 0);
        // The server at the local name has other paths than the proxy: requests refused there go to the proxy.
        state.fetch(&[&closing.url()], lanes(count)).unwrap();
    }
}

#[test]
fn what_one_source_vouched_for_is_not_completed_from_another() {
    let (ours, theirs) = (State::of(&[24 * BLOCK], 1), State::of(&[24 * BLOCK], 2));
    let (first, second) = (Rig::serving(&ours), Rig::serving(&theirs));
    for _ in 0..3 {
        // Half of the bytes come from each source; the first sends digests, which identify its own bytes, and dies.
        let dying = gone_after_the_digests(&first, 24);
        let (dying_url, second_url) = (dying.url(), second.url());
        let remote = Remote::open(&[&dying_url, &second_url], STEP, quick(PATIENCE, 2)).unwrap();
        let arrived = remote.fetch(Destination::Fresh).unwrap();
        let found = arrived.arena().bytes(0, 24 * BLOCK);
        assert!(found == &theirs.bytes("w0")[..] || found == &ours.bytes("w0")[..], "bytes of both");
    }
}

#[test]
fn reserved_entries_and_payload_never_come_from_two_snapshots() {
    let with =
        |seed: u8| State::of(&[24 * BLOCK], 1).with(tensorferry_wire::container::MANIFEST_ENTRY, vec![seed; 100]);
    let (ours, theirs) = (with(1), with(2));
    let (first, second) = (Rig::serving(&ours), Rig::serving(&theirs));
    let dying = Proxy::new(&first.url(), Fault::None, 0);
    let second_url = second.url();
    let remote = Remote::open(&[dying.url(), &second_url], STEP, lanes(2)).unwrap();
    dying.die();
    // Only the manifests differ, and the first source's has arrived: the rest must not come from the second source.
    let failed = remote.fetch(Destination::Fresh).unwrap_err();
    assert_eq!(failed.kind(), ErrorKind::Changed, "{failed}");
}

#[test]
fn a_source_that_moves_on_is_noticed() {
    // So much that it comes through shared memory.
    let (old, new) = (State::of(&[32 * BLOCK], 1), State::of(&[32 * BLOCK], 2));
    let rig = Rig::new().publishing(old.publication(Stability::Borrowed));
    let remote = Remote::open(&[&rig.url()], STEP, lanes(2)).unwrap();
    rig.server.store().publish(STEP, new.publication(Stability::Borrowed));
    let failed = remote.fetch(Destination::Fresh).unwrap_err();
    assert_eq!(failed.kind(), ErrorKind::Changed, "{failed}");

    let remote = Remote::open(&[&rig.url()], STEP, lanes(2)).unwrap();
    rig.server.store().publish(8, new.publication(Stability::Private));
    let failed = remote.fetch(Destination::Fresh).unwrap_err();
    assert_eq!(failed.kind(), ErrorKind::Changed, "{failed}");
}
