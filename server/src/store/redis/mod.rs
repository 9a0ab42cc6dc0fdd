//! Buckets and leases in Redis: every decision is one atomic run of `lua/allow.lua` or
//! `lua/lease.lua`, on the time of the server that holds the bucket or the resource.
//!
//! `servers` knows where the servers are and `topology` which has what; `connector` is what a
//! node's runtimes share, `routes` the way from a key to its server's lanes. A `lane` is one
//! connection with its `queue`, bounded by its `pace`; a `batch` is what it sends, and `known` tells
//! the queue which names are new. `keys` has the
//! key schema, `script` the calls and replies, `leases` those for leases, `health` what happens
//! when there is no answer, and `replies`, a test, what none of our scripts replies.

use std::hash::{BuildHasher as _, Hash};
use std::sync::Arc;
use std::time::Duration;

use hashbrown::DefaultHashBuilder;
use redis::{Cmd, Value};
use smallvec::SmallVec;
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::{BucketRequest, Layout, Layouts, Outcome, Outcomes, Store, StoreError};
use crate::domain::bucket::BucketKind;
use crate::domain::time::ManualClock;
use crate::metrics::Corrupt;

mod advice;
mod batch;
mod connection;
mod connector;
mod handover;
mod health;
mod keys;
mod known;
mod lane;
mod leases;
mod login;
mod pace;
mod queue;
mod routes;
mod script;
mod servers;
mod topology;

use batch::Question;
pub use connector::Connector;
use connector::Shard;
pub use health::Health;
use keys::ServerKeys;
use known::KnownNames;
use lane::{Elsewhere, Failure, Job, Manner, What};
pub use login::{LoginFiles, wrong_setting};
use queue::Owner;
use routes::{Lanes, Router, Routes};
use script::Scripted;
pub use servers::{Servers, Unknown};
pub use topology::{Master, SLOTS, Topology, slot, tag};

/// A node that has been silent for so long counts as gone.
const NODE_TTL: Duration = Duration::from_secs(5);

/// How many layouts one call tells of.
const LAYOUTS_PAGE: usize = 250;

/// The member of a group that is everybody who has no place of his own.
const SHARED: u64 = 0;

/// How long to wait for a key that is partly on one server and partly on another.
const SPLIT: Duration = Duration::from_millis(1);

/// Buckets and leases in Redis. Clones share their connections.
#[derive(Clone)]
pub struct RedisStore(Arc<Inner>);

struct Inner {
    connector: Connector,
    router: Router,
    hasher: DefaultHashBuilder,
    known: KnownNames,
    clock: Option<ManualClock>,
}

/// What a caller waits for, and from where.
type Sent<T> = Result<(Arc<Lanes>, oneshot::Receiver<Result<T, Failure>>), StoreError>;

/// A job, and what its answer comes by.
type Asked<T> = (Job, oneshot::Receiver<Result<T, Failure>>);

impl RedisStore {
    fn new(connector: Connector, clock: Option<ManualClock>) -> Self {
        Self(Arc::new(Inner {
            router: Router::new(&connector),
            connector,
            hasher: DefaultHashBuilder::default(),
            known: KnownNames::new(),
            clock,
        }))
    }
}

