//! A tollgate in memory, for unit tests of what uses a [`Client`](crate::Client).

mod tenants;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;
use tollgate_proto::doorman::{GetCapacityRequest, GetCapacityResponse, Lease, ResourceResponse};
use tollgate_proto::quotaservice::allow_response::Status;
use tollgate_proto::quotaservice::{AllowRequest, AllowResponse};

use self::tenants::Tenants;
use crate::decision::{Error, NoAnswer};
use crate::fallback::LocalRate;

/// Answers requests in place of nodes, so that unit tests need none. Clones share the answers.
///
/// ```
/// # tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(async {
/// use std::time::Duration;
/// use tollgate_client::{Fake, FakeAnswer, Request};
///
/// let fake = Fake::new(FakeAnswer::Grant);
/// fake.answer("db", "reads", FakeAnswer::Refuse(Some(Duration::from_secs(2))));
/// let client = fake.client().build().unwrap();
///
/// assert!(client.acquire(Request::new("db", "writes")).await.is_ok());
/// let refused = client.acquire(Request::new("db", "reads").tokens(3)).await.unwrap_err();
/// assert_eq!(refused.retry_after(), Some(Duration::from_secs(2)));
/// assert_eq!(fake.asked("db", "reads"), [3]);
/// # });
/// ```
#[derive(Clone, Debug)]
pub struct Fake(Arc<Mutex<State>>);

/// How a [`Fake`] answers.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum FakeAnswer {
    /// Grants the tokens.
    Grant,
    /// Grants the tokens after a wait, if the request accepts it.
    GrantAfter(Duration),
    /// Refuses the request, and says when to try again.
    Refuse(Option<Duration>),
    /// Grants tokens at a rate.
    Rate(LocalRate),
    /// There is no such bucket or resource.
    NoBucket,
    /// The request is invalid.
    Invalid,
    /// No node answers: what happens next is up to the client's fallback.
    NoNode,
}

#[derive(Debug)]
struct State {
    default: FakeAnswer,
    answers: HashMap<(String, String), FakeAnswer>,
    asked: Vec<AllowRequest>,
    capacities: HashMap<String, f64>,
    tenants: Tenants,
}

impl Fake {
    /// Answers all requests in the same way, until told otherwise.
    pub fn new(default: FakeAnswer) -> Self {
        Self(Arc::new(Mutex::new(State {
            default,
            answers: HashMap::new(),
            asked: Vec::new(),
            capacities: HashMap::new(),
            tenants: Tenants::default(),
        })))
    }

    /// Sets the answer for one bucket.
    pub fn answer(&self, namespace: &str, bucket: &str, answer: FakeAnswer) {
        let bucket = (namespace.to_owned(), bucket.to_owned());
        self.state().answers.insert(bucket, answer);
    }

    /// The numbers of tokens that a bucket was asked for, in order. Requests that the client
    /// answered by itself are not among them.
    pub fn asked(&self, namespace: &str, bucket: &str) -> Vec<u64> {
        let state = self.state();
        let of_bucket =
            |one: &&AllowRequest| one.namespace == namespace && one.bucket_name == bucket;
        let tokens = |one: &AllowRequest| one.tokens_requested.try_into().unwrap_or(0);
        state.asked.iter().filter(of_bucket).map(tokens).collect()
    }

    pub(crate) fn allow(&self, request: AllowRequest) -> Result<AllowResponse, Error> {
        let mut state = self.state();
        let bucket = (request.namespace.clone(), request.bucket_name.clone());
        let answer = state.answers.get(&bucket).unwrap_or(&state.default).clone();
        let tokens = request.tokens_requested;
        let max_wait = request.max_wait_time_override.then_some(request.max_wait_millis_override);
        state.asked.push(request);
        let granted = |wait_millis| AllowResponse {
            tokens_granted: tokens,
            wait_millis,
            ..AllowResponse::default()
        };
        let refused = |status: Status, retry_after: Option<Duration>| AllowResponse {
            status: status.into(),
            retry_after_millis: retry_after.map_or(0, millis_up),
            ..AllowResponse::default()
        };
        Ok(match answer {
            FakeAnswer::Grant => granted(0),
            FakeAnswer::GrantAfter(wait) => {
                let wait = millis_up(wait);
                match max_wait.is_none_or(|max| wait <= max) {
                    true => granted(wait),
                    false => {
                        let early = max_wait.unwrap_or(0).max(0);
                        let retry_after = u64::try_from(wait - early).unwrap_or(0);
                        let retry_after = Some(Duration::from_millis(retry_after));
                        refused(Status::RejectedTimeout, retry_after)
                    }
                }
            }
            FakeAnswer::Refuse(retry_after) => refused(Status::RejectedTimeout, retry_after),
            FakeAnswer::Rate(rate) => {
                match rate.take(tokens.try_into().unwrap_or(u64::MAX), Instant::now()) {
                    Ok(()) => granted(0),
                    Err(retry_after) => refused(Status::RejectedTimeout, retry_after),
                }
            }
            FakeAnswer::NoBucket => refused(Status::RejectedNoBucket, None),
            FakeAnswer::Invalid => refused(Status::RejectedInvalidRequest, None),
            FakeAnswer::NoNode => return Err(Error::NoDecision(NoAnswer::Unreachable)),
        })
    }

    /// Sets the capacity of a resource, all of which the client gets if it wants it. Without this,
    /// the client gets all that it wants.
    pub fn capacity(&self, resource: &str, capacity: f64) {
        self.state().capacities.insert(resource.to_owned(), capacity);
    }

    pub(crate) fn get_capacity(
        &self,
        request: &GetCapacityRequest,
    ) -> Result<GetCapacityResponse, Error> {
        let state = self.state();
        if matches!(state.default, FakeAnswer::NoNode) {
            return Err(Error::NoDecision(NoAnswer::Unreachable));
        }
        let response = request.resource.iter().map(|asked| {
            let capacity = state.capacities.get(&asked.resource_id).copied();
            let capacity = capacity.unwrap_or(f64::INFINITY).min(asked.wants);
            ResourceResponse {
                resource_id: asked.resource_id.clone(),
                gets: Lease { expiry_time: i64::MAX, refresh_interval: 1, capacity },
                ..ResourceResponse::default()
            }
        });
        Ok(GetCapacityResponse { response: response.collect(), mastership: None })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whole milliseconds, rounded up: a wait is never shorter than it must be.
fn millis_up(time: Duration) -> i64 {
    i64::try_from(time.as_nanos().div_ceil(1_000_000)).unwrap_or(i64::MAX)
}
