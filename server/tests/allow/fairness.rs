//! One namespace floods a node: the others are decided as soon as ever, and what there is no
//! room for is the flooding one's.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use testkit::cluster::reserve_machine;
use testkit::metrics::Scrape;
use testkit::{LimitsFile, Node, Redis, START, Service, eventually, redis_store_counted, signal};
use tokio::task::JoinSet;
use tollgate_server::domain::lease::Holder;
use tollgate_server::domain::time::ManualClock;
use tollgate_server::metrics::Metrics;
use tollgate_server::service::Error;
use tollgate_server::service::allow::{Query, Status};
use tollgate_server::service::capacity::{PriorityWants, Request};
use tollgate_server::store::redis::RedisStore;

/// A bucket that has no other layout, …
const SHARED: &str = "
namespaces:
  flood: { default_bucket: { size: 100000, fill_rate: 1 } }
  quiet: { default_bucket: { size: 100000, fill_rate: 1 } }
";

/// … and those that may have one: a node that has just started looks for it, with two questions
/// before every one.
const NAMED: &str = "
namespaces:
  flood: { dynamic_bucket_template: { size: 1000, fill_rate: 1 } }
  quiet: { dynamic_bucket_template: { size: 1000, fill_rate: 1 } }
";

/// At most so many questions are in flight: two lanes with a full batch each.
const IN_FLIGHT: usize = 2 * 126;

/// And so many wait.
const WAITING: usize = 2 * 4096;

/// What became of a question.
struct Answered {
    /// How many were answered before it.
    place: usize,
    status: Result<Status, Error>,
}

/// Another namespace for each question, of which nobody has configured any.
const MADE_UP: &str = "";

/// Whatever nobody has configured shares one bucket.
const DEFAULT: &str = "
global_default_bucket: { size: 1000000, fill_rate: 1 }
namespaces:
  quiet: { default_bucket: { size: 100000, fill_rate: 1 } }
";

/// Questions of one namespace, a bucket each. They wait once this is over.
async fn ask(
    service: &Arc<Service<RedisStore>>,
    place: &Arc<AtomicUsize>,
    namespace: &'static str,
    count: usize,
) -> JoinSet<Answered> {
    let mut asked = JoinSet::new();
    for number in 0..count {
        let (service, place) = (Arc::clone(service), Arc::clone(place));
        asked.spawn(async move {
            let bucket = &format!("user{number}");
            let made_up = format!("made-up{number}");
            let namespace = if namespace == MADE_UP { &made_up } else { namespace };
            let query = Query { namespace, bucket, tokens: 1, max_wait_ms: None };
            let status = service.allow.allow(&query).await.map(|answer| answer.status);
            Answered { place: place.fetch_add(1, Ordering::Relaxed), status }
        });
    }
    // All of them come to their turn before this does again.
    tokio::task::yield_now().await;
    asked
}

/// Lets so many questions of one namespace wait for a store that is held up, then ten of another,
/// and lets it go. Tells what became of both, and how many the metrics say were turned away.
async fn flood_of(
    flooding: &'static str,
    limits: &str,
    count: usize,
) -> (Vec<Answered>, Vec<Answered>, f64) {
    let (redis, clock, metrics) = (Redis::start(), ManualClock::new(START), Metrics::new());
    let store = redis_store_counted(&redis, clock.clone(), &metrics).await;
    let service = Arc::new(Service::new(store, clock, limits));
    let place = Arc::default();
    // Both lanes have connections, and the server has the script.
    assert_eq!(ask(&service, &place, flooding, 4).await.join_all().await.len(), 4);

    signal(redis.pid(), "STOP");
    place.store(0, Ordering::Relaxed);
    let flooding = ask(&service, &place, flooding, count).await;
    let quiet = ask(&service, &place, "quiet", 10).await;
    signal(redis.pid(), "CONT");
    let (flooding, quiet) = (flooding.join_all().await, quiet.join_all().await);
    let turned_away = Scrape::parse(&metrics.render())
        .sum("tollgate_store_errors_total", &[("class", "overloaded")]);
    (flooding, quiet, turned_away)
}

