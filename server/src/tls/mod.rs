//! TLS for both server ports: certificates reloaded when they change,
//! handshakes with a time limit, and the names in client certificates.

mod names;
mod server;
mod stream;

pub use server::{Acceptor, Certificates, ClientAuth, Port, ServerFiles};
pub use stream::Stream;
pub use tollgate_common::pem::Error;
