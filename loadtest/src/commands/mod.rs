//! The commands of `tollgate-loadtest`, one module each: arguments, run, report.
//! [`requests`] is what the reports of `allow`, `throttle` and `holds` share.

pub mod allow;
pub mod bench;
pub mod capacity;
pub mod floor;
pub mod holds;
pub mod requests;
pub mod scenario;
pub mod throttle;