async fn flood(limits: &str, count: usize) -> (Vec<Answered>, Vec<Answered>, f64) {
    flood_of("flood", limits, count).await
}

fn granted(answers: &[Answered]) -> usize {
    answers.iter().filter(|one| one.status == Ok(Status::Ok)).count()
}

#[tokio::test]
async fn who_asks_little_is_in_the_next_batch() {
    let (flooding, quiet, turned_away) = flood(SHARED, 5000).await;
    assert_eq!((granted(&flooding), granted(&quiet), turned_away), (5000, 10, 0.0));
    let last = quiet.iter().map(|one| one.place).max().unwrap();
    println!("of 5010, the last of the ten is number {last}");
    // Before them at most what was in flight already; with them those of their own batches; and one
    // lane may be a batch ahead of the other.
    assert!(last < 3 * IN_FLIGHT);
}

#[tokio::test]
async fn that_holds_for_what_nodes_look_for_at_their_start() {
    let (flooding, quiet, turned_away) = flood(NAMED, 3000).await;
    assert_eq!((granted(&flooding), granted(&quiet), turned_away), (3000, 10, 0.0));
    let last = quiet.iter().map(|one| one.place).max().unwrap();
    println!("of 3010, the last of the ten is number {last}");
    // The flood looks before any of it is decided, so most of it comes later still.
    assert!(last < 2 * IN_FLIGHT);
}

#[tokio::test]
async fn who_makes_up_names_is_one_all_the_same() {
    let (flooding, quiet, turned_away) = flood_of(MADE_UP, DEFAULT, 5000).await;
    assert_eq!((granted(&flooding), granted(&quiet), turned_away), (5000, 10, 0.0));
    let last = quiet.iter().map(|one| one.place).max().unwrap();
    println!("of 5010, the last of the ten is number {last}");
    assert!(last < 3 * IN_FLIGHT);

    let (_, quiet, turned_away) = flood_of(MADE_UP, DEFAULT, 12_000).await;
    assert_eq!(granted(&quiet), 10);
    assert!(turned_away > 0.0, "there was room for all of them");
}

#[tokio::test]
async fn a_full_queue_turns_away_who_floods() {
    const FLOOD: usize = 12_000;
    let (flooding, quiet, turned_away) = flood(SHARED, FLOOD).await;
    assert_eq!(granted(&quiet), 10);
    let refused = flooding.iter().filter(|one| one.status == Err(Error::Overloaded)).count();
    println!("{refused} of {FLOOD} turned away, {turned_away} by the metrics");
    assert_eq!((granted(&flooding) + refused, refused as f64), (FLOOD, turned_away));
    // Ten of them for the others' sake.
    assert!((FLOOD + 10 - WAITING - IN_FLIGHT..=FLOOD + 10 - WAITING).contains(&refused));
}

/// Two templates, and a namespace.
const TEMPLATES: &str = "
namespaces:
  quiet: { default_bucket: { size: 100000, fill_rate: 1 } }
