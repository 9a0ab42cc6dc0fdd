//! Compares `lua/allow.lua` with the embedded store, the specification, over random traces of
//! requests, waits, overrides, changes of limits, and time that passes or steps back. Every answer
//! must be equal; balances up to rounding, as equal requests in a batch are summed at once.
//!
//! `PROPTEST_CASES` sets the number of traces (default 10,000); a Redis Cluster gets a tenth of
//! them.

use std::cell::{Cell, RefCell};
use std::collections::HashSet;

use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::TestRunner;
use testkit::redis_cluster::RedisCluster;
use testkit::{Redis, START, Servers, property_tests, redis_store, runtime};
use tollgate_server::domain::bucket::{BucketKind, BucketLimit, MAX_SPAN_US};
use tollgate_server::domain::time::{ManualClock, Micros};
use tollgate_server::domain::window::{Window, WindowKind};
use tollgate_server::store::memory::MemoryStore;
use tollgate_server::store::{BucketRequest, Outcome, Store, TokenAction, Verdict};

const NAMES: [&str; 5] = ["a", "b", "2001:db8::1", "{c}%7D", "ключ"];

/// Deletes buckets that have expired by ARGV[1]; replies with the keys of the others.
const SWEEP: &str = "
    local live = {}
    for _, key in ipairs(redis.call('KEYS', '[bdBDLMCE]{*')) do
        local at = redis.call('PEXPIRETIME', key)
        if at >= 0 and tonumber(ARGV[1]) > at then redis.call('DEL', key)
        else table.insert(live, key) end
    end
    return live";

/// The limits of one namespace.
#[derive(Clone, Debug)]
struct Rules {
    limit: BucketLimit,
    max_buckets: Option<u64>,
    /// Number of [`NAMES`] that are configured buckets.
    configured: usize,
    prefetch_tokens: u64,
    reserve_percent: u8,
}

#[derive(Clone, Debug)]
struct TokenRequest {
    /// Index into [`NAMES`]; the next index is the default bucket.
    name: usize,
    tokens: u64,
    kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Take {
        /// Wait limit, in percent of the bucket's own.
        override_percent: Option<u64>,
    },
    /// Take, and leave the reserve.
    TakeUnreserved,
    TakeAvailable,
    GiveBack,
    Count,
}

#[derive(Clone, Debug)]
struct Step {
    pause_us: i64,
    /// Index of the rules that apply from here on.
    rules: usize,
    /// Number of nodes that the node counts.
    nodes: u32,
    batch: Vec<TokenRequest>,
}

fn rules() -> impl Strategy<Value = Rules> {
    let rate = prop_oneof![
        select(vec![
            1.0 / 86_400.0,
            0.1,
            1.0,
            3.0,
            10.0,
            50.5,
            100.0 / 60.0,
            1000.0,
            123_456.7,
            1e8
        ]),
        (-10.0..18.0_f64).prop_map(f64::exp),
    ];
    let size = prop_oneof![1..20_u64, 1..2000_u64];
    let max_debt_ms = select(vec![0, 1, 500, 10_000, 60_000, 86_400_000, 126_230_400_000]);
    let wait_timeout_ms = select(vec![0, 10, 1000, 100_000]);
    let max_idle_ms = select(vec![None, None, Some(1), Some(1000), Some(60_000)]);
    let max_buckets = select(vec![None, Some(1), Some(2), Some(3)]);
    let prefetch_tokens = prop_oneof![2 => Just(0), 1 => 1..200_u64];
    let reserve_percent = prop_oneof![select(vec![1, 20, 50, 100]), 1..=100_u8];
    let who = (max_buckets, 0..3_usize, prefetch_tokens, reserve_percent);
    (rate, size, max_debt_ms, wait_timeout_ms, max_idle_ms, who)
        .prop_map(
            |(
                fill_rate,
                size_tokens,
                max_debt_ms,
                wait_timeout_ms,
                max_idle_ms,
                (max_buckets, configured, prefetch_tokens, reserve_percent),
            )| {
                let limit = BucketLimit {
                    size_tokens,
                    fill_rate,
                    wait_timeout_ms,
                    max_idle_ms,
                    max_debt_ms,
                    ..BucketLimit::default()
                };
                Rules { limit, max_buckets, configured, prefetch_tokens, reserve_percent }
            },
        )
        // Longer spans are invalid in a limits file.
        .prop_filter("fills within four years", |rules| rules.limit.terms().cap_us <= MAX_SPAN_US)
}

