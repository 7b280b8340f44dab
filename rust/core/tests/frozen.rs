//! Receivers that stand still in the middle of an answer, as a stopped process does: a withdrawal is not theirs to hold
//! up, while those that are slow, and those that wait for the source, are waited for.

use std::sync::mpsc;
use std::time::Duration;

use crate::common::faults::{ALWAYS, Fault, Proxy};
use crate::common::local::LocalReader;
use crate::common::raw::begin;
use crate::common::{BLOCK, PATIENCE, Rig, STEP, State, eventually, lanes, local};
use tensorferry_core::{Cancel, Destination, ErrorKind, FetchOptions, Remote, ServerConfig, Stability, Withdrawn};

/// More than the socket buffers of both ends hold.
const LARGE: usize = 32 * BLOCK;
/// No test waits for as long as this: a withdrawal that returns has not waited for its time to be over.
const FOREVER: Duration = Duration::from_hours(1);

fn lent(config: &ServerConfig, len: usize) -> (Rig, State) {
    let state = State::of(&[len], 1);
    let rig = Rig::configured(config).publishing(state.publication(Stability::Borrowed));
    (rig, state)
}

fn plain() -> ServerConfig {
    ServerConfig { patience: PATIENCE, same_host: true, ..local() }
}

/// The result of a withdrawal that may take [`FOREVER`], of which nobody waits for more than [`PATIENCE`].
fn withdrawn(rig: &Rig) -> Withdrawn {
    std::thread::scope(|scope| {
        let (tell, told) = mpsc::channel();
        scope.spawn(move || tell.send(rig.server.store().withdraw(FOREVER)));
        told.recv_timeout(PATIENCE).unwrap_or_else(|_| {
            // Ends the withdrawal, so that the thread can be joined.
            rig.server.shutdown(Duration::ZERO);
            panic!("the withdrawal waits for a receiver that stands still")
        })
    })
}

#[test]
fn a_frozen_receiver_is_cut_from_the_network() {
    let (rig, _) = lent(&plain(), LARGE);
    let mut readers = [begin(&rig), begin(&rig)];
    assert_eq!(withdrawn(&rig), Withdrawn::Cut(2));
    assert_eq!(rig.server.store().active(), 0);
    for (reader, length) in &mut readers {
        assert!(reader.rest().len() < *length, "it was not cut");
    }
}

#[test]
fn a_frozen_receiver_is_cut_on_this_machine() {
    let (rig, _) = lent(&plain(), LARGE);
    let mut reader = LocalReader::reading(&rig, "7.safetensors");
    reader.await_all_slots();
    assert_eq!(withdrawn(&rig), Withdrawn::Cut(1));
    assert_eq!(rig.server.store().active(), 0);
}

#[test]
fn a_frozen_receiver_is_cut_behind_tls() {
    let (rig, _) = lent(&ServerConfig { tls: true, ..plain() }, 64 * BLOCK);
    let proxy = Proxy::new(&rig.url(), Fault::Stall(4 * BLOCK), ALWAYS);
    let cancel = Cancel::new();
    let options = FetchOptions { same_host: false, stall: FOREVER, cancel: cancel.clone(), ..lanes(1) };
    let remote = Remote::open(&[proxy.url()], STEP, options).unwrap();
    std::thread::scope(|scope| {
        let receiving = scope.spawn(|| remote.fetch(Destination::Fresh).map(drop));
        eventually("it is under way", || rig.server.store().active() == 1 && rig.server.bytes_served() > 2 << 20);
        let ended = withdrawn(&rig);
        // Nobody tells a receiver behind a network that stands still.
        cancel.cancel();
        assert_eq!(receiving.join().unwrap().unwrap_err().kind(), ErrorKind::Cancelled);
        assert_eq!(ended, Withdrawn::Cut(1));
    });
}

#[test]
fn a_receiver_that_freezes_among_others_costs_the_others_nothing() {
    let (rig, state) = lent(&ServerConfig { max_bandwidth: Some(16 << 20), ..plain() }, LARGE);
    let _frozen = begin(&rig);
    std::thread::scope(|scope| {
        let remote = Remote::open(&[&rig.url()], STEP, FetchOptions { same_host: false, ..lanes(2) }).unwrap();
        let receiving = scope.spawn(|| state.fetch_from(remote));
        eventually("both are under way", || rig.server.store().active() > 1);
        assert_eq!(withdrawn(&rig), Withdrawn::Cut(1));
        receiving.join().unwrap().unwrap();
    });
}

#[test]
fn a_receiver_that_is_slow_is_waited_for() {
    let (rig, state) = lent(&plain(), LARGE);
    let (mut reader, length) = begin(&rig);
    let reading = std::thread::spawn(move || {
        while reader.buffer.len() < length && reader.more(1 << 20) > 0 {
            std::thread::sleep(Duration::from_millis(50));
        }
        reader.buffer
    });
    assert_eq!(withdrawn(&rig), Withdrawn::Drained);
    assert!(reading.join().unwrap().ends_with(state.bytes("w0")));
}

#[test]
fn a_receiver_that_the_source_makes_wait_is_waited_for() {
    // Each block is held back for longer than a receiver may stand still.
    let config = ServerConfig { max_bandwidth: Some(1 << 20), ..plain() };
    for same_host in [false, true] {
        let (rig, state) = lent(&config, 3 * BLOCK);
        std::thread::scope(|scope| {
            let remote = Remote::open(&[&rig.url()], STEP, FetchOptions { same_host, ..lanes(1) }).unwrap();
            let receiving = scope.spawn(|| state.fetch_from(remote));
            eventually("it is under way", || rig.server.store().active() > 0);
            assert_eq!(withdrawn(&rig), Withdrawn::Drained, "same_host={same_host}");
            receiving.join().unwrap().unwrap();
        });
    }
}
