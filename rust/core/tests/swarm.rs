//! Receivers that bring each other the blocks of one source, and members that do harm.

use std::io::Write;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use tensorferry_core::{
    Destination, Error, FetchOptions, Item, Publication, Readiness, RelayHost, Relayed, Relaying, Remote, Secret,
    ServerConfig, Stability,
};
use tensorferry_wire::dtype::Dtype;

use crate::common::faults::{Liar, asked_range};
use crate::common::raw::{Answer, Raw, get};
use crate::common::{BLOCK, PATIENCE, Rig, STEP, State, at_once, eventually, lanes, local, noise};

/// A source that sends so many blocks in a second.
pub(crate) fn source(state: &State, blocks: usize) -> Rig {
    offering(state, Some(blocks as u64 * BLOCK as u64))
}

/// A source that has a tracker.
pub(crate) fn offering(state: &State, max_bandwidth: Option<u64>) -> Rig {
    Rig::configured(&ServerConfig { max_bandwidth, swarm: true, patience: PATIENCE, ..local() })
        .publishing(state.publication(Stability::Private))
}

/// The options of a receiver whose server is `rig`'s.
pub(crate) fn member(rig: &Rig) -> FetchOptions {
    FetchOptions { relay: Some(rig.server.relay_host()), relays_at_once: true, same_host: false, ..lanes(2) }
}

pub(crate) fn etag(rig: &Rig) -> String {
    get(rig, &rig.path("7.safetensors"), &[("Range", "bytes=0-9")]).header("etag").unwrap().to_owned()
}

/// The length of the container.
pub(crate) fn length_of(rig: &Rig) -> usize {
    let answer = get(rig, &rig.path("7.safetensors"), &[("Range", "bytes=0-9")]);
    answer.header("content-range").unwrap().rsplit('/').next().unwrap().parse().unwrap()
}

/// Asks the tracker of `rig` as a member that relays at `port`.
pub(crate) fn ask(rig: &Rig, port: u16, query: &str) -> Answer {
    let path = rig.path(&format!("7/swarm?port={port}&token={}{query}", "0".repeat(32)));
    get(rig, &path, &[("If-Match", &etag(rig))])
}

/// Joins the swarm of `rig` as a member that relays at `port`, and stays in it for as long as what is returned exists.
pub(crate) fn join(rig: &Rig, port: u16) -> Raw {
    let mut member = Raw::to(rig);
    let answer = ask_by(&mut member, rig, port, "");
    assert_eq!(answer.status, 200, "{}", answer.reason);
    member
}

/// As [`ask`], by a connection of the member's own.
pub(crate) fn ask_by(member: &mut Raw, rig: &Rig, port: u16, query: &str) -> Answer {
    let path = rig.path(&format!("7/swarm?port={port}&token={}{query}", "0".repeat(32)));
    member.send("GET", &path, &[("If-Match", &etag(rig))]);
    member.answer()
}

/// Waits until the tracker of `rig` names no other member. It would forget a silent one after much more time.
fn await_deserted(rig: &Rig) {
    eventually("nobody is left in the swarm", || !ask(rig, 1, "").text().contains("peer "));
}

pub(crate) fn port_of(url: &str) -> u16 {
    url.split(['/', ':']).nth(4).unwrap().parse().unwrap()
}

/// A connection to the first relay that the tracker of `rig` names to a member that asks with `query`, and the path below
/// which it relays.
pub(crate) fn relay_for(rig: &Rig, query: &str) -> (Raw, String) {
    let mut url = String::new();
    eventually("there is a relay", || {
        let answer = ask(rig, 1, query);
        assert_eq!(answer.status, 200);
        let peer = answer.text().lines().find_map(|line| line.strip_prefix("peer "));
        peer.unwrap_or_default().clone_into(&mut url);
        !url.is_empty()
    });
    let address: SocketAddr = url.split('/').nth(2).unwrap().parse().unwrap();
    (Raw::connect(address), format!("/{}", url.splitn(4, '/').nth(3).unwrap()))
}

