//! What to do about a store that gives no answer, by what came in place of one.
//!
//! What is wrong with TLS, and with files, reaches us as text only: it is the library's, or ours.

use super::login;
use crate::store::StoreError;

/// Certificates of ours that a server does not take, in TLS' own words.
const NOT_TAKEN: [&str; 8] = [
    "UnknownCA",
    "BadCertificate",
    "UnsupportedCertificate",
    "CertificateRevoked",
    "CertificateExpired",
    "CertificateUnknown",
    "DecryptError",
    "AccessDenied",
];

/// What to do where TLS, or a file, is the reason; `None`: it is another one.
fn of_detail(detail: &str) -> Option<&'static str> {
    let says = |text: &str| detail.contains(text);
    if says(login::UNUSABLE) {
        return Some("put the file right: it is read at each new connection");
    }
    if let Some((_, what)) = detail.split_once("invalid peer certificate: ") {
        return Some(if what.starts_with("UnknownIssuer") || what.starts_with("BadSignature") {
            "name who has signed Redis' certificate with --store-ca-file; without it that must be \
             somebody whom the system trusts"
        } else if what.starts_with("certificate not valid for name") {
            "call Redis in --store by a name that is in its certificate"
        } else if what.starts_with("certificate expired") {
            "renew Redis' certificate, or see that the clock here is right"
        } else {
            "give Redis a certificate that --store-ca-file can vouch for"
        });
    }
    if let Some((_, alert)) = detail.split_once("received fatal alert: ") {
        if alert.starts_with("CertificateRequired") {
            return Some(
                "show Redis a certificate with --store-cert-file and --store-key-file: it wants one",
            );
        }
        return NOT_TAKEN.iter().any(|word| alert.starts_with(word)).then_some(
            "show Redis a certificate with --store-cert-file that is signed by who is in its \
             tls-ca-cert-file, and valid today",
        );
    }
    says("received corrupt message")
        .then_some("write redis:// in --store, or name Redis' port for TLS: this one speaks no TLS")
}

/// What to do about one server. `over_tls`: it is asked so; `new`: the store has not answered since
/// this node started, so that it may never have been set up right.
pub(super) fn of(error: StoreError, detail: &str, over_tls: bool, new: bool) -> &'static str {
    if let Some(advice) = of_detail(detail) {
        return advice;
    }
    let closed = || ["reset", "roken pipe", "EOF", "eof", "closed", "end of file"];
    match error {
        // What is no TLS is taken for the beginning of a command, of which the rest never comes.
        StoreError::Timeout if over_tls && new => {
            "see that this port of Redis speaks TLS (if not, write redis:// in --store, or name its \
             port for TLS); else look at the load and latency of Redis and of the network to it"
        }
        StoreError::Unreachable
            if !over_tls && new && closed().iter().any(|word| detail.contains(word)) =>
        {
            "see that this port of Redis speaks no TLS (if it does, write rediss:// in --store), and \
             that it is one of Redis at all"
        }
        StoreError::Timeout => {
            "look at the load and latency of Redis and of the network to it, or raise \
             --store-timeout"
        }
        StoreError::Unreachable => "see that Redis runs, and that --store names it",
        StoreError::Refused => {
            "read what Redis says: it may be loading, read-only, out of memory, or want another \
             user or password"
        }
        StoreError::Overloaded => "add nodes, or look at why Redis answers slowly",
    }
}

/// The same about all that `--store` names, of which none says where the others are.
pub(super) fn of_all(detail: &str, over_tls: bool, new: bool) -> &'static str {
    of_detail(detail).unwrap_or(match (new, over_tls) {
        (false, _) => "see that the servers named in --store run, and agree on who has what",
        (true, true) => {
            "see that the servers named in --store run, agree on who has what, and speak TLS at \
             these ports (if not, write redis-… for rediss-…)"
        }
        (true, false) => {
            "see that the servers named in --store run, agree on who has what, and speak no TLS at \
             these ports (if they do, write rediss-… for redis-…)"
        }
    })
}
