//! A publication whose memory is filled while it is served: final bytes are sent, receivers wait for the others, and
//! no other request is delayed by that.

use std::io::Read;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::common::local::{LocalReader, name_of};
use crate::common::raw::{Raw, begin, get, metrics};
use crate::common::{BLOCK, Owner, PATIENCE, Rig, STEP, State, eventually, lanes, local, noise};
use tensorferry_core::{
    Alternate, Destination, Error, ErrorKind, FetchOptions, Item, Memory, Publication, Readiness, Remote, Rendered,
    ServerConfig, Stability, Withdrawn,
};
use tensorferry_wire::digest::{DigestTable, checksum};
use tensorferry_wire::dtype::Dtype;

const LARGE: usize = 24 * BLOCK;
const POISON: u8 = 0xA5;
/// The only header field that shows that a publication is still being filled.
const FILLING: &str = "tensorferry-filling";

/// Publishes memory of two entries that starts as poison, and fills it with `expected`.
struct Filler {
    memory: Arc<Mutex<Vec<u8>>>,
    expected: Vec<u8>,
    filling: Option<Readiness>,
    filled: usize,
}

impl Filler {
    /// Publishes the memory on `rig`.
    fn on(rig: &Rig, len: usize, stability: Stability) -> Self {
        Self::with(rig, len, stability, Box::new(()), None)
    }

    fn with(
        rig: &Rig,
        len: usize,
        stability: Stability,
        owner: Box<dyn std::any::Any + Send + Sync>,
        alternate: Option<Box<dyn Alternate>>,
    ) -> Self {
        let memory = Arc::new(Mutex::new(vec![POISON; len]));
        let address = memory.lock().unwrap().as_mut_ptr() as usize;
        let owner = Box::new((owner, Arc::clone(&memory)));
        let item = |name: &str, start: usize, end: usize| {
            // SAFETY: the owner keeps it, and its length does not change.
            let memory = unsafe { Memory::borrowed(address + start, end - start) };
            Item::new(name, Dtype::U8, &[(end - start) as u64], memory)
        };
        let items = vec![item("a", 0, len / 3), item("b", len / 3, len)];
        let (publication, filling) = Publication::with_readiness(Vec::new(), items, stability, owner).unwrap();
        assert_eq!(filling.starts(), [0, (len / 3) as u64]);
        let publication = match alternate {
            Some(alternate) => publication.with_alternate(alternate),
            None => publication,
        };
        rig.server.store().publish(STEP, publication);
        Self { memory, expected: noise(len, 3), filling: Some(filling), filled: 0 }
    }

    fn filling(&self) -> &Readiness {
        self.filling.as_ref().unwrap()
    }

    /// Writes the bytes up to `len` and marks them as final.
    fn fill(&mut self, len: usize) {
        let bytes = &self.expected[self.filled..len];
        // SAFETY: inside the memory; readers do not look at it before they are told below.
        unsafe {
            let target = self.memory.lock().unwrap().as_mut_ptr().add(self.filled);
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), target, bytes.len());
        }
        self.filled = len;
        self.filling().raise(len as u64);
    }

    fn finish(&mut self) {
        self.fill(self.expected.len());
        self.filling.take().unwrap().finish();
    }

    fn state(&self) -> State {
        let third = self.expected.len() / 3;
        State(vec![
            ("a".to_owned(), self.expected[..third].to_vec().into()),
            ("b".to_owned(), self.expected[third..].to_vec().into()),
        ])
    }
}

fn in_background(fetch: impl FnOnce() -> Result<(), Error> + Send + 'static) -> JoinHandle<Result<(), Error>> {
    std::thread::spawn(fetch)
}

