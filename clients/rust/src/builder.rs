//! The settings of a client.

use std::env;
use std::fmt::{self, Debug};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Handle;

use crate::backend::Backend;
use crate::charges::Charges;
use crate::client::{Callbacks, Client, Inner};
use crate::connection::{Address, ClientFiles, Credentials, Target};
use crate::decision::{Grant, Refusal};
use crate::fake::Fake;
use crate::fallback::{Fallback, Fallbacks};
use crate::holds::Holds;
use crate::leases::Leases;
use crate::nodes::Nodes;
use crate::refusals::Refusals;
use crate::request::Request;
use crate::tasks::Tasks;
use crate::tenants::TenantRequest;

/// The deadline of a request that has none of its own. A node needs up to 50 ms, or what
/// `--store-timeout` says, to find that the store does not answer.
const DEADLINE: Duration = Duration::from_millis(200);

/// The settings of a [`Client`].
#[must_use]
pub struct Builder {
    addresses: Addresses,
    ca_file: Option<PathBuf>,
    server_name: Option<String>,
    own_files: Option<(PathBuf, PathBuf)>,
    token_file: Option<PathBuf>,
    client_id: Option<String>,
    deadline: Duration,
    fallbacks: Fallbacks,
    callbacks: Callbacks,
}

enum Addresses {
    Nodes(Vec<String>),
    Fake(Fake),
}

/// Why a [`Client`] can't be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BuildError {
    /// No address is given.
    #[error("no address of a node is given")]
    NoAddress,
    /// An address is malformed.
    #[error("{0}")]
    Address(String),
    /// An `https://` address without a CA file.
    #[error("{0}: name the file of its CA certificates")]
    NeedsTls(String),
    /// A certificate, key or token can't be used.
    #[error("{0}")]
    Credentials(String),
    /// Of a certificate and its key, or of a CA file and what depends on it, one is missing.
    #[error("{0}")]
    Incomplete(&'static str),
    /// Called outside of a Tokio runtime.
    #[error("a client needs a Tokio runtime")]
    NoRuntime,
}

impl Client {
    /// The settings of a client of the nodes at these addresses, each `HOST:PORT`,
    /// `http://HOST:PORT` or `https://HOST:PORT`. A name may have several addresses, each of which
    /// is a node; it is resolved again every 30 seconds. Calls are spread over all nodes that are
    /// well.
    pub fn builder(addresses: impl IntoIterator<Item = impl Into<String>>) -> Builder {
        let addresses = addresses.into_iter().map(Into::into).collect();
        Builder::new(Addresses::Nodes(addresses))
    }

    /// A client with the settings of [`Builder::from_env`] and defaults.
    pub fn from_env() -> Result<Self, BuildError> {
        Builder::from_env()?.build()
    }
}

impl Fake {
    /// A client of this fake, to be configured further.
    pub fn client(&self) -> Builder {
        Builder::new(Addresses::Fake(self.clone()))
    }
}

impl Builder {
    fn new(addresses: Addresses) -> Self {
        Self {
            addresses,
            ca_file: None,
            server_name: None,
            own_files: None,
            token_file: None,
            client_id: None,
            deadline: DEADLINE,
            fallbacks: Fallbacks::default(),
            callbacks: Callbacks::default(),
        }
    }

    /// The settings in the environment: `TOLLGATE_ADDRESS`, one or more addresses separated by
    /// commas; and `TOLLGATE_CA_FILE`, `TOLLGATE_SERVER_NAME`, `TOLLGATE_CERT_FILE` with
    /// `TOLLGATE_KEY_FILE`, and `TOLLGATE_TOKEN_FILE`, as the command line reads them.
    pub fn from_env() -> Result<Self, BuildError> {
        Self::from_variables(|name| env::var_os(name).filter(|value| !value.is_empty()))
    }

    fn from_variables(
        variable: impl Fn(&str) -> Option<std::ffi::OsString>,
    ) -> Result<Self, BuildError> {
        let text = |name| variable(name).map(|value| value.to_string_lossy().into_owned());
        let path = |name| variable(name).map(PathBuf::from);
        let addresses = text("TOLLGATE_ADDRESS").unwrap_or_default();
        let addresses = addresses.split(',').map(str::trim).filter(|one| !one.is_empty());
        let own_files = match (path("TOLLGATE_CERT_FILE"), path("TOLLGATE_KEY_FILE")) {
            (Some(cert), Some(key)) => Some((cert, key)),
            (None, None) => None,
            _ => {
                return Err(BuildError::Incomplete(
                    "TOLLGATE_CERT_FILE and TOLLGATE_KEY_FILE belong together",
                ));
            }
        };
        Ok(Self {
            ca_file: path("TOLLGATE_CA_FILE"),
            server_name: text("TOLLGATE_SERVER_NAME"),
            own_files,
            token_file: path("TOLLGATE_TOKEN_FILE"),
            ..Client::builder(addresses)
        })
    }

