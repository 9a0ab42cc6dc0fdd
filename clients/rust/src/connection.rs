//! Connections to a node: its address, TLS, the bearer token, and gRPC channels.
//!
//! [`Client`](crate::Client) is built on it. For tollgate's own tools, which call one node by
//! themselves: it may change with each version.

mod address;
mod channel;
mod credentials;
mod target;
mod tls;

pub use address::Address;
pub use channel::{AuthChannel, answer_within};
pub use credentials::{Credentials, CredentialsError};
pub use target::{NeedsTls, Target};
pub use tls::{ClientFiles, Dialer};