#[test]
fn bytes_are_sent_up_to_the_mark_and_not_further() {
    let rig = Rig::new();
    let mut filler = Filler::on(&rig, LARGE, Stability::Private);
    filler.fill(5 * BLOCK / 2);
    let mut reader = Raw::asking(&rig, "7.safetensors");
    let head = reader.head();
    assert_eq!((head.status, head.header(FILLING)), (200, Some("1")));
    let length: usize = head.header("content-length").unwrap().parse().unwrap();
    let start = length - LARGE;
    reader.read_to(start + 2 * BLOCK);
    assert!(reader.is_silent(), "a byte of a block that is not final");
    // A mark below the current one takes nothing back.
    filler.filling().raise(BLOCK as u64);
    let second = format!("bytes={}-{}", start + BLOCK, start + 2 * BLOCK - 1);
    assert!(get(&rig, &rig.path("7.safetensors"), &[("Range", &second)]).header(FILLING).is_none());
    filler.fill(5 * BLOCK);
    reader.read_to(start + 5 * BLOCK);
    assert!(reader.is_silent());
    // A request for final bytes only is answered as usual.
    let part = get(&rig, &rig.path("7.safetensors"), &[("Range", &format!("bytes={start}-{}", start + BLOCK - 1))]);
    assert!(part.status == 206 && part.header(FILLING).is_none() && part.body == filler.expected[..BLOCK]);
    assert_eq!(get(&rig, &rig.path("7/header"), &[]).body.len(), start);
    filler.finish();
    reader.read_to(length);
    assert!(reader.buffer[start..] == filler.expected, "wrong bytes");
    assert_eq!(Raw::asking(&rig, "7.safetensors").head().header(FILLING), None);
}

#[test]
fn receives_go_along_with_the_filling_and_are_verified() {
    let config = ServerConfig { ..local() };
    for (tls, same_host) in [(false, false), (false, true), (true, false)] {
        for stability in [Stability::Private, Stability::Borrowed] {
            let rig = Rig::configured(&ServerConfig { tls, ..config.clone() });
            let mut filler = Filler::on(&rig, LARGE, stability);
            let (url, state) = (rig.url(), filler.state());
            let receives: Vec<_> = [1, 3]
                .map(|count| {
                    let (url, state) = (url.clone(), state.clone());
                    in_background(move || {
                        let options = FetchOptions { same_host, ..lanes(count) };
                        let arrived = state.fetch(&[&url], options)?;
                        assert_eq!((arrived.report().same_host, arrived.report().retries), (same_host, 0));
                        Ok(())
                    })
                })
                .into();
            let mut sent = 0;
            for len in [BLOCK, 7 * BLOCK / 2, 11 * BLOCK, LARGE - 1] {
                filler.fill(len);
                // At least one receiver got some of the new bytes before later ones were written.
                eventually("bytes come before all is there", || rig.server.bytes_served() > sent);
                sent = rig.server.bytes_served().max(len as u64);
            }
            filler.finish();
            for receive in receives {
                receive.join().unwrap().unwrap();
            }
            drop(rig);
        }
    }
}

#[test]
fn slots_of_shared_memory_are_lent_up_to_the_mark() {
    let rig = Rig::new();
    let mut filler = Filler::on(&rig, LARGE, Stability::Private);
    let mut local = LocalReader::connect(&name_of(&rig));
    // The header takes a part of the first slot.
    let slot = local.slot_len;
    filler.fill(slot);
    let header = get(&rig, &rig.path("7/header"), &[]).body.len();
    local.request(&rig.path("7.safetensors"));
    assert!(local.head().contains(FILLING));
    let mut lent = |count: usize| {
        local.stream.read_exact(&mut vec![0; count]).unwrap();
        local.stream.set_read_timeout(Some(Duration::from_millis(150))).unwrap();
        assert!(local.stream.read(&mut [0]).is_err(), "a slot that is not final");
        local.stream.set_read_timeout(Some(PATIENCE)).unwrap();
        local.content()
    };
    assert!(lent(1)[header..slot] == filler.expected[..slot - header]);
    filler.fill(3 * slot);
    assert!(lent(2)[header..3 * slot] == filler.expected[..3 * slot - header]);
    filler.finish();
    lent(1);
}

