//! Load generator and benchmarks for tollgate, with an audit of what was granted.
//!
//! | module | contents |
//! |---|---|
//! | [`commands::allow`] | load on token buckets |
//! | [`commands::throttle`] | load on throttles: hits of domains |
//! | [`commands::holds`] | load on holds: copies that domains hold |
//! | [`commands::capacity`] | load on leases, by many clients |
//! | [`commands::scenario`] | simulations of leases, without a network |
//! | [`commands::floor`] | the baseline servers that nodes are compared with |
//! | [`commands::bench`] | the comparison of nodes with the baselines |
//! | [`load`] | requests, send loops, names of buckets and domains, send times, counters |
//! | [`audit`] | tokens per bucket and hits per domain, checked against the limits |
//! | [`measurement`] | latencies, statistics over time, progress |
//! | [`args`], [`error`] | arguments that commands share, and why a command failed |

pub mod args;
pub mod audit;
pub mod commands;
pub mod error;
pub mod load;
pub mod measurement;
