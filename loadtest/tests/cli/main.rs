//! The load tester as its users start it, against servers that behave well and badly.

#![allow(clippy::unwrap_used)]

mod allow;
mod common;
mod open_loop;
mod usage;
