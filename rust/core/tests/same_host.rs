//! Transfers through shared memory: used where possible, replaced by the network without error where not, and as
//! strict as the network.

use std::io::{Read, Write};
use std::time::{Duration, Instant};

use crate::common::faults::{ALWAYS, Fault, Proxy, asked_range};
use crate::common::local::{
    FakeSource, LocalReader, NAME_HEADER, answer_from_ring, greet, name_of, read_request, shared_memory,
};
use crate::common::raw::{connections, get};
use crate::common::{BLOCK, PATIENCE, Rig, STEP, State, eventually, lanes, noise};
use tensorferry_core::{FetchOptions, Item, Memory, Publication, Report, Server, ServerConfig, Stability, Withdrawn};
use tensorferry_wire::dtype::Dtype;

/// More bytes than the shared memory holds.
const LARGE: usize = 32 * BLOCK;

fn state() -> State {
    State::of(&[15 * BLOCK + 3, 700, 2 * BLOCK], 1)
}

#[test]
fn bytes_go_around_the_network_and_are_verified() {
    let rig = Rig::new();
    let many: Vec<_> = (0..20_000).map(|i| i * 7 % 2111).collect();
    for (state, stability, lanes) in [
        (state(), Stability::Private, None),
        (state(), Stability::Borrowed, Some(3)),
        (State::of(&[LARGE, 1], 9), Stability::Borrowed, Some(1)),
        (State::of(&many, 4), Stability::Private, None),
    ] {
        rig.server.store().publish(STEP, state.publication(stability));
        let options = FetchOptions { lanes, ..FetchOptions::within(PATIENCE) };
        let arrived = state.fetch(&[&rig.url()], options).unwrap();
        assert!(arrived.report().same_host);
        assert!(arrived.report().routes.is_empty());
        assert_eq!((arrived.report().retries, arrived.report().lanes), (0, lanes.unwrap_or(arrived.report().lanes)));
    }
}

#[test]
fn little_is_not_worth_the_memory() {
    let here = std::net::IpAddr::from([127, 0, 0, 1]);
    // The last state is small enough to come with its header, on the first connection.
    for (size, count) in [(8 * BLOCK, 2), (BLOCK / 2, 1)] {
        let state = State::of(&[size], 1);
        let rig = Rig::serving(&state);
        let arrived = state.fetch(&[&rig.url()], lanes(2)).unwrap();
        let report = arrived.report();
        assert!(!report.same_host);
        assert_eq!((report.lanes, &report.routes), (count, &[(here, here)].into()));
    }
}

#[test]
fn only_who_may_fetch_learns_the_name() {
    let rig = Rig::serving(&state());
    for path in ["/healthz", "/0/checkpoint/7/header", &rig.path("8/header"), &rig.path("nothing")] {
        assert_eq!(get(&rig, path, &[]).header(NAME_HEADER), None, "{path}");
    }
    name_of(&rig);
}

#[test]
fn requests_need_the_token_here_too() {
    let rig = Rig::serving(&state());
    let mut reader = LocalReader::connect(&name_of(&rig));
    reader.request("/checkpoint/7.safetensors");
    let head = reader.head();
    assert!(head.starts_with("HTTP/1.1 404"), "{head}");
}

