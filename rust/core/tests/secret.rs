//! The shared secret: a peer that does not have it gets nothing, and nothing it sends is accepted.

use std::io::Write;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::common::faults::Liar;
use crate::common::local::{LocalReader, NAME_HEADER};
use crate::common::raw::{Answer, Raw, get, request};
use crate::common::{BLOCK, PATIENCE, Rig, STEP, State};
use crate::swarm_forgery::forge;
use tensorferry_core::{Destination, Error, ErrorKind, FetchOptions, Remote, Secret, ServerConfig, Stability};
use tensorferry_wire::digest::DigestTable;
use tensorferry_wire::proof::{self, Key};

const SECRET: &[u8] = b"of all that is shared here, this alone stays unsaid";
const OTHER: &[u8] = b"of all that is shared here, this alone stays unsaiD";
const ETAG: &str = "etag";

fn secret() -> Secret {
    Secret::new(SECRET).unwrap()
}

fn rig(secret: Option<Secret>) -> Rig {
    let bind = Some([127, 0, 0, 1].into());
    Rig::configured(&ServerConfig { secret, bind, same_host: true, ..ServerConfig::default() })
}

fn serving(state: &State) -> Rig {
    let rig = rig(Some(secret()));
    rig.server.store().publish(STEP, state.publication(Stability::Private));
    rig
}

fn knowing(secret: Option<Secret>) -> FetchOptions {
    FetchOptions { secret, same_host: false, ..FetchOptions::within(PATIENCE) }
}

fn state() -> State {
    State::of(&[5 * BLOCK + 3, 700, 2 * BLOCK], 1)
}

fn fetch(url: &str, options: FetchOptions) -> Result<(), Error> {
    Remote::open(&[url], STEP, options)?.fetch(Destination::Fresh).map(drop)
}

/// An `Authorization` field for a GET of `path`.
fn proof_with(secret: &[u8], path: &str, range: Option<&str>, if_match: Option<&str>) -> String {
    static NEXT: AtomicUsize = AtomicUsize::new(1);
    let nonce = (NEXT.fetch_add(1, Ordering::Relaxed) as u128).to_le_bytes();
    let asked = proof::SignedRequest { method: "GET", path, range, if_match };
    Key::new(secret).unwrap().sign_request(&asked, &nonce)
}

fn proof(path: &str) -> String {
    proof_with(SECRET, path, None, None)
}

/// Everything an answer reveals, except the time of day.
fn told(mut answer: Answer) -> (u16, String, Vec<(String, String)>, Vec<u8>) {
    answer.headers.retain(|(name, _)| name != "date");
    (answer.status, answer.reason, answer.headers, answer.body)
}

#[test]
fn who_has_it_fetches_every_byte() {
    // Large enough for shared memory to be used.
    let state = State::of(&[15 * BLOCK + 3, 700, 2 * BLOCK], 1);
    let (rig, second) = (rig(Some(secret())), serving(&state));
    for stability in [Stability::Private, Stability::Borrowed] {
        rig.server.store().publish(STEP, state.publication(stability));
        for lanes in [None, Some(1), Some(3)] {
            for same_host in [false, true] {
                let options = FetchOptions { lanes, same_host, ..knowing(Some(secret())) };
                let arrived = state.fetch(&[&rig.url()], options.clone()).unwrap();
                assert_eq!((arrived.report().same_host, arrived.report().retries), (same_host, 0));
                let arrived = state.fetch(&[&rig.url(), &second.url()], options).unwrap();
                assert_eq!(arrived.report().troubles.len(), 0, "{:?}", arrived.report().troubles);
            }
        }
    }
    // A state small enough to come with the first request, and an empty one.
    for sizes in [&[100][..], &[]] {
        let small = State::of(sizes, 3);
        rig.server.store().publish(STEP, small.publication(Stability::Private));
        small.fetch(&[&rig.url()], knowing(Some(secret()))).unwrap();
    }
}

