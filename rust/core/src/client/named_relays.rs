//! The relays that a tracker has named: which of them are asked, how often, and how many at once.
//!
//! A tracker may be hostile, and so may be whoever has changed its answer. So nothing is asked for at an address that it
//! names but the path of a relay, and no address only this machine or this link has, unless the source itself was
//! reached by one.

use std::net::IpAddr;

use tensorferry_wire::swarm::is_relay_path;

use super::Source;

/// How often one receive tries relays in all, and how often the same one, as long as it does not lie, which counts as
/// that many tries: a relay that was slow, or frozen, may be the only one that has a block when the source is gone.
const MOST_TRIED: usize = 256;
const MOST_TIMES: usize = 3;

#[derive(Default)]
pub(super) struct NamedRelays {
    /// The URLs that were tried, each time, and those that are fetched from.
    tried: Vec<String>,
    active: Vec<String>,
}

impl NamedRelays {
    /// The relay at `url`, which `source` names whom we have reached at the address `there`, if it is not fetched from, nor
    /// `most` others, was not tried too often, and may be asked. One that may not be asked counts as tried.
    pub(super) fn begin(
        &mut self,
        url: &str,
        (source, there): (&Source, Option<IpAddr>),
        most: usize,
    ) -> Option<Source> {
        let times = self.tried.iter().filter(|tried| *tried == url).count();
        let is_full = self.tried.len() >= MOST_TRIED || self.active.len() >= most;
        if is_full || times >= MOST_TIMES || self.active.iter().any(|active| active == url) {
            return None;
        }
        self.tried.push(url.to_owned());
        let relay = Source::parse(url, source.wants_same_host, source.url.secret()).ok()?;
        if !may_be_asked(&relay, source, there) {
            return None;
        }
        self.active.push(url.to_owned());
        Some(relay)
    }

    /// The relay at `url` is fetched from no more, if it `lied`, or until the tracker names it again.
    pub(super) fn set_aside(&mut self, url: &str, lied: bool) {
        self.active.retain(|active| active != url);
        let times = if lied { MOST_TIMES } else { 0 };
        self.tried.extend(std::iter::repeat_n(url.to_owned(), times));
    }
}

/// Whether `relay` may be one: at an address, so that nobody is asked for a name, and encrypted if `source` is.
fn may_be_asked(relay: &Source, source: &Source, there: Option<IpAddr>) -> bool {
    let Some(host) = relay.url.host().parse::<IpAddr>().ok().map(|host| host.to_canonical()) else { return false };
    let is_near = |address: IpAddr| [address.is_loopback(), is_link_local(address)];
    let (near, near_source) = (is_near(host), there.map_or([false; 2], is_near));
    let is_reached = near.iter().zip(near_source).all(|(relay, source)| source || !relay);
    let is_host = !host.is_unspecified() && !host.is_multicast() && relay.url.port() > 0;
    let is_private = source.url.tls().is_none() || relay.url.tls().is_some();
    is_host && is_reached && is_private && is_relay_path(relay.url.prefix())
}

/// Whether only hosts of one link have this address: services of a cloud for its machines are at some of them.
fn is_link_local(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => address.is_link_local(),
        IpAddr::V6(address) => address.is_unicast_link_local(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOKEN: &str = "0123456789abcdef0123456789abcdef";

    fn begins(url: &str, there: &str) -> bool {
        let source = Source::parse("http://10.0.0.1:1/0f/checkpoint/", false, None).unwrap();
        NamedRelays::default().begin(url, (&source, there.parse().ok()), 12).is_some()
    }

    #[test]
    fn a_tracker_leads_to_relays_alone() {
        for host in ["10.0.0.7", "192.0.2.1", "[2001:db8::1]", "[::ffff:10.0.0.7]"] {
            assert!(begins(&format!("http://{host}:4000/{TOKEN}/checkpoint/"), "10.0.0.1"), "{host}");
        }
        for host in [
            "127.0.0.1",
            "[::1]",
            "[::ffff:127.0.0.1]",
            "169.254.169.254",
            "[fe80::1]",
            "0.0.0.0",
            "[::]",
            "224.0.0.1",
            "localhost",
            "node7",
            "2130706433",
        ] {
            assert!(!begins(&format!("http://{host}:4000/{TOKEN}/checkpoint/"), "10.0.0.1"), "{host}");
        }
        for path in [
            "",
            "checkpoint/",
            "latest/meta-data/",
            &format!("{TOKEN}/checkpoint/../"),
            &format!("{TOKEN}~10.0.0.9/checkpoint/"),
            &format!("{TOKEN}/checkpoint/?a=/"),
            &format!("admin/{TOKEN}/checkpoint/"),
            &format!("{}/checkpoint/", &TOKEN[1..]),
        ] {
            assert!(!begins(&format!("http://10.0.0.7:4000/{path}"), "10.0.0.1"), "{path}");
        }
        assert!(!begins(&format!("http://10.0.0.7:0/{TOKEN}/checkpoint/"), "10.0.0.1"));
    }

    #[test]
    fn a_near_source_may_name_near_relays() {
        for (host, there) in [("127.0.0.1", "127.0.0.1"), ("127.0.0.1", "::1"), ("169.254.0.7", "169.254.0.1")] {
            assert!(begins(&format!("http://{host}:4000/{TOKEN}/checkpoint/"), there), "{host}");
        }
        assert!(!begins(&format!("http://127.0.0.1:4000/{TOKEN}/checkpoint/"), "169.254.0.1"));
        assert!(!begins(&format!("http://127.0.0.1:4000/{TOKEN}/checkpoint/"), "unknown"));
    }

    #[test]
    fn a_relay_is_tried_so_often_and_one_that_lies_no_more() {
        let source = Source::parse("http://10.0.0.1:1/0f/checkpoint/", false, None).unwrap();
        let mut relays = NamedRelays::default();
        let url = |number: u32| format!("http://10.0.0.7:4000/{number:032x}/checkpoint/");
        let begin = |relays: &mut NamedRelays, number| relays.begin(&url(number), (&source, None), 2);
        for _ in 0..MOST_TIMES {
            begin(&mut relays, 1).unwrap();
            assert!(begin(&mut relays, 1).is_none(), "it is fetched from");
            relays.set_aside(&url(1), false);
        }
        assert!(begin(&mut relays, 1).is_none());
        begin(&mut relays, 2).unwrap();
        relays.set_aside(&url(2), true);
        assert!(begin(&mut relays, 2).is_none());
        assert!(begin(&mut relays, 3).is_some() && begin(&mut relays, 4).is_some());
        assert!(begin(&mut relays, 5).is_none(), "there are enough");
    }
}
