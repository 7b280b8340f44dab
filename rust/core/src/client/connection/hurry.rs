//! How long a connection may be silent where its source has other addresses.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use super::Connection;
use crate::client::limits::Limits;

impl Connection {
    /// The same connection with other limits, and not in a hurry. Their cancellation must be the one it was made with,
    /// which alone knows its socket.
    pub(crate) fn within(self, limits: &Limits) -> Self {
        Self { limits: limits.clone(), hurry: None, ..self }
    }

    /// Whether the source said of the answer under way that it still copies what it is to send: it may be silent for as
    /// long as that takes.
    pub(crate) fn is_filling(&self) -> bool {
        self.filling
    }

    /// The same connection, which may be silent for as long as its address deserves: for `first` if that has not failed
    /// and the source has others.
    pub(crate) fn in_hurry(self, first: Duration) -> Self {
        let most = self.limits.stall;
        let hurry = self.address().and_then(|at| self.url.targets().patience(at, first, most));
        Self { hurry: hurry.filter(|hurry| *hurry < most), ..self }
    }

    /// Whether it would be waited for longer if its source had no other address.
    pub(crate) fn is_in_hurry(&self) -> bool {
        self.hurry.is_some() && !self.filling
    }

    /// For how long it may be silent.
    pub(super) fn stall(&self) -> Duration {
        self.hurry.filter(|_| !self.filling).map_or(self.limits.stall, |hurry| hurry.min(self.limits.stall))
    }

    /// How long an answer may take to begin that is to be waited for during `patience`.
    pub(crate) fn patience(&self, patience: Duration) -> Duration {
        self.hurry.map_or(patience, |hurry| hurry.min(patience))
    }

    /// The address at the other end, if it goes over the network.
    pub(crate) fn address(&self) -> Option<IpAddr> {
        self.peer.map(|peer| peer.ip().to_canonical())
    }

    /// The address and the port at the other end.
    pub(crate) fn peer(&self) -> Option<SocketAddr> {
        self.peer
    }
}
