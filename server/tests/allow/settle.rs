//! Scenarios of settlements: a grant is an estimate, and what was used is charged or given back once.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use testkit::{Redis, START, Servers, Service, TEST_TIMEOUT, eventually, redis_cmd, redis_store};
use tokio::sync::Semaphore;
use tokio::time::timeout;
use tollgate_server::domain::bucket::{BucketKind, BucketLimit, MAX_SPAN_US};
use tollgate_server::domain::time::ManualClock;
use tollgate_server::service::Error;
use tollgate_server::service::allow::{Permit, Query, Settlement, Status};
use tollgate_server::store::look::Looks;
use tollgate_server::store::memory::MemoryStore;
use tollgate_server::store::permits::{PermitKey, PermitStore, PermitUse};
use tollgate_server::store::{BucketRequest, Outcomes, Store, StoreError, TokenAction};

const SECOND: i64 = 1_000_000;

/// One token a second, so that a debt of so many tokens is as many seconds.
const B: &str = "size: 100, fill_rate: 1, wait_timeout_millis: 1000000, max_debt_millis: 20000, \
                 max_tokens_per_request: -1";

fn set_limit<S: Looks>(s: &Service<S>, limit: &str) {
    s.set_limits(&format!("namespaces: {{ ns: {{ buckets: {{ b: {{ {limit} }} }} }} }}"));
}

/// Takes an estimate: its permit, and what is left.
async fn take<S: PermitStore>(s: &Service<S>, bucket: &str, tokens: i64) -> (String, f64) {
    let query = Query { namespace: "ns", bucket, tokens, ..Query::default() };
    let (answer, permit) = s.allow.allow_to_settle(&query, None).await.unwrap();
    assert_eq!(answer.status, Status::Ok);
    (permit.unwrap(), answer.tokens_available)
}

/// A request that takes none beyond `tokens`: its status, and what is left.
async fn ask<S: PermitStore>(s: &Service<S>, bucket: &str, tokens: i64) -> (Status, f64) {
    let query = Query { namespace: "ns", bucket, tokens, ..Query::default() };
    let answer = s.allow.allow(&query).await.unwrap();
    (answer.status, answer.tokens_available)
}

async fn settle<S: PermitStore>(s: &Service<S>, permit: &str, actual: i64) -> Settlement {
    s.allow.settle(&Permit::parse(permit).unwrap(), actual, None).await.unwrap()
}

fn settled(charged: i64, tokens_available: f64) -> Settlement {
    Settlement::Settled { charged, tokens_available }
}

async fn less_more_equal_and_nothing<S: Looks + PermitStore>(s: &Service<S>) {
    set_limit(s, B);
    for (actual, charged, left) in
        [(4, -6, 96.0), (15, 5, 81.0), (10, 0, 71.0), (0, -10, 71.0), (50, 40, 21.0)]
    {
        let (permit, _) = take(s, "b", 10).await;
        assert_eq!(settle(s, &permit, actual).await, settled(charged, left), "{actual}");
    }
    assert_eq!(ask(s, "b", 1).await, (Status::Ok, 20.0));
    // What does not fit is lost.
    let (permit, _) = take(s, "b", 10).await;
    s.clock.advance(85 * SECOND);
    assert_eq!(settle(s, &permit, 0).await, settled(-10, 100.0));
    let (permit, left) = take(s, "b", 1).await;
    assert_eq!(left, 99.0);
    s.clock.advance(SECOND);
    assert_eq!(settle(s, &permit, 1).await, settled(0, 100.0), "of a full bucket");
}

async fn it_counts_once<S: Looks + PermitStore>(s: &Service<S>) {
    set_limit(s, B);
    let (first, _) = take(s, "b", 10).await;
    let (second, _) = take(s, "b", 10).await;
    assert_ne!(first, second);
    assert_eq!(settle(s, &first, 20).await, settled(10, 70.0));
    for actual in [20, 0, i64::MAX] {
        assert_eq!(settle(s, &first, actual).await, Settlement::Already);
    }
    assert_eq!(settle(s, &second, 9).await, settled(-1, 71.0));
    assert_eq!(ask(s, "b", 1).await.1, 70.0);
    let unknown = format!("{:032x}:ns:b", 1);
    assert_eq!(settle(s, &unknown, 20).await, Settlement::Unknown);
    // A permit is one of its bucket.
    let other = first.replace(":ns:b", ":ns:c");
    assert_eq!(settle(s, &other, 20).await, Settlement::Unknown, "no bucket");
    let negative = s.allow.settle(&Permit::parse(&first).unwrap(), -1, None).await;
    assert!(matches!(negative, Err(Error::Invalid(text)) if text.starts_with("actual is -1")));
}

