//! Which of this host's addresses lead to another one, and by which network card: asked of the kernel.
//!
//! The kernel's rules may depend on the address that a socket is bound to, and the tables of routes alone do not say so.
//! A question costs some microseconds and sends nothing. Where the system does not answer, sockets are left to it.

use std::io;
use std::net::IpAddr;
use std::time::Duration;

use socket2::{Domain, Protocol, Socket, Type};

use crate::fork::CloseOnFork;

const RTM_NEWROUTE: u16 = 24;
const RTM_GETROUTE: u16 = 26;
const NLM_F_REQUEST: u16 = 1;
const RTN_UNICAST: u8 = 1;
const RTA_DST: u16 = 1;
const RTA_SRC: u16 = 2;
const RTA_OIF: u16 = 4;
const RTA_GATEWAY: u16 = 5;
const RTA_VIA: u16 = 18;
/// A header of a message, and of a route in it.
const HEADERS: usize = 16 + 12;
/// The kernel answers at once.
const PATIENCE: Duration = Duration::from_millis(100);

/// An address of this host by which others can be reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct OwnAddress {
    pub(super) address: IpAddr,
    /// How many bits of it name its network.
    pub(super) prefix: u8,
    /// The number of its interface.
    pub(super) device: u32,
}

impl OwnAddress {
    /// Whether `other` is in the same network.
    pub(super) fn shares_network_with(&self, other: IpAddr) -> bool {
        let bits = |address: IpAddr| match address {
            IpAddr::V4(v4) => u128::from(v4.to_bits()) << 96,
            IpAddr::V6(v6) => v6.to_bits(),
        };
        let differing = bits(self.address) ^ bits(other);
        self.address.is_ipv4() == other.is_ipv4() && differing.leading_zeros() >= u32::from(self.prefix)
    }
}

/// How packets to an address leave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Route {
    /// The number of the interface.
    pub(super) device: u32,
    /// Whether the address is reached without a gateway.
    pub(super) direct: bool,
}

/// The addresses of interfaces that are up; neither loopback nor link-local.
pub(super) fn own_addresses() -> Vec<OwnAddress> {
    let found = if_addrs::get_if_addrs().unwrap_or_default();
    let usable = found.iter().filter(|own| own.is_oper_up() && !own.is_loopback() && !own.is_link_local());
    let prefix = |own: &if_addrs::Interface| match &own.addr {
        if_addrs::IfAddr::V4(v4) => v4.netmask.to_bits().leading_ones(),
        if_addrs::IfAddr::V6(v6) => v6.netmask.to_bits().leading_ones(),
    };
    let own = |own: &if_addrs::Interface| {
        let prefix = u8::try_from(prefix(own)).ok()?;
        Some(OwnAddress { address: own.ip(), prefix, device: own.index? })
    };
    usable.filter_map(own).collect()
}

/// The route to `to` of a socket that is bound to `from`, or to none; `None` where there is none to another host.
pub(super) fn route(to: IpAddr, from: Option<IpAddr>) -> Option<Route> {
    ask_kernel(&question(to, from)).ok().and_then(|answer| read(&answer))
}

/// Sends a message to the kernel's routing tables; returns the answer.
fn ask_kernel(question: &[u8]) -> io::Result<Vec<u8>> {
    let socket = CloseOnFork::make(|| {
        Socket::new(Domain::from(libc::AF_NETLINK), Type::DGRAM, Some(Protocol::from(libc::NETLINK_ROUTE)))
    })?;
    socket.set_read_timeout(Some(PATIENCE))?;
    socket.send(question)?;
    let mut answer = vec![0; 4096];
    let length = io::Read::read(&mut &*socket, &mut answer)?;
    answer.truncate(length);
    Ok(answer)
}

