//! The store fails in every way that it has, and so does the network to it, under load: each
//! answer comes in time, each namespace's policy holds meanwhile, no request is counted twice,
//! nodes hold no more memory, and shared decisions come back by themselves. Each of these tests is a
//! row of docs/reliability.md. What outages leave behind is in `outage`.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]
#![allow(clippy::disallowed_methods, reason = "tests wait for other processes")]

mod network;
mod outage;
mod server;
mod storm;
mod tally;
mod trial;