/// It is charged wholly, refuses everything while it is beyond the limit, and is paid off in time.
async fn a_debt_beyond_the_limit<S: Looks + PermitStore>(s: &Service<S>) {
    set_limit(s, &format!("{B}, settle_within: 1d"));
    let (permit, _) = take(s, "b", 100).await;
    let (later, _) = take(s, "b", 1).await;
    assert_eq!(settle(s, &permit, 1100).await, settled(1000, -1001.0));
    s.clock.advance(500 * SECOND);
    assert_eq!(ask(s, "b", 1).await, (Status::Timeout, -501.0));
    // Given back, it is still beyond the limit.
    assert_eq!(settle(s, &later, 0).await, settled(-1, -500.0));
    s.clock.advance(480 * SECOND);
    assert_eq!(ask(s, "b", 1).await, (Status::Timeout, -20.0));
    s.clock.advance(SECOND);
    assert_eq!(ask(s, "b", 1).await, (Status::Ok, -20.0));
    s.clock.advance(40 * SECOND);
    assert_eq!(ask(s, "b", 1).await, (Status::Ok, 19.0));
}

/// The longest debt is four years.
async fn the_largest_numbers<S: Looks + PermitStore>(s: &Service<S>) {
    set_limit(s, B);
    let longest = MAX_SPAN_US / 1e6;
    let (first, _) = take(s, "b", 1).await;
    let (second, _) = take(s, "b", 1).await;
    assert_eq!(settle(s, &first, i64::MAX).await, settled(i64::MAX - 1, -longest));
    assert_eq!(settle(s, &second, i64::MAX).await, settled(i64::MAX - 1, -longest));
    s.clock.advance(1_000_000 * SECOND);
    assert_eq!(ask(s, "b", 1).await, (Status::Timeout, 1e6 - longest));
    s.set_limits(
        "namespaces: { ns: { default_bucket: { size: 9007199254740992, fill_rate: 1e8, \
         max_tokens_per_request: -1, max_debt_millis: 0 } } }",
    );
    let (permit, _) = take(s, "any", 9_007_199_254_740_992).await;
    assert_eq!(
        settle(s, &permit, i64::MAX).await,
        settled(i64::MAX - 9_007_199_254_740_992, -MAX_SPAN_US * 100.0)
    );
    let (status, _) = ask(s, "any", 1).await;
    assert_eq!(status, Status::Timeout);
}

async fn every_kind_of_bucket<S: Looks + PermitStore>(s: &Service<S>) {
    let limit = format!("{{ {B} }}");
    for limits in [
        format!("namespaces: {{ ns: {{ buckets: {{ x: {limit} }} }} }}"),
        format!("namespaces: {{ ns: {{ default_bucket: {limit} }} }}"),
        format!("global_default_bucket: {limit}\nnamespaces: {{ ns: {{}} }}"),
        format!("namespaces: {{ ns: {{ dynamic_bucket_template: {limit} }} }}"),
        "namespaces: { ns: { buckets: { x: { size: 100, fill_rate: 1, prefetch: 5, \
         max_tokens_per_request: -1, wait_timeout_millis: 1000000 } } } }"
            .to_owned(),
    ] {
        s.set_limits(&limits);
        s.clock.advance(1000 * SECOND);
        let (permit, left) = take(s, "x", 10).await;
        assert_eq!(settle(s, &permit, 60).await, settled(50, left - 50.0), "{limits}");
        assert_eq!(settle(s, &permit, 60).await, Settlement::Already, "{limits}");
        let (permit, left) = take(s, "x", 10).await;
        assert_eq!(settle(s, &permit, 0).await, settled(-10, left + 10.0), "{limits}");
        s.clock.advance(1000 * SECOND);
    }
    // A dynamic bucket that is full again has no place any more, and gets none if another one has it.
    s.set_limits(&format!(
        "namespaces: {{ ns: {{ max_dynamic_buckets: 1, dynamic_bucket_template: {{ {B}, settle_within: 1d }} }} }}"
    ));
    let (permit, _) = take(s, "one", 1).await;
    let (again, _) = take(s, "one", 1).await;
    let query = Query { namespace: "ns", bucket: "two", tokens: 1, ..Query::default() };
    assert_eq!(s.allow.allow(&query).await.unwrap().status, Status::TooManyBuckets);
    s.clock.advance(1000 * SECOND);
    assert_eq!(ask(s, "two", 1).await, (Status::Ok, 99.0));
    assert_eq!(settle(s, &permit, 60).await, settled(0, 100.0));
    s.clock.advance(1000 * SECOND);
    assert_eq!(settle(s, &again, 60).await, settled(59, 41.0));
}

