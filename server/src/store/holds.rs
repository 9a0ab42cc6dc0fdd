//! Holds of copies of resources.

use std::future::Future;

use super::StoreError;
use crate::domain::holds::{
    HoldBounds, HoldLimits, HoldList, LiveSession, NewHold, Reservation, Transfer, Transferred,
};
use crate::domain::names::CallerId;

/// The resource that an operation is about, and who asks.
#[derive(Clone, Copy, Debug)]
pub struct HoldTarget<'a> {
    /// The caller's id; `None` for an unnamed caller.
    pub caller: Option<CallerId>,
    /// The resource.
    pub resource: &'a str,
    /// The index of its template in the limits; `usize::MAX` without a template.
    pub template: usize,
}

/// A store of holds. Each operation is atomic, takes no longer than the store's deadline, and may be made
/// again if its answer is lost; it then changes nothing more. The functions of
/// [`Holds`](crate::domain::holds::Holds) say what the operations do.
pub trait HoldStore: Clone + Send + Sync + 'static {
    /// Makes a hold.
    fn reserve(
        &self,
        target: &HoldTarget<'_>,
        new: &NewHold<'_>,
        limits: &HoldLimits<'_>,
    ) -> impl Future<Output = Result<Reservation, StoreError>> + Send;

    /// Cuts a hold to `keep` copies, and returns those left.
    fn release_hold(
        &self,
        target: &HoldTarget<'_>,
        session: &str,
        hold: &str,
        keep: u64,
    ) -> impl Future<Output = Result<u64, StoreError>> + Send;

    /// Moves a hold to another session.
    fn transfer(
        &self,
        target: &HoldTarget<'_>,
        transfer: &Transfer<'_>,
        bounds: &HoldBounds,
    ) -> impl Future<Output = Result<Transferred, StoreError>> + Send;

    /// Renews a session; `None` if it does not live.
    fn keep_alive(
        &self,
        target: &HoldTarget<'_>,
        session: &str,
        ttl_ms: Option<i64>,
    ) -> impl Future<Output = Result<Option<LiveSession>, StoreError>> + Send;

    /// Ends a session, and returns the copies that it held.
    fn end_session(
        &self,
        target: &HoldTarget<'_>,
        session: &str,
    ) -> impl Future<Output = Result<u64, StoreError>> + Send;

    /// Lists the sessions, and what `groups` hold.
    fn list_holds(
        &self,
        target: &HoldTarget<'_>,
        groups: &[&str],
    ) -> impl Future<Output = Result<HoldList, StoreError>> + Send;
}
