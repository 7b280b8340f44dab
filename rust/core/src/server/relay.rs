//! Relays: what this process receives, served on to others while it comes.
//!
//! A relay is a shelf with a random name, which only the source's tracker is told. It is taken down before the receive
//! ends, whatever its readers do.

use std::sync::Arc;
use std::time::Duration;

use tensorferry_wire::swarm::RelayAddress;
use tokio::runtime::Handle;

use super::{Shared, Shelf};
use crate::error::{Error, ErrorKind};
use crate::publication::Publication;
use crate::swarm::{RelayHost, Relayed, Relaying};

/// A server that relays for the receivers of its process.
#[derive(Debug)]
pub(super) struct Host {
    pub(super) shared: Arc<Shared>,
    pub(super) handle: Handle,
}

/// One snapshot that is relayed.
struct Relay {
    shelf: Shelf,
    address: RelayAddress,
}

impl RelayHost for Host {
    fn is_encrypted(&self) -> bool {
        self.shared.identity.is_some()
    }

    fn is_guarded(&self) -> bool {
        self.shared.auth.is_some()
    }

    /// Serves `relayed` on a new shelf.
    fn open(&self, relayed: Relayed) -> Result<Box<dyn Relaying>, Error> {
        if self.shared.store.is_closed() {
            return Err(Error::new(ErrorKind::Status(503), "this server is shut down"));
        }
        let place = Shelf::put_up(&self.shared, None, &self.handle)?;
        let fingerprint = self.shared.identity.as_ref().map(|identity| identity.fingerprint.to_string());
        let fingerprint = fingerprint.map(|text| text.trim_start_matches("sha256-").to_owned());
        let address = RelayAddress { port: self.shared.address.port(), token: place.name().to_owned(), fingerprint };
        place.store().publish_relayed(relayed.step(), Publication::relayed(relayed));
        Ok(Box::new(Relay { shelf: place, address }))
    }
}

impl Relaying for Relay {
    fn address(&self) -> RelayAddress {
        self.address.clone()
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        // Returns when the last lease is gone.
        self.shelf.store().withdraw(Duration::ZERO);
    }
}