#[test]
fn without_a_proof_everything_is_like_a_wrong_path() {
    let rig = serving(&state());
    let nowhere = told(get(&rig, "/0/checkpoint/7.safetensors", &[]));
    assert_eq!((nowhere.0, nowhere.1.as_str()), (404, "not found"));
    let file = rig.path("7.safetensors");
    let mut paths: Vec<_> =
        ["7.safetensors", "7/header", "7/digests", "7/digests?blocks=0-1", "7/full", "7/metadata", "7/0", "8/header"]
            .map(|tail| rig.path(tail))
            .to_vec();
    // Invalid paths below the right random token reveal nothing either.
    paths.extend([rig.path("a/b/c/d"), rig.path("x.safetensors")]);
    paths.push(rig.path("").replace("checkpoint/", "healthz"));
    for path in &paths {
        assert_eq!(told(get(&rig, path, &[])), nowhere, "{path}");
        let wrong = proof_with(OTHER, path, None, None);
        assert_eq!(told(get(&rig, path, &[("Authorization", &wrong)])), nowhere, "{path}, another secret");
    }
    assert_eq!(get(&rig, "/healthz", &[]).status, 200, "liveness is for everybody");
    // The list of methods is not secret: it is the same for every server.
    let posted = told(request(&rig, "POST", &file, &[]));
    assert_eq!(posted, told(request(&rig, "POST", "/nowhere", &[])));
    // Browsers and scrapers know no proofs: the status page and the counters need the random part alone.
    let open = [rig.path(""), rig.path("").replace("checkpoint/", ""), rig.path("").replace("checkpoint/", "metrics")];
    for path in &open {
        assert_eq!(get(&rig, path, &[]).status, 200, "{path}");
    }
    let wrong = [
        ("no proof".to_owned(), String::new()),
        ("another scheme".to_owned(), "Basic dXNlcjpwYXNz".to_owned()),
        ("of another step".to_owned(), proof(&rig.path("8.safetensors"))),
        ("of another resource".to_owned(), proof(&rig.path("7/header"))),
        ("of a range".to_owned(), proof_with(SECRET, &file, Some("bytes=0-9"), None)),
        ("cut short".to_owned(), proof(&file)[..100].to_owned()),
    ];
    for (what, field) in &wrong {
        assert_eq!(told(get(&rig, &file, &[("Authorization", field)])), nowhere, "{what}");
    }
    // The proof covers the range, and a second value of the field cannot be smuggled in.
    let field = proof_with(SECRET, &file, Some("bytes=0-9"), None);
    let smuggled = [("Authorization", field.as_str()), ("Range", "bytes=0-9"), ("Range", "bytes=0-99")];
    assert_eq!(told(get(&rig, &file, &smuggled)), nowhere);
    let answer = get(&rig, &file, &[("Authorization", &field), ("Range", "bytes=0-9")]);
    assert_eq!((answer.status, answer.body.len()), (206, 10));
}

#[test]
fn the_local_socket_asks_for_the_proof_too() {
    let rig = serving(&state());
    let path = rig.path("7/header");
    let told = get(&rig, &path, &[("Authorization", &proof(&path))]);
    let name = told.header(NAME_HEADER).unwrap();
    for (field, status) in [("x".to_owned(), "404"), (proof(&path), "200")] {
        let mut reader = LocalReader::connect(name);
        let request = format!("GET {path} HTTP/1.1\r\nHost: t\r\nAuthorization: {field}\r\n\r\n");
        reader.stream.write_all(request.as_bytes()).unwrap();
        let head = reader.head();
        assert!(head.starts_with(&format!("HTTP/1.1 {status}")), "{head}");
    }
    // The name of the local socket is not revealed to other clients.
    assert_eq!(get(&rig, &path, &[]).header(NAME_HEADER), None);
}

