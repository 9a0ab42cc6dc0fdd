//! Node processes on a Redis with sentinels, under load: nodes follow the master.

use std::time::{Duration, Instant};

use testkit::acl::RestrictedUser;
use testkit::cluster::{alive, reserve_quarter, up_to_three_times};
use testkit::grpc::request;
use testkit::http::{allow, get};
use testkit::lease_clients::{Holdings, LeaseClients, now_us};
use testkit::load::{
    GrantAudit, Load, Plan, Sample, StallDetector, assert_shared_again, percentile,
};
use testkit::report::Row;
use testkit::sentinel::Sentinels;
use testkit::{LimitsFile, Node, command_stats, eventually};
use tollgate_proto::quotaservice::allow_response::Status;

const LIMITS: &str = "
namespaces: { ns: { buckets: { b: { size: 200, fill_rate: 200, wait_timeout_millis: 0, max_debt_millis: 0 } } } }
resources:
  - { identifier_glob: '*', capacity: 100, algorithm: { kind: FAIR_SHARE, lease_length: 60, refresh_interval: 1 } }
";

const CALLERS: Plan =
    Plan { callers: 16, connections: 2, pace: Duration::from_millis(5), failover: false };

const SECOND: Duration = Duration::from_secs(1);

fn start(sentinels: &Sentinels, limits: &LimitsFile, args: &[&str]) -> Vec<Node> {
    let url = sentinels.url();
    let args = [&["--store", &url], args].concat();
    let nodes: Vec<Node> = (0..2).map(|_| Node::start(&limits.path(), &args)).collect();
    for node in &nodes {
        node.wait_for_store();
        eventually("both nodes are counted", 10 * SECOND, || alive(node) == 2.0);
    }
    nodes
}

fn load(nodes: &[Node]) -> Load {
    let grpc: Vec<_> = nodes.iter().map(|node| node.grpc).collect();
    Load::start(&grpc, CALLERS, |_, _| Some(request("ns", "b", 1)))
}

/// Whether the master has run a script.
fn master_ran_a_script(sentinels: &Sentinels) -> bool {
    command_stats(&mut sentinels.connection(), "evalsha").calls > 0
}

#[test]
fn a_url_of_sentinels_is_served() {
    let _machine = reserve_quarter();
    up_to_three_times(|| {
        let (sentinels, limits) = (Sentinels::start(), LimitsFile::new(LIMITS));
        let nodes = start(&sentinels, &limits, &["--store-timeout", "5s"]);
        let load = load(&nodes);
        load.run_for(2 * SECOND);
        let samples = load.finish();
        assert!(samples.iter().all(|sample| sample.answer.is_ok() && !sample.degraded()));
        let all: Vec<&Sample> = samples.iter().collect();
        GrantAudit::of(&all, 200.0, 200.0, 0.0).check("behind sentinels", 0.97)?;
        assert!(master_ran_a_script(&sentinels));
        assert_eq!(get(&nodes[0], "/debug/status.json").status, 200);
        Ok(())
    });
}

/// The rights in `docs/operating.md` are enough, on the servers and on the sentinels.
#[test]
fn the_documented_rights_are_enough() {
    let _machine = reserve_quarter();
    let (sentinels, limits) = (Sentinels::start(), LimitsFile::new(LIMITS));
    let mut asked = vec![RestrictedUser::with_documented_rights(sentinels.connection(), " +role")];
    for port in sentinels.ports() {
        let client = redis::Client::open(format!("redis://127.0.0.1:{port}")).unwrap();
        let rights = "reset on >other +@connection -@dangerous +sentinel|get-master-addr-by-name \
                      +sentinel|master";
        asked.push(RestrictedUser::with_rights(client.get_connection().unwrap(), rights));
    }
    let url = sentinels.url().replace("://", "://tollgate:secret@");
    let url = format!("{url}?sentinel_user=tollgate&sentinel_password=other");
    let node = Node::start(&limits.path(), &["--store", &url, "--store-timeout", "5s"]);
    eventually("a shared decision", 5 * SECOND, || {
        allow(node.http, "ns", "b")["degraded"] == false
    });
    assert!(master_ran_a_script(&sentinels));
    asked.iter_mut().for_each(RestrictedUser::assert_nothing_was_denied);
}

