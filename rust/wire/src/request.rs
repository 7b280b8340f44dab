//! What a request asks for: its path, its ranges, its conditions. And what an answer says it holds.

use crate::digest::{BLOCK_SIZE, BLOCK_SIZES};

/// The header in which a source says under which name processes of its own machine reach it.
pub const SAME_HOST_HEADER: &str = "tensorferry-same-host";
/// Runs of blocks that one request may ask for.
pub const MAX_RUNS: usize = 256;
/// The header of an answer whose body comes through memory that both sides share.
pub const RING_HEADER: &str = "tensorferry-ring";
/// The header of an answer whose bytes are not all there yet: the source still copies its state, and they come as it does.
pub const FILLING_HEADER: &str = "tensorferry-filling";

/// What a path names. Publication keys are as written in the path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Resource<'a> {
    /// `/healthz`
    Healthz,
    /// `/metrics`
    Metrics,
    /// `/checkpoint/{key}.safetensors`: header and payload; with the query that [`parse_runs`] reads, parts of the payload.
    Container(&'a str),
    /// `/checkpoint/{key}/header`: the header alone.
    Header(&'a str),
    /// `/checkpoint/{key}/digests`: the [`crate::digest::DigestTable`].
    Digests(&'a str),
    /// `/checkpoint/{key}/{name}`: the state in another format. The name may have several segments, none of them empty;
    /// which names there are is for the server to say.
    Alternate(&'a str, &'a str),
}

/// A path that names nothing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PathError {
    /// The token is missing or wrong: the peer learns nothing more.
    #[error("not found")]
    NotFound,
    /// The token is right, the rest is not a path of ours. The text is printable ASCII of bounded length.
    #[error("{0}")]
    BadUrl(String),
}

impl PathError {
    /// The error for a `path`, without its token, that names nothing. Its text is torchft's, which its users may match on.
    #[must_use]
    pub fn bad_url(path: &str) -> Self {
        let shown: String = path.chars().take(200).map(|c| if c.is_ascii_graphic() { c } else { '?' }).collect();
        Self::BadUrl(format!("invalid url format, expected /checkpoint/step/key but got {shown}"))
    }
}

/// The resource that `path` (which may carry a query) names on a server whose paths begin with `/{token}`, or with
/// nothing before them if `token` is empty. `/healthz` is there with and without the token.
pub fn parse_path<'a>(path: &'a str, token: &str) -> Result<Resource<'a>, PathError> {
    let path = path.split_once('?').map_or(path, |(path, _)| path);
    if path == "/healthz" {
        return Ok(Resource::Healthz);
    }
    let path = if token.is_empty() { path } else { strip_token(path, token).ok_or(PathError::NotFound)? };
    let found = match path.strip_prefix('/').unwrap_or_default() {
        "healthz" => Some(Resource::Healthz),
        "metrics" => Some(Resource::Metrics),
        other => other.strip_prefix("checkpoint/").and_then(parse_checkpoint),
    };
    found.ok_or_else(|| PathError::bad_url(path))
}

/// The resource at `path` below `/checkpoint/`.
fn parse_checkpoint(path: &str) -> Option<Resource<'_>> {
    match path.split_once('/') {
        None => path.strip_suffix(".safetensors").filter(|key| !key.is_empty()).map(Resource::Container),
        Some((key, name)) if key.is_empty() || name.split('/').any(str::is_empty) => None,
        Some((key, "header")) => Some(Resource::Header(key)),
        Some((key, "digests")) => Some(Resource::Digests(key)),
        Some((key, name)) => Some(Resource::Alternate(key, name)),
    }
}

/// What is left of `path` after `/{token}`. How long it takes depends on lengths alone, so that the token cannot be
/// guessed byte by byte.
fn strip_token<'a>(path: &'a str, token: &str) -> Option<&'a str> {
    let path = path.strip_prefix('/')?;
    let end = path.find('/').unwrap_or(path.len());
    let (given, rest) = path.split_at(end);
    if given.len() != token.len() {
        return None;
    }
    let differing = given.bytes().zip(token.bytes()).fold(0, |bits, (a, b)| std::hint::black_box(bits | (a ^ b)));
    (differing == 0).then_some(rest)
}

/// The number a key stands for: ASCII digits with an optional sign, as Python's `int()` reads them ("007" is 7).
#[must_use]
pub fn parse_step(key: &str) -> Option<i64> {
    // Rust's grammar for integers is this very one: [+-]?[0-9]+
    key.parse().ok()
}

/// The part of a resource that a `Range` field asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RangeSpec {
    /// All of it: the field is of no use, or not understood, and so ignored.
    Whole,
    /// Bytes `start..end`, a part of the resource that is not empty.
    Bytes {
        /// First byte.
        start: u64,
        /// The byte after the last.
        end: u64,
    },
    /// Understood, but no such bytes: answered with 416.
    Unsatisfiable,
}

/// Reads a `Range` field about a resource of `len` bytes, as RFC 9110 section 14 has it. Several ranges at once are
/// ignored, which it allows.
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

/// A number of digits alone. One beyond u64 is beyond every resource as well.
fn position(text: &str) -> Option<u64> {
    if text.is_empty() || !text.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    Some(text.parse().unwrap_or(u64::MAX))
}

/// Reads the query of a request for digests, `blocks={first}-{end}` with or without `&grain={bytes}`: the blocks
/// `first..end`, and how many bytes each has. Whether there are such blocks is not checked.
#[must_use]
pub fn parse_blocks(query: &str) -> Option<(u64, u64, u64)> {
    let (blocks, block_size) = split_blocks(query)?;
    let (first, end) = parse_run(blocks)?;
    Some((first, end, block_size))
}

/// Reads the query of a request for parts of a container, `blocks={first}-{end},{first}-{end},...` with or without
/// `&grain={bytes}`: at least one and at most [`MAX_RUNS`] runs of blocks `first..end`, none of them empty, each behind the
/// one before. And how many bytes a block has. Whether there are such blocks is not checked.
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

/// The blocks a query names, and how many bytes each of them has.
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

/// Reads a `Content-Range` field with a known range and length: (start, end, total), end exclusive.
#[must_use]
pub fn parse_content_range(value: &str) -> Option<(u64, u64, u64)> {
    let (unit, rest) = value.trim_matches(OWS).split_once(' ')?;
    let (range, total) = rest.split_once('/')?;
    let (first, last) = range.split_once('-')?;
    let (first, last, total) = (position(first)?, position(last)?, position(total)?);
    let valid = unit.eq_ignore_ascii_case("bytes") && first <= last && last < total;
    valid.then(|| (first, last + 1, total))
}

/// Whether an `If-Match` (or `If-Range`) field holds `etag`, quotes included, by strong comparison: a weak tag on
/// either side matches nothing.
#[must_use]
pub fn etag_matches_strong(header: &str, etag: &str) -> bool {
    is_any(header) || ETags(header).any(|tag| tag == etag && !tag.starts_with("W/"))
}

/// Whether an `If-None-Match` field holds `etag`, quotes included, by weak comparison.
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

/// The entity tags of a list, up to the first item that is not an entity tag.
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
