//! The bound on dynamic buckets: exact over nodes and the masters of a cluster, whatever names come
//! and go, and after a register was lost.

use std::collections::HashSet;
use std::time::Duration;

use futures_util::future::join_all;
use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use testkit::cluster::reserve_quarter;
use testkit::http::{allow, is_shared_grant};
use testkit::redis_cluster::RedisCluster;
use testkit::{
    LimitsFile, Node, Redis, Servers, command_stats, connector, eventually, property_tests, runtime,
};
use tollgate_server::domain::bucket::{BucketKind, BucketLimit, Terms};
use tollgate_server::metrics::Metrics;
use tollgate_server::store::redis::{RedisStore, slot};
use tollgate_server::store::{
    BucketRequest, Outcome, Store as _, StoreError, TokenAction, Verdict,
};

const SECOND: Duration = Duration::from_secs(1);

/// Buckets that are full again within a fifth of a second.
fn quick() -> Terms {
    BucketLimit { size_tokens: 10, fill_rate: 100.0, max_debt_ms: 0, ..BucketLimit::default() }
        .terms()
}

/// Buckets that stay in use for longer than a test.
pub(crate) fn slow() -> Terms {
    BucketLimit { size_tokens: 1000, fill_rate: 1.0, max_debt_ms: 0, ..BucketLimit::default() }
        .terms()
}

/// A store as one node has it.
pub(crate) async fn open(url: &str) -> RedisStore {
    connector(url, &Metrics::new()).await.open()
}

/// A node's decisions on one namespace.
#[derive(Clone, Copy)]
pub(crate) struct Bounded<'a> {
    pub(crate) store: &'a RedisStore,
    pub(crate) bound: u64,
    pub(crate) max_idle_ms: Option<u64>,
    /// Whether a request also registers a bucket that has a state.
    pub(crate) rewrite: bool,
}

impl Bounded<'_> {
    pub(crate) fn request<'r>(
        &self,
        name: &'r str,
        terms: &'r Terms,
        tokens: u64,
    ) -> BucketRequest<'r> {
        BucketRequest {
            caller: None,
            namespace: "ns",
            name,
            kind: BucketKind::Dynamic { max_buckets: Some(self.bound) },
            terms,
            max_idle_ms: self.max_idle_ms,
            tokens,
            action: TokenAction::Take { max_wait_ms: 0 },
            prefetch: None,
            rewrite: self.rewrite.into(),
        }
    }

    /// Asks for tokens of a bucket until the store decides.
    pub(crate) async fn take(&self, name: &str, terms: &Terms, tokens: u64) -> Verdict {
        let request = self.request(name, terms, tokens);
        loop {
            match self.store.decide(&[request]).await.pop().unwrap() {
                Ok(outcome) => return outcome.verdict,
                // A busy machine.
                Err(StoreError::Timeout | StoreError::Unreachable) => {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
                Err(error) => panic!("{error}"),
            }
        }
    }
}

/// The names of all buckets with a state. No request may be in flight.
fn live(masters: &mut [redis::Connection]) -> HashSet<String> {
    let keys = |master: &mut redis::Connection| -> Vec<String> {
        redis::cmd("KEYS").arg("b{ns:*").query(master).unwrap()
    };
    masters.iter_mut().flat_map(keys).collect()
}

/// The names in the register.
pub(crate) fn registered(masters: &mut [redis::Connection]) -> Vec<String> {
    let names = |master: &mut redis::Connection| -> Vec<String> {
        redis::cmd("ZRANGE").arg("i{ns}").arg(0).arg(-1).query(master).unwrap_or_default()
    };
    masters.iter_mut().flat_map(names).collect()
}

/// Registers a bucket as a node does that is killed before it decides.
pub(crate) fn register_only(masters: &mut [redis::Connection], name: &str, bound: u64) {
    let text = include_str!("../../../lua/register.lua");
    for master in masters {
        let placed: Result<Vec<redis::Value>, _> = redis::cmd("EVAL")
            .arg(text)
            .arg(1)
            .arg("i{ns}")
            .arg(0)
            .arg(name)
            .arg(bound)
            .query(master);
        if let Err(error) = placed {
            assert_eq!(error.code(), Some("MOVED"), "{error}");
        }
    }
}

