//! Domain logic as pure functions over plain data: bucket arithmetic, capacity sharing, leases,
//! names and time. No I/O, no store, no file format and no clock: time is always a parameter.

pub mod ahead;
pub mod bucket;
pub mod exact;
pub mod few;
pub mod lease;
pub mod names;
pub mod order;
pub mod roster;
pub mod sharing;
pub mod time;
