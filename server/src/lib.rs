//! The tollgate node.
//!
//! A request goes one way, transport → service → store, and its answer comes back the same
//! way; `domain` is the ground that the others stand on.

pub mod config;
pub mod domain;
