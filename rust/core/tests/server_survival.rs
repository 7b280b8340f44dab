//! Bad clients: whatever they do, good receivers are served, and the server shuts down when it should.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::time::{Duration, Instant};

use crate::common::local::{LocalReader, name_of};
use crate::common::raw::{Raw, begin, connections, metrics};
use crate::common::{BLOCK, PATIENCE, Rig, STEP, State, eventually, lanes, noise};
use tensorferry_core::{FetchOptions, ServerConfig, Stability};

fn state() -> State {
    State::of(&[6 * BLOCK + 11], 1)
}

#[test]
fn garbage_is_refused_and_good_receivers_are_served_meanwhile() {
    let state = state();
    let rig = Rig::serving(&state);
    let mut held = Vec::new();
    let long_path = format!("GET /{} HTTP/1.1\r\nHost: t\r\n\r\n", "a".repeat(100_000));
    let many_headers = format!("GET / HTTP/1.1\r\n{}\r\n", "a: b\r\n".repeat(500));
    for garbage in [
        noise(10_000, 3),
        b"\0\0\0\0\r\n\r\n".to_vec(),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03".to_vec(),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec(),
        b"GET  HTTP/9.9\r\n\r\n".to_vec(),
        b"GET /healthz HTTP/1.1\r\nContent-Length: -1\r\n\r\n".to_vec(),
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzzz\r\n".to_vec(),
        long_path.into_bytes(),
        many_headers.into_bytes(),
    ] {
        let mut raw = Raw::to(&rig);
        // The server may close the connection before all of this is written.
        let _ = raw.stream.write_all(&garbage);
        held.push(raw);
        state.fetch(&[&rig.url()], lanes(2)).unwrap();
    }
    for raw in &mut held {
        raw.stream.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        let answer = String::from_utf8_lossy(raw.rest()).into_owned();
        assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 4"), "{answer}");
    }
}

#[test]
fn a_head_that_does_not_come_and_a_body_that_is_not_read_end_the_connection() {
    let state = State::of(&[32 * BLOCK], 1);
    // The server gives the head of a request at least five seconds.
    let rig = Rig::with_patience(Duration::from_millis(200)).publishing(state.publication(Stability::Private));
    let mut slow = Raw::to(&rig);
    slow.stream.write_all(b"GET /healthz HTTP/1.1\r\n").unwrap();
    let (mut stuck, _) = begin(&rig);
    eventually("the one who does not read is cut", || rig.server.store().active() == 0);
    assert!(stuck.rest().len() < 32 * BLOCK);
    slow.stream.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    eventually("the one who does not ask is cut", || slow.is_ended());
}

/// A server for `state` with at most `max_connections` connections.
fn crowded(state: &State, max_connections: usize, tls: bool) -> Rig {
    let bind = Some([127, 0, 0, 1].into());
    let rig =
        Rig::configured(&ServerConfig { max_connections, bind, tls, patience: PATIENCE, ..ServerConfig::default() });
    rig.server.store().publish(STEP, state.publication(Stability::Private));
    rig
}

/// Far less than the time after which the server closes an idle connection.
const AT_ONCE: Duration = Duration::from_secs(2);

#[test]
fn a_crowd_that_asks_for_nothing_delays_nobody() {
    let state = state();
    for tls in [false, true] {
        let rig = crowded(&state, 64, tls);
        let mut crowd: Vec<_> = (0..200)
            .map(|i| {
                let mut raw = Raw::to(&rig);
                // Bytes that any client may send, and that do not show knowledge of the token.
                match i % 4 {
                    0 => raw.stream.write_all(b"GET /checkp").unwrap(),
                    1 => raw.send("GET", "/healthz", &[]),
                    2 => raw.send("GET", "/no/such/path", &[]),
                    _ => {}
                }
                raw
            })
            .collect();
        let started = Instant::now();
        state.fetch(&[&rig.url()], FetchOptions { same_host: false, ..lanes(4) }).unwrap();
        assert!(started.elapsed() < AT_ONCE, "{:?}", started.elapsed());
        // The oldest connection was closed at once to make room, even during its handshake.
        crowd[3].stream.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
        assert!(crowd[3].is_ended(), "tls={tls}");
    }
}

