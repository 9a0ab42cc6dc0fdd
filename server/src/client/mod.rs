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
mod target;

pub use address::Address;
pub use channel::{AuthChannel, answer_within};
pub use credentials::{Credentials, CredentialsError};
pub use http::HttpResponse;
pub use target::{NeedsTls, Target};