#[test]
fn a_source_that_cannot_prove_it_is_left_for_one_that_can() {
    let state = state();
    let (guarded, open) = (serving(&state), Rig::serving(&state));
    for lanes in [1, 3] {
        let options = FetchOptions { lanes: Some(lanes), ..knowing(Some(secret())) };
        state.fetch(&[&open.url(), &guarded.url()], options.clone()).unwrap();
        let arrived = state.fetch(&[&guarded.url(), &open.url()], options).unwrap();
        // A second lane begins at the other source, unless the first lane finishes before that.
        assert!(arrived.report().troubles.len() <= usize::from(lanes > 1), "{:?}", arrived.report().troubles);
    }
}

/// What a man in the middle does to an answer of the source: it sees the request's head and changes the answer.
type Meddle = Box<dyn Fn(&str, &mut Answer) + Send + Sync>;

/// A man in the middle between a receiver and the source `rig`, without the secret. Returns it and its URL.
fn between(rig: &Rig, meddle: Meddle) -> (Liar, String) {
    let address = rig.server.address();
    let liar = Liar::new(move |mut stream, head, _| {
        let mut upstream = Raw::connect(address);
        upstream.stream.write_all(head.as_bytes())?;
        let mut answer = upstream.answer();
        meddle(head, &mut answer);
        write!(stream, "HTTP/1.1 {} {}\r\n", answer.status, answer.reason)?;
        let length = answer.body.len().to_string();
        answer.headers.retain(|(name, _)| name != "content-length");
        answer.headers.push(("content-length".to_owned(), length));
        for (name, value) in &answer.headers {
            write!(stream, "{name}: {value}\r\n")?;
        }
        stream.write_all(b"\r\n")?;
        stream.write_all(&answer.body)
    });
    let authority = liar.url().split('/').nth(2).unwrap().to_owned();
    let url = rig.url().replace(rig.url().split('/').nth(2).unwrap(), &authority);
    (liar, url)
}

fn set(answer: &mut Answer, name: &str, value: &str) {
    answer.headers.iter_mut().filter(|(n, _)| n == name).for_each(|(_, v)| value.clone_into(v));
}

/// The result of a receive whose answers pass through `meddle`.
fn through(rig: &Rig, meddle: impl Fn(&str, &mut Answer) + Send + Sync + 'static) -> Result<(), Error> {
    let (_liar, url) = between(rig, Box::new(meddle));
    fetch(&url, FetchOptions { lanes: Some(2), ..knowing(Some(secret())) })
}

#[test]
fn a_block_forged_to_its_checksum_is_found_with_a_secret_and_not_without() {
    let state = state();
    let (guarded, open) = (serving(&state), Rig::serving(&state));
    let forger = |head: &str, answer: &mut Answer| {
        if head.contains(".safetensors ") && answer.body.len() == BLOCK && !covers_the_start(answer) {
            forge(&mut answer.body);
        }
    };
    let (_liar, url) = between(&open, Box::new(forger));
    fetch(&url, FetchOptions { lanes: Some(2), ..knowing(None) }).unwrap();
    let refused = through(&guarded, forger).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Corrupt, "{refused}");
}

/// Whether an answer holds the beginning of the container.
fn covers_the_start(answer: &Answer) -> bool {
    answer.header("content-range").unwrap().starts_with("bytes 0-")
}

/// What an answer brings: digests, the beginning of the container, or the rest of it.
#[derive(Clone, Copy)]
enum Part {
    Digests,
    Start,
    Rest,
}

impl Part {
    fn is_in(self, head: &str, answer: &Answer) -> bool {
        match self {
            Self::Digests => head.contains("/digests"),
            Self::Start => head.contains(".safetensors ") && covers_the_start(answer),
            Self::Rest => head.contains(".safetensors ") && !covers_the_start(answer),
        }
    }
}

