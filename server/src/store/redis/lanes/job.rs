//! What waits for a lane: a request to a bucket, a part of a call, or a command, each with its caller.

use std::sync::Arc;

use redis::{Arg, Cmd, Value};
use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::store::redis::owner::{Owner, Queued};
use crate::store::redis::wire::batch::EncodedRequest;
use crate::store::redis::wire::parts::Part;
use crate::store::redis::wire::script::Scripted;
use crate::store::{Outcome, StoreError};

/// How a job is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SendMode {
    /// In one call with all others that wait.
    Together,
    /// In a call of its own that declares its keys. If a cluster has moved a key, or is about to,
    /// the server then says where it is.
    Alone,
    /// The same, after ASKING: the server is about to get the key.
    Asking,
}

/// Why a job got no answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Failure {
    /// The store failed or refused.
    Store(StoreError),
    /// Another server has the keys.
    Redirect(Redirect),
}

/// Where a cluster has the keys of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Redirect {
    /// Not on the server that was asked.
    Unknown,
    /// At this address, from now on.
    Moved(Box<str>),
    /// At this address, for this job: the slot is being moved.
    Ask(Box<str>),
    /// Some on one server and some on another, for a moment.
    TryAgain,
}

impl From<StoreError> for Failure {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

/// Receives the answer to a job.
pub(crate) type ReplyReceiver<T> = oneshot::Receiver<Result<T, Failure>>;

/// Where an answer goes.
pub(crate) struct ReplySender<T> {
    sender: oneshot::Sender<Result<T, Failure>>,
    /// Until when the caller waits.
    deadline: Instant,
}

impl<T> ReplySender<T> {
    /// A sender, and its receiver, which waits until the deadline.
    pub(crate) fn new(deadline: Instant) -> (Self, ReplyReceiver<T>) {
        let (sender, receiver) = oneshot::channel();
        (Self { sender, deadline }, receiver)
    }

    /// Whether the caller has got another answer.
    pub(crate) fn is_abandoned(&self) -> bool {
        self.sender.is_closed()
    }

    /// Whether the caller waits for the answer. A caller whose time is up does not, although it may
    /// not have noticed that yet, after a stall of this node.
    pub(crate) fn is_awaited(&self, now: Instant) -> bool {
        now < self.deadline && !self.is_abandoned()
    }

    /// Sends the answer. That the caller no longer waits is no error.
    pub(crate) fn send(self, answer: Result<T, Failure>) {
        drop(self.sender.send(answer));
    }
}

/// A job of a lane.
pub(crate) enum Job {
    /// A request to a bucket.
    Bucket(BucketJob),
    /// A request for hits or about holds.
    Part(PartJob),
    /// Any other command.
    Command(CommandJob),
}

/// A request that may be sent in one call with others, and where its answer goes.
pub(crate) struct SharedJob<R, T> {
    pub(crate) request: R,
    pub(crate) mode: SendMode,
    pub(crate) reply_to: ReplySender<T>,
}

pub(crate) type BucketJob = SharedJob<Box<EncodedRequest>, Outcome>;

pub(crate) type PartJob = SharedJob<Arc<Part>, Value>;

impl AsRef<Part> for PartJob {
    fn as_ref(&self) -> &Part {
        &self.request
    }
}

impl AsRef<EncodedRequest> for BucketJob {
    fn as_ref(&self) -> &EncodedRequest {
        &self.request
    }
}

/// A command, and where its reply goes.
pub(crate) struct CommandJob {
    pub(crate) cmd: Cmd,
    pub(crate) owner: Owner,
    /// The script that the command calls, if it calls one.
    pub(crate) script: Option<Scripted>,
    pub(crate) mode: SendMode,
    pub(crate) reply_to: ReplySender<Value>,
}

impl Job {
    /// See [`ReplySender::is_abandoned`].
    pub(crate) fn is_abandoned(&self) -> bool {
        match self {
            Self::Bucket(job) => job.reply_to.is_abandoned(),
            Self::Part(job) => job.reply_to.is_abandoned(),
            Self::Command(job) => job.reply_to.is_abandoned(),
        }
    }

    /// See [`ReplySender::is_awaited`].
    pub(crate) fn is_awaited(&self, now: Instant) -> bool {
        match self {
            Self::Bucket(job) => job.reply_to.is_awaited(now),
            Self::Part(job) => job.reply_to.is_awaited(now),
            Self::Command(job) => job.reply_to.is_awaited(now),
        }
    }

    /// Answers with an error.
    pub(crate) fn fail(self, error: StoreError) {
        match self {
            Self::Bucket(job) => job.reply_to.send(Err(error.into())),
            Self::Part(job) => job.reply_to.send(Err(error.into())),
            Self::Command(job) => job.reply_to.send(Err(error.into())),
        }
    }
}

impl CommandJob {
    /// Whether the command runs a script with `lua/guard.lua`. Those sent as text all have it.
    pub(crate) fn is_guarded(&self) -> bool {
        let is_eval = || self.cmd.args_iter().next() == Some(Arg::Simple(b"EVAL"));
        self.script.map_or_else(is_eval, Scripted::is_guarded)
    }
}

impl Queued for Job {
    fn owner(&self) -> Owner {
        match self {
            Self::Bucket(job) => job.request.owner,
            Self::Part(job) => job.request.owner,
            Self::Command(job) => job.owner,
        }
    }

    fn key(&self) -> Option<&[u8]> {
        match self {
            Self::Bucket(job) => Some(&job.request.key),
            Self::Part(_) | Self::Command(_) => None,
        }
    }
}
