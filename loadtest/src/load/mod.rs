//! How load is made: [`driver`] sends requests, [`loops`] says when the next one is sent, at the
//! times of [`pace`]. [`keys`] draws bucket names and [`walk`] changes demand. [`tally`] counts the
//! answers.

pub mod driver;
pub mod keys;
pub mod loops;
pub mod pace;
pub mod tally;
pub mod walk;
