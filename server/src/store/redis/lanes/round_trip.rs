//! The calls of one round trip: which jobs go into which call, and what a reply means for the jobs
//! of its call.

use redis::{Cmd, RedisError, Value};
use smallvec::SmallVec;
use tokio::time::Instant;

use super::job::{BucketJob, CommandJob, Failure, Job, PartJob, Redirect, SendMode, SharedJob};
use crate::domain::lease::WorkLimits;
use crate::store::StoreError;
use crate::store::redis::health::{
    ServerHealth, classify, concerns_one_key, lacks_right, redirect,
};
use crate::store::redis::wire::batch::{BATCH, Batch, Declared};
use crate::store::redis::wire::parts::{self, PARTS};
use crate::store::redis::wire::script::Scripted;

/// One call of a round trip, and the jobs that its reply answers.
pub(crate) enum Call {
    /// Decisions on buckets by `lua/allow.lua`.
    Buckets { batch: Batch, jobs: Vec<BucketJob> },
    /// Requests for hits, or about holds, by a script with `lua/parts.lua`.
    Parts { cmd: Cmd, jobs: Vec<PartJob> },
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
    let (mut hits, mut holds) = (Vec::new(), Vec::new());
    let buckets_call = |jobs| Call::buckets(jobs, is_cluster);
    let parts_call = |jobs| Call::parts(jobs, is_cluster);
    for job in jobs {
        match job {
            Job::Bucket(job) => calls.extend(add_bucket(job, &mut buckets).map(buckets_call)),
            Job::Part(job) => {
                let waiting =
                    if job.request.script == Scripted::Holds { &mut holds } else { &mut hits };
                calls.extend(add_part(job, waiting).map(parts_call));
            }
            Job::Command(job) => calls.push(Call::Command(job)),
        }
    }
    if !buckets.is_empty() {
        calls.push(buckets_call(buckets));
    }
    calls.extend([hits, holds].into_iter().filter(|jobs| !jobs.is_empty()).map(parts_call));
    share_work(&mut calls);
    calls
}

/// Adds a job to those that are `waiting` for a call together. Returns the jobs of the next call: this one alone,
/// or the others if they can't be decided at the same time.
fn add_bucket(job: BucketJob, waiting: &mut Vec<BucketJob>) -> Option<Vec<BucketJob>> {
    if job.mode != SendMode::Together {
        return Some(vec![job]);
    }
    // Only tests have a clock of their own, and so several times in one round trip.
    let is_later = waiting.last().is_some_and(|last| last.request.now != job.request.now);
    let others = is_later.then(|| std::mem::take(waiting));
    waiting.push(job);
    others
}

