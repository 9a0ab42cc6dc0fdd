//! The `local` policy with one, three and five nodes: during an outage of Redis, all nodes together
//! grant about the limit. And the register of nodes in Redis is bounded.

use std::thread;
use std::time::{Duration, Instant};

use testkit::cluster::{Cluster, alive, reserve_half};
use testkit::grpc::request;
use testkit::http::allow;
use testkit::load::{Load, Plan, Sample};
use testkit::report::Row;
use testkit::{LimitsFile, Node, Redis, connector, eventually};
use tollgate_server::metrics::Metrics;

const SECOND: Duration = Duration::from_secs(1);

const RATE: f64 = 100.0;

/// Size of the bucket in `large`: the tokens that accrue in [`WINDOW`]. The size of the other
/// bucket is negligible.
const LARGE: f64 = 1000.0;

const DEBT_S: f64 = 1.0;

const LIMITS: &str = "
namespaces:
  small: { on_store_failure: local, buckets: { b: { size: 20, fill_rate: 100, wait_timeout_millis: 0, max_debt_millis: 0 } } }
  large: { on_store_failure: local, buckets: { b: { size: 1000, fill_rate: 100, wait_timeout_millis: 100, max_debt_millis: 1000 } } }
";

/// Interval of counted decisions.
const WINDOW: Duration = Duration::from_secs(10);

/// Thirty callers with ten requests/s each: more than twice the tokens of either bucket.
const CALLERS: Plan =
    Plan { callers: 30, connections: 1, pace: Duration::from_millis(100), failover: false };

fn load(cluster: &Cluster) -> Load {
    let nodes = cluster.nodes.len();
    // Callers are distributed round-robin, so each node gets as many requests for either bucket.
    Load::start(&cluster.grpc(), CALLERS, move |caller, count| {
        match (caller / nodes + count).is_multiple_of(2) {
            true => Some(request("small", "b", 2)),
            false => Some(request("large", "b", 4)),
        }
    })
}

/// Number of answers of a cluster in [`WINDOW`] from `from` on, and the granted tokens.
fn granted(samples: &[Sample], namespace: &str, from: Instant) -> (f64, f64) {
    let within =
        |s: &&Sample| s.namespace == namespace && s.answered >= from && s.answered < from + WINDOW;
    let tokens: Vec<i64> = samples.iter().filter(within).map(Sample::granted).collect();
    (tokens.len() as f64, tokens.iter().sum::<i64>() as f64)
}

struct Outage {
    samples: Vec<Sample>,
    killed: Instant,
}

fn outage(mut cluster: Cluster, before: impl FnOnce(&mut Cluster)) -> Outage {
    before(&mut cluster);
    let load = load(&cluster);
    load.run_for(SECOND / 2);
    let killed = Instant::now();
    cluster.redis.kill();
    load.run_for(WINDOW);
    Outage { samples: load.finish(), killed }
}

/// Adds a fourth node and kills it, and waits until it is no longer counted.
fn kill_a_fourth_node(cluster: &mut Cluster) {
    let mut fourth = Node::start(&cluster.limits.path(), &["--store", &cluster.redis.url()]);
    eventually("four nodes", 20 * SECOND, || alive(&cluster.nodes[0]) == 4.0);
    fourth.kill();
    cluster.wait_until_counted();
}

