//! Capacity leases: grants on every store and across trees of clusters, the cost of a decision, and
//! the wire format.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]
#![allow(clippy::disallowed_methods, reason = "tests wait for other processes")]

mod budget;
mod cost;
mod drift;
mod outage;
mod pages;
mod parent_up;
mod scenarios;
mod tree;
mod wire;
