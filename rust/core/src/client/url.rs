//! Where a source is: the parts of the URL its metadata gives.

use crate::error::{Error, ErrorKind};
use crate::secret::Secret;

/// A parsed `http://host:port/prefix/`, and what is shared with who is there.
#[derive(Clone, Debug)]
pub(crate) struct Source {
    host: String,
    port: u16,
    authority: String,
    prefix: String,
    secret: Option<Secret>,
}

impl Source {
    pub(crate) fn parse(url: &str) -> Result<Self, Error> {
        let invalid = |why: &str| Error::new(ErrorKind::Invalid, format!("{url:?} is no checkpoint address: {why}"));
        let rest = url.strip_prefix("http://").ok_or_else(|| invalid("it does not start with http://"))?;
        let (authority, path) = rest.find('/').map_or((rest, "/"), |i| rest.split_at(i));
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
        let port = port.map_or(Ok(80), str::parse).map_err(|_| invalid("the port is no number up to 65535"))?;
        if host.is_empty() {
            return Err(invalid("the host is missing"));
        }
        Ok(Self { host: host.to_owned(), port, authority: authority.to_owned(), prefix: path.to_owned(), secret: None })
    }

    /// The same source, which must know `secret` and be shown that we do.
    pub(super) fn sharing(self, secret: Option<Secret>) -> Self {
        Self { secret, ..self }
    }

    pub(super) fn secret(&self) -> Option<&Secret> {
        self.secret.as_ref()
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
        let source = Source::parse("http://node-7:4000/0f/checkpoint/").unwrap();
        assert_eq!((source.host(), source.port(), source.prefix()), ("node-7", 4000, "/0f/checkpoint/"));
        let source = Source::parse("http://[::1]:80/checkpoint/").unwrap();
        assert_eq!((source.host(), source.port(), source.authority()), ("::1", 80, "[::1]:80"));
        assert_eq!(Source::parse("http://h").unwrap().prefix(), "/");
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
            "http://h/\r\n",
        ] {
            assert_eq!(Source::parse(bad).unwrap_err().kind(), ErrorKind::Invalid, "{bad}");
        }
    }
}
