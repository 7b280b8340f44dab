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
//! Behind the token a path may name a network card ([`crate::rails`]), which makes no difference here.
//!
//! Parsing never fails for a reason other than the text: whether a step is served, and whether a resource has the
//! requested blocks, is decided by the server. Texts that are not understood are an error or are ignored, as RFC 9110
//! requires for the field in question. The client uses the same functions where it reads answers.

use crate::digest::{BLOCK_SIZE, BLOCK_SIZES};
use crate::rails;

/// The header field with the name under which processes on the source's own machine can connect to it.
pub const SAME_HOST_HEADER: &str = "tensorferry-same-host";
/// The most runs of blocks that one request may name. It bounds the work that a request of a few bytes can cause.
pub const MAX_RUNS: usize = 256;
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
    let given = rails::without_card(given);
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

/// The part of a resource that a `Range` field selects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RangeSpec {
    /// The whole resource: the field is invalid or not supported, and therefore ignored.
    Whole,
    /// Bytes `start..end`: not empty, and within the resource.
    Bytes {
        /// First byte.
        start: u64,
        /// The byte after the last.
        end: u64,
    },
    /// The field is valid, but the resource has no such bytes: the answer is 416.
    Unsatisfiable,
}

/// Reads a `Range` field for a resource of `len` bytes, as RFC 9110 section 14 defines it. A field with several ranges
/// is ignored, which the RFC allows.
///
/// ```
/// use tensorferry_wire::request::{RangeSpec, parse_range};
///
/// assert_eq!(parse_range("bytes=0-99", 1000), RangeSpec::Bytes { start: 0, end: 100 });
/// assert_eq!(parse_range("bytes=-100", 1000), RangeSpec::Bytes { start: 900, end: 1000 });
/// assert_eq!(parse_range("bytes=1000-", 1000), RangeSpec::Unsatisfiable);
/// assert_eq!(parse_range("bytes=0-9,20-29", 1000), RangeSpec::Whole);
/// ```
#[must_use]
pub fn parse_range(value: &str, len: u64) -> RangeSpec {
    let Some((unit, range)) = value.trim_matches(OWS).split_once('=') else {
        return RangeSpec::Whole;
    };
    let Some((first, last)) = range.trim_matches(OWS).split_once('-') else {
        return RangeSpec::Whole;
    };
    if !unit.eq_ignore_ascii_case("bytes") {
        return RangeSpec::Whole;
    }
    match (first, position(first), last, position(last)) {
        (_, Some(start), _, Some(last)) if start > last => RangeSpec::Whole,
        (_, Some(start), "", None) | (_, Some(start), _, Some(_)) if start >= len => RangeSpec::Unsatisfiable,
        (_, Some(start), "", None) => RangeSpec::Bytes { start, end: len },
        (_, Some(start), _, Some(last)) => RangeSpec::Bytes { start, end: last.saturating_add(1).min(len) },
        ("", None, _, Some(0)) => RangeSpec::Unsatisfiable,
        // satisfiable, but no Content-Range can say "no bytes"
        ("", None, _, Some(_)) if len == 0 => RangeSpec::Whole,
        ("", None, _, Some(suffix)) => RangeSpec::Bytes { start: len.saturating_sub(suffix), end: len },
        _ => RangeSpec::Whole,
    }
}

const OWS: [char; 2] = [' ', '\t'];

/// Reads a number that consists of digits only. One that does not fit a u64 becomes `u64::MAX`, which is beyond the end
/// of every resource as well.
fn position(text: &str) -> Option<u64> {
    if text.is_empty() || !text.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    Some(text.parse().unwrap_or(u64::MAX))
}

/// Reads the query of a request for digests, `blocks={first}-{end}` with or without `&grain={bytes}`. Returns `first`,
/// `end` (exclusive, not below `first`) and the size of a block, which is one of [`BLOCK_SIZES`]. The caller has to
/// check that there are such blocks.
#[must_use]
pub fn parse_blocks(query: &str) -> Option<(u64, u64, u64)> {
    let (blocks, block_size) = split_blocks(query)?;
    let (first, end) = parse_run(blocks)?;
    Some((first, end, block_size))
}