/// Rules of any algorithm.
fn any_rules() -> impl Strategy<Value = Rules> {
    let length_us = select(vec![1000, 7_000_003, 60_000_000, 3_600_000_000, 86_400_000_000]);
    let kind = prop_oneof![
        3 => select(vec![WindowKind::Fixed, WindowKind::Sliding, WindowKind::Log]),
        1 => (1..3_i64, 1..3_i64).prop_map(|(lasting_us, kept_us)| WindowKind::Ban { lasting_us, kept_us }),
    ];
    let window = (rules(), length_us, kind).prop_map(|(rules, length_us, kind)| {
        let BucketLimit { size_tokens, max_idle_ms, .. } = rules.limit;
        let (kind, max_idle_ms) = match kind {
            WindowKind::Ban { lasting_us: factor, kept_us: kept_factor } => {
                let lasting_us = length_us * (1 + factor);
                (WindowKind::Ban { lasting_us, kept_us: lasting_us * kept_factor }, None)
            }
            kind => (kind, max_idle_ms),
        };
        let window = BucketLimit::of_window(size_tokens, Window { length_us, kind });
        let limit = BucketLimit { max_idle_ms, ..window };
        Rules { limit, prefetch_tokens: 0, ..rules }
    });
    let leaky = (rules(), 0..50_u64).prop_map(|(rules, queue)| {
        let BucketLimit { fill_rate, max_idle_ms, .. } = rules.limit;
        let limit = BucketLimit { max_idle_ms, ..BucketLimit::leaky(fill_rate, queue) };
        Rules { limit, prefetch_tokens: 0, ..rules }
    });
    prop_oneof![4 => rules(), 3 => window, 1 => leaky]
}

fn request() -> impl Strategy<Value = TokenRequest> {
    let tokens =
        prop_oneof![4 => 1..10_u64, 2 => 1..500_u64, 1 => select(vec![1_000_000, i64::MAX as u64])];
    let take = proptest::option::of(0..100_u64);
    let kind = prop_oneof![
        6 => take.prop_map(|override_percent| Kind::Take { override_percent }),
        3 => Just(Kind::TakeUnreserved),
        1 => Just(Kind::TakeAvailable),
        1 => Just(Kind::GiveBack),
        1 => Just(Kind::Count),
    ];
    (0..=NAMES.len(), tokens, kind).prop_map(|(name, tokens, kind)| TokenRequest {
        name,
        tokens,
        kind,
    })
}

fn step(rules: usize) -> impl Strategy<Value = Step> {
    let pause_us = prop_oneof![
        Just(0),
        1..100_i64,
        1..100_000_i64,
        1..3_000_000_i64,
        1..100_000_000_i64,
        1..100_000_000_000_i64,
        -1000..0_i64,
        -100_000_000..0_i64,
    ];
    // Mostly the first rules apply.
    let rules = prop_oneof![3 => Just(0), 1 => 0..rules];
    let batch = proptest::collection::vec(request(), 1..4);
    // Prefetch sends equal requests.
    let batch = (batch, 1..4_usize).prop_map(|(batch, times)| {
        batch.into_iter().flat_map(|request| std::iter::repeat_n(request, times)).collect()
    });
    (pause_us, rules, 1..4_u32, batch).prop_map(|(pause_us, rules, nodes, batch)| Step {
        pause_us,
        rules,
        nodes,
        batch,
    })
}

/// Algorithms whose states are of different forms have states of their own.
fn form(limit: &BucketLimit) -> u8 {
    form_of(limit.algorithm.windows())
}

fn form_of(window: Option<Window>) -> u8 {
    match window.map(|window| window.kind) {
        None => 0,
        Some(WindowKind::Fixed | WindowKind::Sliding) => 1,
        Some(WindowKind::Log) => 2,
        Some(WindowKind::Ban { .. }) => 3,
    }
}

fn trace() -> impl Strategy<Value = (Vec<Rules>, Vec<Step>)> {
    let rules = (any::<bool>(), proptest::collection::vec(any_rules(), 3));
    let rules = rules.prop_map(|(bounded, mut rules)| {
        // Scenarios test changes between bounded and unbounded namespaces, and from dynamic buckets
        // to configured ones. (In Redis these may keep their place for longer.) Nor from token buckets to
        // windows, for which the embedded store has another place.
        let (configured, first) = (rules[0].configured, rules[0].limit);
        for rules in &mut rules {
            if bounded && form(&rules.limit) != form(&first) {
                rules.limit = first;
            }
            rules.max_buckets = rules.max_buckets.filter(|_| bounded).or(bounded.then_some(2));
            rules.configured = if bounded { configured } else { rules.configured };
        }
        rules
    });
    (rules, proptest::collection::vec(step(3), 1..20))
}

