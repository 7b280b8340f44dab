//! Receives over several addresses of one source: each brings its share, and none is needed.

use std::io::Write;
use std::net::{IpAddr, TcpStream};
use std::time::Duration;

use tensorferry_core::{ErrorKind, FetchOptions, Rail, Remote, Report, ServerConfig, Stability};

use crate::common::faults::Liar;
use crate::common::{BLOCK, PATIENCE, Rig, STEP, State, loopback, port_at_every_address};

const BLOCKS: usize = 48;

fn rails(addresses: &[u8]) -> Vec<Rail> {
    addresses.iter().map(|&last| Rail { address: loopback(last), mbit: 0 }).collect()
}

/// A server at the address `bind`, or at all, that names `addresses`.
fn serving(bind: Option<u8>, addresses: &[u8], state: &State) -> Rig {
    Rig::configured(&ServerConfig {
        bind: bind.map(loopback),
        ports: port_at_every_address(),
        rails: rails(addresses),
        // So that every lane has a turn.
        max_bandwidth: Some(400 << 20),
        ..ServerConfig::default()
    })
    .publishing(state.publication(Stability::Private))
}

fn options() -> FetchOptions {
    FetchOptions { same_host: false, ..FetchOptions::within(PATIENCE) }
}

/// Receives `state` from `urls` until as much as `least` came from each of the addresses `expected` and from no other; at
/// most five times, since an address that a busy machine keeps waiting is left out, or one more is tried.
fn receive_by(state: &State, urls: &[&str], expected: &[u8], least: usize) -> Report {
    let mut found = Vec::new();
    for _ in 0..5 {
        let report = state.fetch(urls, options()).unwrap().report().clone();
        found = shares(&report);
        if found.iter().map(|(address, _)| *address).eq(expected.iter().copied())
            && found.iter().all(|(_, bytes)| *bytes >= least as u64)
        {
            return report;
        }
    }
    panic!("{found:?}, not {expected:?} in any of five receives");
}

/// Bytes by the last number of the source's address.
fn shares(report: &Report) -> Vec<(u8, u64)> {
    let last = |address: &IpAddr| address.to_string().rsplit('.').next().unwrap().parse().unwrap();
    report.route_bytes.iter().map(|((_, there), bytes)| (last(there), *bytes)).collect()
}

/// What listens at the port of `rig` at another address, and answers requests with `answer`, or not at all.
fn impostor(rig: &Rig, last: u8, answer: Option<&'static str>) -> Liar {
    Liar::at((loopback(last), rig.server.address().port()), move |mut stream, _, tracker| {
        let Some(answer) = answer else {
            tracker.sleep(PATIENCE);
            return Ok(());
        };
        stream.write_all(answer.as_bytes())?;
        Err(std::io::ErrorKind::ConnectionAborted.into())
    })
}

/// Receives by `receive` until `seen` counts a connection, at most five times: on a busy machine a receive can be over
/// before a further address has its turn.
fn receive_until_tried(seen: &Liar, receive: impl Fn() -> Report) -> Report {
    let mut reports = std::iter::repeat_with(receive).take(5);
    let Some(tried) = reports.find(|_| seen.connections() > 0) else {
        panic!("nobody has tried the address in five receives");
    };
    tried
}

#[test]
fn every_address_brings_a_share() {
    let state = State::of(&[BLOCKS * BLOCK, 5, BLOCK], 3);
    let rig = serving(None, &[1, 2, 3], &state);
    let report = receive_by(&state, &[&rig.url()], &[1, 2, 3], BLOCK);
    assert_eq!(report.routes.len(), 3);
    assert!(report.lanes >= 3);
}

#[test]
fn an_address_where_nobody_listens_is_left_alone() {
    let state = State::of(&[BLOCKS * BLOCK], 3);
    let rig = serving(Some(1), &[1, 2, 3], &state);
    let report = state.fetch(&[&rig.url()], options()).unwrap().report().clone();
    assert_eq!(shares(&report).iter().map(|(last, _)| *last).collect::<Vec<_>>(), [1]);
    assert!(report.troubles.is_empty(), "{:?}", report.troubles);
}