/// Reads the query of a request for parts of a container, `blocks={first}-{end},{first}-{end},...` with or without
/// `&grain={bytes}`. Returns the runs `first..end` and the size of a block, which is one of [`BLOCK_SIZES`].
///
/// There is at least one run and there are at most [`MAX_RUNS`]; none is empty, and none begins before the end of the
/// one before it. The caller has to check that there are such blocks.
///
/// ```
/// use tensorferry_wire::request::parse_runs;
///
/// assert_eq!(parse_runs("blocks=0-2,5-6&grain=4096"), Some((vec![(0, 2), (5, 6)], 4096)));
/// assert_eq!(parse_runs("blocks=5-6,0-2"), None);
/// ```
#[must_use]
pub fn parse_runs(query: &str) -> Option<(Vec<(u64, u64)>, u64)> {
    let (blocks, block_size) = split_blocks(query)?;
    let (mut runs, mut behind) = (Vec::new(), 0);
    for run in blocks.split(',') {
        let (first, end) = parse_run(run).filter(|run| run.0 < run.1)?;
        if first < behind || runs.len() == MAX_RUNS {
            return None;
        }
        runs.push((first, end));
        behind = end;
    }
    Some((runs, block_size))
}

/// Splits a query into the text of its runs and the size of a block in bytes.
fn split_blocks(query: &str) -> Option<(&str, u64)> {
    let (blocks, block_size) =
        query.split_once('&').map_or((query, None), |(blocks, block_size)| (blocks, Some(block_size)));
    let block_size = match block_size {
        Some(block_size) => {
            position(block_size.strip_prefix("grain=")?).filter(|block_size| BLOCK_SIZES.contains(block_size))?
        }
        None => BLOCK_SIZE,
    };
    Some((blocks.strip_prefix("blocks=")?, block_size))
}

fn parse_run(run: &str) -> Option<(u64, u64)> {
    let (first, end) = run.split_once('-')?;
    let (first, end) = (position(first)?, position(end)?);
    (first <= end).then_some((first, end))
}

/// Reads a `Content-Range` field that states both range and length, and returns (start, end, total) with an exclusive
/// end: `start < end <= total`.
#[must_use]
pub fn parse_content_range(value: &str) -> Option<(u64, u64, u64)> {
    let (unit, rest) = value.trim_matches(OWS).split_once(' ')?;
    let (range, total) = rest.split_once('/')?;
    let (first, last) = range.split_once('-')?;
    let (first, last, total) = (position(first)?, position(last)?, position(total)?);
    let valid = unit.eq_ignore_ascii_case("bytes") && first <= last && last < total;
    valid.then(|| (first, last + 1, total))
}

/// Whether an `If-Match` (or `If-Range`) field matches `etag`, quotes included, by strong comparison: a weak tag on
/// either side matches nothing. `*` matches every tag.
#[must_use]
pub fn etag_matches_strong(header: &str, etag: &str) -> bool {
    is_any(header) || ETags(header).any(|tag| tag == etag && !tag.starts_with("W/"))
}

/// Whether an `If-None-Match` field matches `etag`, quotes included, by weak comparison, which ignores `W/`. `*`
/// matches every tag.
#[must_use]
pub fn etag_matches_weak(header: &str, etag: &str) -> bool {
    is_any(header) || ETags(header).any(|tag| opaque(tag) == opaque(etag))
}

fn opaque(tag: &str) -> &str {
    tag.strip_prefix("W/").unwrap_or(tag)
}

fn is_any(header: &str) -> bool {
    header.trim_matches(OWS) == "*"
}

/// Yields the entity tags of a list, up to the first item that is not an entity tag.
struct ETags<'a>(&'a str);

impl<'a> Iterator for ETags<'a> {
    type Item = &'a str;

    fn next(&mut self) -> Option<&'a str> {
        let list = self.0.trim_start_matches([' ', '\t', ',']);
        let after_quote = opaque(list).strip_prefix('"')?;
        let end = list.len() - after_quote.len() + after_quote.find('"')? + 1;
        let (tag, rest) = list.split_at(end);
        self.0 = rest;
        Some(tag)
    }
}
