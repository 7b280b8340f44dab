//! TLS: the same bytes arrive, encrypted; another certificate is refused, and clients without TLS harm no others.

use crate::common::faults::{ALWAYS, Fault, Proxy};
use std::io::Write;
use std::net::Shutdown;
use std::time::{Duration, Instant};

use crate::common::raw::Raw;
use crate::common::{BLOCK, PATIENCE, Rig, STEP, State, local};
use tensorferry_core::{Destination, Error, ErrorKind, FetchOptions, Remote, Secret, ServerConfig, Stability};

fn config() -> ServerConfig {
    ServerConfig { tls: true, same_host: true, ..local() }
}

fn serving(state: &State) -> Rig {
    Rig::configured(&config()).publishing(state.publication(Stability::Private))
}

fn options() -> FetchOptions {
    FetchOptions { same_host: false, ..FetchOptions::within(PATIENCE) }
}

fn quick(timeout: Duration) -> FetchOptions {
    FetchOptions { same_host: false, stall: Duration::from_millis(500), ..FetchOptions::within(timeout) }
}

fn state() -> State {
    State::of(&[5 * BLOCK + 3, 700, 2 * BLOCK], 1)
}

fn fetch(url: &str, options: FetchOptions) -> Result<(), Error> {
    Remote::open(&[url], STEP, options)?.fetch(Destination::Fresh).map(drop)
}

/// The error of a receive from `url`, which must fail long before its deadline.
fn refused_at_once(url: &str) -> Error {
    let started = Instant::now();
    let refused = fetch(url, options()).unwrap_err();
    assert!(started.elapsed() < PATIENCE / 2, "{refused}");
    refused
}

#[test]
fn every_byte_arrives() {
    let state = state();
    let secret = Secret::new(b"sixteen bytes or more").unwrap();
    for secret in [None, Some(secret)] {
        let config = ServerConfig { secret: secret.clone(), ..config() };
        let (rig, second) = (Rig::configured(&config), Rig::configured(&config));
        assert!(rig.url().starts_with("https://sha256-"));
        second.server.store().publish(STEP, state.publication(Stability::Private));
        for stability in [Stability::Private, Stability::Borrowed] {
            rig.server.store().publish(STEP, state.publication(stability));
            for lanes in [None, Some(1), Some(3)] {
                let options = FetchOptions { lanes, secret: secret.clone(), ..options() };
                assert_eq!(state.fetch(&[&rig.url()], options.clone()).unwrap().report().retries, 0);
                let both = state.fetch(&[&rig.url(), &second.url()], options).unwrap();
                assert_eq!(both.report().troubles.len(), 0, "{:?}", both.report().troubles);
            }
        }
        // Many small entries: the receive writes to many places.
        let many = State::of(&vec![1500; 3000], 5);
        rig.server.store().publish(STEP, many.publication(Stability::Private));
        many.fetch(&[&rig.url()], FetchOptions { secret: secret.clone(), ..options() }).unwrap();
    }
}

#[test]
fn a_plain_and_a_secured_source_serve_one_receive() {
    let state = State::of(&[24 * BLOCK], 1);
    let (plain, secured) = (Rig::serving(&state), serving(&state));
    for urls in [[plain.url(), secured.url()], [secured.url(), plain.url()]] {
        let arrived = state.fetch(&[&urls[0], &urls[1]], options()).unwrap();
        assert_eq!(arrived.report().troubles.len(), 0);
    }
}

#[test]
fn another_certificate_is_refused_and_named() {
    let state = state();
    let (rig, other) = (serving(&state), serving(&state));
    let pin = |url: &str| url.split('@').next().unwrap().to_owned();
    let url = rig.url().replace(&pin(&rig.url()), &pin(&other.url()));
    let refused = refused_at_once(&url);
    assert_eq!(refused.kind(), ErrorKind::Unproven, "{refused}");
    assert!(refused.to_string().contains(&format!("has the fingerprint {}", &pin(&rig.url())[8..])), "{refused}");
    assert!(refused.to_string().contains(&pin(&other.url())[8..]), "{refused}");
    // The receiver leaves a man in the middle, who has another certificate, and fetches from the source itself.
    state.fetch(&[&url, &rig.url()], options()).unwrap();
    assert_eq!(rig.server.store().active(), 0);
}

#[test]
fn who_speaks_plainly_to_it_fails_at_once_and_harms_nobody() {
    let state = state();
    let rig = serving(&state);
    let plain = format!("http://{}", rig.url().split('@').nth(1).unwrap());
    let refused = refused_at_once(&plain);
    assert_eq!(refused.kind(), ErrorKind::Protocol, "{refused}");
    assert!(refused.to_string().contains("speaks TLS"), "{refused}");
    for bytes in [&b"GET /healthz HTTP/1.1\r\nHost: t\r\n\r\n"[..], b"\0\0\0\0\0\0", b"\x16\x03\x01\xff\xff\x01"] {
        let mut raw = Raw::to(&rig);
        raw.stream.write_all(bytes).unwrap();
        raw.stream.shutdown(Shutdown::Write).unwrap();
        assert!(!raw.rest().starts_with(b"HTTP"));
    }
    state.fetch(&[&rig.url()], options()).unwrap();
}

#[test]
fn the_deadline_holds_in_the_handshake_and_after_it() {
    const SHORT: Duration = Duration::from_millis(1500);
    let state = State::of(&[12 * BLOCK], 1);
    let rig = serving(&state);
    // At one byte a millisecond a record takes sixteen seconds, although no single read of the socket waits long.
    for fault in [Fault::Stall(0), Fault::Stall(200), Fault::Stall(2 * BLOCK), Fault::Drip(1)] {
        for stall in [Duration::from_millis(500), Duration::from_mins(1)] {
            let proxy = Proxy::new(&rig.url(), fault, ALWAYS);
            let started = Instant::now();
            let failed = fetch(proxy.url(), FetchOptions { stall, ..quick(SHORT) }).unwrap_err();
            assert!(started.elapsed() < SHORT + Duration::from_secs(1), "{fault:?}: {:?}", started.elapsed());
            assert_eq!(failed.kind(), ErrorKind::Timeout, "{fault:?}: {failed}");
            assert!(failed.to_string().contains("timed out"), "{failed}");
        }
    }
}
