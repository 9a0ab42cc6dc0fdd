//! Capacity leases from three node processes on one Redis: no client loses its lease, and no unit
//! is leased twice, also when a node dies, when Redis loses its data, and when the capacity is
//! lowered.

use std::collections::HashSet;
use std::thread;
use std::time::{Duration, Instant};

use testkit::cluster::{Cluster, reserve_half};
use testkit::http::get;
use testkit::lease_clients::{Answer, Holdings, LeaseClients, Record, fair_shares, now_us};
use testkit::{Node, eventually};

/// A store timeout that a busy machine does not exceed.
const PATIENT: [&str; 2] = ["--store-timeout", "2s"];

const CONVERGED: Duration = Duration::from_secs(20);

const SECOND: i64 = 1_000_000;

fn limits(capacity: f64, lease_s: u32, refresh_s: u32, learning_s: u32) -> String {
    format!(
        "resources: [{{ identifier_glob: '*', capacity: {capacity}, algorithm: {{ kind: FAIR_SHARE, \
         lease_length: {lease_s}, refresh_interval: {refresh_s}, learning_mode_duration: {learning_s} }} }}]"
    )
}

/// Wants that differ between clients, over a wide range.
fn wants(client: usize) -> f64 {
    1.0 + (client * 7919 % 5003) as f64 / 50.0
}

/// Capacity leased by the store, as shown by a node.
fn leased_capacity(node: &Node) -> f64 {
    let status = get(node, "/debug/status.json").json();
    status["resources"][0]["has"].as_f64().unwrap_or_else(|| panic!("{status}"))
}

/// Waits until every client has its share.
fn wait_for_shares(fleet: &LeaseClients, shares: &[f64]) {
    eventually("every client has its share", CONVERGED, || {
        let mut last = vec![f64::NAN; shares.len()];
        fleet.look(|record| {
            for one in &record.answers {
                last[one.client] = one.capacity;
            }
        });
        last.iter().zip(shares).all(|(has, share)| near(*has, *share))
    });
}

fn near(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-9 * b
}

#[test]
#[ignore = "waits long, alone: scripts/full.sh --only slow"]
fn a_node_killed_under_5000_clients() {
    const CLIENTS: usize = 5000;
    let _machine = reserve_half();
    let wanted: Vec<f64> = (0..CLIENTS).map(wants).collect();
    let capacity = (wanted.iter().sum::<f64>() / 2.0).floor();
    let shares = fair_shares(&wanted, capacity);
    let mut cluster = Cluster::start(&limits(capacity, 30, 2, 0), &PATIENT);
    let fleet = LeaseClients::start(&cluster.grpc(), "client", CLIENTS, "r", wants);

    let (mut samples, mut most) = (0, 0.0_f64);
    let mut sample = |cluster: &Cluster| {
        let has = leased_capacity(&cluster.nodes[0]);
        assert!(has <= capacity * (1.0 + 1e-12), "{has} leased of {capacity}");
        (samples, most) = (samples + 1, most.max(has));
        // The pace of the samples.
        thread::sleep(Duration::from_millis(100));
    };
    eventually("a lease", CONVERGED, || fleet.look(|record| !record.answers.is_empty()));
    let began = Instant::now();
    eventually("three answers per client", CONVERGED, || {
        sample(&cluster);
        fleet.look(|record| record.answers.len() > 3 * CLIENTS)
    });
    wait_for_shares(&fleet, &shares);
    let (converged, took) = (now_us(), began.elapsed());
    for _ in 0..15 {
        sample(&cluster);
    }
    let killed = now_us();
    cluster.nodes[1].kill();
    eventually("two answers per client since the kill", CONVERGED, || {
        sample(&cluster);
        fleet.look(|record| {
            let mut since = vec![0; CLIENTS];
            for one in record.answers.iter().rev().take_while(|one| one.got >= killed) {
                since[one.client] += i32::from(one.sent >= killed);
            }
            since.iter().all(|&answers| answers >= 2)
        })
    });
    let record = fleet.finish();
    let ended = now_us();

    // No lease is lost or shrinks.
    for one in record.answers.iter().filter(|one| one.sent >= converged) {
        assert!(near(one.capacity, shares[one.client]), "{one:?} of {}", shares[one.client]);
        assert!(!one.degraded && !one.learning, "{one:?}");
    }
    let mut held_until = vec![i64::MAX; CLIENTS];
    for one in &record.answers {
        assert!(one.got < held_until[one.client], "{one:?}: its lease had expired");
        held_until[one.client] = one.expiry;
    }
    // Only requests in flight to the killed node fail.
    let mut once = HashSet::new();
    for failure in &record.failures {
        assert_eq!(failure.target, 1, "{failure:?}");
        assert!(failure.at >= killed, "{failure:?}");
        assert!(once.insert(failure.client), "{failure:?}: not for the first time");
    }
    assert!(!once.is_empty(), "no client was using the node");

    let holdings = Holdings::of(&[&record.answers]);
    let (_, peak) = holdings.range(0, ended);
    let (low, high) = holdings.range(converged, ended);
    println!(
        "{} answers to {CLIENTS} clients, {:.0} a second; converged after {took:.1?}; then, \
         through the kill, clients held {:.6} to {:.6} % of the capacity, and the store had at \
         most {:.9} % of it in {samples} samples; {} requests failed with the node and were answered \
         by another",
        record.answers.len(),
        record.answers.len() as f64 / began.elapsed().as_secs_f64(),
        100.0 * low / capacity,
        100.0 * high / capacity,
        100.0 * most / capacity,
        once.len(),
    );
    assert!(peak <= capacity * (1.0 + 1e-9), "clients held {peak} of {capacity}");
    assert!(low >= 0.999 * capacity, "clients held {low} of {capacity}");
}

