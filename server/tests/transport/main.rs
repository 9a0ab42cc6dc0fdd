//! Both ports of a node as clients see them: gRPC, HTTP, real clients of other languages, overload,
//! and how a node stops.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]
#![allow(clippy::disallowed_methods, reason = "tests wait for other processes")]

mod authority;
mod clients;
mod connections;
mod drain;
mod grpc;
mod http;
mod http_edge;
mod overload;
mod status;
