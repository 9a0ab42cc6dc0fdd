//! Buckets and leases in Redis: every decision is one atomic run of `lua/allow.lua` or
//! `lua/lease.lua`, on the time of the server that holds the bucket or the resource.
//!
//! A decision goes the way `registers` (a place for a new dynamic bucket) → `sending` (redirects) →
//! `cluster` (the server that has the key) → `lanes` (the queues and connections to it) → `wire`
//! (encodes calls and decodes replies). `connecting` opens connections, `health` tracks which servers
//! answer, `keys` has the key schema, `owner` and `known` attribute waiting jobs to callers. `leases`
//! has the calls for leases, `looks` those that take nothing, `permits` those for
//! settlements, `versions` those for the document of the limits. `replies`, a test, reads replies of any kind.

use std::hash::{BuildHasher as _, DefaultHasher, Hash, Hasher as _};
use std::sync::Arc;
use std::time::Duration;

use hashbrown::{DefaultHashBuilder, HashMap};
use smallvec::SmallVec;
use tokio::time::{Instant, timeout_at};

use super::{
    BucketRequest, Layout, Layouts, MAX_REQUESTS_PER_CALL, Outcome, Outcomes, Store, StoreError,
};
use crate::domain::bucket::BucketKind;
use crate::domain::time::{ManualClock, Micros};
use crate::metrics::Corrupt;

mod cluster;
mod connecting;
mod health;
mod holds;
mod keys;
mod kill_switch;
mod known;
mod lanes;
mod leases;
mod looks;
mod owner;
mod permits;
mod registers;
mod sending;
mod throttle;
mod versions;
mod wire;

pub use cluster::connector::Connector;
use cluster::routes::{Router, Routes};
pub use cluster::servers::{DiscoveryError, Servers};
pub use cluster::topology::{Master, SLOTS, Topology, slot, tag};
pub use connecting::login::{LoginFiles, wrong_setting};
pub use health::Health;
use keys::ServerKeys;
use known::KnownNames;
use lanes::job::SendMode;
use owner::Owner;
use registers::Registers;
use sending::{PendingJob, SendPlan, Sent, Target, bucket_job, out_of_time};
use wire::batch::{EncodedRequest, Registration};
use wire::script;

/// A node that has sent no heartbeat for this long counts as gone.
const NODE_TTL: Duration = Duration::from_secs(5);

/// The most layouts in one call.
const LAYOUTS_PAGE: usize = 250;

/// The member of a group that several share: all new names, the names of a default bucket, lists.
const SHARED: u64 = 0;

/// Buckets and leases in Redis. Clones share their connections.
#[derive(Clone)]
pub struct RedisStore(Arc<Inner>);

struct Inner {
    connector: Connector,
    router: Router,
    hasher: DefaultHashBuilder,
    known: KnownNames,
    registers: Registers,
    /// The time of a test; `None`: the servers' own.
    clock: Option<ManualClock>,
}

/// What the store knows of a request to a bucket until it has the outcome.
#[derive(Clone, Copy)]
struct BucketCall<'a> {
    request: &'a BucketRequest<'a>,
    owner: Owner,
    /// The slot of the bucket's state.
    slot: u16,
    deadline: Instant,
}

impl RedisStore {
    fn new(connector: Connector, clock: Option<ManualClock>) -> Self {
        Self(Arc::new(Inner {
            router: Router::new(&connector),
            connector,
            hasher: DefaultHashBuilder::default(),
            known: KnownNames::new(),
            registers: Registers::new(),
            clock,
        }))
    }
}