/// What a source on this machine may do wrong, and whether the receiver detects it only after accepting the answer, so
/// that it has to fetch the range again.
fn offences(total: usize) -> Vec<(&'static str, FakeSource, bool)> {
    let slot = 1 << 16;
    let good = move || shared_memory(4 << 16, true);
    // Answers with so many marks, or with one for each slot of the range.
    let answering = move |marks: Option<usize>| {
        FakeSource::new(move |stream| {
            greet(&stream, 4, slot, Some(&good()));
            while let Some(request) = read_request(&stream) {
                let Some((start, end)) = asked_range(&request) else { return };
                let marks = vec![1; marks.unwrap_or((end - start).div_ceil(1 << 16))];
                if answer_from_ring(&stream, &request, total, &marks).is_none() {
                    return;
                }
            }
        })
    };
    vec![
        ("hangs up", FakeSource::new(drop), false),
        ("says nothing", FakeSource::new(|stream| drop(read_request(&stream))), false),
        ("passes no memory", FakeSource::new(move |s| greet(&s, 4, slot, None)), false),
        ("is something else", FakeSource::new(|mut s| drop(s.write_all(b"HTTP/1.1 200 OK\r\n\r\n"))), false),
        (
            "passes memory that can shrink",
            FakeSource::new(move |s| greet(&s, 4, slot, Some(&shared_memory(4 << 16, false)))),
            false,
        ),
        ("passes less than it says", FakeSource::new(move |s| greet(&s, 5, slot, Some(&good()))), false),
        ("has no slots", FakeSource::new(move |s| greet(&s, 0, slot, Some(&good()))), false),
        ("has slots without end", FakeSource::new(move |s| greet(&s, u32::MAX, u32::MAX, Some(&good()))), false),
        ("leaves after the greeting", FakeSource::new(move |s| greet(&s, 4, slot, Some(&good()))), true),
        ("announces nothing", answering(Some(0)), true),
        ("announces more than it has", answering(Some(4096)), true),
        ("has wrong bytes in all of its slots", answering(None), true),
    ]
}

#[test]
fn a_source_that_breaks_the_rules_is_left_for_the_network() {
    let state = state();
    let rig = Rig::serving(&state);
    let total = state.publication(Stability::Private).total_len();
    for (offence, fake, begun) in offences(usize::try_from(total).unwrap()) {
        let proxy = Proxy::naming(&rig.url(), Fault::None, ALWAYS, &fake.name);
        // A busy machine makes stalls of its own, and what is to be noticed before any must not look like one.
        let stall = if begun { Duration::from_millis(300) } else { Duration::from_secs(2) };
        let options = FetchOptions { stall, ..lanes(2) };
        let arrived = state.fetch(&[proxy.url()], options).unwrap_or_else(|e| panic!("{offence}: {e}"));
        assert!(fake.calls.load(std::sync::atomic::Ordering::SeqCst) > 0, "{offence}: nobody asked it");
        assert_eq!(arrived.report().same_host, begun, "{offence}");
        assert_eq!(arrived.report().retries > 0, begun, "{offence}");
    }
}

#[test]
fn withdrawn_memory_is_not_read_once_more() {
    const POISON: u8 = 0xA5;
    let expected = noise(LARGE, 3);
    let mut memory = expected.clone();
    let rig = Rig::new();
    // SAFETY: `memory` outlives the rig, which is declared after it.
    let lent = unsafe { Memory::borrowed(memory.as_mut_ptr() as usize, LARGE) };
    let item = Item::new("w", Dtype::U8, &[LARGE as u64], lent);
    let publication = Publication::new(Vec::new(), vec![item], Stability::Borrowed, Box::new(())).unwrap();
    rig.server.store().publish(STEP, publication);
    let mut reader = LocalReader::reading(&rig, "7.safetensors");
    reader.await_all_slots();
    let before = reader.content();
    assert_eq!(rig.server.store().active(), 1);
    assert_eq!(rig.server.store().withdraw(Duration::from_millis(200)), Withdrawn::Cut(1));
    memory.fill(POISON);
    // With one free slot the source could copy once more.
    let _ = reader.stream.write_all(&[1]);
    let mut more = Vec::new();
    let _ = reader.stream.read_to_end(&mut more);
    assert!(more.is_empty(), "{} slots were announced after the withdrawal", more.len());
    let after = reader.content();
    assert!(after == before, "the shared memory changed after the withdrawal");
    let header = usize::try_from(u64::from_le_bytes(*after.first_chunk().unwrap())).unwrap() + 8;
    assert!(after[header..] == expected[..after.len() - header]);
}

