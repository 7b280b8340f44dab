//! The server's answers, byte for byte: methods, paths, conditions, ranges, connections.

use std::io::Write;
use std::time::Duration;
use tensorferry_core::{FetchOptions, Remote};

use crate::common::raw::{Raw, get, metrics, request};
use crate::common::{BLOCK, Rig, STEP, State, noise};
use tensorferry_wire::digest::{Algorithm, DigestTable, checksum};

/// A server with slightly more than 3 MiB, and the bytes of its container.
fn rig() -> (Rig, State, Vec<u8>) {
    let state = State::of(&[2 * BLOCK + 5, 1, 0, BLOCK], 1);
    let rig = Rig::serving(&state);
    let whole = get(&rig, &rig.path("7.safetensors"), &[]);
    assert_eq!(whole.status, 200);
    (rig, state, whole.body)
}

#[test]
fn get_and_head_send_the_same_headers() {
    let (rig, _, whole) = rig();
    let path = rig.path("7.safetensors");
    let got = get(&rig, &path, &[]);
    assert_eq!((got.status, got.reason.as_str()), (200, "OK"));
    assert_eq!(got.header("content-length"), Some(whole.len().to_string().as_str()));
    assert_eq!(got.header("accept-ranges"), Some("bytes"));
    assert_eq!(got.header("content-type"), Some("application/octet-stream"));
    assert_eq!(got.header("content-range"), None);
    let etag = got.header("etag").unwrap();
    assert!(etag.starts_with('"') && etag.ends_with('"') && etag.len() > 10, "{etag}");

    let mut raw = Raw::to(&rig);
    raw.send("HEAD", &path, &[]);
    let head = raw.head();
    let without_date = |headers: &[(String, String)]| {
        let mut kept: Vec<_> = headers.iter().filter(|(n, _)| n != "date").cloned().collect();
        kept.sort();
        kept
    };
    assert_eq!(head.status, 200);
    assert_eq!(without_date(&head.headers), without_date(&got.headers));
    // The next answer on the connection follows directly, without a body.
    raw.send("GET", "/healthz", &[]);
    assert_eq!(raw.answer().text(), "ok\n");
}

#[test]
fn one_range_is_answered_with_exactly_its_bytes() {
    let (rig, _, whole) = rig();
    let len = whole.len();
    let last = len - 1;
    let cases = [
        ("bytes=0-0".to_owned(), 0..1),
        (format!("bytes={}-{}", BLOCK - 1, 2 * BLOCK + 1), BLOCK - 1..2 * BLOCK + 2),
        (format!("bytes={last}-"), last..len),
        ("bytes=-100".to_owned(), len - 100..len),
        (format!("bytes=10-{}", len * 2), 10..len),
    ];
    for (range, expected) in cases {
        let got = get(&rig, &rig.path("7.safetensors"), &[("Range", &range)]);
        assert_eq!((got.status, got.reason.as_str()), (206, "Partial Content"), "{range}");
        let content_range = format!("bytes {}-{}/{len}", expected.start, expected.end - 1);
        assert_eq!(got.header("content-range"), Some(content_range.as_str()), "{range}");
        assert_eq!(got.header("content-length"), Some(expected.len().to_string().as_str()), "{range}");
        assert!(got.body == whole[expected], "{range}: wrong bytes");
    }
}

#[test]
fn blocks_that_are_named_come_one_after_the_other() {
    let (rig, state, whole) = rig();
    let start = whole.len() - state.0.iter().map(|(_, bytes)| bytes.len()).sum::<usize>();
    let path = rig.path("7.safetensors");
    let etag = get(&rig, &path, &[]).header("etag").unwrap().to_owned();
    let last = (whole.len() - start).div_ceil(4096);
    let cases = [
        ("blocks=1-2".to_owned(), vec![(BLOCK, 2 * BLOCK)]),
        ("blocks=0-1,2-4".to_owned(), vec![(0, BLOCK), (2 * BLOCK, whole.len() - start)]),
        ("blocks=0-1,1-2,7-9&grain=4096".to_owned(), vec![(0, 8192), (7 * 4096, 9 * 4096)]),
        (
            format!("blocks=3-4,{}-{last}&grain=4096", last - 1),
            vec![(3 * 4096, 4 * 4096), ((last - 1) * 4096, whole.len() - start)],
        ),
    ];
    for (query, runs) in cases {
        let expected: Vec<u8> = runs.into_iter().flat_map(|(a, b)| &whole[start + a..start + b]).copied().collect();
        let got = get(&rig, &format!("{path}?{query}"), &[("If-Match", &etag)]);
        assert_eq!(
            (got.status, got.header("content-length")),
            (200, Some(expected.len().to_string().as_str())),
            "{query}"
        );
        assert!(got.body == expected, "{query}: wrong bytes");
        let changed = get(&rig, &format!("{path}?{query}"), &[("If-Match", "\"other\"")]);
        assert_eq!(changed.status, 412);
    }
    for query in ["blocks=", "blocks=3-5", "blocks=1-1", "blocks=1-2,0-1", "blocks=0-1&grain=5", "blocks=0-99999999999"]
    {
        assert_eq!(get(&rig, &format!("{path}?{query}"), &[]).status, 400, "{query}");
    }
}

