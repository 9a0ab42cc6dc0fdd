//! The kill switch of the cluster: while it is on, no limit of a bucket, throttle or hold is enforced.

use std::future::Future;
use std::time::Duration;

use super::StoreError;

/// The longest time for which it may be turned on at once.
pub const LONGEST: Duration = Duration::from_secs(24 * 60 * 60);

/// Who turned the kill switch on.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct TurnedOn {
    /// When, in ms since the epoch, on the clock of the node that did it.
    pub at_ms: u64,
    /// When it ends, on the same clock.
    pub ends_at_ms: u64,
    /// Who: the caller's name in the access file, or the address that the request came from.
    pub by: String,
    /// What they said about it.
    pub message: String,
}

/// A store that keeps the kill switch. It turns the switch off by itself when its time has passed. A call
/// takes no longer than a decision.
pub trait KillSwitchStore: Clone + Send + Sync + 'static {
    /// Who turned the switch on, and for how long it stays on; `None` if it is off.
    fn kill_switch(
        &self,
    ) -> impl Future<Output = Result<Option<(TurnedOn, Duration)>, StoreError>> + Send;

    /// Turns the switch on for `length`, at least 1 ms; if it is on, this replaces what was known of it.
    /// After [`StoreError::Timeout`] and [`StoreError::Unreachable`] it is unknown whether it did.
    fn turn_on(
        &self,
        by: &TurnedOn,
        length: Duration,
    ) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// Turns the switch off. Errors are as for [`turn_on`](Self::turn_on).
    fn turn_off(&self) -> impl Future<Output = Result<(), StoreError>> + Send;
}
