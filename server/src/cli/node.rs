//! Which node the commands talk to over gRPC, and what they say when it does not answer.

use std::time::Duration;

use tonic::Status;
use tonic::transport::{Channel, Endpoint};

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
}

impl Node {
    /// Where it is, without a scheme.
    pub(super) fn address(&self) -> &str {
        self.addr.trim_start_matches("http://")
    }

    /// Connects. The channel connects again by itself when the connection breaks.
    pub(super) async fn connect(&self) -> Result<Channel, String> {
        let address = self.address();
        let endpoint = Endpoint::from_shared(format!("http://{address}"))
            .map_err(|_| format!("--addr {address:?} is no HOST:PORT"))?
            .timeout(self.timeout)
            .connect_timeout(self.timeout);
        endpoint
            .connect()
            .await
            .map_err(|_| format!("nobody answers at {address}; is `tollgate serve` running there?"))
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
