//! Decisions of `Allow` on every store: scenarios, exactness under load, fairness between
//! namespaces, goodput, prefetch, memory.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]
#![allow(clippy::disallowed_methods, reason = "tests wait for other processes")]

mod bans;
mod cost;
mod criticality;
mod exactness;
mod fairness;
mod goodput;
mod leaky;
mod local_shares;
mod looks;
mod memory;
mod prefetch;
mod rate_limit;
mod scenarios;
mod settle;
mod windows;
