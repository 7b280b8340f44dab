//! What anybody may send as a proof is refused, and what is signed is taken, whatever it covers.
#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use tensorferry_wire::proof::{SignedAnswer, Key, Nonce, SignedRequest};

static KEY: LazyLock<Key> = LazyLock::new(|| Key::new(b"a key of this target").expect("it is long enough"));

fuzz_target!(|bytes: &[u8]| {
    let text = String::from_utf8_lossy(bytes);
    let request = SignedRequest { method: "GET", path: "/", range: None, if_match: None };
    let answer = SignedAnswer { nonce: &[0; 16], path: "/", etag: "", body: b"" };
    assert_eq!(KEY.verify_request(&request, &text), None);
    assert_eq!(KEY.verify_request(&request, &format!("Tensorferry {text}")), None);
    assert!(!KEY.verify_answer(&answer, &text));

    let Some((nonce, _)) = bytes.split_first_chunk::<16>() else { return };
    let nonce: Nonce = *nonce;
    let (path, rest) = text.split_at(text.floor_char_boundary(text.len() / 2));
    let request = SignedRequest { method: "GET", path, range: Some(rest), if_match: Some(path) };
    assert_eq!(KEY.verify_request(&request, &KEY.sign_request(&request, &nonce)), Some(nonce));
    let answer = SignedAnswer { nonce: &nonce, path, etag: rest, body: bytes };
    assert!(KEY.verify_answer(&answer, &KEY.sign_answer(&answer)));
});