/// The number of blocks that the relay has, and a bit for each block that there is.
fn held(relay: &mut Raw, path: &str) -> Vec<u8> {
    relay.send("GET", &format!("{path}7/have"), &[]);
    let answer = relay.answer();
    assert_eq!(answer.status, 200, "{}", answer.reason);
    answer.body
}

/// How many blocks from the first on the relay has.
fn complete(relay: &mut Raw, path: &str) -> usize {
    let bits = &held(relay, path)[8..];
    (0..8 * bits.len()).find(|i| bits[i / 8] >> (i % 8) & 1 == 0).unwrap_or(8 * bits.len())
}

/// How many blocks the relay has, wherever they are.
pub(crate) fn count(relay: &mut Raw, path: &str) -> u64 {
    u64::from_le_bytes(*held(relay, path).first_chunk().unwrap())
}

/// A source of which so many blocks are there, so that no receive ends before a test wants it to.
pub(crate) fn unfinished(state: &State, blocks: usize) -> (Rig, Readiness) {
    let source = offering(&State(Vec::new()), None);
    let bytes = state.bytes("w0");
    let items = vec![Item::bytes("w0", Dtype::U8, &[bytes.len() as u64], bytes.clone())];
    let (publication, readiness) =
        Publication::with_readiness(Vec::new(), items, Stability::Private, Box::new(())).unwrap();
    readiness.raise((blocks * BLOCK) as u64);
    source.server.store().publish(STEP, publication);
    (source, readiness)
}

#[test]
fn a_receiver_alone_takes_everything_from_the_source() {
    let (state, rig) = (State::of(&[70 * BLOCK + 9], 1), Rig::new());
    let source = offering(&state, None);
    for lane in [1, 4] {
        let arrived = state.fetch(&[&source.url()], FetchOptions { lanes: Some(lane), ..member(&rig) }).unwrap();
        assert_eq!((arrived.report().relayed, arrived.report().retries), (0, 0));
        // The next one would wait for what this one was granted.
        await_deserted(&source);
    }
}

#[test]
fn a_receive_leaves_the_swarm_however_it_ends() {
    let state = State::of(&[48 * BLOCK], 1);
    // The source's refusal, and the receiver's own will.
    for is_cancelled in [true, false] {
        let (source, readiness) = unfinished(&state, 20);
        let rig = Rig::new();
        let options = member(&rig);
        let cancel = options.cancel.clone();
        std::thread::scope(|scope| {
            let receive = scope.spawn(|| state.fetch(&[&source.url()], options).map(drop));
            drop(relay_for(&source, ""));
            assert!(!ask(&source, 1, "").text().is_empty());
            if is_cancelled {
                cancel.cancel();
                receive.join().unwrap().unwrap_err();
            } else {
                readiness.finish();
                receive.join().unwrap().unwrap();
            }
        });
        await_deserted(&source);
    }
}

/// A relay that claims to have everything, and sends what `bytes` returns for a range of the container.
pub(crate) fn relay_of_bytes(
    blocks: usize,
    total: usize,
    asked: &Arc<AtomicUsize>,
    bytes: impl Fn(usize, usize) -> Vec<u8> + Send + Sync + 'static,
) -> Liar {
    let asked = Arc::clone(asked);
    Liar::new(move |mut stream, head, _| {
        if head.contains("/have") {
            let mut body = (blocks as u64).to_le_bytes().to_vec();
            body.extend(vec![0xff; 8 * blocks.div_ceil(64)]);
            write!(stream, "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", body.len())?;
            return stream.write_all(&body);
        }
        asked.fetch_add(1, Ordering::SeqCst);
        let (start, end) = asked_range(head).unwrap();
        let fields = format!("Content-Length: {}\r\nContent-Range: bytes {start}-{}/{total}", end - start, end - 1);
        write!(stream, "HTTP/1.1 206 Partial Content\r\n{fields}\r\n\r\n")?;
        stream.write_all(&bytes(start, end))
    })
}

