//! Which servers there are, which keys each has, and the way from a key to its lanes.

pub(super) mod connector;
pub(super) mod handover;
pub(super) mod heartbeats;
pub(super) mod routes;
pub(super) mod servers;
pub(super) mod shard;
pub(super) mod topology;
