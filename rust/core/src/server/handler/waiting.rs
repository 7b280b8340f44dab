//! The waits of an answer: for the gate, and for bytes that are not final yet.
//!
//! Both waits end after the server's patience, with 503. They hold nothing of a publication meanwhile, but for
//! [`runs_filled`], whose caller has a lease.

use std::sync::Arc;

use http::header;
use http::{Method, Request, StatusCode};

use super::messages::{GONE, TAKEN_DOWN, joined, text};
use super::{ConnectionContext, ServedResponse};
use crate::publication::{Abandoned, Asked, Lease, Lookup, Store};

/// Takes a lease on what `request`, for a part of the container if `contents` says so, asks for as `step` of `store`, or
/// as any step of it; waits for the gate if it has to.
pub(super) async fn lease<B>(
    connection: &Arc<ConnectionContext>,
    store: &Store,
    step: Option<i64>,
    request: &Request<B>,
    contents: bool,
) -> Result<Arc<Lease>, ServedResponse> {
    let shared = &connection.shared;
    // `*` is content with whatever there is (RFC 9110, section 13.1.1), and so names nothing.
    let named = joined(request.headers(), header::IF_MATCH).filter(|tags| tags.trim() != "*");
    let receives = request.method() == Method::GET && (contents || named.is_some());
    let asked = Asked { step, named: named.as_deref(), receives };
    let _waiting = shared.metrics.wait();
    let lookup = tokio::time::timeout(shared.patience, store.lookup(asked, &connection.cut)).await;
    match lookup {
        Ok(Lookup::Found(lease)) if lease.publication().is_intact() => Ok(lease),
        Ok(Lookup::Found(_) | Lookup::Gone) => Err(text(StatusCode::PRECONDITION_FAILED, GONE)),
        Ok(Lookup::WrongStep(serving)) => {
            let serving = serving.map_or_else(|| "nothing".to_owned(), |s| s.to_string());
            let step = step.map_or_else(|| "none".to_owned(), |s| s.to_string());
            let message = format!("invalid checkpoint requested, serving {serving} but got step={step}");
            Err(text(StatusCode::BAD_REQUEST, &message))
        }
        Ok(Lookup::Nothing) => {
            let step = step.or_else(|| store.step()).unwrap_or_default();
            Err(text(StatusCode::NOT_FOUND, &shared.frontend.unpublished(step)))
        }
        // A shelf may be taken down alone, while the server goes on; a server closes its own store first.
        Ok(Lookup::Closed) if !shared.store.is_closed() => Err(text(StatusCode::SERVICE_UNAVAILABLE, TAKEN_DOWN)),
        Ok(Lookup::Closed) => Err(text(StatusCode::SERVICE_UNAVAILABLE, "this server is shut down")),
        Err(_) => {
            let message = format!(
                "Timed out waiting for a checkpoint to be allowed after {} seconds",
                shared.patience.as_secs_f64()
            );
            Err(text(StatusCode::SERVICE_UNAVAILABLE, &message))
        }
    }
}

/// Waits until bytes are final, no longer than a request waits for the gate. `abandoned` is the status if they never
/// will be.
pub(super) async fn filled(
    connection: &ConnectionContext,
    ready: impl Future<Output = Result<(), Abandoned>>,
    abandoned: StatusCode,
) -> Result<(), ServedResponse> {
    let patience = connection.shared.patience;
    match tokio::time::timeout(patience, ready).await {
        Ok(Ok(())) => Ok(()),
        Ok(Err(Abandoned)) => Err(text(abandoned, GONE)),
        Err(_) => {
            let message =
                format!("Timed out waiting for the state to be copied after {} seconds", patience.as_secs_f64());
            Err(text(StatusCode::SERVICE_UNAVAILABLE, &message))
        }
    }
}

/// Waits until the blocks of `block_size` bytes in `runs` are final, no longer than a request waits for the gate.
pub(super) async fn runs_filled(
    connection: &ConnectionContext,
    lease: &Lease,
    runs: &[(u64, u64)],
    block_size: u64,
) -> Result<(), ServedResponse> {
    let last = runs.iter().map(|run| run.1).max().unwrap_or(0);
    filled(connection, lease.blocks_ready(last, block_size), StatusCode::PRECONDITION_FAILED).await
}
