//! The commands of `tollgate-loadtest`, one module each: arguments, run, report.

pub mod allow;
pub mod bench;
pub mod capacity;
pub mod floor;
pub mod scenario;
