//! One request, one answer: paths, conditions and ranges as RFC 9110 has them.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::{Method, Request, Response, StatusCode};
use hyper::ext::ReasonPhrase;
use tensorferry_wire::digest::{Algorithm, BLOCK_SIZE};
use tensorferry_wire::proof::{self, Nonce};
use tensorferry_wire::request::{self, PathError, RangeSpec, Resource};

use super::Connection;
use super::metrics::{Metrics, Sending};
use crate::body::{MemoryBody, ServedBody};
use crate::publication::{Found, Lease, Segments};
use crate::store::Lookup;

/// Digests of blocks below 1 MiB that one request may ask for: computing them holds up a thread.
const MAX_FINE_DIGESTS: u64 = 1 << 20;
const OCTETS: &str = "application/octet-stream";

type Answer = Response<ServedBody>;

/// Counts a request as open until its answer, body included, is dropped.
struct Open(Arc<Connection>, Sending);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Ordering::Relaxed);
        self.1.end(&self.0);
    }
}

pub(super) async fn answer<B>(connection: &Arc<Connection>, request: &Request<B>) -> Result<Answer, Infallible> {
    connection.shared.requests.fetch_add(1, Ordering::Relaxed);
    let head = match *request.method() {
        Method::GET => false,
        Method::HEAD => true,
        _ => {
            let mut refused = text(StatusCode::METHOD_NOT_ALLOWED, "only GET and HEAD are served here");
            refused.headers_mut().insert(header::ALLOW, HeaderValue::from_static("GET, HEAD"));
            connection.shared.metrics.note_answer(refused.status().as_u16());
            return Ok(refused);
        }
    };
    let mut answer = match permitted(connection, request) {
        Ok((resource, nonce)) => resolve(connection, resource, request, nonce.as_ref()).await,
        Err(PathError::NotFound) => text(StatusCode::NOT_FOUND, "not found"),
        Err(PathError::BadUrl(message)) => text(StatusCode::BAD_REQUEST, &message),
    };
    connection.shared.metrics.note_answer(answer.status().as_u16());
    if head && answer.status() != StatusCode::NOT_MODIFIED {
        // hyper keeps the length of the body for the head and sends none of it.
        let length = http_body::Body::size_hint(answer.body()).exact().unwrap_or(0);
        answer.headers_mut().entry(header::CONTENT_LENGTH).or_insert(length.into());
        *answer.body_mut() = ServedBody::Message(None);
    }
    Ok(answer)
}

/// The resource that may be asked for, and the nonce of the proof where one is needed. Who lacks the secret learns no
/// more than who lacks the token. Liveness is for everybody; counters are for whoever has the random part of the path,
/// since no scraper can sign.
fn permitted<'r, B>(
    connection: &Connection,
    request: &'r Request<B>,
) -> Result<(Resource<'r>, Option<Nonce>), PathError> {
    let path = request.uri().path();
    let found = request::parse_path(path, &connection.shared.token);
    let Some(guard) = &connection.shared.guard else { return Ok((found?, None)) };
    match found {
        Ok(Resource::Metrics) => Ok((Resource::Metrics, None)),
        Ok(Resource::Healthz) if path == "/healthz" => Ok((Resource::Healthz, None)),
        Err(PathError::NotFound) => Err(PathError::NotFound),
        found => {
            let nonce = guard.admit(request).ok_or(PathError::NotFound)?;
            Ok((found?, Some(nonce)))
        }
    }
}

