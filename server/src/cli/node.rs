//! The gRPC connection of a command to its node, and the error texts when it fails.

use std::error::Error;
use std::io;
use std::time::Duration;

use tonic::transport::Endpoint;
use tonic::{Status, TimeoutExpired};

use super::secure::{AuthChannel, Secure};
use super::{text, why};
use crate::settings::duration;

/// Flags of every command that uses gRPC.
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
    /// `HOST:PORT` of the node, without a scheme.
    pub(super) fn address(&self) -> &str {
        self.addr.trim_start_matches("http://").trim_start_matches("https://")
    }

    /// Connects and applies the token. The channel reconnects by itself when its connection breaks.
    pub(super) async fn connect(&self) -> Result<AuthChannel, String> {
        let address = self.address();
        let endpoint = Endpoint::from_shared(format!("http://{address}"))
            .map_err(|_| format!("--addr {address:?} is no HOST:PORT"))?
            .timeout(self.timeout)
            .connect_timeout(self.timeout);
        self.secure.warn_if_in_the_clear(address);
        let dialer = self.secure.dialer()?;
        let channel = match &dialer {
            None => endpoint.connect().await,
            // Connect eagerly, so that an unreachable node is reported here, not by the first
            // request.
            Some(dialer) => dialer.connect(endpoint).await,
        };
        let channel = channel.map_err(|error| match why::find_tls_error(&error) {
            Some(error) => why::explain(address, error),
            None if dialer.is_none() || is_refused(&error) => {
                format!("nobody answers at {address}; is `tollgate serve` running there?")
            }
            None => format!("no TLS with {address}: {}", cause(&error)),
        })?;
        self.secure.authenticated(channel)
    }

    /// Error text for a failed request for `what` ("decision", "lease"). After a connection error
    /// it blocks while it probes the node for the cause.
    pub(super) fn error_text(&self, what: &str, status: &Status) -> String {
        let code = status.code();
        // A timeout says nothing about TLS, so it is not diagnosed.
        if let Some(error) = status.source().filter(|error| !is_timeout(*error)) {
            let address = self.address();
            let why = match why::find_tls_error(error) {
                Some(error) => Some(why::explain(address, error)),
                None => {
                    let dialer = self.secure.dialer().ok();
                    dialer.and_then(|dialer| why::diagnose(address, dialer.as_ref()))
                }
            };
            if let Some(why) = why {
                return format!("no {what}: {why}");
            }
        }
        let message = match status.message() {
            "" => code.description().to_owned(),
            message => text::escaped(message),
        };
        format!("no {what} from {}: {code:?}: {message}", self.address())
    }
}

/// Whether the error was caused by a refused connection.
fn is_refused(error: &(dyn Error + 'static)) -> bool {
    let own = error.downcast_ref::<io::Error>();
    own.is_some_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
        || error.source().is_some_and(is_refused)
}

fn is_timeout(error: &(dyn Error + 'static)) -> bool {
    error.is::<TimeoutExpired>() || error.source().is_some_and(is_timeout)
}

/// The message of the innermost error.
fn cause(error: &dyn Error) -> String {
    let mut innermost = error;
    while let Some(source) = innermost.source() {
        innermost = source;
    }
    innermost.to_string()
}
