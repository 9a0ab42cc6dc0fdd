//! Faults of the store and of the network to it, under load: each answer arrives in time, each
//! namespace's policy applies during the fault, no request is counted twice, nodes keep no memory,
//! and shared decisions resume by themselves. Each of these tests makes a row of
//! docs/reliability.md. `outage` tests the time after outages.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]
#![allow(clippy::disallowed_methods, reason = "tests wait for other processes")]

mod network;
mod outage;
mod server;
mod storm;
mod tally;
mod trial;
