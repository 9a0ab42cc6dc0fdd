//! Three node processes and 256 callers of all kinds, on buckets of all kinds at once. No bucket
//! grants more than its bound over any interval. Saturated buckets grant nearly all of it.
//! Cancelled calls take no tokens from other callers.

use std::time::Duration;

use testkit::cluster::{alive, reserve_machine};
use testkit::grpc::{client, request};
use testkit::metrics::Scrape;
use testkit::mixed_callers::{Account, Behaviour, Group, Record, run_callers};
use testkit::redis_cluster::RedisCluster;
use testkit::{LimitsFile, Node, Redis, eventually, runtime};
use tokio::task::JoinSet;
use tollgate_proto::quotaservice::AllowResponse;
use tollgate_proto::quotaservice::allow_response::Status;
use tollgate_server::domain::bucket::State;
use tollgate_server::domain::time::Micros;
use tonic::Response;

/// Nothing is granted without the store, so that all grants are the store's.
const LIMITS: &str = "
on_store_failure: deny
namespaces:
  hot:
    buckets:
      plain: { size: 1000, fill_rate: 1000, wait_timeout_millis: 0, max_debt_millis: 0 }
      ahead: { size: 2000, fill_rate: 1000, wait_timeout_millis: 0, max_debt_millis: 0, prefetch: 15 }
      bursts: { size: 20000, fill_rate: 2000, wait_timeout_millis: 0, max_debt_millis: 0, prefetch: 300 }
      waits: { size: 100, fill_rate: 100, wait_timeout_millis: 200, max_debt_millis: 500 }
      still: { size: 1000000, fill_rate: 0.01, wait_timeout_millis: 0, max_debt_millis: 0, max_tokens_per_request: 10 }
  open:
    dynamic_bucket_template: { size: 20, fill_rate: 20, wait_timeout_millis: 0, max_debt_millis: 0 }
  # A bucket that is not asked for five seconds makes room for another.
  bounded:
    max_dynamic_buckets: 4
    dynamic_bucket_template: { size: 20, fill_rate: 4, wait_timeout_millis: 0, max_debt_millis: 0 }
  shared:
    default_bucket: { size: 50, fill_rate: 100, wait_timeout_millis: 0, max_debt_millis: 0 }
";

/// Tokens that a node takes ahead from `ahead`; it holds twice as many at most.
const PREFETCH: f64 = 15.0;

/// Name prefix of a bucket, size with debt limit in tokens, rate in tokens/s.
const BUCKETS: [(&str, f64, f64); 8] = [
    ("hot:plain", 1000.0, 1000.0),
    ("hot:ahead", 2000.0, 1000.0),
    ("hot:bursts", 20_000.0, 2000.0),
    ("hot:waits", 150.0, 100.0),
    ("hot:still", STILL, 0.01),
    ("open:", 20.0, 20.0),
    ("bounded:", 20.0, 4.0),
    ("shared:", 50.0, 100.0),
];

/// Buckets that always have more callers than tokens. Their debt limit is not part of the lower
/// bound.
const SATURATED: [&str; 6] =
    ["hot:plain", "hot:ahead", "hot:waits", "open:", "bounded:", "shared:"];

/// Size of `still`, which refills by less than a token during a test.
const STILL: f64 = 1_000_000.0;

/// Tokens per request to `still`.
const WEIGHT: usize = 7;

/// `max_dynamic_buckets` of `bounded`; callers use six names.
const BOUND: usize = 4;

const GREEDY: fn(usize) -> Behaviour = |_| Behaviour::Greedy;

const GROUPS: [Group; 8] = [
    group(48, "hot", "plain", 1, 8, 12, GREEDY),
    group(64, "hot", "ahead", 1, 3, 7, GREEDY),
    group(40, "hot", "bursts", 1, 1, 3, |_| Behaviour::Bursts(Duration::from_secs(2))),
    group(24, "hot", "waits", 1, 5, 5, |number| match number % 2 {
        0 => Behaviour::HonoursWaits,
        _ => Behaviour::Greedy,
    }),
    group(16, "hot", "still", 1, WEIGHT, WEIGHT, |number| match number % 2 {
        0 => Behaviour::CancelsCalls,
        _ => Behaviour::Greedy,
    }),
    group(24, "open", "user", 6, 1, 3, GREEDY),
    group(24, "bounded", "user", 6, 1, 3, GREEDY),
    group(16, "shared", "anybody", 1000, 1, 3, GREEDY),
];