#[test]
fn digests_wait_for_the_blocks_they_are_of() {
    let rig = Rig::new();
    let mut filler = Filler::on(&rig, 4 * BLOCK + 5, Stability::Private);
    filler.fill(3 * BLOCK - 1);
    let ask = |query: &str| Raw::asking(&rig, &format!("7/digests{query}"));
    let expected: Vec<u64> = filler.expected.chunks(BLOCK).map(checksum).collect();
    let early = DigestTable::decode(&ask("?blocks=0-2").answer().body).unwrap();
    assert_eq!(early.blocks, expected[..2]);
    assert!(DigestTable::decode(&ask("?blocks=0-0").answer().body).unwrap().blocks.is_empty());
    let mut late = [ask(""), ask("?blocks=2-3"), ask("?blocks=768-769&grain=4096"), ask("?blocks=4-5")];
    for raw in &mut late {
        assert!(raw.is_silent());
    }
    filler.finish();
    let tables: Vec<_> = late.map(|mut raw| raw.answer().body).into();
    assert_eq!(DigestTable::decode(&tables[0]).unwrap().blocks, expected);
    assert_eq!(DigestTable::decode(&tables[1]).unwrap().blocks, expected[2..3]);
    let fine = [checksum(&filler.expected[768 * 4096..769 * 4096])];
    let algorithm = tensorferry_wire::digest::Algorithm::Crc64;
    assert_eq!(DigestTable::decode_with_block_size(&tables[2], &algorithm, 4096).unwrap().blocks, fine);
    assert_eq!(DigestTable::decode(&tables[3]).unwrap().blocks, expected[4..]);
}

/// Counts how often it is called.
struct Noting(Arc<AtomicUsize>);

impl Alternate for Noting {
    fn render(&self, _: &str) -> Result<Option<Rendered>, String> {
        self.0.fetch_add(1, Ordering::SeqCst);
        Ok(Some(Rendered { parts: vec![bytes::Bytes::from_static(b"other").into()], owner: Box::new(()) }))
    }
}

#[test]
fn other_formats_are_built_when_all_is_there() {
    let rig = Rig::new();
    let asked = Arc::new(AtomicUsize::new(0));
    let alternate: Box<dyn Alternate> = Box::new(Noting(Arc::clone(&asked)));
    let mut filler = Filler::with(&rig, LARGE, Stability::Private, Box::new(()), Some(alternate));
    filler.fill(LARGE - 1);
    let mut raw = Raw::asking(&rig, "7/full");
    assert!(raw.is_silent());
    assert_eq!(asked.load(Ordering::SeqCst), 0, "it reads what is not there");
    filler.finish();
    assert_eq!(raw.answer().body, b"other");
}

/// Says that it begins to build a body, and builds it when it is told to.
struct Told(mpsc::Sender<String>, Mutex<mpsc::Receiver<()>>);

impl Alternate for Told {
    fn render(&self, name: &str) -> Result<Option<Rendered>, String> {
        self.0.send(name.to_owned()).unwrap();
        self.1.lock().unwrap().recv().map_err(|_| "the test is over".to_owned())?;
        let body = bytes::Bytes::from(format!("body {name}"));
        Ok(Some(Rendered { parts: vec![body.into()], owner: Box::new(()) }))
    }
}

#[test]
fn a_body_that_is_being_built_keeps_those_waiting_who_ask_for_it_and_nobody_else() {
    let rig = Rig::on(
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).max_blocking_threads(3).enable_all(),
        &ServerConfig::default(),
    );
    let (begins, begun) = mpsc::channel();
    let (tell, told) = mpsc::channel();
    let alternate: Box<dyn Alternate> = Box::new(Told(begins, Mutex::new(told)));
    let state = State::of(&[BLOCK], 3);
    rig.server.store().publish(STEP, state.publication(Stability::Private).with_alternate(alternate));
    let ask = |name: &str| Raw::asking(&rig, &format!("7/{name}"));
    let mut asked = vec![ask("1")];
    assert_eq!(begun.recv_timeout(PATIENCE).unwrap(), "1");
    asked.extend((0..4).map(|_| ask("1")));
    let mut other = ask("2");
    // More than the threads of the runtime, and they wait for the first body. A slow machine can hide that one waits for
    // too long, and cannot make it.
    std::thread::sleep(Duration::from_millis(100));
    // Nor do they have the threads that compute digests and serve receivers of this machine.
    assert_eq!(get(&rig, &rig.path("7/digests"), &[]).status, 200);
    tell.send(()).unwrap();
    assert_eq!(begun.recv_timeout(PATIENCE).unwrap(), "2");
    assert_eq!(get(&rig, "/healthz", &[]).status, 200);
    asked.push(ask("1"));
    for raw in &mut asked {
        assert_eq!(raw.answer().text(), "body 1");
    }
    tell.send(()).unwrap();
    assert_eq!(other.answer().text(), "body 2");
    assert!(begun.try_recv().is_err(), "a body was built twice");
}

