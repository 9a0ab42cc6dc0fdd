//! One namespace floods a node: requests of other namespaces are decided without delay, and only
//! requests of the flood are rejected when queues are full.

use std::path::{Path, PathBuf};
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
use tollgate_server::service::capacity::{CapacityRequest, PriorityWants};
use tollgate_server::store::redis::RedisStore;

/// Buckets with one key layout only.
const SHARED: &str = "
namespaces:
  flood: { default_bucket: { size: 100000, fill_rate: 1 } }
  quiet: { default_bucket: { size: 100000, fill_rate: 1 } }
";

/// Buckets that may have a second key layout: a node that has just started looks it up, with two
/// commands before each decision.
const NAMED: &str = "
namespaces:
  flood: { dynamic_bucket_template: { size: 1000, fill_rate: 1 } }
  quiet: { dynamic_bucket_template: { size: 1000, fill_rate: 1 } }
";

/// Largest number of requests in flight: two lanes with a full batch each.
const IN_FLIGHT: usize = 2 * 126;

/// Largest number of queued requests.
const WAITING: usize = 2 * 4096;

/// Result of a request.
struct Answered {
    /// Number of requests answered before it.
    place: usize,
    status: Result<Status, Error>,
}

/// Stands for a different, unconfigured namespace in each request.
const MADE_UP: &str = "";

/// Unconfigured namespaces share one bucket.
const DEFAULT: &str = "
global_default_bucket: { size: 1000000, fill_rate: 1 }
namespaces:
  quiet: { default_bucket: { size: 100000, fill_rate: 1 } }
";

/// Sends requests of one namespace, each for another bucket. All are queued on return.
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
            let query = Query { namespace, bucket, tokens: 1, ..Query::default() };
            let status = service.allow.allow(&query).await.map(|answer| answer.status);
            Answered { place: place.fetch_add(1, Ordering::Relaxed), status }
        });
    }
    // Runs all spawned tasks once.
    tokio::task::yield_now().await;
    asked
}

/// While Redis is stopped, queues `count` requests of one namespace and then ten of `quiet`; then
/// continues Redis. Returns the results of both, and the number of rejected requests by the
/// metrics.
async fn flood_of(
    flooding: &'static str,
    limits: &str,
    count: usize,
) -> (Vec<Answered>, Vec<Answered>, f64) {
    let (redis, clock, metrics) = (Redis::start(), ManualClock::new(START), Metrics::new());
    let store = redis_store_counted(&redis, clock.clone(), &metrics).await;
    let service = Arc::new(Service::new(store, clock, limits));
    let place = Arc::default();
    // Afterwards both lanes have connections, and the server has the script.
    assert_eq!(ask(&service, &place, flooding, 4).await.join_all().await.len(), 4);

    signal(redis.pid(), "STOP");
    place.store(0, Ordering::Relaxed);
    let flooding = ask(&service, &place, flooding, count).await;
    let quiet = ask(&service, &place, "quiet", 10).await;
    signal(redis.pid(), "CONT");
    let (flooding, quiet) = (flooding.join_all().await, quiet.join_all().await);
    let rejected = Scrape::parse(&metrics.render())
        .sum("tollgate_store_errors_total", &[("class", "overloaded")]);
    (flooding, quiet, rejected)
}

async fn flood(limits: &str, count: usize) -> (Vec<Answered>, Vec<Answered>, f64) {
    flood_of("flood", limits, count).await
}

fn granted(answers: &[Answered]) -> usize {
    answers.iter().filter(|one| one.status == Ok(Status::Ok)).count()
}

#[tokio::test]
async fn a_quiet_namespace_is_in_the_next_batch() {
    let (flooding, quiet, rejected) = flood(SHARED, 5000).await;
    assert_eq!((granted(&flooding), granted(&quiet), rejected), (5000, 10, 0.0));
    let last = quiet.iter().map(|one| one.place).max().unwrap();
    println!("the last of the ten quiet requests is number {last} of 5010");
    // At most: the requests in flight already, those of the same batches, and one batch more if one
    // lane is ahead of the other.
    assert!(last < 3 * IN_FLIGHT);
}

