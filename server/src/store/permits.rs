//! Permits: estimates that were taken from token buckets, and may be settled once.

use std::future::Future;
use std::time::Duration;

use super::{BucketRequest, Store, StoreError};

/// The permit of a grant.
#[derive(Clone, Copy, Debug)]
pub struct PermitKey<'a> {
    /// A request to the bucket that granted the estimate. Its tokens do not matter.
    pub bucket: &'a BucketRequest<'a>,
    /// A random name.
    pub id: &'a str,
}

/// What comes of using a permit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PermitUse {
    /// It is used now, for the first time. It was for so many tokens.
    First(u64),
    /// It was used before.
    Again,
    /// There is none, or its time is over.
    Unknown,
}

/// A store of buckets that keeps permits. A call is atomic, and takes no longer than a decision.
pub trait PermitStore: Store {
    /// Records a permit for so many tokens. It is kept for `within`, used or not. After an error it may be
    /// recorded or not.
    fn record_permit(
        &self,
        permit: &PermitKey<'_>,
        tokens: u64,
        within: Duration,
    ) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// Uses a permit. After [`StoreError::Timeout`] and [`StoreError::Unreachable`] it may be used or not.
    fn use_permit(
        &self,
        permit: &PermitKey<'_>,
    ) -> impl Future<Output = Result<PermitUse, StoreError>> + Send;
}