/// Others have no permits, and a permit is unknown once its bucket is another one.
async fn other_algorithms<S: Looks + PermitStore>(s: &Service<S>) {
    let others = [
        "algorithm: fixed_window, limit: 100, window: 1h",
        "algorithm: sliding_window, limit: 100, window: 1h",
        "algorithm: sliding_log, limit: 100, window: 1h",
        "algorithm: leaky_bucket, rate: 1, queue: 100",
    ];
    for other in others {
        set_limit(s, B);
        let (permit, left) = take(s, "b", 1).await;
        set_limit(s, other);
        assert_eq!(settle(s, &permit, 50).await, Settlement::Unknown, "{other}");
        let query = Query { namespace: "ns", bucket: "b", tokens: 1, ..Query::default() };
        let (answer, none) = s.allow.allow_to_settle(&query, None).await.unwrap();
        assert_eq!((answer.status, none), (Status::Ok, None), "{other}");
        if !other.contains("leaky") {
            set_limit(s, B);
            assert_eq!(
                settle(s, &permit, 50).await,
                settled(49, left - 49.0),
                "nothing used it up"
            );
            s.clock.advance(1000 * SECOND);
        }
    }
}

async fn refused_requests_have_no_permit<S: Looks + PermitStore>(s: &Service<S>) {
    set_limit(s, &B.replace("1000000", "0"));
    let query = |bucket, tokens| Query { namespace: "ns", bucket, tokens, ..Query::default() };
    for (query, status) in [
        (query("b", 121), Status::Timeout),
        (query("b", -1), Status::Invalid),
        (query("none", 1), Status::NoBucket),
    ] {
        let (answer, permit) = s.allow.allow_to_settle(&query, None).await.unwrap();
        assert_eq!((answer.status, permit), (status, None));
    }
    set_limit(s, &format!("{B}, enforce: false").replace("1000000", "0"));
    let (answer, permit) = s.allow.allow_to_settle(&query("b", 121), None).await.unwrap();
    assert_eq!((answer.status, answer.shadow, permit), (Status::Ok, true, None));
}

testkit::scenarios!(
    less_more_equal_and_nothing,
    it_counts_once,
    a_debt_beyond_the_limit,
    the_largest_numbers,
    every_kind_of_bucket,
    other_algorithms,
    refused_requests_have_no_permit,
);

/// After `settle_within` the estimate stands, and nothing is kept.
#[tokio::test]
async fn late_in_the_embedded_store() {
    let clock = ManualClock::new(START);
    let store = MemoryStore::with_clock(clock.clone());
    let s = Service::new(store.clone(), clock, "namespaces: {}");
    set_limit(&s, &format!("{B}, settle_within: 1500ms"));
    let ms = |ms: i64| ms * 1000;
    let (in_time, _) = take(&s, "b", 10).await;
    let (late, _) = take(&s, "b", 10).await;
    s.clock.advance(ms(1500));
    assert_eq!(settle(&s, &in_time, 0).await, settled(-10, 91.5));
    s.clock.advance(ms(1));
    assert_eq!(settle(&s, &late, 0).await, Settlement::Unknown);
    assert_eq!(settle(&s, &in_time, 0).await, Settlement::Unknown);
    s.clock.advance(ms(499));
    assert_eq!(ask(&s, "b", 1).await.1, 91.0);
    for _ in 0..500 {
        let _ = take(&s, "b", 1).await;
        s.clock.advance(ms(1000));
    }
    assert!(store.permits() > 0);
    s.clock.advance(ms(120_000));
    store.sweep().await;
    assert_eq!(store.permits(), 0);
}