const fn group(
    callers: usize,
    namespace: &'static str,
    bucket: &'static str,
    buckets: usize,
    least: usize,
    most: usize,
    behaviour: fn(usize) -> Behaviour,
) -> Group {
    Group { callers, namespace, bucket, buckets, least, most, behaviour }
}

/// Number of moments of a run at which checked intervals start: every 10 or 15 ms.
const STARTS: u32 = 1000;

/// A store timeout that a busy machine does not exceed.
const PATIENT: [&str; 2] = ["--store-timeout", "400ms"];

/// Starts three nodes, and waits until each counts three.
fn nodes(url: &str, limits: &LimitsFile) -> Vec<Node> {
    let args = [&["--store", url], &PATIENT[..]].concat();
    let nodes: Vec<Node> = (0..3).map(|_| Node::start(&limits.path(), &args)).collect();
    for node in &nodes {
        eventually("three nodes alive", Duration::from_secs(5), || alive(node) == 3.0);
    }
    nodes
}

/// Tokens taken from `still`, by its state on the one server that stores it.
fn taken(servers: Vec<redis::Connection>) -> f64 {
    let mut found = servers.into_iter().filter_map(|mut server| {
        let (seconds, us): (i64, i64) = redis::cmd("TIME").query(&mut server).unwrap();
        let now = Micros(seconds * 1_000_000 + us);
        let bytes: redis::RedisResult<Option<Vec<u8>>> =
            redis::cmd("GET").arg("b{hot:still}").query(&mut server);
        // Cluster servers with other slots answer with a redirect.
        let state = State::decode(bytes.ok()??.as_slice().try_into().unwrap(), now);
        Some(STILL - (now.0 - state.zero_us) as f64 / 100e6)
    });
    found.next().unwrap()
}

/// Asserts the bound of one bucket, and returns the granted share of the lower bound.
fn check(name: &str, account: &Account) -> f64 {
    let known = BUCKETS.iter().find(|(start, ..)| name.starts_with(start));
    let (_, burst, rate) = *known.unwrap_or_else(|| panic!("{name}: unknown bucket"));
    let (granted, most) = (account.granted(), burst + rate * account.span());
    let worst = account.worst_interval(STARTS, burst, rate);
    let size = if name == "hot:waits" { burst - 50.0 } else { burst };
    // A call without an answer of the store may have taken its tokens there, and prefetched some.
    let perhaps_lost = account.degraded as f64 * (account.largest + PREFETCH);
    // Three nodes may hold tokens.
    let held = if name == "hot:ahead" { 3.0 * 2.0 * PREFETCH } else { 0.0 };
    let least = size + rate * account.span_until_empty() - held;
    // Fewer tokens than the largest request may be left over.
    let share = (granted + account.largest + perhaps_lost) / least;
    println!(
        "{name:25} {granted:8} of at most {most:11.1}: {:6.2} %, of any interval {:6.2} %, of the \
         lower bound {:6.2} %, {} refused, {} without the store",
        granted / most * 100.0,
        worst * 100.0,
        share * 100.0,
        account.refused,
        account.degraded,
    );
    assert!(granted <= most, "{name}: over the bound");
    assert!(worst <= 1.0, "{name}: over the bound within an interval");
    share
}

/// Buckets of a namespace that granted tokens.
fn used<'a>(record: &'a Record, namespace: &str) -> Vec<&'a String> {
    let of = |(name, account): &(&String, &Account)| {
        name.starts_with(namespace) && account.granted() > 0.0
    };
    record.accounts.iter().filter(of).map(|(name, _)| name).collect()
}

