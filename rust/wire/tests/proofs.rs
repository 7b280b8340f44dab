//! A proof is valid for exactly the message, the key and the nonce it was made for.

use proptest::prelude::*;
use tensorferry_wire::digest::{Algorithm, DigestTable};
use tensorferry_wire::proof::{Key, Nonce, SecretTooShort, SignedAnswer, SignedRequest};

const NONCE: Nonce = *b"0123456789abcdef";
const REQUEST: SignedRequest<'static> = SignedRequest {
    method: "GET",
    path: "/0f/checkpoint/7.safetensors",
    range: Some("bytes=0-9"),
    if_match: Some("\"a-1\""),
};

fn key() -> Key {
    Key::new(b"correct horse battery").unwrap()
}

fn other() -> Key {
    Key::new(b"correct horse batterz").unwrap()
}

fn table(header: u64, blocks: &[u64]) -> Vec<u8> {
    let table = DigestTable { header, payload_len: 1 << 22, blocks: blocks.to_vec() };
    table.encode_as(key().digests())
}

#[test]
fn a_request_is_good_for_itself_alone() {
    let field = key().sign_request(&REQUEST, &NONCE);
    assert_eq!(key().verify_request(&REQUEST, &field), Some(NONCE));
    assert_eq!(other().verify_request(&REQUEST, &field), None);
    let others = [
        SignedRequest { method: "HEAD", ..REQUEST },
        SignedRequest { path: "/0f/checkpoint/8.safetensors", ..REQUEST },
        SignedRequest { path: "/0f/checkpoint/7.safetensors?blocks=0-1", ..REQUEST },
        SignedRequest { range: Some("bytes=0-8"), ..REQUEST },
        SignedRequest { range: None, ..REQUEST },
        SignedRequest { if_match: Some("\"a-2\""), ..REQUEST },
        SignedRequest { if_match: None, ..REQUEST },
        SignedRequest { range: REQUEST.if_match, if_match: REQUEST.range, ..REQUEST },
        // The same characters, divided between the fields at another place.
        SignedRequest { method: "GET/", path: "0f/checkpoint/7.safetensors", ..REQUEST },
    ];
    for request in others {
        assert_eq!(key().verify_request(&request, &field), None, "{request:?}");
    }
}

#[test]
fn what_is_no_proof_is_refused() {
    let field = key().sign_request(&REQUEST, &NONCE);
    let (nonce, tag) = field.strip_prefix("Tensorferry ").unwrap().split_once('.').unwrap();
    let bad = [
        String::new(),
        "Tensorferry ".into(),
        format!("Bearer {nonce}.{tag}"),
        format!("Tensorferry {nonce}"),
        format!("Tensorferry .{tag}"),
        // Truncated to lengths that a careless comparison would accept.
        format!("Tensorferry {nonce}.{}", &tag[..62]),
        format!("Tensorferry {nonce}.{}", &tag[..2]),
        format!("Tensorferry {nonce}.{tag}00"),
        format!("Tensorferry {nonce}.{}", tag.to_uppercase()),
        format!("Tensorferry {}.{tag}", nonce.replace('3', "4")),
        format!("Tensorferry {nonce}.{}", "0".repeat(64)),
    ];
    for field in bad {
        assert_eq!(key().verify_request(&REQUEST, &field), None, "{field}");
    }
}

#[test]
fn an_answer_is_good_for_its_request_its_snapshot_and_its_table_alone() {
    let body = table(1, &[2, 3]);
    let path = "/0f/checkpoint/7/digests?blocks=0-2";
    let answer = SignedAnswer { nonce: &NONCE, path, etag: "\"a-1\"", body: &body };
    let field = key().sign_answer(&answer);
    assert!(key().verify_answer(&answer, &field));
    assert!(!other().verify_answer(&answer, &field));
    let (other_header, other_block) = (table(9, &[2, 3]), table(1, &[3, 2]));
    let others = [
        SignedAnswer { nonce: b"0123456789abcdeg", ..answer },
        SignedAnswer { path: "/0f/checkpoint/7/digests?blocks=2-4", ..answer },
        SignedAnswer { etag: "\"a-2\"", ..answer },
        SignedAnswer { etag: "", ..answer },
        SignedAnswer { body: &other_header, ..answer },
        SignedAnswer { body: &other_block, ..answer },
        SignedAnswer { body: &body[..body.len() - 1], ..answer },
    ];
    for answer in others {
        assert!(!key().verify_answer(&answer, &field), "{answer:?}");
    }
    for bad in ["", &field[..62], &field[..16], &format!("{field}00"), &"0".repeat(64)] {
        assert!(!key().verify_answer(&answer, bad), "{bad}");
    }
}

#[test]
fn a_proof_for_a_request_is_none_for_an_answer() {
    // If both used one key, a request's fields could be chosen so that they read as an answer's.
    let request = SignedRequest { method: "p", path: "e", range: Some("body"), if_match: None };
    let field = key().sign_request(&request, &NONCE);
    let tag = field.split_once('.').unwrap().1;
    assert!(!key().verify_answer(&SignedAnswer { nonce: &NONCE, path: "p", etag: "e", body: b"body" }, tag));
}

#[test]
fn keys_for_blocks_differ_with_the_secret() {
    let (one, two) = (key(), other());
    assert!(matches!(one.digests(), Algorithm::Keyed(_)));
    assert_ne!(one.digests().checksum(b"block"), two.digests().checksum(b"block"));
    assert_eq!(one.digests().checksum(b"block"), key().digests().checksum(b"block"));
}

#[test]
fn secrets_that_can_be_guessed_are_refused_and_none_shows_itself() {
    assert_eq!(Key::new(b"").unwrap_err(), SecretTooShort(0));
    assert_eq!(Key::new(b"fifteen bytes !").unwrap_err(), SecretTooShort(15));
    assert!(Key::new(b"sixteen bytes !!").is_ok());
    assert_eq!(format!("{:?}", key()), "Key(..)");
    assert!(!Key::new(b"hunter2").unwrap_err().to_string().contains("hunter2"));
}

proptest! {
    #[test]
    fn no_text_is_a_proof_and_none_panics(field in "\\PC*", tail in "[0-9a-f.]{0,120}") {
        let answer = SignedAnswer { nonce: &NONCE, path: "/", etag: "", body: b"" };
        prop_assert!(!key().verify_answer(&answer, &field));
        prop_assert!(!key().verify_answer(&answer, &tail));
        prop_assert_eq!(key().verify_request(&REQUEST, &field), None);
        prop_assert_eq!(key().verify_request(&REQUEST, &format!("Tensorferry {tail}")), None);
    }
}
