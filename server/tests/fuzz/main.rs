//! Random input, and random traces that compare each store with the embedded one, the
//! specification.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]
#![allow(clippy::disallowed_methods, reason = "tests wait for other processes")]

mod allow_differential;
mod holds_differential;
mod hostile;
mod lease_differential;
mod lease_properties;
mod lease_tree_model;
mod limits_files;
mod prefetch_model;
mod throttle_differential;