#[test]
fn a_crowd_of_one_address_makes_room_for_itself_alone() {
    let rig = crowded(&state(), 16, false);
    let from = |address: [u8; 4]| {
        let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
        socket.bind(&std::net::SocketAddr::from((address, 0)).into()).unwrap();
        socket.connect(&rig.server.address().into()).unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        Raw { stream: socket.into(), buffer: Vec::new() }
    };
    // There are four places for connections that have proved nothing yet, and this one is the oldest.
    let mut slow = from([127, 0, 0, 2]);
    let mut crowd: Vec<_> = (0..3).map(|_| from([127, 0, 0, 3])).collect();
    std::thread::sleep(Duration::from_millis(300));
    crowd.extend((0..40).map(|_| from([127, 0, 0, 3])));
    assert!(crowd[..30].iter_mut().all(Raw::is_ended));
    slow.send("GET", &rig.path("7/header"), &[]);
    assert_eq!(slow.answer().status, 200);
}

#[test]
fn a_crowd_takes_nothing_from_who_is_being_answered() {
    let state = State::of(&[32 * BLOCK], 1);
    let rig = crowded(&state, 8, false);
    let (mut reading, length) = begin(&rig);
    // Far more requests than places: each takes the place of a connection whose answer is complete.
    let asking: Vec<_> = (0..20)
        .map(|_| {
            let mut raw = Raw::asking(&rig, "7/header");
            assert_eq!(raw.answer().status, 200);
            raw
        })
        .collect();
    let crowd: Vec<_> = (0..100).map(|_| Raw::to(&rig)).collect();
    std::thread::sleep(Duration::from_millis(500));
    reading.read_to(length);
    drop((crowd, asking));
}

#[test]
fn who_asks_waits_for_a_place_when_nobody_there_is_idle() {
    let rig = crowded(&state(), 2, false);
    rig.server.store().withdraw(Duration::ZERO);
    // There is one place for clients that may make requests, held by one that waits at the gate.
    let mut first = Raw::asking(&rig, "7.safetensors");
    eventually("the first one waits at the gate", || metrics(&rig).contains("\ntensorferry_waiting_requests 1\n"));
    let mut second = Raw::asking(&rig, "7/header");
    // No newcomer takes the place in which the second one waits.
    let newcomer = Raw::to(&rig);
    assert!(second.is_silent(), "answered or cut off");
    drop(newcomer);
    rig.server.store().publish(STEP, state().publication(Stability::Private));
    first.rest();
    drop(first);
    assert_eq!(second.answer().status, 200);
}

#[test]
fn who_does_not_ask_in_time_is_let_go_whatever_else_it_does() {
    for tls in [false, true] {
        let rig = crowded(&state(), 64, tls);
        let (mut idle, mut busy) = (Raw::to(&rig), Raw::to(&rig));
        let mut asked = (!tls).then(|| Raw::to(&rig));
        let mut header = || {
            if let Some(raw) = &mut asked {
                raw.send("GET", &rig.path("7/header"), &[]);
                assert_eq!(raw.answer().status, 200);
            }
        };
        let started = Instant::now();
        header();
        // The beginning of a handshake, byte by byte, or requests that do not show knowledge of the token.
        let mut hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03".iter().chain(std::iter::repeat(&0));
        let healthz = b"GET /healthz HTTP/1.1\r\nHost: t\r\n\r\n";
        while started.elapsed() < PATIENCE {
            let byte = [*hello.next().unwrap()];
            if busy.stream.write_all(if tls { &byte } else { healthz }).is_err() {
                break;
            }
            std::thread::sleep(Duration::from_millis(300));
        }
        let took = started.elapsed();
        assert!((Duration::from_secs(4)..Duration::from_secs(10)).contains(&took), "{took:?}");
        assert!(idle.is_ended());
        // A client whose request came in time keeps its connection.
        std::thread::sleep(Duration::from_millis(300));
        header();
    }
}

#[test]
fn a_crowd_on_the_local_socket_keeps_nobody_from_it() {
    let state = state();
    let rig = crowded(&state, 64, false);
    let name = name_of(&rig);
    let address = SocketAddr::from_abstract_name(&name).unwrap();
    let crowd: Vec<_> = (0..100).map(|_| UnixStream::connect_addr(&address).unwrap()).collect();
    let asking: Vec<_> = (0..50)
        .filter_map(|_| {
            let stream = UnixStream::connect_addr(&address).ok()?;
            (&stream).write_all(format!("GET {} HTTP/1.1\r\n\r\n", rig.path("7/header")).as_bytes()).ok()?;
            Some(stream)
        })
        .collect();
    let started = Instant::now();
    let mut reader = LocalReader::connect(&name);
    reader.request(&rig.path("7.safetensors"));
    assert!(reader.head().starts_with("HTTP/1.1 200 "));
    assert!(started.elapsed() < AT_ONCE, "{:?}", started.elapsed());
    // The crowd on the local socket does not keep receivers from the network either.
    state.fetch(&[&rig.url()], lanes(2)).unwrap();
    drop((crowd, asking));
}

