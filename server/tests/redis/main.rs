//! The Redis store: Redis Cluster and Sentinel, TLS and logins, faults of a server, and corrupt
//! values.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]
#![allow(clippy::disallowed_methods, reason = "tests wait for other processes")]

mod cluster;
mod corrupt;
mod faults;
mod places;
mod registers;
mod sentinel;
mod tls;
mod topology;
