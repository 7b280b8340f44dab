//! Withdrawing a snapshot: the trainer goes on at once or after a bounded wait, and its memory is not read any more.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::common::local::{LocalReader, name_of};
use crate::common::raw::{Raw, begin, connections, get};
use crate::common::{BLOCK, Owner, PATIENCE, Rig, STEP, State, eventually, lanes, noise};
use tensorferry_core::{
    Destination, ErrorKind, FetchOptions, Item, Memory, Publication, Remote, ServerConfig, Stability, Withdrawn,
};
use tensorferry_wire::dtype::Dtype;

/// More than the socket buffers of both ends hold, so that a client that does not read keeps the transfer running.
const LARGE: usize = 32 * BLOCK;
const POISON: u8 = 0xA5;

/// Memory of a trainer, which is served without a copy and overwritten while the server lives on.
struct Trained {
    memory: Vec<u8>,
    expected: Vec<u8>,
}

impl Trained {
    fn new(seed: u64) -> Self {
        let expected = noise(LARGE, seed);
        Self { memory: expected.clone(), expected }
    }

    /// Lends the memory for as long as `self` lives, which outlives every server in these tests.
    fn publication(&mut self) -> Publication {
        let (address, len) = (self.memory.as_mut_ptr() as usize, self.memory.len());
        // SAFETY: the tests keep `self` until their server is gone.
        let memory = unsafe { Memory::borrowed(address, len) };
        let item = Item::new("w", Dtype::U8, &[len as u64], memory);
        Publication::new(Vec::new(), vec![item], Stability::Borrowed, Box::new(())).unwrap()
    }

    fn train(&mut self) {
        self.memory.fill(POISON);
    }
}

