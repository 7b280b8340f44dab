//! Paths, ranges and entity tags: tables of texts with what each must be parsed to.

use proptest::prelude::*;
use tensorferry_wire::request::{
    MAX_RUNS, PathError, RangeSpec, Resource, etag_matches_strong, etag_matches_weak, parse_blocks,
    parse_content_range, parse_path, parse_range, parse_runs, parse_step,
};

const TOKEN: &str = "0123456789abcdef0123456789abcdef";

#[test]
fn paths_of_ours() {
    let table = [
        ("/metrics", Resource::Metrics),
        ("/", Resource::StatusPage),
        ("/checkpoint/", Resource::StatusPage),
        ("/checkpoint/step", Resource::Step),
        ("/checkpoint/step.safetensors", Resource::Container("step")),
        ("/checkpoint/7/have", Resource::Have("7")),
        ("/checkpoint/7/have/", Resource::Alternate("7", "have/")),
        ("/healthz", Resource::Healthz),
        ("/checkpoint/12.safetensors", Resource::Container("12")),
        ("/checkpoint/.safetensors.safetensors", Resource::Container(".safetensors")),
        ("/checkpoint/007/digests", Resource::Digests("007")),
        ("/checkpoint/-1/metadata", Resource::Alternate("-1", "metadata")),
        ("/checkpoint/x%20y/header", Resource::Header("x%20y")),
        ("/checkpoint/12/folder/.metadata", Resource::Alternate("12", "folder/.metadata")),
        ("/checkpoint/12/header/0", Resource::Alternate("12", "header/0")),
        ("/checkpoint/12/folder/.metadata/", Resource::Alternate("12", "folder/.metadata/")),
    ];
    for (path, resource) in table {
        assert_eq!(parse_path(path, ""), Ok(resource), "{path}");
        let query = format!("{path}?a=/b?c");
        assert_eq!(parse_path(&query, ""), Ok(resource), "{query}");
        let with_token = format!("/{TOKEN}{path}");
        assert_eq!(parse_path(&with_token, TOKEN), Ok(resource), "{with_token}");
        if resource != Resource::Healthz {
            assert_eq!(parse_path(path, TOKEN), Err(PathError::NotFound), "{path}");
        }
    }
    assert_eq!(parse_path("/healthz", TOKEN), Ok(Resource::Healthz));
    assert_eq!(parse_path("/healthz?x", TOKEN), Ok(Resource::Healthz));
}

#[test]
fn paths_of_no_one() {
    let table = [
        "",
        "/foo",
        "/checkpoint/12/",
        "/checkpoint//header",
        "/checkpoint/.safetensors",
        "/checkpoint/12.safetensors/",
        "/checkpoint/12//",
        "/checkpoint//folder/.metadata",
        "/a/b/c",
        "//checkpoint/12/full",
        "/./checkpoint/12/full",
    ];
    for path in table {
        let bare = parse_path(path, "").unwrap_err();
        assert!(matches!(&bare, PathError::BadUrl(_)), "{path}: {bare}");
        let with_token = format!("/{TOKEN}{path}");
        let found = parse_path(&with_token, TOKEN).unwrap_err();
        let expected = if path.is_empty() || path.starts_with('/') { bare } else { PathError::NotFound };
        assert_eq!(found, expected, "{with_token}");
    }
}

#[test]
fn bad_paths_are_named_as_torchft_names_them_and_cannot_write_into_the_answer() {
    let expected = "invalid url format, expected /checkpoint/step/key but got /a/b/c";
    assert_eq!(parse_path("/a/b/c", "").unwrap_err().to_string(), expected);
    assert_eq!(parse_path(&format!("/{TOKEN}/a/b/c"), TOKEN).unwrap_err().to_string(), expected, "without the token");
    let message = parse_path(&format!("/a\r\nSet-Cookie: ä{}", "x".repeat(100_000)), "").unwrap_err().to_string();
    assert!(message.bytes().all(|b| b == b' ' || b.is_ascii_graphic()) && message.len() < 300, "{message}");
}

#[test]
fn wrong_tokens_find_nothing() {
    for wrong in ["", "0123456789abcdef0123456789abcde", "0123456789abcdef0123456789abcdeff", "checkpoint"] {
        for rest in ["/metrics", "/checkpoint/12/full", "/healthz", "/nothing", ""] {
            let path = format!("/{wrong}{rest}");
            if path != "/healthz" {
                assert_eq!(parse_path(&path, TOKEN), Err(PathError::NotFound), "{path}");
            }
        }
    }
    for path in ["", "/", TOKEN, "//0123456789abcdef0123456789abcdef/metrics", "/?/0123456789abcdef0123456789abcdef"] {
        assert_eq!(parse_path(path, TOKEN), Err(PathError::NotFound), "{path}");
    }
}

#[test]
fn steps_as_python_reads_them() {
    let table = [
        ("0", Some(0)),
        ("007", Some(7)),
        ("+7", Some(7)),
        ("9223372036854775807", Some(i64::MAX)),
        ("-9223372036854775808", Some(i64::MIN)),
        ("9223372036854775808", None),
        ("", None),
        ("1.0", None),
        (" 1", None),
        ("\u{664}", None),
    ];
    for (key, step) in table {
        assert_eq!(parse_step(key), step, "{key:?}");
    }
}

