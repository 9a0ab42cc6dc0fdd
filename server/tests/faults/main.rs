//! The store fails in every way that it has, and so does the network to it, under load: each
//! answer comes in time, each namespace's policy holds meanwhile, no request is counted twice,
//! nodes hold no more memory, and shared decisions come back by themselves. Each test is a row of
//! docs/reliability.md.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]
#![allow(clippy::disallowed_methods, reason = "tests wait for other processes")]

#[path = "../support/mod.rs"]
mod support;

mod network;
mod server;
mod storm;
mod tally;
mod trial;
