//! Connections to a node: its address, TLS, the bearer token, and gRPC channels.
//!
//! [`Client`](crate::Client) is built on it. Tools that call one node by themselves use it directly.

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
