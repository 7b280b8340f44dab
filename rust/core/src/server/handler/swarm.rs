//! What members of a swarm ask: the tracker of a source which blocks to fetch, a relay which blocks it has and for them.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, StatusCode, header};
use tensorferry_wire::digest::BLOCK_SIZE;
use tensorferry_wire::request::{RangeSpec, Resource};
use tensorferry_wire::swarm::{Ask, RelayAddress};

use super::content::{conditional, memory, wanted};
use super::messages::{bytes, insert, text};
use super::{ConnectionContext, ServedResponse};
use crate::publication::{Lease, ProofAsked};
use crate::server::connection_slots::Peer;
use crate::swarm::{BlockMap, Member};

/// How long a relay waits for a block more before it says that there is none.
const NEWS_PATIENCE: Duration = Duration::from_secs(1);

/// The answer of the tracker of what `lease` is for.
pub(super) fn track<B>(connection: &ConnectionContext, lease: &Arc<Lease>, asked: &Request<B>) -> ServedResponse {
    let etag = lease.publication().etag().to_owned();
    if let Some(refused) = conditional(asked.headers(), &etag) {
        return refused;
    }
    // A host that a member names could be any: others would connect to it.
    let Peer::Address(ip) = connection.slot.peer else {
        return text(StatusCode::BAD_REQUEST, "a swarm is for those that ask over the network");
    };
    let Some(ask) = asked.uri().query().and_then(Ask::parse) else {
        return text(StatusCode::BAD_REQUEST, "this is no question to a tracker");
    };
    let member = Member { ip, relay: ask.relay.clone() };
    match lease.publication().track(&member, &ask, lease.connection(), relay_url) {
        Ok((answer, wants_table)) => {
            if wants_table && matches!(lease.publication().ask_for_proof(), ProofAsked::Compute) {
                let lease = Arc::clone(lease);
                tokio::task::spawn_blocking(move || lease.prove());
            }
            let mut found = bytes(Bytes::from(answer.encode()));
            insert(found.headers_mut(), header::ETAG, &etag);
            found
        }
        Err(error) => text(StatusCode::INTERNAL_SERVER_ERROR, &error.to_string()),
    }
}

/// The URL below which `member` relays.
fn relay_url(member: &Member) -> String {
    let RelayAddress { port, token, fingerprint } = &member.relay;
    let host = SocketAddr::new(member.ip, *port);
    match fingerprint {
        Some(fingerprint) => format!("https://sha256-{fingerprint}@{host}/{token}/checkpoint/"),
        None => format!("http://{host}/{token}/checkpoint/"),
    }
}

/// The answer of a relay, of which `lease` is, to a request for `resource` of `step`.
pub(super) async fn relayed<B>(
    connection: &Arc<ConnectionContext>,
    lease: Arc<Lease>,
    blocks: &Arc<BlockMap>,
    resource: Resource<'_>,
    step: i64,
    asked: &Request<B>,
) -> ServedResponse {
    let etag = lease.publication().etag().to_owned();
    if let Some(refused) = conditional(asked.headers(), &etag) {
        return refused;
    }
    match resource {
        Resource::Container(_) => {
            let publication = lease.publication();
            let spec = wanted(asked, &etag, publication.total_len());
            let (RangeSpec::Bytes { start, end }, first) = (spec, publication.payload_start()) else {
                return missing();
            };
            if start < first || !blocks.has((start - first) / BLOCK_SIZE, (end - first).div_ceil(BLOCK_SIZE)) {
                return missing();
            }
            memory(connection, lease.content(), step, false, asked)
        }
        Resource::Have(_) => {
            // The bits outlive the memory: nobody waits for this answer to end.
            drop(lease);
            let since = asked.uri().query().and_then(|query| query.strip_prefix("since=")?.parse().ok());
            if let Some(since) = since {
                let _ = tokio::time::timeout(NEWS_PATIENCE, blocks.more_than(since)).await;
            }
            let mut found = bytes(Bytes::from(blocks.encode()));
            insert(found.headers_mut(), header::ETAG, &etag);
            found
        }
        _ => text(StatusCode::NOT_FOUND, "this relays blocks, and nothing else"),
    }
}

fn missing() -> ServedResponse {
    text(StatusCode::RANGE_NOT_SATISFIABLE, "these blocks are not here, or not yet")
}
