//! One request, one answer.
//!
//! [`answer`] goes through the steps every request takes: the method, the path with its random part, the proof of the
//! secret, a slot among the connections that may ask, the resource itself. Refusals are ordinary answers with a short
//! text, which is also the reason phrase, since that is all that some peers show.

mod content;
mod digests;
mod messages;
mod swarm;
mod waiting;

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use http::header::{self, HeaderName, HeaderValue};
use http::{Method, Request, Response, StatusCode};
use tensorferry_wire::proof::Nonce;
use tensorferry_wire::rails::RAILS_HEADER;
use tensorferry_wire::request::{self, PathError, Resource};
use tensorferry_wire::swarm::{SWARM_FILLING, SWARM_FULL, SWARM_HEADER};

use self::content::{blocks, conditional, memory};
use self::digests::digests;
use self::messages::{GONE, bytes, full, insert, text};
use self::waiting::{filled, lease};
use super::observe::figures::Figures;
use super::observe::strangers::Reason;
use super::observe::{exposition, status};
use super::{ConnectionContext, Shared};
use crate::publication::{Lease, Store};
use crate::server::body::ServedBody;
use crate::trust::random;

type ServedResponse = Response<ServedBody>;

/// What those are told who ask the port for figures for something else, such as a state.
const OF_OBSERVERS: &str = "this is the port for figures, with /, /metrics and /healthz alone: a state is fetched from the \
                            port in the whole URL that its source gives";

/// Answers a request, after checking its method and what it may have; counts it and its answer.
pub(super) async fn answer<B>(
    connection: &Arc<ConnectionContext>,
    request: &Request<B>,
) -> Result<ServedResponse, Infallible> {
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
    let permitted = permitted(connection, request);
    // The connection keeps its slot while it is answered.
    let asking = match &permitted {
        Ok((Resource::Healthz | Resource::Metrics | Resource::StatusPage, ..)) | Err(_) => None,
        Ok(_) => Some(connection.slot.begin().await),
    };
    let stranger = match permitted {
        Err(Denied::Stranger(reason)) => Some(reason),
        _ => None,
    };
    let mut answer = match permitted {
        Ok(_) if matches!(asking, Some(None)) => full(),
        Ok((resource, store, nonce)) => resolve(connection, &store, resource, request, nonce.as_ref()).await,
        Err(Denied::Stranger(_)) => text(StatusCode::NOT_FOUND, "not found"),
        Err(Denied::BadUrl(message)) => text(StatusCode::BAD_REQUEST, &message),
    };
    let status = answer.status();
    connection.shared.metrics.note_answer(status.as_u16());
    if let Some(reason) = stranger {
        connection.shared.strangers.note(connection.slot.peer, reason);
    } else if let ServedBody::Message(Some(message)) = answer.body()
        && (status.is_client_error() || status.is_server_error())
    {
        connection.shared.metrics.note_refusal(connection.slot.peer, status.as_u16(), message);
    }
    if head && answer.status() != StatusCode::NOT_MODIFIED {
        // hyper keeps the length of the body for the head and sends none of it.
        let length = http_body::Body::size_hint(answer.body()).exact().unwrap_or(0);
        answer.headers_mut().entry(header::CONTENT_LENGTH).or_insert(length.into());
        *answer.body_mut() = ServedBody::Message(None);
    }
    Ok(answer)
}

/// The resource that the request may have, the store it is in, and the nonce of its proof where one is needed.
///
/// A peer without the secret gets the same 404 as one without the token. Liveness is open to everybody; counters and the
/// status page need the random part of the path alone, since neither scrapers nor browsers can sign requests.
fn permitted<'r, B>(
    connection: &ConnectionContext,
    request: &'r Request<B>,
) -> Result<(Resource<'r>, Arc<Store>, Option<Nonce>), Denied> {
    let (path, shared) = (request.uri().path(), &connection.shared);
    let (token, store) = match shared.shelves.find(path) {
        Some((name, store)) => (name, store),
        None => (shared.token.as_str(), Arc::clone(&shared.store)),
    };
    let found = request::parse_path(path, token).and_then(|found| match found {
        Resource::Alternate(key, name) if shared.frontend.alternate(name).is_none() => {
            Err(PathError::bad_url(&format!("/checkpoint/{key}/{name}")))
        }
        found => Ok(found),
    });
    let Some(auth) = &shared.auth else { return Ok((found?, store, None)) };
    match found {
        Ok(figures @ (Resource::Metrics | Resource::StatusPage)) => Ok((figures, store, None)),
        Ok(Resource::Healthz) if path == "/healthz" => Ok((Resource::Healthz, store, None)),
        Err(PathError::NotFound) => Err(Denied::Stranger(Reason::Path)),
        found => {
            let gave_one = request.headers().contains_key(header::AUTHORIZATION);
            let reason = if gave_one { Reason::OtherSecret } else { Reason::NoSecret };
            let nonce = auth.admit(request).ok_or(Denied::Stranger(reason))?;
            Ok((found?, store, Some(nonce)))
        }
    }
}

