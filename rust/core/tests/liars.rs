//! Sources that do not keep to the protocol: each lie ends the transfer in time, with a kind of error that fits it.

use crate::common::raw::get;
use std::io::Write;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::common::faults::{Liar, asked_range};
use crate::common::{BLOCK, Rig, STEP, State};
use tensorferry_core::{Destination, ErrorKind, FetchOptions, Hint, Remote};

/// Fetches from a server that answers every request with `answer`. Returns the error after checking that it came in
/// time.
fn told(what: &str, answer: impl Into<Vec<u8>>) -> tensorferry_core::Error {
    let answer = answer.into();
    lied_to(what, &Liar::new(move |mut stream, _, _| stream.write_all(&answer)))
}

fn lied_to(what: &str, liar: &Liar) -> tensorferry_core::Error {
    lied_to_for(Duration::from_secs(8), what, liar)
}

fn lied_to_for(timeout: Duration, what: &str, liar: &Liar) -> tensorferry_core::Error {
    let options = FetchOptions { stall: Duration::from_millis(400), ..FetchOptions::within(timeout) };
    let started = Instant::now();
    let failed = match Remote::open(&[&liar.url()], STEP, options) {
        Ok(remote) => remote.fetch(Destination::Fresh).expect_err(what),
        Err(failed) => failed,
    };
    let took = started.elapsed();
    assert!(took < timeout + Duration::from_secs(1), "{what}: took {took:?}");
    failed
}

/// A source that answers everything with 503 and `headers`, and when it was asked.
fn full(headers: &'static str) -> (Liar, Arc<Mutex<Vec<Instant>>>) {
    let asked = Arc::<Mutex<Vec<Instant>>>::default();
    let liar = Liar::new({
        let asked = Arc::clone(&asked);
        move |mut stream, _, _| {
            asked.lock().unwrap().push(Instant::now());
            let answer = format!("HTTP/1.1 503 no place is left\r\n{headers}Content-Length: 0\r\n\r\n");
            stream.write_all(answer.as_bytes())
        }
    });
    (liar, asked)
}

#[test]
fn a_source_that_is_full_is_asked_again_when_it_says_and_one_that_refuses_is_not() {
    let (second, least) = (Duration::from_secs(1), Duration::from_millis(250));
    for (headers, count, pause, said) in [
        ("Retry-After: 1\r\n", 5, second, "(it says to ask again in 1 s)"),
        // What says nothing, or nothing of use, is asked ever more seldom.
        ("Retry-After: 0\r\n", 5, least, "(it says to ask again in 0 s)"),
        ("Retry-After: Fri, 31 Dec 1999 23:59:59 GMT\r\n", 5, second, "(it says to ask again in 1 s)"),
        // Nobody waits for what lies behind the deadline.
        ("Retry-After: 3600\r\n", 1, second, "(it says to ask again in 3600 s)"),
        ("", 1, second, "no place is left"),
    ] {
        let (liar, asked) = full(headers);
        let failed = lied_to_for(Duration::from_secs(9), "no place", &liar);
        let asked = asked.lock().unwrap();
        assert_eq!(asked.len(), count, "{headers:?}: {failed}");
        // What is slept is never less, however busy the machine is.
        let paused = asked.windows(2).all(|two| two[1] - two[0] >= pause);
        assert!(paused, "{headers:?}: {asked:?}");
        assert!(failed.to_string().contains("no place is left") && failed.to_string().contains(said), "{failed}");
    }
}

#[test]
fn a_source_that_is_full_does_not_keep_the_receiver_from_another() {
    let state = State::of(&[3 * BLOCK], 1);
    let rig = Rig::serving(&state);
    let (liar, asked) = full("Retry-After: 3600\r\n");
    let options = FetchOptions::within(Duration::from_secs(30));
    let remote = Remote::open(&[&liar.url(), &rig.url()], STEP, options).unwrap();
    assert_eq!(remote.step(), STEP);
    assert_eq!(asked.lock().unwrap().len(), 1);
}

#[test]
fn what_a_source_says_is_one_line_without_escape_sequences() {
    let said = "gone\n2026-01-01 INFO root: all is well\x1b[2J\u{202e}\u{85}\r\u{7}";
    let long = format!("{said}{}", "x".repeat(50_000));
    for (what, answer) in [
        ("body", format!("HTTP/1.1 400 Bad\r\nContent-Length: {}\r\n\r\n{said}", said.len())),
        ("length", format!("HTTP/1.1 400 Bad\r\nContent-Length: {}\r\n\r\n{long}", long.len())),
    ] {
        let message = told(what, answer).to_string();
        assert!(message.contains("gone 2026-01-01 INFO root: all is well [2J"), "{message}");
        assert!(!message.chars().any(|c| c.is_control() || c == '\u{202e}'), "{message:?}");
        assert!(message.len() < 2200, "{}", message.len());
    }
}