/// The same for a part: this one alone, or all once they are as many as there may be.
fn add_part(job: PartJob, waiting: &mut Vec<PartJob>) -> Option<Vec<PartJob>> {
    if job.mode != SendMode::Together || job.request.is_long {
        return Some(vec![job]);
    }
    waiting.push(job);
    (waiting.len() == PARTS).then(|| std::mem::take(waiting))
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

/// A call for the parts of jobs, all of one mode.
fn call_of_parts(jobs: &[PartJob], is_cluster: bool) -> Cmd {
    let mode = jobs[0].mode;
    parts::call(jobs, |part| match declared(mode, is_cluster) {
        Declared::None => 0,
        // A server that is getting the slot answers a call that declares two keys only once it has both. The keys
        // of holds exist both, or neither.
        Declared::All if mode == SendMode::Asking && part.script == Scripted::Holds => 1,
        Declared::All => part.keys.len(),
    })
}

impl Call {
    /// A call for at least one job, all of one mode.
    fn buckets(jobs: Vec<BucketJob>, is_cluster: bool) -> Self {
        let declared = declared(jobs[0].mode, is_cluster);
        Self::Buckets { batch: Batch::new(&jobs, declared), jobs }
    }

    /// A call for at least one job, all of one script and mode.
    fn parts(jobs: Vec<PartJob>, is_cluster: bool) -> Self {
        Self::Parts { cmd: call_of_parts(&jobs, is_cluster), jobs }
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
            Self::Parts { cmd, jobs } => {
                if retain(jobs, now) {
                    *cmd = call_of_parts(jobs, is_cluster);
                }
                !jobs.is_empty()
            }
            Self::Command(job) => job.reply_to.is_awaited(now),
        }
    }

    pub(crate) fn cmd(&self) -> &Cmd {
        match self {
            Self::Buckets { batch, .. } => &batch.cmd,
            Self::Parts { cmd, .. } => cmd,
            Self::Command(job) => &job.cmd,
        }
    }

    /// The script that it calls, if it calls one.
    pub(crate) fn script(&self) -> Option<Scripted> {
        match self {
            Self::Buckets { .. } => Some(Scripted::Allow),
            Self::Parts { jobs, .. } => jobs.first().map(|job| job.request.script),
            Self::Command(job) => job.script,
        }
    }

    /// Whether ASKING must precede it.
    pub(crate) fn is_asking(&self) -> bool {
        match self {
            Self::Buckets { jobs, .. } => is_asking(jobs),
            Self::Parts { jobs, .. } => is_asking(jobs),
            Self::Command(job) => job.mode == SendMode::Asking,
        }
    }

    /// The number of decisions on buckets, hits and holds.
    pub(crate) fn decisions(&self) -> usize {
        match self {
            Self::Buckets { jobs, .. } => jobs.len(),
            Self::Parts { jobs, .. } => jobs.len(),
            Self::Command(_) => 0,
        }
    }

    /// The number of jobs whose caller has no other answer.
    pub(crate) fn waiting(&self) -> usize {
        match self {
            Self::Buckets { jobs, .. } => waiting(jobs),
            Self::Parts { jobs, .. } => waiting(jobs),
            Self::Command(job) => usize::from(!job.reply_to.is_abandoned()),
        }
    }

    /// Whether somebody waits for the reply.
    pub(crate) fn is_awaited(&self, now: Instant) -> bool {
        match self {
            Self::Buckets { jobs, .. } => is_any_awaited(jobs, now),
            Self::Parts { jobs, .. } => is_any_awaited(jobs, now),
            Self::Command(job) => job.reply_to.is_awaited(now),
        }
    }

    /// Answers all jobs with an error.
    pub(crate) fn fail(self, error: StoreError) {
        match self {
            Self::Buckets { jobs, .. } => {
                jobs.into_iter().for_each(|job| Job::Bucket(job).fail(error))
            }
            Self::Parts { jobs, .. } => jobs.into_iter().for_each(|job| Job::Part(job).fail(error)),
            Self::Command(job) => Job::Command(job).fail(error),
        }
    }

    /// Answers all jobs.
    pub(crate) fn answer(self, reply: Value, context: &ReplyContext<'_>) {
        match self {
            Self::Buckets { batch, jobs } => {
                let outcomes = batch.outcomes(&reply, &jobs);
                let Some(outcomes) = outcomes else { return context.fail_all(reply, jobs) };
                for (job, outcome) in jobs.into_iter().zip(outcomes) {
                    job.reply_to.send(outcome.ok_or_else(|| context.unreadable()));
                }
            }
            Self::Parts { jobs, .. } => match parts::replies(reply, jobs.len()) {
                Ok(replies) => {
                    for (job, reply) in jobs.into_iter().zip(replies) {
                        job.reply_to.send(context.answer(reply, true));
                    }
                }
                Err(reply) => context.fail_all(reply, jobs),
            },
            Self::Command(job) => {
                let answer = match reply {
                    // A key of another type has nothing of ours.
                    Value::ServerError(error)
                        if job.script.is_none() && error.code() == "WRONGTYPE" =>
                    {
                        Ok(Value::Nil)
                    }
                    reply => context.answer(reply, job.is_guarded()),
                };
                job.reply_to.send(answer);
            }
        }
    }
}

/// Leaves out the jobs that nobody waits for. Returns whether some, but not all, were left out.
fn retain<R, T>(jobs: &mut Vec<SharedJob<R, T>>, now: Instant) -> bool {
    let before = jobs.len();
    jobs.retain(|job| job.reply_to.is_awaited(now));
    !jobs.is_empty() && jobs.len() < before
}

fn is_asking<R, T>(jobs: &[SharedJob<R, T>]) -> bool {
    jobs.iter().any(|job| job.mode == SendMode::Asking)
}

fn is_any_awaited<R, T>(jobs: &[SharedJob<R, T>], now: Instant) -> bool {
    jobs.iter().any(|job| job.reply_to.is_awaited(now))
}

/// The number of jobs whose caller has no other answer.
fn waiting<R, T>(jobs: &[SharedJob<R, T>]) -> usize {
    jobs.iter().filter(|job| !job.reply_to.is_abandoned()).count()
}

/// The advice about a key whose value tollgate can't have written.
const FOREIGN_KEY: &str = "look at the key: something else may write to this Redis; give tollgate a \
                           database of its own";

/// The advice about a key that the user may not use, or not with this command.
const RIGHTS: &str = "give the user of --store the rights in docs/operating.md, on all keys (~*)";

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

    /// Answers the jobs of a call that failed as a whole.
    fn fail_all<R, T>(&self, reply: Value, jobs: Vec<SharedJob<R, T>>) {
        // Callers whose deadline has passed are counted already.
        let failure = self.call_failure(reply, waiting(&jobs));
        for job in jobs {
            job.reply_to.send(Err(failure.clone()));
        }
    }

    /// The answer by a reply about one key. `is_guarded`: see [`concerns_one_key`].
    fn answer(&self, reply: Value, is_guarded: bool) -> Result<Value, Failure> {
        match reply {
            Value::ServerError(_) => Err(self.command_failure(reply, is_guarded)),
            reply => Ok(reply),
        }
    }

    /// What it means that a call about one key was not answered.
    fn command_failure(&self, reply: Value, is_guarded: bool) -> Failure {
        if let Value::ServerError(error) = &reply {
            let error = RedisError::from(error.clone());
            if redirect(&error).is_none() && concerns_one_key(&error, is_guarded) {
                let advice = if lacks_right(&error) { RIGHTS } else { FOREIGN_KEY };
                self.health.refused_one(&error, advice);
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
