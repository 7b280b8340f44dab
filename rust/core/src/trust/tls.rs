//! TLS between source and receiver: version 1.3, a self-signed certificate for each server, and the certificate's
//! SHA-256 fingerprint in the server's URL.
//!
//! There is no authority. A receiver is given the URL of its source, and with it which
//! certificate to accept; it accepts no other. The key is made when the server starts and never leaves the process, or
//! the server is given both, so that its fingerprint is known before it starts.
//!
//! The crypto provider is passed explicitly: installing a default for the process would be up to the application.

use std::fmt;
use std::sync::Arc;

use ring::digest::{SHA256, digest};
use rustls::crypto::{CryptoProvider, ring as ring_provider};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::version::TLS13;
use rustls::{InconsistentKeys, ServerConfig};

pub(crate) use super::pinned::client;
use crate::error::{Error, ErrorKind};

/// The name in every certificate. Nothing depends on it: certificates are told apart by their fingerprints.
pub(crate) const NAME: &str = "tensorferry";
const PREFIX: &str = "sha256-";

/// The SHA-256 of a certificate, as it stands in a URL: `sha256-` and 64 hexadecimal digits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Fingerprint(String);

impl Fingerprint {
    /// The fingerprint of a certificate in DER form.
    pub(super) fn of(certificate: &[u8]) -> Self {
        use std::fmt::Write as _;
        let mut text = PREFIX.to_owned();
        for byte in digest(&SHA256, certificate).as_ref() {
            let _ = write!(text, "{byte:02x}");
        }
        Self(text)
    }

    /// A fingerprint as a URL has it.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let digits = text.strip_prefix(PREFIX)?;
        let valid = digits.len() == 64 && digits.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        valid.then(|| Self(text.to_owned()))
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A server's certificate and key, by which receivers recognise it.
#[derive(Clone, Debug)]
pub struct Identity {
    pub(crate) config: Arc<ServerConfig>,
    pub(crate) fingerprint: Fingerprint,
}

impl Identity {
    /// A new key and a certificate for it. The key stays in the memory of this process.
    pub(crate) fn new() -> Result<Self, Error> {
        let generated = rcgen::generate_simple_self_signed([NAME.to_owned()])
            .map_err(|e| Error::caused(ErrorKind::System, "cannot make a certificate", e))?;
        let key = PrivatePkcs8KeyDer::from(generated.signing_key.serialize_der());
        Self::from_der(vec![generated.cert.der().clone()], key.into())
            .map_err(|e| Error::caused(ErrorKind::System, "cannot set up TLS", e))
    }

    /// The certificate and the key in two files in PEM form. Further certificates in the first one are sent along.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] when one of them holds none that can be used, or the two do not belong together.
    pub fn from_pem(certificate: &[u8], key: &[u8]) -> Result<Self, Error> {
        let certificates = certificates(certificate)?;
        let key = PrivateKeyDer::from_pem_slice(key).map_err(|e| {
            Error::caused(ErrorKind::Invalid, "the key holds no private key in PEM form without a passphrase", e)
        })?;
        Self::from_der(certificates, key).map_err(|e| match e {
            rustls::Error::InconsistentKeys(InconsistentKeys::KeyMismatch) => {
                Error::new(ErrorKind::Invalid, "the key is not that of the certificate")
            }
            e => Error::caused(ErrorKind::Invalid, "the certificate and its key cannot be used", e),
        })
    }

    /// The certificate and the key, checked to belong together, and the settings of a server with them: TLS 1.3 only, no
    /// certificates of clients, no tickets to resume a session. The fingerprint is that of the first certificate.
    pub(super) fn from_der(
        certificates: Vec<CertificateDer<'static>>,
        key: PrivateKeyDer<'static>,
    ) -> Result<Self, rustls::Error> {
        let fingerprint = certificates.first().map(|own| Fingerprint::of(own));
        let fingerprint = fingerprint.ok_or(rustls::Error::NoCertificatesPresented)?;
        let mut config = ServerConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&TLS13])
            .and_then(|builder| builder.with_no_client_auth().with_single_cert(certificates, key))?;
        config.send_tls13_tickets = 0;
        Ok(Self { config: Arc::new(config), fingerprint })
    }

    /// The fingerprint of the certificate as it stands in URLs.
    #[must_use]
    pub fn fingerprint(&self) -> String {
        self.fingerprint.to_string()
    }
}