#[test]
fn answers_that_make_no_sense_are_protocol_errors() {
    let tagged = |fields: &str| format!("HTTP/1.1 206 Partial Content\r\nETag: \"e\"\r\n{fields}");
    let four = |fields: &str| tagged(&format!("Content-Range: bytes 0-3/4\r\n{fields}\r\n\r\nabcd"));
    let ranged = |range: &str| tagged(&format!("Content-Range: bytes {range}\r\nContent-Length: 4\r\n\r\nabcd"));
    let whole = |length: usize, bytes: &str| {
        tagged(&format!("Content-Range: bytes 0-{}/{length}\r\nContent-Length: {length}\r\n\r\n{bytes}", length - 1))
    };
    let lies: &[(&str, String)] = &[
        ("garbage", "\0\u{1}\u{2} garbage\r\n\r\n".to_owned()),
        ("no range", tagged("Content-Length: 4\r\n\r\nabcd")),
        ("another range", ranged("5-8/100")),
        ("a range that is too short", ranged("0-3/100")),
        ("a range without a total", ranged("0-3/*")),
        ("no length", tagged("Content-Range: bytes 0-3/4\r\n\r\nabcd")),
        ("no entity tag", "HTTP/1.1 206 P\r\nContent-Range: bytes 0-3/4\r\nContent-Length: 4\r\n\r\nabcd".to_owned()),
        ("a length that is none", four("Content-Length: many")),
        ("a length with a sign", "HTTP/1.1 400 Bad\r\nContent-Length: +2\r\n\r\nno".to_owned()),
        ("more than its length", "HTTP/1.1 400 Bad\r\nContent-Length: 2\r\n\r\nno, and more".to_owned()),
        ("a huge length", four("Content-Length: 18446744073709551615")),
        ("two lengths", four("Content-Length: 4\r\nContent-Length: 5")),
        ("chunks", four("Transfer-Encoding: chunked").replace("abcd", "4\r\nabcd\r\n0\r\n\r\n")),
        ("a container of four bytes", four("Content-Length: 4")),
        ("a header that is longer than all", whole(9, "\u{50}\0\0\0\0\0\0\0{")),
        ("a header that is no JSON", whole(16, "\u{8}\0\0\0\0\0\0\0nonsense")),
        ("a head of many headers", format!("HTTP/1.1 206 P\r\n{}\r\n", "a: b\r\n".repeat(100))),
        ("a long head", format!("HTTP/1.1 206 P\r\na: {}\r\n\r\n", "b".repeat(20_000))),
    ];
    for (what, answer) in lies {
        let failed = told(what, answer.as_bytes());
        assert_eq!(failed.kind(), ErrorKind::Protocol, "{what}: {failed}");
    }
}

#[test]
fn statuses_keep_their_number_and_words() {
    let failed = told("refused", "HTTP/1.1 400 no such thing\r\nContent-Length: 9\r\n\r\nthe words");
    assert_eq!(failed.kind(), ErrorKind::Status(400));
    assert!(failed.to_string().ends_with("the words"), "{failed}");
    let failed = told("refused without a body", "HTTP/1.1 404 no such thing\r\n\r\n");
    assert!(failed.kind() == ErrorKind::Status(404) && failed.to_string().ends_with("no such thing"), "{failed}");
    let interim = "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n";
    let failed = told("behind others", format!("{interim}HTTP/1.1 404 gone\r\nContent-Length: 0\r\n\r\n"));
    assert_eq!(failed.kind(), ErrorKind::Status(404), "{failed}");
    let huge = "HTTP/1.1 500 broken\r\nContent-Length: 99999999999\r\n\r\nabc";
    assert_eq!(told("refused at length", huge).kind(), ErrorKind::Status(500));
    assert_eq!(told("all at once", "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok").kind(), ErrorKind::Status(200));
}

#[test]
fn a_stock_torchft_server_is_recognised() {
    // The answer of Python's http.server when the handler of torchft 0.2.0 cannot read the step.
    let stock = "HTTP/1.0 500 invalid literal for int() with base 10: '7.safetensors'\r\nServer: BaseHTTP/0.6\r\n\r\n";
    let foreign = told("stock", stock);
    assert_eq!((foreign.kind(), foreign.hint()), (ErrorKind::Foreign, Some(Hint::OtherProgram)));
    let full = format!("{stock}<html>").replace("\r\n\r\n", "\r\nContent-Length: 6\r\n\r\n");
    assert_eq!(told("stock with a body", full).kind(), ErrorKind::Foreign);
}

#[test]
fn interim_answers_without_end_are_refused() {
    let endless = Liar::new(|mut stream, _, _| {
        loop {
            stream.write_all(b"HTTP/1.1 100 Continue\r\n\r\n")?;
        }
    });
    assert_eq!(lied_to("interim answers for ever", &endless).kind(), ErrorKind::Protocol);
}