    /// Turns on TLS: the file of the CA certificates that the nodes' certificates are verified with
    /// (PEM). This and the other files are read again when they change.
    pub fn ca_file(self, path: impl Into<PathBuf>) -> Self {
        Self { ca_file: Some(path.into()), ..self }
    }

    /// The name in the nodes' certificates, if it is not that of the address.
    pub fn server_name(self, name: impl Into<String>) -> Self {
        Self { server_name: Some(name.into()), ..self }
    }

    /// The client's certificate and its private key (PEM).
    pub fn certificate(self, cert: impl Into<PathBuf>, key: impl Into<PathBuf>) -> Self {
        Self { own_files: Some((cert.into(), key.into())), ..self }
    }

    /// A file whose only line is the bearer token for the nodes.
    pub fn token_file(self, path: impl Into<PathBuf>) -> Self {
        Self { token_file: Some(path.into()), ..self }
    }

    /// The name that leases are held by, which no other client may have at the same time, and that
    /// operators see of holds; default: host name, process id and a random number.
    pub fn client_id(self, id: impl Into<String>) -> Self {
        Self { client_id: Some(id.into()), ..self }
    }

    /// How long to wait for an answer before the fallback decides; default: 200 ms. It includes
    /// connecting, and asking another node when one fails.
    pub fn deadline(self, deadline: Duration) -> Self {
        Self { deadline, ..self }
    }

    /// What decides when no node does. Without it, that is an error.
    pub fn fallback(mut self, fallback: Fallback) -> Self {
        self.fallbacks.everything = Some(fallback);
        self
    }

    /// What decides for the buckets of a namespace, instead of [`fallback`](Self::fallback).
    pub fn namespace_fallback(mut self, namespace: impl Into<String>, fallback: Fallback) -> Self {
        let within = self.fallbacks.namespaces.entry(namespace.into()).or_default();
        within.all_buckets = Some(fallback);
        self
    }

    /// What decides for one bucket, instead of [`namespace_fallback`](Self::namespace_fallback).
    pub fn bucket_fallback(
        mut self,
        namespace: impl Into<String>,
        bucket: impl Into<String>,
        fallback: Fallback,
    ) -> Self {
        let within = self.fallbacks.namespaces.entry(namespace.into()).or_default();
        within.buckets.insert(bucket.into(), fallback);
        self
    }

    /// What decides about hits and copies of a resource, instead of [`fallback`](Self::fallback).
    pub fn resource_fallback(mut self, resource: impl Into<String>, fallback: Fallback) -> Self {
        self.fallbacks.resources.insert(resource.into(), fallback);
        self
    }

    /// Calls this with each request that is refused, so that the application can serve less. It
    /// must not block.
    pub fn on_refused(
        mut self,
        callback: impl Fn(&Request, &Refusal) + Send + Sync + 'static,
    ) -> Self {
        self.callbacks.refused = Some(Box::new(callback));
        self
    }

    /// Calls this with each request for hits or copies that is refused. It must not block.
    pub fn on_tenant_refused(
        mut self,
        callback: impl Fn(&TenantRequest, &Refusal) + Send + Sync + 'static,
    ) -> Self {
        self.callbacks.tenant_refused = Some(Box::new(callback));
        self
    }

    /// Calls this with each grant past the bucket's soft limit: refusals may follow. It must not
    /// block.
    pub fn on_soft_limited(
        mut self,
        callback: impl Fn(&Request, &Grant) + Send + Sync + 'static,
    ) -> Self {
        self.callbacks.soft_limited = Some(Box::new(callback));
        self
    }

