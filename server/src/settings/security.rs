//! Settings about whom to trust, and whom to be.

use std::net::IpAddr;
use std::path::PathBuf;

/// Certificates of this node, and who may ask it.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "TLS, and who may ask")]
pub struct Doors {
    /// This node's certificate (PEM), with those between it and the root: turns on TLS at both
    /// ports. Read again when it changes and on SIGHUP, as are the next two
    #[arg(long, env = "TOLLGATE_TLS_CERT_FILE", value_name = "FILE", requires = "tls_key_file")]
    pub tls_cert_file: Option<PathBuf>,

    /// The key of that certificate (PEM)
    #[arg(long, env = "TOLLGATE_TLS_KEY_FILE", value_name = "FILE", requires = "tls_cert_file")]
    pub tls_key_file: Option<PathBuf>,

    /// Clients must show a certificate that one of these has signed (PEM)
    #[arg(
        long,
        env = "TOLLGATE_TLS_CLIENT_CA_FILE",
        value_name = "FILE",
        requires = "tls_cert_file"
    )]
    pub tls_client_ca_file: Option<PathBuf>,

    /// They may do without: what such a client may do is for --access to say
    #[arg(long, env = "TOLLGATE_TLS_CLIENT_OPTIONAL", requires = "tls_client_ca_file")]
    pub tls_client_optional: bool,

    /// Who may ask, for what (YAML); everybody may do everything without. Reloaded when it
    /// changes and on SIGHUP
    #[arg(long, env = "TOLLGATE_ACCESS", value_name = "FILE")]
    pub access: Option<PathBuf>,

    /// Host names that HTTP requests may be addressed to, beside IP addresses, localhost and the
    /// host of --advertise; may be given several times, or with commas. Others get a 421. Without
    /// it, other names get a 421 only where --http-listen is a loopback address
    #[arg(
        long = "http-host",
        env = "TOLLGATE_HTTP_HOST",
        value_name = "NAME",
        value_delimiter = ','
    )]
    pub http_hosts: Vec<String>,
}

/// How to connect to the store beyond its URL.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "The store")]
pub struct StoreFiles {
    /// A file with the store's user, instead of the one in --store; read at each new connection
    #[arg(long, env = "TOLLGATE_STORE_USER_FILE", value_name = "FILE")]
    pub store_user_file: Option<PathBuf>,

    /// The same with the password
    #[arg(long, env = "TOLLGATE_STORE_PASSWORD_FILE", value_name = "FILE")]
    pub store_password_file: Option<PathBuf>,

    /// Who signs the certificates of a store over TLS (PEM), instead of whom the system trusts
    #[arg(long, env = "TOLLGATE_STORE_CA_FILE", value_name = "FILE")]
    pub store_ca_file: Option<PathBuf>,

    /// The certificate to show to a store over TLS (PEM)
    #[arg(
        long,
        env = "TOLLGATE_STORE_CERT_FILE",
        value_name = "FILE",
        requires = "store_key_file"
    )]
    pub store_cert_file: Option<PathBuf>,

    /// Its key (PEM)
    #[arg(
        long,
        env = "TOLLGATE_STORE_KEY_FILE",
        value_name = "FILE",
        requires = "store_cert_file"
    )]
    pub store_key_file: Option<PathBuf>,
}

/// How to connect to the parent beyond its address.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "The parent")]
pub struct ParentFiles {
    /// Who signs the certificates of the parent (PEM): turns on TLS towards it
    #[arg(long, env = "TOLLGATE_PARENT_CA_FILE", value_name = "FILE")]
    pub parent_ca_file: Option<PathBuf>,

    /// The certificate to show to the parent (PEM)
    #[arg(
        long,
        env = "TOLLGATE_PARENT_CERT_FILE",
        value_name = "FILE",
        requires_all = ["parent_key_file", "parent_ca_file"]
    )]
    pub parent_cert_file: Option<PathBuf>,

    /// Its key (PEM)
    #[arg(
        long,
        env = "TOLLGATE_PARENT_KEY_FILE",
        value_name = "FILE",
        requires = "parent_cert_file"
    )]
    pub parent_key_file: Option<PathBuf>,

    /// A file with the token to show to the parent; read at each request
    #[arg(long, env = "TOLLGATE_PARENT_TOKEN_FILE", value_name = "FILE")]
    pub parent_token_file: Option<PathBuf>,
}

/// Whether what is sent to this `HOST:PORT` leaves the machine, as far as the name tells.
pub fn is_elsewhere(address: &str) -> bool {
    let bare = address.trim_start_matches("http://").trim_start_matches("https://");
    let host = bare.rsplit_once(':').map_or(bare, |(host, _)| host);
    match host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>() {
        Ok(ip) => !ip.is_loopback() && !ip.is_unspecified(),
        Err(_) => !host.eq_ignore_ascii_case("localhost"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_leaves_the_machine() {
        for here in ["127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "LocalHost:1", "http://localhost:1"] {
            assert!(!is_elsewhere(here), "{here}");
        }
        assert!(!is_elsewhere("0.0.0.0:1") && !is_elsewhere("[::]:1"), "asked on loopback");
        for there in ["10.0.0.1:1", "[2001:db8::1]:1", "node.example:1", "localhost.example:1"] {
            assert!(is_elsewhere(there), "{there}");
        }
    }
}