async fn resolve<B>(
    connection: &Arc<Connection>,
    resource: Resource<'_>,
    request: &Request<B>,
    nonce: Option<&Nonce>,
) -> Answer {
    let key = match resource {
        Resource::Healthz => return text(StatusCode::OK, "ok"),
        Resource::Metrics => return metrics(connection),
        Resource::Container(key)
        | Resource::Header(key)
        | Resource::Digests(key)
        | Resource::StockFull(key)
        | Resource::StockMetadata(key)
        | Resource::StockChunk(key, _)
        | Resource::Folder(key, _) => key,
    };
    let Some(step) = request::parse_step(key) else {
        return text(StatusCode::NOT_FOUND, &format!("no checkpoint is called {key}: steps are integers"));
    };
    let store = &connection.shared.store;
    let begun =
        joined(request.headers(), header::IF_MATCH).and_then(|etag| store.lookup_lingering(&etag, &connection.cut));
    let lease = match begun {
        Some(lease) => lease,
        None => match lease(connection, step).await {
            Ok(lease) => lease,
            Err(refused) => return refused,
        },
    };
    let mut found = match resource {
        Resource::Container(_) => {
            if let Some(query) = request.uri().query().filter(|query| query.starts_with("blocks=")) {
                blocks(connection, lease, request, query)
            } else {
                let segments = Arc::clone(lease.publication().content());
                memory(connection, lease, segments, true, request)
            }
        }
        Resource::Header(_) => {
            let etag = lease.publication().etag().to_owned();
            let mut found = bytes(lease.publication().header().clone());
            insert(found.headers_mut(), header::ETAG, &etag);
            conditional(request.headers(), &etag).unwrap_or(found)
        }
        Resource::Digests(_) => digests(connection, lease, request, nonce).await,
        Resource::StockFull(_) => alternate(connection, lease, step, "full".to_owned(), request).await,
        Resource::StockMetadata(_) => alternate(connection, lease, step, "metadata".to_owned(), request).await,
        Resource::StockChunk(_, index) => alternate(connection, lease, step, index.to_string(), request).await,
        Resource::Folder(_, file) => alternate(connection, lease, step, format!("dcp/{file}"), request).await,
        Resource::Healthz | Resource::Metrics => text(StatusCode::NOT_FOUND, "not found"),
    };
    if let Some(name) = connection.shared.same_host.as_ref().filter(|_| !connection.same_host) {
        insert(found.headers_mut(), HeaderName::from_static(request::SAME_HOST_HEADER), &name.to_string());
    }
    found
}

/// Waits for the gate and takes a lease on what is served as `step`.
async fn lease(connection: &Arc<Connection>, step: i64) -> Result<Arc<Lease>, Answer> {
    let shared = &connection.shared;
    let _waiting = shared.metrics.wait();
    let lookup = tokio::time::timeout(shared.patience, shared.store.lookup(step, &connection.cut)).await;
    match lookup {
        Ok(Lookup::Found(lease)) => Ok(lease),
        Ok(Lookup::WrongStep(serving)) => {
            let serving = serving.map_or_else(|| "nothing".to_owned(), |s| s.to_string());
            let message = format!("invalid checkpoint requested, serving {serving} but got step={step}");
            Err(text(StatusCode::BAD_REQUEST, &message))
        }
        Ok(Lookup::Nothing) => {
            let message = format!("step {step} is allowed but no state was sent: call send_checkpoint first");
            Err(text(StatusCode::NOT_FOUND, &message))
        }
        Ok(Lookup::Closed) => Err(text(StatusCode::SERVICE_UNAVAILABLE, "this transport is shut down")),
        Err(_) => {
            let message = format!(
                "Timed out waiting for a checkpoint to be allowed after {} seconds",
                shared.patience.as_secs_f64()
            );
            Err(text(StatusCode::SERVICE_UNAVAILABLE, &message))
        }
    }
}