#[tokio::test]
async fn lookups_after_a_start_are_fair_too() {
    let (flooding, quiet, rejected) = flood(NAMED, 3000).await;
    assert_eq!((granted(&flooding), granted(&quiet), rejected), (3000, 10, 0.0));
    let last = quiet.iter().map(|one| one.place).max().unwrap();
    println!("the last of the ten quiet requests is number {last} of 3010");
    // The flood's lookups precede its decisions, so most of the flood comes later.
    assert!(last < 2 * IN_FLIGHT);
}

#[tokio::test]
async fn made_up_namespaces_count_as_one_owner() {
    let (flooding, quiet, rejected) = flood_of(MADE_UP, DEFAULT, 5000).await;
    assert_eq!((granted(&flooding), granted(&quiet), rejected), (5000, 10, 0.0));
    let last = quiet.iter().map(|one| one.place).max().unwrap();
    println!("the last of the ten quiet requests is number {last} of 5010");
    assert!(last < 3 * IN_FLIGHT);

    let (_, quiet, rejected) = flood_of(MADE_UP, DEFAULT, 12_000).await;
    assert_eq!(granted(&quiet), 10);
    assert!(rejected > 0.0, "nothing was rejected");
}

#[tokio::test]
async fn a_full_queue_rejects_the_flood() {
    const FLOOD: usize = 12_000;
    let (flooding, quiet, rejected) = flood(SHARED, FLOOD).await;
    assert_eq!(granted(&quiet), 10);
    let refused = flooding.iter().filter(|one| one.status == Err(Error::Overloaded)).count();
    println!("{refused} of {FLOOD} rejected, {rejected} by the metrics");
    assert_eq!((granted(&flooding) + refused, refused as f64), (FLOOD, rejected));
    // Ten more make room for the quiet requests.
    assert!((FLOOD + 10 - WAITING - IN_FLIGHT..=FLOOD + 10 - WAITING).contains(&refused));
}

/// Two resource templates, and a namespace.
const TEMPLATES: &str = "
namespaces:
  quiet: { default_bucket: { size: 100000, fill_rate: 1 } }