/// The message that asks for a route.
fn question(to: IpAddr, from: Option<IpAddr>) -> Vec<u8> {
    let octets = |address: IpAddr| match address {
        IpAddr::V4(v4) => v4.octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    };
    let family = if to.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    let mut attributes = Vec::new();
    let mut bits = [0_u8; 2];
    for (number, (kind, address)) in [(RTA_DST, Some(to)), (RTA_SRC, from)].into_iter().enumerate() {
        let Some(address) = address.map(octets) else { continue };
        // Addresses have 4 or 16 bytes.
        bits[number] = u8::try_from(8 * address.len()).unwrap_or(0);
        attributes.extend(u16::try_from(4 + address.len()).unwrap_or(0).to_ne_bytes());
        attributes.extend(kind.to_ne_bytes());
        attributes.extend(address);
    }
    let mut message = Vec::new();
    message.extend(u32::try_from(HEADERS + attributes.len()).unwrap_or(0).to_ne_bytes());
    message.extend(RTM_GETROUTE.to_ne_bytes());
    message.extend(NLM_F_REQUEST.to_ne_bytes());
    message.extend([0; 8]);
    message.extend([u8::try_from(family).unwrap_or(0), bits[0], bits[1], 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    message.extend(attributes);
    message
}

/// The route in an answer of the kernel.
fn read(answer: &[u8]) -> Option<Route> {
    let number = |at: usize| Some(u16::from_ne_bytes(*answer.get(at..)?.first_chunk()?));
    if number(4)? != RTM_NEWROUTE || *answer.get(16 + 7)? != RTN_UNICAST {
        return None;
    }
    let (mut at, mut device, mut direct) = (HEADERS, None, true);
    while let (Some(length), Some(kind)) = (number(at), number(at + 2)) {
        let length = usize::from(length);
        if length < 4 {
            break;
        }
        match kind {
            RTA_OIF => device = Some(u32::from_ne_bytes(*answer.get(at + 4..)?.first_chunk()?)),
            RTA_GATEWAY | RTA_VIA => direct = false,
            _ => {}
        }
        at += length.next_multiple_of(4);
    }
    Some(Route { device: device?, direct })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn networks_are_told_apart() {
        let own = |address, prefix| OwnAddress { address: ip(address), prefix, device: 1 };
        for (own, other, same) in [
            (own("10.0.1.7", 24), "10.0.1.9", true),
            (own("10.0.1.7", 24), "10.0.2.9", false),
            (own("10.0.1.7", 32), "10.0.1.9", false),
            (own("10.0.1.7", 0), "192.0.2.1", true),
            (own("fd00:1::7", 64), "fd00:1::9", true),
            (own("fd00:1::7", 64), "fd00:2::9", false),
            (own("10.0.1.7", 24), "fd00:2::9", false),
        ] {
            assert_eq!(own.shares_network_with(ip(other)), same, "{own:?} {other}");
        }
    }

    #[test]
    fn an_answer_is_read() {
        let attribute = |kind: u16, value: [u8; 4]| [&8_u16.to_ne_bytes()[..], &kind.to_ne_bytes(), &value].concat();
        let answer = |kind: u16, sort: u8, attributes: &[Vec<u8>]| {
            let mut bytes = vec![0; HEADERS];
            bytes[4..6].copy_from_slice(&kind.to_ne_bytes());
            bytes[16 + 7] = sort;
            bytes.extend(attributes.concat());
            bytes
        };
        let (card, gateway) = (attribute(RTA_OIF, 3_u32.to_ne_bytes()), attribute(RTA_GATEWAY, [10, 0, 0, 1]));
        let direct = Route { device: 3, direct: true };
        assert_eq!(read(&answer(RTM_NEWROUTE, RTN_UNICAST, std::slice::from_ref(&card))), Some(direct));
        let both = [gateway, card.clone()];
        assert_eq!(read(&answer(RTM_NEWROUTE, RTN_UNICAST, &both)), Some(Route { direct: false, ..direct }));
        // An error, a local route, no card, and bytes that end too early.
        assert_eq!(read(&answer(2, RTN_UNICAST, std::slice::from_ref(&card))), None);
        assert_eq!(read(&answer(RTM_NEWROUTE, 2, std::slice::from_ref(&card))), None);
        assert_eq!(read(&answer(RTM_NEWROUTE, RTN_UNICAST, &[])), None);
        let whole = answer(RTM_NEWROUTE, RTN_UNICAST, &[card]);
        assert!((0..whole.len()).all(|length| read(&whole[..length]).is_none()));
        assert_eq!(read(&[&whole[..HEADERS], &[0; 8]].concat()), None);
    }

    #[test]
    fn this_host_s_own_addresses_are_no_other_host() {
        assert_eq!(route(ip("127.0.0.1"), None), None);
        assert!(own_addresses().iter().all(|own| !own.address.is_loopback()));
    }
}