impl Store for RedisStore {
    async fn decide(&self, asks: &[BucketRequest<'_>]) -> Outcomes {
        let inner = &*self.0;
        let mut outcomes = Outcomes::with_capacity(asks.len());
        match asks {
            // Nearly always. All else is put away in a box, so that what is kept for each request
            // under way stays small.
            [ask] if !ask.moved => outcomes.push(inner.decide_one(ask).await),
            _ => outcomes = Box::pin(inner.decide_all(asks)).await,
        }
        outcomes
    }
}

impl Layouts for RedisStore {
    async fn record_layouts(&self, layouts: &[Layout]) -> Result<Vec<Duration>, StoreError> {
        let inner = &*self.0;
        let slot = inner.router.routes(&inner.connector).slot(keys::LAYOUTS.as_bytes());
        let mut settled = Vec::with_capacity(layouts.len());
        for page in layouts.chunks(LAYOUTS_PAGE) {
            let born = inner.connector.oldest_birth();
            let cmd = |_: usize, _: To<'_>| script::layouts(page, born);
            match inner.values(&[slot], None, cmd).await.pop() {
                Some(Ok(reply)) => {
                    let (left, corrupt) =
                        script::settled(&reply, page.len()).ok_or(StoreError::Refused)?;
                    inner.connector.health().metrics().corrupt(Corrupt::Server, corrupt);
                    settled.extend(left);
                }
                Some(Err(error)) => return Err(error),
                None => return Err(StoreError::Refused),
            }
        }
        Ok(settled)
    }
}

/// For each question the state found under its namespace's other layout, or why that is not
/// known; empty: none was looked for.
#[derive(Default)]
struct Twins(Vec<Result<Option<Vec<u8>>, StoreError>>);

impl Twins {
    fn of(&self, at: usize) -> Result<Option<Vec<u8>>, StoreError> {
        self.0.get(at).cloned().unwrap_or(Ok(None))
    }
}

fn bucket(question: Question, manner: Manner) -> Asked<Outcome> {
    let (reply, answer) = oneshot::channel();
    (Job { what: What::Bucket { question: Box::new(question), reply }, manner }, answer)
}

fn command(cmd: Cmd, owner: Owner, script: Option<Scripted>, manner: Manner) -> Asked<Value> {
    let (reply, answer) = oneshot::channel();
    (Job { what: What::Command { cmd, owner, script, reply }, manner }, answer)
}

/// What a server answers up to the deadline, or where else to ask.
async fn answered<T>(
    lanes: &Lanes,
    answer: oneshot::Receiver<Result<T, Failure>>,
    deadline: Instant,
) -> Result<Result<T, Elsewhere>, StoreError> {
    match tokio::time::timeout_at(deadline, answer).await {
        Ok(Ok(Ok(answer))) => Ok(Ok(answer)),
        Ok(Ok(Err(Failure::Store(error)))) => Err(error),
        Ok(Ok(Err(Failure::Elsewhere(elsewhere)))) => Ok(Err(elsewhere)),
        Ok(Err(_)) => Err(StoreError::Unreachable),
        Err(_) => {
            lanes.shard.health.late(1);
            Err(StoreError::Timeout)
        }
    }
}

/// Where a command goes, and how.
#[derive(Clone, Copy)]
struct To<'a> {
    server: &'a ServerKeys,
    manner: Manner,
}

/// Where the questions of one call go: as of which topology, and whether those to one server
/// must stay in their order.
struct Way {
    routes: Arc<Routes>,
    in_order: bool,
}

impl Inner {
    fn way(&self, in_order: bool) -> Way {
        Way { routes: self.router.routes(&self.connector), in_order }
    }

    /// Whom a question is counted for: a caller of the namespace, or where the caller has no name,
    /// the bucket. All new dynamic buckets count as one, as do the names that share a default bucket.
    fn owner(&self, ask: &BucketRequest<'_>, now: Instant) -> Owner {
        let namespace = if ask.kind == BucketKind::GlobalDefault { "" } else { ask.namespace };
        let group = self.hash(namespace);
        let member = match (ask.caller, ask.kind) {
            (Some(caller), _) => caller.number(),
            (None, BucketKind::GlobalDefault | BucketKind::NamespaceDefault) => SHARED,
            (None, BucketKind::Configured { .. }) => self.hash(ask.name),
            (None, BucketKind::Dynamic { .. }) => self.member((ask.namespace, ask.name), now),
        };
        Owner { group, member }
    }

    /// The member of a group that stands for a name: itself, or all new ones.
    fn member(&self, name: impl Hash, now: Instant) -> u64 {
        let hash = self.hash(name);
        if self.known.note(hash, now) { hash } else { SHARED }
    }

    fn hash(&self, name: impl Hash) -> u64 {
        self.hasher.hash_one(name)
    }

    fn question(&self, ask: &BucketRequest<'_>, owner: Owner, twin: Option<Vec<u8>>) -> Question {
        let now = self.clock.as_ref().map(ManualClock::now);
        let mut question = Question::new(ask, owner, now);
        question.twin = twin;
        question
    }

    /// Sends something to the server that has a slot, unless that is known not to answer.
    fn send<T>(&self, way: &Way, slot: u16, job: impl FnOnce(&ServerKeys) -> Asked<T>) -> Sent<T> {
        let Some(lanes) = way.routes.lanes(slot) else {
            self.connector.health().nowhere(1, &format_args!("nobody has slot {slot}"));
            return Err(StoreError::Unreachable);
        };
        if !lanes.shard.health.is_up() {
            return Err(StoreError::Unreachable);
        }
        let (job, answer) = job(&lanes.shard.keys);
        lanes.push(job, way.in_order);
        Ok((Arc::clone(lanes), answer))
    }

