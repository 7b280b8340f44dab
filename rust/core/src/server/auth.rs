//! Authorisation by the shared secret: a request must carry a proof for itself, and each proof is good once.
//!
//! A proof covers method, path, `Range` and `If-Match`, so that what is signed is what is answered. [`ReplayCache`]
//! remembers nonces up to a fixed number; forgetting one takes as many signed requests, which only somebody with the
//! secret can make.

use std::collections::{HashSet, VecDeque};
use std::sync::Mutex;

use http::{HeaderMap, HeaderName, HeaderValue, Request, header};
use tensorferry_wire::proof::{self, Nonce};

use crate::sync::Locked;
use crate::trust::Secret;

/// Nonces that are remembered. Only a peer with the secret can have one forgotten, by making as many signed requests:
/// with ranges of 16 MiB that is a TiB.
const REMEMBERED: usize = 1 << 16;

/// Admits requests that prove knowledge of the shared secret.
#[derive(Debug)]
pub(super) struct RequestAuth {
    secret: Secret,
    seen: Mutex<ReplayCache>,
}

/// The nonces of requests that were admitted, so that none is admitted twice; the oldest is forgotten first.
#[derive(Debug, Default)]
struct ReplayCache {
    nonces: HashSet<Nonce>,
    order: VecDeque<Nonce>,
}

impl RequestAuth {
    pub(super) fn new(secret: Secret) -> Self {
        Self { secret, seen: Mutex::default() }
    }

    pub(super) fn secret(&self) -> &Secret {
        &self.secret
    }

    /// The nonce of a request that carries a proof for itself which was not used before.
    pub(super) fn admit<B>(&self, request: &Request<B>) -> Option<Nonce> {
        let path = request.uri().path_and_query()?.as_str();
        let field = |name| one(request.headers(), name).ok();
        let (range, if_match) = (field(header::RANGE)?, field(header::IF_MATCH)?);
        let signed = proof::SignedRequest { method: request.method().as_str(), path, range, if_match };
        let field = field(header::AUTHORIZATION)??;
        let nonce = self.secret.key().verify_request(&signed, field)?;
        self.seen.locked().is_new(nonce).then_some(nonce)
    }
}

impl ReplayCache {
    /// Remembers `nonce`; returns whether it was not used before.
    fn is_new(&mut self, nonce: Nonce) -> bool {
        if !self.nonces.insert(nonce) {
            return false;
        }
        self.order.push_back(nonce);
        if self.order.len() > REMEMBERED
            && let Some(oldest) = self.order.pop_front()
        {
            self.nonces.remove(&oldest);
        }
        true
    }
}

/// A header field that occurs twice, or whose value is not text: what was signed is not clear.
struct Unclear;

/// The one value of a field, if it is there: what a proof covers must be what the answer is made from.
fn one(headers: &HeaderMap, name: HeaderName) -> Result<Option<&str>, Unclear> {
    let mut values = headers.get_all(name).iter();
    let first = values.next().map(HeaderValue::to_str).transpose().map_err(|_| Unclear)?;
    if values.next().is_some() { Err(Unclear) } else { Ok(first) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_nonce_is_new_once_and_memory_is_bounded() {
        let mut seen = ReplayCache::default();
        let nonce = |i: usize| (i as u128).to_le_bytes();
        for i in 0..REMEMBERED {
            assert!(seen.is_new(nonce(i)));
        }
        assert!(!seen.is_new(nonce(0)) && !seen.is_new(nonce(REMEMBERED - 1)));
        assert!(seen.is_new(nonce(REMEMBERED)));
        assert_eq!((seen.nonces.len(), seen.order.len()), (REMEMBERED, REMEMBERED));
        assert!(!seen.is_new(nonce(1)), "only the oldest is forgotten");
    }
}