#[test]
fn a_private_copy_is_let_go_at_once_and_its_reader_finishes() {
    let dropped = Arc::new(AtomicUsize::new(0));
    let state = State::of(&[LARGE], 1);
    let rig = Rig::new().publishing(state.owned_by(Stability::Private, Box::new(Owner(Arc::clone(&dropped)))));
    let (mut reader, length) = begin(&rig);
    let started = Instant::now();
    assert_eq!(rig.server.store().withdraw(PATIENCE), Withdrawn::Clean);
    assert!(started.elapsed() < Duration::from_secs(2));
    assert_eq!(rig.server.store().active(), 1);
    while reader.buffer.len() < length {
        assert!(reader.more(64 << 10) > 0, "the transfer was cut");
        if reader.buffer.len() < length / 2 {
            assert_eq!(dropped.load(Ordering::SeqCst), 0);
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    assert!(reader.buffer.ends_with(state.bytes("w0")));
    // The connection is kept open: the end of the answer is what releases the owner.
    eventually("the owner is dropped", || dropped.load(Ordering::SeqCst) == 1);
    assert_eq!(rig.server.store().active(), 0);
}

#[test]
fn the_owner_of_what_nobody_reads_is_dropped_before_the_withdrawal_returns_and_with_the_server() {
    let dropped = Arc::new(AtomicUsize::new(0));
    let (state, rig) = (State::of(&[LARGE], 1), Rig::new());
    let store = rig.server.store();
    for (stability, expected) in [(Stability::Borrowed, 1), (Stability::Private, 2)] {
        store.publish(STEP, state.owned_by(stability, Box::new(Owner(Arc::clone(&dropped)))));
        if stability == Stability::Borrowed {
            store.withdraw(PATIENCE);
        } else {
            store.close();
        }
        assert_eq!(dropped.load(Ordering::SeqCst), expected, "{stability:?}");
    }
}

#[test]
fn borrowed_memory_is_never_read_again_once_withdraw_has_returned() {
    // Zero patience is included: then readers are cut at once.
    for (round, patience) in [0, 300, 50, 0].into_iter().map(Duration::from_millis).enumerate() {
        let mut trained = Trained::new(round as u64);
        let rig = Rig::new().publishing(trained.publication());
        let readers: Vec<_> = (0..3).map(|_| begin(&rig)).collect();
        let started = Instant::now();
        let ended = rig.server.store().withdraw(patience);
        assert!(started.elapsed() >= patience && started.elapsed() < patience + Duration::from_secs(5));
        assert_eq!(ended, Withdrawn::Cut(3), "patience {patience:?}");
        trained.train();
        assert_eq!(rig.server.store().active(), 0);
        for (mut reader, length) in readers {
            let start = length - trained.expected.len();
            let body = reader.rest();
            assert!(body.len() < length, "the reader was not cut");
            assert!(body[start..] == trained.expected[..body.len() - start], "bytes of after the withdrawal");
        }
        drop(rig);
    }
}

#[test]
fn a_gate_that_closes_and_opens_keeps_those_who_wait() {
    let state = State::of(&[100], 1);
    let rig = Rig::serving(&state);
    rig.server.store().withdraw(PATIENCE);
    let mut waiting = Raw::asking(&rig, "8.safetensors");
    rig.server.store().publish(8, state.publication(Stability::Private));
    rig.server.store().withdraw(PATIENCE);
    rig.server.store().publish(8, state.publication(Stability::Private));
    assert_eq!(waiting.answer().status, 200);
}

#[test]
fn withdrawn_private_snapshots_do_not_pile_up() {
    let dropped = Arc::new(AtomicUsize::new(0));
    let state = State::of(&[LARGE], 1);
    let rig = Rig::new();
    let store = rig.server.store();
    let mut readers = Vec::new();
    for round in 1..=8_usize {
        store.publish(STEP, state.owned_by(Stability::Private, Box::new(Owner(Arc::clone(&dropped)))));
        readers.push(begin(&rig));
        store.withdraw(Duration::ZERO);
        // Readers of two snapshots may finish; the others are cut.
        eventually("old snapshots go", || dropped.load(Ordering::SeqCst) >= round.saturating_sub(2));
        assert!(store.active() <= 3);
    }
    eventually("two are left", || store.active() == 2 && dropped.load(Ordering::SeqCst) == 6);
    let (kept, cut) = (readers.split_off(6), readers);
    for (mut reader, length) in cut {
        assert!(reader.rest().len() < length, "an old reader was not cut");
    }
    for (mut reader, length) in kept {
        reader.read_to(length);
        assert!(reader.buffer.ends_with(state.bytes("w0")));
    }
}

#[test]
fn a_receive_of_many_requests_finishes_from_a_withdrawn_copy() {
    let dropped = Arc::new(AtomicUsize::new(0));
    let (old, new) = (State::of(&[LARGE], 1), State::of(&[LARGE], 2));
    let rig = Rig::new();
    let store = rig.server.store();
    store.publish(STEP, old.owned_by(Stability::Private, Box::new(Owner(Arc::clone(&dropped)))));
    let remote = Remote::open(&[&rig.url()], STEP, lanes(3)).unwrap();
    // The snapshot was opened, and nothing is being read at this moment.
    eventually("no answer is under way", || store.active() == 0);
    assert_eq!(store.withdraw(PATIENCE), Withdrawn::Clean);
    store.publish(STEP + 1, new.publication(Stability::Private));
    old.fetch_from(remote).unwrap();
    eventually("the copy is let go of", || dropped.load(Ordering::SeqCst) == 1);
    // A receiver that has not begun yet gets the snapshot that is served now.
    assert_eq!(get(&rig, &rig.path("7.safetensors"), &[]).status, 400);
    let remote = Remote::open(&[&rig.url()], STEP + 1, lanes(3)).unwrap();
    new.fetch_from(remote).unwrap();
}

/// A server that is slow enough to need a while for [`LARGE`] bytes.
fn slow() -> Rig {
    let patience = PATIENCE;
    Rig::configured(&ServerConfig { patience, max_bandwidth: Some(32 << 20), ..ServerConfig::default() })
}

/// The entity tag of the snapshot that `rig` serves, obtained without beginning a receive.
fn etag_of(rig: &Rig) -> String {
    crate::common::raw::request(rig, "HEAD", &rig.path("7.safetensors"), &[]).header("etag").unwrap().to_owned()
}

#[test]
fn a_receive_of_many_requests_goes_on_while_it_is_drained() {
    for same_host in [false, true] {
        for count in [1, 4] {
            let what = format!("same_host={same_host}, {count} lanes");
            let mut trained = Trained::new(5);
            let rig = slow();
            rig.server.store().publish(STEP, trained.publication());
            let progress = Arc::<std::sync::atomic::AtomicU64>::default();
            let options = FetchOptions { same_host, progress: Arc::clone(&progress), ..lanes(count) };
            let remote = Remote::open(&[&rig.url()], STEP, options).unwrap();
            std::thread::scope(|scope| {
                let receiver = scope.spawn(|| {
                    let arrived = remote.fetch(Destination::Fresh).unwrap_or_else(|e| panic!("{what}: {e}"));
                    (arrived, Instant::now())
                });
                eventually("a quarter is there", || progress.load(Ordering::Relaxed) > LARGE as u64 / 4);
                // A receiver that begins now has to wait.
                let mut late = Raw::to(&rig);
                let withdrawing = scope.spawn(|| (rig.server.store().withdraw(PATIENCE), Instant::now()));
                eventually("the gate is closed", || !rig.server.store().is_allowed());
                late.send("GET", &rig.path("7.safetensors"), &[]);
                let (ended, withdrawn) = withdrawing.join().unwrap();
                assert_eq!(ended, Withdrawn::Drained, "{what}");
                trained.train();
                let (arrived, healed) = receiver.join().unwrap();
                assert!(arrived.arena().bytes(0, LARGE) == trained.expected, "{what}: wrong bytes");
                assert!(withdrawn < healed + Duration::from_secs(1), "{what}: the trainer waited for nobody");
                assert!(late.is_silent(), "{what}: a receive began after the withdrawal");
            });
            drop(rig);
        }
    }
}

#[test]
fn a_withdrawal_waits_only_for_whom_may_come_back() {
    let state = State::of(&[LARGE], 1);
    let rig = Rig::new();
    let store = rig.server.store();
    let withdraw = || {
        let started = Instant::now();
        let ended = store.withdraw(PATIENCE);
        (ended, started.elapsed())
    };
    let at_once = Duration::from_secs(1);
    // There was no client; or one sent requests that begin no receive and is still connected; or all receives are over.
    store.publish(STEP, state.publication(Stability::Borrowed));
    assert!(withdraw().1 < at_once);
    store.publish(STEP, state.publication(Stability::Borrowed));
    let mut looks = Raw::to(&rig);
    for (method, path) in [("HEAD", "7.safetensors"), ("GET", "7/header"), ("GET", "7/digests")] {
        looks.send(method, &rig.path(path), &[]);
        let _ = if method == "HEAD" { looks.head() } else { looks.answer() };
    }
    assert!(withdraw().1 < at_once);
    for same_host in [false, true] {
        store.publish(STEP, state.publication(Stability::Borrowed));
        state.fetch(&[&rig.url()], FetchOptions { same_host, ..lanes(3) }).unwrap();
        assert!(withdraw().1 < at_once, "same_host={same_host}");
    }
    // One receiver hangs up between two requests, and one falls silent.
    for (leaves, most) in [(true, Duration::from_secs(1)), (false, Duration::from_secs(4))] {
        store.publish(STEP, state.publication(Stability::Borrowed));
        let remote = Remote::open(&[&rig.url()], STEP, lanes(3)).unwrap();
        eventually("no answer is under way", || store.active() == 0);
        let silent = (!leaves).then_some(remote);
        let (ended, took) = withdraw();
        assert!(took < most, "{took:?}");
        assert!(leaves || ended == Withdrawn::Drained);
        let Some(remote) = silent else { continue };
        let (started, failed) = (Instant::now(), remote.fetch(Destination::Fresh).unwrap_err());
        assert_eq!(failed.kind(), ErrorKind::Changed, "{failed}");
        assert!(started.elapsed() < Duration::from_secs(2));
    }
    // One hangs up in the middle of an answer, as a receiver that is killed does. A machine that is busy may take long to
    // notice, but not three times.
    let mut tries = Vec::new();
    while tries.last().is_none_or(|&took| took >= at_once) {
        assert!(tries.len() < 3, "the trainer has waited for one that is gone: {tries:?}");
        store.publish(STEP, state.publication(Stability::Borrowed));
        let (breaks, _) = begin(&rig);
        drop(breaks);
        tries.push(withdraw().1);
    }
    // A client that has only requested digests, by the snapshot's tag, may request bytes next.
    store.publish(STEP, state.publication(Stability::Borrowed));
    let etag = etag_of(&rig);
    let mut compares = Raw::to(&rig);
    compares.send("GET", &rig.path("7/digests"), &[("If-Match", &etag)]);
    assert_eq!(compares.answer().status, 200);
    std::thread::scope(|scope| {
        let withdrawing = scope.spawn(withdraw);
        eventually("the gate is closed", || !store.is_allowed());
        std::thread::sleep(Duration::from_millis(300));
        compares.send("GET", &rig.path("7.safetensors"), &[("If-Match", &etag), ("Range", "bytes=0-99")]);
        assert_eq!(compares.answer().status, 206);
        assert_eq!(withdrawing.join().unwrap().0, Withdrawn::Drained);
    });
    // A receiver whose connection breaks during an answer is given time to open another one. A machine that is busy
    // may keep it for longer than that, but not three times.
    let comes_back = || {
        store.publish(STEP, state.publication(Stability::Borrowed));
        let etag = etag_of(&rig);
        let mut breaks = Raw::to(&rig);
        breaks.send("GET", &rig.path("7.safetensors"), &[("If-Match", &etag)]);
        breaks.head();
        drop(breaks);
        eventually("nobody reads", || store.active() == 0);
        std::thread::scope(|scope| {
            let withdrawing = scope.spawn(withdraw);
            eventually("the gate is closed", || !store.is_allowed());
            std::thread::sleep(Duration::from_millis(300));
            let range = [("If-Match", etag.as_str()), ("Range", "bytes=0-99")];
            let status = get(&rig, &rig.path("7.safetensors"), &range).status;
            (status, withdrawing.join().unwrap().1)
        })
    };
    let mut tries = Vec::new();
    while tries.last().is_none_or(|&(status, took)| status != 206 || took >= Duration::from_secs(2)) {
        assert!(tries.len() < 3, "it has come back and is through: {tries:?}");
        tries.push(comes_back());
    }
}

#[test]
fn a_receive_that_has_its_last_digests_and_is_gone_is_over() {
    let state = State::of(&[4 * BLOCK], 1);
    let rig = Rig::new().publishing(state.publication(Stability::Borrowed));
    let etag = etag_of(&rig);
    let part = [("If-Match", etag.as_str()), ("Range", "bytes=0-99")];
    assert_eq!(get(&rig, &rig.path("7.safetensors"), &part).status, 206);
    assert_eq!(get(&rig, &rig.path("7/digests"), &part[..1]).status, 200);
    eventually("both connections are gone", || connections(&rig) == 1);
    assert_eq!(rig.server.store().withdraw(PATIENCE), Withdrawn::Clean, "it has waited for another connection");
}

#[test]
fn what_is_gone_is_said_to_be_gone_at_once() {
    let (old, new) = (State::of(&[LARGE], 1), State::of(&[LARGE], 2));
    for stability in [Stability::Private, Stability::Borrowed] {
        let rig = Rig::new();
        let store = rig.server.store();
        store.publish(STEP, old.publication(stability));
        let (etag, name) = (etag_of(&rig), name_of(&rig));
        let mut local = LocalReader::connect(&name);
        let mut gone = |what: &str| {
            let started = Instant::now();
            for tail in ["7.safetensors", "7.safetensors?blocks=0-1,3-4", "7/header", "7/digests", "7/full"] {
                let answer = get(&rig, &rig.path(tail), &[("If-Match", &etag)]);
                assert_eq!(answer.status, 412, "{stability:?} {what}: {tail}");
                local.ask(&rig.path(tail), &[("If-Match", &etag)]);
                let head = local.head();
                assert!(head.starts_with("HTTP/1.1 412"), "{stability:?} {what}: {tail}: {head}");
                local.message(&head);
            }
            assert!(started.elapsed() < PATIENCE / 2, "{stability:?} {what}");
        };
        // The snapshot is read once, and then no request comes for longer than a withdrawn copy waits.
        assert_eq!(get(&rig, &rig.path("7/header"), &[("If-Match", &etag)]).status, 200);
        store.withdraw(PATIENCE);
        std::thread::sleep(Duration::from_secs(3));
        gone("withdrawn");
        store.publish(8, new.publication(stability));
        gone("replaced");
        store.withdraw(PATIENCE);
        gone("and that withdrawn");
        // A tag of another server never named a snapshot here.
        let foreign = get(&rig, &rig.path("7.safetensors"), &[("If-Match", "\"0123456789abcdef-1\"")]);
        assert_eq!(foreign.status, 412);
    }
}

#[test]
fn a_lingering_snapshot_is_there_for_its_own_step_and_tag_alone() {
    let (old, new) = (State::of(&[LARGE], 1), State::of(&[LARGE], 2));
    let rig = Rig::new();
    let store = rig.server.store();
    store.publish(STEP, old.publication(Stability::Private));
    let etag = etag_of(&rig);
    let stuck = begin(&rig);
    store.publish(8, new.publication(Stability::Private));
    let range = ("Range", "bytes=0-9");
    let ask = |tail: &str, tags: &str| get(&rig, &rig.path(tail), &[("If-Match", tags), range]);
    let served = ask("8.safetensors", "*");
    assert_eq!((served.status, served.header("etag") == Some(&etag)), (206, false), "the old bytes as the new step");
    assert_eq!(ask("7.safetensors", "*").status, 400);
    assert_eq!(ask("7.safetensors", served.header("etag").unwrap()).status, 400, "the new bytes as the old step");
    assert_eq!(ask("8.safetensors", &etag).status, 412);
    assert_eq!(ask("7.safetensors", &format!("W/{etag}")).status, 412);
    assert_eq!(ask("7.safetensors", &format!("\"x\", {etag}")).status, 206);
    // While nothing is served, a request that accepts any tag waits at the gate.
    store.withdraw(PATIENCE);
    let mut waiting = Raw::to(&rig);
    waiting.send("GET", &rig.path("7.safetensors"), &[("If-Match", "*"), range]);
    assert!(waiting.is_silent(), "the old bytes, or none, while nothing is served");
    store.publish(STEP, new.publication(Stability::Private));
    let answer = waiting.answer();
    assert_eq!((answer.status, answer.header("etag") == Some(&etag)), (206, false));
    drop(stuck);
}

#[test]
fn requests_that_are_let_in_during_a_drain_read_nothing_after_it() {
    let (mut bodies, mut tables) = (0, 0);
    for round in 0..6 {
        let mut trained = Trained::new(round);
        let rig = Rig::new().publishing(trained.publication());
        let (etag, over) = (etag_of(&rig), std::sync::atomic::AtomicBool::new(false));
        let (len, rounds) = (trained.expected.len(), std::sync::atomic::AtomicUsize::new(0));
        let read = || {
            let mut bytes = Vec::new();
            let from = format!("bytes=-{len}");
            while !over.load(Ordering::SeqCst) {
                for (tail, range) in [("7.safetensors", &from[..]), ("7/digests", "bytes=0-")] {
                    let mut raw = Raw::to(&rig);
                    let headers = [("If-Match", &etag[..]), ("Range", range), ("Connection", "close")];
                    raw.send("GET", &rig.path(tail), &headers);
                    bytes.push(raw.rest().to_vec());
                }
                rounds.fetch_add(1, Ordering::SeqCst);
            }
            bytes
        };
        let answers: Vec<_> = std::thread::scope(|scope| {
            let readers: Vec<_> = (0..3).map(|_| scope.spawn(read)).collect();
            eventually("every kind of answer was read", || rounds.load(Ordering::SeqCst) > 3);
            rig.server.store().withdraw(Duration::from_millis(10 * round));
            trained.train();
            over.store(true, Ordering::SeqCst);
            readers.into_iter().flat_map(|reader| reader.join().unwrap()).collect()
        });
        let expected: Vec<u64> = trained.expected.chunks(BLOCK).map(tensorferry_wire::digest::checksum).collect();
        for answer in answers {
            let Some(at) = answer.windows(4).position(|w| w == b"\r\n\r\n").map(|at| at + 4) else { continue };
            let body = &answer[at..];
            if answer.starts_with(b"HTTP/1.1 206") {
                bodies += 1;
                assert!(*body == trained.expected[..body.len()], "bytes of after the withdrawal");
            } else if answer.starts_with(b"HTTP/1.1 200") {
                tables += 1;
                let table = tensorferry_wire::digest::DigestTable::decode(body).unwrap();
                assert!(table.blocks == expected, "a digest of poison");
            }
        }
        drop(rig);
    }
    assert!(bodies > 0 && tables > 0);
}
