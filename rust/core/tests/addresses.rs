//! Receives from a source with several addresses, of which some let connections be made and are silent.

use std::io::Write;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use tensorferry_core::{ErrorKind, FetchOptions, Rail, Remote, Secret, ServerConfig, Stability};

use crate::common::faults::{ALWAYS, Fault, Liar, Proxy};
use crate::common::{BLOCK, Rig, STEP, State, eventually, loopback, port_at_every_address};

/// Far longer than any of these receives takes.
const DEADLINE: Duration = Duration::from_mins(1);
/// A receive that waits for a silent address as long as for its only one is not over in this time.
const SOON: Duration = Duration::from_secs(20);

/// Listens at address `bind` alone; the URL prefers `card`, has 127.0.0.1 as host, and names 127.0.0.1 to 127.0.0.4.
fn source(bind: u8, card: u8, config: ServerConfig) -> Rig {
    let rails = (1..=4).map(|last| Rail { address: loopback(last), mbit: 0 }).collect();
    let ports = port_at_every_address();
    Rig::configured(&ServerConfig { bind: Some(loopback(bind)), card: Some(loopback(card)), rails, ports, ..config })
}

fn publish(rig: &Rig, state: &State) {
    rig.server.store().publish(STEP, state.publication(Stability::Private));
}

fn options() -> FetchOptions {
    FetchOptions { same_host: false, stall: DEADLINE, ..FetchOptions::within(DEADLINE) }
}

/// A proxy that lets connections be made, and passes no answer on.
fn silent(last: u8, rig: &Rig) -> Proxy {
    Proxy::at(last, rig, Fault::Stall(0), ALWAYS)
}

/// A proxy that is silent once it is armed.
fn open(last: u8, rig: &Rig) -> Proxy {
    Proxy::at(last, rig, Fault::Stall(0), 0)
}

/// Answers every request with `answer`, as another program would.
fn impostor(last: u8, rig: &Rig, answer: &'static str) -> Liar {
    Liar::at((loopback(last), rig.server.address().port()), |mut stream, _, _| stream.write_all(answer.as_bytes()))
}

/// Receives `state`, and says over which addresses it came.
fn receive(state: &State, url: &str, options: FetchOptions) -> Vec<u8> {
    let began = Instant::now();
    let report = state.fetch(&[url], options).unwrap().report().clone();
    assert!(began.elapsed() < SOON, "{:?}", began.elapsed());
    let last = |address: &IpAddr| address.to_string().rsplit('.').next().unwrap().parse().unwrap();
    report.routes.iter().map(|(_, there)| last(there)).collect()
}

#[test]
fn a_receive_begins_by_another_address_where_host_and_preferred_card_are_silent() {
    // All in one answer, by a few lanes, and with lanes to each address.
    for blocks in [1, 12, 32] {
        let state = State::of(&[blocks * BLOCK / 2], 3);
        let rig = source(4, 2, ServerConfig::default());
        publish(&rig, &state);
        let silent = [1, 2, 3].map(|last| silent(last, &rig));
        let by = receive(&state, &rig.url(), options());
        assert!(by.contains(&4), "{by:?}");
        assert!(silent.iter().all(|gateway| gateway.connections() > 0), "an address was not tried");
    }
}

#[test]
fn so_it_is_with_tls_and_a_secret() {
    let state = State::of(&[12 * BLOCK], 3);
    let secret = Secret::new(b"a secret of this test").unwrap();
    let rig = source(4, 2, ServerConfig { tls: true, secret: Some(secret.clone()), ..ServerConfig::default() });
    publish(&rig, &state);
    let _silent = [1, 2].map(|last| silent(last, &rig));
    // Another server, with another certificate.
    let port = rig.server.address().port();
    let other = ServerConfig { tls: true, bind: Some(loopback(3)), ports: port..=port, ..ServerConfig::default() };
    let other = Rig::configured(&other);
    publish(&other, &State::of(&[12 * BLOCK], 4));
    let by = receive(&state, &rig.url(), FetchOptions { secret: Some(secret), ..options() });
    assert_eq!(by, [4]);
}

