//! Limits files: valid and invalid ones, reloads in a running node, and the layouts that nodes
//! report to the store.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]
#![allow(clippy::disallowed_methods, reason = "tests wait for other processes")]

mod administration;
mod documents;
mod envoy;
mod files;
mod in_store;
mod kill_switch;
mod large;
mod layouts;
mod reload;
mod reload_races;
mod survival;
mod versions;
