//! Sends jobs of any kind to the server that has their slot, waits for the answers, and follows the
//! redirects of a cluster.

use std::sync::Arc;
use std::time::Duration;

use redis::{Cmd, Value};
use smallvec::SmallVec;
use tokio::time::Instant;

use super::Inner;
use super::cluster::routes::{Lanes, Routes};
use super::keys::ServerKeys;
use super::lanes::job::{
    CommandJob, Failure, Job, Redirect, ReplyReceiver, ReplySender, SendMode, SharedJob,
};
use super::owner::Owner;
use super::wire::batch::EncodedRequest;
use super::wire::parts::Part;
use super::wire::script::Scripted;
use crate::store::{Outcome, StoreError};

/// The pause before a call is sent again whose keys are, for a moment, on two servers.
const SPLIT_PAUSE: Duration = Duration::from_millis(1);

/// How the jobs of one call of the store are sent: by which routes, and whether those to one server
/// must stay in their order.
pub(super) struct SendPlan {
    pub(super) routes: Arc<Routes>,
    in_order: bool,
}

/// The server that a command is sent to, and how.
#[derive(Clone, Copy)]
pub(super) struct Target<'a> {
    pub(super) server: &'a ServerKeys,
    pub(super) mode: SendMode,
}

/// Where a job was sent last.
struct Attempt {
    lanes: Arc<Lanes>,
    mode: SendMode,
    /// The version of the routes that it was sent by.
    routes_version: u64,
}

/// A job, and the receiver of its answer.
pub(super) type PendingJob<T> = (Job, ReplyReceiver<T>);

/// A job that was sent: the lanes that it went to, and the receiver of its answer.
pub(super) type Sent<T> = Result<(Arc<Lanes>, ReplyReceiver<T>), StoreError>;

pub(super) fn bucket_job(
    request: EncodedRequest,
    mode: SendMode,
    deadline: Instant,
) -> PendingJob<Outcome> {
    let (reply_to, answer) = ReplySender::new(deadline);
    (Job::Bucket(SharedJob { request: Box::new(request), mode, reply_to }), answer)
}

fn part_job(part: &Arc<Part>, mode: SendMode, deadline: Instant) -> PendingJob<Value> {
    let (reply_to, answer) = ReplySender::new(deadline);
    let request = Arc::clone(part);
    (Job::Part(SharedJob { request, mode, reply_to }), answer)
}

fn command_job(
    cmd: Cmd,
    owner: Owner,
    script: Option<Scripted>,
    mode: SendMode,
    deadline: Instant,
) -> PendingJob<Value> {
    let (reply_to, answer) = ReplySender::new(deadline);
    (Job::Command(CommandJob { cmd, owner, script, mode, reply_to }), answer)
}

/// Waits for a server's answer up to the deadline: the answer, or the server to ask instead.
async fn answered<T>(
    lanes: &Lanes,
    answer: ReplyReceiver<T>,
    deadline: Instant,
) -> Result<Result<T, Redirect>, StoreError> {
    match tokio::time::timeout_at(deadline, answer).await {
        Ok(Ok(Ok(answer))) => Ok(Ok(answer)),
        Ok(Ok(Err(Failure::Store(error)))) => Err(error),
        Ok(Ok(Err(Failure::Redirect(redirect)))) => Ok(Err(redirect)),
        // A lane drops the jobs whose time is up.
        Ok(Err(_)) if Instant::now() >= deadline => Err(out_of_time(lanes)),
        Ok(Err(_)) => Err(StoreError::Unreachable),
        Err(_) => Err(out_of_time(lanes)),
    }
}

/// The error of a job whose deadline has passed, which counts against its server.
pub(super) fn out_of_time(lanes: &Lanes) -> StoreError {
    lanes.shard.health.count_timeouts(1);
    StoreError::Timeout
}

impl Inner {
    pub(super) fn plan(&self, in_order: bool) -> SendPlan {
        SendPlan { routes: self.router.routes(&self.connector), in_order }
    }

    /// Sends a job to the server that has a slot. Fails at once if that server is down.
    pub(super) fn send<T>(
        &self,
        plan: &SendPlan,
        slot: u16,
        job: impl FnOnce(&ServerKeys, SendMode) -> PendingJob<T>,
    ) -> Sent<T> {
        let Some(lanes) = plan.routes.lanes(slot) else {
            self.connector
                .health()
                .record_unknown_master(1, &format_args!("nobody has slot {slot}"));
            return Err(StoreError::Unreachable);
        };
        if !lanes.shard.health.is_up() {
            return Err(StoreError::Unreachable);
        }
        let (job, answer) = job(&lanes.shard.keys, SendMode::Together);
        lanes.push(job, plan.in_order);
        Ok((Arc::clone(lanes), answer))
    }

    /// Waits for an answer up to the deadline, and follows redirects of a cluster. `job` makes the
    /// same job again.
    pub(super) async fn await_answer<T>(
        &self,
        plan: &SendPlan,
        slot: u16,
        sent: Sent<T>,
        deadline: Instant,
        job: impl Fn(&ServerKeys, SendMode) -> PendingJob<T>,
    ) -> Result<T, StoreError> {
        let (lanes, answer) = sent?;
        match answered(&lanes, answer, deadline).await? {
            Ok(answer) => Ok(answer),
            Err(redirect) => {
                let routes_version = plan.routes.version();
                let first = Attempt { lanes, mode: SendMode::Together, routes_version };
                Box::pin(self.follow_redirects(plan, slot, first, redirect, deadline, job)).await
            }
        }
    }