/// What happens in a random trace.
#[derive(Clone, Debug)]
enum Step {
    /// Both nodes ask for tokens of these buckets at once; most are full again soon.
    Ask { names: Vec<u8>, tokens: u64 },
    /// A node is killed after it has registered a bucket.
    Killed(u8),
    /// Time passes.
    Pause(u64),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (proptest::collection::vec(0..40_u8, 1..30), select_tokens())
            .prop_map(|(names, tokens)| Step::Ask { names, tokens }),
        1 => (0..40_u8).prop_map(Step::Killed),
        2 => (1..300_u64).prop_map(Step::Pause),
    ]
}

fn select_tokens() -> impl Strategy<Value = u64> {
    // More than a bucket holds are refused, and leave no state.
    prop_oneof![4 => 1..10_u64, 1 => Just(11)]
}

/// Runs random traces by two nodes, and checks after each step that there are no more buckets than
/// the bound allows, and at the end of each that there can be as many.
fn the_bound_is_exact(servers: &impl Servers, cases: u32) {
    let runtime = runtime();
    let stores = [0, 1].map(|_| runtime.block_on(open(&servers.store_url())));
    // States expire by the time of Redis.
    let pause = |ms: u64| {
        runtime.block_on(async { tokio::time::sleep(Duration::from_millis(ms)).await });
    };
    let mut masters = servers.masters();
    let config = property_tests::config("registers", property_tests::cases(cases));
    let trace = (
        prop_oneof![9 => 1..8_u64, 1 => Just(300)],
        any::<bool>(),
        proptest::collection::vec(step(), 1..12),
    );
    let masters = std::cell::RefCell::new(&mut masters);
    TestRunner::new(config)
        .run(&trace, |(bound, idle, steps)| {
            let mut masters = masters.borrow_mut();
            for master in masters.iter_mut() {
                redis::cmd("FLUSHDB").exec(master).unwrap();
            }
            // A node may still take the register for full.
            pause(110);
            let max_idle_ms = idle.then_some(50);
            let nodes = stores.each_ref().map(|store| Bounded {
                store,
                bound,
                max_idle_ms,
                rewrite: false,
            });
            for step in &steps {
                match step {
                    Step::Ask { names, tokens } => runtime.block_on(async {
                        let terms = quick();
                        let names: Vec<_> = names.iter().map(|n| format!("user-{n}")).collect();
                        let asks = names.iter().enumerate().map(|(at, name)| {
                            let node = &nodes[at % 2];
                            node.take(name, &terms, *tokens)
                        });
                        join_all(asks).await;
                    }),
                    Step::Killed(name) => {
                        register_only(&mut masters, &format!("user-{name}"), bound);
                    }
                    Step::Pause(ms) => {
                        pause(*ms);
                    }
                }
                let live = live(&mut masters);
                let registered = registered(&mut masters);
                prop_assert!(registered.len() as u64 <= bound, "{registered:?} of {bound}");
                let has_place =
                    |key: &String| registered.iter().any(|n| *key == format!("b{{ns:{n}}}"));
                prop_assert!(live.iter().all(has_place), "{live:?} without {registered:?}");
            }
            // Places without a state are kept for ten seconds.
            for master in masters.iter_mut() {
                let old = "for _, name in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
                    redis.call('ZADD', KEYS[1], 1, name) end";
                let aged = redis::cmd("EVAL").arg(old).arg(1).arg("i{ns}").exec(master);
                if let Err(error) = aged {
                    assert_eq!(error.code(), Some("MOVED"), "{error}");
                }
            }
            pause(350);
            let terms = slow();
            let lasting = stores.each_ref().map(|store| Bounded {
                store,
                bound,
                max_idle_ms: None,
                rewrite: false,
            });
            let verdicts = runtime.block_on(async {
                let names: Vec<_> = (0..bound + 5).map(|n| format!("last-{n}")).collect();
                let asks = names
                    .iter()
                    .enumerate()
                    .map(|(at, name)| lasting[at % 2].take(name, &terms, 900));
                join_all(asks).await
            });
            let granted = verdicts.iter().filter(|v| **v == Verdict::Granted).count() as u64;
            prop_assert_eq!(granted, bound, "{:?}", verdicts);
            prop_assert_eq!(live(&mut masters).len() as u64, bound);
            Ok(())
        })
        .unwrap();
}

