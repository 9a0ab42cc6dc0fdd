//! The gRPC connection of a command to its node, and the error texts when it fails.

use std::error::Error;
use std::io;
use std::time::Duration;

use tokio::time::error::Elapsed;
use tonic::Status;

use super::credentials::CredentialArgs;
use super::{text, tls_diagnosis};
use crate::settings::duration;
use tollgate_client::connection::{Address, AuthChannel, Target};

/// Flags of every command that uses gRPC.
#[derive(clap::Args)]
pub(super) struct NodeArgs {
    /// The node, or the load balancer in front of the nodes
    #[arg(
        long,
        env = "TOLLGATE_ADDR",
        value_name = "HOST:PORT",
        default_value = "127.0.0.1:10990"
    )]
    addr: Address,
    /// How long to wait for an answer
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = duration)]
    timeout: Duration,
    #[command(flatten)]
    credentials: CredentialArgs,
}

/// The node that a command calls.
pub(super) struct Node {
    target: Target,
    /// Time limit for connecting, and for each answer.
    pub(super) timeout: Duration,
}

impl NodeArgs {
    /// Loads the credentials. Blocks.
    pub(super) fn node(&self) -> Result<Node, String> {
        Ok(Node { target: self.credentials.target(&self.addr)?, timeout: self.timeout })
    }
}

impl Node {
    /// The address of the node.
    pub(super) fn address(&self) -> &Address {
        self.target.address()
    }

    /// Connects at once, so that an unreachable node is reported here, not by the first request.
    pub(super) async fn connect(&self) -> Result<AuthChannel, String> {
        let address = self.address();
        self.target.connect(self.timeout).await.map_err(
            |error| match tls_diagnosis::find_tls_error(&error) {
                Some(error) => tls_diagnosis::explain(address, error),
                None if self.target.credentials().dialer().is_none() || is_refused(&error) => {
                    format!("no node answers at {address}: is `tollgate serve` running there?")
                }
                None => {
                    let cause = cause(&error, self.timeout);
                    format!("the TLS connection to {address} failed: {cause}")
                }
            },
        )
    }

    /// Error text for a failed request for `what` ("decision", "lease"). After a connection error
    /// it probes the node for the cause.
    pub(super) async fn error_text(&self, what: &str, status: &Status) -> String {
        let (address, code) = (self.address(), status.code());
        // Without a source the node has answered, or nothing did in time.
        if let Some(error) = status.source() {
            let why = match tls_diagnosis::find_tls_error(error) {
                Some(error) => Some(tls_diagnosis::explain(address, error)),
                None => tls_diagnosis::diagnose(&self.target).await,
            };
            if let Some(why) = why {
                return format!("no {what}: {why}");
            }
        }
        let message = match status.message() {
            "" => code.description().to_owned(),
            message => text::escaped(message),
        };
        format!("no {what} from {address}: {code:?}: {message}")
    }
}

/// Whether the error was caused by a refused connection.
fn is_refused(error: &(dyn Error + 'static)) -> bool {
    let own = error.downcast_ref::<io::Error>();
    own.is_some_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
        || error.source().is_some_and(is_refused)
}

/// The message of the innermost error. `timeout`: the time limit of the connection.
fn cause(error: &(dyn Error + 'static), timeout: Duration) -> String {
    let mut innermost = error;
    while let Some(source) = innermost.source() {
        innermost = source;
    }
    let inside = innermost.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
    if inside.is_some_and(|error| error.is::<Elapsed>()) {
        return format!("no answer after {timeout:?} (--timeout)");
    }
    innermost.to_string()
}
