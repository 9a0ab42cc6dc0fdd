//! What is asked for.

use std::time::Duration;

use tollgate_proto::quotaservice::AllowRequest;
use tollgate_proto::quotaservice::allow_request::Criticality;

/// A request for tokens of a bucket.
///
/// ```
/// use std::time::Duration;
/// use tollgate_client::Request;
///
/// let request = Request::new("db", "reads").tokens(5).max_wait(Duration::from_secs(1));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub struct Request<'a> {
    pub(crate) namespace: &'a str,
    pub(crate) bucket: &'a str,
    pub(crate) tokens: u64,
    pub(crate) max_wait: Option<Duration>,
    pub(crate) deadline: Option<Duration>,
    pub(crate) is_critical: bool,
}

impl<'a> Request<'a> {
    /// One token of the bucket `bucket` of `namespace`.
    pub const fn new(namespace: &'a str, bucket: &'a str) -> Self {
        Self { namespace, bucket, tokens: 1, max_wait: None, deadline: None, is_critical: true }
    }

    /// The number of tokens; 0 means 1.
    pub const fn tokens(self, tokens: u64) -> Self {
        Self { tokens: if tokens == 0 { 1 } else { tokens }, ..self }
    }

    /// The longest wait for the tokens, in whole milliseconds. Without it the bucket's own limit
    /// decides. [`allow`](crate::Client::allow) accepts no longer wait than the bucket's own limit
    /// in any case; [`acquire`](crate::Client::acquire) asks again until this time is over.
    pub const fn max_wait(self, max_wait: Duration) -> Self {
        Self { max_wait: Some(max_wait), ..self }
    }

    /// How long to wait for an answer, instead of the client's
    /// [`deadline`](crate::Builder::deadline). The wait for the tokens comes on top of it.
    pub const fn deadline(self, deadline: Duration) -> Self {
        Self { deadline: Some(deadline), ..self }
    }

    /// Leaves what the bucket keeps in reserve for critical requests.
    pub const fn not_critical(self) -> Self {
        Self { is_critical: false, ..self }
    }

    /// The namespace.
    pub fn namespace(&self) -> &'a str {
        self.namespace
    }

    /// The bucket.
    pub fn bucket(&self) -> &'a str {
        self.bucket
    }

    pub(crate) fn message(&self) -> AllowRequest {
        let criticality = match self.is_critical {
            true => Criticality::Critical,
            false => Criticality::NotCritical,
        };
        AllowRequest {
            namespace: self.namespace.to_owned(),
            bucket_name: self.bucket.to_owned(),
            tokens_requested: i64::try_from(self.tokens).unwrap_or(i64::MAX),
            max_wait_millis_override: self.max_wait.map_or(0, millis),
            max_wait_time_override: self.max_wait.is_some(),
            settle: false,
            criticality: criticality.into(),
        }
    }
}

/// Whole milliseconds, rounded down: a wait is never longer than the caller said.
fn millis(time: Duration) -> i64 {
    i64::try_from(time.as_millis()).unwrap_or(i64::MAX)
}