resources:
  - { identifier_glob: \"flood.*\", capacity: 100, algorithm: &a { kind: FAIR_SHARE, lease_length: 60, refresh_interval: 5 } }
  - { identifier_glob: \"other.*\", capacity: 100, algorithm: *a }
";

/// Requests for leases, with so many resources each. They wait once this is over.
async fn ask_leases(
    service: &Arc<Service<RedisStore>>,
    place: &Arc<AtomicUsize>,
    requests: Vec<Vec<String>>,
) -> JoinSet<Answered> {
    let mut asked = JoinSet::new();
    for names in requests {
        let (service, place) = (Arc::clone(service), Arc::clone(place));
        asked.spawn(async move {
            let wants = PriorityWants { priority: 0, clients: 1, wants: 1.0 };
            let request = |name| Request {
                resource: name,
                wants: [wants].into(),
                has: None,
                most_clients: 1,
            };
            let requests: Vec<_> = names.iter().map(|name| request(name)).collect();
            let leases = service.capacity.get(Holder::Client("client"), &requests).await;
            let status = leases.map(|_| Status::Ok);
            Answered { place: place.fetch_add(1, Ordering::Relaxed), status }
        });
    }
    tokio::task::yield_now().await;
    asked
}

/// What became of ten honest requests each: for tokens, for leases by another template, and for
/// leases by the same template on resources that are in use.
struct Honest([Vec<Answered>; 3]);

impl Honest {
    /// How many of all were answered before the last of each.
    fn last(&self) -> [usize; 3] {
        let last = |answers: &Vec<Answered>| answers.iter().map(|one| one.place).max().unwrap();
        [last(&self.0[0]), last(&self.0[1]), last(&self.0[2])]
    }

    fn granted(&self) -> [usize; 3] {
        [granted(&self.0[0]), granted(&self.0[1]), granted(&self.0[2])]
    }
}

/// Lets so many requests for leases on new resources wait for a store that is held up, then honest
/// ones, and lets it go.
async fn flood_of_new_resources(requests: usize, names: usize) -> (Vec<Answered>, Honest) {
    let (redis, clock, metrics) = (Redis::start(), ManualClock::new(START), Metrics::new());
    let store = redis_store_counted(&redis, clock.clone(), &metrics).await;
    let service = Arc::new(Service::new(store, clock, TEMPLATES));
    let place = Arc::default();
    let one_each = |of: &str| (0..10).map(|number| vec![format!("{of}.{number}")]).collect();
    let (same, other): (Vec<_>, Vec<_>) = (one_each("flood.honest"), one_each("other.honest"));
    for _ in 0..2 {
        ask(&service, &place, "quiet", 4).await.join_all().await;
        ask_leases(&service, &place, same.clone()).await.join_all().await;
        ask_leases(&service, &place, other.clone()).await.join_all().await;
    }

    signal(redis.pid(), "STOP");
    place.store(0, Ordering::Relaxed);
    let new = |number| (0..names).map(|name| format!("flood.{number}.{name}")).collect();
    let flood = ask_leases(&service, &place, (0..requests).map(new).collect()).await;
    let quiet = ask(&service, &place, "quiet", 10).await;
    let other = ask_leases(&service, &place, other).await;
    let same = ask_leases(&service, &place, same).await;
    signal(redis.pid(), "CONT");
    let honest = [quiet.join_all().await, other.join_all().await, same.join_all().await];
    (flood.join_all().await, Honest(honest))
}

#[tokio::test]
async fn new_resources_of_many_requests_weigh_as_one() {
    let (flood, honest) = flood_of_new_resources(5000, 1).await;
    assert_eq!((granted(&flood), honest.granted()), (5000, [10, 10, 10]));
    let last = honest.last();
    println!("of 5030, the last of the tens are numbers {last:?}");
    assert!(last.iter().all(|last| *last < 3 * IN_FLIGHT), "{last:?}");
}

#[tokio::test]
async fn new_resources_of_long_requests_weigh_as_one() {
    // Each has one page of its names under way: more than a whole queue of them.
    let (flood, honest) = flood_of_new_resources(70, 1000).await;
    assert_eq!(honest.granted(), [10, 10, 10]);
    let last = honest.last();
    println!("{} of 70 served; the last of the tens are numbers {last:?}", granted(&flood));
    // Those that there was no room for are answered before; all that are served have seven pages
    // still to go.
    let turned_away = flood.iter().filter(|one| one.status == Err(Error::Overloaded)).count();
    assert!(last.iter().all(|last| *last < turned_away + 30), "{last:?}, {turned_away}");
}

#[tokio::test]
async fn a_full_queue_turns_away_new_resources() {
    let (flood, honest) = flood_of_new_resources(12_000, 1).await;
    assert_eq!(honest.granted(), [10, 10, 10]);
    assert!(granted(&flood) < 12_000, "there was room for all of them");
}

/// Buckets that are never short, and full again within a second.
const PLENTY: &str = "
namespaces:
  flood: { dynamic_bucket_template: { size: 1000000, fill_rate: 1000000, max_debt_millis: 0 } }
  quiet: { dynamic_bucket_template: { size: 1000000, fill_rate: 1000000, max_debt_millis: 0 } }
";

/// How often it is measured without a flood and with one, in turn; medians are compared.
const ROUNDS: usize = 5;

/// A machine that does other things as well gets another chance.
const ATTEMPTS: usize = 3;

/// The most that the flood may make of the others' p50. Whoever waited behind all of the flood would
/// wait for seven times as long.
const P50_WORSE: f64 = 3.0;

/// The most that it may make of their p99: as beside any abuser (docs/overload.md). The flood keeps
/// the node and Redis busy, which then wait for each other's CPU.
const P99_WORSE: f64 = 10.0;

/// The load tester beside this build. Tests of the whole workspace have it built; for those of this
/// crate alone it is made if there is none.
fn loadtest() -> PathBuf {
    let program = testkit::program("tollgate").with_file_name("tollgate-loadtest");
    if !program.exists() {
        let mut build = Command::new(env!("CARGO"));
        build.args(["build", "--quiet", "--locked", "-p", "tollgate-loadtest"]);
        if !cfg!(debug_assertions) {
            build.arg("--release");
        }
        assert!(build.status().unwrap().success());
    }
    program
}

/// Ended when dropped.
struct Flood(Child);

impl Flood {
    /// 512 callers that ask again at once. They have machines of their own, elsewhere: here they
    /// get what time the node and Redis leave.
    fn start(node: &Node) -> Self {
        let counted = || {
            let metrics = Scrape::of(node.http);
            metrics.sum("tollgate_decisions_total", &[("namespace", "flood")])
        };
        let before = counted();
        let flood = Command::new("nice")
            .args(["-n", "19"])
            .arg(loadtest())
            .args(["allow", "--target", &node.grpc.to_string(), "--namespace", "flood"])
            .args(["--keys", "uniform:100000", "--connections", "16", "--in-flight", "32"])
            .args(["--duration", "60s", "--warmup", "0s"])
            .stdout(Stdio::null())
            .spawn();
        let flood = Self(flood.unwrap());
        eventually("the flood has begun", Duration::from_secs(20), || counted() - before > 2000.0);
        flood
    }
}

impl Drop for Flood {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

/// p50 and p99, in µs, of a hundred requests a second over three seconds, each counted from when it
/// was due.
fn quiet(node: &Node) -> (f64, f64) {
    let output = Command::new(loadtest())
        .args(["allow", "--target", &node.grpc.to_string(), "--namespace", "quiet"])
        .args(["--keys", "uniform:1000", "--connections", "1", "--rate", "100"])
        .args(["--duration", "3s", "--warmup", "500ms", "--json"])
        .output()
        .unwrap();
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let of = |name: &str| report["latency"][name].as_f64().unwrap();
    (of("p50_us"), of("p99_us"))
}

fn median(measured: &[(f64, f64)], of: fn(&(f64, f64)) -> f64) -> f64 {
    let mut values: Vec<f64> = measured.iter().map(of).collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

#[test]
#[ignore = "measures latencies beside a flood, which takes an optimised build and an idle machine: cargo test --release --locked -p tollgate-server --test allow flood_of -- --ignored --nocapture"]
fn a_flood_of_one_namespace_leaves_another_its_latency() {
    let _machine = reserve_machine();
    let (redis, limits) = (Redis::start(), LimitsFile::new(PLENTY));
    let node = Node::start(&limits.path(), &["--store", &redis.url()]);
    // Longer than a new node looks for states from before its start.
    quiet(&node);
    for attempt in 1..=ATTEMPTS {
        let (mut alone, mut flooded) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            let before = quiet(&node);
            let flood = Flood::start(&node);
            let beside = quiet(&node);
            drop(flood);
            println!("p50 and p99 in µs: alone {before:?}, flooded {beside:?}");
            alone.push(before);
            flooded.push(beside);
        }
        let p50 = median(&flooded, |one| one.0) / median(&alone, |one| one.0);
        let p99 = median(&flooded, |one| one.1) / median(&alone, |one| one.1);
        println!("attempt {attempt}: p50 {p50:.2} times, p99 {p99:.2} times what it is alone");
        if p50 <= P50_WORSE && p99 <= P99_WORSE {
            return;
        }
    }
    panic!("the flood makes latencies worse than that in {ATTEMPTS} attempts");
}
