//! Calls to a node, or to any server with the same services: addresses, TLS, bearer tokens, gRPC
//! channels, HTTP requests, and leases that are kept refreshed.
//!
//! The command line, the parent client and the load generator use it.

mod address;
pub mod capacity;
mod channel;
mod credentials;
mod http;
pub mod lease;

pub use address::Address;
pub use channel::{AuthChannel, answer_within};
pub use credentials::{Credentials, CredentialsError};
pub use http::HttpResponse;

/// A server to call, and the credentials for it.
#[derive(Clone, Debug)]
pub struct Target {
    address: Address,
    credentials: Credentials,
}

/// An `https://` address without CA certificates to verify the server with.
#[derive(Debug, thiserror::Error)]
#[error("https://{0} needs TLS")]
pub struct NeedsTls(Address);

impl Target {
    /// Refuses an `https://` address without TLS, which would send everything in the clear.
    pub fn new(address: Address, credentials: Credentials) -> Result<Self, NeedsTls> {
        if address.is_https() && credentials.dialer().is_none() {
            return Err(NeedsTls(address));
        }
        Ok(Self { address, credentials })
    }

    /// The address.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// The credentials.
    pub fn credentials(&self) -> &Credentials {
        &self.credentials
    }
}
