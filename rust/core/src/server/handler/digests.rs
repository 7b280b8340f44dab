//! The digest table of a publication, all of it or the blocks that are asked for.
//!
//! With a shared secret the table is keyed and the answer carries a proof for exactly this request and body, so that a
//! receiver knows that its source knows the secret.

use std::sync::Arc;

use bytes::Bytes;
use http::header::{self, HeaderName};
use http::{Request, StatusCode};
use tensorferry_wire::digest::{Algorithm, BLOCK_SIZE};
use tensorferry_wire::proof::{self, Nonce};
use tensorferry_wire::request;
use tensorferry_wire::swarm::LONG_QUERY;

use super::content::{conditional, no_such_blocks};
use super::messages::{GONE, bytes, insert, text};
use super::waiting::runs_filled;
use super::{ConnectionContext, ServedResponse};
use crate::publication::{Lease, ProofAsked as Asked};

/// Digests of blocks below 1 MiB that one request may ask for: computing them holds up a thread.
const MAX_FINE_DIGESTS: u64 = 1 << 20;

/// The digest table, or what `?blocks=first-end` asks for, maybe of blocks of another size: `&grain=4096`.
pub(super) async fn digests<B>(
    connection: &ConnectionContext,
    lease: Arc<Lease>,
    asked: &Request<B>,
    nonce: Option<&Nonce>,
) -> ServedResponse {
    let etag = lease.publication().etag().to_owned();
    if let Some(refused) = conditional(asked.headers(), &etag) {
        return refused;
    }
    if asked.uri().query() == Some(LONG_QUERY) {
        return long_digests(connection, lease, asked, nonce).await;
    }
    let (runs, block_size) = match asked.uri().query().filter(|q| q.starts_with("blocks=")) {
        None => (vec![(0, lease.block_count(BLOCK_SIZE))], BLOCK_SIZE),
        Some(query) => {
            let one = request::parse_blocks(query).map(|(first, end, block_size)| (vec![(first, end)], block_size));
            let known = |(runs, block_size): &(Vec<(u64, u64)>, u64)| {
                let few =
                    *block_size == BLOCK_SIZE || runs.iter().map(|run| run.1 - run.0).sum::<u64>() <= MAX_FINE_DIGESTS;
                runs.iter().all(|run| run.1 <= lease.block_count(*block_size)) && few
            };
            let Some(found) = one.or_else(|| request::parse_runs(query)).filter(known) else {
                return no_such_blocks(&lease, query);
            };
            found
        }
    };
    if let Err(refused) = runs_filled(connection, &lease, &runs, block_size).await {
        return refused;
    }
    if runs.iter().any(|run| run.1 == lease.block_count(block_size)) {
        lease.note_last();
    }
    let table = if lease.digests_known(&runs, block_size) {
        lease.digests(&runs, block_size).map(Arc::new)
    } else {
        match lease.next_digests(runs, block_size).await {
            Ok(table) => table,
            Err(_) => return text(StatusCode::INTERNAL_SERVER_ERROR, "the digests could not be computed"),
        }
    };
    let Some(table) = table else {
        return text(StatusCode::PRECONDITION_FAILED, GONE);
    };
    let encode = |algorithm: &Algorithm| table.encode_with_block_size(algorithm, block_size);
    proven(connection, &etag, encode, asked, nonce)
}

/// The table with which members of a swarm compare. It is computed for the first who asks, and others wait for that.
async fn long_digests<B>(
    connection: &ConnectionContext,
    lease: Arc<Lease>,
    asked: &Request<B>,
    nonce: Option<&Nonce>,
) -> ServedResponse {
    let publication = lease.publication_arc();
    match publication.ask_for_proof() {
        Asked::Proven | Asked::Never => {}
        Asked::Compute => drop(tokio::task::spawn_blocking(move || lease.prove()).await),
        Asked::Running => {
            drop(lease);
            let _ = tokio::time::timeout(connection.shared.patience, publication.proof_ended()).await;
        }
    }
    match publication.proven() {
        Some(table) => proven(connection, publication.etag(), |algorithm| table.encode(algorithm), asked, nonce),
        None => text(StatusCode::NOT_FOUND, "there are no digests of one moment of this"),
    }
}

/// An answer with what `encode` makes of a table, and a proof of it where there is a secret.
fn proven<B>(
    connection: &ConnectionContext,
    etag: &str,
    encode: impl Fn(&Algorithm) -> Vec<u8>,
    asked: &Request<B>,
    nonce: Option<&Nonce>,
) -> ServedResponse {
    let (Some(auth), Some(nonce)) = (&connection.shared.auth, nonce) else {
        let mut found = bytes(Bytes::from(encode(&Algorithm::Crc64)));
        insert(found.headers_mut(), header::ETAG, etag);
        return found;
    };
    let key = auth.secret().key();
    let body = encode(key.digests());
    let path = asked.uri().path_and_query().map_or("", |p| p.as_str());
    let proof = key.sign_answer(&proof::SignedAnswer { nonce, path, etag, body: &body });
    let mut found = bytes(Bytes::from(body));
    insert(found.headers_mut(), header::ETAG, etag);
    insert(found.headers_mut(), HeaderName::from_static(proof::PROOF_HEADER), &proof);
    found
}
