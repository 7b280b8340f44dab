//! The way around the network: taken when it can be, left without fuss when it cannot, and as strict as the network.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on should panic")]

mod common;

use std::io::{Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};

use common::faults::{ALWAYS, Fault, Proxy};
use common::raw::get;
use common::{BLOCK, PATIENCE, Rig, STEP, State, eventually, noise};
use tensorferry_core::{
    Destination, FetchOptions, Item, Memory, Publication, Remote, ServerConfig, Stability, Withdrawn,
};
use tensorferry_wire::dtype::Dtype;

const HEADER: &str = "tensorferry-same-host";
/// More than the socket's buffers hold.
const LARGE: usize = 32 * BLOCK;

fn wanted() -> FetchOptions {
    FetchOptions { same_host: true, ..FetchOptions::within(PATIENCE) }
}

fn rig() -> Rig {
    Rig::configured(&ServerConfig { patience: PATIENCE, same_host: true, ..ServerConfig::default() })
}

fn serving(state: &State) -> Rig {
    let rig = rig();
    rig.server.store().publish(STEP, state.publication(Stability::Private));
    rig
}

fn state() -> State {
    State::of(&[5 * BLOCK + 3, 700, 2 * BLOCK], 1)
}

/// The socket of `rig` for this machine.
fn connect(rig: &Rig) -> UnixStream {
    let told = get(rig, &rig.path(&format!("{STEP}/header")), &[]);
    let address = SocketAddr::from_abstract_name(told.header(HEADER).unwrap()).unwrap();
    let stream = UnixStream::connect_addr(&address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

#[test]
fn bytes_go_around_the_network_and_are_verified() {
    let (state, rig) = (state(), rig());
    for (stability, lanes) in [(Stability::Private, None), (Stability::Borrowed, Some(3))] {
        rig.server.store().publish(STEP, state.publication(stability));
        let arrived = state.fetch(&[&rig.url()], FetchOptions { lanes, ..wanted() }).unwrap();
        assert!(arrived.report().same_host);
        assert_eq!((arrived.report().retries, arrived.report().lanes), (0, lanes.unwrap_or(arrived.report().lanes)));
    }
}

#[test]
fn either_side_can_turn_it_off() {
    let state = state();
    let rig = serving(&state);
    let options = FetchOptions { same_host: false, ..wanted() };
    assert!(!state.fetch(&[&rig.url()], options).unwrap().report().same_host);

    let rig = Rig::configured(&ServerConfig::default());
    rig.server.store().publish(STEP, state.publication(Stability::Private));
    assert!(!state.fetch(&[&rig.url()], wanted()).unwrap().report().same_host);
    assert_eq!(get(&rig, &rig.path(&format!("{STEP}/header")), &[]).header(HEADER), None);
}

#[test]
fn only_who_may_fetch_learns_the_name() {
    let rig = serving(&state());
    for path in ["/healthz", "/0/checkpoint/7/header", &rig.path("8/header"), &rig.path("nothing")] {
        assert_eq!(get(&rig, path, &[]).header(HEADER), None, "{path}");
    }
    assert!(get(&rig, &rig.path(&format!("{STEP}/header")), &[]).header(HEADER).is_some());
}

#[test]
fn a_name_nobody_answers_to_is_no_trouble() {
    let state = state();
    let rig = serving(&state);
    let proxy = Proxy::new(&rig.url(), Fault::None, ALWAYS);
    let arrived = state.fetch(&[proxy.url()], wanted()).unwrap();
    assert!(!arrived.report().same_host);
    assert_eq!(arrived.report().retries, 0);
}

#[test]
fn requests_need_the_token_here_too() {
    let rig = serving(&state());
    let mut stream = connect(&rig);
    stream.write_all(b"GET /checkpoint/7.safetensors HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 404"), "{answer}");
}

#[test]
fn a_snapshot_that_was_replaced_is_noticed_here_too() {
    // The name was learned with the old snapshot.
    let (old, new) = (State::of(&[LARGE], 1), State::of(&[LARGE], 2));
    let rig = rig();
    rig.server.store().publish(STEP, old.publication(Stability::Borrowed));
    let remote = Remote::open(&[&rig.url()], STEP, wanted()).unwrap();
    rig.server.store().withdraw(PATIENCE);
    rig.server.store().publish(STEP, new.publication(Stability::Private));
    let refused = remote.fetch(Destination::Fresh).unwrap_err();
    assert_eq!(refused.kind(), tensorferry_core::ErrorKind::Changed, "{refused}");
}

#[test]
fn withdrawn_memory_is_not_read_once_more() {
    const POISON: u8 = 0xA5;
    let expected = noise(LARGE, 3);
    let mut memory = expected.clone();
    let rig = rig();
    // SAFETY: `memory` outlives the rig, which is declared after it.
    let lent = unsafe { Memory::borrowed(memory.as_mut_ptr() as usize, LARGE) };
    let item = Item::new("w", Dtype::U8, &[LARGE as u64], lent);
    let publication = Publication::new(Vec::new(), vec![item], Stability::Borrowed, Box::new(())).unwrap();
    rig.server.store().publish(STEP, publication);
    let mut reader = connect(&rig);
    let path = rig.path(&format!("{STEP}.safetensors"));
    reader.write_all(format!("GET {path} HTTP/1.1\r\nHost: test\r\n\r\n").as_bytes()).unwrap();
    eventually("the answer is on its way", || rig.server.store().active() == 1);
    assert_eq!(rig.server.store().withdraw(std::time::Duration::from_millis(200)), Withdrawn::Cut(1));
    memory.fill(POISON);
    let mut answer = Vec::new();
    let _ = reader.read_to_end(&mut answer);
    let body = answer.windows(4).position(|w| w == b"\r\n\r\n").unwrap() + 4;
    let header = usize::try_from(u64::from_le_bytes(answer[body..body + 8].try_into().unwrap())).unwrap() + 8;
    let payload = &answer[body + header..];
    assert!(!payload.is_empty() && payload.len() < LARGE, "{} bytes came", payload.len());
    assert!(payload == &expected[..payload.len()], "bytes written after the withdrawal came");
}
