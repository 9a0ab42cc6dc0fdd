//! Node processes on a Redis Cluster, under load: migrations of slots, flushed scripts, a new
//! master.

use std::sync::Arc;
use std::time::{Duration, Instant};

use testkit::acl::RestrictedUser;
use testkit::cluster::reserve_half;
use testkit::grpc::{capacity_client, request};
use testkit::http::{allow, get, is_shared_grant};
use testkit::lease_clients::{LeaseClients, now_us};
use testkit::load::{GrantAudit, Load, Plan, Sample, percentile};
use testkit::metrics::Scrape;
use testkit::redis_cluster::RedisCluster;
use testkit::report::Row;
use testkit::{
    LimitsFile, Node, START, Servers as _, Service, command_stats, eventually, grpc, redis_store,
    runtime,
};
use tollgate_proto::doorman::{ReleaseCapacityRequest, ResourceResponse};
use tollgate_server::domain::time::ManualClock;
use tollgate_server::service::allow::{Query, Status};
use tollgate_server::store::redis::slot;

const SIZE: f64 = 200.0;
const RATE: f64 = 200.0;

/// A store timeout that a busy machine does not exceed, for tests of amounts.
const PATIENT: [&str; 2] = ["--store-timeout", "5s"];

const CALLERS: Plan =
    Plan { callers: 24, connections: 2, pace: Duration::from_millis(5), failover: false };

/// Longer than learning mode lasts.
const HOUR_US: i64 = 3_600_000_000;

const SECOND: Duration = Duration::from_secs(1);

/// The first of the names `prefix0`, `prefix1`, … whose key is in that slot.
fn name_in(wanted: u16, prefix: &str, key: impl Fn(&str) -> String) -> String {
    let mut names = (0..).map(|number: u64| format!("{prefix}{number}"));
    names.find(|name| slot(key(name).as_bytes()) == wanted).unwrap()
}

fn spread(bucket: &str) -> String {
    format!("b{{spread:{bucket}}}")
}

fn holders(resource: &str) -> String {
    format!("h{{{resource}}}")
}

