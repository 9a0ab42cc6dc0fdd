//! Domain logic as pure functions over plain data: bucket arithmetic, capacity sharing, leases,
//! hits, holds, names and time. No I/O, no store, no file format and no clock: time is always a parameter.

pub mod algorithm;
pub mod ban;
pub mod bucket;
pub mod descriptor;
pub mod holds;
pub mod lease;
pub mod log;
pub mod names;
pub mod prefetch;
pub mod roster;
pub mod sharing;
pub mod small_map;
pub mod sum;
pub mod throttle;
pub mod time;
pub mod wants_index;
pub mod window;
