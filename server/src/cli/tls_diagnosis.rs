//! Diagnosis of TLS misconfigurations: only one side uses TLS, or a certificate is missing or not
//! accepted. The errors of the TLS libraries alone do not say what to change.

use std::error::Error;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use rustls::{
    AlertDescription, CertificateError, ClientConfig, ClientConnection, Error as TlsError,
    RootCertStore,
};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::time::timeout;

use tollgate_client::connection::{Address, Dialer, Target};

/// Time limit of each probe step; the probe delays an error message.
const PROBE_TIMEOUT: Duration = Duration::from_secs(1);

/// Probes a node on a new connection after a request failed. Returns the explanation, or `None` if
/// TLS is not the cause. Takes a few seconds at most.
pub(super) async fn diagnose(target: &Target) -> Option<String> {
    let address = target.address();
    match target.credentials().dialer() {
        None => speaks_tls(address)
            .await
            .then(|| format!("{address} expects TLS: name its CA certificates with --ca-file")),
        Some(dialer) => {
            let error = complete_handshake(address, dialer).await.err()?;
            find_tls_error(&error).map(|error| explain(address, error))
        }
    }
}

/// Sends a TLS ClientHello and tells whether the answer is a TLS record.
async fn speaks_tls(address: &Address) -> bool {
    /// TLS record headers: content type alert (21) or handshake (22), then major version 3, which
    /// all TLS versions use.
    const ANSWERS: [[u8; 2]; 2] = [[21, 3], [22, 3]];
    let hello = || -> Option<Vec<u8>> {
        let config =
            ClientConfig::builder_with_provider(rustls::crypto::ring::default_provider().into())
                .with_safe_default_protocol_versions()
                .ok()?
                .with_root_certificates(RootCertStore::empty())
                .with_no_client_auth();
        let name = address.host().to_owned().try_into().ok()?;
        let mut hello = Vec::new();
        ClientConnection::new(Arc::new(config), name).ok()?.write_tls(&mut hello).ok()?;
        Some(hello)
    };
    let probe = async {
        let mut stream = address.connect(PROBE_TIMEOUT).await.ok()?;
        stream.write_all(&hello()?).await.ok()?;
        let mut answer = [0; 2];
        timeout(PROBE_TIMEOUT, stream.read_exact(&mut answer)).await.ok()?.ok()?;
        Some(answer)
    };
    probe.await.is_some_and(|answer| ANSWERS.contains(&answer))
}

/// Completes the handshake and waits for the first byte: with TLS 1.3 the server rejects a client
/// certificate only after the client's handshake is done. Sends no data, because a write to a
/// connection that the node has closed would discard its alert.
async fn complete_handshake(address: &Address, dialer: &Dialer) -> io::Result<()> {
    let stream = address.connect(PROBE_TIMEOUT).await?;
    let first_byte = async {
        let mut stream = dialer.handshake(address.host(), stream).await?;
        stream.read_exact(&mut [0]).await
    };
    timeout(2 * PROBE_TIMEOUT, first_byte).await?.map(drop)
}

/// The TLS error in an error or in its sources.
pub(super) fn find_tls_error<'e>(error: &'e (dyn Error + 'static)) -> Option<&'e TlsError> {
    if let Some(found) = error.downcast_ref() {
        return Some(found);
    }
    // `source()` of an `io::Error` skips the error that it wraps, so look at that first.
    let wrapped = error.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
    let wrapped = wrapped.and_then(|wrapped| find_tls_error(wrapped));
    wrapped.or_else(|| error.source().and_then(find_tls_error))
}

/// Explains a TLS error of a connection to `address`: what is wrong and what to change.
pub(super) fn explain(address: &Address, error: &TlsError) -> String {
    use AlertDescription as Alert;
    use CertificateError as Certificate;
    match error {
        TlsError::InvalidMessage(_) => format!(
            "{address} does not use TLS: omit --ca-file (TOLLGATE_CA_FILE), or turn on TLS at the \
             node with --tls-cert-file"
        ),
        TlsError::InvalidCertificate(Certificate::UnknownIssuer | Certificate::BadSignature) => {
            format!(
                "the certificate of {address} is not signed by a CA in --ca-file: name the \
                 certificate of the CA that signed it ({error})"
            )
        }
        TlsError::InvalidCertificate(
            Certificate::NotValidForName | Certificate::NotValidForNameContext { .. },
        ) => format!(
            "the certificate of {address} is for another name: use an address with a name from \
             the certificate, or name it with --server-name ({error})"
        ),
        TlsError::InvalidCertificate(Certificate::Expired | Certificate::ExpiredContext { .. }) => {
            format!(
                "the certificate of {address} has expired: renew it, or correct the clock of this \
                 machine ({error})"
            )
        }
        TlsError::AlertReceived(Alert::CertificateRequired) => format!(
            "{address} requires a client certificate: name one with --cert-file and --key-file"
        ),
        TlsError::AlertReceived(
            Alert::UnknownCA
            | Alert::BadCertificate
            | Alert::UnsupportedCertificate
            | Alert::CertificateRevoked
            | Alert::CertificateExpired
            | Alert::CertificateUnknown
            | Alert::DecryptError
            | Alert::AccessDenied,
        ) => format!(
            "{address} rejects the client certificate in --cert-file: it must be signed by a CA in \
             the node's --tls-client-ca-file, and must not have expired ({error})"
        ),
        error => format!("the TLS connection to {address} failed: {error}"),
    }
}