#[test]
#[ignore = "judges a rate: scripts/full.sh --only slow"]
fn all_nodes_together_grant_about_the_limit() {
    let _machine = reserve_half();
    let mut outages: Vec<(usize, Outage)> = thread::scope(|scope| {
        let three = scope.spawn(|| outage(Cluster::start_of(3, LIMITS, &[]), kill_a_fourth_node));
        let others = [1, 5].map(|count| {
            let run = move || outage(Cluster::start_of(count, LIMITS, &[]), |_| {});
            (count, scope.spawn(run))
        });
        let joined = others.map(|(count, run)| (count, run.join().unwrap()));
        joined.into_iter().chain([(3, three.join().unwrap())]).collect()
    });
    outages.sort_by_key(|(nodes, _)| *nodes);
    let mut said = Vec::new();
    for (nodes, Outage { samples, killed }) in &outages {
        let limit = RATE * WINDOW.as_secs_f64();
        let (asked, small) = granted(samples, "small", *killed);
        let (_, large) = granted(samples, "large", *killed);
        let asked = 2.0 * asked;
        println!(
            "{nodes} nodes: {small} of {limit}, {asked} asked for; with a size of {LARGE}: {large}"
        );
        // On too busy a machine, callers do not request the limit.
        assert!(asked > limit, "{nodes} nodes: only {asked} tokens were asked for");
        assert!(small >= 0.5 * limit, "{nodes} nodes: {small} of {limit}");
        assert!(small <= 1.1 * limit, "{nodes} nodes: {small} of {limit}");
        // Local shares start full, whatever the shared bucket has left.
        let (least, most) = (LARGE + limit, LARGE + limit + RATE * DEBT_S);
        assert!(large >= 0.5 * least, "{nodes} nodes: {large} of {least}");
        assert!(large <= 1.1 * most, "{nodes} nodes: {large} of {most}");
        said.push(format!("{:.3} ({nodes})", small / limit));
        assert!(samples.iter().all(|sample| sample.answer.is_ok()));
        for node in 0..*nodes {
            let of = samples.iter().filter(|s| s.target == node && s.degraded());
            assert!(of.count() > 100, "node {node} of {nodes}");
        }
    }
    Row {
        fault: "Redis gone for 10 s: 1, 3 and 5 nodes with `local`",
        meanwhile: "each node grants its share of the limit, without one that died before",
        worst: "not measured: nine nodes share the machine".to_owned(),
        recovery: "–".to_owned(),
        tokens: format!("of rate · 10 s, by nodes: {}; allowed 0.5 to 1.1", said.join(", ")),
        test: "allow::local_shares::all_nodes_together_grant_about_the_limit",
    }
    .write(600);
}

/// A node that starts during an outage counts only itself until its first heartbeat. The other
/// nodes keep their shares.
#[test]
fn a_node_that_starts_in_an_outage_counts_only_itself() {
    let _machine = reserve_half();
    let mut cluster = Cluster::start_of(2, LIMITS, &[]);
    cluster.redis.kill();
    let new = Node::start(&cluster.limits.path(), &["--store", &cluster.redis.url()]);
    // A node's share of the large bucket, in tokens.
    let share = |node: &Node| {
        let answer = allow(node.http, "large", "b");
        assert_eq!(answer["degraded"], true, "{answer}");
        answer["tokensAvailable"].as_f64().unwrap() + 1.0
    };
    assert_eq!(share(&new).round(), LARGE);
    for node in &cluster.nodes {
        assert_eq!(share(node).round(), LARGE / 2.0);
    }
    cluster.redis.start_again();
    cluster.nodes.push(new);
    cluster.wait_until_counted();
}

/// Dead nodes are removed from the register, however many they are, and the register expires with
/// the last node.
#[tokio::test]
async fn dead_nodes_are_forgotten() {
    const DEAD: usize = 500;
    let (redis, limits) = (Redis::start(), LimitsFile::new(LIMITS));
    let node = Node::start(&limits.path(), &["--store", &redis.url()]);
    let mut inside = redis.connection();
    let known = |inside: &mut redis::Connection| -> usize {
        redis::cmd("ZCARD").arg("n").query(inside).unwrap()
    };
    let connector = connector(&redis.url(), &Metrics::new()).await;
    for number in 0..DEAD {
        connector.register(&format!("short-lived-{number}")).await;
    }
    let registered = Instant::now();
    eventually("most nodes are counted", 3 * SECOND, || alive(&node) as usize > DEAD / 2);
    assert!(known(&mut inside) <= DEAD + 1);
    // The next heartbeat removes them; a busy machine may delay it.
    eventually("they are forgotten", 8 * SECOND, || known(&mut inside) == 1);
    println!("{DEAD} nodes forgotten {:.1?} after the last heartbeat", registered.elapsed());
    eventually("and not counted", 2 * SECOND, || alive(&node) == 1.0);
    let lives: i64 = redis::cmd("PTTL").arg("n").query(&mut inside).unwrap();
    assert!((1..=5000).contains(&lives), "{lives} ms");
    drop(node);
    eventually("nothing is left", 7 * SECOND, || known(&mut inside) == 0);
    assert_eq!(redis::cmd("EXISTS").arg("n").query::<usize>(&mut inside).unwrap(), 0);
}