impl Store for RedisStore {
    async fn decide(&self, requests: &[BucketRequest<'_>]) -> Outcomes {
        let inner = &*self.0;
        match requests {
            [request] => {
                let mut outcomes = Outcomes::new();
                outcomes.push(inner.decide_one(request).await);
                outcomes
            }
            // Rare, so boxed: the future of each request stays small.
            _ => Box::pin(inner.decide_all(requests)).await,
        }
    }

    async fn decide_one(&self, request: &BucketRequest<'_>) -> Result<Outcome, StoreError> {
        self.0.decide_one(request).await
    }
}

impl Layouts for RedisStore {
    async fn record_layouts(&self, layouts: &[Layout]) -> Result<Vec<Duration>, StoreError> {
        let inner = &*self.0;
        let routes = inner.router.routes(&inner.connector);
        let namespaces = layouts.iter().filter_map(|layout| layout.registered_in.as_deref());
        // A queue has room for so many.
        for page in namespaces.collect::<Vec<_>>().chunks(MAX_REQUESTS_PER_CALL) {
            inner.keep_registers(&routes, page).await;
        }
        let shared = layouts.iter().map(|layout| shared_layout(&routes, layout));
        let shared: Vec<_> = shared.collect();
        let known: Vec<_> = shared.iter().flatten().copied().collect();
        let mut left = Vec::with_capacity(known.len());
        for page in known.chunks(LAYOUTS_PAGE) {
            left.extend(inner.record_layouts_page(&routes, page).await?);
        }
        // If the server of a register is unknown or down, nothing is known of the layout.
        let mut left = left.into_iter();
        let left_of = |(layout, shared): (&Layout, &Option<_>)| match shared {
            Some(_) => left.next().unwrap_or(layout.life),
            None => layout.life,
        };
        Ok(layouts.iter().zip(&shared).map(left_of).collect())
    }
}

/// A layout as the nodes share it: a hash of the bucket, a hash of the layout, and the longest life of
/// a state. The register is a part of the layout: when it is lost, buckets are registered again. `None`
/// if it is not known who has the register.
fn shared_layout(routes: &Routes, layout: &Layout) -> Option<(u64, u64, Duration)> {
    let register = layout.registered_in.as_deref();
    let register = register.map(|namespace| routes.register_id(namespace)).transpose().ok()?;
    Some((layout.bucket_hash, shared_hash((layout.settings_hash, register)), layout.life))
}

/// A hash that is stored in Redis, where nodes compare it. Equal on all nodes that were built with
/// the same release of Rust; where it is not, states are rewritten for longer than they need be.
fn shared_hash(value: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

/// Decisions on buckets.
impl Inner {
    async fn decide_one(&self, request: &BucketRequest<'_>) -> Result<Outcome, StoreError> {
        let now = Instant::now();
        let plan = self.plan(false);
        let (call, sent) = self.send_request(&plan, request, self.note_owner(request, now), now);
        self.outcome(&plan, &call, sent).await
    }

    async fn decide_all(&self, requests: &[BucketRequest<'_>]) -> Outcomes {
        let now = Instant::now();
        let plan = self.plan(true);
        let owners = self.note_owners(requests, now);
        let both = requests.iter().zip(owners);
        let send = |(request, owner)| self.send_request(&plan, request, owner, now);
        let waiting: SmallVec<[_; 1]> = both.map(send).collect();
        let mut outcomes = Outcomes::with_capacity(requests.len());
        for (call, sent) in waiting {
            outcomes.push(self.outcome(&plan, &call, sent).await);
        }
        outcomes
    }

    /// Sends a request that came at `now`.
    fn send_request<'a>(
        &self,
        plan: &SendPlan,
        request: &'a BucketRequest<'a>,
        owner: Owner,
        now: Instant,
    ) -> (BucketCall<'a>, Sent<Outcome>) {
        let key = keys::state(request);
        let call = BucketCall {
            request,
            owner,
            slot: plan.routes.slot(&key),
            deadline: now + self.connector.timeout(),
        };
        let registration = self.registration(&plan.routes, &call);
        let encoded = self.encoded(&call, key, registration);
        let sent = self.send(plan, call.slot, |_, mode| bucket_job(encoded, mode, call.deadline));
        (call, sent)
    }

    /// The outcome of a request that was sent.
    async fn outcome(
        &self,
        plan: &SendPlan,
        call: &BucketCall<'_>,
        sent: Sent<Outcome>,
    ) -> Result<Outcome, StoreError> {
        let job = |_: &ServerKeys, mode| self.job_again(plan, call, mode, None);
        let outcome = self.await_answer(plan, call.slot, sent, call.deadline, job).await?;
        // Rare, so boxed: the future of each request stays small.
        if registers::has_no_place(&outcome) {
            let decided = timeout_at(call.deadline, Box::pin(self.decide_new(call, outcome))).await;
            return decided.unwrap_or_else(|_| Err(self.late(plan, call)));
        }
        if call.request.enrolls() {
            // The decision stands. If this fails, the next request tries again.
            let enrolled = Box::pin(self.enroll(&plan.routes, call, &outcome));
            let _ = timeout_at(call.deadline, enrolled).await;
        }
        Ok(outcome)
    }

    /// The error of a request whose time is up, which counts against the server of its bucket.
    fn late(&self, plan: &SendPlan, call: &BucketCall<'_>) -> StoreError {
        plan.routes.lanes(call.slot).map_or(StoreError::Timeout, |lanes| out_of_time(lanes))
    }

    /// Sends a request again: there may be room in the register of its bucket now, or the bucket has
    /// a place there `until` a time.
    async fn decide_again(
        &self,
        call: &BucketCall<'_>,
        until: Option<Micros>,
    ) -> Result<Outcome, StoreError> {
        let plan = self.plan(false);
        let job = |_: &ServerKeys, mode| self.job_again(&plan, call, mode, until);
        let sent = self.send(&plan, call.slot, job);
        self.await_answer(&plan, call.slot, sent, call.deadline, job).await
    }

    /// The job of a request that is sent again, to another server or in another mode.
    fn job_again(
        &self,
        plan: &SendPlan,
        call: &BucketCall<'_>,
        mode: SendMode,
        until: Option<Micros>,
    ) -> PendingJob<Outcome> {
        let request = call.request;
        let registration = match until {
            Some(until) => Registration::Until(until),
            None => match self.registration(&plan.routes, call) {
                // A call that declares its keys can have those of one slot only.
                Registration::Here { .. } if mode != SendMode::Together => Registration::Missing,
                registration => registration,
            },
        };
        let key = keys::state(request);
        bucket_job(self.encoded(call, key, registration), mode, call.deadline)
    }

    fn encoded(
        &self,
        call: &BucketCall<'_>,
        key: Vec<u8>,
        registration: Registration,
    ) -> EncodedRequest {
        let now = self.clock.as_ref().map(ManualClock::now);
        EncodedRequest::new(call.request, key, registration, call.owner, now)
    }

    /// The owner of a request in the queues: a caller within the namespace, or for an unnamed caller
    /// the bucket. All new dynamic buckets count as one owner, as do names that share a default bucket.
    ///
    /// Records that the name is used, so it is called once for each bucket of a call: a second time the
    /// name would no longer be new.
    fn note_owner(&self, request: &BucketRequest<'_>, now: Instant) -> Owner {
        let is_global = request.kind == BucketKind::GlobalDefault;
        let group = self.hash(if is_global { "" } else { request.namespace });
        let member = match (request.caller, request.kind) {
            (Some(caller), _) => caller.number(),
            (None, BucketKind::GlobalDefault | BucketKind::NamespaceDefault) => SHARED,
            (None, BucketKind::Configured) => self.hash(request.name),
            (None, BucketKind::Dynamic { .. }) => {
                // What is asked for of a bucket that may be banned is counted first: that is no second use.
                self.note_member((request.namespace, request.name, request.letter()), now)
            }
        };
        Owner { group, member }
    }

    /// The owners of the requests of one call. All requests to one bucket have the same owner, so that
    /// they keep their order in the queue.
    fn note_owners(&self, requests: &[BucketRequest<'_>], now: Instant) -> Vec<Owner> {
        let mut noted = HashMap::with_capacity(requests.len());
        let owner = |request: &BucketRequest<'_>| {
            let bucket = self.hash((request.caller, request.namespace, request.name));
            *noted.entry(bucket).or_insert_with(|| self.note_owner(request, now))
        };
        requests.iter().map(owner).collect()
    }

    /// The member of a group for a name: its own if the name was used lately, else that of all new
    /// names. Records that the name is used.
    fn note_member(&self, name: impl Hash, now: Instant) -> u64 {
        let hash = self.hash(name);
        if self.known.note(hash, now) { hash } else { SHARED }
    }

    /// A hash that differs between processes, so that nobody can find names with equal ones.
    fn hash(&self, name: impl Hash) -> u64 {
        self.hasher.hash_one(name)
    }
}

/// Layouts of states.
impl Inner {
    /// Records some layouts, in one call: for each, how long states in another one may still exist.
    async fn record_layouts_page(
        &self,
        routes: &Routes,
        page: &[(u64, u64, Duration)],
    ) -> Result<Vec<Duration>, StoreError> {
        let slot = routes.slot(keys::LAYOUTS.as_bytes());
        let born = self.connector.oldest_birth();
        let reply = self.values(&[slot], None, |_, _| script::layouts(page, born)).await.pop();
        let reply = reply.ok_or(StoreError::Refused)??;
        let (left, corrupt) =
            script::read_layouts_reply(&reply, page.len()).ok_or(StoreError::Refused)?;
        self.connector.health().metrics().corrupt(Corrupt::Server, corrupt);
        Ok(left)
    }
}

#[cfg(test)]
mod replies;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::bucket::BucketLimit;
    use crate::metrics::{Metrics, StoreMetrics};
    use crate::store::TokenAction;

    #[tokio::test]
    async fn requests_of_one_call_to_a_new_bucket_have_one_owner() {
        let classes = StoreError::ALL.map(StoreError::class);
        let health = Arc::new(Health::new(StoreMetrics::new(&Metrics::new(), classes)));
        // Nothing listens there.
        let servers = Servers::single("redis://127.0.0.1:1").expect("a URL");
        let store = Connector::new(servers, Duration::from_millis(50), health).open();
        let terms = BucketLimit::default().terms();
        let ask = |name| BucketRequest {
            caller: None,
            namespace: "ns",
            name,
            kind: BucketKind::Dynamic { max_buckets: None },
            terms: &terms,
            max_idle_ms: None,
            tokens: 1,
            action: TokenAction::TakeAvailable,
            prefetch: None,
            rewrite: false.into(),
        };
        let note = |names: &[&'static str]| {
            let requests: Vec<_> = names.iter().map(|name| ask(*name)).collect();
            store.0.note_owners(&requests, Instant::now())
        };
        let first = note(&["new", "other", "new"]);
        assert_eq!([first[0], first[2]], [first[1]; 2], "all new names count as one owner");
        let second = note(&["new", "other", "new"]);
        assert_eq!(second[0], second[2]);
        assert_ne!(second[0], second[1], "they are known");
    }
}
