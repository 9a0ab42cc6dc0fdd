//! One node: its connection, its circuit breaker, and the task that checks it.

use std::error::Error as _;
use std::fmt::Write as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use arc_swap::ArcSwap;
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, timeout, timeout_at};
use tonic::{Code, Response, Status};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use tonic_types::StatusExt as _;

use super::circuit::{Circuit, Pass, Report, State};
use crate::connection::{AuthChannel, Target};
use crate::decision::{Error, NoAnswer};
use crate::metrics;

/// Time limit of each attempt to connect.
pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// Time limit of a check, including the connection.
const CHECK_TIMEOUT: Duration = Duration::from_secs(2);

/// The time within which a node should answer: a call that has less says nothing about the node if
/// it gets no answer.
const FAIR_TIME: Duration = Duration::from_millis(50);

/// How long an overloaded node is left alone that does not say how long.
const OVERLOAD_PAUSE: Duration = Duration::from_millis(200);

pub(super) struct Node {
    target: Target,
    /// The target, for log messages.
    name: String,
    /// Whether it is counted as called.
    counted: AtomicBool,
    channel: ArcSwap<AuthChannel>,
    circuit: Mutex<Circuit>,
    /// The circuit was opened.
    opened: Notify,
    /// Told of each change of the circuit's state.
    changed: watch::Sender<()>,
}

/// Why a node is not called now. Of those of several nodes, the last one in this order counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Obstacle {
    Unreachable,
    Overloaded,
    Connecting,
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

impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Invalid(message) => Self::Invalid(message),
            Failure::Retry(failure) | Failure::Final(failure) => Self::NoDecision(failure),
        }
    }
}

impl Node {
    pub(super) fn new(target: Target, changed: watch::Sender<()>) -> Self {
        metrics::nodes(1, 0);
        Self {
            counted: AtomicBool::new(false),
            name: target.to_string(),
            channel: ArcSwap::from_pointee(target.channel(CONNECT_TIMEOUT)),
            target,
            circuit: Mutex::new(Circuit::new()),
            opened: Notify::new(),
            changed,
        }
    }

    fn state(&self) -> State {
        self.circuit().state()
    }

    /// Whether calls go to it.
    pub(super) fn is_called(&self) -> bool {
        self.circuit().is_called()
    }

    /// Counts whether the node is called, and tells who waits for that.
    fn state_has_changed(&self) {
        let circuit = self.circuit();
        let called = circuit.is_called();
        // Under the lock: the last one to count has seen the last state.
        let was_called = self.counted.swap(called, Ordering::Relaxed);
        drop(circuit);
        if called != was_called {
            metrics::nodes(0, if called { 1 } else { -1 });
        }
        self.changed.send_replace(());
    }

    fn channel(&self) -> AuthChannel {
        AuthChannel::clone(&self.channel.load())
    }

    fn circuit(&self) -> MutexGuard<'_, Circuit> {
        self.circuit.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The permission to call the node now.
    pub(super) fn attempt(self: &Arc<Self>, now: Instant) -> Result<Attempt, Obstacle> {
        let mut circuit = self.circuit();
        match circuit.pass(now) {
            Some(pass) => {
                let node = Arc::clone(self);
                Ok(Attempt { node, pass, start: now, report: Report::Cancelled })
            }
            None if circuit.state() == State::Connecting => Err(Obstacle::Connecting),
            None if circuit.is_quiet(now) => Err(Obstacle::Overloaded),
            None => Err(Obstacle::Unreachable),
        }
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
            self.take(self.check().await);
        }
    }

    /// Takes the result of a check.
    pub(super) fn take(&self, checked: Result<(), String>) {
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
        self.state_has_changed();
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

impl Drop for Node {
    fn drop(&mut self) {
        metrics::nodes(-1, -i64::from(*self.counted.get_mut()));
    }
}

/// The permission for one call to a node. Dropped without a result, it counts as cancelled.
pub(super) struct Attempt {
    node: Arc<Node>,
    pass: Pass,
    start: Instant,
    report: Report,
}

impl Attempt {
    pub(super) fn node(&self) -> &Arc<Node> {
        &self.node
    }

    /// Makes a call to the node, until `deadline`.
    pub(super) async fn call<T, F>(
        mut self,
        call: impl FnOnce(AuthChannel) -> F,
        deadline: Instant,
    ) -> Result<T, Failure>
    where
        F: Future<Output = Result<Response<T>, Status>>,
    {
        let (report, result) = match timeout_at(deadline, call(self.node.channel())).await {
            Ok(Ok(answer)) => (Report::Answered, Ok(answer.into_inner())),
            Ok(Err(status)) => {
                let (report, failure) = failure(status);
                (report, Err(failure))
            }
            Err(_) => {
                let had_time = deadline.saturating_duration_since(self.start) >= FAIR_TIME;
                let report = if had_time { Report::Failed } else { Report::Cancelled };
                (report, Err(Failure::Final(NoAnswer::Timeout)))
            }
        };
        self.report = report;
        result
    }
}

impl Drop for Attempt {
    fn drop(&mut self) {
        let Self { node, pass, report, .. } = self;
        if node.circuit().report(*pass, *report, Instant::now()) {
            node.log_opened("calls have failed");
            node.state_has_changed();
            node.opened.notify_one();
        }
    }
}

pub(super) fn failure(status: Status) -> (Report, Failure) {
    let text = || format!("{:?}: {}", status.code(), status.message());
    match status.code() {
        // A resource that has the other kind of limits is a failed precondition. A message that is too
        // long is out of range.
        Code::InvalidArgument | Code::FailedPrecondition | Code::OutOfRange => {
            (Report::Answered, Failure::Invalid(status.message().to_owned()))
        }
        Code::NotFound => {
            let message = status.message().to_owned();
            (Report::Answered, Failure::Final(NoAnswer::NotConfigured(message)))
        }
        // See `tenants`.
        Code::Aborted => {
            let message = status.message().to_owned();
            (Report::Answered, Failure::Retry(NoAnswer::NotConfigured(message)))
        }
        // About the caller, not about the node.
        Code::PermissionDenied => {
            let message = status.message().to_owned();
            (Report::Answered, Failure::Final(NoAnswer::Forbidden(message)))
        }
        Code::Unauthenticated => (Report::Answered, Failure::Final(NoAnswer::Failed(text()))),
        Code::ResourceExhausted => {
            let pause = status.get_details_retry_info().and_then(|info| info.retry_delay);
            let pause = pause.unwrap_or(OVERLOAD_PAUSE);
            (Report::Overloaded(pause), Failure::Retry(NoAnswer::Overloaded))
        }
        _ if is_connect_error(&status) => {
            (Report::Unreachable, Failure::Retry(NoAnswer::Unreachable))
        }
        // A connection that broke, a node that stops, or no node at all. If the request was
        // decided, its tokens are lost.
        _ => (Report::Failed, Failure::Retry(NoAnswer::Failed(text()))),
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
