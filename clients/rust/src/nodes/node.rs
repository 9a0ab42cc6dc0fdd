//! One node: its connection, its circuit breaker, and the task that checks it.

use std::error::Error as _;
use std::fmt::Write as _;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use arc_swap::ArcSwap;
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, timeout, timeout_at};
use tollgate_proto::quotaservice::quota_service_client::QuotaServiceClient;
use tollgate_proto::quotaservice::{AllowRequest, AllowResponse};
use tonic::{Code, Status};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use tonic_types::StatusExt as _;

use super::circuit::{Circuit, Pass, Report, State};
use crate::connection::{AuthChannel, Target};
use crate::decision::NoAnswer;
use crate::metrics;

/// Time limit of each attempt to connect.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// Time limit of a check, including the connection.
const CHECK_TIMEOUT: Duration = Duration::from_secs(2);

/// How long an overloaded node is left alone that does not say how long.
const OVERLOAD_PAUSE: Duration = Duration::from_millis(200);

pub(super) struct Node {
    target: Target,
    /// The target, for log messages and metrics.
    name: String,
    channel: ArcSwap<AuthChannel>,
    circuit: Mutex<Circuit>,
    /// The circuit was opened.
    opened: Notify,
    /// Told of each change of the circuit's state.
    changed: watch::Sender<()>,
}

/// Why a call has no answer.
pub(super) enum Failure {
    /// The request is wrong; another node would say so, too.
    Invalid(String),
    /// Another node may answer.
    Retry(NoAnswer),
    /// There is no time left, or another node would say the same.
    Final(NoAnswer),
}

impl Node {
    pub(super) fn new(target: Target, changed: watch::Sender<()>) -> Self {
        Self {
            name: target.to_string(),
            channel: ArcSwap::from_pointee(target.channel(CONNECT_TIMEOUT)),
            target,
            circuit: Mutex::new(Circuit::new()),
            opened: Notify::new(),
            changed,
        }
    }

    pub(super) fn state(&self) -> State {
        self.circuit().state()
    }

    pub(super) fn is_quiet(&self, now: Instant) -> bool {
        self.circuit().is_quiet(now)
    }

    fn channel(&self) -> AuthChannel {
        AuthChannel::clone(&self.channel.load())
    }

    fn circuit(&self) -> MutexGuard<'_, Circuit> {
        self.circuit.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The permission to call the node now.
    pub(super) fn attempt(self: &Arc<Self>, now: Instant) -> Option<Attempt> {
        let pass = self.circuit().pass(now)?;
        Some(Attempt { node: Arc::clone(self), pass, report: Report::Cancelled })
    }

    /// Checks the node, for ever: see [`Circuit::pause`].
    pub(super) async fn keep_checked(&self) {
        loop {
            // When the circuit opens, the pause begins anew.
            while timeout(self.pause(), self.opened.notified()).await.is_ok() {}
            if self.circuit().needs_no_check() {
                continue;
            }
            // The old connection may be one whose server has vanished without closing it.
            if self.state() == State::Down {
                self.channel.store(Arc::new(self.target.channel(CONNECT_TIMEOUT)));
            }
            let checked = self.check().await;
            let before = self.state();
            self.circuit().checked(checked.is_ok());
            match (before, self.state(), checked) {
                (State::Down, State::Down, _) => {}
                (_, State::Down, Err(reason)) => self.log_opened(&reason),
                (State::Down, ..) => {
                    tracing::info!(node = self.name, "the tollgate node answers again");
                }
                _ => {}
            }
            metrics::node_is_called(&self.name, self.state() != State::Down);
            self.changed.send_replace(());
        }
    }

    fn pause(&self) -> Duration {
        self.circuit().pause(rand::random())
    }

    fn log_opened(&self, reason: &str) {
        let node = &self.name;
        tracing::warn!(node, reason, "the tollgate node is not called until it answers a check");
    }

