//! Limits per tenant: hits of domains on resources and copies that they hold, on every store and over every
//! wire.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]
#![allow(clippy::disallowed_methods, reason = "tests wait for other processes")]

mod batches;
mod cookbook;
mod cost;
mod explain;
mod hit_slots;
mod hits;
mod hold_books;
mod hold_cookbook;
mod hold_nodes;
mod hold_slots;
mod holds;
mod nodes;
mod paper;