/// A private copy whose first block is final, and a reader that has read it and waits for the rest of `length` bytes.
fn half_read(rig: &Rig) -> (Filler, Raw, usize) {
    let mut filler = Filler::on(rig, LARGE, Stability::Private);
    filler.fill(BLOCK);
    let (mut reader, length) = begin(rig);
    reader.read_to(length - LARGE + BLOCK);
    (filler, reader, length)
}

#[test]
fn a_private_copy_that_is_withdrawn_is_filled_for_those_who_have_begun() {
    let rig = Rig::new();
    let (mut filler, mut reader, length) = half_read(&rig);
    assert_eq!(rig.server.store().withdraw(PATIENCE), Withdrawn::Clean);
    assert!(filler.filling().is_wanted());
    filler.finish();
    reader.read_to(length);
    assert!(reader.buffer.ends_with(&filler.expected));
}

#[test]
fn borrowed_memory_is_withdrawn_from_those_who_wait_for_it() {
    let rig = Rig::new();
    let mut filler = Filler::on(&rig, LARGE, Stability::Borrowed);
    filler.fill(BLOCK);
    let (mut reader, _) = begin(&rig);
    let _local = LocalReader::reading(&rig, "7.safetensors");
    let mut digests = Raw::asking(&rig, "7/digests");
    eventually("all three wait", || rig.server.store().active() == 3);
    assert_eq!(rig.server.store().withdraw(Duration::ZERO), Withdrawn::Cut(3));
    assert_eq!(rig.server.store().active(), 0);
    eventually("nobody wants it", || !filler.filling().is_wanted());
    filler.memory.lock().unwrap().fill(POISON);
    filler.filling().raise(LARGE as u64);
    assert!(!reader.rest().windows(64).any(|w| w == [POISON; 64]));
    assert!(digests.is_ended());
}

#[test]
fn a_shutdown_does_not_wait_for_the_filling() {
    let rig = Rig::new();
    let mut filler = Filler::on(&rig, LARGE, Stability::Private);
    filler.fill(BLOCK);
    let (mut reader, _) = begin(&rig);
    let _local = LocalReader::reading(&rig, "7.safetensors");
    let mut digests = Raw::asking(&rig, "7/digests");
    eventually("they wait", || rig.server.store().active() >= 3);
    rig.server.shutdown(PATIENCE);
    assert_eq!(rig.server.store().active(), 0);
    reader.rest();
    assert!(digests.is_ended());
    eventually("nobody wants it", || !filler.filling().is_wanted());
}

#[test]
fn one_that_is_given_up_ends_its_readers_with_an_error_and_leaves_no_trace() {
    for same_host in [false, true] {
        let rig = Rig::new();
        let dropped = Arc::new(AtomicUsize::new(0));
        let owner = Box::new(Owner(Arc::clone(&dropped)));
        let mut filler = Filler::with(&rig, LARGE, Stability::Private, owner, None);
        filler.fill(BLOCK);
        let url = rig.url();
        let receive = in_background(move || {
            let options = FetchOptions { same_host, ..lanes(2) };
            Remote::open(&[&url], STEP, options)?.fetch(Destination::Fresh).map(drop)
        });
        let (mut reader, length) = begin(&rig);
        let mut digests = Raw::asking(&rig, "7/digests");
        eventually("they wait", || rig.server.store().active() >= 4);
        let store = rig.server.store();
        store.abandon(filler.filling.take().unwrap());
        assert!(reader.rest().len() < length);
        // The receive does not run into its deadline: the snapshot is gone, and the source reports that.
        let failed = receive.join().unwrap().unwrap_err();
        assert_eq!(failed.kind(), ErrorKind::Changed, "{failed}");
        assert!(digests.is_ended() || digests.buffer.starts_with(b"HTTP/1.1 412"));
        assert!(!store.is_allowed());
        eventually("the owner is let go of", || dropped.load(Ordering::SeqCst) == 1);
        // Other requests wait for the next snapshot, as after a withdrawal.
        let mut waiting = Raw::asking(&rig, "7.safetensors");
        let next = State::of(&[BLOCK], 5);
        store.publish(STEP, next.publication(Stability::Private));
        assert!(waiting.answer().body.ends_with(next.bytes("w0")));
        drop(rig);
    }
}

