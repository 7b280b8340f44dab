//! The receiver's side of TLS: one certificate is accepted, that with the fingerprint in the URL.

use std::sync::Arc;

use rustls::client::Resumption;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::version::TLS13;
use rustls::{CertificateError, ClientConfig, DigitallySignedStruct, OtherError, SignatureScheme};

use super::tls::{Fingerprint, provider};
use crate::error::{Error, ErrorKind};

/// The configuration of a client that accepts the certificate with this fingerprint and no other.
#[allow(clippy::disallowed_methods, reason = "the one place")]
pub(crate) fn client(pinned: Fingerprint) -> Result<Arc<ClientConfig>, Error> {
    let provider = provider();
    let verifier = Arc::new(Pinned { pinned, provider: Arc::clone(&provider) });
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&TLS13])
        .map_err(|e| Error::caused(ErrorKind::System, "cannot set up TLS", e))?
        .dangerous()
        .with_custom_certificate_verifier(verifier)
        .with_no_client_auth();
    config.enable_sni = false;
    config.resumption = Resumption::disabled();
    Ok(Arc::new(config))
}

/// Accepts one certificate. That the peer has its key is verified by the signature of the handshake, as always.
#[derive(Debug)]
struct Pinned {
    pinned: Fingerprint,
    provider: Arc<CryptoProvider>,
}

/// A peer showed another certificate than the pinned one.
#[derive(Debug, thiserror::Error)]
#[error(
    "its certificate has the fingerprint {found}, where its URL says {pinned}: another process has taken the \
     address, or somebody is in between"
)]
struct WrongCertificate {
    found: Fingerprint,
    pinned: Fingerprint,
}

impl ServerCertVerifier for Pinned {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let found = Fingerprint::of(certificate);
        if found == self.pinned {
            return Ok(ServerCertVerified::assertion());
        }
        let wrong = WrongCertificate { found, pinned: self.pinned.clone() };
        Err(CertificateError::Other(OtherError(Arc::new(wrong))).into())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(message, certificate, signed, &self.provider.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, certificate, signed, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}
