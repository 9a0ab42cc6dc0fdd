//! The commands of `tollgate-loadtest`, one module each: arguments, run, report.
//! [`requests`] is what the reports of `allow` and `throttle` share.

pub mod allow;
pub mod bench;
pub mod capacity;
pub mod floor;
pub mod requests;
pub mod scenario;
pub mod throttle;
