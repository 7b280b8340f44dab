//! Answers other than the state: short messages and small bodies, and the headers of requests and answers as text.

use bytes::Bytes;
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::{Response, StatusCode};
use hyper::ext::ReasonPhrase;

use super::ServedResponse;
use crate::server::body::ServedBody;

pub(super) const OCTETS: &str = "application/octet-stream";
pub(super) const GONE: &str = "the snapshot asked for is no longer served";
/// For those who waited at a shelf that was taken down.
pub(super) const TAKEN_DOWN: &str = "the snapshot at this URL was evicted or withdrawn: ask for the latest metadata";

/// All values of a header, as one.
pub(super) fn joined(headers: &HeaderMap, name: HeaderName) -> Option<String> {
    let values: Vec<_> = headers.get_all(name).iter().map(HeaderValue::to_str).collect::<Result<_, _>>().ok()?;
    (!values.is_empty()).then(|| values.join(", "))
}

/// Adds a header, unless its value can be none.
pub(super) fn insert(headers: &mut HeaderMap, name: HeaderName, value: &str) {
    if let Ok(value) = HeaderValue::from_str(value) {
        headers.insert(name, value);
    }
}

/// A small body.
pub(super) fn bytes(body: Bytes) -> ServedResponse {
    let mut answer = Response::new(ServedBody::Message(Some(body)));
    answer.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(OCTETS));
    answer.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    answer
}

/// A short message; for errors it is also the reason phrase, which is all that some peers show of it.
pub(super) fn text(status: StatusCode, message: &str) -> ServedResponse {
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

/// The answer to an authorised request for which there is no place now, though there may be one a moment later.
pub(super) fn full() -> ServedResponse {
    let mut answer = text(StatusCode::SERVICE_UNAVAILABLE, "no place is left for another connection");
    answer.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
    answer
}
