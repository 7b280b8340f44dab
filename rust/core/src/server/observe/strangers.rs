//! Who was refused without having shown a right to ask: addresses, reasons and counts, and nothing that a peer wrote.
//!
//! Strangers cannot fill memory: of each reason, the addresses that asked last are remembered, a fixed number of them. The
//! reasons are apart, so that a scanner does not displace a peer of the job that has another secret.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard};
use std::time::SystemTime;

use crate::server::connection_slots::Peer;
use crate::sync::Locked;

/// How many addresses are remembered for each reason.
const REMEMBERED: usize = 16;

/// Why a request is answered as if there were nothing. The peer is not told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::server) enum Reason {
    /// It did not know the path.
    Path,
    /// It knew the path, and gave no proof of the shared secret.
    NoSecret,
    /// It knew the path, and its proof does not hold.
    OtherSecret,
}

impl Reason {
    pub(in crate::server) const ALL: [Self; 3] = [Self::Path, Self::NoSecret, Self::OtherSecret];

    /// The label of its series.
    pub(in crate::server) fn label(self) -> &'static str {
        match self {
            Self::Path => "path",
            Self::NoSecret => "no_secret",
            Self::OtherSecret => "other_secret",
        }
    }

    /// The reason for people.
    pub(in crate::server) fn text(self) -> &'static str {
        match self {
            Self::Path => "unknown path: a scanner, or the metadata of an earlier process",
            Self::NoSecret => "right path, no proof of the shared secret: it has none, or a browser asked",
            Self::OtherSecret => "right path, and a proof that does not hold: it has another secret",
        }
    }
}

/// An address that was refused.
#[derive(Clone, Debug)]
pub(in crate::server) struct Stranger {
    pub(in crate::server) peer: Peer,
    pub(in crate::server) reason: Reason,
    pub(in crate::server) count: u64,
    pub(in crate::server) at: SystemTime,
}

/// All strangers of a server.
#[derive(Debug, Default)]
pub(in crate::server) struct Strangers([Mutex<Known>; 3]);

#[derive(Debug, Default)]
struct Known {
    total: u64,
    /// The latest first.
    latest: VecDeque<Stranger>,
}

impl Strangers {
    fn known(&self, reason: Reason) -> MutexGuard<'_, Known> {
        self.0[reason as usize].locked()
    }

    /// Notes that a request of `peer` was refused.
    pub(in crate::server) fn note(&self, peer: Peer, reason: Reason) {
        let mut known = self.known(reason);
        known.total += 1;
        let before = known.latest.iter().position(|stranger| stranger.peer == peer);
        let count = before.and_then(|index| known.latest.remove(index)).map_or(1, |stranger| stranger.count + 1);
        known.latest.push_front(Stranger { peer, reason, count, at: SystemTime::now() });
        known.latest.truncate(REMEMBERED);
    }

    /// How many requests were refused, by reason.
    pub(in crate::server) fn totals(&self) -> [(Reason, u64); 3] {
        Reason::ALL.map(|reason| (reason, self.known(reason).total))
    }

    /// The addresses that asked last, by reason; those that knew the path first.
    pub(in crate::server) fn latest(&self) -> Vec<Stranger> {
        let reasons = Reason::ALL.into_iter().rev();
        reasons.flat_map(|reason| self.known(reason).latest.iter().cloned().collect::<Vec<_>>()).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr};

    use super::*;

    #[test]
    fn a_crowd_of_strangers_is_counted_and_not_remembered() {
        let strangers = Strangers::default();
        let address = |number: u32| Peer::Address(IpAddr::V4(Ipv4Addr::from(number)));
        strangers.note(address(7), Reason::OtherSecret);
        for number in 0..10_000 {
            strangers.note(address(number), Reason::Path);
        }
        strangers.note(address(9_990), Reason::Path);
        let latest = strangers.latest();
        assert_eq!(latest.len(), 1 + REMEMBERED);
        assert_eq!((latest[0].peer, latest[0].reason), (address(7), Reason::OtherSecret), "no crowd displaces it");
        assert_eq!((latest[1].peer, latest[1].count), (address(9_990), 2));
        assert_eq!(strangers.totals().map(|(_, total)| total), [10_001, 0, 1]);
    }
}