/// A bucket under each policy; those of `allow` and `deny` hardly refill, so that all grants can be
/// counted.
const OUTAGE: &str = "
namespaces:
  local: { on_store_failure: local, buckets: { b: { size: 200, fill_rate: 200, wait_timeout_millis: 0, max_debt_millis: 0 } } }
  allow: { on_store_failure: allow, buckets: { b: { size: 300000, fill_rate: 3000/d } } }
  deny: { on_store_failure: deny, buckets: { b: { size: 300000, fill_rate: 3000/d } } }
resources:
  - { identifier_glob: '*', capacity: 100, algorithm: { kind: FAIR_SHARE, lease_length: 60, refresh_interval: 1, learning_mode_duration: 0 } }
";

const POLICIES: [&str; 3] = ["local", "allow", "deny"];

/// Times of a node's last shared answer before the outage and of its first one after it.
fn gap(samples: &[Sample], node: usize, killed: Instant) -> (Instant, Instant) {
    let shared = |s: &&Sample| s.target == node && !s.degraded();
    let answered = samples.iter().filter(shared).map(|s| (s.sent, s.answered));
    let all: Vec<(Instant, Instant)> = answered.collect();
    let last = all.iter().filter(|(sent, _)| *sent <= killed).map(|(_, at)| *at).max().unwrap();
    let noticed = killed + Duration::from_millis(200);
    let first = all.iter().filter(|(sent, _)| *sent > noticed).map(|(_, at)| *at).min().unwrap();
    (last, first)
}

