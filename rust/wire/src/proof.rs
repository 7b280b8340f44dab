//! Proofs that a peer knows the shared secret: one in each request, one in each answer that holds a table of digests.
//!
//! Both are HMAC-SHA256, under keys that are derived from the secret and differ for requests, answers and blocks. A
//! proof covers a sequence of fields, each preceded by its length, so that different fields never give equal messages.
//!
//! - The proof of a request covers its method, its path with the query, its `Range` and `If-Match`, and the nonce: 16
//!   random bytes. The client sends it as `Authorization: Tensorferry <nonce>.<proof>`, in hexadecimal. The path begins
//!   with the server's random token, so a proof is of no use at another server, and a server remembers the nonces it
//!   has seen.
//! - The proof of an answer covers the nonce of the request, that request's path with the query (so the step and which
//!   blocks), the entity tag, and the body. The body is a [`crate::digest::DigestTable`], which holds the digest of the
//!   header and the payload's length. The server sends the proof as `Tensorferry-Proof`. Because it covers the nonce,
//!   an answer that was recorded earlier proves nothing.
//!
//! This module does not see whether a nonce was used before: refusing one that comes again is up to the server.
//!
//! ```
//! use tensorferry_wire::proof::{Key, SignedRequest};
//!
//! let key = Key::new(b"at least sixteen bytes")?;
//! let request = SignedRequest { method: "GET", path: "/0f/checkpoint/7/digests", range: None, if_match: None };
//! let field = key.sign_request(&request, &[7; 16]);
//! assert_eq!(key.verify_request(&request, &field), Some([7; 16]));
//! assert_eq!(Key::new(b"another sixteen bytes")?.verify_request(&request, &field), None);
//! # Ok::<(), tensorferry_wire::proof::SecretTooShort>(())
//! ```

use std::fmt;
use std::fmt::Write as _;

use ring::hmac::{self, HMAC_SHA256};

use crate::digest::Algorithm;

/// The header field in which an answer carries its proof.
pub const PROOF_HEADER: &str = "tensorferry-proof";
/// The least length of a secret in bytes. An eavesdropper can test guesses against a recorded proof without contacting
/// either side, so a shorter secret could be found by trying.
pub const MIN_SECRET: usize = 16;

const SCHEME: &str = "Tensorferry ";

/// Random bytes that make each request unique.
pub type Nonce = [u8; 16];

/// The secret has fewer than [`MIN_SECRET`] bytes; the field says how many it has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the shared secret has {0} bytes, and fewer than 16 can be guessed: use 32 random ones (openssl rand -hex 32)")]
pub struct SecretTooShort(pub usize);

/// The parts of a request that its proof covers, apart from the nonce. The client fills it from the request it sends
/// and the server from the request it received, so a change of these parts on the network makes the proof fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SignedRequest<'a> {
    /// `GET` or `HEAD`.
    pub method: &'a str,
    /// The path with its query.
    pub path: &'a str,
    /// The value of `Range`; `None`, which is distinct from an empty value, without that field.
    pub range: Option<&'a str>,
    /// The value of `If-Match`, likewise.
    pub if_match: Option<&'a str>,
}

/// The parts of an answer that its proof covers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SignedAnswer<'a> {
    /// The nonce of the request.
    pub nonce: &'a Nonce,
    /// The path with the query of the request.
    pub path: &'a str,
    /// The entity tag of the snapshot.
    pub etag: &'a str,
    /// The whole body.
    pub body: &'a [u8],
}

/// The keys derived from a shared secret. The secret itself is not kept, and `Debug` shows none of the keys.
#[derive(Clone)]
pub struct Key {
    requests: hmac::Key,
    answers: hmac::Key,
    blocks: Algorithm,
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(..)")
    }
}

