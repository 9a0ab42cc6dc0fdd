//! Limits files: every mistake and every valid file, reloads in a running node, and what the store
//! is told of them.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]
#![allow(clippy::disallowed_methods, reason = "tests wait for other processes")]

mod files;
mod layouts;
mod reload;
mod reload_races;