#[test]
#[ignore = "waits long, alone: scripts/full.sh --only slow"]
fn nodes_follow_when_the_master_dies() {
    let _machine = reserve_quarter();
    let mut sentinels = Sentinels::start_with(SECOND / 2);
    let limits = LimitsFile::new(OUTAGE);
    let nodes = start(&sentinels, &limits, &[]);
    let grpc: Vec<_> = nodes.iter().map(|node| node.grpc).collect();
    let leases = LeaseClients::start(&grpc, "client", 8, "r", |_| 20.0);
    let (canary, started) = (StallDetector::start(), Instant::now());
    let load =
        Load::start(&grpc, CALLERS, |caller, _| Some(request(POLICIES[caller / 2 % 3], "b", 1)));
    load.run_for(SECOND);
    // From here on, requests are renewals only.
    let share = |client| leases.last(client).is_some_and(|one| one.capacity == 12.5);
    eventually("every client has its share", 10 * SECOND, || (0..8).all(share));
    load.run_for(SECOND / 2);
    // A sentinel dies together with the master.
    sentinels.kill_sentinel(1);
    let (dead, killed_us) = (sentinels.kill_master(), now_us());
    let killed = Instant::now();
    sentinels.first_named(dead);
    let first_named = Instant::now();
    sentinels.new_master(Some(dead));
    let named = Instant::now();
    load.run_for(3 * SECOND);
    let samples = load.finish();
    let noise = canary.worst();
    assert!(samples.iter().all(|sample| sample.answer.is_ok()));
    let degraded: Vec<&Sample> = samples.iter().filter(|sample| sample.degraded()).collect();
    let last = degraded.iter().map(|sample| sample.answered).max().unwrap();
    let gaps = [0, 1].map(|node| gap(&samples, node, killed));
    let without = gaps.iter().map(|(last, first)| *first - *last).max().unwrap();
    println!(
        "named after {:.1?}, by most after {:.1?}; {} of {} answers degraded, the last one {:.0?} \
         after that; \
         {without:.0?} without shared decisions; this machine's own delays up to {noise:.1?}",
        first_named - killed,
        named - killed,
        degraded.len(),
        samples.len(),
        last.saturating_duration_since(named)
    );
    let ours =
        assert_shared_again(&samples.iter().collect::<Vec<_>>(), nodes.len(), first_named, noise);
    assert!(samples.iter().filter(|sample| sample.sent > named + SECOND).count() > 500);
    assert!(master_ran_a_script(&sentinels), "the new master was never asked");
    for sample in &degraded {
        let expected = match &*sample.namespace {
            "allow" => [Status::Ok; 2],
            "deny" => [Status::RejectedServerError; 2],
            _ => [Status::Ok, Status::RejectedTimeout],
        };
        assert!(expected.contains(&sample.status().unwrap()), "{:?}", sample.answer);
    }

    // Tokens that the old master granted but had not replicated, and tokens taken for requests that
    // timed out.
    let (mut granted, mut forgotten) = (0, 0.0_f64);
    let refilled = 3000.0 / 86_400.0 * started.elapsed().as_secs_f64();
    for namespace in ["allow", "deny"] {
        let of = samples.iter().filter(|s| s.namespace == namespace && !s.degraded());
        let here: i64 = of.map(Sample::granted).sum();
        let left = available(&nodes[0], namespace);
        let taken = 3e5 + refilled - left;
        println!("{namespace}: {here} granted, {taken:.1} taken as the new master has it");
        granted += here;
        forgotten += here as f64 - taken;
    }
    let unknown = degraded.iter().filter(|s| s.sent <= killed + SECOND / 5).count();
    assert!(forgotten >= -1.0 - unknown as f64, "{forgotten}: taken but not granted");
    assert!(forgotten <= granted as f64 / 10.0, "{forgotten} of {granted} granted are forgotten");
    let saturated: Vec<&Sample> =
        samples.iter().filter(|s| s.namespace == "local" && !s.degraded()).collect();
    let audit = GrantAudit::of(&saturated, 200.0, 200.0, 0.0);
    let over = (audit.granted as f64 - audit.upper_bound).max(0.0);
    assert!(over <= 200.0, "{over} tokens too many, more than the size");

    let record = leases.finish();
    assert!(record.failures.is_empty());
    assert!(record.answers.iter().all(|one| !one.learning));
    let (_, most) = Holdings::of(&[&record.answers]).range(killed_us, now_us());
    assert!(most <= 100.0 + 1e-9, "{most} of 100 leased through the failover");
    let mut took: Vec<Duration> = samples.iter().map(Sample::latency).collect();
    let p999 = percentile(&mut took, 0.999);
    let bound = Duration::from_millis(60) + 2 * noise;
    assert!(p999 <= bound, "p99.9 {p999:?} is over {bound:?}");
    Row {
        fault: "Sentinel: the master is killed, and one of three sentinels (`down-after` 0.5 s)",
        meanwhile: "the policy of each namespace; leases are renewed",
        worst: format!(
            "{p999:.1?} (p99.9 of {}; this machine's own stalls {noise:.0?})",
            took.len()
        ),
        recovery: format!(
            "{without:.1?} without shared decisions: a sentinel named the new master after \
             {:.1?}, and {ours:.0?} later every node used it",
            first_named - killed
        ),
        tokens: format!(
            "{:.0} of {granted} granted were lost, {over:.0} over-granted; {most:.0} of 100 leased",
            forgotten.max(0.0)
        ),
        test: "redis::sentinel::nodes_follow_when_the_master_dies",
    }
    .write(700);
}

/// Tokens left in a bucket, by a shared decision.
fn available(node: &Node, namespace: &str) -> f64 {
    let mut left = None;
    eventually("a shared decision", 5 * SECOND, || {
        let answer = allow(node.http, namespace, "b");
        let shared = answer["degraded"] == false;
        left = shared.then(|| answer["tokensAvailable"].as_f64().unwrap() + 1.0);
        shared
    });
    left.unwrap()
}