#[test]
fn the_bound_is_exact_over_two_nodes() {
    let _machine = reserve_quarter();
    the_bound_is_exact(&Redis::start(), 12);
}

#[test]
fn the_bound_is_exact_over_two_nodes_and_three_shards() {
    let _machine = reserve_quarter();
    the_bound_is_exact(&RedisCluster::start_with(3, 0), 12);
}

const LIMITS: &str = "
namespaces:
  ns:
    max_dynamic_buckets: 12
    dynamic_bucket_template: { size: 1000, fill_rate: 1, wait_timeout_millis: 0, max_debt_millis: 0 }
";

/// A master that comes back empty loses the register, while the buckets on the others stay in use.
#[test]
fn buckets_count_again_after_their_register_is_lost() {
    let _machine = reserve_quarter();
    let mut cluster = RedisCluster::start_with(3, 0);
    let limits = LimitsFile::new(LIMITS);
    let node = Node::start(&limits.path(), &["--store", &cluster.url(), "--store-timeout", "2s"]);
    let owner = cluster.owner(slot(b"i{ns}")).unwrap();
    let on_others =
        |name: &String| cluster.owner(slot(format!("b{{ns:{name}}}").as_bytes())) != Some(owner);
    let names: Vec<String> =
        (0..).map(|n| format!("user-{n}")).filter(on_others).take(12).collect();
    for name in &names {
        eventually("a grant", 10 * SECOND, || is_shared_grant(&allow(node.http, "ns", name)));
    }
    let refused =
        |name: &str| allow(node.http, "ns", name)["status"] == "REJECTED_TOO_MANY_BUCKETS";
    assert!(refused("one-more"));

    cluster.kill(owner);
    cluster.start_again(owner);
    cluster.wait_until_whole();
    // Each bucket always has a state.
    eventually("all buckets count again", 60 * SECOND, || {
        for name in &names {
            allow(node.http, "ns", name);
        }
        registered(&mut [cluster.connection(owner)]).len() == names.len()
    });
    assert!(refused("one-more"));
    assert!(is_shared_grant(&allow(node.http, "ns", &names[0])), "those in use don't notice");
}

/// The register is lost while a node takes it for full, and no longer does when it has the answer.
#[test]
fn a_bucket_is_registered_again_whose_register_was_taken_for_full() {
    let _machine = reserve_quarter();
    let redis = Redis::start();
    let runtime = runtime();
    let store = runtime.block_on(open(&redis.store_url()));
    let mut inside = redis.connection();
    let terms = slow();
    let node = Bounded { store: &store, bound: 2, max_idle_ms: None, rewrite: false };
    runtime.block_on(async {
        assert_eq!(node.take("a", &terms, 1).await, Verdict::Granted);
        assert_eq!(node.take("b", &terms, 1).await, Verdict::Granted);
        assert_eq!(node.take("c", &terms, 1).await, Verdict::TooManyBuckets);
    });
    redis::pipe()
        .cmd("DEL")
        .arg("i{ns}")
        .cmd("CLIENT")
        .arg("PAUSE")
        .arg(150)
        .exec(&mut inside)
        .unwrap();
    let rewriting = Bounded { rewrite: true, ..node };
    assert_eq!(runtime.block_on(rewriting.take("a", &terms, 1)), Verdict::Granted);
    assert_eq!(registered(&mut [inside]), ["a"]);
}

