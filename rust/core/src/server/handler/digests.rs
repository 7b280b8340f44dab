//! The digest table, or a part of it: as it is, or with a proof of the shared secret.

use std::sync::Arc;

use bytes::Bytes;
use http::header::{self, HeaderName};
use http::{Request, StatusCode};
use tensorferry_wire::digest::{Algorithm, BLOCK_SIZE};
use tensorferry_wire::proof::{self, Nonce};
use tensorferry_wire::request;

use super::content::{conditional, no_such_blocks};
use super::messages::{GONE, bytes, insert, text};
use super::waiting::runs_filled;
use super::{Answer, Connection};
use crate::publication::Lease;

/// Digests of blocks below 1 MiB that one request may ask for: computing them holds up a thread.
const MAX_FINE_DIGESTS: u64 = 1 << 20;

/// The digest table, or what `?blocks=first-end` asks for, maybe of blocks of another size: `&grain=4096`.
pub(super) async fn digests<B>(
    connection: &Connection,
    lease: Arc<Lease>,
    asked: &Request<B>,
    nonce: Option<&Nonce>,
) -> Answer {
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
                return no_such_blocks(&lease, query);
            };
            found
        }
    };
    if let Err(refused) = runs_filled(connection, &lease, &runs, grain).await {
        return refused;
    }
    if runs.iter().any(|run| run.1 == lease.block_count(grain)) {
        lease.note_last();
    }
    let table = if lease.digests_known(&runs, grain) {
        lease.digests(&runs, grain)
    } else {
        match tokio::task::spawn_blocking(move || lease.digests(&runs, grain)).await {
            Ok(table) => table,
            Err(_) => return text(StatusCode::INTERNAL_SERVER_ERROR, "the digests could not be computed"),
        }
    };
    let Some(table) = table else {
        return text(StatusCode::PRECONDITION_FAILED, GONE);
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