#[test]
fn what_a_liar_sends_is_fetched_again_from_the_source() {
    let asked = Arc::default();
    let (state, rig) = (State::of(&[32 * BLOCK], 1), Rig::new());
    let source = source(&state, 16);
    // It claims to have everything.
    let liar = relay_of_bytes(32, length_of(&source), &asked, |start, end| noise(end - start, start as u64));
    let _joined = join(&source, port_of(&liar.url()));
    let arrived = state.fetch(&[&source.url()], member(&rig)).unwrap();
    let report = arrived.report();
    assert!(asked.load(Ordering::SeqCst) > 0, "the liar was not asked: {report:?}");
    let authority = liar.url().split('/').nth(2).unwrap().to_owned();
    assert!(report.troubles.contains_key(&authority), "{:?}", report.troubles);
}

#[test]
fn relays_that_are_dead_frozen_or_talk_nonsense_do_no_harm() {
    let (state, rig) = (State::of(&[32 * BLOCK], 1), Rig::new());
    let source = source(&state, 32);
    let gone = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let dead = gone.local_addr().unwrap().port();
    drop(gone);
    let silent = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    // Says that it has everything, and stops in the middle of a block.
    let frozen = Liar::new(|mut stream, head, tracker| {
        if head.contains("/have") {
            return write!(
                stream,
                "HTTP/1.1 200 OK\r\nContent-Length: 16\r\n\r\n\x08\0\0\0\0\0\0\0{}",
                "\x7f".repeat(8)
            );
        }
        tracker.sleep(PATIENCE);
        Ok(())
    });
    let nonsense = Liar::new(|mut stream, _, _| write!(stream, "HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc"));
    let ports = [dead, silent.local_addr().unwrap().port(), port_of(&frozen.url()), port_of(&nonsense.url())];
    let _joined = ports.map(|port| join(&source, port));
    let arrived = state.fetch(&[&source.url()], member(&rig)).unwrap();
    assert_eq!(arrived.report().relayed, 0);
}

#[test]
fn nothing_is_read_once_the_receive_has_returned() {
    const BLOCKS: usize = 48;
    let (state, rig) = (State::of(&[BLOCKS * BLOCK], 1), Rig::new());
    for cancelled in [false, true] {
        let (source, readiness) = unfinished(&state, 20);
        let mut memory = vec![0_u8; BLOCKS * BLOCK];
        let address = memory.as_mut_ptr() as usize;
        let options = member(&rig);
        let (cancel, returned) = (options.cancel.clone(), AtomicBool::new(false));
        let reader = std::thread::scope(|scope| {
            let receive = scope.spawn(|| {
                let remote = Remote::open(&[&source.url()], STEP, options).unwrap();
                // SAFETY: as long as the entry, and used by nobody before the fetch has returned.
                let destination = unsafe { Destination::given(vec![Some(address)]) };
                let result = remote.fetch(destination).map(|arrived| arrived.report().clone());
                returned.store(true, Ordering::SeqCst);
                result
            });
            let (mut relay, path) = relay_for(&source, "");
            eventually("there are sixteen blocks", || complete(&mut relay, &path) >= 16);
            let total = length_of(&source);
            let start = total - BLOCKS * BLOCK;
            let tag = etag(&source);
            // Answers of its own come first: those of a relay are of whole blocks that are there, and of nothing else.
            for (range, tag, status) in [
                (format!("bytes={start}-{}", total - 1), &tag, 416),
                (format!("bytes=0-{}", start + BLOCK), &tag, 416),
                (format!("bytes={start}-{}", start + BLOCK - 1), &"\"other\"".to_owned(), 412),
                (format!("bytes={start}-{}", start + BLOCK - 1), &tag, 206),
            ] {
                relay.send("GET", &format!("{path}7.safetensors"), &[("Range", &range), ("If-Match", tag)]);
                let answer = relay.answer();
                assert_eq!(answer.status, status, "{range}");
                assert!(status != 206 || answer.body == state.bytes("w0")[..BLOCK]);
            }
            // A range that is asked for on a condition which does not hold is everything, and that is not there.
            let range = format!("bytes={start}-{}", start + BLOCK - 1);
            for (condition, status) in [("\"other\"", 416), (&*tag, 206)] {
                let headers = [("Range", &*range), ("If-Range", condition)];
                relay.send("GET", &format!("{path}7.safetensors"), &headers);
                assert_eq!(relay.answer().status, status, "If-Range: {condition}");
            }
            for tail in ["7/digests", "7.safetensors", "7/full", "8/have", "7/swarm?port=1"] {
                relay.send("GET", &format!("{path}{tail}"), &[]);
                let status = relay.answer().status;
                assert!(status >= 400, "{tail}: {status}");
            }
            let range = format!("bytes={start}-{}", start + 16 * BLOCK - 1);
            relay.send("GET", &format!("{path}7.safetensors"), &[("Range", &range)]);
            assert_eq!(relay.head().status, 206);
            assert!(!returned.load(Ordering::SeqCst));
            if cancelled {
                cancel.cancel();
            } else {
                readiness.finish();
            }
            assert_eq!(receive.join().unwrap().is_err(), cancelled);
            (relay, path)
        });
        assert!(cancelled || memory == state.bytes("w0")[..]);
        memory.fill(0xee);
        let (mut relay, path) = reader;
        let found = relay.rest().to_vec();
        assert!(found.len() < 16 * BLOCK, "the reader was not cut");
        assert!(found == state.bytes("w0")[..found.len()], "memory was read after the receive had returned");
        let mut again = Raw::to(&rig);
        again.send("GET", &format!("{path}7/have"), &[]);
        assert_eq!(again.answer().status, 404);
    }
}

