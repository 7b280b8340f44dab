//! The addresses of a source besides the one in its URL: a header field of its answers.
//!
//! ```text
//! tensorferry-rails: 10.0.0.7/25000,10.0.1.7/25000,fd00::7/0
//! ```
//!
//! Each is an address with the speed of its link in Mbit/s, 0 where that is not known. The port and the path are those of
//! the URL. What cannot be read is left out, so that later versions may say more.
//!
//! The URL itself may name some of them behind the token, for a receive that gets no such answer yet. The first is the one
//! by which receivers begin, before they try the host; where it is empty, they begin by the host. Receivers that know
//! nothing of it take the path as it is, and the host:
//!
//! ```text
//! http://node-7:4000/0f~10.0.1.7~10.0.0.7/checkpoint/
//! http://node-7:4000/0f~~10.0.0.7/checkpoint/
//! ```

use core::net::IpAddr;
use std::fmt::Write as _;

/// The header field of a source that can be reached by several addresses.
pub const RAILS_HEADER: &str = "tensorferry-rails";
/// The most addresses that are read.
pub const MAX_RAILS: usize = 16;

/// An address of a source, and the speed of the link that it belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rail {
    /// The address.
    pub address: IpAddr,
    /// In Mbit/s; 0 where that is not known.
    pub mbit: u32,
}

/// The value of the header field.
#[must_use]
pub fn format(rails: &[Rail]) -> String {
    let mut text = String::new();
    for Rail { address, mbit } in rails.iter().take(MAX_RAILS) {
        let comma = if text.is_empty() { "" } else { "," };
        let _ = write!(text, "{comma}{address}/{mbit}");
    }
    text
}

/// The most addresses that a path names.
pub const MAX_NAMED: usize = 8;
/// What comes before each address in a path.
const CARD: char = '~';

/// The addresses that a path names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cards {
    /// The one by which a receive begins, before it tries the host; `None` where it begins by the host.
    pub first: Option<IpAddr>,
    /// Those that are tried after the host.
    pub others: Vec<IpAddr>,
}

/// The segment of a path that has the `token` and names `cards`, as many as fit.
#[must_use]
pub fn with_cards(token: &str, cards: &Cards) -> String {
    let mut segment = token.to_owned();
    if let Some(first) = cards.first {
        let _ = write!(segment, "{CARD}{first}");
    } else if !cards.others.is_empty() {
        segment.push(CARD);
    }
    for other in cards.others.iter().take(MAX_NAMED - usize::from(cards.first.is_some())) {
        let _ = write!(segment, "{CARD}{other}");
    }
    segment
}

/// The token in the first segment of a path, without the addresses that it may name.
#[must_use]
pub fn without_cards(segment: &str) -> &str {
    segment.split_once(CARD).map_or(segment, |(token, _)| token)
}

/// The addresses that a path names, each once and at most [`MAX_NAMED`]. Those that no host can have as its own, and what
/// cannot be read, are left out.
#[must_use]
pub fn cards(path: &str) -> Cards {
    let segment = path.strip_prefix('/').and_then(|path| path.split('/').next()).unwrap_or_default();
    let mut named = segment.split(CARD).skip(1).map(|item| {
        let address = item.parse().ok().map(|address: IpAddr| address.to_canonical());
        address.filter(is_usable)
    });
    let mut cards = Cards { first: named.next().flatten(), others: Vec::new() };
    for address in named.flatten() {
        let count = cards.others.len() + usize::from(cards.first.is_some());
        if count < MAX_NAMED && cards.first != Some(address) && !cards.others.contains(&address) {
            cards.others.push(address);
        }
    }
    cards
}

/// Whether a host can have this address as its own.
fn is_usable(address: &IpAddr) -> bool {
    !address.is_unspecified() && !address.is_multicast()
}

