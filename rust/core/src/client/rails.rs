//! The other addresses of a source, and which address of this host goes with which of them.
//!
//! A source with several network cards names its addresses in the answer that brings the header, and in the one that
//! shows that it serves what is fetched. What is large enough to gain by it is then fetched over all of them: beside the
//! lanes to the URL's address there are some to each other one, from the card here that leads there. Where every card has a
//! network of its own, the kernel's routes say which. Where cards share a network, or each has a gateway and rules by the
//! address that a socket is bound to, sockets have to be bound, or one card would carry all.
//!
//! A rail is help, never a condition: one that fails or falls far behind is left alone for a while, by later receives of
//! this process, too. Only the lanes of the source itself can fail a transfer, and when their address fails, these try the
//! others, too (`targets`).

use std::net::IpAddr;
use std::sync::OnceLock;

use tensorferry_wire::rails::{MAX_RAILS, Rail};

use super::routes::{OwnAddress, Route, own_addresses, route};

/// With less to fetch, one address is enough: connecting to others takes longer than they would save.
pub(super) const LEAST_BYTES: u64 = 16 << 20;
/// A link this many times slower than the fastest one would only hold up the end.
const SLOWEST: u32 = 32;

/// The addresses at both ends of a connection: `None` here leaves the choice to the kernel.
pub(super) type Pair = (Option<IpAddr>, IpAddr);

/// The addresses of a source besides the one by which it was opened.
#[derive(Debug, Default)]
pub(super) struct Rails {
    learned: OnceLock<Learned>,
}

#[derive(Debug)]
struct Learned {
    /// The addresses at both ends of the connection that brought it.
    first: (IpAddr, IpAddr),
    others: Vec<IpAddr>,
    /// All that it has named.
    named: Vec<Rail>,
}

impl Rails {
    /// Notes the `rails` that a source has named, which was reached by the route `first`, unless it has named some
    /// before.
    pub(super) fn learn(&self, rails: &[Rail], first: (IpAddr, IpAddr)) {
        let fastest = rails.iter().map(|rail| rail.mbit).max().unwrap_or(0);
        let is_usable = |rail: &Rail| {
            let fast_enough = rail.mbit == 0 || rail.mbit >= fastest / SLOWEST;
            // A loopback address is of this machine, whoever names it.
            rail.address != first.1 && fast_enough && rail.address.is_loopback() == first.1.is_loopback()
        };
        let others = rails.iter().filter(|rail| is_usable(rail)).map(|rail| rail.address).collect();
        let _ = self.learned.set(Learned { first, others, named: rails.to_vec() });
    }

    /// What the source has named.
    pub(super) fn named(&self) -> &[Rail] {
        self.learned.get().map_or(&[], |learned| &learned.named)
    }

    /// The pair by which a receive would use the rail at `address`.
    pub(super) fn pair(&self, address: IpAddr) -> Pair {
        self.pairs(&mut Vec::new()).into_iter().find(|pair| pair.1 == address).unwrap_or((None, address))
    }

    /// The other addresses.
    pub(super) fn others(&self) -> &[IpAddr] {
        self.learned.get().map_or(&[], |learned| &learned.others)
    }

    /// The pairs of addresses by which the source is reached besides the one of its first answer.
    pub(super) fn pairs(&self, used: &mut Vec<IpAddr>) -> Vec<Pair> {
        match self.learned.get() {
            Some(learned) if !learned.others.is_empty() => {
                let mut found = pairs(&own_addresses(), route, learned.first, &learned.others, used);
                found.truncate(MAX_RAILS);
                found
            }
            _ => Vec::new(),
        }
    }
}

/// The pairs by which a source is reached besides `first`, the one of its first answer: one for each of its `others`,
/// and one for each card of this host that none of these uses. `used` counts what each address here has already.
fn pairs(
    own: &[OwnAddress],
    route: impl Fn(IpAddr, Option<IpAddr>) -> Option<Route>,
    first: (IpAddr, IpAddr),
    others: &[IpAddr],
    used: &mut Vec<IpAddr>,
) -> Vec<Pair> {
    used.push(first.0);
    if own.iter().all(|one| one.address == first.0 || one.device == device_of(own, first.0)) {
        return others.iter().map(|&there| (None, there)).collect();
    }
    let leads_to = |one: &OwnAddress, there: IpAddr| {
        one.address.is_ipv4() == there.is_ipv4()
            && (one.shares_network_with(there)
                || route(there, Some(one.address)).is_some_and(|route| route.device == one.device))
    };
    let mut found: Vec<Pair> = Vec::new();
    for &there in others {
        let ours = own.iter().filter(|one| leads_to(one, there));
        let ours = ours.min_by_key(|one| used.iter().filter(|&&address| address == one.address).count());
        used.extend(ours.map(|one| one.address));
        found.push((ours.map(|one| one.address), there));
    }
    let unused: Vec<_> = own.iter().filter(|one| !used.iter().any(|&at| device_of(own, at) == one.device)).collect();
    for one in unused {
        let times = |there: IpAddr| found.iter().filter(|pair| pair.1 == there).count() + usize::from(there == first.1);
        let there =
            others.iter().chain([&first.1]).copied().filter(|&there| leads_to(one, there)).min_by_key(|&at| times(at));
        if let Some(there) = there
            && !used.iter().any(|&at| device_of(own, at) == one.device)
        {
            used.push(one.address);
            found.push((Some(one.address), there));
        }
    }
    found
}

/// The number of the interface that has `address`; 0 if none has.
fn device_of(own: &[OwnAddress], address: IpAddr) -> u32 {
    own.iter().find(|one| one.address == address).map_or(0, |one| one.device)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_that_help_are_kept() {
        let rail = |address: &str, mbit| Rail { address: address.parse().unwrap(), mbit };
        let named = [
            rail("10.0.0.1", 25_000),
            rail("10.0.1.1", 25_000),
            rail("10.0.2.1", 0),
            rail("10.0.3.1", 100),
            rail("127.0.0.1", 25_000),
            rail("fd00::1", 1_000),
        ];
        let others = |first: &str| {
            let rails = Rails::default();
            rails.learn(&named, ("10.0.9.9".parse().unwrap(), first.parse().unwrap()));
            rails.others().iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        assert_eq!(others("10.0.0.1"), ["10.0.1.1", "10.0.2.1", "fd00::1"]);
        assert_eq!(others("192.0.2.1").len(), 4);
        assert_eq!(others("127.0.0.2"), ["127.0.0.1"]);
        assert!(Rails::default().others().is_empty());
    }
}
