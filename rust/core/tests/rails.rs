//! Receives over several addresses of one source: each brings its share, and none is needed.

use std::io::Write;
use std::net::{IpAddr, TcpListener};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use tensorferry_core::{ErrorKind, FetchOptions, Rail, Report, ServerConfig, Stability};

use crate::common::{BLOCK, PATIENCE, Rig, STEP, State};

const BLOCKS: usize = 48;

fn loopback(last: u8) -> IpAddr {
    IpAddr::from([127, 0, 0, last])
}

fn rails(addresses: &[u8]) -> Vec<Rail> {
    addresses.iter().map(|&last| Rail { address: loopback(last), mbit: 0 }).collect()
}

/// A server at the address `bind`, or at all, that names `addresses`.
fn serving(bind: Option<u8>, addresses: &[u8], state: &State) -> Rig {
    let rig = Rig::configured(&ServerConfig {
        bind: bind.map(loopback),
        rails: rails(addresses),
        // So that every lane has a turn.
        max_bandwidth: Some(400 << 20),
        ..ServerConfig::default()
    });
    rig.server.store().publish(STEP, state.publication(Stability::Private));
    rig
}

fn options() -> FetchOptions {
    FetchOptions { same_host: false, ..FetchOptions::within(PATIENCE) }
}

/// Bytes by the last number of the source's address.
fn shares(report: &Report) -> Vec<(u8, u64)> {
    let last = |address: &IpAddr| address.to_string().rsplit('.').next().unwrap().parse().unwrap();
    report.route_bytes.iter().map(|((_, there), bytes)| (last(there), *bytes)).collect()
}

/// What listens at the port of `rig` at another address, and handles each connection by `each`, with their number so far.
fn impostor(rig: &Rig, last: u8, each: impl Fn(std::net::TcpStream) + Send + 'static) -> Arc<AtomicUsize> {
    let listener = TcpListener::bind((loopback(last), rig.server.address().port())).unwrap();
    let seen = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&seen);
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            count.fetch_add(1, Ordering::SeqCst);
            each(stream);
        }
    });
    seen
}

#[test]
fn every_address_brings_a_share() {
    let state = State::of(&[BLOCKS * BLOCK, 5, BLOCK], 3);
    let rig = serving(None, &[1, 2, 3], &state);
    let report = state.fetch(&[&rig.url()], options()).unwrap().report().clone();
    let shares = shares(&report);
    assert_eq!(shares.iter().map(|(last, _)| *last).collect::<Vec<_>>(), [1, 2, 3], "{shares:?}");
    assert!(shares.iter().all(|(_, bytes)| *bytes >= BLOCK as u64), "{shares:?}");
    assert_eq!(report.routes.len(), 3);
    assert!(report.lanes >= 3);
}

#[test]
fn a_small_state_comes_by_one_address() {
    let state = State::of(&[12 * BLOCK], 3);
    let rig = serving(None, &[1, 2, 3], &state);
    let report = state.fetch(&[&rig.url()], options()).unwrap().report().clone();
    assert_eq!(shares(&report).len(), 1);
}

#[test]
fn an_address_where_nobody_listens_is_left_alone() {
    let state = State::of(&[BLOCKS * BLOCK], 3);
    let rig = serving(Some(1), &[1, 2, 3], &state);
    let report = state.fetch(&[&rig.url()], options()).unwrap().report().clone();
    assert_eq!(shares(&report), [(1, (BLOCKS * BLOCK) as u64 - prefix(&report, BLOCKS))]);
    assert!(report.troubles.is_empty(), "{:?}", report.troubles);
}

/// Bytes that came with the header: they are counted, and by no lane.
fn prefix(report: &Report, blocks: usize) -> u64 {
    let by_lanes: u64 = report.route_bytes.values().sum();
    assert!(by_lanes <= (blocks * BLOCK) as u64);
    (blocks * BLOCK) as u64 - by_lanes
}

#[test]
fn an_address_that_says_nothing_holds_nothing_up() {
    let state = State::of(&[BLOCKS * BLOCK], 3);
    let rig = serving(Some(1), &[1, 2], &state);
    let (keep, kept) = mpsc::channel();
    let seen = impostor(&rig, 2, move |stream| keep.send(stream).unwrap());
    let options = FetchOptions { stall: Duration::from_secs(20), ..options() };
    let report = state.fetch(&[&rig.url()], options).unwrap().report().clone();
    assert!(seen.load(Ordering::SeqCst) > 0, "nobody has tried it");
    assert_eq!(shares(&report).iter().find(|(last, _)| *last == 2).map_or(0, |(_, bytes)| *bytes), 0);
    drop(kept);
}

#[test]
fn an_address_that_answers_nonsense_is_left_alone() {
    let state = State::of(&[BLOCKS * BLOCK], 3);
    for answer in [
        "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n",
        "HTTP/1.1 206 Partial Content\r\nContent-Length: 7\r\nContent-Range: bytes 0-6/7\r\n\r\nabcdefg",
        "nonsense",
    ] {
        let rig = serving(Some(1), &[1, 2], &state);
        let seen = impostor(&rig, 2, move |mut stream| {
            let _ = stream.write_all(answer.as_bytes());
        });
        state.fetch(&[&rig.url()], options()).unwrap();
        assert!(seen.load(Ordering::SeqCst) > 0, "nobody has tried it");
    }
}

#[test]
fn another_server_at_an_address_brings_nothing() {
    let state = State::of(&[BLOCKS * BLOCK], 3);
    let rig = serving(Some(1), &[1, 2], &state);
    let port = rig.server.address().port();
    let other = Rig::configured(&ServerConfig {
        bind: Some(loopback(2)),
        ports: port..=port,
        capability: false,
        ..ServerConfig::default()
    });
    other.server.store().publish(STEP, State::of(&[BLOCKS * BLOCK], 4).publication(Stability::Private));
    let report = state.fetch(&[&rig.url()], options()).unwrap().report().clone();
    assert_eq!(shares(&report).iter().find(|(last, _)| *last == 2).map_or(0, |(_, bytes)| *bytes), 0);
}

#[test]
fn a_source_that_is_gone_is_an_error_in_time() {
    let state = State::of(&[BLOCKS * BLOCK], 3);
    let rig = serving(None, &[1, 2, 3], &state);
    let url = rig.url();
    drop(rig);
    let error = state.fetch(&[&url], FetchOptions { same_host: false, ..FetchOptions::within(Duration::from_secs(5)) });
    assert_eq!(error.map(|_| ()).unwrap_err().kind(), ErrorKind::Connect);
}
