//! What tollgate's node and its client library share: files that are reloaded when they change,
//! certificates in PEM files, and a rate limit for log messages.

pub mod files;
mod log_throttle;
pub mod pem;

pub use log_throttle::LogThrottle;