#[tokio::test]
async fn late_in_redis() {
    let redis = Redis::start();
    let s = testkit::scenarios::on_emptied(&redis).await;
    set_limit(&s, &format!("{B}, settle_within: 1h"));
    let (permit, left) = take(&s, "b", 10).await;
    let (used, _) = take(&s, "b", 0).await;
    assert_eq!(settle(&s, &used, 1).await, settled(0, left - 1.0));
    let mut connection = redis.connection();
    let keys: Vec<String> = redis_cmd("KEYS p{ns:b}*").query(&mut connection).unwrap();
    assert_eq!(keys.len(), 2);
    for key in &keys {
        let left_ms: i64 = redis_cmd(&format!("PTTL {key}")).query(&mut connection).unwrap();
        assert!((1..=3_600_000).contains(&left_ms), "{left_ms}");
        let () = redis_cmd(&format!("PEXPIRE {key} 1")).query(&mut connection).unwrap();
    }
    eventually("the permits expire", TEST_TIMEOUT, || {
        let keys: Vec<String> = redis_cmd("KEYS p{ns:b}*").query(&mut connection).unwrap();
        keys.is_empty()
    });
    for permit in [&permit, &used] {
        assert_eq!(settle(&s, permit, 0).await, Settlement::Unknown);
    }
    assert_eq!(ask(&s, "b", 1).await, (Status::Ok, left - 2.0));
}

/// A store that fails, or decides only when it may.
#[derive(Clone)]
struct Gate {
    store: MemoryStore,
    open: Arc<Semaphore>,
    fails: Arc<AtomicBool>,
}

impl Gate {
    fn check(&self) -> Result<(), StoreError> {
        if self.fails.load(Ordering::Relaxed) { Err(StoreError::Timeout) } else { Ok(()) }
    }
}

impl Store for Gate {
    async fn decide(&self, requests: &[BucketRequest<'_>]) -> Outcomes {
        let _open = self.open.acquire().await.unwrap();
        match self.check() {
            Ok(()) => self.store.decide(requests).await,
            Err(error) => requests.iter().map(|_| Err(error)).collect(),
        }
    }
}

impl PermitStore for Gate {
    async fn record_permit(
        &self,
        permit: &PermitKey<'_>,
        tokens: u64,
        within: Duration,
    ) -> Result<(), StoreError> {
        self.store.record_permit(permit, tokens, within).await
    }

