//! Access control: the access file and its commands, TLS on both ports and in the command.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]
#![allow(clippy::disallowed_methods, reason = "tests wait for other processes")]

mod access;
mod node;
mod tls_client;
mod tls_server;