#[test]
fn a_source_that_withdraws_ends_every_receive() {
    let state = State::of(&[64 * BLOCK], 1);
    let (source, _readiness) = unfinished(&state, 20);
    let members = [Rig::new(), Rig::new()];
    std::thread::scope(|scope| {
        let fetch = |rig| state.fetch(&[&source.url()], member(rig)).map(drop);
        let threads: Vec<_> = members.iter().map(|rig| scope.spawn(move || fetch(rig))).collect();
        let (mut relay, path) = relay_for(&source, "");
        eventually("some blocks are there", || count(&mut relay, &path) > 2);
        source.server.store().close();
        for thread in threads {
            assert!(!thread.join().unwrap().unwrap_err().is_timeout(), "what no member has is not waited for");
        }
    });
}

#[test]
fn there_is_no_swarm_where_one_side_wants_none() {
    let state = State::of(&[16 * BLOCK], 1);
    let (source, rig) = (Rig::new(), Rig::new());
    source.server.store().publish(STEP, state.publication(Stability::Private));
    state.fetch(&[&source.url()], member(&rig)).unwrap();
    let answer = get(&source, &source.path("7.safetensors"), &[("Range", "bytes=0-9")]);
    assert_eq!(answer.header("tensorferry-swarm"), None);
    let path = source.path(&format!("7/swarm?port=1&token={}", "0".repeat(32)));
    assert_eq!(get(&source, &path, &[]).status, 404);
}

#[test]
fn receivers_that_share_a_secret_or_use_tls_bring_each_other_blocks() {
    let state = State::of(&[48 * BLOCK], 1);
    let secret = Secret::new(b"at least sixteen bytes of it").unwrap();
    let config = |tls: bool, is_guarded: bool, max_bandwidth| ServerConfig {
        swarm: true,
        tls,
        secret: is_guarded.then(|| secret.clone()),
        max_bandwidth,
        ..local()
    };
    // A server that has no secret would show blocks to others.
    for (tls, source_guarded, guarded, relays) in
        [(false, true, true, true), (false, true, false, false), (true, false, false, true)]
    {
        let source = Rig::configured(&config(tls, source_guarded, Some(24 * BLOCK as u64)))
            .publishing(state.publication(Stability::Borrowed));
        let rigs: Vec<_> = (0..3).map(|_| Rig::configured(&config(tls, guarded, None))).collect();
        let fetch = |rig: &Rig| {
            let options = FetchOptions { secret: source_guarded.then(|| secret.clone()), ..member(rig) };
            state.fetch(&[&source.url()], options).unwrap().report().relayed
        };
        let relayed: u64 = at_once(&rigs, fetch).into_iter().sum();
        assert_eq!(relayed > 0, relays, "tls={tls}, {source_guarded} {guarded}");
    }
}