    /// Whether the node answers, and does not say that it is about to stop; or why not.
    async fn check(&self) -> Result<(), String> {
        let mut client = HealthClient::new(self.channel());
        let check = client.check(HealthCheckRequest { service: String::new() });
        match timeout(CHECK_TIMEOUT, check).await {
            Ok(Ok(answer)) => match answer.into_inner().status() {
                ServingStatus::Serving => Ok(()),
                status => Err(status.as_str_name().to_owned()),
            },
            // A load balancer, or an older server, without that service. The others are of callers
            // without the right to ask, or too many.
            Ok(Err(status)) => match status.code() {
                Code::Unimplemented
                | Code::Unauthenticated
                | Code::PermissionDenied
                | Code::ResourceExhausted => Ok(()),
                code => Err(format!("{code:?}: {}", causes(&status))),
            },
            Err(_) => Err(format!("no answer within {CHECK_TIMEOUT:?}")),
        }
    }
}

/// The permission for one call to a node. Dropped without a result, it counts as cancelled.
pub(super) struct Attempt {
    node: Arc<Node>,
    pass: Pass,
    report: Report,
}

impl Attempt {
    pub(super) fn node(&self) -> &Arc<Node> {
        &self.node
    }

    /// Asks the node, until `deadline`.
    pub(super) async fn allow(
        mut self,
        request: AllowRequest,
        deadline: Instant,
    ) -> Result<AllowResponse, Failure> {
        let mut client = QuotaServiceClient::new(self.node.channel());
        let (report, result) = match timeout_at(deadline, client.allow(request)).await {
            Ok(Ok(answer)) => (Report::Answered, Ok(answer.into_inner())),
            Ok(Err(status)) => {
                let (report, failure) = failure(status);
                (report, Err(failure))
            }
            Err(_) => (Report::Failed, Err(Failure::Final(NoAnswer::Timeout))),
        };
        self.report = report;
        result
    }
}

impl Drop for Attempt {
    fn drop(&mut self) {
        let Self { node, pass, report } = self;
        if node.circuit().report(*pass, *report, Instant::now()) {
            node.log_opened("calls have failed");
            metrics::node_is_called(&node.name, false);
            node.opened.notify_one();
        }
    }
}

fn failure(status: Status) -> (Report, Failure) {
    let failed = |status: &Status| NoAnswer::Failed {
        code: status.code(),
        message: status.message().to_owned(),
    };
    match status.code() {
        Code::InvalidArgument => (Report::Answered, Failure::Invalid(status.message().to_owned())),
        // About the caller, not about the node.
        Code::Unauthenticated | Code::PermissionDenied => {
            (Report::Answered, Failure::Final(failed(&status)))
        }
        Code::ResourceExhausted => {
            let pause = status.get_details_retry_info().and_then(|info| info.retry_delay);
            let pause = pause.unwrap_or(OVERLOAD_PAUSE);
            (Report::Overloaded(pause), Failure::Retry(NoAnswer::Overloaded))
        }
        _ if is_connect_error(&status) => {
            (Report::Unreachable, Failure::Retry(NoAnswer::Unreachable))
        }
        // A connection that broke, or a node that stops. The request may have been decided; the
        // tokens are lost then.
        Code::Unavailable | Code::Unknown | Code::Cancelled => {
            (Report::Failed, Failure::Retry(failed(&status)))
        }
        _ => (Report::Failed, Failure::Final(failed(&status))),
    }
}

/// The message of a status, and those of its causes.
fn causes(status: &Status) -> String {
    let mut text = status.message().to_owned();
    let mut source = status.source();
    while let Some(error) = source {
        let _ = write!(text, ": {error}");
        source = error.source();
    }
    text
}

/// Whether no connection could be made.
fn is_connect_error(status: &Status) -> bool {
    let mut source = status.source();
    while let Some(error) = source {
        if error.is::<tonic::ConnectError>() {
            return true;
        }
        source = error.source();
    }
    false
}
