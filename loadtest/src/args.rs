//! Arguments that several commands share.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use tollgate_client::connection::{Address, ClientFiles, Credentials, Target};

use crate::error::RunError;

/// Longest accepted run; also keeps clock arithmetic within range.
pub(crate) const MAX_RUN: Duration = Duration::from_secs(30 * 24 * 3600);

/// TLS and authentication flags.
#[derive(Args, Clone, Debug)]
pub struct CredentialArgs {
    /// A file with the token for the nodes.
    #[arg(long, value_name = "FILE")]
    pub token_file: Option<PathBuf>,
    /// CA certificates that the nodes' certificates are verified with (PEM): turns on TLS.
    #[arg(long, value_name = "FILE")]
    pub ca_file: Option<PathBuf>,
    /// The client certificate for the nodes (PEM).
    #[arg(long, value_name = "FILE", requires_all = ["key_file", "ca_file"])]
    pub cert_file: Option<PathBuf>,
    /// The private key of that certificate (PEM).
    #[arg(long, value_name = "FILE", requires = "cert_file")]
    pub key_file: Option<PathBuf>,
}

impl CredentialArgs {
    /// The targets at these addresses, with the credentials in the files.
    pub(crate) fn targets(&self, addresses: &[Address]) -> Result<Vec<Target>, RunError> {
        let own = self.cert_file.clone().zip(self.key_file.clone());
        let tls = self.ca_file.clone().map(|ca| ClientFiles { ca, own, server_name: None });
        let credentials = Credentials::load(tls, self.token_file.clone());
        let credentials = credentials.map_err(|error| RunError::Usage(error.to_string()))?;
        let target = |address: &Address| Target::new(address.clone(), credentials.clone());
        let targets: Result<_, _> = addresses.iter().map(target).collect();
        targets.map_err(|error| {
            RunError::Usage(format!("{error}: name the CA certificates with --ca-file"))
        })
    }

    /// The addresses as URLs.
    pub(crate) fn urls(&self, addresses: &[Address]) -> Vec<String> {
        let scheme = if self.ca_file.is_some() { "https" } else { "http" };
        addresses.iter().map(|address| format!("{scheme}://{address}")).collect()
    }
}

pub(crate) fn count() -> impl clap::builder::TypedValueParser<Value = u64> {
    clap::value_parser!(u64).range(1..=1_000_000)
}

pub(crate) fn positive(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number: &f64| number.is_finite() && *number > 0.0);
    number.ok_or("expected a number above 0".to_owned())
}

pub(crate) fn at_least_0(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number: &f64| number.is_finite() && *number >= 0.0);
    number.ok_or("expected a number of at least 0".to_owned())
}
