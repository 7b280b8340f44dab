//! Which part of a resource is requested, and which an answer holds.

use super::OWS;
use crate::digest::{BLOCK_SIZE, BLOCK_SIZES};

/// The most runs of blocks that one request may name. It bounds the work that a request of a few bytes can cause.
pub const MAX_RUNS: usize = 256;
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

/// Reads a run of blocks `[first, end)`, written `first-end`.
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