/// The addresses in the value of the header field, each once. Those that no host can have as its own are left out.
#[must_use]
pub fn parse(value: &str) -> Vec<Rail> {
    let mut rails: Vec<Rail> = Vec::new();
    for item in value.split(',') {
        let Some((address, mbit)) = item.trim().split_once('/') else { continue };
        let (Ok(address), Ok(mbit)) = (address.parse::<IpAddr>(), mbit.parse()) else { continue };
        let rail = Rail { address: address.to_canonical(), mbit };
        if is_usable(&rail.address)
            && !rails.iter().any(|known| known.address == rail.address)
            && rails.len() < MAX_RAILS
        {
            rails.push(rail);
        }
    }
    rails
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rail(address: &str, mbit: u32) -> Rail {
        Rail { address: address.parse().unwrap(), mbit }
    }

    #[test]
    fn what_was_written_is_read() {
        let rails = [rail("10.0.0.7", 25_000), rail("fd00::7", 0)];
        assert_eq!(format(&rails), "10.0.0.7/25000,fd00::7/0");
        assert_eq!(parse(&format(&rails)), rails);
        assert_eq!(format(&[]), "");
    }

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn a_path_names_addresses_behind_its_token() {
        let named = |first: Option<&str>, others: &[&str]| Cards {
            first: first.map(ip),
            others: others.iter().copied().map(ip).collect(),
        };
        for (cards, segment) in [
            (named(None, &[]), "0f"),
            (named(Some("10.0.1.7"), &[]), "0f~10.0.1.7"),
            (named(Some("fd00::7"), &["10.0.1.7", "fd00::8"]), "0f~fd00::7~10.0.1.7~fd00::8"),
            (named(None, &["10.0.1.7", "10.0.2.7"]), "0f~~10.0.1.7~10.0.2.7"),
        ] {
            assert_eq!(with_cards("0f", &cards), segment);
            assert_eq!(without_cards(segment), "0f");
            assert_eq!(super::cards(&format!("/{segment}/checkpoint/")), cards, "{segment}");
        }
    }

    #[test]
    fn of_the_addresses_in_a_path_those_that_cannot_be_used_are_left_out() {
        for none in ["/0f/checkpoint/", "/0f/a~10.0.1.7/", "/0f~~/", "/0f~node-7/", "/0f~ff02::1/"] {
            assert_eq!(cards(none), Cards::default(), "{none}");
        }
        let some = cards("/0f~10.0.1.7~x~~10.0.1.7~::ffff:10.0.2.7~10.0.2.7~224.0.0.1~10.0.3.7/");
        assert_eq!(some, Cards { first: Some(ip("10.0.1.7")), others: vec![ip("10.0.2.7"), ip("10.0.3.7")] });
    }

    #[test]
    fn a_path_names_no_more_addresses_than_are_read() {
        let many: Vec<_> = (0..20).map(|n| ip(&format!("10.0.1.{n}"))).collect();
        for first in [None, Some(ip("10.0.2.1"))] {
            let found = cards(&format!("/{}/", with_cards("0f", &Cards { first, others: many.clone() })));
            assert_eq!((found.first, found.others.len()), (first, MAX_NAMED - usize::from(first.is_some())));
        }
        let named: Vec<_> = many.iter().map(ToString::to_string).collect();
        let hostile = format!("/0f~{}/", named.join("~"));
        assert_eq!(cards(&hostile).others, many[1..MAX_NAMED]);
    }

    #[test]
    fn what_cannot_be_read_is_left_out() {
        let value = "x, 10.0.0.7/1 ,10.0.0.8,10.0.0.9/-1,0.0.0.0/1,224.0.0.1/1,::ffff:10.0.0.7/2,10.0.0.10/99999999999";
        assert_eq!(parse(value), [rail("10.0.0.7", 1)]);
        let many: Vec<_> = (0..40).map(|n| rail(&format!("10.0.1.{n}"), 1)).collect();
        let value = many.iter().map(|rail| format!("{}/1", rail.address)).collect::<Vec<_>>().join(",");
        assert_eq!(parse(&value).len(), MAX_RAILS);
        assert_eq!(parse(&format(&many)), many[..MAX_RAILS]);
    }
}