/// Why a request gets nothing.
enum Denied {
    /// It has not shown a right to ask, and is answered as if there were nothing.
    Stranger(Reason),
    /// It has, and its path means nothing.
    BadUrl(String),
}

impl From<PathError> for Denied {
    fn from(error: PathError) -> Self {
        match error {
            PathError::NotFound => Self::Stranger(Reason::Path),
            PathError::BadUrl(message) => Self::BadUrl(message),
        }
    }
}

/// The answer to a permitted request for `resource`.
async fn resolve<B>(
    connection: &Arc<ConnectionContext>,
    store: &Store,
    resource: Resource<'_>,
    request: &Request<B>,
    nonce: Option<&Nonce>,
) -> ServedResponse {
    let key = match resource {
        Resource::Healthz => return text(StatusCode::OK, "ok"),
        Resource::Metrics => return metrics(&connection.shared),
        Resource::StatusPage => return status_page(&connection.shared, request.uri().query()),
        Resource::Step => return served_step(connection, store, request).await,
        Resource::Container(key)
        | Resource::Header(key)
        | Resource::Digests(key)
        | Resource::Swarm(key)
        | Resource::Have(key)
        | Resource::Alternate(key, _) => key,
    };
    let Some(step) = request::parse_step(key) else {
        return text(StatusCode::NOT_FOUND, &format!("no checkpoint is called {key}: steps are integers"));
    };
    let lease = match lease(connection, store, Some(step), request, matches!(resource, Resource::Container(_))).await {
        Ok(lease) => lease,
        Err(refused) => return refused,
    };
    let relayed = lease.publication().block_map().cloned();
    let is_source = relayed.is_none();
    let offers_swarm = is_source && connection.shared.offers_swarm();
    let is_full = offers_swarm && lease.publication().is_ready(lease.publication().total_len());
    let mut found = match resource {
        _ if let Some(blocks) = &relayed => swarm::relayed(connection, lease, blocks, resource, step, request).await,
        Resource::Container(_) => {
            if let Some(query) = request.uri().query().filter(|query| query.starts_with("blocks=")) {
                blocks(connection, lease, step, request, query).await
            } else {
                memory(connection, lease.content(), step, true, request)
            }
        }
        Resource::Header(_) => {
            let etag = lease.publication().etag().to_owned();
            let mut found = bytes(lease.publication().header().clone());
            insert(found.headers_mut(), header::ETAG, &etag);
            conditional(request.headers(), &etag).unwrap_or(found)
        }
        Resource::Digests(_) => digests(connection, lease, request, nonce).await,
        Resource::Alternate(_, name) => {
            let name = connection.shared.frontend.alternate(name).unwrap_or_default();
            alternate(connection, store, lease, step, name, request).await
        }
        Resource::Swarm(_) if offers_swarm => swarm::track(connection, &lease, request),
        Resource::Swarm(_)
        | Resource::Have(_)
        | Resource::Healthz
        | Resource::Metrics
        | Resource::StatusPage
        | Resource::Step => text(StatusCode::NOT_FOUND, "not found"),
    };
    if offers_swarm && matches!(resource, Resource::Container(_)) {
        found
            .headers_mut()
            .insert(SWARM_HEADER, HeaderValue::from_static(if is_full { SWARM_FULL } else { SWARM_FILLING }));
    }
    let begins = matches!(resource, Resource::Container(_) | Resource::Digests(_));
    if let Some(rails) = connection.shared.rails.as_ref().filter(|_| is_source && begins) {
        found.headers_mut().insert(RAILS_HEADER, rails.clone());
    }
    if let Some(name) = connection.shared.same_host.as_ref().filter(|_| !connection.same_host) {
        insert(found.headers_mut(), HeaderName::from_static(request::SAME_HOST_HEADER), &name.to_string());
    }
    found
}

