//! The gate: which requests wait, for how long, and what is served once it opens.

use std::time::{Duration, Instant};

use crate::common::raw::{Raw, get, metrics};
use crate::common::{PATIENCE, Rig, STEP, State, eventually};
use tensorferry_core::{ErrorKind, FetchOptions, Remote, Stability};

#[test]
fn patience_ends_with_503_and_the_connection_goes_on() {
    let rig = Rig::with_patience(Duration::from_millis(300));
    let mut raw = Raw::to(&rig);
    for tail in ["7.safetensors", "7/header", "7/digests", "7/full"] {
        let started = Instant::now();
        raw.send("GET", &rig.path(tail), &[]);
        let got = raw.answer();
        assert!(started.elapsed() >= Duration::from_millis(280), "{tail}");
        assert_eq!(got.status, 503, "{tail}");
        assert_eq!(got.reason, "Timed out waiting for a checkpoint to be allowed after 0.3 seconds", "{tail}");
        assert_eq!(got.text().trim_end(), got.reason, "{tail}");
    }
    let refused = Remote::open(&[&rig.url()], STEP, FetchOptions::within(PATIENCE)).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Status(503));
}

#[test]
fn a_client_that_leaves_while_it_waits_leaves_nothing_behind() {
    let rig = Rig::new();
    for _ in 0..20 {
        drop(Raw::asking(&rig, "7.safetensors"));
    }
    // The only connection left is that of the request for the metrics itself.
    eventually("the connections are gone", || metrics(&rig).contains("\ntensorferry_connections 1\n"));
    assert_eq!(rig.server.store().active(), 0);
    let state = State::of(&[10], 3);
    rig.server.store().publish(STEP, state.publication(Stability::Private));
    assert_eq!(get(&rig, &rig.path("7.safetensors"), &[]).status, 200);
}

#[test]
fn allow_serves_the_same_snapshot_under_another_number() {
    let state = State::of(&[100], 1);
    let rig = Rig::serving(&state);
    let store = rig.server.store();
    let before = get(&rig, &rig.path("7.safetensors"), &[]);
    store.allow(9);
    assert_eq!((store.step(), store.is_allowed()), (Some(9), true));
    assert_eq!(get(&rig, &rig.path("7.safetensors"), &[]).status, 400);
    let after = get(&rig, &rig.path("9.safetensors"), &[]);
    assert_eq!((after.status, &after.body), (200, &before.body));
    assert_eq!(after.header("etag"), before.header("etag"));
    store.withdraw(Duration::ZERO);
    assert_eq!((store.step(), store.is_allowed()), (Some(9), false));
    store.allow(10);
    let nothing = get(&rig, &rig.path("10.safetensors"), &[]);
    assert_eq!(nothing.status, 404);
    assert_eq!(nothing.reason, "step 10 is allowed but no state was sent: call send_checkpoint first");
}
