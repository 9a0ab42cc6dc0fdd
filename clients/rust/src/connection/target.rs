//! What to call: an address with its credentials.

use super::address::Address;
use super::credentials::Credentials;

/// A server to call, and the credentials for it.
#[derive(Clone, Debug)]
pub struct Target {
    pub(super) address: Address,
    pub(super) credentials: Credentials,
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