/// All names have their places already, so none needs one from the others of its call.
#[test]
fn names_with_a_place_in_a_full_register_are_decided_in_one_call() {
    let _machine = reserve_quarter();
    let redis = Redis::start();
    let runtime = runtime();
    let store = runtime.block_on(open(&redis.store_url()));
    let mut inside = redis.connection();
    let terms = slow();
    let node = Bounded { store: &store, bound: 3, max_idle_ms: None, rewrite: false };
    // The lane connects, and the server loads the script.
    assert_eq!(runtime.block_on(node.take("a", &terms, 1)), Verdict::Granted);
    redis::cmd("DEL").arg("b{ns:a}").exec(&mut inside).unwrap();
    for name in ["b", "c"] {
        register_only(&mut [redis.connection()], name, 3);
    }
    redis::cmd("CONFIG").arg("RESETSTAT").exec(&mut inside).unwrap();
    let requests = ["a", "b", "c", "d"].map(|name| node.request(name, &terms, 1));
    let outcomes = runtime.block_on(store.decide(&requests[..3]));
    let granted = |outcome: &Result<Outcome, StoreError>| {
        outcome.is_ok_and(|outcome| outcome.verdict == Verdict::Granted)
    };
    assert!(outcomes.iter().all(granted), "{outcomes:?}");
    assert_eq!(command_stats(&mut inside, "evalsha").calls, 1);
    let beyond = runtime.block_on(store.decide(&requests[3..]));
    assert_eq!(beyond[0].unwrap().verdict, Verdict::TooManyBuckets);
}

/// The register was lost, and those who use the buckets make a new one.
#[test]
fn a_register_of_enrolled_buckets_expires() {
    let _machine = reserve_quarter();
    let redis = Redis::start();
    let runtime = runtime();
    let store = runtime.block_on(open(&redis.store_url()));
    let mut inside = redis.connection();
    let terms = slow();
    let node = Bounded { store: &store, bound: 3, max_idle_ms: None, rewrite: false };
    assert_eq!(runtime.block_on(node.take("a", &terms, 1)), Verdict::Granted);
    redis::cmd("DEL").arg("i{ns}").exec(&mut inside).unwrap();
    let rewriting = Bounded { rewrite: true, ..node };
    assert_eq!(runtime.block_on(rewriting.take("a", &terms, 1)), Verdict::Granted);
    assert_eq!(registered(&mut [redis.connection()]), ["a"]);
    let ttl: i64 = redis::cmd("TTL").arg("i{ns}").query(&mut inside).unwrap();
    assert!(ttl > 0, "{ttl}");
}

/// Keys of version 0.1.0, which kept the buckets of a bounded namespace under other keys.
#[test]
fn bounded_namespaces_of_0_1_0_begin_full() {
    let _machine = reserve_quarter();
    let redis = Redis::start();
    let mut inside = redis.connection();
    redis::pipe()
        .cmd("SET")
        .arg("m{ns}user")
        .arg("not full..12")
        .arg("EX")
        .arg(600)
        .cmd("ZADD")
        .arg("r{ns}")
        .arg(1_700_000_000_000_000_i64)
        .arg("user")
        .exec(&mut inside)
        .unwrap();
    let limits = LimitsFile::new(LIMITS);
    let node = Node::start(&limits.path(), &["--store", &redis.url(), "--store-timeout", "2s"]);
    let answer = allow(node.http, "ns", "user");
    assert!(is_shared_grant(&answer), "{answer}");
    assert_eq!(answer["tokensAvailable"], 999.0, "{answer}");
    // The old names don't count.
    for number in 1..12 {
        let answer = allow(node.http, "ns", &format!("user-{number}"));
        assert!(is_shared_grant(&answer), "{number}: {answer}");
    }
    assert_eq!(allow(node.http, "ns", "one-more")["status"], "REJECTED_TOO_MANY_BUCKETS");
    // Nothing touches the old keys.
    assert_eq!(
        redis::cmd("EXISTS").arg("m{ns}user").arg("r{ns}").query::<u32>(&mut inside).unwrap(),
        2
    );
}