#[test]
fn both_stores_give_the_same_answers() {
    give_the_same_answers(&Redis::start(), 1);
}

#[test]
fn the_embedded_store_and_a_redis_cluster_give_the_same_answers() {
    give_the_same_answers(&RedisCluster::start_with(3, 0), 10);
}

/// Runs one of `part` traces.
fn give_the_same_answers(servers: &impl Servers, part: u32) {
    let runtime = runtime();
    let clock = ManualClock::new(START);
    let memory = MemoryStore::with_clock(clock.clone());
    let shared = runtime.block_on(redis_store(servers, clock.clone()));
    let masters = RefCell::new(servers.masters());
    let config = property_tests::config("differential", property_tests::cases(5_000) / part);
    let (traces, answers) = (Cell::new(0_u64), Cell::new([0_u64; 3]));
    TestRunner::new(config)
        .run(&trace(), |(rules, steps)| {
            traces.set(traces.get() + 1);
            let namespace = "ns";
            memory.clear();
            servers.delete_all_data();
            // Long times are rounded, and equal requests are summed in another order.
            let largest_us =
                rules.iter().map(|r| r.limit.terms().longest_life_us()).fold(0.0, f64::max);
            for (at, step) in steps.iter().enumerate() {
                if step.pause_us < 0 {
                    // A step back must not revive expired buckets in one of the stores.
                    runtime.block_on(memory.sweep_buckets());
                    sweep(&mut masters.borrow_mut(), clock.now());
                }
                clock.advance(step.pause_us);
                drop_unused_places(&mut masters.borrow_mut(), clock.now());
                let rules = &rules[step.rules];
                let terms = match (rules.limit.terms(), rules.prefetch_tokens) {
                    (terms, 0) => terms,
                    (terms, tokens) => terms.beside_prefetch(tokens, step.nodes),
                };
                // Set by nodes that have changed their limits, or have just started.
                let rewrite = step.rules != 0 || at > 0 && steps[..at].iter().any(|s| s.rules != 0);
                let asks: Vec<BucketRequest<'_>> = step
                    .batch
                    .iter()
                    .map(|request| ask(namespace, rules, &terms, request, rewrite))
                    .collect();
                let asks = equal_ones_together(asks);
                // In a bounded namespace a request may free a place. Redis decides new buckets that
                // found none after all others of their batch.
                let size = if rules.max_buckets.is_some() { 1 } else { asks.len() };
                let batches = || asks.chunks(size);
                let expected: Vec<_> =
                    batches().flat_map(|asks| runtime.block_on(memory.decide(asks))).collect();
                let mut found = Vec::new();
                for asks in batches() {
                    found.extend(runtime.block_on(shared.decide(asks)));
                    drop_unused_places(&mut masters.borrow_mut(), clock.now());
                }
                prop_assert_eq!(expected.len(), found.len());
                for ((expected, found), ask) in expected.iter().zip(&found).zip(&asks) {
                    prop_assert!(
                        equal_up_to_rounding(expected.as_ref().unwrap(), found.as_ref().unwrap(), largest_us, ask),
                        "step {at}: {step:?} under {rules:?}\nembedded {expected:?}\nRedis    {found:?}"
                    );
                }
                for outcome in expected.into_iter().flatten() {
                    let mut counts = answers.get();
                    counts[match outcome.verdict {
                        Verdict::Granted => 0,
                        Verdict::Refused => 1,
                        Verdict::TooManyBuckets => 2,
                    }] += 1;
                    answers.set(counts);
                }
            }
            Ok(())
        })
        .unwrap();
    let [granted, refused, too_many] = answers.get();
    println!(
        "{} traces: {granted} granted, {refused} refused, {too_many} too many buckets",
        traces.get()
    );
    // Traces reach every kind of answer often.
    assert!(granted.min(refused).min(too_many) > traces.get() / 2);
}

