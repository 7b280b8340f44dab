//! Where a source is: the parts of its URL.
//!
//! The grammar is narrower than that of RFC 3986: a scheme, an optional fingerprint, host and port, and a path that
//! ends with a slash. Everything else is refused with a message that repeats a bounded part of it.

use std::sync::Arc;

use rustls::ClientConfig;
use tensorferry_wire::rails;

use super::targets::Targets;
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
    targets: Targets,
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
            targets: Targets::new(port, host.parse().ok(), rails::cards(path)),
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

    /// The addresses by which it may be reached.
    pub(super) fn targets(&self) -> &Targets {
        &self.targets
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
