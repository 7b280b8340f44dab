//! Which address of this host goes with which address of a source, so that each network card on either side has a share.
//!
//! Where every card has a network of its own, the kernel's routes say it. Where cards share a network, or each has a
//! gateway and rules by the address that a socket is bound to, sockets have to be bound, or one card would carry all.

use std::net::IpAddr;

use super::routes::{OwnAddress, Route};

/// The addresses at both ends of a connection: `None` here leaves the choice to the kernel.
pub(super) type Pair = (Option<IpAddr>, IpAddr);

/// The pairs by which a source is reached besides `first`, the one of its first answer: one for each of its `others`,
/// and one for each card of this host that none of these uses. `used` counts what each address here has already.
pub(super) fn pairs(
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
