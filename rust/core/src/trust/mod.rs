//! Trust in the other end: the shared secret, TLS with pinned certificates, and the random numbers both need.
//!
//! The secret and TLS answer different questions, and each works without the other. A secret proves to a source that a
//! receiver may fetch, and to a receiver that digests come from a source of its own job. TLS keeps others from reading
//! and ensures that the process that made the URL is the one that answers.

mod pinned;
pub(crate) mod random;
pub(crate) mod secret;
pub(crate) mod tls;

pub use self::secret::Secret;
pub use self::tls::Identity;