fn stays_exact(url: &str, time: Duration, servers: impl FnOnce() -> Vec<redis::Connection>) {
    let limits = LimitsFile::new(LIMITS);
    let nodes = nodes(url, &limits);
    let targets: Vec<_> = nodes.iter().map(|node| node.grpc).collect();
    assert_eq!(GROUPS.iter().map(|group| group.callers).sum::<usize>(), 256);
    let record = run_callers(&targets, &GROUPS, time);
    println!("{} calls in {time:?}", record.calls);

    assert!(record.failed.is_empty(), "{} failed: {:?}", record.failed.len(), record.failed[0]);
    // These grant nothing. Their number shows how busy the machine is.
    println!("{} decisions without the store", record.degraded());
    for (name, account) in &record.accounts {
        let share = check(name, account);
        if SATURATED.iter().any(|start| name.starts_with(start)) {
            let saturated_s = account.span_until_empty();
            assert!(saturated_s > time.as_secs_f64() / 2.0, "{name} was not saturated");
            assert!(share >= 0.99, "{name}: too little");
        }
    }
    assert_eq!(used(&record, "open:").len(), 6);
    assert_eq!(used(&record, "shared:"), ["shared:default bucket"]);
    assert_eq!(used(&record, "bounded:").len(), BOUND, "{:?}", used(&record, "bounded:"));
    assert!(record.others[&("bounded", Status::RejectedTooManyBuckets)] > 0);
    let sum = |name, label| {
        nodes.iter().map(|node| Scrape::of(node.http).sum(name, &[label])).sum::<f64>()
    };
    let ahead = sum("tollgate_prefetch_served_total", ("namespace", "hot"));
    println!("{ahead} requests served from prefetched tokens");
    assert!(ahead > 0.0);

    // Only cancelled and degraded calls may lose granted tokens, and nothing is granted twice.
    let still = record.of("hot:still");
    let lost = taken(servers()) - still.granted();
    println!("{} calls cancelled, {lost:.0} tokens taken for them", still.cancelled);
    assert_eq!(still.refused, 0);
    assert!(still.cancelled > 0 && lost > -1.0);
    let unanswered = still.cancelled + still.degraded;
    assert!(lost < (unanswered * WEIGHT as u64) as f64 + 1.0);
    assert!(
        (lost / WEIGHT as f64 - (lost / WEIGHT as f64).round()).abs() < 0.2,
        "a request was counted in part"
    );
}

#[test]
fn cancelled_calls_break_no_connection() {
    // More streams than HTTP/2 allows at a time on one connection.
    const CALLERS: usize = 500;
    const ROUNDS: usize = 5;
    let limits = LimitsFile::new(LIMITS);
    let node = Node::start(&limits.path(), &[]);
    runtime().block_on(async {
        let client = client(&node).await;
        let ask = || {
            let mut client = client.clone();
            async move { client.allow(request("hot", "still", 1)).await }
        };
        let available = |answer: Response<AllowResponse>| answer.into_inner().tokens_available;
        let first = available(ask().await.unwrap());
        for _ in 0..ROUNDS {
            // When the node continues, it finds all calls at once, and most of them cancelled.
            node.signal("STOP");
            let others = tokio::spawn(ask());
            let mut cancelled = JoinSet::new();
            for _ in 0..CALLERS {
                cancelled.spawn(tokio::time::timeout(Duration::from_millis(20), ask()));
            }
            // A call may have been answered before the node stopped.
            cancelled.join_all().await;
            // Lets the connection's task send the resets.
            for _ in 0..1000 {
                tokio::task::yield_now().await;
            }
            node.signal("CONT");
            for answer in [others.await.unwrap(), ask().await] {
                let answer = answer.unwrap().into_inner();
                assert_eq!((answer.status(), answer.tokens_granted), (Status::Ok, 1));
            }
        }
        let taken = first - available(ask().await.unwrap());
        println!("{taken:.0} tokens taken, {} by callers that waited", 2 * ROUNDS + 1);
        assert!((2.0 * ROUNDS as f64 + 0.9..((CALLERS + 2) * ROUNDS + 2) as f64).contains(&taken));
    });
}

#[test]
#[ignore = "a second case of 15 seconds of load: scripts/full.sh --only slow"]
fn three_nodes_on_one_redis_stay_exact() {
    let _machine = reserve_machine();
    let redis = Redis::start();
    stays_exact(&redis.url(), Duration::from_secs(15), || vec![redis.connection()]);
}

#[test]
fn three_nodes_on_three_shards_stay_exact() {
    let _machine = reserve_machine();
    let cluster = RedisCluster::start_with(3, 0);
    stays_exact(&cluster.url(), Duration::from_secs(10), || {
        (0..3).map(|number| cluster.connection(number)).collect()
    });
}