#[test]
fn what_never_ends_meets_the_deadline() {
    const SHORT: Duration = Duration::from_millis(1500);
    let headers = Liar::new(|mut stream, _, _| {
        stream.write_all(b"HTTP/1.1 206 P\r\n")?;
        loop {
            stream.write_all(b"a: b\r\n")?;
        }
    });
    assert_eq!(lied_to_for(SHORT, "headers for ever", &headers).kind(), ErrorKind::Protocol);

    let slow_headers = Liar::new(|mut stream, _, tracker| {
        stream.write_all(b"HTTP/1.1 206 P\r\n")?;
        loop {
            tracker.sleep(Duration::from_millis(50));
            stream.write_all(b"a")?;
        }
    });
    assert_eq!(lied_to_for(SHORT, "a head that drips", &slow_headers).kind(), ErrorKind::Timeout);

    let silent = Liar::new(|_, _, tracker| {
        tracker.sleep(Duration::from_mins(1));
        Ok(())
    });
    assert_eq!(lied_to_for(SHORT, "silence", &silent).kind(), ErrorKind::Timeout);
}

/// The answers of an honest server, for tests that change them: its header resource, container and digests.
struct Honest {
    whole: Vec<u8>,
    digests: Vec<u8>,
}

/// A source that is honest while it is opened (for the first two requests), then answers with `later`.
fn turncoat(later: impl Fn(usize, usize, usize) -> Vec<u8> + Send + Sync + 'static) -> Liar {
    let state = State::of(&[5 * BLOCK], 1);
    let rig = Rig::serving(&state);
    let honest = Honest {
        whole: get(&rig, &rig.path("7.safetensors"), &[]).body,
        digests: get(&rig, &rig.path("7/digests?blocks=0-0"), &[]).body,
    };
    Liar::new(move |mut stream, head, _| {
        let total = honest.whole.len();
        if head.contains("/digests?blocks=0-0 ") {
            let length = honest.digests.len();
            stream
                .write_all(format!("HTTP/1.1 200 OK\r\nETag: \"e\"\r\nContent-Length: {length}\r\n\r\n").as_bytes())?;
            return stream.write_all(&honest.digests);
        }
        let Some((start, end)) = asked_range(head) else {
            return stream.write_all(b"HTTP/1.1 500 no\r\nContent-Length: 0\r\n\r\n");
        };
        let end = end.min(total);
        if start > 0 {
            return stream.write_all(&later(start, end, total));
        }
        let fields = format!("ETag: \"e\"\r\nContent-Range: bytes 0-{}/{total}\r\nContent-Length: {end}", end - 1);
        stream.write_all(format!("HTTP/1.1 206 Partial Content\r\n{fields}\r\n\r\n").as_bytes())?;
        stream.write_all(&honest.whole[..end])
    })
}

fn part(from: usize, to: usize, total: usize, length: usize) -> Vec<u8> {
    let fields = format!("Content-Range: bytes {from}-{}/{total}\r\nContent-Length: {length}", to - 1);
    let mut answer = format!("HTTP/1.1 206 Partial Content\r\nETag: \"e\"\r\n{fields}\r\n\r\n").into_bytes();
    answer.resize(answer.len() + length, 7);
    answer
}

#[test]
fn ranges_other_than_those_asked_for_are_refused() {
    let wrong_range = turncoat(|start, end, total| part(start + 1, end, total, end - start - 1));
    assert_eq!(lied_to("a range that begins later", &wrong_range).kind(), ErrorKind::Protocol);
    let shorter = turncoat(|start, end, total| part(start, end - 1, total, end - start - 1));
    assert_eq!(lied_to("a range that ends earlier", &shorter).kind(), ErrorKind::Protocol);
    let total = turncoat(|start, end, total| part(start, end, total + 1, end - start));
    assert_eq!(lied_to("another total", &total).kind(), ErrorKind::Protocol);
    let length = turncoat(|start, end, total| part(start, end, total, end - start + 1));
    assert_eq!(lied_to("a length beside the range", &length).kind(), ErrorKind::Protocol);
    let whole = turncoat(|_, _, _| b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nabcd".to_vec());
    assert_eq!(lied_to("200 to a range", &whole).kind(), ErrorKind::Protocol);
    let gone = turncoat(|_, _, _| b"HTTP/1.1 412 gone\r\nContent-Length: 0\r\n\r\n".to_vec());
    assert_eq!(lied_to("412", &gone).kind(), ErrorKind::Changed);
}

#[test]
fn wrong_bytes_of_the_right_length_are_not_handed_over() {
    // The source refuses the digests of the payload, so nothing could be verified.
    let unverified = turncoat(|start, end, total| part(start, end, total, end - start));
    assert_eq!(lied_to("no digests", &unverified).kind(), ErrorKind::Status(500));
}
