//! Lanes: connections to a server, each with the jobs that wait for it.

pub(super) mod job;
pub(super) mod lane;
pub(super) mod pace;
pub(super) mod queue;
pub(super) mod round_trip;
