//! Security settings: certificates, credentials and access control.

use std::path::PathBuf;

/// The node's certificates, and access control.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "TLS and access")]
pub struct PortSecuritySettings {
    /// The node's certificate with its intermediate certificates (PEM): turns on TLS on both ports.
    /// Reloaded when it changes and on SIGHUP, like --tls-key-file and --tls-client-ca-file
    #[arg(long, env = "TOLLGATE_TLS_CERT_FILE", value_name = "FILE", requires = "tls_key_file")]
    pub tls_cert_file: Option<PathBuf>,

    /// The private key of the node's certificate (PEM)
    #[arg(long, env = "TOLLGATE_TLS_KEY_FILE", value_name = "FILE", requires = "tls_cert_file")]
    pub tls_key_file: Option<PathBuf>,

    /// CA certificates (PEM); clients must present a certificate signed by one of them
    #[arg(
        long,
        env = "TOLLGATE_TLS_CLIENT_CA_FILE",
        value_name = "FILE",
        requires = "tls_cert_file"
    )]
    pub tls_client_ca_file: Option<PathBuf>,

    /// Also accept clients without a certificate; --access decides what they may do
    #[arg(long, env = "TOLLGATE_TLS_CLIENT_OPTIONAL", requires = "tls_client_ca_file")]
    pub tls_client_optional: bool,

    /// The access file (YAML): the callers and their permissions. Without it, everyone may do
    /// everything. Reloaded when it changes and on SIGHUP
    #[arg(long, env = "TOLLGATE_ACCESS", value_name = "FILE")]
    pub access: Option<PathBuf>,

    /// Host names that HTTP requests may be addressed to, besides IP addresses, localhost and the
    /// host of --advertise; repeat the option, or separate with commas. Requests to other hosts get
    /// a 421. Without the option, they get a 421 only if --http-listen is a loopback address
    #[arg(
        long = "http-host",
        env = "TOLLGATE_HTTP_HOST",
        value_name = "NAME",
        value_delimiter = ','
    )]
    pub http_hosts: Vec<String>,
}

/// Credentials and certificates for the store.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "The store")]
pub struct StoreFiles {
    /// A file with the user name for the store, instead of that in --store; read for each new
    /// connection
    #[arg(long, env = "TOLLGATE_STORE_USER_FILE", value_name = "FILE")]
    pub store_user_file: Option<PathBuf>,

    /// A file with the password for the store, instead of that in --store; read for each new
    /// connection
    #[arg(long, env = "TOLLGATE_STORE_PASSWORD_FILE", value_name = "FILE")]
    pub store_password_file: Option<PathBuf>,

    /// CA certificates for a store over TLS (PEM), instead of the system's
    #[arg(long, env = "TOLLGATE_STORE_CA_FILE", value_name = "FILE")]
    pub store_ca_file: Option<PathBuf>,

    /// The client certificate for a store over TLS (PEM)
    #[arg(
        long,
        env = "TOLLGATE_STORE_CERT_FILE",
        value_name = "FILE",
        requires = "store_key_file"
    )]
    pub store_cert_file: Option<PathBuf>,

    /// The private key of --store-cert-file (PEM)
    #[arg(
        long,
        env = "TOLLGATE_STORE_KEY_FILE",
        value_name = "FILE",
        requires = "store_cert_file"
    )]
    pub store_key_file: Option<PathBuf>,
}

/// Credentials and certificates for the parent.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "The parent")]
pub struct ParentFiles {
    /// CA certificates for the parent (PEM): turns on TLS for connections to it
    #[arg(long, env = "TOLLGATE_PARENT_CA_FILE", value_name = "FILE")]
    pub parent_ca_file: Option<PathBuf>,

    /// The client certificate for the parent (PEM)
    #[arg(
        long,
        env = "TOLLGATE_PARENT_CERT_FILE",
        value_name = "FILE",
        requires_all = ["parent_key_file", "parent_ca_file"]
    )]
    pub parent_cert_file: Option<PathBuf>,

    /// The private key of --parent-cert-file (PEM)
    #[arg(
        long,
        env = "TOLLGATE_PARENT_KEY_FILE",
        value_name = "FILE",
        requires = "parent_cert_file"
    )]
    pub parent_key_file: Option<PathBuf>,

    /// A file with the token for the parent; read again when it changes
    #[arg(long, env = "TOLLGATE_PARENT_TOKEN_FILE", value_name = "FILE")]
    pub parent_token_file: Option<PathBuf>,
}
