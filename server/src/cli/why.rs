//! Why there is no answer from a node, where that is for TLS: one side speaks it and the other
//! doesn't, or somebody's certificate is missing or wrong. What the libraries say of that is no help.

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

/// How long each step of finding out may take: it comes on top of an error.
const LOOK: Duration = Duration::from_secs(1);

/// Finds out by a connection of its own why there is no answer from `HOST:PORT`, of which it was
/// asked with `tls`, or without; `None`: not for TLS. Blocks, for some seconds at most.
pub(super) fn silent(address: &str, tls: Option<&Dialer>) -> Option<String> {
    match tls {
        None => speaks_tls(address).then(|| {
            format!("{address} speaks TLS: name who signs its certificate with --ca-file")
        }),
        Some(dialer) => {
            let error = greeted(address, dialer).err()?;
            error_of_tls(&error).map(|error| wrong(address, error))
        }
    }
}

/// Whether what answers there to the beginning of a handshake goes on with it, or ends it.
fn speaks_tls(address: &str) -> bool {
    /// Records of TLS: what kind (an alert or a handshake), and 3 for all versions that there are.
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
    let ask = |hello: Vec<u8>| -> io::Result<[u8; 2]> {
        let mut stream = http::connect(address, LOOK)?;
        stream.set_read_timeout(Some(LOOK))?;
        stream.write_all(&hello)?;
        let mut answer = [0; 2];
        stream.read_exact(&mut answer)?;
        Ok(answer)
    };
    hello().and_then(|hello| ask(hello).ok()).is_some_and(|answer| ANSWERS.contains(&answer))
}

/// Shakes hands and waits for the first word: with TLS 1.3 a client hears only after the handshake
/// that its certificate is not welcome. It says nothing itself: sent to a node that has closed the
/// connection, that would take away the reason.
fn greeted(address: &str, dialer: &Dialer) -> io::Result<()> {
    let name = dialer.name(host(address))?;
    let connection = ClientConnection::new(Arc::new(dialer.config()), name);
    let socket = http::connect(address, LOOK)?;
    let socket = http::Timed { socket, deadline: Instant::now() + 2 * LOOK };
    StreamOwned::new(connection.map_err(io::Error::other)?, socket).read_exact(&mut [0])
}

fn host(address: &str) -> &str {
    let (host, _) = address.rsplit_once(':').unwrap_or((address, ""));
    host.trim_start_matches('[').trim_end_matches(']')
}

/// What TLS has to say in an error, or in one that caused it.
pub(super) fn error_of_tls<'e>(error: &'e (dyn Error + 'static)) -> Option<&'e TlsError> {
    if let Some(found) = error.downcast_ref() {
        return Some(found);
    }
    // The source of such an error is not what it holds, but the source of that.
    let held = error.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
    let held = held.and_then(|held| error_of_tls(held));
    held.or_else(|| error.source().and_then(error_of_tls))
}

/// Why there is no TLS with `HOST:PORT`, and what to do.
pub(super) fn wrong(address: &str, error: &TlsError) -> String {
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
