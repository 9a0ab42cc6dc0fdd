//! Advice in log messages about a store that gives no answer, chosen by the error.
//!
//! Errors of TLS and of files are recognized by their text, because the client library passes them
//! on as text only.

use super::login;
use crate::store::StoreError;

/// The TLS alerts with which a server rejects this node's certificate, as rustls names them.
const CERTIFICATE_ALERTS: [&str; 8] = [
    "UnknownCA",
    "BadCertificate",
    "UnsupportedCertificate",
    "CertificateRevoked",
    "CertificateExpired",
    "CertificateUnknown",
    "DecryptError",
    "AccessDenied",
];

/// The advice about an error of TLS or of a file; `None` for other errors.
fn of_detail(detail: &str) -> Option<&'static str> {
    let says = |text: &str| detail.contains(text);
    if says(login::UNUSABLE) {
        return Some("put the file right: it is read at each new connection");
    }
    if let Some((_, cause)) = detail.split_once("invalid peer certificate: ") {
        return Some(if cause.starts_with("UnknownIssuer") || cause.starts_with("BadSignature") {
            "set --store-ca-file to the CA that signed Redis' certificate"
        } else if cause.starts_with("certificate not valid for name") {
            "use a host name in --store that Redis' certificate covers"
        } else if cause.starts_with("certificate expired") {
            "renew Redis' certificate, or see that the clock of this machine is right"
        } else {
            "give Redis a valid server certificate, signed by a CA in --store-ca-file"
        });
    }
    if let Some((_, alert)) = detail.split_once("received fatal alert: ") {
        if alert.starts_with("CertificateRequired") {
            return Some(
                "Redis requires a client certificate: set --store-cert-file and --store-key-file, \
                 and restart the node",
            );
        }
        return CERTIFICATE_ALERTS.iter().any(|word| alert.starts_with(word)).then_some(
            "set --store-cert-file to a valid client certificate that is signed by a CA in Redis' \
             tls-ca-cert-file",
        );
    }
    says("received corrupt message").then_some(
        "this port does not use TLS: write redis:// in --store, or name Redis' port for TLS",
    )
}

/// The advice about one server. `over_tls`: whether connections to it use TLS. `never_up`: whether
/// the store has not answered since this node started, so that the settings may be wrong.
pub(crate) fn of(error: StoreError, detail: &str, over_tls: bool, never_up: bool) -> &'static str {
    if let Some(advice) = of_detail(detail) {
        return advice;
    }
    let closed = || ["reset", "roken pipe", "EOF", "eof", "closed", "end of file"];
    match error {
        // A server without TLS may take the handshake for the beginning of a command, and wait for
        // the rest.
        StoreError::Timeout if over_tls && never_up => {
            "see that this port of Redis uses TLS (if not, write redis:// in --store, or name \
             its port for TLS); else look at the load and latency of Redis and of the network to it"
        }
        StoreError::Unreachable
            if !over_tls && never_up && closed().iter().any(|word| detail.contains(word)) =>
        {
            "see that this port does not use TLS (if it does, write rediss:// in --store), and that \
             it is a port of Redis at all"
        }
        StoreError::Timeout => {
            "look at the load and latency of Redis and of the network to it, or raise \
             --store-timeout"
        }
        StoreError::Unreachable => "see that Redis runs, and that --store names it",
        StoreError::Refused => {
            "read the error of Redis: it may be loading, read-only, out of memory, or want another \
             user or password"
        }
        StoreError::Overloaded => "add nodes, or look at why Redis answers slowly",
    }
}

/// The advice if none of the servers in `--store` has named the masters. The parameters are those
/// of [`of`].
pub(crate) fn of_all(detail: &str, over_tls: bool, never_up: bool) -> &'static str {
    of_detail(detail).unwrap_or(match (never_up, over_tls) {
        (false, _) => "see that the servers named in --store run, and agree on the masters",
        (true, true) => {
            "see that the servers named in --store run, agree on the masters, and use TLS at these \
             ports (if not, write redis-… for rediss-…)"
        }
        (true, false) => {
            "see that the servers named in --store run, agree on the masters, and do not use TLS \
             at these ports (if they do, write rediss-… for redis-…)"
        }
    })
}
