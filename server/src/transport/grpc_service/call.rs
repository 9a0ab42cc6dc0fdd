//! Reads calls: first their headers, and then their message.

use std::sync::Arc;

use bytes::Bytes;
use tokio::sync::Semaphore;
use tonic::Status;

use super::super::access_denied;
use super::super::budget::{Account, Budget, HeldBytes};
use super::super::connection::RequestBody;
use super::body::{MessageLimits, read_message, without_prefix};
use super::head::{self, CallHeaders, Method};
use crate::access::{Caller, Guard};

/// Health watches per connection, and as many calls of reflection: enough for every service and
/// caller behind it. A load balancer that needs more watches should use `Check`.
pub(super) const MAX_LONG_CALLS: usize = 16;

/// Unfinished messages to health and reflection, per connection.
pub(super) const MAX_UNFINISHED: usize = 16;

/// What the requests of one connection share.
pub(super) struct ConnectionState {
    /// Bytes of requests that are incomplete or being decided.
    pub(super) incoming: Arc<Account>,
    /// Bytes of decisions in progress and of unsent answers.
    pub(super) outgoing: Arc<Account>,
    pub(super) unfinished: Semaphore,
    watches: LongCallCount,
    reflections: LongCallCount,
}

impl ConnectionState {
    pub(super) fn new(budget: &Budget) -> Self {
        Self {
            incoming: budget.account(),
            outgoing: budget.account(),
            unfinished: Semaphore::new(MAX_UNFINISHED),
            watches: LongCallCount::default(),
            reflections: LongCallCount::default(),
        }
    }
}

/// Counts the calls of one connection that last as long as their client wants.
#[derive(Default)]
struct LongCallCount(Arc<()>);

/// Such a call, counted until it is dropped.
struct LongCallSlot(#[expect(dead_code, reason = "it is counted")] Arc<()>);

impl LongCallCount {
    fn add(&self) -> Result<LongCallSlot, Status> {
        if Arc::strong_count(&self.0) > MAX_LONG_CALLS {
            let text = format!("this connection has {MAX_LONG_CALLS} calls to this method already");
            return Err(Status::resource_exhausted(text));
        }
        Ok(LongCallSlot(Arc::clone(&self.0)))
    }
}

/// A call, as its headers describe it.
pub(super) struct Call {
    pub(super) method: Method,
    pub(super) head: CallHeaders,
    pub(super) caller: Caller,
    _long_call: Option<LongCallSlot>,
}

/// Reads the method, caller and options of a call. An error says why the call is refused.
pub(super) fn read_headers(
    parts: &http::request::Parts,
    guard: &mut Guard,
    state: &ConnectionState,
) -> Result<Call, Status> {
    let path = parts.uri.path();
    // Health needs no identity: load balancers and orchestrators ask for it. `Method::at` rejects
    // all other paths below it.
    let caller = match path.starts_with(head::HEALTH) {
        true => Caller::UNRESTRICTED,
        false => guard.caller(&parts.headers).map_err(access_denied)?,
    };
    let method = Method::at(path)?;
    if let Method::Lease(_) = method {
        // Lease requests are long: buffer none for a caller that may lease nothing.
        caller.may_lease_any().map_err(access_denied)?;
    }
    let head = CallHeaders::read(&parts.headers)?;
    let long_call = match method {
        Method::Watch => Some(state.watches.add()?),
        Method::Reflection => Some(state.reflections.add()?),
        _ => None,
    };
    Ok(Call { method, head, caller, _long_call: long_call })
}

/// Reads the message of a call: decompressed, with its gRPC prefix.
pub(super) async fn read_request(
    call: &Call,
    body: &mut RequestBody,
    state: &ConnectionState,
) -> Result<(Bytes, HeldBytes), Status> {
    let (gzip, account) = (call.head.gzip, &state.incoming);
    let limits = match call.method {
        Method::Allow => MessageLimits::ALLOW,
        Method::Tenants(_) => MessageLimits::TENANTS,
        Method::RateLimit => MessageLimits::RATE_LIMIT,
        Method::KeepAlive => MessageLimits::KEEP_ALIVE,
        Method::Lease(_) | Method::Discovery => MessageLimits::LEASES,
        Method::Watch => MessageLimits::WATCH,
        Method::Check | Method::Reflection => MessageLimits::SMALL,
    };
    let unfinished = (!call.method.is_counted()).then_some(&state.unfinished);
    let (message, held) = read_message(body, gzip, limits, account, unfinished).await?;
    without_prefix(message.clone())?;
    Ok((message, held))
}
