//! Requests for hits of a domain on a resource.

use std::future::Future;

use super::StoreError;
use crate::domain::names::CallerId;
use crate::domain::throttle::{Decision, HitLimits, Standing};

/// A request for hits.
#[derive(Clone, Copy, Debug)]
pub struct HitRequest<'a> {
    /// The caller's id; `None` for an unnamed caller.
    pub caller: Option<CallerId>,
    /// The resource.
    pub resource: &'a str,
    /// The index of its template in the limits.
    pub template: usize,
    /// The domain that the hits are for.
    pub domain: &'a str,
    /// What limits the domain.
    pub limits: HitLimits<'a>,
    /// The most hits to grant, up to 2^63 - 1.
    pub copies: u64,
    /// The least hits to grant, from 1 to `copies`.
    pub min_copies: u64,
}

/// A store of the hits of domains on resources.
pub trait ThrottleStore: Clone + Send + Sync + 'static {
    /// Decides a request atomically, within the store's deadline. A hit that was granted counts even if
    /// its answer is lost.
    fn request_hits(
        &self,
        request: &HitRequest<'_>,
    ) -> impl Future<Output = Result<Decision, StoreError>> + Send;

    /// Looks at what the domain of a request stands at, and what the request would be answered. Changes
    /// nothing.
    fn look_at_hits(
        &self,
        request: &HitRequest<'_>,
    ) -> impl Future<Output = Result<Standing, StoreError>> + Send;

    /// Forgets the hits of the domain of a request, except that they count among those of all domains.
    /// Returns what it stood at. After [`StoreError::Timeout`] and [`StoreError::Unreachable`] it is unknown
    /// whether they are forgotten.
    fn forget_hits(
        &self,
        request: &HitRequest<'_>,
    ) -> impl Future<Output = Result<Standing, StoreError>> + Send;
}
