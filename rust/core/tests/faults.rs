//! Networks that damage, cut, delay and hang: a single fault is repaired, a lasting one ends the transfer in time with
//! the right kind of error, and no wrong byte is ever handed over.

use std::time::{Duration, Instant};

use crate::common::faults::{ALWAYS, Fault, Liar, Proxy};
use crate::common::{BLOCK, PATIENCE, Rig, STEP, State, lanes, local, quick};
use tensorferry_core::{Arrived, Cancel, Destination, Error, ErrorKind, FetchOptions, Remote, ServerConfig, Stability};

fn state() -> State {
    State::of(&[9 * BLOCK + 5, 100, 6 * BLOCK], 1)
}

/// How a receive ends whose connections break: what comes last before the deadline may have been a stall of a busy machine.
const BROKEN: &[ErrorKind] = &[ErrorKind::Connect, ErrorKind::Timeout];

/// Fetches through a proxy on which `fault` happens `times` times.
fn through(tls: bool, fault: Fault, times: usize, options: FetchOptions) -> (Result<Arrived, Error>, bool) {
    let state = state();
    let rig = Rig::configured(&ServerConfig { tls, ..local() }).publishing(state.publication(Stability::Private));
    let proxy = Proxy::new(&rig.url(), fault, times);
    let result = state.fetch(&[proxy.url()], options);
    (result, proxy.is_spent())
}

/// Places where a fault may happen: in the first head, in the header and the first blocks, in the digests that are
/// read on opening, and far into the payload.
const PLACES: [usize; 6] = [3, 300, 900, BLOCK / 2, BLOCK + 700, 4 * BLOCK + 123];

#[test]
fn one_fault_is_repaired_wherever_it_is() {
    let mut faults = vec![Fault::Lose(4 * BLOCK + 123, 1000), Fault::Lose(BLOCK / 2, 1000)];
    for place in PLACES {
        faults.extend([Fault::Close(place), Fault::Reset(place)]);
        faults.extend((place > 3).then_some(Fault::Flip(place)));
        faults.extend((place % 4 == 0).then_some(Fault::Stall(place)));
    }
    for fault in faults {
        for count in [1, 3] {
            let (result, spent) = through(false, fault, 1, quick(PATIENCE, count));
            let arrived = result.unwrap_or_else(|e| panic!("{fault:?}, {count} lanes: {e}"));
            let (Fault::Flip(place) | Fault::Close(place) | Fault::Reset(place) | Fault::Stall(place)) = fault else {
                continue;
            };
            assert!(place < 2 * BLOCK || !spent || arrived.report().retries > 0, "{fault:?}: {:?}", arrived.report());
        }
    }
    for fault in [
        Fault::Flip(100),
        Fault::Flip(3 * BLOCK),
        Fault::Close(300),
        Fault::Reset(2 * BLOCK + 77),
        Fault::Lose(2 * BLOCK, 1000),
        Fault::Stall(2 * BLOCK),
    ] {
        let (result, spent) = through(true, fault, 1, FetchOptions { same_host: false, ..quick(PATIENCE, 2) });
        assert!(result.is_ok() && spent, "{fault:?} behind TLS: {:?}", result.map(drop));
    }
}

#[test]
fn bits_that_keep_flipping_end_as_corrupt_and_name_the_tensor() {
    let state = state();
    let rig = Rig::serving(&state);
    let proxy = Proxy::new(&rig.url(), Fault::FlipEvery(BLOCK / 2), 0);
    for count in [1, 3] {
        proxy.arm(0);
        let remote = Remote::open(&[proxy.url()], STEP, quick(PATIENCE, count)).unwrap();
        let first = remote.header().covering(0, BLOCK as u64 / 2).last().unwrap().name.clone();
        proxy.arm(ALWAYS);
        let failed = remote.fetch(Destination::Fresh).unwrap_err();
        assert_eq!(failed.kind(), ErrorKind::Corrupt, "{count} lanes: {failed}");
        let message = failed.to_string();
        assert!(message.contains(&first) && message.contains("did not match its checksum 4 times"), "{message}");
    }
}