/// Puts equal requests to one bucket behind the first of them, as a batch does.
fn equal_ones_together(mut asks: Vec<BucketRequest<'_>>) -> Vec<BucketRequest<'_>> {
    let equal = |a: &BucketRequest<'_>, b: &BucketRequest<'_>| {
        (a.kind, a.name) == (b.kind, b.name) && a.charge() == b.charge()
    };
    let all = asks.clone();
    asks.sort_by_key(|ask| all.iter().position(|first| equal(first, ask)));
    asks
}

/// Deletes buckets that have expired by the manual clock, as Redis does by its own. Returns the keys of
/// the others.
fn sweep(masters: &mut [redis::Connection], now: Micros) -> HashSet<String> {
    let live = |master: &mut redis::Connection| -> Vec<String> {
        redis::Script::new(SWEEP).arg(now.as_millis()).invoke(master).unwrap()
    };
    masters.iter_mut().flat_map(live).collect()
}

/// Takes back places that were given to a bucket before it was decided, and that it keeps for some
/// seconds even if it then has no state. All other places without a state are left to the store.
fn drop_unused_places(masters: &mut [redis::Connection], now: Micros) {
    let given = |master: &mut redis::Connection| -> Vec<String> {
        let mut read = redis::cmd("ZRANGE");
        read.arg("i{ns}").arg(0).arg(-1).arg("WITHSCORES");
        let registered: Vec<(String, f64)> = read.query(master).unwrap_or_default();
        let given = registered.into_iter().filter(|(_, score)| score.fract() != 0.0);
        given.map(|(name, _)| name).collect()
    };
    let given: Vec<Vec<String>> = masters.iter_mut().map(given).collect();
    if given.iter().all(Vec::is_empty) {
        return;
    }
    let live = sweep(masters, now);
    for (master, names) in masters.iter_mut().zip(given) {
        let is_live = |name: &String| {
            ["b", "B", "L", "C"]
                .iter()
                .any(|letter| live.contains(&format!("{letter}{{ns:{name}}}")))
        };
        for name in names.iter().filter(|name| !is_live(name)) {
            redis::cmd("ZREM").arg("i{ns}").arg(name).exec(master).unwrap();
        }
    }
}

/// `largest_us` is the largest balance or debt of these buckets, as a time.
fn equal_up_to_rounding(
    expected: &Outcome,
    found: &Outcome,
    largest_us: f64,
    ask: &BucketRequest<'_>,
) -> bool {
    let off_us = (expected.accrued_us - found.accrued_us).abs();
    // Of equal requests that put back more than a window has granted, Redis tells other balances.
    // So it does of those that count beyond what a state can hold.
    let is_told = match ask.action {
        TokenAction::GiveBack => ask.terms.window.is_none(),
        TokenAction::Count => expected.verdict == Verdict::Granted,
        // Nor is it told how much more was asked for than leads to a ban.
        TokenAction::TakeAvailable if form_of(ask.terms.window) == 3 => {
            expected.verdict == Verdict::Granted
        }
        TokenAction::Take { .. }
        | TokenAction::TakeUnreserved { .. }
        | TokenAction::TakeAvailable => true,
    };
    (!is_told || off_us <= 1e-4 + 1e-14 * largest_us.max(expected.accrued_us.abs()))
        && (expected.verdict, expected.created) == (found.verdict, found.created)
        && expected.retry == found.retry
}

fn ask<'a>(
    namespace: &'a str,
    rules: &'a Rules,
    terms: &'a tollgate_server::domain::bucket::Terms,
    request: &TokenRequest,
    rewrite: bool,
) -> BucketRequest<'a> {
    let kind = if request.name == NAMES.len() {
        BucketKind::NamespaceDefault
    } else if request.name < rules.configured {
        BucketKind::Configured
    } else {
        BucketKind::Dynamic { max_buckets: rules.max_buckets }
    };
    let own = rules.limit.wait_timeout_ms;
    let counts = request.kind == Kind::Count;
    BucketRequest {
        caller: None,
        namespace,
        name: NAMES.get(request.name).unwrap_or(&"any"),
        kind,
        terms,
        max_idle_ms: rules.limit.max_idle_ms,
        // Without tokens it is a look.
        tokens: request.tokens - u64::from(counts),
        action: match request.kind {
            // What is asked for is only counted.
            _ if form(&rules.limit) == 3 => TokenAction::TakeAvailable,
            Kind::Take { override_percent } => TokenAction::Take {
                max_wait_ms: override_percent.map_or(own, |percent| own * percent / 100),
            },
            Kind::TakeUnreserved => TokenAction::TakeUnreserved {
                max_wait_ms: own,
                reserve_percent: rules.reserve_percent,
            },
            Kind::TakeAvailable => TokenAction::TakeAvailable,
            Kind::GiveBack => TokenAction::GiveBack,
            Kind::Count => TokenAction::Count,
        },
        prefetch: None,
        rewrite: rewrite.into(),
    }
}
