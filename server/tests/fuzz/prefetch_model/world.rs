//! Simulated nodes with their store and register on a manual clock, and an account of grants.

use std::sync::Arc;
use std::time::Duration;

use tollgate_server::domain::bucket::{BucketKind, BucketLimit, Terms};
use tollgate_server::domain::time::{ManualClock, Micros};
use tollgate_server::metrics::{Metrics, PrefetchMetrics};
use tollgate_server::store::members::Members;
use tollgate_server::store::memory::MemoryStore;
use tollgate_server::store::prefetch_store::{PrefetchStore, PrefetchedTokens};
use tollgate_server::store::{BucketRequest, Prefetch, Store, TokenAction, Verdict};

use testkit::START;
use testkit::metrics::Scrape;

pub(crate) const MS: i64 = 1000;
pub(crate) const SECOND: i64 = 1_000_000;

/// Time for which a node is counted after its last heartbeat.
const COUNTED: i64 = 5 * SECOND;

/// Longest time of a call in flight: the store timeout.
const STORE_TIMEOUT: i64 = 50 * MS;

pub(crate) struct Node {
    pub(crate) store: PrefetchStore<MemoryStore>,
    members: Arc<Members>,
    /// Time of its last heartbeat in the register.
    pub(crate) beat: Micros,
    next_beat: Micros,
    next_tidy: Micros,
    /// The node is stalled until this time.
    pub(crate) stopped_until: Micros,
}

/// The nodes, their store and the account of grants.
pub(crate) struct World {
    pub(crate) clock: ManualClock,
    shared: MemoryStore,
    metrics: Metrics,
    prefetch_metrics: Arc<PrefetchMetrics>,
    pub(crate) limit: BucketLimit,
    terms: Terms,
    pub(crate) nodes: Vec<Node>,
    /// Last heartbeats of killed nodes.
    pub(crate) dead: Vec<Micros>,
    /// Granted tokens less the refill since: the maximum over all intervals that end now.
    pub(crate) level: f64,
    last_grant: Micros,
    pub(crate) granted: u64,
    /// Time at which calls in flight were last completed.
    landed: Micros,
}

impl World {
    pub(crate) async fn new(limit: BucketLimit, nodes: usize) -> Self {
        let clock = ManualClock::new(START);
        let metrics = Metrics::new();
        let mut world = Self {
            shared: MemoryStore::with_clock(clock.clone()),
            prefetch_metrics: Arc::new(PrefetchMetrics::new(&metrics, "ns", "b")),
            metrics,
            terms: limit.terms(),
            limit,
            nodes: Vec::new(),
            dead: Vec::new(),
            level: 0.0,
            last_grant: START,
            granted: 0,
            landed: START,
            clock,
        };
        for _ in 0..nodes {
            world.join();
        }
        world
    }

    pub(crate) fn join(&mut self) {
        let members = Arc::new(Members::new(self.clock.clone().into()));
        let prefetched = Arc::new(PrefetchedTokens::new(Arc::clone(&members)));
        let now = self.clock.now();
        self.nodes.push(Node {
            store: PrefetchStore::new(self.shared.clone(), prefetched),
            members,
            beat: now,
            next_beat: now,
            next_tidy: now,
            stopped_until: now,
        });
        self.beat(self.nodes.len() - 1);
    }

    fn beat(&mut self, node: usize) {
        let now = self.clock.now();
        self.nodes[node].beat = now;
        let beats = self.nodes.iter().map(|node| node.beat).chain(self.dead.iter().copied());
        let counted = beats.filter(|beat| now.0 - beat.0 < COUNTED).count();
        self.nodes[node].members.record_heartbeat(counted as u32, Duration::ZERO);
        self.nodes[node].next_beat = Micros(now.0 + SECOND);
    }

    /// Completes calls in flight.
    pub(crate) async fn land(&mut self) {
        for _ in 0..4 {
            tokio::task::yield_now().await;
        }
        self.landed = self.clock.now();
    }

