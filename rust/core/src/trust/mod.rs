//! Who is at the other end: the shared secret, TLS with pinned certificates, and the random numbers both need.

pub(crate) mod random;
pub(crate) mod secret;
pub(crate) mod tls;

pub use self::secret::Secret;
