//! The head of an answer: its status line and its headers.
//!
//! Only headers of this protocol are read. Two lengths that differ, or a transfer encoding, are errors: a reader that
//! goes on in spite of them can be made to see another body than the source sent.

use std::time::Duration;

use tensorferry_wire::rails::{self, RAILS_HEADER, Rail};
use tensorferry_wire::swarm::{SWARM_FULL, SWARM_HEADER};
use tensorferry_wire::{proof, request};

use crate::same_host;

/// How a server begins that was spoken to in plain HTTP and expects TLS.
const TLS_ALERT: &[u8] = &[21, 3];

/// A response head.
#[derive(Debug)]
#[allow(clippy::struct_excessive_bools, reason = "each says whether a header is there")]
pub(crate) struct Head {
    pub(crate) status: u16,
    pub(crate) reason: String,
    pub(crate) content_length: Option<u64>,
    /// `(start, end, total)` of a 206 answer.
    pub(crate) content_range: Option<(u64, u64, u64)>,
    pub(crate) etag: Option<String>,
    /// When the source says to try again: it may then accept a request that it refuses now.
    pub(crate) retry_after: Option<Duration>,
    /// The proof that the source knows the shared secret.
    pub(crate) proof: Option<String>,
    /// Where the source can be reached without the network, if it says so.
    pub(crate) same_host: Option<same_host::Name>,
    /// Whether the source has a tracker.
    pub(crate) offers_swarm: bool,
    /// Whether it had all of the snapshot when it said so.
    pub(crate) is_full: bool,
    /// By which addresses the source can be reached, if it names them.
    pub(crate) rails: Vec<Rail>,
    /// Whether the body comes through shared memory.
    pub(super) in_ring: bool,
    /// Whether the source still copies some of the body.
    pub(super) filling: bool,
    /// Whether the server speaks HTTP/1.0, which no source of this engine does.
    pub(crate) http_10: bool,
    pub(super) keep_alive: bool,
}

/// By which ways the source of an answer can be reached besides the one that was taken.
#[derive(Debug, Default)]
pub(crate) struct Offers {
    /// Where that is without the network.
    pub(crate) same_host: Option<same_host::Name>,
    /// Whether it has a tracker.
    pub(crate) swarm: bool,
    /// Whether it has all of the snapshot, so that a receive may begin anywhere.
    pub(crate) is_full: bool,
    /// Its addresses.
    pub(crate) rails: Vec<Rail>,
}

/// How much of a head the bytes received of an answer hold, with the length of the head.
pub(super) enum ParsedHead {
    /// The beginning of a head.
    Partial,
    /// An interim answer: another one follows.
    Interim(usize),
    /// All of the head.
    Complete(Head, usize),
}

impl ParsedHead {
    /// Parses the beginning of `bytes`; the error says how the source breaks the protocol.
    pub(super) fn read(bytes: &[u8]) -> Result<Self, String> {
        let mut headers = [httparse::EMPTY_HEADER; 64];
        let mut response = httparse::Response::new(&mut headers);
        match response.parse(bytes) {
            Ok(httparse::Status::Complete(length)) => {
                if response.code.is_some_and(|code| (100..200).contains(&code)) {
                    return Ok(Self::Interim(length));
                }
                Ok(Self::Complete(Head::from_response(&response)?, length))
            }
            Ok(httparse::Status::Partial) => Ok(Self::Partial),
            Err(_) if bytes.starts_with(TLS_ALERT) => Err("it speaks TLS, and its URL does not say so".into()),
            Err(e) => Err(format!("its answer is not HTTP/1.1: {e}")),
        }
    }
}

impl Head {
    /// What the source offers.
    pub(crate) fn offers(&self) -> Offers {
        Offers {
            same_host: self.same_host.clone(),
            swarm: self.offers_swarm,
            is_full: self.is_full,
            rails: self.rails.clone(),
        }
    }

    /// Reads the headers of this protocol. A `Content-Length` that is no number or contradicts another one is an error, and
    /// so is any `Transfer-Encoding`. A `Retry-After` that is no number says one second; all other headers that are
    /// malformed count as absent or empty. Of several with one name, the last counts, but any `Connection: close` does.
    fn from_response(response: &httparse::Response<'_, '_>) -> Result<Self, &'static str> {
        let mut head = Self {
            status: response.code.unwrap_or(0),
            reason: response.reason.unwrap_or("").to_owned(),
            content_length: None,
            content_range: None,
            etag: None,
            retry_after: None,
            proof: None,
            same_host: None,
            offers_swarm: false,
            is_full: false,
            rails: Vec::new(),
            in_ring: false,
            filling: false,
            http_10: response.version == Some(0),
            keep_alive: response.version == Some(1),
        };
        for header in response.headers.iter() {
            let value = || std::str::from_utf8(header.value).map_or("", str::trim);
            if header.name.eq_ignore_ascii_case("content-length") {
                // Rust's numbers may have a sign.
                let digits = Some(value()).filter(|value| value.bytes().all(|b| b.is_ascii_digit()));
                let length = digits.and_then(|digits| digits.parse().ok()).ok_or("its Content-Length is no number")?;
                if head.content_length.is_some_and(|l| l != length) {
                    return Err("it sent two Content-Length headers that differ");
                }
                head.content_length = Some(length);
            } else if header.name.eq_ignore_ascii_case("content-range") {
                head.content_range = request::parse_content_range(value());
            } else if header.name.eq_ignore_ascii_case("etag") {
                head.etag = Some(value().to_owned());
            } else if header.name.eq_ignore_ascii_case("retry-after") {
                // A date, or anything else that is no number, says "later".
                head.retry_after = Some(Duration::from_secs(value().parse().unwrap_or(1)));
            } else if header.name.eq_ignore_ascii_case(proof::PROOF_HEADER) {
                head.proof = Some(value().to_owned());
            } else if header.name.eq_ignore_ascii_case(request::SAME_HOST_HEADER) {
                head.same_host = same_host::Name::parse(value());
            } else if header.name.eq_ignore_ascii_case(SWARM_HEADER) {
                head.offers_swarm = true;
                head.is_full = value() == SWARM_FULL;
            } else if header.name.eq_ignore_ascii_case(RAILS_HEADER) {
                head.rails = rails::parse(value());
            } else if header.name.eq_ignore_ascii_case(request::RING_HEADER) {
                head.in_ring = true;
            } else if header.name.eq_ignore_ascii_case(request::FILLING_HEADER) {
                head.filling = true;
            } else if header.name.eq_ignore_ascii_case("connection") {
                head.keep_alive &= !value().eq_ignore_ascii_case("close");
            } else if header.name.eq_ignore_ascii_case("transfer-encoding") {
                return Err("it sent a Transfer-Encoding, which this protocol does not use");
            }
        }
        Ok(head)
    }
}
