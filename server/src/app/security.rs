//! Builds TLS and access control from the settings, and warns about insecure ones.

use std::net::SocketAddr;
use std::sync::Arc;

use tokio::net::TcpListener;

use super::{Error, Listeners};
use crate::access::Access;
use crate::files;
use crate::metrics::Metrics;
use crate::settings::{ParentFiles, PortSecuritySettings, Settings};
use crate::tls::{Acceptor, ClientAuth, ServerFiles};
use crate::transport::http::Hosts;
use crate::transport::port_security::PortSecurity;
use tollgate_client::connection::Target;

/// Loads the certificates and the access file.
pub(super) fn load(
    settings: &PortSecuritySettings,
    metrics: &Metrics,
) -> Result<PortSecurity, Error> {
    let client_auth = match settings.tls_client_optional {
        true => ClientAuth::Optional,
        false => ClientAuth::Required,
    };
    let tls = match settings.tls_cert_file.clone().zip(settings.tls_key_file.clone()) {
        Some((cert, key)) => {
            let client_ca = settings.tls_client_ca_file.clone().map(|path| (path, client_auth));
            let acceptor = Acceptor::load(ServerFiles { cert, key, client_ca }, metrics);
            Some(Arc::new(
                acceptor
                    .map_err(|error| Error::Tls("--tls-cert-file and --tls-key-file", error))?,
            ))
        }
        None => None,
    };
    let access = match &settings.access {
        Some(path) => Some(Arc::new(Access::load(path, metrics).map_err(Error::Access)?)),
        None => None,
    };
    Ok(PortSecurity { tls, access })
}

/// The host names that requests to the HTTP port at `address` may have.
pub(super) fn hosts(
    settings: &PortSecuritySettings,
    address: SocketAddr,
    advertise: &str,
) -> Hosts {
    Hosts::new(address.ip().is_loopback(), advertise, &settings.http_hosts)
}

/// Warns if the node listens on the network without TLS or without authentication.
pub(super) fn warn_if_open(settings: &PortSecuritySettings, listeners: &Listeners) {
    let is_exposed = |listener: &TcpListener| {
        listener.local_addr().is_ok_and(|address| !address.ip().is_loopback())
    };
    if !is_exposed(&listeners.grpc) && !is_exposed(&listeners.http) {
        return;
    }
    let authenticated = settings.access.is_some()
        || (settings.tls_client_ca_file.is_some() && !settings.tls_client_optional);
    let missing = match (settings.tls_cert_file.is_some(), authenticated) {
        (true, true) => return,
        (true, false) => "anybody who reaches it may ask (--access)",
        (false, true) => "anybody on the way may read along, tokens too (--tls-cert-file)",
        (false, false) => {
            "anybody who reaches it may ask (--access), and anybody on the way may read along \
             (--tls-cert-file)"
        }
    };
    tracing::warn!(missing, advice = "see docs/security.md", "the node is open to the network");
}

/// Warns if the advertised address is unspecified (0.0.0.0 or ::), which clients can't dial.
pub(super) fn warn_if_unspecified(advertise: &str) {
    if advertise.parse::<SocketAddr>().is_ok_and(|address| address.ip().is_unspecified()) {
        tracing::warn!(
            advertise,
            advice = "set --advertise HOST:PORT to the address that clients should dial",
            "Discovery returns an address to clients that cannot be dialed"
        );
    }
}

/// Warns if the token for a parent on another machine is sent without TLS.
pub(super) fn warn_if_token_in_the_clear(files: &ParentFiles, parents: &[Target]) {
    if files.parent_token_file.is_none() || files.parent_ca_file.is_some() {
        return;
    }
    if let Some(parent) = parents.iter().find(|parent| parent.address().is_remote()) {
        tracing::warn!(
            address = %parent.address(),
            missing = "TLS, without which others can read it (--parent-ca-file)",
            advice = "see docs/security.md",
            "the token for the parent is sent unencrypted"
        );
    }
}

/// Warns about each private key that is world-readable.
pub(super) fn warn_if_keys_are_readable(settings: &Settings) {
    for (flag, key) in [
        ("--tls-key-file", &settings.port_security.tls_key_file),
        ("--store-key-file", &settings.store_files.store_key_file),
        ("--parent-key-file", &settings.parent_files.parent_key_file),
    ] {
        if let Some(path) = key.as_deref().filter(|path| files::is_world_readable(path)) {
            tracing::warn!(
                flag, path = %path.display(),
                advice = "take the right away from others: chmod o= FILE",
                "everybody on this machine may read a private key"
            );
        }
    }
}