#[test]
fn damage_in_the_opening_is_counted() {
    // The first request brings the header and all that small containers have.
    let state = State::of(&[BLOCK / 2, 100], 1);
    let rig = Rig::serving(&state);
    for fault in [Fault::Flip(300_000), Fault::Reset(200_000)] {
        let proxy = Proxy::new(&rig.url(), fault, 1);
        let arrived = state.fetch(&[proxy.url()], quick(PATIENCE, 2)).unwrap();
        assert!(proxy.is_spent(), "{fault:?}");
        let report = arrived.report();
        assert_eq!((report.retries, report.troubles.len()), (1, 1), "{fault:?}: {report:?}");
    }
    // A source that is asked in vain because it is not there has sent nothing that comes again.
    let nobody = "http://127.0.0.1:1/x/checkpoint/";
    let arrived = state.fetch(&[nobody, &rig.url()], quick(PATIENCE, 2)).unwrap();
    assert_eq!((arrived.report().retries, arrived.report().troubles.len()), (0, 0), "{:?}", arrived.report());
}

#[test]
fn what_has_come_is_not_fetched_again() {
    let state = State::of(&[66 * BLOCK], 1);
    let rig = Rig::serving(&state);
    // The lane's connections break within every range, for ever; or a block in the middle is damaged once.
    for (fault, times) in [
        (Fault::Close(5 * BLOCK + BLOCK / 2), ALWAYS),
        (Fault::Reset(5 * BLOCK + BLOCK / 2), ALWAYS),
        (Fault::Flip(5 * BLOCK + BLOCK / 2), 1),
    ] {
        for count in [1, 4] {
            let proxy = Proxy::new(&rig.url(), fault, times);
            let arrived = state.fetch(&[proxy.url()], quick(PATIENCE, count));
            let arrived = arrived.unwrap_or_else(|e| panic!("{fault:?}, {count} lanes: {e}"));
            let report = arrived.report();
            assert!(report.retries > 0, "{fault:?}: {report:?}");
            let again = report.bytes - 66 * BLOCK as u64;
            assert!(
                again <= report.retries * BLOCK as u64,
                "{fault:?}, {count} lanes: {again} bytes again, {report:?}"
            );
        }
    }
}

/// Asserts that a fetch ends with one of `kinds`, at most a second after its deadline; `opened` is called when the source
/// is open.
fn ends(what: &str, url: &str, options: FetchOptions, opened: impl FnOnce(), kinds: &[ErrorKind]) {
    let (started, timeout) = (Instant::now(), options.timeout);
    let failed = match Remote::open(&[url], STEP, options) {
        Ok(remote) => {
            opened();
            remote.fetch(Destination::Fresh).expect_err(what)
        }
        Err(failed) => failed,
    };
    let took = started.elapsed();
    assert!(kinds.contains(&failed.kind()), "{what}: {:?}: {failed}", failed.kind());
    assert!(took < timeout + Duration::from_secs(1), "{what}: took {took:?}");
}

#[test]
fn lasting_faults_end_in_time_with_the_right_kind() {
    let state = state();
    let rig = Rig::serving(&state);
    let late: &[ErrorKind] = &[ErrorKind::Timeout];
    // Whether the fault is there from the first answer on, or begins when the source is open.
    for (from_the_start, fault, kinds) in [
        (true, Fault::Close(BLOCK / 2), BROKEN),
        (true, Fault::Reset(BLOCK / 2), BROKEN),
        (true, Fault::Reset(0), BROKEN),
        (true, Fault::Stall(0), late),
        (true, Fault::Stall(BLOCK + 40_000), late),
        (true, Fault::Drip(100), late),
        // In the container's header, behind the head of the answer.
        (true, Fault::Flip(320), &[ErrorKind::Corrupt, ErrorKind::Protocol]),
        (false, Fault::Close(BLOCK / 2), BROKEN),
        (false, Fault::Reset(1000), BROKEN),
        (false, Fault::Stall(BLOCK / 2), late),
    ] {
        for count in if from_the_start { &[2][..] } else { &[1, 3] } {
            let proxy = Proxy::new(&rig.url(), fault, if from_the_start { ALWAYS } else { 0 });
            let timeout = Duration::from_secs(if from_the_start { 2 } else { 4 });
            ends(&format!("{fault:?}"), proxy.url(), quick(timeout, *count), || proxy.arm(ALWAYS), kinds);
        }
    }
}