resources:
  - { identifier_glob: \"flood.*\", capacity: 100, algorithm: &a { kind: FAIR_SHARE, lease_length: 60, refresh_interval: 5 } }
  - { identifier_glob: \"other.*\", capacity: 100, algorithm: *a }
";

/// Sends lease requests, each with a list of resources. All are queued on return.
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
            let request = |name| CapacityRequest {
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

/// Results of ten honest requests of each kind: for tokens, for leases by another template, and for
/// leases by the same template on resources in use.
struct Honest([Vec<Answered>; 3]);

impl Honest {
    /// Number of requests answered before the last one of each kind.
    fn last(&self) -> [usize; 3] {
        let last = |answers: &Vec<Answered>| answers.iter().map(|one| one.place).max().unwrap();
        [last(&self.0[0]), last(&self.0[1]), last(&self.0[2])]
    }

    fn granted(&self) -> [usize; 3] {
        [granted(&self.0[0]), granted(&self.0[1]), granted(&self.0[2])]
    }
}

/// While Redis is stopped, queues lease requests on new resources and then honest requests; then
/// continues Redis.
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
async fn new_resources_of_many_requests_count_as_one_owner() {
    let (flood, honest) = flood_of_new_resources(5000, 1).await;
    assert_eq!((granted(&flood), honest.granted()), (5000, [10, 10, 10]));
    let last = honest.last();
    println!("the last honest requests of each kind are numbers {last:?} of 5030");
    assert!(last.iter().all(|last| *last < 3 * IN_FLIGHT), "{last:?}");
}

#[tokio::test]
async fn new_resources_of_long_requests_count_as_one_owner() {
    // Each request has one page of its names in the queue: more than the queue holds.
    let (flood, honest) = flood_of_new_resources(70, 1000).await;
    assert_eq!(honest.granted(), [10, 10, 10]);
    let last = honest.last();
    println!(
        "{} of 70 served; the last honest requests of each kind are numbers {last:?}",
        granted(&flood)
    );
    // Rejected requests are answered earlier; all others have seven pages to go.
    let rejected = flood.iter().filter(|one| one.status == Err(Error::Overloaded)).count();
    assert!(last.iter().all(|last| *last < rejected + 30), "{last:?}, {rejected}");
}

#[tokio::test]
async fn a_full_queue_rejects_new_resources() {
    let (flood, honest) = flood_of_new_resources(12_000, 1).await;
    assert_eq!(honest.granted(), [10, 10, 10]);
    assert!(granted(&flood) < 12_000, "nothing was rejected");
}

/// Buckets that always have tokens, and are full again within a second.
const PLENTY: &str = "
namespaces:
  flood: { dynamic_bucket_template: { size: 1000000, fill_rate: 1000000, max_debt_millis: 0 } }
  quiet: { dynamic_bucket_template: { size: 1000000, fill_rate: 1000000, max_debt_millis: 0 } }
";

/// Number of measurements without and with a flood, in turn. Medians are compared.
const ROUNDS: usize = 5;

/// Attempts, as other load on the machine may spoil one.
const ATTEMPTS: usize = 3;

/// Largest allowed ratio of p50 with and without the flood. Behind the whole flood it would be
/// seven.
const P50_WORSE: f64 = 3.0;

/// The same for p99, as for any abuse (docs/overload.md). The flood keeps the node and Redis busy,
/// which then compete for the CPUs.
const P99_WORSE: f64 = 10.0;

/// The load generator, built now: cargo does not build it with the tests of the server, and an old one
/// may be there.
fn loadtest() -> PathBuf {
    let program = testkit::program("tollgate").with_file_name("tollgate-loadtest");
    let mut build = Command::new(env!("CARGO"));
    build.args(["build", "--quiet", "--locked", "-p", "tollgate-loadtest"]);
    // The folder of this build, whatever the tests' working directory is.
    build.arg("--target-dir").arg(program.ancestors().nth(2).unwrap());
    if !cfg!(debug_assertions) {
        build.arg("--release");
    }
    assert!(build.status().unwrap().success());
    program
}

/// A running flood, killed when dropped.
struct Flood(Child);

impl Flood {
    /// 512 callers in a closed loop. In production they run on other machines, so here they have
    /// the lowest priority.
    fn start(loadtest: &Path, node: &Node) -> Self {
        let counted = || {
            let metrics = Scrape::of(node.http);
            metrics.sum("tollgate_decisions_total", &[("namespace", "flood")])
        };
        let before = counted();
        let flood = Command::new("nice")
            .args(["-n", "19"])
            .arg(loadtest)
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

/// p50 and p99, in µs, of 100 requests/s over three seconds, measured from the due time of each.
fn quiet(loadtest: &Path, node: &Node) -> (f64, f64) {
    let output = Command::new(loadtest)
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
#[ignore = "measures latencies beside a flood, which takes an optimised build and an idle machine: cargo test --release --locked -p tollgate-server --test allow a_flood_of -- --ignored --nocapture"]
fn a_flood_of_one_namespace_leaves_another_its_latency() {
    let loadtest = loadtest();
    let _machine = reserve_machine();
    let (redis, limits) = (Redis::start(), LimitsFile::new(PLENTY));
    let node = Node::start(&limits.path(), &["--store", &redis.url()]);
    // Takes longer than a new node assumes that there are states of other limits.
    quiet(&loadtest, &node);
    for attempt in 1..=ATTEMPTS {
        let (mut alone, mut flooded) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            let before = quiet(&loadtest, &node);
            let flood = Flood::start(&loadtest, &node);
            let beside = quiet(&loadtest, &node);
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
    panic!("latencies beside the flood are over the limits in {ATTEMPTS} attempts");
}