/// What is changed in which part of the answers, and how the receive ends.
type Case = (&'static str, ErrorKind, Part, fn(&mut Answer));

#[test]
fn what_somebody_in_between_changes_is_never_believed() {
    let rig = serving(&state());
    let cases: [Case; 6] = [
        ("no proof", ErrorKind::Unproven, Part::Digests, |a| a.headers.retain(|(name, _)| name != proof::PROOF_HEADER)),
        ("zeros", ErrorKind::Unproven, Part::Digests, |a| set(a, proof::PROOF_HEADER, &"0".repeat(64))),
        ("the tag of another snapshot", ErrorKind::Unproven, Part::Digests, |a| set(a, ETAG, "\"0000000000000000-1\"")),
        // A forger computes the digests of its own bytes as well as it can without the key.
        ("a table with a forger's digests", ErrorKind::Unproven, Part::Digests, |a| {
            let (own, forger) = (Key::new(SECRET).unwrap(), Key::new(OTHER).unwrap());
            let mut table = DigestTable::decode_as(&a.body, own.digests()).unwrap();
            table.blocks.iter_mut().for_each(|block| *block = forger.digests().checksum(&block.to_le_bytes()));
            a.body = table.encode_as(forger.digests());
        }),
        // The header is parsed before it can be verified, but nothing is done with it until then.
        ("another name in the header", ErrorKind::Corrupt, Part::Start, |a| {
            let at = a.body.windows(4).position(|w| w == b"\"w1\"").unwrap();
            a.body[at + 1] = b'v';
        }),
        ("a byte of a late block", ErrorKind::Corrupt, Part::Rest, |a| {
            let middle = a.body.len() / 2;
            a.body[middle] ^= 1;
        }),
    ];
    for (what, kind, part, change) in cases {
        let meddle = move |head: &str, answer: &mut Answer| {
            if part.is_in(head, answer) {
                change(answer);
            }
        };
        let refused = through(&rig, meddle).expect_err(what);
        assert_eq!(refused.kind(), kind, "{what}: {refused}");
    }
}

#[test]
fn what_was_recorded_earlier_proves_nothing() {
    // The impostor has recorded all answers to one receiver, and replays them to the next one.
    let rig = serving(&state());
    let recorded = std::sync::Arc::new(Mutex::new(Vec::<(String, Vec<(String, String)>, Vec<u8>)>::new()));
    let tape = std::sync::Arc::clone(&recorded);
    let path = |head: &str| head.split(' ').nth(1).unwrap().to_owned();
    through(&rig, move |head, answer| {
        let key = format!("{} {:?}", path(head), answer.header("content-range"));
        tape.lock().unwrap().push((key, answer.headers.clone(), answer.body.clone()));
    })
    .unwrap();
    rig.server.store().publish(STEP, State::of(&[5 * BLOCK + 3, 700, 2 * BLOCK], 2).publication(Stability::Private));
    let refused = through(&rig, move |head, answer| {
        let key = format!("{} {:?}", path(head), answer.header("content-range"));
        if let Some((_, headers, body)) = recorded.lock().unwrap().iter().find(|(k, ..)| *k == key) {
            answer.status = if head.contains("/digests") { 200 } else { 206 };
            answer.headers.clone_from(headers);
            answer.body.clone_from(body);
        }
    })
    .unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unproven, "{refused}");
}

#[test]
fn an_overheard_request_is_of_no_use() {
    let rig = serving(&state());
    let heard = std::sync::Arc::new(Mutex::new(Vec::new()));
    let ear = std::sync::Arc::clone(&heard);
    through(&rig, move |head, _| ear.lock().unwrap().push(head.to_owned())).unwrap();
    let heard = heard.lock().unwrap().clone();
    assert!(heard.len() >= 3);
    for head in heard {
        assert!(!head.contains(std::str::from_utf8(SECRET).unwrap()));
        let mut raw = Raw::to(&rig);
        raw.stream.write_all(head.as_bytes()).unwrap();
        assert_eq!(raw.answer().status, 404, "{head}");
    }
}