    async fn use_permit(&self, permit: &PermitKey<'_>) -> Result<PermitUse, StoreError> {
        self.store.use_permit(permit).await
    }
}

fn gated() -> (Gate, Service<Gate>) {
    let clock = ManualClock::new(START);
    let gate = Gate {
        store: MemoryStore::with_clock(clock.clone()),
        open: Arc::new(Semaphore::new(1)),
        fails: Arc::default(),
    };
    let limits = format!("namespaces: {{ ns: {{ buckets: {{ b: {{ {B} }} }} }} }}");
    (gate.clone(), Service::new(gate, clock, &limits))
}

#[tokio::test]
async fn a_caller_that_gives_up_has_settled() {
    let (gate, s) = gated();
    let (permit, _) = take(&s, "b", 10).await;
    let closed = gate.open.acquire().await.unwrap();
    let given_up = timeout(Duration::from_millis(20), settle(&s, &permit, 30)).await;
    assert!(given_up.is_err(), "{given_up:?}");
    drop(closed);
    // The gate is fair: the settlement comes first.
    assert_eq!(ask(&s, "b", 1).await, (Status::Ok, 69.0));
    assert_eq!(settle(&s, &permit, 30).await, Settlement::Already);
}

#[tokio::test]
async fn a_charge_that_fails_leaves_the_estimate() {
    let (gate, s) = gated();
    let (permit, _) = take(&s, "b", 10).await;
    gate.fails.store(true, Ordering::Relaxed);
    let failed = s.allow.settle(&Permit::parse(&permit).unwrap(), 30, None).await;
    assert!(matches!(failed, Err(Error::Unavailable)), "{failed:?}");
    gate.fails.store(false, Ordering::Relaxed);
    assert_eq!(settle(&s, &permit, 30).await, Settlement::Already);
    assert_eq!(ask(&s, "b", 1).await, (Status::Ok, 89.0));
}

/// Two nodes settle each permit at the same time.
async fn exactly_one_node_charges(servers: &impl Servers) {
    let clock = ManualClock::new(START);
    let limits = format!("namespaces: {{ ns: {{ buckets: {{ b: {{ {B} }} }} }} }}");
    servers.delete_all_data();
    let mut nodes = Vec::new();
    for _ in 0..2 {
        let store = redis_store(servers, clock.clone()).await;
        nodes.push(Service::new(store, clock.clone(), &limits));
    }
    let [one, two] = &nodes[..] else { panic!("two nodes") };
    for _ in 0..30 {
        let (permit, left) = take(one, "b", 2).await;
        let both = tokio::join!(settle(one, &permit, 1), settle(two, &permit, 1));
        let charged = settled(-1, left + 1.0);
        assert!(
            both == (charged, Settlement::Already) || both == (Settlement::Already, charged),
            "{both:?}"
        );
        assert_eq!(ask(two, "b", 1).await.1, left);
    }
}

#[tokio::test]
async fn exactly_one_of_two_nodes_charges() {
    exactly_one_node_charges(&Redis::start()).await;
}

#[tokio::test]
async fn exactly_one_of_two_nodes_charges_in_a_redis_cluster() {
    let servers = testkit::redis_cluster::RedisCluster::start_with(3, 0);
    exactly_one_node_charges(&servers).await;
}

/// What is no permit of tollgate's is unknown, and settles nothing.
#[tokio::test]
async fn foreign_values_in_redis() {
    let redis = Redis::start();
    let s = testkit::scenarios::on_emptied(&redis).await;
    set_limit(&s, B);
    let (permit, left) = take(&s, "b", 10).await;
    let key = format!("p{{ns:b}}{}", permit.split(':').next().unwrap());
    let mut connection = redis.connection();
    let set = |value: &[u8], connection: &mut redis::Connection| {
        redis::cmd("SET").arg(&key).arg(value).exec(connection).unwrap();
    };
    for value in [&b"x"[..], b"123456789", &[0xff; 8]] {
        set(value, &mut connection);
        assert_eq!(settle(&s, &permit, 50).await, Settlement::Unknown);
    }
    redis_cmd("DEL").arg(&key).exec(&mut connection).unwrap();
    redis_cmd("LPUSH").arg(&key).arg(1).exec(&mut connection).unwrap();
    assert_eq!(settle(&s, &permit, 50).await, Settlement::Unknown);
    assert_eq!(ask(&s, "b", 1).await.1, left - 1.0);
}

/// A permit is for the state that it was recorded of, whatever serves the name.
#[tokio::test]
async fn permits_of_two_kinds_are_apart() {
    let store = MemoryStore::with_clock(ManualClock::new(START));
    let terms = BucketLimit::default().terms();
    let bucket = |kind| BucketRequest {
        caller: None,
        namespace: "ns",
        name: "b",
        kind,
        terms: &terms,
        max_idle_ms: None,
        tokens: 1,
        action: TokenAction::TakeAvailable,
        prefetch: None,
        rewrite: false.into(),
    };
    let (configured, shared) =
        (bucket(BucketKind::Configured), bucket(BucketKind::NamespaceDefault));
    let key = |bucket| PermitKey { bucket, id: "id" };
    store.record_permit(&key(&configured), 7, Duration::from_secs(1)).await.unwrap();
    assert_eq!(store.use_permit(&key(&shared)).await, Ok(PermitUse::Unknown));
    assert_eq!(store.use_permit(&key(&configured)).await, Ok(PermitUse::First(7)));
    assert_eq!(store.use_permit(&key(&configured)).await, Ok(PermitUse::Again));
}
