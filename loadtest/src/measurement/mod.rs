//! What the commands show of a run: [`figures`] of requests, statistics of a [`series`] over time,
//! and [`progress`] on the terminal.

pub mod figures;
pub mod progress;
pub mod series;