/// The step that is served, once there is one.
async fn served_step<B>(connection: &Arc<ConnectionContext>, store: &Store, request: &Request<B>) -> ServedResponse {
    match lease(connection, store, None, request, false).await {
        // Between the two looks the store may have gone on: then this is the newer step.
        Ok(_) => text(StatusCode::OK, &store.step().unwrap_or_default().to_string()),
        Err(refused) => refused,
    }
}

/// The body called `name`, in another format than the container, once the state is all there. It is built without a
/// lease: building can take long, and reads no tensor memory.
async fn alternate<B>(
    connection: &Arc<ConnectionContext>,
    store: &Store,
    lease: Arc<Lease>,
    step: i64,
    name: String,
    asked: &Request<B>,
) -> ServedResponse {
    let publication = lease.publication_arc();
    let etag = publication.etag().to_owned();
    drop(lease);
    let all = publication.ready(publication.total_len());
    if let Err(refused) = filled(connection, all, StatusCode::SERVICE_UNAVAILABLE).await {
        return refused;
    }
    let missing = connection.shared.frontend.missing(&name);
    if let Some(turn) = publication.turn(&name).await {
        let wanted = name.clone();
        match tokio::task::spawn_blocking(move || turn.render(&wanted)).await {
            Ok(Ok(true)) => {}
            Ok(Ok(false)) => return text(StatusCode::NOT_FOUND, &missing),
            Ok(Err(message)) => return text(StatusCode::INTERNAL_SERVER_ERROR, &message),
            Err(_) => return text(StatusCode::INTERNAL_SERVER_ERROR, "the body could not be built"),
        }
    }
    match waiting::lease(connection, store, Some(step), asked, false).await {
        Ok(lease) => match lease.rendered(&name).filter(|_| lease.publication().etag() == etag) {
            Some(body) => {
                let mut answer = memory(connection, body, step, false, asked);
                if answer.status().is_success() {
                    let media_type = HeaderValue::from_static(connection.shared.frontend.media_type(&name));
                    answer.headers_mut().insert(header::CONTENT_TYPE, media_type);
                }
                answer
            }
            None => text(StatusCode::SERVICE_UNAVAILABLE, GONE),
        },
        Err(refused) => refused,
    }
}

/// The answer to a request on the port for figures: to anyone, and nothing of a state.
pub(super) fn observe<B>(shared: &Shared, request: &Request<B>) -> ServedResponse {
    let head = request.method() == Method::HEAD;
    let mut answer = match (request.method(), request.uri().path()) {
        (&Method::GET | &Method::HEAD, "/healthz") => text(StatusCode::OK, "ok"),
        (&Method::GET | &Method::HEAD, "/metrics") => metrics(shared),
        (&Method::GET | &Method::HEAD, "/") => status_page(shared, request.uri().query()),
        (&Method::GET | &Method::HEAD, _) => text(StatusCode::NOT_FOUND, OF_OBSERVERS),
        _ => text(StatusCode::METHOD_NOT_ALLOWED, "only GET and HEAD are served here"),
    };
    if head {
        *answer.body_mut() = ServedBody::Message(None);
    }
    answer
}

/// Counters in the Prometheus text format.
fn metrics(shared: &Shared) -> ServedResponse {
    let mut answer = text(StatusCode::OK, &exposition::render(&Figures::of(shared)));
    answer.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(exposition::MEDIA_TYPE));
    answer
}

/// The status page, or with the query `json` what it shows.
fn status_page(shared: &Shared, query: Option<&str>) -> ServedResponse {
    let Ok(nonce) = random::token() else {
        return text(StatusCode::INTERNAL_SERVER_ERROR, "the system gives no random numbers");
    };
    let (body, media_type) = match query {
        Some("json") => (status::json(&Figures::of(shared)), "application/json"),
        _ => (status::page(&nonce), "text/html; charset=utf-8"),
    };
    let mut answer = text(StatusCode::OK, &body);
    let headers = answer.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(media_type));
    insert(headers, header::CONTENT_SECURITY_POLICY, &status::content_security_policy(&nonce));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(header::REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    answer
}
