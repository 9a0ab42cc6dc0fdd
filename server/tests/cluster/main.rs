//! Several node processes: on one Redis, through failovers and rolling restarts, behind HAProxy.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]
#![allow(clippy::disallowed_methods, reason = "tests wait for other processes")]

mod balancer;
mod failover;
mod failover_loss;
mod leases;
mod limits;
mod nodes;
mod rate_limits;
mod rolling;