    async fn decide_one(&self, ask: &BucketRequest<'_>) -> Result<Outcome, StoreError> {
        let now = Instant::now();
        let deadline = now + self.connector.timeout();
        let way = self.way(false);
        let question = self.question(ask, self.owner(ask, now), None);
        let slot = way.routes.slot(&question.keys.state);
        let sent = self.send(&way, slot, |_| bucket(question, Manner::Together));
        // The owner is found out once more, so that it need not be kept for each request under way.
        let again = |_: &Shard, manner| {
            bucket(self.question(ask, self.owner(ask, Instant::now()), None), manner)
        };
        self.follow(&way, slot, sent, deadline, again).await
    }

    async fn decide_all(&self, asks: &[BucketRequest<'_>]) -> Outcomes {
        let now = Instant::now();
        let deadline = now + self.connector.timeout();
        let owners: SmallVec<[Owner; 1]> = asks.iter().map(|ask| self.owner(ask, now)).collect();
        let twins = match asks.iter().any(|ask| ask.moved) {
            true => self.twins(asks, &owners).await,
            false => Twins::default(),
        };
        let way = self.way(asks.len() > 1);
        let mut waiting: SmallVec<[_; 1]> = SmallVec::with_capacity(asks.len());
        for (at, ask) in asks.iter().enumerate() {
            waiting.push(twins.of(at).map(|twin| {
                let question = self.question(ask, owners[at], twin);
                let slot = way.routes.slot(&question.keys.state);
                (slot, self.send(&way, slot, |_| bucket(question, Manner::Together)))
            }));
        }
        let mut outcomes = Outcomes::with_capacity(asks.len());
        for (at, (ask, sent)) in asks.iter().zip(waiting).enumerate() {
            outcomes.push(match sent {
                Err(error) => Err(error),
                Ok((slot, sent)) => {
                    let again = |_: &Shard, manner| {
                        let twin = twins.of(at).ok().flatten();
                        bucket(self.question(ask, owners[at], twin), manner)
                    };
                    self.follow(&way, slot, sent, deadline, again).await
                }
            });
        }
        outcomes
    }

    /// Waits for an answer, wherever in a cluster it comes from, up to the deadline. `again`
    /// makes the same question anew for a server.
    async fn follow<T>(
        &self,
        way: &Way,
        slot: u16,
        sent: Sent<T>,
        deadline: Instant,
        again: impl Fn(&Shard, Manner) -> Asked<T>,
    ) -> Result<T, StoreError> {
        let (lanes, answer) = sent?;
        match answered(&lanes, answer, deadline).await? {
            Ok(answer) => Ok(answer),
            Err(elsewhere) => {
                Box::pin(self.pursue(way, slot, lanes, elsewhere, deadline, again)).await
            }
        }
    }

    /// The same from the first server on that did not have it.
    async fn pursue<T>(
        &self,
        way: &Way,
        slot: u16,
        mut lanes: Arc<Lanes>,
        mut elsewhere: Elsewhere,
        deadline: Instant,
        again: impl Fn(&Shard, Manner) -> Asked<T>,
    ) -> Result<T, StoreError> {
        let (mut manner, mut seen) = (Manner::Together, way.routes.version());
        loop {
            // Out of time while it was on its way is as good as no answer.
            if Instant::now() >= deadline {
                lanes.shard.health.late(1);
                return Err(StoreError::Timeout);
            }
            let before = std::mem::replace(&mut manner, Manner::Alone);
            let next = match elsewhere {
                // Alone it hears where to go.
                Elsewhere::Unknown if before == Manner::Together => lanes,
                Elsewhere::Unknown => {
                    // It goes on for others' sake where it takes longer than this one may.
                    let refreshed = self.connector.refresh_aside(seen);
                    if tokio::time::timeout_at(deadline, refreshed).await.is_err() {
                        lanes.shard.health.late(1);
                        return Err(StoreError::Timeout);
                    }
                    let routes = self.router.routes(&self.connector);
                    seen = routes.version();
                    routes.lanes(slot).cloned().ok_or(StoreError::Unreachable)?
                }
                Elsewhere::Moved(address) => {
                    // Whoever comes next is to know; this one knows already.
                    self.connector.refresh_soon(seen);
                    self.router.lanes_at(&self.connector, &lanes, &address, slot)?
                }
                Elsewhere::Asked(address) => {
                    manner = Manner::Asking;
                    self.router.lanes_at(&self.connector, &lanes, &address, slot)?
                }
                Elsewhere::Split => {
                    manner = before;
                    tokio::time::sleep(SPLIT).await;
                    lanes
                }
            };
            let (job, answer) = again(&next.shard, manner);
            next.push(job, way.in_order);
            elsewhere = match answered(&next, answer, deadline).await? {
                Ok(answer) => return Ok(answer),
                Err(elsewhere) => elsewhere,
            };
            lanes = next;
        }
    }

    /// Sends commands in one batch a server, and gives back what they reply. `cmd` makes one by
    /// its position, for the server that has the slot at that position. They are nobody's.
    async fn values(
        &self,
        slots: &[u16],
        script: Option<Scripted>,
        cmd: impl Fn(usize, To<'_>) -> Cmd,
    ) -> SmallVec<[Result<Value, StoreError>; 1]> {
        self.values_of(|_| Owner::default(), slots, script, cmd).await
    }

    /// The same; `owner` tells whose each of them is.
    async fn values_of(
        &self,
        owner: impl Fn(usize) -> Owner,
        slots: &[u16],
        script: Option<Scripted>,
        cmd: impl Fn(usize, To<'_>) -> Cmd,
    ) -> SmallVec<[Result<Value, StoreError>; 1]> {
        let deadline = Instant::now() + self.connector.timeout();
        let way = self.way(false);
        let send = |(at, &slot): (usize, &u16)| {
            let job = |server: &ServerKeys| {
                let manner = Manner::Together;
                command(cmd(at, To { server, manner }), owner(at), script, manner)
            };
            self.send(&way, slot, job)
        };
        let waiting: SmallVec<[_; 1]> = slots.iter().enumerate().map(send).collect();
        let mut values = SmallVec::with_capacity(slots.len());
        for ((at, &slot), sent) in slots.iter().enumerate().zip(waiting) {
            let again = |shard: &Shard, manner| {
                let to = To { server: &shard.keys, manner };
                command(cmd(at, to), owner(at), script, manner)
            };
            values.push(self.follow(&way, slot, sent, deadline, again).await);
        }
        values
    }

    /// One command of each server, and what they reply; all of them, or none.
    async fn of_each(&self, cmd: impl Fn(&ServerKeys) -> Cmd) -> Result<Vec<Value>, StoreError> {
        let slots = self.router.routes(&self.connector).one_of_each();
        let replies = self.values(&slots, None, |_, to| cmd(to.server)).await;
        if replies.is_empty() {
            return Err(StoreError::Unreachable);
        }
        replies.into_iter().collect()
    }

    /// Looks up what stands under the other layout of namespaces that have changed theirs. That
    /// is in another slot, so it can't be part of the decision.
    async fn twins(&self, asks: &[BucketRequest<'_>], owners: &[Owner]) -> Twins {
        let routes = self.router.routes(&self.connector);
        let (mut cmds, mut slots, mut whose) = (Vec::new(), Vec::new(), Vec::new());
        for (at, ask) in asks.iter().enumerate() {
            if ask.moved
                && let Some((key, reads)) = script::twin(ask)
            {
                slots.extend([routes.slot(&key); 2]);
                cmds.extend(reads);
                whose.push(at);
            }
        }
        // Two for each.
        let owner = |at: usize| owners[whose[at / 2]];
        let found = self.values_of(owner, &slots, None, |at, _| cmds[at].clone()).await;
        let now = self.clock.as_ref().map(ManualClock::now);
        let mut twins = vec![Ok(None); asks.len()];
        for (at, pair) in whose.into_iter().zip(found.chunks_exact(2)) {
            twins[at] = match pair {
                [Ok(state), Ok(expires)] => {
                    Ok(script::twin_state(state, expires, now).map(<[u8]>::to_vec))
                }
                [Err(error), _] | [_, Err(error)] => Err(*error),
                _ => Ok(None),
            };
        }
        Twins(twins)
    }
}

#[cfg(test)]
mod replies;
