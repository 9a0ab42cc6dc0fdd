//! What is asked for on behalf of a domain.

use std::ops::RangeInclusive;
use std::time::Duration;

use tollgate_proto::tollgate::v1::ThrottleRequest;

use crate::decision::Error;

/// How long copies stay held after the client is killed or cut off, if it does not say otherwise.
const TTL: Duration = Duration::from_secs(10);

/// How long copies can stay held without a renewal.
const TTLS: RangeInclusive<Duration> = Duration::from_secs(1)..=Duration::from_secs(86_400);

/// A request for hits or copies of a resource on behalf of a domain: a user, or a tenant.
///
/// ```
/// use std::time::Duration;
/// use tollgate_client::TenantRequest;
///
/// let request = TenantRequest::new("sandbox", "acme").copies(10).max_wait(Duration::from_secs(5));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub struct TenantRequest<'a> {
    pub(crate) resource: &'a str,
    pub(crate) domain: &'a str,
    pub(crate) copies: u64,
    min_copies: Option<u64>,
    pub(crate) max_wait: Duration,
    pub(crate) deadline: Option<Duration>,
    pub(crate) ttl: Duration,
}

impl<'a> TenantRequest<'a> {
    /// One hit or copy of `resource` for `domain`.
    pub const fn new(resource: &'a str, domain: &'a str) -> Self {
        Self {
            resource,
            domain,
            copies: 1,
            min_copies: None,
            max_wait: Duration::ZERO,
            deadline: None,
            ttl: TTL,
        }
    }

    /// The number of hits or copies; 0 means 1.
    pub const fn copies(self, copies: u64) -> Self {
        Self { copies: if copies == 0 { 1 } else { copies }, ..self }
    }

    /// Accepts fewer, down to so many; 0 means 1. Without it, fewer than
    /// [`copies`](Self::copies) are not granted.
    pub const fn min_copies(self, min_copies: u64) -> Self {
        Self { min_copies: Some(if min_copies == 0 { 1 } else { min_copies }), ..self }
    }

    /// Asks again until this time is over; without it, asks once.
    pub const fn max_wait(self, max_wait: Duration) -> Self {
        Self { max_wait, ..self }
    }

    /// How long to wait for an answer, instead of the client's
    /// [`deadline`](crate::Builder::deadline). [`max_wait`](Self::max_wait) comes on top of it.
    pub const fn deadline(self, deadline: Duration) -> Self {
        Self { deadline: Some(deadline), ..self }
    }

    /// How long copies stay held after the client is killed, or cut off from the nodes: from a
    /// second to a day; default: 10 seconds. Not used for hits.
    pub const fn ttl(self, ttl: Duration) -> Self {
        Self { ttl, ..self }
    }

    /// The resource.
    pub fn resource(&self) -> &'a str {
        self.resource
    }

    /// The domain.
    pub fn domain(&self) -> &'a str {
        self.domain
    }

    /// The most hits or copies that are asked for.
    pub fn most(&self) -> u64 {
        self.copies
    }

    /// The fewest hits or copies that are accepted, which a fallback grants.
    pub fn fewest(&self) -> u64 {
        self.min_copies.unwrap_or(self.copies)
    }

    /// A mistake that no node needs to find.
    pub(crate) fn check(&self) -> Result<(), Error> {
        if self.fewest() > self.copies {
            let text =
                format!("min_copies is {}, more than copies: {}", self.fewest(), self.copies);
            return Err(Error::Invalid(text));
        }
        if !TTLS.contains(&self.ttl) {
            return Err(Error::Invalid(format!("ttl is {:?}: allowed are 1s to 1day", self.ttl)));
        }
        Ok(())
    }

    pub(crate) fn hits_message(&self) -> ThrottleRequest {
        ThrottleRequest {
            resource: self.resource.to_owned(),
            domain: self.domain.to_owned(),
            copies: count(self.copies),
            min_copies: count(self.fewest()),
        }
    }
}

/// A count on the wire.
pub(crate) fn count(copies: u64) -> i64 {
    i64::try_from(copies).unwrap_or(i64::MAX)
}