#[test]
fn redis_restarted_empty() {
    const CLIENTS: usize = 300;
    const CAPACITY: f64 = 6000.0;
    const LEARNING: i64 = 3;
    let _machine = reserve_half();
    let wanted: Vec<f64> = (0..CLIENTS).map(wants).collect();
    let shares = fair_shares(&wanted, CAPACITY);
    let mut cluster = Cluster::start(&limits(CAPACITY, 20, 1, LEARNING as u32), &PATIENT);
    // A new store learns first.
    let fleet = LeaseClients::start(&cluster.grpc(), "client", CLIENTS, "r", wants);
    wait_for_shares(&fleet, &shares);
    let converged = now_us();

    cluster.redis.kill();
    let killed = now_us();
    // An outage of two seconds: every client refreshes without the store.
    thread::sleep(Duration::from_secs(2));
    cluster.redis.start_again();
    let back = now_us();
    // Lets nodes notice that Redis is back.
    thread::sleep(Duration::from_millis(500));
    let newcomer = LeaseClients::start(&cluster.grpc(), "newcomer", 1, "r", |_| 1e6);
    // Real time: learning mode lasts as long.
    thread::sleep(Duration::from_secs(LEARNING as u64));
    let all: Vec<f64> = wanted.iter().copied().chain([1e6]).collect();
    let new_shares = fair_shares(&all, CAPACITY);
    wait_for_shares(&fleet, &new_shares[..CLIENTS]);
    wait_for_shares(&newcomer, &new_shares[CLIENTS..]);
    let again = now_us();
    let (record, newcomer) = (fleet.finish(), newcomer.finish());

    assert!(record.failures.is_empty(), "{:?}", record.failures[0]);
    let after: Vec<_> = record.answers.iter().filter(|one| one.sent >= converged).collect();
    let degraded: Vec<_> = after.iter().filter(|one| one.degraded).collect();
    let learning: Vec<_> = after.iter().filter(|one| one.learning).collect();
    for one in degraded.iter().chain(&learning) {
        assert!(near(one.capacity, shares[one.client]), "{one:?} of {}", shares[one.client]);
    }
    assert!(degraded.len() > CLIENTS && learning.len() > CLIENTS, "each at least once");
    let degraded_until = degraded.iter().map(|one| one.got).max().unwrap();
    let learning_from = learning.iter().map(|one| one.got).min().unwrap();
    let learning_until = learning.iter().map(|one| one.got).max().unwrap();
    let seconds = |from: i64, to: i64| (to - from) as f64 / SECOND as f64;
    assert!(seconds(back, degraded_until) < 1.0, "degraded long after Redis was back");
    assert!(seconds(learning_from, learning_until) <= LEARNING as f64 + 0.2);

    for one in &newcomer.answers {
        assert!(one.capacity == 0.0 || !one.learning, "{one:?}");
    }
    let waited = newcomer.answers.iter().filter(|one| one.learning).count();
    assert!(waited > 0, "the newcomer came too late to see it learn");
    let (low, _) = Holdings::of(&[&record.answers]).range(converged, back);
    let (_, high) = Holdings::of(&[&record.answers, &newcomer.answers]).range(0, again);
    println!(
        "Redis away for {:.1} s: {} degraded answers, the last {:.2} s after it was back; then \
         learning for {:.2} s, {} answers; all shares with a newcomer's {:.2} s later; clients \
         held {:.4} % of the capacity all through, and never more than {:.9} %",
        seconds(killed, back),
        degraded.len(),
        seconds(back, degraded_until),
        seconds(learning_from, learning_until),
        learning.len(),
        seconds(learning_until, again),
        100.0 * low / CAPACITY,
        100.0 * high / CAPACITY,
    );
    assert!(high <= CAPACITY * (1.0 + 1e-9), "clients held {high} of {CAPACITY}");
    assert!(low >= 0.999 * CAPACITY, "clients held {low} of {CAPACITY}");
}