    /// Lets time pass, with the heartbeats and checks of nodes.
    pub(crate) async fn pass(&mut self, us: i64) {
        let end = self.clock.now().0 + us;
        loop {
            let due =
                self.nodes.iter().enumerate().map(|(at, node)| {
                    (node.next_beat.min(node.next_tidy).max(node.stopped_until), at)
                });
            let next = due.min().filter(|(due, _)| due.0 <= end);
            let (due, node) = next.unwrap_or((Micros(end), usize::MAX));
            let latest = self.landed.0 + STORE_TIMEOUT;
            if latest < due.0 {
                self.clock.advance((latest - self.clock.now().0).max(0));
                self.land().await;
                continue;
            }
            self.clock.advance((due.0 - self.clock.now().0).max(0));
            if node == usize::MAX {
                return;
            }
            if self.nodes[node].next_beat <= due {
                self.beat(node);
            } else {
                self.nodes[node].next_tidy = Micros(due.0 + 50 * MS);
                self.nodes[node].store.tidy().await;
            }
        }
    }

    /// Makes one request. Returns whether it was granted.
    pub(crate) async fn ask(&mut self, node: usize, tokens: u64) -> bool {
        let ask = BucketRequest {
            caller: None,
            namespace: "ns",
            name: "b",
            kind: BucketKind::Configured,
            terms: &self.terms,
            max_idle_ms: None,
            tokens,
            action: TokenAction::Take { max_wait_ms: self.limit.wait_timeout_ms },
            prefetch: Some(Prefetch {
                tokens: self.limit.prefetch_tokens,
                metrics: &self.prefetch_metrics,
            }),
            rewrite: false.into(),
        };
        let outcome = self.nodes[node].store.decide(&[ask]).await.pop().unwrap().unwrap();
        if outcome.verdict != Verdict::Granted {
            return false;
        }
        let now = self.clock.now();
        let accrued = (now.0 - self.last_grant.0) as f64 * self.limit.fill_rate / 1e6;
        self.level = (self.level - accrued).max(0.0) + tokens as f64;
        self.last_grant = now;
        self.granted += tokens;
        true
    }

    /// Requests of one token at a rate, to all nodes in turn. Returns their number.
    pub(crate) async fn load(&mut self, per_second: i64, us: i64) -> u64 {
        let count = per_second * us / SECOND;
        for number in 0..count {
            self.ask(number as usize % self.nodes.len(), 1).await;
            self.land().await;
            self.pass(SECOND / per_second).await;
        }
        count as u64
    }

    /// Bound of the grants of an interval beyond its refill.
    pub(crate) fn most(&self) -> f64 {
        let debt = self.limit.fill_rate * self.limit.max_debt_ms as f64 / 1000.0;
        // Tolerance for rounding.
        (self.limit.size_tokens as f64 + debt) * (1.0 + 1e-9) + 1e-3
    }

    pub(crate) fn tokens(&self, fate: &str) -> u64 {
        let text = Scrape::parse(&self.metrics.render());
        text.sum("tollgate_prefetch_tokens_total", &[("fate", fate)]) as u64
    }

    pub(crate) fn served(&self) -> u64 {
        Scrape::parse(&self.metrics.render()).sum("tollgate_prefetch_served_total", &[]) as u64
    }

    /// Balance of the store, in tokens.
    pub(crate) async fn balance(&self) -> f64 {
        let ask = BucketRequest {
            caller: None,
            namespace: "ns",
            name: "b",
            kind: BucketKind::Configured,
            terms: &self.terms,
            max_idle_ms: None,
            // Never granted, so nothing changes.
            tokens: u64::MAX / 2,
            action: TokenAction::TakeAvailable,
            prefetch: None,
            rewrite: false.into(),
        };
        let outcome = self.shared.decide(&[ask]).await.pop().unwrap().unwrap();
        assert_eq!(outcome.verdict, Verdict::Refused);
        self.terms.tokens(outcome.accrued_us)
    }
}