/// Limits with one unbounded namespace, `spread`, and one that bounds its buckets. Those stay in use
/// for minutes after each request.
fn limits(bounded: &str) -> LimitsFile {
    let bucket = "{ size: 200, fill_rate: 200, wait_timeout_millis: 0, max_debt_millis: 0 }";
    let slow = "{ size: 2000, fill_rate: 1, wait_timeout_millis: 0, max_debt_millis: 0 }";
    LimitsFile::new(&format!(
        "namespaces:
  spread: {{ dynamic_bucket_template: {bucket} }}
  {bounded}: {{ max_dynamic_buckets: 3, dynamic_bucket_template: {slow} }}
resources:
  - {{ identifier_glob: \"*\", capacity: 100, algorithm: {{ kind: FAIR_SHARE, lease_length: 60, refresh_interval: 1 }} }}
"
    ))
}

/// Requests all of a resource.
fn lease(node: &Node, client: &str, resource: &str) -> ResourceResponse {
    runtime().block_on(async {
        let mut connection = capacity_client(node).await;
        grpc::lease(&mut connection, client, resource, 100.0, None).await
    })
}

/// Asserts that all of a new resource is leased at once.
#[track_caller]
fn assert_leased_at_once(node: &Node, resource: &str) {
    let got = lease(node, "new", resource);
    assert_eq!(
        (got.gets.capacity, got.learning_until, got.degraded()),
        (100.0, None, false),
        "{resource}: {got:?}"
    );
}

fn listed(node: &Node) -> Vec<String> {
    let page = get(node, "/debug/status.json").json();
    let names = page["resources"].as_array().unwrap().iter();
    names.map(|one| one["resource"].as_str().unwrap().to_owned()).collect()
}

/// Asserts that the store decided all requests.
fn assert_all_shared(samples: &[Sample]) {
    for sample in samples {
        assert!(sample.answer.is_ok(), "{:?}", sample.answer);
        assert!(!sample.degraded(), "{} {}", sample.namespace, sample.bucket);
    }
}

fn audit(samples: &[Sample], namespace: &str, bucket: &str) {
    let of = |s: &&Sample| s.namespace == namespace && s.bucket == bucket;
    let of: Vec<&Sample> = samples.iter().filter(of).collect();
    let (size, rate) = if namespace == "spread" { (SIZE, RATE) } else { (2000.0, 1.0) };
    GrantAudit::of(&of, size, rate, 0.0).check(&format!("{namespace}:{bucket}"), 0.97).unwrap();
}

/// Migrates a slot with keys of every kind to another master, and pauses in each state.
fn migrate_slot((what, test, place): (&str, &str, u32), choose: impl FnOnce(&RedisCluster) -> u16) {
    let _machine = reserve_half();
    let cluster = RedisCluster::start();
    cluster.set_birth(now_us() - HOUR_US);
    let moving = choose(&cluster);
    let (from, to) = (cluster.owner(moving).unwrap(), (cluster.owner(moving).unwrap() + 1) % 3);

    let bucket = name_in(moving, "b", spread);
    let bounded = name_in(moving, "ns", |ns| format!("i{{{ns}}}"));
    let absent: Vec<String> =
        (0..3).map(|at| name_in(moving, &format!("absent{at}x"), spread)).collect();
    let resource = name_in(moving, "r", holders);
    let new: Vec<String> =
        (0..3).map(|at| name_in(moving, &format!("new{at}x"), holders)).collect();
    // Resources in another slot of the old master, whose register moves with the last slot.
    let stays = (0..16384).find(|&one| one != moving && cluster.owner(one) == Some(from)).unwrap();
    let staying: Vec<String> =
        (0..4).map(|at| name_in(stays, &format!("stays{at}x"), holders)).collect();

    let limits = limits(&bounded);
    let nodes = cluster.nodes(&limits, &PATIENT);
    let grpc: Vec<_> = nodes.iter().map(|node| node.grpc).collect();
    assert_leased_at_once(&nodes[0], &staying[0]);
    let started = now_us();
    let clients = LeaseClients::start(&grpc, "client", 8, &resource, |_| 20.0);
    let targets = [("spread", bucket.clone()), (&*bounded, "x".into()), ("spread", "other".into())];
    let asked: Vec<_> = targets.iter().map(|(ns, name)| request(ns, name, 1)).collect();
    let load = Load::start(&grpc, CALLERS, move |caller, _| Some(asked[caller / 2 % 3].clone()));
    load.run_for(SECOND);

    let migration = cluster.begin_migration(moving, to);
    load.run_for(SECOND);
    assert!(
        is_shared_grant(&allow(nodes[0].http, "spread", &absent[0])),
        "{what}: before the keys are moved"
    );
    assert_leased_at_once(&nodes[1], &new[0]);
    assert_leased_at_once(&nodes[0], &staying[1]);
    assert!(
        is_shared_grant(&allow(nodes[0].http, &bounded, "y")),
        "{what}: before the register is moved"
    );
    cluster.move_keys(&migration);
    let mut keys = redis::cmd("CLUSTER");
    keys.arg("GETKEYSINSLOT").arg(moving).arg(100);
    let moved: Vec<String> = keys.query(&mut cluster.connection(to)).unwrap();
    // Not the key of the bucket: it expires if the callers pause for a second, and the bucket is full.
    for (kind, name) in [("i", &bounded), ("h", &resource), ("w", &resource), ("e", &resource)] {
        let key = format!("{kind}{{{name}}}");
        assert!(moved.contains(&key), "{what}: {key} is not among {moved:?}");
    }
    load.run_for(SECOND);
    assert!(
        is_shared_grant(&allow(nodes[1].http, "spread", &absent[1])),
        "{what}: after the keys are moved"
    );
    assert!(
        is_shared_grant(&allow(nodes[1].http, &bounded, "z")),
        "{what}: after the keys are moved"
    );
    let answer = allow(nodes[0].http, &bounded, "fourth");
    assert_eq!(answer["status"], "REJECTED_TOO_MANY_BUCKETS", "{what}: {answer}");
    assert_leased_at_once(&nodes[0], &new[1]);
    assert_leased_at_once(&nodes[1], &staying[2]);
    cluster.finish_migration(migration);
    assert_leased_at_once(&nodes[1], &staying[3]);
    load.run_for(SECOND);
    assert!(
        is_shared_grant(&allow(nodes[0].http, "spread", &absent[2])),
        "{what}: after the migration"
    );
    assert_leased_at_once(&nodes[0], &new[2]);

    let samples = load.finish();
    println!("{what}: {} decisions", samples.len());
    assert_all_shared(&samples);
    for (namespace, bucket) in &targets {
        audit(&samples, namespace, bucket);
    }
    let mut took: Vec<Duration> = samples.iter().map(Sample::latency).collect();
    let p999 = percentile(&mut took, 0.999);
    let all = [&new[..], &staying[..], &[resource]].concat();
    for node in &nodes {
        eventually("every resource is listed", 5 * SECOND, || {
            // A resource is registered at its next request if the register was moving before.
            staying.iter().for_each(|name| drop(lease(node, "new", name)));
            let listed = listed(node);
            all.iter().all(|name| listed.contains(name))
        });
        assert_eq!(Scrape::of(node.http).sum("tollgate_store_errors_total", &[]), 0.0);
    }
    let record = clients.finish();
    assert!(record.failures.is_empty());
    assert!(record.answers.iter().all(|one| !one.learning && !one.degraded), "{what}: leases");
    let held = testkit::lease_clients::Holdings::of(&[&record.answers]);
    let (_, most) = held.range(started, now_us());
    assert!(most <= 100.0 + 1e-9, "{what}: {most} of 100 leased");
    assert!(most >= 99.0, "{what}: {most} of 100 leased");
    Row {
        fault: &format!("Cluster: {what} with buckets and leases goes to another master"),
        meanwhile: "decided by whoever has the keys (MOVED, ASK, TRYAGAIN): none without the store",
        worst: format!(
            "{p999:.1?} (p99.9 of {}; with a patient `--store-timeout`, as what is split waits)",
            took.len()
        ),
        recovery: "–".to_owned(),
        tokens: format!("0 over-granted in three buckets; {most:.0} of 100 leased"),
        test,
    }
    .write(place);
}

#[test]
fn a_slot_in_the_middle_of_others() {
    let row = ("a slot", "redis::cluster::a_slot_in_the_middle_of_others", 750);
    migrate_slot(row, |_| 3000);
}

/// This slot has the keys of the server itself: its birth, its resources, the nodes.
#[test]
fn the_last_slot_of_a_server() {
    let row = ("the last slot", "redis::cluster::the_last_slot_of_a_server", 760);
    migrate_slot(row, |cluster| cluster.highest_slot(0).unwrap());
}

#[test]
fn script_flush_on_one_master_fails_nothing() {
    let _machine = reserve_half();
    let cluster = RedisCluster::start_with(3, 0);
    let limits = limits("bounded");
    let nodes = cluster.nodes(&limits, &PATIENT);
    let grpc: Vec<_> = nodes.iter().map(|node| node.grpc).collect();
    let load = Load::start(&grpc, CALLERS, |caller, count| {
        Some(request("spread", &format!("b{}", (caller + count) % 30), 1))
    });
    let mut inside = cluster.connection(1);
    for _ in 0..50 {
        load.run_for(SECOND / 50);
        redis::cmd("SCRIPT").arg("FLUSH").exec(&mut inside).unwrap();
    }
    assert_all_shared(&load.finish());
    for node in &nodes {
        assert_eq!(Scrape::of(node.http).sum("tollgate_store_errors_total", &[]), 0.0);
    }
}

/// The master that is about to get a slot has lost the script when it is asked. That ASKING is sent
/// again, too, is shown by the tests of the lane: here the old master would only send the node back.
#[test]
fn a_script_is_loaded_while_a_slot_moves() {
    let _machine = reserve_half();
    let cluster = RedisCluster::start_with(3, 0);
    let limits = limits("bounded");
    let nodes = cluster.nodes(&limits, &PATIENT);
    let moving = 3000;
    let to = (cluster.owner(moving).unwrap() + 1) % 3;
    let migration = cluster.begin_migration(moving, to);
    let mut inside = cluster.connection(to);
    for number in 0..5 {
        let absent = name_in(moving, &format!("absent{number}x"), spread);
        redis::cmd("SCRIPT").arg("FLUSH").exec(&mut inside).unwrap();
        assert!(is_shared_grant(&allow(nodes[0].http, "spread", &absent)));
    }
    assert_eq!(Scrape::of(nodes[0].http).sum("tollgate_store_errors_total", &[]), 0.0);
    cluster.move_keys(&migration);
    cluster.finish_migration(migration);
}

/// A key that becomes empty is gone, and then the old master refuses commands on it.
#[test]
fn the_last_lease_is_released_while_its_slot_moves() {
    let _machine = reserve_half();
    let cluster = RedisCluster::start_with(3, 0);
    cluster.set_birth(now_us() - HOUR_US);
    let limits = limits("bounded");
    let nodes = cluster.nodes(&limits, &PATIENT);
    let moving = slot(holders("moving").as_bytes());
    let from = cluster.owner(moving).unwrap();
    assert_leased_at_once(&nodes[0], "moving");
    let migration = cluster.begin_migration(moving, (from + 1) % 3);
    runtime().block_on(async {
        let release = ReleaseCapacityRequest {
            client_id: "new".to_owned(),
            resource_id: vec!["moving".to_owned()],
        };
        capacity_client(&nodes[0]).await.release_capacity(release).await.unwrap();
    });
    let mut inside = cluster.connection(from);
    let left: Vec<String> = redis::cmd("KEYS").arg("*{moving}*").query(&mut inside).unwrap();
    assert!(left.is_empty(), "{left:?}");
    assert_leased_at_once(&nodes[1], "moving");
    cluster.move_keys(&migration);
    cluster.finish_migration(migration);
    assert_leased_at_once(&nodes[0], "moving");
}

#[test]
fn a_new_master_is_given_slots() {
    let _machine = reserve_half();
    let mut cluster = RedisCluster::start();
    cluster.set_birth(now_us() - HOUR_US);
    let limits = limits("bounded");
    let nodes = cluster.nodes(&limits, &PATIENT);
    let grpc: Vec<_> = nodes.iter().map(|node| node.grpc).collect();
    let names: Vec<String> = (0..12).map(|at| format!("b{at}")).collect();
    let asked = names.clone();
    let load = Load::start(&grpc, CALLERS, move |caller, _| {
        Some(request("spread", &asked[caller / 2 % asked.len()], 1))
    });
    load.run_for(SECOND);
    let new = cluster.add_master();
    // Each of these slots has a bucket under load.
    for name in &names[..4] {
        cluster.migrate(slot(spread(name).as_bytes()), new);
    }
    let got = name_in(slot(spread(&names[0]).as_bytes()), "r", holders);
    assert_leased_at_once(&nodes[0], &got);
    load.run_for(2 * SECOND);
    let samples = load.finish();
    assert_all_shared(&samples);
    names.iter().for_each(|name| {
        let of: Vec<&Sample> = samples.iter().filter(|s| s.bucket == *name).collect();
        let audit = GrantAudit::of(&of, SIZE, RATE, 0.0);
        assert!(audit.granted as f64 <= audit.upper_bound, "{name}: too much");
    });
    for node in &nodes {
        // A node that does not know the new master yet lists nothing of it. If it made the lease,
        // the next call registers the resource, as clients make one each `refresh_interval`.
        eventually("the new master is known", 10 * SECOND, || {
            drop(lease(&nodes[0], "new", &got));
            node.store_is_up() && listed(node).contains(&got)
        });
    }
}

/// The last slot of a server moves, and with it the birth of that server. The target was born
/// later: it goes on learning. The source does not start to learn.
#[test]
fn births_of_two_servers_are_merged() {
    let _machine = reserve_half();
    let cluster = RedisCluster::start_with(3, 0);
    let now = now_us();
    cluster.set_birth(now - HOUR_US);
    let (young, old) = (0, 1);
    let recent = now - 10_000_000;
    let birth_of = |number: usize| cluster.birth_keys().swap_remove(number);
    redis::cmd("SET")
        .arg(birth_of(young))
        .arg(recent)
        .exec(&mut cluster.connection(young))
        .unwrap();
    let limits = limits("bounded");
    let nodes = cluster.nodes(&limits, &PATIENT);
    let moving = cluster.highest_slot(old).unwrap();
    let resource = |slot: u16, at: usize| name_in(slot, &format!("r{at}x"), holders);
    let learns = |at: usize| {
        let got = lease(&nodes[at % 2], "new", &resource(3000, at));
        assert_eq!((got.gets.capacity, got.degraded()), (0.0, false), "{at}: {got:?}");
        assert!(got.learning_until.is_some(), "{at}: {got:?}");
    };
    learns(0);
    assert_leased_at_once(&nodes[0], &resource(7000, 0));

    cluster.migrate(moving, young);
    assert_eq!(cluster.highest_slot(young), Some(moving));
    for at in 1..5 {
        learns(at);
        assert_leased_at_once(&nodes[at % 2], &resource(7000, at));
    }
    eventually("the later birth is kept", 5 * SECOND, || {
        let mut inside = cluster.connection(young);
        redis::cmd("GET").arg(birth_of(young)).query::<i64>(&mut inside).unwrap() == recent
    });
    let names: Vec<String> =
        (0..5).flat_map(|at| [resource(3000, at), resource(7000, at)]).collect();
    for node in &nodes {
        eventually("every resource is listed", 5 * SECOND, || {
            // A resource is registered at its next request if the register was moving before.
            names.iter().for_each(|name| drop(lease(node, "new", name)));
            let listed = listed(node);
            names.iter().all(|name| listed.contains(name))
        });
    }
    let mut all = redis::cmd("ZRANGE");
    let register = |number: usize| birth_of(number).replace('o', "l");
    let left: Vec<String> =
        all.arg(register(old)).arg(0).arg(-1).query(&mut cluster.connection(old)).unwrap();
    assert_eq!(left.len(), 5, "{left:?}");
}

/// The names of a register whose slot has moved are read and moved a page at a time, once, on connections
/// that are used again.
#[test]
fn a_large_register_is_moved_in_pages() {
    const NAMES: usize = 50_000;
    let _machine = reserve_half();
    let cluster = RedisCluster::start_with(2, 0);
    cluster.set_birth(now_us() - HOUR_US);
    let (to, from) = (0, 1);
    let register = |number: usize| cluster.birth_keys().swap_remove(number).replace('o', "l");
    // Names of resources that stay where they are.
    let moving = cluster.highest_slot(from).unwrap();
    let staying = cluster.highest_slot(to).unwrap() + 1..moving;
    let names = (0..).map(|number: u32| format!("r{number}"));
    let stay = names.filter(|name| staying.contains(&slot(holders(name).as_bytes())));
    let expires_s = now_us() / 1_000_000 + 3600;
    let entries: Vec<_> = stay.take(NAMES).map(|name| (expires_s, name)).collect();
    let (mut source, mut target) = (cluster.connection(from), cluster.connection(to));
    redis::cmd("ZADD").arg(register(from)).arg(&entries).exec(&mut source).unwrap();
    let limits = limits("bounded");
    let node = Node::start(&limits.path(), &[&["--store", &cluster.url()], &PATIENT[..]].concat());
    node.wait_for_store();
    let before = connections_received(&mut source) + connections_received(&mut target);

    // The register goes to the other server with the slot, and its names come back.
    cluster.migrate(moving, to);
    let back = register(from);
    eventually("the names are moved", 10 * SECOND, || {
        redis::cmd("ZCARD").arg(&back).query::<usize>(&mut source).unwrap() == NAMES
    });
    let pages = command_stats(&mut target, "zscan").calls as usize;
    // A page has about 1,000 names. A stall of the machine has some of them read again.
    assert!((25..400).contains(&pages), "{pages} pages");
    let after = connections_received(&mut source) + connections_received(&mut target);
    let made = after - before;
    // Three commands a page. Some 30 connections are made to move the slot and to look at the servers.
    assert!(made < 2 * pages, "{made} connections for {pages} pages");
}

/// A register is read again after a pause if some names could not be moved, as it may be large.
#[test]
fn names_whose_slot_has_no_server_stay_in_the_register() {
    let _machine = reserve_half();
    let cluster = RedisCluster::start_with(2, 0);
    cluster.set_birth(now_us() - HOUR_US);
    let (to, from) = (0, 1);
    let register = cluster.birth_keys().swap_remove(from).replace('o', "l");
    let moving = cluster.highest_slot(from).unwrap();
    let lost = moving - 100;
    let name = name_in(lost, "r", holders);
    let (mut source, mut target) = (cluster.connection(from), cluster.connection(to));
    let expires_s = now_us() / 1_000_000 + 3600;
    redis::cmd("ZADD").arg(&register).arg(expires_s).arg(&name).exec(&mut source).unwrap();
    for inside in [&mut source, &mut target] {
        let setting = ["SET", "cluster-require-full-coverage", "no"];
        redis::cmd("CONFIG").arg(&setting).exec(inside).unwrap();
        redis::cmd("CLUSTER").arg("DELSLOTS").arg(lost).exec(inside).unwrap();
    }
    let limits = limits("bounded");
    let node = Node::start(&limits.path(), &[&["--store", &cluster.url()], &PATIENT[..]].concat());
    node.wait_for_store();

    cluster.migrate(moving, to);
    let mut reads = || command_stats(&mut target, "zscan").calls;
    eventually("the register is read", 10 * SECOND, || reads() > 0);
    let start = Instant::now();
    let enough = reads() + 4;
    eventually("it is read again", 10 * SECOND, || reads() >= enough);
    // At least two whole pauses are between them: once, the other server's own register may be among these.
    assert!(start.elapsed() >= SECOND, "{:?}", start.elapsed());

    redis::cmd("CLUSTER").arg("ADDSLOTS").arg(lost).exec(&mut source).unwrap();
    let back = cluster.birth_keys().swap_remove(from).replace('o', "l");
    eventually("the name is moved", 10 * SECOND, || {
        redis::cmd("ZSCORE")
            .arg(&back)
            .arg(&name)
            .query::<Option<f64>>(&mut source)
            .unwrap()
            .is_some()
    });
}

/// The number of connections that a server has accepted.
fn connections_received(inside: &mut redis::Connection) -> usize {
    let text: String = redis::cmd("INFO").arg("stats").query(inside).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("total_connections_received:"));
    line.unwrap().trim().parse().unwrap()
}

/// The rights in `docs/operating.md` are enough.
#[test]
fn the_documented_rights_are_enough() {
    let _machine = reserve_half();
    let (cluster, mut servers) = (RedisCluster::start_with(3, 0), Vec::new());
    for number in 0..3 {
        let of_a_cluster = " +cluster|slots +cluster|info";
        let user = RestrictedUser::with_documented_rights(cluster.connection(number), of_a_cluster);
        servers.push(user);
    }
    cluster.set_birth(now_us() - HOUR_US);
    let limits = limits("bounded");
    let url = cluster.url().replace("://", "://tollgate:secret@");
    let node = Node::start(&limits.path(), &["--store", &url, "--store-timeout", "5s"]);
    node.wait_for_store();
    for at in 0..20 {
        assert!(is_shared_grant(&allow(node.http, "spread", &format!("b{at}"))));
    }
    assert!(is_shared_grant(&allow(node.http, "bounded", "x")));
    assert_leased_at_once(&node, "r");
    assert_eq!(listed(&node), ["r"]);
    assert_eq!(Scrape::of(node.http).sum("tollgate_store_errors_total", &[]), 0.0);
    servers.iter_mut().for_each(RestrictedUser::assert_nothing_was_denied);
}

/// Concurrent requests for as many buckets, in many slots, are batched.
#[tokio::test]
async fn requests_for_many_slots_share_calls() {
    const REQUESTS: u64 = 3000;
    let cluster = RedisCluster::start_with(3, 0);
    let clock = ManualClock::new(START);
    let store = redis_store(&cluster, clock.clone()).await;
    let limits = "namespaces: { ns: { dynamic_bucket_template: { size: 5, fill_rate: 1/h } } }";
    let service = Arc::new(Service::new(store, clock, limits));
    let calls = |number: usize| command_stats(&mut cluster.connection(number), "evalsha").calls;
    let before: u64 = (0..3).map(calls).sum();
    let mut callers = tokio::task::JoinSet::new();
    for at in 0..REQUESTS {
        let service = Arc::clone(&service);
        callers.spawn(async move {
            let (bucket, namespace) = (format!("user-{at}"), "ns");
            let query = Query { namespace, bucket: &bucket, tokens: 1, ..Query::default() };
            let answer = service.allow.allow(&query).await.unwrap();
            assert_eq!((answer.status, answer.degraded), (Status::Ok, false));
        });
    }
    callers.join_all().await;
    let made = (0..3).map(calls).sum::<u64>() - before;
    let keys: Vec<u64> = (0..3)
        .map(|number| redis::cmd("DBSIZE").query(&mut cluster.connection(number)).unwrap())
        .collect();
    println!("{REQUESTS} decisions in {made} calls, keys on the masters: {keys:?}");
    assert!(made <= REQUESTS / 8, "{made} calls for {REQUESTS} decisions");
    assert!(keys.iter().all(|&of_one| of_one > REQUESTS / 4), "{keys:?}");
}