#[test]
fn what_another_program_answers_at_is_given_up_and_the_next_address_is_asked() {
    let state = State::of(&[12 * BLOCK], 3);
    for answer in ["HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", "220 ready\r\n"] {
        let rig = source(4, 2, ServerConfig::default());
        publish(&rig, &state);
        let silent = silent(1, &rig);
        let _impostors = [2, 3].map(|last| impostor(last, &rig, answer));
        assert_eq!(receive(&state, &rig.url(), options()), [4], "{answer:?}");
        assert!(silent.connections() > 0);
    }
}

#[test]
fn a_healthy_first_address_is_the_only_one_that_a_small_receive_connects_to() {
    let state = State::of(&[12 * BLOCK], 3);
    let rig = source(2, 2, ServerConfig::default());
    publish(&rig, &state);
    let others = [1, 3, 4].map(|last| open(last, &rig));
    assert_eq!(receive(&state, &rig.url(), options()), [2]);
    assert_eq!(others.map(|gateway| gateway.connections()), [0, 0, 0]);
}

#[test]
fn a_source_that_has_nothing_yet_is_waited_for_at_the_address_where_it_is() {
    let state = State::of(&[BLOCK], 3);
    let rig = source(4, 2, ServerConfig::default());
    let gateways = [silent(2, &rig), open(1, &rig), open(3, &rig)];
    let url = rig.url();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| receive(&state, &url, options()));
        // The request that is kept waiting, the counters that say why, and the request again.
        eventually("the address where the source is was not asked again", || gateways[1].connections() >= 3);
        std::thread::sleep(Duration::from_secs(2));
        publish(&rig, &state);
        assert_eq!(waiting.join().unwrap(), [1]);
    });
    assert_eq!(gateways[1].connections(), 3, "an answer was waited for impatiently");
    assert_eq!(gateways[2].connections(), 0);
}

#[test]
fn a_refusal_counts_though_the_host_is_silent() {
    let state = State::of(&[BLOCK], 3);
    let rig = source(4, 4, ServerConfig::default());
    publish(&rig, &state);
    let _silent = [1, 2, 3].map(|last| silent(last, &rig));
    let began = Instant::now();
    let refused = Remote::open(&[&rig.url()], STEP - 1, options()).map(drop).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Status(400), "{refused}");
    assert!(began.elapsed() < SOON);
}

#[test]
fn an_address_that_falls_silent_after_the_opening_is_done_without() {
    // By a few lanes, and with lanes to each address.
    for blocks in [8, 32] {
        let state = State::of(&[blocks * BLOCK], 3);
        let rig = source(4, 2, ServerConfig::default());
        publish(&rig, &state);
        let preferred = open(2, &rig);
        let _silent = [1, 3].map(|last| silent(last, &rig));
        let began = Instant::now();
        let remote = Remote::open(&[&rig.url()], STEP, options()).unwrap();
        assert!(preferred.connections() > 0);
        preferred.arm(ALWAYS);
        state.fetch_from(remote).unwrap();
        assert!(began.elapsed() < SOON, "{:?}", began.elapsed());
    }
}

#[test]
fn the_digests_at_the_end_come_by_another_address_where_the_first_falls_silent() {
    let state = State::of(&[8 * BLOCK], 3);
    let rig = source(4, 2, ServerConfig::default());
    publish(&rig, &state);
    let preferred = open(2, &rig);
    let _silent = [1, 3].map(|last| silent(last, &rig));
    let remote = Remote::open(&[&rig.url()], STEP, options()).unwrap();
    preferred.arm(ALWAYS);
    let began = Instant::now();
    assert!(remote.entry_digests().unwrap().is_some());
    assert!(began.elapsed() < SOON, "{:?}", began.elapsed());
}
