//! The calls of one round trip: which jobs go into which call, and what a reply means for the jobs
//! of its call.

use redis::{Cmd, RedisError, Value};
use smallvec::SmallVec;
use tokio::time::Instant;

use super::job::{BucketJob, CommandJob, Failure, Job, Redirect, SendMode};
use crate::domain::lease::WorkLimits;
use crate::store::redis::health::{ServerHealth, classify, concerns_one_key, redirect};
use crate::store::redis::wire::batch::{BATCH, Batch, Declared};
use crate::store::redis::wire::script::Scripted;
use crate::store::{Outcome, StoreError};

/// One call of a round trip, and the jobs that its reply answers.
pub(crate) enum Call {
    /// Decisions on buckets by `lua/allow.lua`.
    Buckets { batch: Batch, jobs: Vec<BucketJob> },
    /// Any other command.
    Command(CommandJob),
}

/// The server that replies.
pub(crate) struct ReplyContext<'a> {
    pub(crate) health: &'a ServerHealth,
    /// Whether it is one of several, which may have some keys only.
    pub(crate) is_cluster: bool,
}

/// The calls for some jobs, for a server of a cluster or for the only one.
pub(crate) fn calls(jobs: impl IntoIterator<Item = Job>, is_cluster: bool) -> Vec<Call> {
    let (mut calls, mut buckets) = (Vec::new(), Vec::new());
    let buckets_call = |jobs| Call::buckets(jobs, is_cluster);
    for job in jobs {
        match job {
            Job::Bucket(job) => calls.extend(add(job, &mut buckets, buckets_call)),
            Job::Command(job) => calls.push(Call::Command(job)),
        }
    }
    if !buckets.is_empty() {
        calls.push(buckets_call(buckets));
    }
    share_work(&mut calls);
    calls
}

/// Adds a job to those that are `waiting` for a call together. Returns a call of its own, or that of
/// the others if they can't be decided at the same time.
fn add(
    job: BucketJob,
    waiting: &mut Vec<BucketJob>,
    call: impl Fn(Vec<BucketJob>) -> Call,
) -> Option<Call> {
    if job.mode != SendMode::Together {
        return Some(call(vec![job]));
    }
    // Only tests have a clock of their own, and so several times in one round trip.
    let is_later = waiting.last().is_some_and(|last| last.request.now != job.request.now);
    let others = is_later.then(|| call(std::mem::take(waiting)));
    waiting.push(job);
    others
}

/// Tells each decision on a lease how much maintenance work it may do.
fn share_work(calls: &mut [Call]) {
    let sharing = calls.iter_mut().filter_map(|call| match call {
        Call::Command(CommandJob { cmd, script: Some(Scripted::Lease), .. }) => Some(cmd),
        _ => None,
    });
    let sharing: SmallVec<[&mut Cmd; BATCH]> = sharing.collect();
    let drops = WorkLimits::shared_by(sharing.len()).drops;
    for cmd in sharing {
        cmd.arg(drops);
    }
}

/// Which keys a call for jobs of this mode declares.
fn declared(mode: SendMode, is_cluster: bool) -> Declared {
    match mode {
        SendMode::Together if is_cluster => Declared::None,
        SendMode::Together | SendMode::Alone | SendMode::Asking => Declared::All,
    }
}

impl Call {
    /// A call for at least one job, all of one mode.
    fn buckets(jobs: Vec<BucketJob>, is_cluster: bool) -> Self {
        let declared = declared(jobs[0].mode, is_cluster);
        Self::Buckets { batch: Batch::new(&jobs, declared), jobs }
    }

    /// Leaves out the jobs that nobody waits for, before the call is made again. Returns whether there
    /// are others.
    pub(crate) fn retain_awaited(&mut self, now: Instant, is_cluster: bool) -> bool {
        match self {
            Self::Buckets { batch, jobs } => {
                if retain(jobs, now) {
                    *batch = Batch::new(jobs, declared(jobs[0].mode, is_cluster));
                }
                !jobs.is_empty()
            }
            Self::Command(job) => job.reply_to.is_awaited(now),
        }
    }

    pub(crate) fn cmd(&self) -> &Cmd {
        match self {
            Self::Buckets { batch, .. } => &batch.cmd,
            Self::Command(job) => &job.cmd,
        }
    }

    /// The script that it calls, if it calls one.
    pub(crate) fn script(&self) -> Option<Scripted> {
        match self {
            Self::Buckets { .. } => Some(Scripted::Allow),
            Self::Command(job) => job.script,
        }
    }

    /// Whether ASKING must precede it.
    pub(crate) fn is_asking(&self) -> bool {
        match self {
            Self::Buckets { jobs, .. } => is_asking(jobs),
            Self::Command(job) => job.mode == SendMode::Asking,
        }
    }

    /// The number of decisions on buckets.
    pub(crate) fn decisions(&self) -> usize {
        match self {
            Self::Buckets { jobs, .. } => jobs.len(),
            Self::Command(_) => 0,
        }
    }