    /// Follows redirects, from the first one on.
    async fn follow_redirects<T>(
        &self,
        plan: &SendPlan,
        slot: u16,
        mut attempt: Attempt,
        mut redirect: Redirect,
        deadline: Instant,
        job: impl Fn(&ServerKeys, SendMode) -> PendingJob<T>,
    ) -> Result<T, StoreError> {
        loop {
            // The time may have run out between two servers.
            if Instant::now() >= deadline {
                return Err(out_of_time(&attempt.lanes));
            }
            attempt = self.next_attempt(slot, attempt, redirect, deadline).await?;
            let lanes = &attempt.lanes;
            let (job, answer) = job(&lanes.shard.keys, attempt.mode);
            lanes.push(job, plan.in_order);
            redirect = match answered(lanes, answer, deadline).await? {
                Ok(answer) => return Ok(answer),
                Err(redirect) => redirect,
            };
        }
    }

    /// Where a job goes after a redirect.
    async fn next_attempt(
        &self,
        slot: u16,
        last: Attempt,
        redirect: Redirect,
        deadline: Instant,
    ) -> Result<Attempt, StoreError> {
        let Attempt { lanes, mode, routes_version } = last;
        let at = |address: &str| self.router.lanes_at(&self.connector, &lanes, address, slot);
        match redirect {
            // A call of its own declares its keys, so the server says where they are.
            Redirect::Unknown if mode == SendMode::Together => {
                Ok(Attempt { lanes, mode: SendMode::Alone, routes_version })
            }
            Redirect::Unknown => {
                // The refresh continues for other requests if this one runs out of time.
                let refreshed = self.connector.refresh_aside(routes_version);
                if tokio::time::timeout_at(deadline, refreshed).await.is_err() {
                    return Err(out_of_time(&lanes));
                }
                let routes = self.router.routes(&self.connector);
                let lanes = routes.lanes(slot).cloned().ok_or(StoreError::Unreachable)?;
                Ok(Attempt { lanes, mode: SendMode::Alone, routes_version: routes.version() })
            }
            Redirect::Moved(address) => {
                // For later requests: this one knows the address already.
                self.connector.refresh_soon(routes_version);
                Ok(Attempt { lanes: at(&address)?, mode: SendMode::Alone, routes_version })
            }
            Redirect::Ask(address) => {
                Ok(Attempt { lanes: at(&address)?, mode: SendMode::Asking, routes_version })
            }
            Redirect::TryAgain => {
                tokio::time::sleep(SPLIT_PAUSE).await;
                Ok(Attempt { lanes, mode, routes_version })
            }
        }
    }

    /// Sends one command for each slot, in one batch for each server, and returns their replies.
    /// `cmd` makes the command for a position in `slots`. The commands' owner is
    /// [`Owner::INTERNAL`].
    pub(super) async fn values(
        &self,
        slots: &[u16],
        script: Option<Scripted>,
        cmd: impl Fn(usize, Target<'_>) -> Cmd,
    ) -> SmallVec<[Result<Value, StoreError>; 1]> {
        self.values_of(|_| Owner::INTERNAL, slots, script, cmd).await
    }

    /// The same with the owner of each command.
    pub(super) async fn values_of(
        &self,
        owner: impl Fn(usize) -> Owner,
        slots: &[u16],
        script: Option<Scripted>,
        cmd: impl Fn(usize, Target<'_>) -> Cmd,
    ) -> SmallVec<[Result<Value, StoreError>; 1]> {
        let deadline = Instant::now() + self.connector.timeout();
        let plan = self.plan(false);
        let job = |at: usize, server: &ServerKeys, mode| {
            command_job(cmd(at, Target { server, mode }), owner(at), script, mode, deadline)
        };
        let send = |(at, &slot): (usize, &u16)| {
            self.send(&plan, slot, |server, mode| job(at, server, mode))
        };
        let waiting: SmallVec<[_; 1]> = slots.iter().enumerate().map(send).collect();
        let mut values = SmallVec::with_capacity(slots.len());
        for ((at, &slot), sent) in slots.iter().enumerate().zip(waiting) {
            let again = |server: &ServerKeys, mode| job(at, server, mode);
            values.push(self.await_answer(&plan, slot, sent, deadline, again).await);
        }
        values
    }

    /// Sends a part of a call about a slot, and returns its reply.
    pub(super) async fn value_of_part(&self, slot: u16, part: Part) -> Result<Value, StoreError> {
        let deadline = Instant::now() + self.connector.timeout();
        let (plan, part) = (self.plan(false), Arc::new(part));
        let job = |_: &ServerKeys, mode| part_job(&part, mode, deadline);
        let sent = self.send(&plan, slot, job);
        self.await_answer(&plan, slot, sent, deadline, job).await
    }

    /// Sends a command to each server, and returns all replies. Fails if any of them fails.
    pub(super) async fn of_each(
        &self,
        cmd: impl Fn(&ServerKeys) -> Cmd,
    ) -> Result<Vec<Value>, StoreError> {
        let slots = self.router.routes(&self.connector).one_of_each();
        let replies = self.values(&slots, None, |_, target| cmd(target.server)).await;
        if replies.is_empty() {
            return Err(StoreError::Unreachable);
        }
        replies.into_iter().collect()
    }
}
