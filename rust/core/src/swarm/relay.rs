//! What a server does for a receiver of its own process: it serves on the blocks that have come.
//!
//! Servers and clients do not know one another. A server implements [`RelayHost`]; whoever starts a receive hands it over
//! with the options.

use std::fmt;
use std::sync::Arc;

use tensorferry_wire::swarm::RelayAddress;

use super::BlockMap;
use crate::error::Error;
use crate::memory::Memory;

/// A snapshot that is being received, to be served on.
#[derive(Debug)]
pub struct Relayed {
    pub(crate) step: i64,
    /// The entity tag under which the source serves it.
    pub(crate) etag: String,
    /// Where the payload starts in the container.
    pub(crate) payload_start: usize,
    /// The payload, in order. It is read for as long as the [`Relaying`] exists, and no block before its bit is set.
    pub(crate) payload: Vec<Memory>,
    pub(crate) blocks: Arc<BlockMap>,
}

impl Relayed {
    /// The step under which it is served.
    pub(crate) fn step(&self) -> i64 {
        self.step
    }
}

/// A server that can serve what its process receives: [`crate::Server::relay_host`].
pub trait RelayHost: fmt::Debug + Send + Sync {
    /// Whether what it serves is encrypted on its way.
    fn is_encrypted(&self) -> bool;

    /// Whether it serves only those who share a secret.
    fn is_guarded(&self) -> bool {
        false
    }

    /// Serves `relayed` until what is returned is dropped.
    ///
    /// # Errors
    /// When the server has been shut down, or the system gives no random numbers.
    fn open(&self, relayed: Relayed) -> Result<Box<dyn Relaying>, Error>;
}

/// A snapshot that is served while it is received. Dropping it ends that, whatever its readers do: not one byte is read
/// afterwards.
pub trait Relaying: Send + Sync {
    /// How other members reach it.
    fn address(&self) -> RelayAddress;
}
