//! How a server is set up.

use std::cmp::Reverse;
use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use tensorferry_wire::rails::{Cards, Rail};

use super::frontend::{ContainersOnly, Frontend};
use crate::trust::{Identity, Secret};

/// How a server is set up. Fields that are not named keep the defaults, which suit a trainer on a cluster:
///
/// ```
/// use std::time::Duration;
/// use tensorferry_core::{Secret, ServerConfig};
///
/// # fn main() -> Result<(), tensorferry_core::Error> {
/// let config = ServerConfig {
///     patience: Duration::from_secs(30),
///     secret: Some(Secret::new(b"at least sixteen bytes of it")?),
///     max_bandwidth: Some(1 << 30),
///     ..ServerConfig::default()
/// };
/// # assert!(config.capability && config.same_host && !config.tls);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
#[allow(clippy::struct_excessive_bools, reason = "each is an option of its own")]
pub struct ServerConfig {
    /// Where to listen; `None` is every interface, IPv6 and IPv4, unless `also` names addresses.
    pub bind: Option<IpAddr>,
    /// Further addresses to listen on besides that one, at the same port.
    pub also: Vec<IpAddr>,
    /// The first of these ports that is free is taken; 0 is one that the system picks.
    pub ports: RangeInclusive<u16>,
    /// The same for a second port, on which everyone who reaches it is given counters and the status page, unencrypted,
    /// and nothing else. `None`: there is none.
    pub metrics_ports: Option<RangeInclusive<u16>>,
    /// How long a request waits for the gate to open, and how long a transfer may make no progress at all.
    pub patience: Duration,
    /// Whether paths carry a random part without which everything but `/healthz` is 404.
    pub capability: bool,
    /// With a secret, everything but `/healthz`, `/metrics` and the status page needs a proof of it, and answers with
    /// digests carry one.
    pub secret: Option<Secret>,
    /// Encrypt what goes over the network. The fingerprint of the certificate is in the URL.
    pub tls: bool,
    /// The certificate for that; `None` makes one for this server alone.
    pub identity: Option<Identity>,
    /// Connections from the network that are held at once. A quarter of the slots is for connections that have not
    /// made an authorised request yet; the oldest of these makes room for the newest. The rest is for connections that
    /// have: an idle one makes room for one with a request, and while none is idle, the request waits.
    pub max_connections: usize,
    /// Whether processes of this machine and user may fetch around the network.
    pub same_host: bool,
    /// Bytes per second that all connections together may send of checkpoints.
    pub max_bandwidth: Option<u64>,
    /// Names the other formats that are served besides the container, and words refusals. By default there are none.
    pub frontend: Arc<dyn Frontend>,
    /// Whether receivers that ask for it are told of one another, so that they can send each other what is served here.
    pub swarm: bool,
    /// The addresses that receivers may use besides the one in the URL, all of which have to reach this server. Its URLs
    /// name some of them besides the host.
    pub rails: Vec<Rail>,
    /// The address of the network card by which receivers are to begin; its URLs name it first.
    pub card: Option<IpAddr>,
}

impl ServerConfig {
    /// The addresses that URLs name besides the host: behind the preferred one the fastest first.
    pub(super) fn named_cards(&self) -> Cards {
        let mut others: Vec<_> = self.rails.iter().filter(|rail| Some(rail.address) != self.card).collect();
        others.sort_by_key(|rail| Reverse(rail.mbit));
        Cards { first: self.card, others: others.iter().map(|rail| rail.address.to_canonical()).collect() }
    }
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            bind: None,
            also: Vec::new(),
            ports: 0..=0,
            metrics_ports: None,
            patience: Duration::from_mins(1),
            capability: true,
            secret: None,
            tls: false,
            identity: None,
            max_connections: 512,
            same_host: true,
            max_bandwidth: None,
            frontend: Arc::new(ContainersOnly),
            swarm: false,
            rails: Vec::new(),
            card: None,
        }
    }
}
