//! Both ports of a node from the client's side: gRPC, HTTP, clients in other languages, overload,
//! and draining.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]
#![allow(clippy::disallowed_methods, reason = "tests wait for other processes")]

mod authority;
mod clients;
mod connections;
mod drain;
mod full_budget;
mod grpc;
mod http;
mod http_edge;
mod looks;
mod nodes;
mod overload;
mod settle;
mod status;