impl Key {
    /// Derives the keys from `secret`: both sides get the same ones.
    ///
    /// # Errors
    /// [`SecretTooShort`] if it has fewer than [`MIN_SECRET`] bytes. Whether it is random cannot be checked.
    pub fn new(secret: &[u8]) -> Result<Self, SecretTooShort> {
        if secret.len() < MIN_SECRET {
            return Err(SecretTooShort(secret.len()));
        }
        let root = hmac::Key::new(HMAC_SHA256, secret);
        let derived = |label: &str| hmac::sign(&root, label.as_bytes());
        let mut blocks = [0; 32];
        blocks.copy_from_slice(derived("tensorferry 1 blocks").as_ref());
        Ok(Self {
            requests: hmac::Key::new(HMAC_SHA256, derived("tensorferry 1 requests").as_ref()),
            answers: hmac::Key::new(HMAC_SHA256, derived("tensorferry 1 answers").as_ref()),
            blocks: Algorithm::Keyed(blocks),
        })
    }

    /// The algorithm for checksums of blocks: [`Algorithm::Keyed`] with the key for blocks.
    #[must_use]
    pub fn digests(&self) -> &Algorithm {
        &self.blocks
    }

    /// The value of the `Authorization` field of `request`.
    #[must_use]
    pub fn sign_request(&self, request: &SignedRequest<'_>, nonce: &Nonce) -> String {
        let tag = hmac::sign(&self.requests, &request.message(nonce));
        format!("{SCHEME}{}.{}", hex(nonce), hex(tag.as_ref()))
    }

    /// The nonce of `request` if `field`, the value of its `Authorization` field, proves it; otherwise `None`. Proofs
    /// are compared in constant time, so how long this takes does not show how much of a proof is right.
    #[must_use]
    pub fn verify_request(&self, request: &SignedRequest<'_>, field: &str) -> Option<Nonce> {
        let (nonce, tag) = field.strip_prefix(SCHEME)?.split_once('.')?;
        let (nonce, tag) = (unhex::<16>(nonce)?, unhex::<32>(tag)?);
        hmac::verify(&self.requests, &request.message(&nonce), &tag).ok()?;
        Some(nonce)
    }

    /// The value of [`PROOF_HEADER`] of `answer`.
    #[must_use]
    pub fn sign_answer(&self, answer: &SignedAnswer<'_>) -> String {
        hex(hmac::sign(&self.answers, &answer.message()).as_ref())
    }

    /// Whether `field` proves `answer`.
    #[must_use]
    pub fn verify_answer(&self, answer: &SignedAnswer<'_>, field: &str) -> bool {
        unhex::<32>(field).is_some_and(|tag| hmac::verify(&self.answers, &answer.message(), &tag).is_ok())
    }
}

impl SignedRequest<'_> {
    fn message(&self, nonce: &Nonce) -> Vec<u8> {
        let mut message = Vec::new();
        for field in [nonce, self.method.as_bytes(), self.path.as_bytes()] {
            push(&mut message, Some(field));
        }
        push(&mut message, self.range.map(str::as_bytes));
        push(&mut message, self.if_match.map(str::as_bytes));
        message
    }
}

impl SignedAnswer<'_> {
    fn message(&self) -> Vec<u8> {
        let mut message = Vec::with_capacity(self.body.len() + 256);
        for field in [self.nonce, self.path.as_bytes(), self.etag.as_bytes(), self.body] {
            push(&mut message, Some(field));
        }
        message
    }
}

/// Appends the length of a field and the field; an absent field has the length `u64::MAX`, which no field can have.
fn push(message: &mut Vec<u8>, field: Option<&[u8]>) {
    message.extend_from_slice(&field.map_or(u64::MAX, |f| f.len() as u64).to_le_bytes());
    message.extend_from_slice(field.unwrap_or_default());
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(2 * bytes.len()), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Decodes exactly `N` bytes from lower-case hexadecimal.
fn unhex<const N: usize>(text: &str) -> Option<[u8; N]> {
    let digit = |c: u8| match c {
        b'0'..=b'9' => Some(c - b'0'),
        b'a'..=b'f' => Some(c - b'a' + 10),
        _ => None,
    };
    let (pairs, rest) = text.as_bytes().as_chunks::<2>();
    if pairs.len() != N || !rest.is_empty() {
        return None;
    }
    let mut bytes = [0; N];
    for (byte, [high, low]) in bytes.iter_mut().zip(pairs) {
        *byte = digit(*high)? << 4 | digit(*low)?;
    }
    Some(bytes)
}
