//! TLS and authentication flags of the commands.

use std::path::PathBuf;
use std::sync::Once;

use tollgate_client::connection::{Address, ClientFiles, Credentials, Target};

/// TLS and token flags of every command that talks to a node.
#[derive(Clone, Default, clap::Args)]
pub(super) struct CredentialArgs {
    /// CA certificates that the node's certificate is verified with (PEM): turns on TLS
    #[arg(long, env = "TOLLGATE_CA_FILE", value_name = "FILE")]
    ca_file: Option<PathBuf>,
    /// The name in the node's certificate, if it differs from the host name
    #[arg(long, env = "TOLLGATE_SERVER_NAME", value_name = "NAME", requires = "ca_file")]
    server_name: Option<String>,
    /// The client certificate for the node (PEM)
    #[arg(
        long,
        env = "TOLLGATE_CERT_FILE",
        value_name = "FILE",
        requires_all = ["key_file", "ca_file"]
    )]
    cert_file: Option<PathBuf>,
    /// The private key of that certificate (PEM)
    #[arg(long, env = "TOLLGATE_KEY_FILE", value_name = "FILE", requires = "cert_file")]
    key_file: Option<PathBuf>,
    /// A file with the token for the node
    #[arg(long, env = "TOLLGATE_TOKEN_FILE", value_name = "FILE")]
    token_file: Option<PathBuf>,
}

impl CredentialArgs {
    /// The node at `address`, with the credentials in the files. Blocks while it reads them. Warns
    /// once per process if the token would be sent unencrypted to another host.
    pub(super) fn target(&self, address: &Address) -> Result<Target, String> {
        let own = self.cert_file.clone().zip(self.key_file.clone());
        let server_name = self.server_name.clone();
        let tls = self.ca_file.clone().map(|ca| ClientFiles { ca, own, server_name });
        let credentials = Credentials::load(tls, self.token_file.clone());
        let credentials = credentials.map_err(|error| error.to_string())?;
        let target = Target::new(address.clone(), credentials)
            .map_err(|error| format!("{error}: name the CA certificates with --ca-file"))?;
        self.warn_if_in_the_clear(address);
        Ok(target)
    }

    fn warn_if_in_the_clear(&self, address: &Address) {
        static WARNED: Once = Once::new();
        if self.token_file.is_some() && self.ca_file.is_none() && address.is_remote() {
            WARNED.call_once(|| {
                eprintln!(
                    "tollgate: the token is sent to {address} unencrypted, so that others can read \
                     it: turn on TLS with --ca-file"
                );
            });
        }
    }
}