    /// Makes the client, which begins to connect. Reads the files, but does not wait for the nodes:
    /// a request waits for the first connection, up to its deadline.
    ///
    /// Must be called within a Tokio runtime, which has to run as long as the client is used.
    pub fn build(self) -> Result<Client, BuildError> {
        let backend = match &self.addresses {
            Addresses::Fake(fake) => Backend::Fake(fake.clone()),
            Addresses::Nodes(addresses) => {
                let targets = self.targets(addresses)?;
                let runtime = Handle::try_current().map_err(|_| BuildError::NoRuntime)?;
                Backend::Nodes(Nodes::connect(targets, &runtime))
            }
        };
        let (backend, tasks) = (Arc::new(backend), Tasks::here());
        let client_id = self.client_id.unwrap_or_else(process_id);
        Ok(Client::from(Inner {
            holds: Holds::new(
                Arc::clone(&backend),
                self.fallbacks.clone(),
                (&client_id, self.deadline),
                tasks.clone(),
            ),
            leases: Leases::new(Arc::clone(&backend), client_id, tasks.clone()),
            charges: Charges::new(Arc::clone(&backend), tasks.clone()),
            tasks,
            backend,
            deadline: self.deadline,
            fallbacks: self.fallbacks,
            callbacks: self.callbacks,
            refusals: Refusals::default(),
            refused_hits: Refusals::default(),
            fallback_log: Default::default(),
        }))
    }

    fn targets(&self, addresses: &[String]) -> Result<Vec<Target>, BuildError> {
        if addresses.is_empty() {
            return Err(BuildError::NoAddress);
        }
        let (own, server_name) = (self.own_files.clone(), self.server_name.clone());
        let tls = match self.ca_file.clone() {
            Some(ca) => Some(ClientFiles { ca, own, server_name }),
            None if own.is_some() || server_name.is_some() => {
                let text = "a certificate or a server name needs the file of the CA certificates";
                return Err(BuildError::Incomplete(text));
            }
            None => None,
        };
        let credentials = Credentials::load(tls, self.token_file.clone())
            .map_err(|error| BuildError::Credentials(error.to_string()))?;
        let target = |text: &String| {
            let address: Address = text.parse().map_err(BuildError::Address)?;
            if credentials.has_token() && credentials.dialer().is_none() && address.is_remote() {
                tracing::warn!(%address, "the token is sent unencrypted: turn on TLS with a CA file");
            }
            Target::new(address, credentials.clone())
                .map_err(|error| BuildError::NeedsTls(error.to_string()))
        };
        addresses.iter().map(target).collect()
    }
}

fn process_id() -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let host = if host.trim().is_empty() { "client" } else { host.trim() };
    format!("{host}:{}:{:08x}", std::process::id(), rand::random::<u32>())
}

impl Debug for Builder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Builder").field("deadline", &self.deadline).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn from(variables: &[(&str, &str)]) -> Result<Builder, BuildError> {
        Builder::from_variables(|name| {
            let found = variables.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| (*value).into())
        })
    }

    #[test]
    fn settings_in_the_environment() {
        let builder = from(&[
            ("TOLLGATE_ADDRESS", "a:1, https://b:2,"),
            ("TOLLGATE_CA_FILE", "/ca"),
            ("TOLLGATE_SERVER_NAME", "nodes"),
            ("TOLLGATE_CERT_FILE", "/cert"),
            ("TOLLGATE_KEY_FILE", "/key"),
            ("TOLLGATE_TOKEN_FILE", "/token"),
        ]);
        let builder = builder.unwrap();
        assert!(
            matches!(&builder.addresses, Addresses::Nodes(all) if *all == ["a:1", "https://b:2"])
        );
        assert_eq!(builder.ca_file, Some("/ca".into()));
        assert_eq!(builder.server_name.as_deref(), Some("nodes"));
        assert_eq!(builder.own_files, Some(("/cert".into(), "/key".into())));
        assert_eq!(builder.token_file, Some("/token".into()));
        let error = from(&[("TOLLGATE_CERT_FILE", "/cert")]).unwrap_err();
        assert!(matches!(error, BuildError::Incomplete(_)), "{error}");
    }

    #[test]
    fn settings_that_make_no_client() {
        let text = |builder: Builder| builder.build().unwrap_err().to_string();
        assert_eq!(text(from(&[]).unwrap()), "no address of a node is given");
        let invalid = "\"a\" is not a valid address: write HOST:PORT";
        assert_eq!(text(Client::builder(["a"])), invalid);
        let tls = "https://a:1 needs TLS: name the file of its CA certificates";
        assert_eq!(text(Client::builder(["https://a:1"])), tls);
        let incomplete = "a certificate or a server name needs the file of the CA certificates";
        assert_eq!(text(Client::builder(["a:1"]).server_name("b")), incomplete);
        let missing = text(Client::builder(["a:1"]).token_file("/nowhere/token"));
        assert!(missing.starts_with("can't read /nowhere/token: "), "{missing}");
        assert_eq!(text(Client::builder(["a:1"])), "a client needs a Tokio runtime");
    }
}