#[test]
fn a_range_outside_is_416_and_says_how_long_the_resource_is() {
    let (rig, _, whole) = rig();
    let beyond = format!("bytes={}-", whole.len());
    for range in [beyond.as_str(), "bytes=99999999999-99999999999999", "bytes=-0"] {
        let got = get(&rig, &rig.path("7.safetensors"), &[("Range", range)]);
        assert_eq!(got.status, 416, "{range}");
        assert_eq!(got.header("content-range"), Some(format!("bytes */{}", whole.len()).as_str()), "{range}");
    }
}

#[test]
fn ranges_that_are_several_or_malformed_are_ignored() {
    let (rig, _, whole) = rig();
    for range in ["bytes=0-1,5-6", "bytes=", "bytes=-", "bytes=9-3", "bytes=a-b", "lines=1-2", "0-1", "bytes=1--2"] {
        let got = get(&rig, &rig.path("7.safetensors"), &[("Range", range)]);
        assert_eq!((got.status, got.body.len()), (200, whole.len()), "{range}");
    }
    let twice = get(&rig, &rig.path("7.safetensors"), &[("Range", "bytes=0-1"), ("Range", "bytes=5-6")]);
    assert_eq!(twice.status, 200);
    // RFC 9110 section 14.2 defines ranges for GET alone.
    let head = request(&rig, "HEAD", &rig.path("7.safetensors"), &[("Range", "bytes=0-1")]);
    assert_eq!(head.status, 200);
    assert_eq!(head.header("content-length"), Some(whole.len().to_string().as_str()));
}

#[test]
fn conditions_are_honoured() {
    let (rig, _, whole) = rig();
    let path = rig.path("7.safetensors");
    let etag = request(&rig, "HEAD", &path, &[]).header("etag").unwrap().to_owned();
    let weak = format!("W/{etag}");
    let part = ("Range", "bytes=2-4");
    let cases: &[(&[(&str, &str)], u16)] = &[
        (&[("If-Match", &etag), part], 206),
        (&[("If-Match", "\"other\""), part], 412),
        (&[("If-Match", &weak), part], 412),
        (&[("If-None-Match", &etag)], 304),
        (&[("If-None-Match", &weak)], 304),
        (&[("If-None-Match", "*")], 304),
        (&[("If-None-Match", "\"other\"")], 200),
        (&[("If-Range", &etag), part], 206),
        (&[("If-Range", "\"other\""), part], 200),
        (&[("If-Range", &weak), part], 200),
        (&[("If-Range", "Sat, 21 Nov 2026 00:00:00 GMT"), part], 200),
    ];
    for (headers, status) in cases {
        let got = get(&rig, &path, headers);
        assert_eq!(got.status, *status, "{headers:?}");
        match status {
            206 => assert!(got.body == whole[2..5], "{headers:?}"),
            200 => assert_eq!(got.body.len(), whole.len(), "{headers:?}"),
            304 => assert_eq!((got.header("etag"), got.body.len()), (Some(etag.as_str()), 0), "{headers:?}"),
            _ => {}
        }
    }
    for tail in ["7/header", "7/digests"] {
        assert_eq!(get(&rig, &rig.path(tail), &[("If-Match", "\"other\"")]).status, 412, "{tail}");
        assert_eq!(get(&rig, &rig.path(tail), &[("If-Match", &etag)]).header("etag"), Some(etag.as_str()), "{tail}");
    }
}

#[test]
fn without_the_token_everything_but_healthz_is_not_found() {
    let (rig, ..) = rig();
    let token = rig.path("").split('/').nth(1).unwrap().to_owned();
    assert_eq!(token.len(), 32);
    for path in ["/", "/checkpoint/7.safetensors", "/metrics", "/checkpoint/7/full", "//checkpoint/7.safetensors", "*"]
    {
        assert_eq!(get(&rig, path, &[]).status, 404, "{path}");
    }
    assert_eq!(get(&rig, "/healthz", &[]).text(), "ok\n");
    assert_eq!(get(&rig, &format!("/{token}/healthz"), &[]).status, 200);
}

#[test]
fn other_methods_are_refused_with_what_is_allowed() {
    let (rig, ..) = rig();
    for method in ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "BREW"] {
        let got = request(&rig, method, &rig.path("7.safetensors"), &[]);
        assert_eq!((got.status, got.header("allow")), (405, Some("GET, HEAD")), "{method}");
    }
}

