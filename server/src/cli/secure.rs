//! TLS and authentication flags of the commands.

use std::path::PathBuf;
use std::sync::Once;

use tonic::metadata::{Ascii, MetadataValue};
use tonic::service::Interceptor;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::Channel;
use tonic::{Request, Status};

use crate::files;
use crate::settings::is_elsewhere;
use crate::tls::{ClientFiles, Dialer};

/// TLS and token flags of every command that talks to a node.
#[derive(Default, clap::Args)]
pub(super) struct Secure {
    /// Who signs the node's certificate (PEM): turns on TLS
    #[arg(long, env = "TOLLGATE_CA_FILE", value_name = "FILE")]
    ca_file: Option<PathBuf>,
    /// The name in the node's certificate, where it is not the host's
    #[arg(long, env = "TOLLGATE_SERVER_NAME", value_name = "NAME", requires = "ca_file")]
    server_name: Option<String>,
    /// The certificate to show to the node (PEM)
    #[arg(
        long,
        env = "TOLLGATE_CERT_FILE",
        value_name = "FILE",
        requires_all = ["key_file", "ca_file"]
    )]
    cert_file: Option<PathBuf>,
    /// Its key (PEM)
    #[arg(long, env = "TOLLGATE_KEY_FILE", value_name = "FILE", requires = "cert_file")]
    key_file: Option<PathBuf>,
    /// A file with the token to show to the node
    #[arg(long, env = "TOLLGATE_TOKEN_FILE", value_name = "FILE")]
    token_file: Option<PathBuf>,
}

impl Secure {
    /// The TLS connector; `None` without `--ca-file`.
    pub(super) fn dialer(&self) -> Result<Option<Dialer>, String> {
        let Some(ca) = self.ca_file.clone() else { return Ok(None) };
        let own = self.cert_file.clone().zip(self.key_file.clone());
        let files = ClientFiles { ca, own, server_name: self.server_name.clone() };
        Dialer::new(files).map(Some).map_err(|error| error.to_string())
    }

    /// Warns once per process if the token would be sent unencrypted to another host.
    pub(super) fn warn_if_in_the_clear(&self, address: &str) {
        static WARNED: Once = Once::new();
        if self.token_file.is_some() && self.ca_file.is_none() && is_elsewhere(address) {
            WARNED.call_once(|| {
                eprintln!(
                    "tollgate: the token goes to {address} in the clear: anybody on the way may \
                     read it (--ca-file turns on TLS)"
                );
            });
        }
    }

    /// Value of the `authorization` header; `None` without `--token-file`.
    pub(super) fn authorization(&self) -> Result<Option<String>, String> {
        let Some(path) = &self.token_file else { return Ok(None) };
        let token = files::read_secret(path).map_err(|error| error.to_string())?;
        match token.bytes().all(|byte| byte.is_ascii_graphic()) {
            true => Ok(Some(format!("Bearer {token}"))),
            false => Err(format!("{}: a token has no spaces in it", path.display())),
        }
    }

    /// Wraps the channel so that each request carries the token.
    pub(super) fn authenticated(&self, channel: Channel) -> Result<AuthChannel, String> {
        let value = self.authorization()?.map(MetadataValue::try_from).transpose();
        let value = value.map_err(|_| "--token-file: no token".to_owned())?;
        Ok(InterceptedService::new(channel, AuthInterceptor(value)))
    }
}

/// A gRPC channel to a node that sends the token with each request.
pub(super) type AuthChannel = InterceptedService<Channel, AuthInterceptor>;

/// Adds the `authorization` header, if there is a token.
#[derive(Clone)]
pub(super) struct AuthInterceptor(Option<MetadataValue<Ascii>>);

impl Interceptor for AuthInterceptor {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        if let Some(value) = &self.0 {
            request.metadata_mut().insert("authorization", value.clone());
        }
        Ok(request)
    }
}
