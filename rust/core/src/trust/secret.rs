//! The shared secret: who has it may fetch, and who has it may be fetched from.

use std::fmt;
use std::sync::Arc;

use tensorferry_wire::digest::Algorithm;
use tensorferry_wire::proof::Key;

use crate::error::{Error, ErrorKind};

/// What sources and receivers of one job know and nobody else does. It shows itself nowhere: not in messages, not in
/// `Debug`, not in URLs.
#[derive(Clone)]
pub struct Secret(Arc<Key>);

impl Secret {
    /// The secret made of `bytes`.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] when it is so short that it can be guessed: fewer than 16 bytes.
    pub fn new(bytes: &[u8]) -> Result<Self, Error> {
        let key = Key::new(bytes).map_err(|e| Error::new(ErrorKind::Invalid, e.to_string()))?;
        Ok(Self(Arc::new(key)))
    }

    pub(crate) fn key(&self) -> &Key {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// How blocks are checksummed with or without a secret.
pub(crate) fn algorithm(secret: Option<&Secret>) -> Algorithm {
    secret.map_or(Algorithm::Crc64, |secret| secret.key().digests().clone())
}
