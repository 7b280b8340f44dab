//! Answers that are bytes of memory: all of it, one range, or runs of blocks, under the conditions of RFC 9110.
//!
//! | request | answer |
//! |---|---|
//! | no `Range`, or one that is not understood | 200 with everything |
//! | one satisfiable range | 206 |
//! | a range behind the end | 416 |
//! | `?blocks=first-end,...` | 200 with those blocks, one run behind the other |
//! | `If-Match` with another entity tag | 412 |
//! | `If-None-Match` with this one | 304 |

use std::sync::Arc;
use std::sync::atomic::Ordering;

use http::header::{self, HeaderMap, HeaderValue};
use http::{Method, Request, Response, StatusCode};
use tensorferry_wire::digest::BLOCK_SIZE;
use tensorferry_wire::request::{self, RangeSpec};

use super::messages::{GONE, OCTETS, insert, joined, text};
use super::waiting::runs_filled;
use super::{ConnectionContext, ServedResponse};
use crate::publication::{Lease, LeasedSegments};
use crate::server::body::{MemoryBody, ServedBody};
use crate::server::observe::metrics::Sending;
use crate::server::observe::transfers::Snapshot;

/// Counts a request as open until its answer, body included, is dropped.
struct OpenAnswer(Arc<ConnectionContext>, Sending);

impl Drop for OpenAnswer {
    fn drop(&mut self) {
        self.0.shared.transfers.end(self.0.number);
        self.0.open.fetch_sub(1, Ordering::Relaxed);
        self.1.end(&self.0);
    }
}

/// 412 and 304 as the conditions in `headers` ask for, or `None` when the request goes on.
pub(super) fn conditional(headers: &HeaderMap, etag: &str) -> Option<ServedResponse> {
    if let Some(value) = joined(headers, header::IF_MATCH)
        && !request::etag_matches_strong(&value, etag)
    {
        return Some(text(StatusCode::PRECONDITION_FAILED, GONE));
    }
    if let Some(value) = joined(headers, header::IF_NONE_MATCH)
        && request::etag_matches_weak(&value, etag)
    {
        let mut unchanged = Response::new(ServedBody::Message(None));
        *unchanged.status_mut() = StatusCode::NOT_MODIFIED;
        insert(unchanged.headers_mut(), header::ETAG, etag);
        return Some(unchanged);
    }
    None
}

/// What `request` asks for of the `len` bytes that have the entity tag `etag`.
pub(super) fn wanted<B>(request: &Request<B>, etag: &str, len: u64) -> RangeSpec {
    let headers = request.headers();
    // Ranges are defined for GET alone (RFC 9110, section 14.2).
    let range = joined(headers, header::RANGE).filter(|_| request.method() == Method::GET);
    let fresh = joined(headers, header::IF_RANGE).is_none_or(|v| request::etag_matches_strong(&v, etag));
    match range {
        Some(value) if fresh => request::parse_range(&value, len),
        _ => RangeSpec::Whole,
    }
}

/// The whole of `content`, which is served as `step`, or the one range of it that `request` asks for, on the conditions
/// it makes.
pub(super) fn memory<B>(
    connection: &Arc<ConnectionContext>,
    content: LeasedSegments,
    step: i64,
    digest: bool,
    request: &Request<B>,
) -> ServedResponse {
    let etag = content.lease().publication().etag().to_owned();
    if let Some(refused) = conditional(request.headers(), &etag) {
        return refused;
    }
    let len = content.len();
    let (status, start, end) = match wanted(request, &etag, len) {
        RangeSpec::Whole => (StatusCode::OK, 0, len),
        RangeSpec::Bytes { start, end } => (StatusCode::PARTIAL_CONTENT, start, end),
        RangeSpec::Unsatisfiable => {
            let message = format!("the range lies outside the {len} bytes there are");
            let mut refused = text(StatusCode::RANGE_NOT_SATISFIABLE, &message);
            insert(refused.headers_mut(), header::CONTENT_RANGE, &format!("bytes */{len}"));
            return refused;
        }
    };
    let mut answer = body(connection, content, step, digest, vec![(start, end)]);
    *answer.status_mut() = status;
    answer.headers_mut().insert(header::ACCEPT_RANGES, HeaderValue::from_static("bytes"));
    if status == StatusCode::PARTIAL_CONTENT {
        insert(answer.headers_mut(), header::CONTENT_RANGE, &format!("bytes {start}-{}/{len}", end - 1));
    }
    answer
}

/// The runs of blocks that `query` names, one after the other, of what is served as `step`.
pub(super) async fn blocks<B>(
    connection: &Arc<ConnectionContext>,
    lease: Arc<Lease>,
    step: i64,
    asked: &Request<B>,
    query: &str,
) -> ServedResponse {
    if let Some(refused) = conditional(asked.headers(), lease.publication().etag()) {
        return refused;
    }
    let known =
        |(runs, block_size): &(Vec<(u64, u64)>, u64)| runs.iter().all(|run| run.1 <= lease.block_count(*block_size));
    let Some((runs, block_size)) = request::parse_runs(query).filter(known) else {
        return no_such_blocks(&lease, query);
    };
    if let Err(refused) = runs_filled(connection, &lease, &runs, block_size).await {
        return refused;
    }
    let content = lease.content();
    let (start, len) = (lease.publication().payload_start(), content.len());
    let runs = runs.into_iter().map(|(first, end)| (start + first * block_size, (start + end * block_size).min(len)));
    let runs = runs.collect();
    body(connection, content, step, false, runs)
}

/// The refusal of a `query` for blocks that are not there.
pub(super) fn no_such_blocks(lease: &Lease, query: &str) -> ServedResponse {
    let count = lease.block_count(BLOCK_SIZE);
    text(StatusCode::BAD_REQUEST, &format!("there are {count} blocks of 1 MiB, not {query}"))
}

/// An answer of `runs` of bytes of `content`, which is served as `step`.
fn body(
    connection: &Arc<ConnectionContext>,
    content: LeasedSegments,
    step: i64,
    digest: bool,
    runs: Vec<(u64, u64)>,
) -> ServedResponse {
    let lease = Arc::clone(content.lease());
    let etag = lease.publication().etag().to_owned();
    let total = runs.iter().map(|(start, end)| end - start).sum();
    let mut rest = runs.into_iter();
    let (at, end) = rest.next().unwrap_or_default();
    connection.open.fetch_add(1, Ordering::Relaxed);
    let snapshot = Snapshot { step, etag: &etag, total: content.len() };
    connection.shared.transfers.begin(connection.number, connection.slot.peer, &snapshot, &connection.progress[0]);
    let relayed = lease.publication().block_map().is_some();
    let filling = digest && !lease.publication().is_ready(end);
    let mut answer = Response::new(ServedBody::Memory(Box::new(MemoryBody {
        content,
        lease,
        at,
        end,
        rest,
        digest,
        digesting: None,
        progress: Arc::clone(&connection.progress),
        throttle: connection.shared.throttle.clone(),
        reserved: 0,
        wait: None,
        filling: None,
        _open: Box::new(OpenAnswer(Arc::clone(connection), Sending::new(connection, total, relayed))),
    })));
    let headers = answer.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(OCTETS));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    if filling {
        headers.insert(request::FILLING_HEADER, HeaderValue::from_static("1"));
    }
    insert(headers, header::ETAG, &etag);
    answer
}