#[test]
fn the_memory_keeps_its_size_and_nobody_but_the_source_can_write_to_it() {
    use rustix::mm::{MapFlags, ProtFlags};
    use std::os::unix::fs::FileExt;

    let rig = Rig::serving(&state());
    let reader = LocalReader::connect(&name_of(&rig));
    let again = std::fs::File::options().read(true).write(true).open(reader.path()).unwrap();
    for memory in [&reader.memory, &again] {
        let map = |protection| {
            // SAFETY: a new mapping, at no address in particular.
            unsafe { rustix::mm::mmap(std::ptr::null_mut(), 4096, protection, MapFlags::SHARED, memory, 0) }
        };
        assert!(map(ProtFlags::READ).is_ok());
        assert!(map(ProtFlags::READ | ProtFlags::WRITE).is_err(), "mapped for writing");
        assert!(memory.write_at(&[1], 0).is_err(), "written");
        let len = reader.content().len() as u64;
        assert!([len / 2, len * 2].map(|len| memory.set_len(len)).iter().all(Result::is_err));
    }
}

#[test]
fn a_receiver_that_reads_no_message_is_let_go() {
    // The header of these states is longer than a socket's buffer.
    let state = State::of(&vec![1; 20_000], 1);
    let rig = Rig::with_patience(Duration::from_millis(300)).publishing(state.publication(Stability::Private));
    let _reader = LocalReader::reading(&rig, "7/header");
    eventually("its thread has ended", || connections(&rig) == 1);
}

#[test]
fn a_receiver_that_takes_nothing_is_let_go() {
    let rig = Rig::with_patience(Duration::from_millis(300));
    let state = State::of(&[LARGE], 1);
    rig.server.store().publish(STEP, state.publication(Stability::Borrowed));
    let mut reader = LocalReader::reading(&rig, "7.safetensors");
    reader.await_all_slots();
    eventually("its lease is over", || rig.server.store().active() == 0);
    assert_eq!(reader.stream.read(&mut [0]).unwrap(), 0);
    state.fetch(&[&rig.url()], lanes(2)).unwrap();
}

#[test]
fn a_receiver_that_breaks_the_rules_is_let_go() {
    let state = state();
    let rig = Rig::serving(&state);
    let name = name_of(&rig);
    let endless = format!("GET / HTTP/1.1\r\nX: {}", "x".repeat(32 << 10));
    let twice = "GET /healthz HTTP/1.1\r\n\r\nGET /healthz HTTP/1.1\r\n\r\n";
    for bytes in ["\u{1}\u{1}\u{1}\u{1}", "garbage\r\n\r\n", twice, &endless] {
        let mut reader = LocalReader::connect(&name);
        // The server may hang up before it has read everything.
        let _ = reader.stream.write_all(bytes.as_bytes());
        let mut answer = Vec::new();
        let _ = reader.stream.read_to_end(&mut answer);
        assert!(answer.is_empty(), "{}", String::from_utf8_lossy(&answer));
    }
    assert!(state.fetch(&[&rig.url()], lanes(2)).unwrap().report().same_host);
}

#[test]
fn receivers_above_the_limit_take_the_network() {
    let state = state();
    let rig = Rig::serving(&state);
    // Idle connections would be closed to make room: these are in the middle of an answer.
    let held: Vec<_> = std::iter::repeat_with(|| {
        let mut reader = LocalReader::reading(&rig, "7.safetensors");
        reader.await_all_slots();
        reader
    })
    .take(32)
    .collect();
    let around = |report: &Report| report.same_host && report.retries == 0;
    assert!(!around(state.fetch(&[&rig.url()], lanes(2)).unwrap().report()));
    drop(held);
    eventually("the places are free again", || around(state.fetch(&[&rig.url()], lanes(2)).unwrap().report()));
}

