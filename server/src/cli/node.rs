//! Which node the commands talk to over gRPC, and what they say when it does not answer.

use std::time::Duration;

use tonic::Status;
use tonic::transport::Endpoint;

use super::secure::{Line, Secure};
use super::text;
use crate::settings::duration;

/// The flags that every question over gRPC has.
#[derive(clap::Args)]
pub(super) struct Node {
    /// The node, or the load balancer before the nodes
    #[arg(
        long,
        env = "TOLLGATE_ADDR",
        value_name = "HOST:PORT",
        default_value = "127.0.0.1:10990"
    )]
    addr: String,
    /// How long to wait for an answer
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = duration)]
    timeout: Duration,
    #[command(flatten)]
    secure: Secure,
}

impl Node {
    /// Where it is, without a scheme.
    pub(super) fn address(&self) -> &str {
        self.addr.trim_start_matches("http://").trim_start_matches("https://")
    }

    /// Connects. The channel connects again by itself when the connection breaks.
    pub(super) async fn connect(&self) -> Result<Line, String> {
        let address = self.address();
        let endpoint = Endpoint::from_shared(format!("http://{address}"))
            .map_err(|_| format!("--addr {address:?} is no HOST:PORT"))?
            .timeout(self.timeout)
            .connect_timeout(self.timeout);
        self.secure.warn_if_in_the_clear(address);
        let dialer = self.secure.dialer()?;
        let channel = match &dialer {
            None => endpoint.connect().await,
            // Whether anybody answers is to be said now, not at the first request.
            Some(dialer) => dialer.connect(endpoint).await,
        };
        let channel = channel.map_err(|error| match dialer {
            None => {
                format!("nobody answers at {address}; is `tollgate serve` running there?")
            }
            Some(_) => format!("no TLS with {address}: {}", cause(&error)),
        })?;
        self.secure.line(channel)
    }

    /// The text for an error in place of `what`: a decision, a lease.
    pub(super) fn failed(&self, what: &str, status: &Status) -> String {
        let code = status.code();
        let message = match status.message() {
            "" => code.description().to_owned(),
            message => text::shown(message),
        };
        format!("no {what} from {}: {code:?}: {message}", self.address())
    }
}

/// The innermost reason of an error.
fn cause(error: &dyn std::error::Error) -> String {
    let mut innermost = error;
    while let Some(source) = innermost.source() {
        innermost = source;
    }
    innermost.to_string()
}
