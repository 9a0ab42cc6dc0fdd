//! Calls to a node on the connections of `tollgate_client`: HTTP requests, and leases that are kept
//! refreshed.
//!
//! The command line, the parent client and the load generator use it.

pub mod capacity;
mod http;
pub mod lease;

pub use http::{HttpResponse, send};
