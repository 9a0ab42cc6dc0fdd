//! Whom a job is counted for, so that owners share a queue and a batch fairly.

/// Whom a job is counted for. Both parts are hashes or numbers of callers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Owner {
    /// What is asked for: a namespace, a template of resources, or a kind of command.
    pub(crate) group: u64,
    /// Who asks: a caller; if callers have no names, the bucket or the resource.
    pub(crate) member: u64,
}

impl Owner {
    /// Rare commands: those of the node itself, and reads of leases.
    pub(crate) const INTERNAL: Self = Self { group: 0, member: 0 };
}

/// What waits in a queue.
pub(crate) trait Queued {
    /// Whom it is counted for.
    fn owner(&self) -> Owner;

    /// The key of the bucket that it is about. Several with one key cost the store little more than
    /// one. `None` if it is about something else.
    fn key(&self) -> Option<&[u8]>;
}
