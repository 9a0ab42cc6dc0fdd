//! Which node the commands talk to over gRPC, and what they say when it does not answer.

use std::error::Error;
use std::io;
use std::time::Duration;

use tonic::transport::Endpoint;
use tonic::{Status, TimeoutExpired};

use super::secure::{Line, Secure};
use super::{text, why};
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
        let channel = channel.map_err(|error| match why::error_of_tls(&error) {
            Some(error) => why::wrong(address, error),
            None if dialer.is_none() || is_refused(&error) => {
                format!("nobody answers at {address}; is `tollgate serve` running there?")
            }
            None => format!("no TLS with {address}: {}", cause(&error)),
        })?;
        self.secure.line(channel)
    }

    /// The text for an error in place of `what`: a decision, a lease. Where the connection broke
    /// it may block, to find out why.
    pub(super) fn failed(&self, what: &str, status: &Status) -> String {
        let code = status.code();
        // Of one that is only slow there is nothing to find out.
        if let Some(error) = status.source().filter(|error| !is_timeout(*error)) {
            let address = self.address();
            let why = match why::error_of_tls(error) {
                Some(error) => Some(why::wrong(address, error)),
                None => {
                    let dialer = self.secure.dialer().ok();
                    dialer.and_then(|dialer| why::silent(address, dialer.as_ref()))
                }
            };
            if let Some(why) = why {
                return format!("no {what}: {why}");
            }
        }
        let message = match status.message() {
            "" => code.description().to_owned(),
            message => text::shown(message),
        };
        format!("no {what} from {}: {code:?}: {message}", self.address())
    }
}

/// Whether nobody listens there.
fn is_refused(error: &(dyn Error + 'static)) -> bool {
    let own = error.downcast_ref::<io::Error>();
    own.is_some_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
        || error.source().is_some_and(is_refused)
}

fn is_timeout(error: &(dyn Error + 'static)) -> bool {
    error.is::<TimeoutExpired>() || error.source().is_some_and(is_timeout)
}

/// The innermost reason of an error.
fn cause(error: &dyn Error) -> String {
    let mut innermost = error;
    while let Some(source) = innermost.source() {
        innermost = source;
    }
    innermost.to_string()
}
