//! Where a source is: the parts of its URL.
//!
//! The grammar is narrower than that of RFC 3986: a scheme, an optional fingerprint, host and port, and a path that
//! ends with a slash. Everything else is refused with a message that repeats a bounded part of it.

use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use rustls::ClientConfig;
use tensorferry_wire::rails;

use crate::error::{Error, ErrorKind, Hint};
use crate::trust::Secret;
use crate::trust::tls::{self, Fingerprint};

/// How many characters of what is no address a message repeats.
const SHOWN: usize = 200;

/// A parsed `http://host:port/prefix/` or `https://sha256-…@host:port/prefix/`, and what is known of the source there.
#[derive(Debug)]
pub(crate) struct SourceUrl {
    host: String,
    port: u16,
    authority: String,
    prefix: String,
    secret: Option<Secret>,
    tls: Option<Arc<ClientConfig>>,
    /// The network card that its source prefers, if it names one.
    card: Option<IpAddr>,
    /// Whether what answers there is not the source.
    card_failed: AtomicBool,
    /// Its addresses, once one of them was good: a receive asks for them once.
    addresses: OnceLock<Vec<SocketAddr>>,
}

impl SourceUrl {
    pub(crate) fn parse(url: &str) -> Result<Self, Error> {
        let invalid = |why: &str| {
            let start: String = url.chars().take(SHOWN).collect();
            let more = if start.len() < url.len() { "..." } else { "" };
            Error::new(ErrorKind::Invalid, format!("{start:?}{more} is no checkpoint address: {why}"))
        };
        let plain = url.strip_prefix("http://");
        let rest = plain.or_else(|| url.strip_prefix("https://"));
        let rest = rest.ok_or_else(|| invalid("it does not start with http:// or https://"))?;
        let (authority, path) = rest.find('/').map_or((rest, "/"), |i| rest.split_at(i));
        let (authority, tls) = match authority.split_once('@') {
            Some(_) if plain.is_some() => {
                let why = "http:// does not encrypt, and a fingerprint of a certificate comes with it";
                return Err(invalid(why).hinting(Hint::WholeAddress));
            }
            None if plain.is_some() => (authority, None),
            Some((pinned, authority)) => {
                let pinned = Fingerprint::parse(pinned).ok_or_else(|| {
                    invalid("what is before the @ is not the fingerprint of a certificate (sha256- and 64 digits)")
                        .hinting(Hint::WholeAddress)
                })?;
                (authority, Some(tls::client(pinned)?))
            }
            None => {
                let why = "https:// without the fingerprint of the certificate (sha256-...@), by which alone a source \
                           is recognised";
                return Err(invalid(why).hinting(Hint::WholeAddress));
            }
        };
        if authority.contains('@') || url.bytes().any(|b| b.is_ascii_control() || b == b' ') {
            return Err(invalid("it holds characters that do not belong there"));
        }
        let (host, port) = match authority.strip_prefix('[') {
            Some(v6) => {
                let (host, after) = v6.split_once(']').ok_or_else(|| invalid("a bracket is not closed"))?;
                (host, after.strip_prefix(':'))
            }
            None => authority.rsplit_once(':').map_or((authority, None), |(host, port)| (host, Some(port))),
        };
        let port = port
            .map_or(Ok(if tls.is_some() { 443 } else { 80 }), str::parse)
            .map_err(|_| invalid("the port is no number up to 65535"))?;
        if host.is_empty() {
            return Err(invalid("the host is missing"));
        }
        if !path.ends_with('/') {
            return Err(invalid("it does not end with a slash, so a part of it was lost"));
        }
        Ok(Self {
            host: host.to_owned(),
            port,
            authority: authority.to_owned(),
            prefix: path.to_owned(),
            secret: None,
            tls,
            card: rails::card(path).filter(|card| {
                // A loopback address is of this machine, whoever names it.
                card.is_loopback() == host.parse().is_ok_and(|host: IpAddr| host.is_loopback())
            }),
            card_failed: AtomicBool::new(false),
            addresses: OnceLock::new(),
        })
    }

    /// The same source, which must know `secret` and be shown that we do.
    pub(super) fn sharing(self, secret: Option<Secret>) -> Self {
        Self { secret, ..self }
    }

    /// How to talk to it over the network, if not plainly.
    pub(super) fn tls(&self) -> Option<&Arc<ClientConfig>> {
        self.tls.as_ref()
    }

    pub(super) fn secret(&self) -> Option<&Secret> {
        self.secret.as_ref()
    }

    /// The address of the network card by which the source would be reached, if it names one and that works.
    pub(super) fn card(&self) -> Option<IpAddr> {
        self.card.filter(|_| !self.card_failed.load(Ordering::Relaxed))
    }

    /// From here on the source is reached by its host alone.
    pub(super) fn give_up_card(&self) {
        self.card_failed.store(true, Ordering::Relaxed);
    }

    /// Where it is, if a connection was made before.
    pub(super) fn addresses(&self) -> Option<&[SocketAddr]> {
        self.addresses.get().map(Vec::as_slice)
    }

    /// Notes `addresses`, one of which leads there.
    pub(super) fn learn(&self, addresses: &[SocketAddr]) {
        let _ = self.addresses.set(addresses.to_vec());
    }

    pub(crate) fn host(&self) -> &str {
        &self.host
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// `host:port`, as it stands in messages and in the Host header.
    pub(crate) fn authority(&self) -> &str {
        &self.authority
    }

    /// The path that `{step}.safetensors` is appended to.
    pub(crate) fn prefix(&self) -> &str {
        &self.prefix
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_both_families_parse() {
        let url = SourceUrl::parse("http://node-7:4000/0f/checkpoint/").unwrap();
        assert_eq!((url.host(), url.port(), url.prefix()), ("node-7", 4000, "/0f/checkpoint/"));
        let url = SourceUrl::parse("http://[::1]:80/checkpoint/").unwrap();
        assert_eq!((url.host(), url.port(), url.authority()), ("::1", 80, "[::1]:80"));
        assert_eq!(SourceUrl::parse("http://h").unwrap().prefix(), "/");
        let pinned = "https://sha256-ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad@[::1]:5/0f/";
        let url = SourceUrl::parse(pinned).unwrap();
        assert_eq!((url.host(), url.port(), url.authority(), url.prefix()), ("::1", 5, "[::1]:5", "/0f/"));
        assert!(url.tls().is_some());
    }

    #[test]
    fn what_is_no_address_is_refused() {
        for bad in [
            "",
            "ftp://h/",
            "http://",
            "http://h:99999/",
            "http://[::1/",
            "http://a b/",
            "http://u@h/",
            "https://h/",
            "https://u@h/",
            "https://sha256-00@h/",
            "https://sha256-ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad@/",
            "https://sha256-ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad@a@h/",
            "http://h/\r\n",
            "http://h/0f/checkpoint",
        ] {
            assert_eq!(SourceUrl::parse(bad).unwrap_err().kind(), ErrorKind::Invalid, "{bad}");
        }
        assert!(SourceUrl::parse(&"\u{e9}".repeat(100_000)).unwrap_err().to_string().len() < 1000);
    }
}
