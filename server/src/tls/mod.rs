//! TLS on both ports, and towards other nodes: certificates that are read again when they
//! change, handshakes that take a bounded time, the names in a client's certificate.

mod client;
mod names;
mod server;
mod stream;

use std::path::Path;

use rustls::RootCertStore;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

pub use client::{ClientFiles, Dialer};
pub use server::{Acceptor, ClientAuth, Port, Room, ServerFiles};
pub use stream::Stream;

use crate::files;

/// Why certificates or keys can't be used. Holds no secret.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Error(String);

impl Error {
    fn of(path: &Path, why: impl std::fmt::Display) -> Self {
        Self(format!("{}: {why}", path.display()))
    }
}

impl From<std::io::Error> for Error {
    fn from(error: std::io::Error) -> Self {
        Self(error.to_string())
    }
}

/// All certificates of a PEM file, of which there must be one.
fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, Error> {
    let pem = files::read(path)?;
    let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&pem).collect();
    let all = all.map_err(|error| Error::of(path, format!("no PEM: {error}")))?;
    if all.is_empty() {
        return Err(Error::of(path, "there is no certificate in it (-----BEGIN CERTIFICATE-----)"));
    }
    Ok(all)
}

fn key(path: &Path) -> Result<PrivateKeyDer<'static>, Error> {
    // What is wrong in detail would be about a secret.
    PrivateKeyDer::from_pem_slice(&files::read(path)?)
        .map_err(|_| Error::of(path, "there is no private key in it (-----BEGIN PRIVATE KEY-----)"))
}

/// The certificates of whoever signs the others'.
fn roots(path: &Path) -> Result<RootCertStore, Error> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(path)? {
        roots.add(certificate).map_err(|error| Error::of(path, error))?;
    }
    Ok(roots)
}

/// Seconds since the epoch.
#[expect(clippy::disallowed_methods, reason = "certificates expire by the wall clock")]
fn now_s() -> u64 {
    let now = std::time::SystemTime::now();
    now.duration_since(std::time::UNIX_EPOCH).unwrap_or_default().as_secs()
}