/// Passes on to a server, and counts the relays that are opened.
#[derive(Debug)]
struct Counting(Arc<dyn RelayHost>, Arc<AtomicUsize>);

impl RelayHost for Counting {
    fn is_encrypted(&self) -> bool {
        self.0.is_encrypted()
    }

    fn open(&self, relayed: Relayed) -> Result<Box<dyn Relaying>, Error> {
        self.1.fetch_add(1, Ordering::SeqCst);
        self.0.open(relayed)
    }
}

#[test]
fn what_comes_encrypted_is_not_relayed_in_the_clear() {
    let state = State::of(&[40 * BLOCK], 1);
    let config = |tls| ServerConfig { tls, swarm: true, ..local() };
    for (source_tls, member_tls, relays) in [(true, false, 0), (true, true, 1), (false, false, 1), (false, true, 1)] {
        let (source, rig) = (Rig::configured(&config(source_tls)), Rig::configured(&config(member_tls)));
        source.server.store().publish(STEP, state.publication(Stability::Borrowed));
        let opened = Arc::<AtomicUsize>::default();
        let host = Counting(rig.server.relay_host(), Arc::clone(&opened));
        state.fetch(&[&source.url()], FetchOptions { relay: Some(Arc::new(host)), ..member(&rig) }).unwrap();
        assert_eq!(opened.load(Ordering::SeqCst), relays, "{source_tls} {member_tls}");
    }
}

#[test]
fn digests_to_compare_with_are_computed_for_two_members_and_not_for_one() {
    let source = offering(&State::of(&[4 * BLOCK], 1), None);
    let mut member = join(&source, 1);
    for _ in 0..50 {
        assert!(!ask_by(&mut member, &source, 1, "").text().contains("table"));
    }
    let _other = join(&source, 2);
    eventually("there is a table", || ask_by(&mut member, &source, 1, "").text().contains("table 1"));
}

#[test]
fn a_tracker_refuses_what_is_no_question() {
    let state = State::of(&[16 * BLOCK], 1);
    let source = offering(&state, None);
    assert_eq!(
        get(&source, &source.path("7.safetensors"), &[("Range", "bytes=0-9")]).header("tensorferry-swarm"),
        Some("1")
    );
    for query in ["", "?", "?port=1", "?port=1&token=../x", "?token=00", "?port=99999&token=00"] {
        assert_eq!(get(&source, &source.path(&format!("7/swarm{query}")), &[]).status, 400, "{query}");
    }
    let token = "0".repeat(32);
    let path = source.path(&format!("7/swarm?port=1&token={token}&need=0-9,400-500"));
    assert_eq!(get(&source, &path, &[("If-Match", "\"other\"")]).status, 412);
    assert_eq!(get(&source, &path.replace("/7/", "/8/"), &[]).status, 400);
    let answer = get(&source, &path, &[("If-Match", &etag(&source))]);
    assert_eq!((answer.status, answer.text().lines().next()), (200, Some("grant 0-9")));
    assert_eq!(get(&source, &source.path("7/have"), &[]).status, 404, "a source relays nothing");
    // However many ask, the answer stays short.
    for port in 1..200 {
        let answer = ask(&source, port, "&need=0-4");
        assert!(answer.status == 200 && answer.text().lines().count() < 20);
    }
    let stranger = source.path("7/swarm?port=1").replacen('/', "/0", 1);
    assert_eq!(get(&source, &stranger, &[]).status, 404);
}
