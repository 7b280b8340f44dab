//! The fields of HTTP requests and answers: which resource a path names, which part of it a range or a query selects,
//! which conditions hold, and which part an answer holds.
//!
//! ```text
//! /healthz                                        the server lives; needs no token
//! /{token}/  and  /{token}/checkpoint/            the status page, for people
//! /{token}/metrics                                counters
//! /{token}/checkpoint/step                         the step that is served, in digits
//! /{token}/checkpoint/{key}.safetensors           header and payload; Range, or ?blocks={first}-{end},... for parts
//! /{token}/checkpoint/{key}/header                the header alone
//! /{token}/checkpoint/{key}/digests               the table of digests, of all blocks or of ?blocks={first}-{end},...
//! /{token}/checkpoint/{key}/swarm                 the tracker of those that fetch it
//! /{token}/checkpoint/{key}/have                  which blocks a relay has
//! /{token}/checkpoint/{key}/{name}                the state in another format
//! ```
//!
//! Behind the token a path may name network cards ([`crate::rails`]), which makes no difference here.
//!
//! Parsing never fails for a reason other than the text: whether a step is served, and whether a resource has the
//! requested blocks, is decided by the server. Texts that are not understood are an error or are ignored, as RFC 9110
//! requires for the field in question. The client uses the same functions where it reads answers.

mod etags;
mod ranges;

pub use self::etags::{etag_matches_strong, etag_matches_weak};
pub use self::ranges::{MAX_RUNS, RangeSpec, parse_blocks, parse_content_range, parse_range, parse_runs};
use crate::rails;

/// The header field with the name under which processes on the source's own machine can connect to it.
pub const SAME_HOST_HEADER: &str = "tensorferry-same-host";
/// The header field of an answer whose body comes through memory that both sides share.
pub const RING_HEADER: &str = "tensorferry-ring";
/// The header field of an answer whose bytes are not all available yet: the source is still copying its state, and
/// sends them as they become available.
pub const FILLING_HEADER: &str = "tensorferry-filling";

/// The path of [`Resource::Step`], relative to `/checkpoint/`.
pub const STEP_PATH: &str = "step";

/// What a path names. Keys of publications are as written in the path; [`parse_step`] reads the step from one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Resource<'a> {
    /// `/healthz`
    Healthz,
    /// `/metrics`
    Metrics,
    /// `/` or `/checkpoint/`: the status page.
    StatusPage,
    /// `/checkpoint/step`: the step that is served.
    Step,
    /// `/checkpoint/{key}.safetensors`: header and payload, or with the query that [`parse_runs`] reads, parts of the
    /// payload.
    Container(&'a str),
    /// `/checkpoint/{key}/header`: the header alone.
    Header(&'a str),
    /// `/checkpoint/{key}/digests`: the [`crate::digest::DigestTable`].
    Digests(&'a str),
    /// `/checkpoint/{key}/swarm`: the tracker of those that fetch it.
    Swarm(&'a str),
    /// `/checkpoint/{key}/have`: which blocks of it a relay has.
    Have(&'a str),
    /// `/checkpoint/{key}/{name}`: the state in another format. The name may have several segments, none of them empty,
    /// and may end with a slash; the server decides which names exist.
    Alternate(&'a str, &'a str),
}

/// Why a path names no resource.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PathError {
    /// The token is missing or wrong. The error says nothing more, so that a peer without the token learns nothing.
    #[error("not found")]
    NotFound,
    /// The token is right, but the rest names no resource. The text is printable ASCII of bounded length.
    #[error("{0}")]
    BadUrl(String),
}

impl PathError {
    /// The error for a `path`, given without its token, that names no resource. Its text is that of torchft, because
    /// users of torchft may match on it.
    #[must_use]
    pub fn bad_url(path: &str) -> Self {
        let shown: String = path.chars().take(200).map(|c| if c.is_ascii_graphic() { c } else { '?' }).collect();
        Self::BadUrl(format!("invalid url format, expected /checkpoint/step/key but got {shown}"))
    }
}

/// The resource that `path` (which may carry a query) names on a server whose paths begin with `/{token}`; if `token`
/// is empty, they have no such prefix. `/healthz` exists with and without the token.
///
/// ```
/// use tensorferry_wire::request::{PathError, Resource, parse_path};
///
/// assert_eq!(parse_path("/0f/checkpoint/7/digests?blocks=0-4", "0f"), Ok(Resource::Digests("7")));
/// assert_eq!(parse_path("/checkpoint/7/digests", "0f"), Err(PathError::NotFound));
/// ```
pub fn parse_path<'a>(path: &'a str, token: &str) -> Result<Resource<'a>, PathError> {
    let path = path.split_once('?').map_or(path, |(path, _)| path);
    if path == "/healthz" {
        return Ok(Resource::Healthz);
    }
    let path = if token.is_empty() { path } else { strip_token(path, token).ok_or(PathError::NotFound)? };
    let found = match path.strip_prefix('/') {
        Some("healthz") => Some(Resource::Healthz),
        Some("metrics") => Some(Resource::Metrics),
        Some("" | "checkpoint/") => Some(Resource::StatusPage),
        Some(other) => other.strip_prefix("checkpoint/").and_then(parse_checkpoint),
        None => None,
    };
    found.ok_or_else(|| PathError::bad_url(path))
}

/// The resource at `path`, which is relative to `/checkpoint/`.
fn parse_checkpoint(path: &str) -> Option<Resource<'_>> {
    match path.split_once('/') {
        None if path == STEP_PATH => Some(Resource::Step),
        None => path.strip_suffix(".safetensors").filter(|key| !key.is_empty()).map(Resource::Container),
        Some((key, name)) if key.is_empty() || name.strip_suffix('/').unwrap_or(name).split('/').any(str::is_empty) => {
            None
        }
        Some((key, "header")) => Some(Resource::Header(key)),
        Some((key, "digests")) => Some(Resource::Digests(key)),
        Some((key, "swarm")) => Some(Resource::Swarm(key)),
        Some((key, "have")) => Some(Resource::Have(key)),
        Some((key, name)) => Some(Resource::Alternate(key, name)),
    }
}

/// The rest of `path` after `/{token}`; `None` if it begins with something else. The time it takes depends on lengths
/// only, so that the token cannot be guessed byte by byte.
fn strip_token<'a>(path: &'a str, token: &str) -> Option<&'a str> {
    let path = path.strip_prefix('/')?;
    let end = path.find('/').unwrap_or(path.len());
    let (given, rest) = path.split_at(end);
    let given = rails::without_cards(given);
    if given.len() != token.len() {
        return None;
    }
    let differing = given.bytes().zip(token.bytes()).fold(0, |bits, (a, b)| std::hint::black_box(bits | (a ^ b)));
    (differing == 0).then_some(rest)
}

/// The step that a key stands for: ASCII digits with an optional sign, read as Python's `int()` does ("007" is 7);
/// `None` for anything else and beyond the bounds of an i64.
#[must_use]
pub fn parse_step(key: &str) -> Option<i64> {
    // Rust's grammar for integers is the same: [+-]?[0-9]+
    key.parse().ok()
}

const OWS: [char; 2] = [' ', '\t'];
