//! The `tollgate` command: texts, exit codes, settings, leases from the command line, warnings.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]
#![allow(clippy::disallowed_methods, reason = "tests wait for other processes")]

mod capacity;
mod command;
mod settings;
mod warnings;
