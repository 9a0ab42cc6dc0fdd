//! What to call: an address with its credentials.

use std::fmt;
use std::net::SocketAddr;

use super::address::Address;
use super::credentials::Credentials;

/// A server to call, and the credentials for it.
#[derive(Clone, Debug)]
pub struct Target {
    pub(super) address: Address,
    /// Where to connect, if it is not found out by the address.
    pub(super) socket: Option<SocketAddr>,
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
        Ok(Self { address, socket: None, credentials })
    }

    /// The same server at one of the IP addresses of its name. Its certificate must still have the
    /// name.
    pub fn at(&self, socket: SocketAddr) -> Self {
        Self { socket: Some(socket), ..self.clone() }
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

/// The address, and the IP address if its name has several.
impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.address)?;
        match self.socket {
            Some(socket) if Address::from(socket) != self.address => write!(f, " ({socket})"),
            _ => Ok(()),
        }
    }
}