#[test]
fn ranges_of_a_hundred_bytes_of_none_and_of_all_there_can_be() {
    use RangeSpec::{Unsatisfiable, Whole};
    let bytes = |start, end| RangeSpec::Bytes { start, end };
    let table = [
        ("bytes=10-19", bytes(10, 20)),
        ("bytes=90-18446744073709551615", bytes(90, 100)),
        ("bytes=90-99999999999999999999999", bytes(90, 100)),
        ("bytes=10-", bytes(10, 100)),
        ("bytes=-101", bytes(0, 100)),
        ("bytes=-99999999999999999999999", bytes(0, 100)),
        ("BYTES=007-9", bytes(7, 10)),
        (" bytes= 7-9\t", bytes(7, 10)),
        ("bytes=100-", Unsatisfiable),
        ("bytes=-0", Unsatisfiable),
        ("bytes=9-7", Whole),
        ("bytes=0-1,3-4", Whole),
        ("bytes=-", Whole),
        ("", Whole),
        ("bytes=+0-1", Whole),
        ("bytes=--1", Whole),
        ("bytes=0-1-2", Whole),
        ("bytes=\u{664}-", Whole),
    ];
    for (value, expected) in table {
        assert_eq!(parse_range(value, 100), expected, "{value:?}");
    }
    for (value, len, expected) in [
        ("bytes=0-", 0, Unsatisfiable),
        ("bytes=-0", 0, Unsatisfiable),
        // RFC 9110 calls this satisfiable, but a Content-Range cannot express it.
        ("bytes=-5", 0, Whole),
        ("bytes=0-18446744073709551615", u64::MAX, bytes(0, u64::MAX)),
        ("bytes=18446744073709551615-", u64::MAX, Unsatisfiable),
    ] {
        assert_eq!(parse_range(value, len), expected, "{value}");
    }
}

#[test]
fn content_ranges() {
    let table = [
        ("bytes 0-499/1234", Some((0, 500, 1234))),
        ("Bytes 734-1233/1234", Some((734, 1234, 1234))),
        ("bytes 0-18446744073709551613/18446744073709551614", Some((0, u64::MAX - 1, u64::MAX - 1))),
        ("bytes 0-499/*", None),
        ("bytes */1234", None),
        ("bytes 0-1234/1234", None),
        ("bytes 5-4/1234", None),
        ("bytes 0-18446744073709551615/18446744073709551615", None),
        ("bytes 0-1/+2", None),
    ];
    for (value, expected) in table {
        assert_eq!(parse_content_range(value), expected, "{value:?}");
    }
}

#[test]
fn entity_tags() {
    // The columns: field, tag, whether they match strongly, whether weakly.
    let table = [
        (r#""a""#, r#""a""#, true, true),
        (r#""a""#, r#""b""#, false, false),
        ("*", r#""a""#, true, true),
        (r#", "x",, "a""#, r#""a""#, true, true),
        (r#"W/"a""#, r#""a""#, false, true),
        (r#""a""#, r#"W/"a""#, false, true),
        (r#"W/"a""#, r#"W/"a""#, false, true),
        (r#""x, a""#, r#""a""#, false, false),
        (r#""x,"a"""#, r#""a""#, false, false),
        (r#""a"b"#, r#""a""#, true, true),
        (r#"garbage, "a""#, r#""a""#, false, false),
        (r#""*""#, r#""a""#, false, false),
    ];
    for (field, tag, strong, weak) in table {
        assert_eq!(etag_matches_strong(field, tag), strong, "{field} {tag} strong");
        assert_eq!(etag_matches_weak(field, tag), weak, "{field} {tag} weak");
    }
}

#[test]
fn blocks() {
    let table = [
        ("blocks=3-17", Some((3, 17, 1 << 20))),
        ("blocks=3-17&grain=4096", Some((3, 17, 4096))),
        ("blocks=3-17&grain=4097", None),
        ("blocks=3-17&grain=4096&grain=4096", None),
        ("blocks=3-17&", None),
        ("blocks=3-2", None),
        ("blocks=+1-2", None),
        ("", None),
    ];
    for (query, expected) in table {
        assert_eq!(parse_blocks(query), expected, "{query}");
    }
}

#[test]
fn runs_of_blocks() {
    let (small, large) = (4096, 1 << 20);
    let table = [
        ("blocks=0-1,1-2,9-12", Some((vec![(0, 1), (1, 2), (9, 12)], large))),
        ("blocks=3-5,6-7&grain=4096", Some((vec![(3, 5), (6, 7)], small))),
        ("blocks=0-18446744073709551615", Some((vec![(0, u64::MAX)], large))),
        ("blocks=", None),
        ("blocks=1-1", None),
        ("blocks=1-3,2-4", None),
        ("blocks=1-2,", None),
        ("blocks=1-2&grain=4097", None),
        ("", None),
    ];
    for (query, expected) in table {
        assert_eq!(parse_runs(query), expected, "{query}");
    }
    let runs = |count: usize| (0..count).map(|i| format!("{}-{}", 2 * i, 2 * i + 1)).collect::<Vec<_>>().join(",");
    assert_eq!(parse_runs(&format!("blocks={}", runs(MAX_RUNS))).map(|found| found.0.len()), Some(MAX_RUNS));
    assert_eq!(parse_runs(&format!("blocks={}", runs(MAX_RUNS + 1))), None);
}

proptest! {
    #[test]
    fn a_range_written_is_the_range_read(start in 0u64..1000, len in 1u64..1000, more in 0u64..1000) {
        let (end, total) = (start + len, start + len + more);
        prop_assert_eq!(parse_range(&format!("bytes={start}-{}", end - 1), total), RangeSpec::Bytes { start, end });
        let answer = format!("bytes {start}-{}/{total}", end - 1);
        prop_assert_eq!(parse_content_range(&answer), Some((start, end, total)));
    }

}
