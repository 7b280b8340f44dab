//! Who may ask: with a shared secret, whoever proves to know it, and each proof once.

use std::collections::{HashSet, VecDeque};
use std::sync::{Mutex, PoisonError};

use http::{HeaderMap, HeaderName, HeaderValue, Request, header};
use tensorferry_wire::proof::{self, Nonce};

use crate::trust::Secret;

/// Proofs that are remembered. Only who has the secret can make one be forgotten, by as many requests of his own: with
/// ranges of 16 MiB that is a TiB.
const REMEMBERED: usize = 1 << 16;

/// Lets requests in that prove to know the secret.
#[derive(Debug)]
pub(super) struct RequestAuth {
    secret: Secret,
    seen: Mutex<ReplayCache>,
}

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
        let asked = proof::SignedRequest { method: request.method().as_str(), path, range, if_match };
        let field = field(header::AUTHORIZATION)??;
        let nonce = self.secret.key().verify_request(&asked, field)?;
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).is_new(nonce).then_some(nonce)
    }
}

impl ReplayCache {
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

/// A field that is there twice, or is no text.
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