/// When the last of the clients got its first answer to a request that was sent after `since`;
/// `i64::MAX` if one has not.
fn all_answered_since(record: &Record, clients: usize, since: i64) -> i64 {
    let mut first = vec![i64::MAX; clients];
    for one in record.answers.iter().filter(|one| one.sent >= since) {
        first[one.client] = first[one.client].min(one.got);
    }
    first.into_iter().max().unwrap()
}

#[test]
fn a_capacity_that_is_lowered() {
    const CLIENTS: usize = 300;
    let _machine = reserve_half();
    let wanted: Vec<f64> = (0..CLIENTS).map(wants).collect();
    let (before, after) = (9000.0, 4000.0);
    let cluster = Cluster::start(&limits(before, 20, 1, 0), &PATIENT);
    let fleet = LeaseClients::start(&cluster.grpc(), "client", CLIENTS, "r", wants);
    wait_for_shares(&fleet, &fair_shares(&wanted, before));

    let version = |node: &Node| get(node, "/debug/status.json").json()["limits"]["version"].clone();
    let versions: Vec<_> = cluster.nodes.iter().map(version).collect();
    cluster.limits.write(&limits(after, 20, 1, 0));
    cluster.nodes.iter().for_each(|node| node.signal("HUP"));
    for (node, old) in cluster.nodes.iter().zip(&versions) {
        eventually("the new limits", Duration::from_secs(5), || version(node) != *old);
    }
    let lowered = now_us();
    // The first refresh of each client frees capacity, its next one uses what all have freed.
    let mut freed = i64::MAX;
    eventually("all have refreshed", Duration::from_secs(5), || {
        freed = fleet.look(|record| all_answered_since(record, CLIENTS, lowered));
        freed < i64::MAX
    });
    let mut again = freed;
    for what in ["all have their shares", "and keep them"] {
        let since = again;
        eventually(what, Duration::from_secs(5), || {
            again = fleet.look(|record| all_answered_since(record, CLIENTS, since));
            again < i64::MAX
        });
    }
    let record = fleet.finish();

    let shares = fair_shares(&wanted, after);
    let mut settled = vec![i64::MAX; CLIENTS];
    for one in record.answers.iter().filter(|one| one.sent >= lowered) {
        // Until others have refreshed, a client may have little.
        if !near(one.capacity, shares[one.client]) {
            assert!(one.sent < freed, "{one:?} of {}", shares[one.client]);
            settled[one.client] = i64::MAX;
        } else {
            settled[one.client] = settled[one.client].min(one.got);
        }
    }
    let converged = settled.into_iter().max().unwrap();

    // Every later grant fits, together with the leases of others.
    let holdings = Holdings::of(&[&record.answers]);
    let granted = |one: &&Answer| one.sent >= lowered && one.capacity > 0.0;
    for one in record.answers.iter().filter(granted) {
        let sum = holdings.at(one.got);
        assert!(sum <= after * (1.0 + 1e-9), "{one:?}, which makes {sum} of {after}");
    }
    let sunk = holdings.changes(lowered, now_us()).find(|(_, sum)| *sum <= after * (1.0 + 1e-9));
    println!(
        "from {before} to {after}: no more than that was leased after {:.2} s, every client had \
         its share after {:.2} s, the refresh interval being 1 s",
        (sunk.unwrap().0 - lowered) as f64 / SECOND as f64,
        (converged - lowered) as f64 / SECOND as f64,
    );
    let (low, _) = holdings.range(converged, now_us());
    assert!(low >= 0.999 * after, "clients held {low} of {after}");
}