#[test]
fn nobody_there_is_a_connect_error_and_a_host_that_does_not_answer_costs_no_more_than_a_stall() {
    let url = Liar::new(|_, _, _| Ok(())).url();
    ends("no listener", &url, quick(Duration::from_secs(5), 1), || (), &[ErrorKind::Connect]);
    let state = state();
    let rig = Rig::serving(&state);
    // Linux drops connection attempts to a listener whose queue is full, so it looks like a host that is down.
    let deaf = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    deaf.bind(&std::net::SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
    deaf.listen(0).unwrap();
    let address = deaf.local_addr().unwrap().as_socket().unwrap();
    let _queued: Vec<_> =
        (0..3).map(|_| std::net::TcpStream::connect_timeout(&address, Duration::from_millis(50))).collect();
    let url = format!("http://{address}/checkpoint/");
    let started = Instant::now();
    state.fetch(&[&url, &rig.url()], quick(PATIENCE, 2)).unwrap();
    assert!(started.elapsed() < PATIENCE / 2, "{:?}", started.elapsed());
    ends("a deaf host", &url, quick(Duration::from_secs(5), 1), || (), &[ErrorKind::Connect, ErrorKind::Timeout]);
}

#[test]
fn a_slow_link_is_no_fault() {
    let state = State::of(&[300_000], 1);
    let rig = Rig::serving(&state);
    for fault in [Fault::None, Fault::Drip(1000), Fault::Delay(Duration::from_millis(30))] {
        let proxy = Proxy::new(&rig.url(), fault, ALWAYS);
        let arrived = state.fetch(&[proxy.url()], quick(PATIENCE, 2)).unwrap();
        assert_eq!(arrived.report().retries, 0, "{fault:?}");
    }
}

#[test]
fn cancelling_ends_a_transfer_at_once_whatever_it_waits_for() {
    let state = state();
    let serving = Rig::serving(&state);
    let closed = Rig::new();
    let slow = Proxy::new(&serving.url(), Fault::Drip(100), ALWAYS);
    let hanging = Proxy::new(&serving.url(), Fault::Stall(2 * BLOCK), ALWAYS);
    let breaking = Proxy::new(&serving.url(), Fault::Close(BLOCK + 40_000), ALWAYS);
    let secured = Rig::configured(&ServerConfig { tls: true, ..local() });
    secured.server.store().publish(STEP, state.publication(Stability::Private));
    let tls = [0, 200, 2 * BLOCK].map(|place| Proxy::new(&secured.url(), Fault::Stall(place), ALWAYS));
    for (what, url) in [
        ("a dripping source", slow.url().to_owned()),
        ("a hanging source", hanging.url().to_owned()),
        ("a breaking source", breaking.url().to_owned()),
        ("a closed gate", closed.url()),
        ("a handshake that does not begin", tls[0].url().to_owned()),
        ("a handshake that does not end", tls[1].url().to_owned()),
        ("a hanging source behind TLS", tls[2].url().to_owned()),
    ] {
        let cancel = Cancel::new();
        let timeout = Duration::from_mins(1);
        let options = FetchOptions { cancel: cancel.clone(), timeout, same_host: false, ..lanes(2) };
        std::thread::scope(|scope| {
            let receiver = scope.spawn(|| state.fetch(&[&url], options));
            std::thread::sleep(Duration::from_millis(250));
            let (started, running) = (Instant::now(), !receiver.is_finished());
            cancel.cancel();
            let failed = receiver.join().unwrap().expect_err(what);
            assert!(started.elapsed() < Duration::from_secs(15), "{what}: {:?}", started.elapsed());
            if running {
                assert_eq!(failed.kind(), ErrorKind::Cancelled, "{what}: {failed}");
            }
        });
    }
    let cancel = Cancel::new();
    cancel.cancel();
    let options = FetchOptions { cancel, ..lanes(1) };
    assert_eq!(state.fetch(&[&serving.url()], options).unwrap_err().kind(), ErrorKind::Cancelled);
}
