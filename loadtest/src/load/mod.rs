//! How load is made. [`drive`] runs the load that [`args`] describe: the [`loops`] say when a request
//! is sent, at the times of [`pace`], [`driver`] sends it, [`protocol`] says what it asks for, and
//! [`tally`] counts the answers. [`keys`] draws names and [`walk`] changes demand.

pub mod args;
pub mod drive;
pub mod driver;
pub mod keys;
pub mod loops;
pub mod pace;
pub mod protocol;
pub mod tally;
pub mod walk;