#[test]
fn a_local_connection_that_says_nothing_is_given_nothing() {
    let rig = crowded(&state(), 64, false);
    let address = SocketAddr::from_abstract_name(name_of(&rig)).unwrap();
    let mut silent = UnixStream::connect_addr(&address).unwrap();
    silent.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
    let mut greeting = [0; 16];
    let nothing = silent.read(&mut greeting).unwrap_err();
    assert_eq!(nothing.kind(), std::io::ErrorKind::WouldBlock, "it got {greeting:?}");
    silent.write_all(b"\r\n").unwrap();
    silent.set_read_timeout(Some(PATIENCE)).unwrap();
    silent.read_exact(&mut greeting).unwrap();
    assert!(greeting.starts_with(b"tf-ring1"));
}

#[test]
fn shutting_down_ends_everything_and_closes_the_port() {
    let state = State::of(&[32 * BLOCK], 1);
    for stability in [Stability::Private, Stability::Borrowed] {
        let rig = Rig::new().publishing(state.publication(stability));
        let ((mut stuck, _), (mut retired, _)) = (begin(&rig), begin(&rig));
        rig.server.store().publish(8, state.publication(stability));
        let mut idle = Raw::to(&rig);
        idle.send("GET", "/healthz", &[]);
        idle.answer();
        let mut half = Raw::to(&rig);
        half.stream.write_all(b"GET /heal").unwrap();
        let started = Instant::now();
        rig.server.shutdown(PATIENCE);
        assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
        assert!(TcpStream::connect(rig.server.address()).is_err(), "the port is still open");
        for raw in [&mut stuck, &mut retired, &mut idle, &mut half] {
            // Far less than the time after which the server closes an idle connection.
            raw.stream.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
            assert!(raw.is_ended(), "a connection is still open");
        }
        assert_eq!(rig.server.store().active(), 0);
        rig.server.shutdown(PATIENCE);
    }
}

/// A server that serves `state`, so many blocks a second.
fn capped(state: &State, blocks: usize) -> Rig {
    let max_bandwidth = Some((blocks * BLOCK) as u64);
    Rig::configured(&ServerConfig { max_bandwidth, ..ServerConfig::default() })
        .publishing(state.publication(Stability::Private))
}

#[test]
fn connections_share_the_cap_and_share_it_evenly() {
    let state = State::of(&[16 * BLOCK], 1);
    let rig = capped(&state, 8);
    let mut connections: Vec<_> = (0..8).map(|_| Raw::to(&rig)).collect();
    for raw in &mut connections {
        raw.send("GET", &rig.path("7.safetensors"), &[]);
        raw.stream.set_nonblocking(true).unwrap();
    }
    let started = Instant::now();
    let total = |connections: &[Raw]| connections.iter().map(|raw| raw.buffer.len()).sum::<usize>();
    eventually("eight MiB have come", || {
        for raw in &mut connections {
            while raw.try_more(1 << 16).is_ok_and(|got| got > 0) {}
        }
        total(&connections) >= 8 * BLOCK
    });
    assert!(started.elapsed() >= Duration::from_millis(700), "{:?}", started.elapsed());
    let shares: Vec<_> = connections.iter().map(|raw| raw.buffer.len()).collect();
    assert!(shares.iter().all(|&share| share >= total(&connections) / 16), "{shares:?}");
}

#[test]
fn a_receive_from_a_slow_source_has_no_slow_lanes() {
    // A block for each lane, of which the last one takes two seconds.
    let state = State::of(&[8 * BLOCK], 1);
    let rig = capped(&state, 4);
    let arrived = state.fetch(&[&rig.url()], FetchOptions { same_host: false, ..lanes(8) }).unwrap();
    let report = arrived.report();
    assert!(report.retries == 0 && report.troubles.is_empty(), "{report:?}");
}

#[test]
fn a_peer_that_reads_no_message_is_let_go() {
    // The header and the digests are longer than the socket buffers of both ends.
    let state = State::of(&vec![1; 120_000], 1);
    let rig = Rig::with_patience(Duration::from_millis(300)).publishing(state.publication(Stability::Private));
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    socket.set_recv_buffer_size(4096).unwrap();
    socket.connect(&rig.server.address().into()).unwrap();
    let mut raw = Raw { stream: socket.into(), buffer: Vec::new() };
    raw.send("GET", &rig.path("7/header"), &[]);
    assert_eq!(raw.head().status, 200);
    eventually("it is let go", || connections(&rig) == 1);
}
