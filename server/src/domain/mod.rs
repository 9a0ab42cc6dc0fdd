//! The ground that everything else stands on: bucket arithmetic, capacity sharing,
//! leases, names and time, as pure functions over plain data. Nothing here knows a network,
//! a store, a file format or a clock; time is always a parameter.

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
