//! Several checkpoints behind one port, each on a shelf of its own.

use std::sync::Arc;
use std::time::Duration;

use crate::common::raw::{Raw, get, metrics};
use crate::common::{BLOCK, Rig, STEP, State, eventually, lanes, local};
use tensorferry_core::{ErrorKind, FetchOptions, Secret, ServerConfig, Stability, Withdrawn};

/// The path of `tail` below `url`.
fn path(url: &str, tail: &str) -> String {
    format!("/{}{tail}", url.splitn(4, '/').nth(3).unwrap())
}

#[test]
fn every_shelf_serves_its_own_checkpoint_on_the_same_port() {
    for same_host in [false, true] {
        let rig = Rig::new();
        let (first, second) = (rig.server.shelf(None).unwrap(), rig.server.shelf(None).unwrap());
        let states = [State::of(&[3 * BLOCK + 7, 100], 1), State::of(&[2 * BLOCK, 5], 50), State::of(&[BLOCK], 99)];
        first.store().publish(STEP, states[0].publication(Stability::Private));
        second.store().publish(STEP, states[1].publication(Stability::Private));
        rig.server.store().publish(STEP, states[2].publication(Stability::Private));
        let urls = [first.url("127.0.0.1"), second.url("127.0.0.1"), rig.url()];
        for (state, url) in states.iter().zip(&urls) {
            state.fetch(&[url], FetchOptions { same_host, ..lanes(2) }).unwrap();
        }
        // One that is gone takes nothing else with it.
        drop(first);
        assert_eq!(get(&rig, &path(&urls[0], "7.safetensors"), &[]).status, 404);
        states[1].fetch(&[&urls[1]], FetchOptions { same_host, ..lanes(2) }).unwrap();
        states[2].fetch(&[&urls[2]], FetchOptions { same_host, ..lanes(2) }).unwrap();
    }
}

#[test]
fn who_waits_at_a_shelf_that_is_taken_down_is_told_to_ask_for_the_latest() {
    let rig = Rig::new();
    let shelf = rig.server.shelf(None).unwrap();
    let (state, url) = (State::of(&[BLOCK], 3), shelf.url("127.0.0.1"));
    shelf.store().publish(STEP, state.publication(Stability::Private));
    shelf.store().withdraw(Duration::ZERO);
    let mut waiting = Raw::to(&rig);
    waiting.send("GET", &path(&url, "7.safetensors"), &[]);
    eventually("the request waits", || metrics(&rig).contains("tensorferry_waiting_requests 1"));
    drop(shelf);
    let told = waiting.head();
    assert_eq!(told.status, 503);
    assert_eq!(told.reason, "the snapshot at this URL was evicted or withdrawn: ask for the latest metadata");
    let later = state.fetch(&[&url], lanes(1)).unwrap_err();
    assert!(later.to_string().contains("a snapshot that is gone (ask for the latest metadata)"), "{later}");
}

#[test]
fn what_was_withdrawn_from_a_shelf_is_released_without_the_server() {
    let rig = Rig::new();
    let shelf = rig.server.shelf(None).unwrap();
    let state = State::of(&[BLOCK], 3);
    let owner = Arc::new(());
    shelf.store().publish(STEP, state.owned_by(Stability::Private, Box::new(Arc::clone(&owner))));
    state.fetch(&[&shelf.url("127.0.0.1")], lanes(1)).unwrap();
    assert_eq!(shelf.store().withdraw(Duration::ZERO), Withdrawn::Clean);
    // The receive is over, or lingers until the shelf's own sweep finds it idle.
    eventually("the memory is released", || Arc::strong_count(&owner) == 1);
}

#[test]
fn a_shelf_with_a_name_needs_the_secret_and_no_random_part() {
    let secret = Secret::new(b"sixteen bytes of it and more").unwrap();
    let config = ServerConfig { secret: Some(secret.clone()), ..local() };
    let rig = Rig::configured(&config);
    let shelf = rig.server.shelf(Some("keeper")).unwrap();
    let state = State::of(&[BLOCK], 3);
    shelf.store().publish(STEP, state.publication(Stability::Private));
    let url = format!("http://{}/keeper/checkpoint/", rig.server.address());
    assert_eq!(shelf.url("127.0.0.1"), url);
    assert_eq!(get(&rig, "/keeper/checkpoint/7.safetensors", &[]).status, 404);
    assert_eq!(get(&rig, "/keeper/checkpoint/", &[]).status, 200, "the status page, which needs no proof");
    state.fetch(&[&url], FetchOptions { secret: Some(secret), ..lanes(1) }).unwrap();
}

#[test]
fn names_of_shelves_are_single_and_plain() {
    let rig = Rig::new();
    let kept = rig.server.shelf(Some("keeper")).unwrap();
    let long = "a".repeat(65);
    for name in ["keeper", "", "a/b", "a.b", "healthz", "metrics", "checkpoint", "\u{e9}", &long] {
        assert_eq!(rig.server.shelf(Some(name)).unwrap_err().kind(), ErrorKind::Invalid, "{name:?}");
    }
    drop(kept);
    rig.server.shelf(Some("keeper")).unwrap();
}