/// The certificates of a file in PEM form, of which there is at least one.
fn certificates(pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, Error> {
    let none = "the certificate holds none in PEM form (-----BEGIN CERTIFICATE-----)";
    let found = CertificateDer::pem_slice_iter(pem).collect::<Result<Vec<_>, _>>();
    let found = found.map_err(|e| Error::caused(ErrorKind::Invalid, none, e))?;
    if found.is_empty() { Err(Error::new(ErrorKind::Invalid, none)) } else { Ok(found) }
}

/// ring, with the cipher in front that takes least time; both ends are ours, and none of the three is weak.
pub(super) fn provider() -> Arc<CryptoProvider> {
    let suites = [
        ring_provider::cipher_suite::TLS13_AES_128_GCM_SHA256,
        ring_provider::cipher_suite::TLS13_AES_256_GCM_SHA384,
        ring_provider::cipher_suite::TLS13_CHACHA20_POLY1305_SHA256,
    ];
    Arc::new(CryptoProvider { cipher_suites: suites.to_vec(), ..ring_provider::default_provider() })
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on should panic")]
mod tests {
    use rustls::pki_types::ServerName;
    use rustls::server::{ClientHello, ResolvesServerCert};
    use rustls::sign::CertifiedKey;
    use rustls::{CertificateError, ClientConnection, ServerConnection};

    use super::*;

    /// Shows a certificate whatever its key is.
    #[derive(Debug)]
    struct Shows(Arc<CertifiedKey>);

    impl ResolvesServerCert for Shows {
        fn resolve(&self, _hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
            Some(Arc::clone(&self.0))
        }
    }

    /// The result of a client that pinned `certificate` with a server that shows it and signs with `key`.
    fn handshake(certificate: &CertificateDer<'static>, key: &rcgen::KeyPair) -> Result<(), rustls::Error> {
        let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(key.serialize_der()));
        let key = provider().key_provider.load_private_key(key).unwrap();
        let shown = Arc::new(CertifiedKey::new(vec![certificate.clone()], key));
        let builder = ServerConfig::builder_with_provider(provider()).with_protocol_versions(&[&TLS13]).unwrap();
        let config = builder.with_no_client_auth().with_cert_resolver(Arc::new(Shows(shown)));
        let mut server = ServerConnection::new(Arc::new(config)).unwrap();
        let name = ServerName::try_from(NAME).unwrap();
        let mut client = ClientConnection::new(client(Fingerprint::of(certificate)).unwrap(), name).unwrap();
        while client.is_handshaking() {
            let mut sent = Vec::new();
            client.write_tls(&mut sent).unwrap();
            server.read_tls(&mut sent.as_slice()).unwrap();
            server.process_new_packets().unwrap();
            let mut sent = Vec::new();
            while server.wants_write() {
                server.write_tls(&mut sent).unwrap();
            }
            let mut sent = sent.as_slice();
            while !sent.is_empty() {
                client.read_tls(&mut sent).unwrap();
                client.process_new_packets()?;
            }
        }
        Ok(())
    }

    #[test]
    fn who_shows_the_certificate_must_have_its_key() {
        let made = rcgen::generate_simple_self_signed([NAME.to_owned()]).unwrap();
        handshake(made.cert.der(), &made.signing_key).unwrap();
        let other = rcgen::KeyPair::generate().unwrap();
        let refused = handshake(made.cert.der(), &other).unwrap_err();
        assert_eq!(refused, CertificateError::BadSignature.into());
    }

    #[test]
    fn fingerprints_are_read_as_they_are_written() {
        let own = Identity::new().unwrap().fingerprint;
        assert_eq!(Fingerprint::parse(&own.to_string()), Some(own.clone()));
        assert_ne!(Identity::new().unwrap().fingerprint, own, "each server has a certificate of its own");
        // The output of `printf abc | sha256sum`.
        let known = "sha256-ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(Fingerprint::of(b"abc").to_string(), known);
        for bad in ["", "sha256-", &known[..70], &format!("{known}0"), &known.to_uppercase(), &known[7..]] {
            assert_eq!(Fingerprint::parse(bad), None, "{bad}");
        }
    }
}
