//! Diagnosis of TLS misconfigurations: only one side uses TLS, or a certificate is missing or not
//! accepted. The errors of the TLS libraries alone do not say what to change.

use std::error::Error;
use std::io::{self, Read, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustls::{
    AlertDescription, CertificateError, ClientConfig, ClientConnection, Error as TlsError,
    RootCertStore, StreamOwned,
};

use super::http;
use crate::tls::Dialer;

/// Time limit of each probe step; the probe delays an error message.
const PROBE_TIMEOUT: Duration = Duration::from_secs(1);

/// Probes `HOST:PORT` on a new connection after a request failed with `tls`, or in cleartext if
/// `None`. Returns the explanation, or `None` if TLS is not the cause. Blocks for a few seconds at
/// most.
pub(super) fn diagnose(address: &str, tls: Option<&Dialer>) -> Option<String> {
    match tls {
        None => speaks_tls(address).then(|| {
            format!("{address} speaks TLS: name who signs its certificate with --ca-file")
        }),
        Some(dialer) => {
            let error = complete_handshake(address, dialer).err()?;
            find_tls_error(&error).map(|error| explain(address, error))
        }
    }
}

/// Sends a TLS ClientHello and tells whether the answer is a TLS record.
fn speaks_tls(address: &str) -> bool {
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
        let name = host(address).to_owned().try_into().ok()?;
        let mut hello = Vec::new();
        ClientConnection::new(Arc::new(config), name).ok()?.write_tls(&mut hello).ok()?;
        Some(hello)
    };
    let probe = |hello: Vec<u8>| -> io::Result<[u8; 2]> {
        let mut stream = http::connect(address, PROBE_TIMEOUT)?;
        stream.set_read_timeout(Some(PROBE_TIMEOUT))?;
        stream.write_all(&hello)?;
        let mut answer = [0; 2];
        stream.read_exact(&mut answer)?;
        Ok(answer)
    };
    hello().and_then(|hello| probe(hello).ok()).is_some_and(|answer| ANSWERS.contains(&answer))
}

/// Completes the handshake and waits for the first byte: with TLS 1.3 the server rejects a client
/// certificate only after the client's handshake is done. Sends no data, because a write to a
/// connection that the node has closed would discard its alert.
fn complete_handshake(address: &str, dialer: &Dialer) -> io::Result<()> {
    let name = dialer.name(host(address))?;
    let connection = ClientConnection::new(Arc::new(dialer.config()), name);
    let socket = http::connect(address, PROBE_TIMEOUT)?;
    let socket = http::DeadlineSocket { socket, deadline: Instant::now() + 2 * PROBE_TIMEOUT };
    StreamOwned::new(connection.map_err(io::Error::other)?, socket).read_exact(&mut [0])
}

fn host(address: &str) -> &str {
    let (host, _) = address.rsplit_once(':').unwrap_or((address, ""));
    host.trim_start_matches('[').trim_end_matches(']')
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

/// Explains a TLS error with `HOST:PORT` and what to change.
pub(super) fn explain(address: &str, error: &TlsError) -> String {
    use AlertDescription as Alert;
    use CertificateError as Certificate;
    match error {
        TlsError::InvalidMessage(_) => format!(
            "{address} speaks no TLS: leave out --ca-file (TOLLGATE_CA_FILE), or turn it on there \
             (--tls-cert-file)"
        ),
        TlsError::InvalidCertificate(Certificate::UnknownIssuer | Certificate::BadSignature) => {
            format!(
                "nobody in --ca-file has signed the certificate of {address}: name the file of \
                 who has ({error})"
            )
        }
        TlsError::InvalidCertificate(
            Certificate::NotValidForName | Certificate::NotValidForNameContext { .. },
        ) => format!(
            "the certificate of {address} has another name: ask the node by a name that is in it, \
             or say which with --server-name ({error})"
        ),
        TlsError::InvalidCertificate(Certificate::Expired | Certificate::ExpiredContext { .. }) => {
            format!(
                "the certificate of {address} has expired: renew it there, or see that the clock here \
             is right ({error})"
            )
        }
        TlsError::AlertReceived(Alert::CertificateRequired) => format!(
            "{address} wants to see a certificate: show one with --cert-file and --key-file"
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
            "{address} does not take the certificate in --cert-file: it must be signed by who is \
             in the node's --tls-client-ca-file, and be valid today ({error})"
        ),
        error => format!("no TLS with {address}: {error}"),
    }
}
