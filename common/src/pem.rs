//! Certificates and private keys in PEM files.

use std::path::Path;

use rustls::RootCertStore;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

use crate::files;

/// Why certificates or keys can't be used. The text contains no secrets.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file can't be read.
    #[error("{0}")]
    Unreadable(#[from] std::io::Error),
    /// The content of a file, or a setting, is invalid.
    #[error("{0}")]
    Invalid(String),
}

impl Error {
    /// An error about the content of a file.
    pub fn in_file(path: &Path, reason: impl std::fmt::Display) -> Self {
        Self::Invalid(format!("{}: {reason}", path.display()))
    }
}

/// Reads all certificates of a PEM file, at least one.
pub fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, Error> {
    let pem = files::read(path)?;
    let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&pem).collect();
    let all = all.map_err(|error| Error::in_file(path, format!("not valid PEM: {error}")))?;
    if all.is_empty() {
        return Err(Error::in_file(
            path,
            "there is no certificate in it (-----BEGIN CERTIFICATE-----)",
        ));
    }
    Ok(all)
}

/// Reads the private key of a PEM file.
pub fn key(path: &Path) -> Result<PrivateKeyDer<'static>, Error> {
    // The parser's error might reveal parts of the key, so drop it.
    PrivateKeyDer::from_pem_slice(&files::read(path)?).map_err(|_| {
        Error::in_file(path, "there is no private key in it (-----BEGIN PRIVATE KEY-----)")
    })
}

/// Reads the trusted CA certificates of a PEM file.
pub fn roots(path: &Path) -> Result<RootCertStore, Error> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(path)? {
        roots.add(certificate).map_err(|error| Error::in_file(path, error))?;
    }
    Ok(roots)
}