#[test]
fn an_address_that_says_nothing_holds_nothing_up() {
    let state = State::of(&[BLOCKS * BLOCK], 3);
    let rig = serving(Some(1), &[1, 2], &state);
    let silent = impostor(&rig, 2, None);
    let options = || FetchOptions { stall: Duration::from_secs(20), ..options() };
    let receive = || state.fetch(&[&rig.url()], options()).unwrap().report().clone();
    let report = receive_until_tried(&silent, receive);
    assert_eq!(shares(&report).iter().find(|(last, _)| *last == 2).map_or(0, |(_, bytes)| *bytes), 0);
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
        let other = impostor(&rig, 2, Some(answer));
        receive_until_tried(&other, || state.fetch(&[&rig.url()], options()).unwrap().report().clone());
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
fn a_receive_begins_by_the_card_that_the_url_names() {
    let state = State::of(&[12 * BLOCK], 3);
    let config = ServerConfig { ports: port_at_every_address(), card: Some(loopback(3)), ..ServerConfig::default() };
    let rig = Rig::configured(&config).publishing(state.publication(Stability::Private));
    assert!(rig.url().contains("~127.0.0.3/checkpoint/"), "{}", rig.url());
    receive_by(&state, &[&rig.url()], &[3], 1);
}

#[test]
fn every_source_of_several_brings_by_each_of_its_addresses() {
    let state = State::of(&[BLOCKS * BLOCK, 5, BLOCK], 3);
    let (one, other) = (serving(None, &[1, 2], &state), serving(None, &[1, 3], &state));
    receive_by(&state, &[&one.url(), &other.url()], &[1, 2, 3], BLOCK);
}

#[test]
fn a_rail_is_measured_by_itself() {
    let state = State::of(&[BLOCKS * BLOCK], 3);
    let rig = serving(Some(1), &[1, 2], &state);
    let remote = Remote::open(&[&rig.url()], STEP, options()).unwrap();
    assert_eq!(remote.rails(), rails(&[1, 2]));
    let rate = remote.measure(loopback(1), Duration::from_millis(50)).unwrap();
    assert!(rate.bytes > 0 && rate.here.is_loopback(), "{rate:?}");
    assert_eq!(remote.measure(loopback(2), Duration::from_millis(50)).unwrap_err().kind(), ErrorKind::Connect);
}

#[test]
fn a_rail_is_measured_for_as_long_as_one_likes() {
    let rig = serving(Some(1), &[1], &State::of(&[BLOCK], 3));
    let options = options();
    let cancel = options.cancel.clone();
    let remote = Remote::open(&[&rig.url()], STEP, options).unwrap();
    cancel.cancel();
    assert_eq!(remote.measure(loopback(1), Duration::MAX).unwrap_err().kind(), ErrorKind::Cancelled);
}

#[test]
fn a_server_listens_on_the_addresses_that_are_named_and_on_no_other() {
    let rig = Rig::configured(&ServerConfig {
        bind: Some(loopback(1)),
        also: vec![loopback(2)],
        ports: port_at_every_address(),
        metrics_ports: Some(0..=0),
        ..ServerConfig::default()
    });
    let metrics = rig.server.metrics_url("h").unwrap();
    let metrics: u16 = metrics.trim_start_matches("http://h:").split('/').next().unwrap().parse().unwrap();
    for port in [rig.server.address().port(), metrics] {
        let reached = |last| TcpStream::connect((loopback(last), port)).is_ok();
        assert_eq!([1, 2, 3].map(reached), [true, true, false]);
    }
}

#[test]
fn a_rail_that_breaks_off_is_left_alone_by_the_next_receive_too() {
    let state = State::of(&[BLOCKS * BLOCK], 3);
    let rig = serving(Some(1), &[1, 2], &state);
    let silent = impostor(&rig, 2, None);
    let options = || FetchOptions { stall: Duration::from_secs(1), lanes: Some(2), ..options() };
    let receive = || state.fetch(&[&rig.url()], options()).unwrap().report().clone();
    receive_until_tried(&silent, receive);
    let before = silent.connections();
    // A receive of some milliseconds.
    receive();
    assert_eq!(silent.connections(), before);
}