#[test]
fn a_receive_without_one_byte_learns_at_once_that_the_source_gave_up() {
    // The bytes that are final when the receive begins, and whether the source publishes another snapshot afterwards.
    let cases = [(0, false), (BLOCK / 2, false), (0, true)];
    for (same_host, (filled, next)) in [false, true].into_iter().flat_map(|s| cases.map(|case| (s, case))) {
        let rig = Rig::new();
        let mut filler = Filler::on(&rig, LARGE, Stability::Private);
        filler.fill(filled);
        let replacement = State::of(&[BLOCK], 5);
        let (url, expected) = (rig.url(), replacement.clone());
        let receive = in_background(move || {
            let options = FetchOptions { same_host, ..lanes(2) };
            expected.fetch(&[&url], options).map(drop)
        });
        // Not for the header: a receive that has not got that waits for what comes next.
        eventually("it waits", || rig.server.bytes_served() > 0 && rig.server.store().active() >= 1);
        std::thread::sleep(Duration::from_millis(100));
        eventually("it still waits", || rig.server.store().active() >= 1);
        let given_up = Instant::now();
        rig.server.store().abandon(filler.filling.take().unwrap());
        if next {
            rig.server.store().publish(STEP, replacement.publication(Stability::Private));
            receive.join().unwrap().unwrap();
        } else {
            let failed = receive.join().unwrap().unwrap_err();
            assert_eq!(failed.kind(), ErrorKind::Changed, "{failed}");
            assert!(failed.to_string().contains("no longer served"), "{failed}");
            assert!(given_up.elapsed() < PATIENCE / 2, "it waited for {:?}", given_up.elapsed());
        }
        drop(rig);
    }
}

#[test]
fn giving_up_one_that_was_replaced_leaves_the_new_one_alone() {
    let rig = Rig::new();
    let (mut filler, mut reader, length) = half_read(&rig);
    let next = State::of(&[BLOCK], 5);
    rig.server.store().publish(STEP, next.publication(Stability::Private));
    rig.server.store().abandon(filler.filling.take().unwrap());
    assert!(reader.rest().len() < length);
    assert!(rig.server.store().is_allowed());
    next.fetch(&[&rig.url()], lanes(1)).unwrap();
}

#[test]
fn a_filling_that_is_dropped_ends_those_who_come_to_what_is_missing() {
    let rig = Rig::new();
    let mut filler = Filler::on(&rig, LARGE, Stability::Private);
    filler.fill(BLOCK);
    let (mut reader, length) = begin(&rig);
    let mut local = LocalReader::reading(&rig, "7.safetensors");
    filler.filling = None;
    assert!(reader.rest().len() < length);
    let mut left = Vec::new();
    let _ = local.stream.read_to_end(&mut left);
    assert!(left.len() < 2 * LARGE / BLOCK);
    // Bytes that are final can still be requested.
    let start = length - LARGE;
    let range = format!("bytes=0-{}", start + BLOCK - 1);
    let part = get(&rig, &rig.path("7.safetensors"), &[("Range", &range)]);
    assert!(part.status == 206 && part.body.ends_with(&filler.expected[..BLOCK]));
}

#[test]
fn a_receiver_that_hears_nothing_while_the_source_copies_does_not_give_up() {
    for same_host in [false, true] {
        let rig = Rig::new();
        let filler = Arc::new(Mutex::new(Filler::on(&rig, LARGE, Stability::Private)));
        filler.lock().unwrap().fill(2 * BLOCK);
        let (url, state) = (rig.url(), filler.lock().unwrap().state());
        let receive = in_background(move || {
            let options = FetchOptions { stall: Duration::from_millis(100), same_host, ..lanes(1) };
            let arrived = state.fetch(&[&url], options)?;
            assert!(arrived.report().same_host == same_host && arrived.report().retries > 8);
            Ok(())
        });
        let requests = || {
            let metrics = metrics(&rig);
            let count = metrics.lines().find_map(|l| l.strip_prefix("tensorferry_answers_total{code=\"206\"} "));
            count.map_or(0, |count| count.parse::<u32>().unwrap())
        };
        // More than the number of consecutive failures after which a lane gives up.
        eventually("it asks again", || requests() > 12);
        filler.lock().unwrap().finish();
        receive.join().unwrap().unwrap();
        drop(rig);
    }
}
