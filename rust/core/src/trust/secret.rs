//! The shared secret: proves to a source that a receiver may fetch, and to a receiver that its source is the right one.
//!
//! Nothing prints it: neither `Debug` nor messages nor URLs. Proofs are made and checked by `tensorferry_wire::proof`,
//! in time that does not depend on where two of them differ.

use std::fmt;
use std::sync::Arc;

use tensorferry_wire::digest::Algorithm;
use tensorferry_wire::proof::Key;

use crate::error::{Error, ErrorKind};

/// The shared secret of the sources and receivers of one job.
///
/// ```
/// use tensorferry_core::{Secret, ServerConfig};
///
/// # fn main() -> Result<(), tensorferry_core::Error> {
/// let secret = Secret::new(b"at least sixteen bytes of it")?;
/// assert_eq!(format!("{secret:?}"), "Secret(..)");
/// let config = ServerConfig { secret: Some(secret), ..ServerConfig::default() };
/// # drop(config);
/// assert!(Secret::new(b"short").is_err());
/// # Ok(())
/// # }
/// ```
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

/// The algorithm for blocks: keyed with the secret where there is one, CRC-64/NVME otherwise.
pub(crate) fn algorithm(secret: Option<&Secret>) -> Algorithm {
    secret.map_or(Algorithm::Crc64, |secret| secret.key().digests().clone())
}