#[test]
fn the_cap_on_bandwidth_holds_and_a_withdrawal_does_not_wait_for_it() {
    let patience = PATIENCE;
    let rig = Rig::configured(&ServerConfig { patience, max_bandwidth: Some(16 << 20), ..ServerConfig::default() });
    let state = State::of(&[LARGE], 1);
    rig.server.store().publish(STEP, state.publication(Stability::Borrowed));
    let started = std::time::Instant::now();
    assert!(state.fetch(&[&rig.url()], lanes(2)).unwrap().report().same_host);
    assert!(started.elapsed() >= Duration::from_secs(1), "{:?}", started.elapsed());
    // A receive that gets a slot now and then does not count as stalled.
    let options = FetchOptions { stall: Duration::from_secs(1), ..lanes(1) };
    assert_eq!(state.fetch(&[&rig.url()], options).unwrap().report().retries, 0);

    let _reader = LocalReader::reading(&rig, "7.safetensors");
    assert_eq!(rig.server.store().withdraw(Duration::from_millis(1)), Withdrawn::Cut(1));
}

#[test]
fn a_cap_of_less_than_a_slot_for_each_turn_damages_nothing() {
    let rig = Rig::configured(&ServerConfig { max_bandwidth: Some(10 << 20), ..ServerConfig::default() });
    let state = State::of(&[17 * BLOCK], 1);
    rig.server.store().publish(STEP, state.publication(Stability::Borrowed));
    let report = state.fetch(&[&rig.url()], lanes(2)).unwrap().report().clone();
    assert!(report.same_host);
    assert_eq!((report.retries, report.bytes), (0, 17 * BLOCK as u64), "{report:?}");
}

#[test]
fn a_server_whose_runtime_is_gone_does_not_wait_for_receivers() {
    // As when a process exits: its runtime ends before its objects do.
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let config = ServerConfig { patience: Duration::from_mins(5), ..ServerConfig::default() };
    let server = Server::bind(&config, runtime.handle()).unwrap();
    let rig = Rig { server, runtime };
    // One stands still in the middle of a body in memory, the other one in that of a text longer than a socket's buffer.
    let state = State::of(&[vec![LARGE], vec![1; 20_000]].concat(), 1);
    rig.server.store().publish(STEP, state.publication(Stability::Borrowed));
    let _stopped = ["7.safetensors", "7/header"].map(|tail| LocalReader::reading(&rig, tail));
    let Rig { server, runtime } = rig;
    let (done, ended) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        runtime.shutdown_timeout(Duration::from_secs(1));
        drop(server);
        done.send(()).unwrap();
    });
    ended.recv_timeout(PATIENCE).expect("it waits for a receiver that takes nothing");
}

#[test]
fn a_receiver_that_stops_asking_is_let_go_and_so_is_one_that_drips() {
    let rig = Rig::with_patience(Duration::from_millis(300)).publishing(state().publication(Stability::Private));
    let name = name_of(&rig);
    let path = rig.path(&format!("{STEP}/header"));
    // Both have shown that they may make requests, so they no longer count as newcomers.
    let [mut silent, mut dripping] = [(), ()].map(|()| {
        let mut reader = LocalReader::connect(&name);
        reader.request(&path);
        let head = reader.head();
        assert!(head.starts_with("HTTP/1.1 200"));
        reader.message(&head);
        reader
    });
    // The server gives the next request at least five seconds.
    let started = Instant::now();
    let mut head = b"GET / HTTP/1.1\r\nX: ".iter().chain(std::iter::repeat(&b'x'));
    while started.elapsed() < PATIENCE && dripping.stream.write_all(&[*head.next().unwrap()]).is_ok() {
        std::thread::sleep(Duration::from_millis(200));
    }
    let took = started.elapsed();
    assert!((Duration::from_secs(4)..Duration::from_secs(12)).contains(&took), "{took:?}");
    silent.stream.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
    assert_eq!(silent.stream.read(&mut [0]).unwrap(), 0, "one that is silent keeps its thread");
    eventually("their threads have ended", || connections(&rig) == 1);
}
