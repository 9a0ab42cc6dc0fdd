//! The load tester as its users start it, against servers that behave well and badly.

#![allow(clippy::unwrap_used)]

mod allow;
mod bench;
mod capacity;
mod common;
mod floor;
mod guarded;
mod holds;
mod leases;
mod node;
mod open_loop;
mod scenario;
mod throttle;
mod usage;