/// 412 and 304 as the conditions in `headers` ask for, or `None` when the request goes on.
fn conditional(headers: &HeaderMap, etag: &str) -> Option<Answer> {
    if let Some(value) = joined(headers, header::IF_MATCH)
        && !request::etag_matches_strong(&value, etag)
    {
        return Some(text(StatusCode::PRECONDITION_FAILED, "the snapshot asked for is no longer served"));
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

/// The whole of `segments` or the one range of it that `request` asks for, on the conditions it makes.
fn memory<B>(
    connection: &Arc<Connection>,
    lease: Arc<Lease>,
    segments: Arc<Segments>,
    digest: bool,
    request: &Request<B>,
) -> Answer {
    let headers = request.headers();
    // Ranges are defined for GET alone (RFC 9110, section 14.2).
    let range = joined(headers, header::RANGE).filter(|_| request.method() == Method::GET);
    let etag = lease.publication().etag().to_owned();
    if let Some(refused) = conditional(headers, &etag) {
        return refused;
    }
    let len = segments.len();
    let fresh = joined(headers, header::IF_RANGE).is_none_or(|v| request::etag_matches_strong(&v, &etag));
    let spec = match range {
        Some(value) if fresh => request::parse_range(&value, len),
        _ => RangeSpec::Whole,
    };
    let (status, start, end) = match spec {
        RangeSpec::Whole => (StatusCode::OK, 0, len),
        RangeSpec::Bytes { start, end } => (StatusCode::PARTIAL_CONTENT, start, end),
        RangeSpec::Unsatisfiable => {
            let message = format!("the range lies outside the {len} bytes there are");
            let mut refused = text(StatusCode::RANGE_NOT_SATISFIABLE, &message);
            insert(refused.headers_mut(), header::CONTENT_RANGE, &format!("bytes */{len}"));
            return refused;
        }
    };
    let mut answer = body(connection, lease, segments, digest, vec![(start, end)]);
    *answer.status_mut() = status;
    answer.headers_mut().insert(header::ACCEPT_RANGES, HeaderValue::from_static("bytes"));
    if status == StatusCode::PARTIAL_CONTENT {
        insert(answer.headers_mut(), header::CONTENT_RANGE, &format!("bytes {start}-{}/{len}", end - 1));
    }
    answer
}

/// The runs of blocks that `query` names, one after the other.
fn blocks<B>(connection: &Arc<Connection>, lease: Arc<Lease>, asked: &Request<B>, query: &str) -> Answer {
    if let Some(refused) = conditional(asked.headers(), lease.publication().etag()) {
        return refused;
    }
    let known = |(runs, grain): &(Vec<(u64, u64)>, u64)| runs.iter().all(|run| run.1 <= lease.block_count(*grain));
    let Some((runs, grain)) = request::parse_runs(query).filter(known) else {
        let count = lease.block_count(BLOCK_SIZE);
        return text(StatusCode::BAD_REQUEST, &format!("there are {count} blocks of 1 MiB, not {query}"));
    };
    let segments = Arc::clone(lease.publication().content());
    let (start, len) = (lease.publication().payload_start(), segments.len());
    let runs = runs.into_iter().map(|(first, end)| (start + first * grain, (start + end * grain).min(len)));
    let runs = runs.collect();
    body(connection, lease, segments, false, runs)
}

/// An answer of `runs` of bytes of `segments`.
fn body(
    connection: &Arc<Connection>,
    lease: Arc<Lease>,
    segments: Arc<Segments>,
    digest: bool,
    runs: Vec<(u64, u64)>,
) -> Answer {
    let etag = lease.publication().etag().to_owned();
    let total = runs.iter().map(|(start, end)| end - start).sum();
    let mut rest = runs.into_iter();
    let (at, end) = rest.next().unwrap_or_default();
    connection.open.fetch_add(1, Ordering::Relaxed);
    let mut answer = Response::new(ServedBody::Memory(Box::new(MemoryBody {
        segments,
        lease,
        at,
        end,
        rest,
        digest,
        digesting: None,
        progress: Arc::clone(&connection.progress),
        throttle: connection.shared.throttle.clone(),
        wait: None,
        _open: Box::new(Open(Arc::clone(connection), Sending::new(connection, total))),
    })));
    let headers = answer.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(OCTETS));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    insert(headers, header::ETAG, &etag);
    answer
}

/// The digest table, or what `?blocks=first-end` asks for, maybe of blocks of another size: `&grain=4096`.
async fn digests<B>(connection: &Connection, lease: Arc<Lease>, asked: &Request<B>, nonce: Option<&Nonce>) -> Answer {
    let etag = lease.publication().etag().to_owned();
    if let Some(refused) = conditional(asked.headers(), &etag) {
        return refused;
    }
    let (runs, grain) = match asked.uri().query().filter(|q| q.starts_with("blocks=")) {
        None => (vec![(0, lease.block_count(BLOCK_SIZE))], BLOCK_SIZE),
        Some(query) => {
            let one = request::parse_blocks(query).map(|(first, end, grain)| (vec![(first, end)], grain));
            let known = |(runs, grain): &(Vec<(u64, u64)>, u64)| {
                let few = *grain == BLOCK_SIZE || runs.iter().map(|run| run.1 - run.0).sum::<u64>() <= MAX_FINE_DIGESTS;
                runs.iter().all(|run| run.1 <= lease.block_count(*grain)) && few
            };
            let Some(found) = one.or_else(|| request::parse_runs(query)).filter(known) else {
                let count = lease.block_count(BLOCK_SIZE);
                return text(StatusCode::BAD_REQUEST, &format!("there are {count} blocks of 1 MiB, not {query}"));
            };
            found
        }
    };
    let table = if lease.digests_known(&runs, grain) {
        lease.digests(&runs, grain)
    } else {
        match tokio::task::spawn_blocking(move || lease.digests(&runs, grain)).await {
            Ok(table) => table,
            Err(_) => return text(StatusCode::INTERNAL_SERVER_ERROR, "the digests could not be computed"),
        }
    };
    let Some(table) = table else {
        return text(StatusCode::PRECONDITION_FAILED, "the snapshot asked for is no longer served");
    };
    let (Some(guard), Some(nonce)) = (&connection.shared.guard, nonce) else {
        let mut found = bytes(Bytes::from(table.encode_grained(&Algorithm::Crc64, grain)));
        insert(found.headers_mut(), header::ETAG, &etag);
        return found;
    };
    let key = guard.secret().key();
    let body = table.encode_grained(key.digests(), grain);
    let path = asked.uri().path_and_query().map_or("", |p| p.as_str());
    let proof = key.sign_answer(&proof::Answer { nonce, path, etag: &etag, body: &body });
    let mut found = bytes(Bytes::from(body));
    insert(found.headers_mut(), header::ETAG, &etag);
    insert(found.headers_mut(), HeaderName::from_static(proof::PROOF_HEADER), &proof);
    found
}

/// A body in another format: torchft's own, or that of torch's checkpoints. It is built without a lease, since that can
/// take long and reads no tensor memory.
async fn alternate<B>(
    connection: &Arc<Connection>,
    lease: Arc<Lease>,
    step: i64,
    name: String,
    asked: &Request<B>,
) -> Answer {
    let publication = lease.publication_arc();
    let etag = publication.etag().to_owned();
    drop(lease);
    let missing = match name.strip_prefix("dcp/") {
        Some(file) => format!("there is no file {file} here"),
        None => format!("list index out of range: there is no chunk {name}"),
    };
    let rendered = tokio::task::spawn_blocking(move || publication.render(&name)).await;
    let segments = match rendered {
        Ok(Ok(Some(Found::Here(segments)))) => segments,
        Ok(Ok(Some(Found::Elsewhere(url)))) => return elsewhere(&url),
        Ok(Ok(None)) => return text(StatusCode::NOT_FOUND, &missing),
        Ok(Err(message)) => return text(StatusCode::INTERNAL_SERVER_ERROR, &message),
        Err(_) => return text(StatusCode::INTERNAL_SERVER_ERROR, "the body could not be built"),
    };
    match self::lease(connection, step).await {
        Ok(lease) if lease.publication().etag() == etag => memory(connection, lease, segments, false, asked),
        Ok(_) => text(StatusCode::SERVICE_UNAVAILABLE, "the snapshot asked for is no longer served"),
        Err(refused) => refused,
    }
}

/// Sends whoever asks to another server.
fn elsewhere(url: &str) -> Answer {
    let mut answer = text(StatusCode::TEMPORARY_REDIRECT, "another rank serves this");
    insert(answer.headers_mut(), header::LOCATION, url);
    answer
}

/// Counters in the Prometheus text format.
fn metrics(connection: &Connection) -> Answer {
    let mut answer = text(StatusCode::OK, &Metrics::render(connection));
    answer.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("text/plain; version=0.0.4"));
    answer
}

fn joined(headers: &HeaderMap, name: HeaderName) -> Option<String> {
    let values: Vec<_> = headers.get_all(name).iter().map(HeaderValue::to_str).collect::<Result<_, _>>().ok()?;
    (!values.is_empty()).then(|| values.join(", "))
}

fn insert(headers: &mut HeaderMap, name: HeaderName, value: &str) {
    if let Ok(value) = HeaderValue::from_str(value) {
        headers.insert(name, value);
    }
}

fn bytes(body: Bytes) -> Answer {
    let mut answer = Response::new(ServedBody::Message(Some(body)));
    answer.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(OCTETS));
    answer.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    answer
}

/// A short message; for errors it is also the reason phrase, which is all that a stock torchft peer shows of it.
fn text(status: StatusCode, message: &str) -> Answer {
    let mut answer = Response::new(ServedBody::Message(Some(Bytes::from(format!("{}\n", message.trim_end())))));
    *answer.status_mut() = status;
    answer.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
    if status.is_client_error() || status.is_server_error() {
        answer.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
        if let Ok(reason) = ReasonPhrase::try_from(message.as_bytes()) {
            answer.extensions_mut().insert(reason);
        }
    }
    answer
}
