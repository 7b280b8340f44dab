//! The addresses of a source besides the one in its URL: a header field of its answers.
//!
//! ```text
//! tensorferry-rails: 10.0.0.7/25000,10.0.1.7/25000,fd00::7/0
//! ```
//!
//! Each is an address with the speed of its link in Mbit/s, 0 where that is not known. The port and the path are those of
//! the URL. What cannot be read is left out, so that later versions may say more.
//!
//! The URL itself may name one of them behind the token, by which receivers that know of it begin. Others take the path
//! as it is, and the host:
//!
//! ```text
//! http://node-7:4000/0f~10.0.1.7/checkpoint/
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

/// What separates the token in a path from the address of a card.
const CARD: char = '~';

/// The segment of a path that has the `token`, and names `card`.
#[must_use]
pub fn with_card(token: &str, card: IpAddr) -> String {
    format!("{token}{CARD}{card}")
}

/// The token in the first segment of a path, without the card that it may name.
#[must_use]
pub fn without_card(segment: &str) -> &str {
    segment.split_once(CARD).map_or(segment, |(token, _)| token)
}

/// The address of the card that a path names, unless no host can have it as its own.
#[must_use]
pub fn card(path: &str) -> Option<IpAddr> {
    let first = path.strip_prefix('/')?.split('/').next()?;
    first.split_once(CARD)?.1.parse().ok().map(|card: IpAddr| card.to_canonical()).filter(is_usable)
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

    #[test]
    fn a_path_names_a_card_behind_its_token() {
        for address in ["10.0.1.7", "fd00::7"] {
            let segment = with_card("0f", address.parse().unwrap());
            assert_eq!(without_card(&segment), "0f");
            assert_eq!(card(&format!("/{segment}/checkpoint/")), Some(address.parse().unwrap()));
        }
        assert_eq!(without_card("0f"), "0f");
        for none in
            ["", "/", "/0f/checkpoint/", "/0f/a~10.0.1.7/", "/0f~/", "/0f~node-7/", "/0f~0.0.0.0/", "/0f~ff02::1/"]
        {
            assert_eq!(card(none), None, "{none}");
        }
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