#[test]
fn one_connection_carries_many_requests_also_all_at_once() {
    let (rig, _, whole) = rig();
    let path = rig.path("7.safetensors");
    let mut raw = Raw::to(&rig);
    for _ in 0..2 {
        raw.send("GET", &path, &[]);
        assert!(raw.answer().body == whole);
    }
    let ask =
        |start: usize| format!("GET {path} HTTP/1.1\r\nHost: t\r\nRange: bytes={start}-{}\r\n\r\n", start * 9 + 40);
    let requests: String = (0..20).map(ask).collect();
    raw.stream.write_all(requests.as_bytes()).unwrap();
    for start in 0..20 {
        assert!(raw.answer().body == whole[start..=start * 9 + 40], "answer {start}");
    }
    assert!(raw.buffer.is_empty());
}

#[test]
fn digests_are_those_of_the_payload() {
    let (rig, _, whole) = rig();
    let header = get(&rig, &rig.path("7/header"), &[]).body;
    let payload = &whole[header.len()..];
    let expected: Vec<u64> = payload.chunks(BLOCK).map(checksum).collect();
    assert_eq!(expected.len(), 4);
    let table = DigestTable::decode(&get(&rig, &rig.path("7/digests"), &[]).body).unwrap();
    let everything = DigestTable { header: checksum(&header), payload_len: payload.len() as u64, blocks: expected };
    assert_eq!(table, everything);
    for (first, end) in [(0, 4), (1, 3), (3, 4), (2, 2), (0, 0)] {
        let got = get(&rig, &rig.path(&format!("7/digests?blocks={first}-{end}")), &[]);
        assert_eq!(DigestTable::decode(&got.body).unwrap().blocks, everything.blocks[first..end], "{first}-{end}");
    }
    for bad in ["0-5", "3-1", "", "1", "a-b", "-1-2", "0-99999999999999999999"] {
        assert_eq!(get(&rig, &rig.path(&format!("7/digests?blocks={bad}")), &[]).status, 400, "{bad}");
    }
    let body = get(&rig, &rig.path("7/digests?blocks=3-5,9-10&grain=512"), &[]).body;
    let expected = [3, 4, 9].map(|block| checksum(&payload[block * 512..(block + 1) * 512]));
    assert_eq!(DigestTable::decode_with_block_size(&body, &Algorithm::Crc64, 512).unwrap().blocks, expected);
}

#[test]
fn many_small_and_large_pieces_come_in_order() {
    // Sizes on both sides of the limit below which pieces are gathered into one frame.
    let sizes: Vec<usize> = (0..300).map(|i| [0, 1, 3, 16_383, 16_384, 16_385, 40_000][i % 7]).collect();
    let state = State::of(&sizes, 40).with("last", noise(3, 9));
    let rig = Rig::serving(&state);
    let whole = get(&rig, &rig.path("7.safetensors"), &[]).body;
    let start = get(&rig, &rig.path("7/header"), &[]).body.len();
    let (pages, others): (Vec<_>, Vec<_>) = state.0.iter().partition(|(_, b)| b.len().is_multiple_of(4096));
    let payload: Vec<u8> = pages.into_iter().chain(others).flat_map(|(_, b)| b.to_vec()).collect();
    assert!(whole[start..] == payload);
}

#[test]
fn the_step_that_is_served_can_be_asked_for_without_a_refusal() {
    let (rig, _, _) = rig();
    let told = get(&rig, &rig.path("step"), &[]);
    assert_eq!((told.status, told.body.as_slice()), (200, b"7\n".as_slice()));
    let remote = Remote::open(&[&rig.url()], None, FetchOptions::within(Duration::from_secs(30))).unwrap();
    assert_eq!(remote.step(), STEP);
    drop(remote);
    // As with a checkpoint, the answer comes once there is one. The receiver asks what the source has for a fourth of
    // `stall`, in which a busy machine may not have answered.
    rig.server.store().withdraw(Duration::from_secs(30));
    let said = [300, 1200, 4800].into_iter().map(Duration::from_millis).map(|stall| {
        let options = FetchOptions { stall, ..FetchOptions::within(stall * 2) };
        let late = Remote::open(&[&rig.url()], None, options).unwrap_err();
        assert!(late.is_timeout(), "{late}");
        late.to_string()
    });
    let said: Vec<_> = said.take_while(|late| !late.contains("has withdrawn what it published last")).collect();
    assert!(said.len() < 3, "{said:?}");
    let counters = metrics(&rig);
    assert!(counters.contains("answers_total{code=\"200\"}"), "{counters}");
    assert!(!counters.contains("code=\"400\""), "{counters}");
}