    /// The number of jobs whose caller has no other answer.
    pub(crate) fn waiting(&self) -> usize {
        match self {
            Self::Buckets { jobs, .. } => waiting(jobs),
            Self::Command(job) => usize::from(!job.reply_to.is_abandoned()),
        }
    }

    /// Whether somebody waits for the reply.
    pub(crate) fn is_awaited(&self, now: Instant) -> bool {
        match self {
            Self::Buckets { jobs, .. } => is_any_awaited(jobs, now),
            Self::Command(job) => job.reply_to.is_awaited(now),
        }
    }

    /// Answers all jobs with an error.
    pub(crate) fn fail(self, error: StoreError) {
        match self {
            Self::Buckets { jobs, .. } => {
                jobs.into_iter().for_each(|job| Job::Bucket(job).fail(error))
            }
            Self::Command(job) => Job::Command(job).fail(error),
        }
    }

    /// Answers all jobs.
    pub(crate) fn answer(self, reply: Value, context: &ReplyContext<'_>) {
        match self {
            Self::Buckets { batch, jobs } => {
                let outcomes = batch.outcomes(&reply, &jobs);
                answer_all(outcomes, jobs, reply, context);
            }
            Self::Command(job) => {
                let answer = match reply {
                    // A key of another type has nothing of ours.
                    Value::ServerError(error)
                        if job.script.is_none() && error.code() == "WRONGTYPE" =>
                    {
                        Ok(Value::Nil)
                    }
                    Value::ServerError(_) => Err(context.command_failure(reply, job.is_guarded())),
                    reply => Ok(reply),
                };
                job.reply_to.send(answer);
            }
        }
    }
}

/// Leaves out the jobs that nobody waits for. Returns whether some, but not all, were left out.
fn retain(jobs: &mut Vec<BucketJob>, now: Instant) -> bool {
    let before = jobs.len();
    jobs.retain(|job| job.reply_to.is_awaited(now));
    !jobs.is_empty() && jobs.len() < before
}

fn is_asking(jobs: &[BucketJob]) -> bool {
    jobs.iter().any(|job| job.mode == SendMode::Asking)
}

fn is_any_awaited(jobs: &[BucketJob], now: Instant) -> bool {
    jobs.iter().any(|job| job.reply_to.is_awaited(now))
}

/// The number of jobs whose caller has no other answer.
fn waiting(jobs: &[BucketJob]) -> usize {
    jobs.iter().filter(|job| !job.reply_to.is_abandoned()).count()
}

/// Answers jobs by the outcomes of their call. An outcome is `None` if the server can't use the keys;
/// all are if the script can't have made the reply.
fn answer_all(
    outcomes: Option<Vec<Option<Outcome>>>,
    jobs: Vec<BucketJob>,
    reply: Value,
    context: &ReplyContext<'_>,
) {
    let Some(outcomes) = outcomes else {
        let failure = context.call_failure(reply, jobs.len());
        for job in jobs {
            job.reply_to.send(Err(failure.clone()));
        }
        return;
    };
    for (job, outcome) in jobs.into_iter().zip(outcomes) {
        job.reply_to.send(outcome.ok_or_else(|| context.unreadable()));
    }
}

/// The advice about a key whose value tollgate can't have written.
const FOREIGN_KEY: &str = "look at the key: something else may write to this Redis; give tollgate a \
                           database of its own";

/// The advice about a key that the user may not use.
const RIGHTS: &str = "give the user of --store the right to read and write all keys (~*)";

impl ReplyContext<'_> {
    /// What it means that a script can't read or write a key.
    fn unreadable(&self) -> Failure {
        if self.is_cluster {
            return Failure::Redirect(Redirect::Unknown);
        }
        // There is no other server to ask.
        self.health.refused_one(&"a script may not use a key", RIGHTS);
        StoreError::Refused.into()
    }

    /// What it means that a call about one key was not answered. `is_guarded`: see
    /// [`concerns_one_key`].
    fn command_failure(&self, reply: Value, is_guarded: bool) -> Failure {
        if let Value::ServerError(error) = &reply {
            let error = RedisError::from(error.clone());
            if redirect(&error).is_none() && concerns_one_key(&error, is_guarded) {
                self.health.refused_one(&error, FOREIGN_KEY);
                return StoreError::Refused.into();
            }
        }
        self.call_failure(reply, 1)
    }

    /// What it means that a call was not answered, for each of `jobs` jobs.
    fn call_failure(&self, reply: Value, jobs: usize) -> Failure {
        let (error, detail) = match reply {
            Value::ServerError(error) => {
                let error = RedisError::from(error);
                match redirect(&error) {
                    Some(redirect) if self.is_cluster => return Failure::Redirect(redirect),
                    Some(_) => {
                        let detail = format!("{error}: for a cluster, use redis-cluster://");
                        (StoreError::Refused, detail)
                    }
                    None => (classify(&error), error.to_string()),
                }
            }
            _ => (StoreError::Refused, "a reply that tollgate's scripts never give".to_owned()),
        };
        self.health.record_failure(error, jobs, &detail);
        error.into()
    }
}
