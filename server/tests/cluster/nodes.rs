//! Three node processes on one Redis: together they grant the tokens of one bucket, also when a
//! node dies and when Redis loses the script.

use std::collections::{BTreeMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use testkit::cluster::{Cluster, alive, reserve_half, up_to_three_times};
use testkit::eventually;
use testkit::grpc::request;
use testkit::load::{GrantAudit, Load, Plan, Sample};
use tollgate_proto::quotaservice::allow_response::Status;

/// A store timeout that a busy machine does not exceed: these tests judge amounts, not times.
const PATIENT: [&str; 2] = ["--store-timeout", "2s"];

const CALLERS: Plan = Plan { callers: 64, connections: 4, pace: Duration::ZERO, failover: true };

const RUN: Duration = Duration::from_secs(6);

/// One to five tokens per request, by caller.
fn tokens(caller: usize) -> i64 {
    1 + (caller % 5) as i64
}

fn assert_no_failures(samples: &[Sample]) {
    for sample in samples {
        if let Err(status) = &sample.answer {
            panic!("node {}: {status}", sample.target);
        }
    }
}

fn assert_none_degraded(samples: &[Sample]) {
    assert_eq!(samples.iter().filter(|sample| sample.degraded()).count(), 0, "degraded");
}

fn rate(samples: &[Sample]) -> f64 {
    let first = samples.iter().map(|sample| sample.sent).min().unwrap();
    let last = samples.iter().map(|sample| sample.answered).max().unwrap();
    samples.len() as f64 / (last - first).as_secs_f64()
}

#[test]
#[ignore = "judges a rate: scripts/full.sh --only slow"]
fn one_bucket_over_three_nodes() {
    let _machine = reserve_half();
    up_to_three_times(|| {
        let cluster = Cluster::start(
            "namespaces: { ns: { buckets: { b: { size: 1000, fill_rate: 1000, wait_timeout_millis: 0, max_debt_millis: 0 } } } }",
            &PATIENT,
        );
        let load = Load::start(&cluster.grpc(), CALLERS, |caller, _| {
            Some(request("ns", "b", tokens(caller)))
        });
        load.run_for(RUN);
        let samples = load.finish();
        println!("{:.0} requests a second", rate(&samples));
        assert_no_failures(&samples);
        assert_none_degraded(&samples);
        let by_node: HashSet<usize> = samples.iter().map(|sample| sample.target).collect();
        assert_eq!(by_node.len(), 3);
        let all: Vec<&Sample> = samples.iter().collect();
        GrantAudit::of(&all, 1000.0, 1000.0, 0.0).check("three nodes, no debt", 0.99)?;
        let counted = cluster.sum("tollgate_tokens_granted_total", &[("namespace", "ns")]);
        assert_eq!(counted as i64, samples.iter().map(Sample::granted).sum::<i64>());
        Ok(())
    });
}

#[test]
fn one_bucket_over_three_nodes_with_debt() {
    let _machine = reserve_half();
    up_to_three_times(|| {
        let cluster = Cluster::start(
            "namespaces: { ns: { buckets: { b: { size: 100, fill_rate: 1000, wait_timeout_millis: 400, max_debt_millis: 500 } } } }",
            &PATIENT,
        );
        let load = Load::start(&cluster.grpc(), CALLERS, |caller, _| {
            Some(request("ns", "b", tokens(caller)))
        });
        load.run_for(RUN / 2);
        let samples = load.finish();
        assert_no_failures(&samples);
        assert_none_degraded(&samples);
        let all: Vec<&Sample> = samples.iter().collect();
        let audit = GrantAudit::of(&all, 100.0, 1000.0, 500.0);
        audit.check("three nodes, in debt", 0.99)?;
        let waits = samples.iter().filter_map(|sample| sample.answer.as_ref().ok());
        let longest = waits.map(|answer| answer.wait_millis).max().unwrap();
        assert!((300..=400).contains(&longest), "waits of up to {longest} ms");
        // Callers wait at most 400 ms, so the debt is at most 400 ms and one request, and nearly
        // that much.
        assert!(audit.granted as f64 <= audit.upper_bound - 100.0 + 5.0);
        if (audit.granted as f64) < 0.99 * audit.lower_bound + 300.0 {
            return Err(format!("{} granted of {} owed", audit.granted, audit.lower_bound));
        }
        Ok(())
    });
}

#[test]
fn a_node_that_is_killed_changes_neither_bound() {
    let _machine = reserve_half();
    up_to_three_times(|| {
        let mut cluster = Cluster::start(
            "namespaces: { ns: { buckets: { b: { size: 1000, fill_rate: 1000, wait_timeout_millis: 0, max_debt_millis: 0 } } } }",
            &PATIENT,
        );
        let load = Load::start(&cluster.grpc(), CALLERS, |caller, _| {
            Some(request("ns", "b", tokens(caller)))
        });
        load.run_for(RUN / 2);
        let killed = Instant::now();
        cluster.nodes[1].kill();
        load.run_for(RUN / 2);
        let samples = load.finish();
        let failed: Vec<&Sample> = samples.iter().filter(|sample| sample.answer.is_err()).collect();
        println!("{:.0} requests a second, {} failed with the node", rate(&samples), failed.len());
        let mut callers = HashSet::new();
        for sample in &failed {
            assert_eq!(sample.target, 1, "{:?}", sample.answer);
            assert!(sample.answered >= killed);
            assert!(callers.insert(sample.caller), "caller {} failed twice", sample.caller);
        }
        assert!(!failed.is_empty(), "no caller was using the node");
        assert_none_degraded(&samples);
        let all: Vec<&Sample> = samples.iter().collect();
        GrantAudit::of(&all, 1000.0, 1000.0, 0.0).check("one of three nodes killed", 0.99)?;
        Ok(())
    });
}

#[test]
fn dynamic_buckets_are_bounded_exactly() {
    const BOUND: usize = 100;
    const NAMES: usize = 1000;
    let _machine = reserve_half();
    let cluster = Cluster::start(
        "namespaces: { ns: { max_dynamic_buckets: 100, dynamic_bucket_template: { size: 10, fill_rate: 1/h } } }",
        &PATIENT,
    );
    // Several callers request each name at about the same time, at all nodes.
    const EACH: usize = 6;
    let taken = AtomicUsize::new(0);
    let load = Load::start(&cluster.grpc(), CALLERS, move |_, _| {
        let name = taken.fetch_add(1, Ordering::Relaxed) / EACH;
        (name < NAMES).then(|| request("ns", &format!("user-{name}"), 1))
    });
    let samples = load.collect();
    assert_no_failures(&samples);
    assert_none_degraded(&samples);
    let mut names: BTreeMap<&str, Vec<Status>> = BTreeMap::new();
    for sample in &samples {
        names.entry(&sample.bucket).or_default().push(sample.status().unwrap());
    }
    assert_eq!(names.len(), NAMES);
    let all = |status: Status| {
        names.values().filter(|got| got.len() == EACH && got.iter().all(|&s| s == status)).count()
    };
    assert_eq!(all(Status::Ok), BOUND);
    assert_eq!(all(Status::RejectedTooManyBuckets), NAMES - BOUND);
    let mut inside = cluster.redis.connection();
    let register: usize = redis::cmd("ZCARD").arg("i{ns}").query(&mut inside).unwrap();
    assert_eq!(register, BOUND);
    let created = cluster.sum("tollgate_dynamic_buckets_created_total", &[("namespace", "ns")]);
    assert_eq!(created as usize, BOUND);
}

#[test]
fn script_flush_fails_no_decision() {
    let _machine = reserve_half();
    up_to_three_times(|| {
        let cluster = Cluster::start(
            "namespaces: { ns: { buckets: { b: { size: 1000, fill_rate: 1000, wait_timeout_millis: 0, max_debt_millis: 0 } } } }",
            &PATIENT,
        );
        let load = Load::start(&cluster.grpc(), CALLERS, |caller, _| {
            Some(request("ns", "b", tokens(caller)))
        });
        let (stop, mut inside) = (AtomicBool::new(false), cluster.redis.connection());
        let flushes = thread::scope(|scope| {
            let flushing = scope.spawn(|| {
                let mut flushes = 0;
                while !stop.load(Ordering::Relaxed) {
                    redis::cmd("SCRIPT").arg("FLUSH").exec(&mut inside).unwrap();
                    flushes += 1;
                }
                flushes
            });
            load.run_for(RUN / 2);
            stop.store(true, Ordering::Relaxed);
            flushing.join().unwrap()
        });
        let samples = load.finish();
        println!("{} decisions, {flushes} SCRIPT FLUSH among them", samples.len());
        assert!(flushes > 100);
        assert_no_failures(&samples);
        assert_none_degraded(&samples);
        assert_eq!(cluster.sum("tollgate_store_errors_total", &[]), 0.0);
        let all: Vec<&Sample> = samples.iter().collect();
        GrantAudit::of(&all, 1000.0, 1000.0, 0.0).check("under SCRIPT FLUSH", 0.98)?;
        Ok(())
    });
}

#[test]
fn nodes_are_counted() {
    let _machine = reserve_half();
    // Waits until each node counts three.
    let mut cluster =
        Cluster::start("global_default_bucket: { size: 100, fill_rate: 50 }", &PATIENT);
    let killed = Instant::now();
    cluster.nodes[0].kill();
    let ttl = Duration::from_secs(5);
    for node in &cluster.nodes[1..] {
        let late = Duration::from_secs(3);
        eventually("two nodes alive", ttl + late, || alive(node) == 2.0);
    }
    let gone = killed.elapsed();
    println!("a killed node counted for another {gone:.1?}");
    // Its last heartbeat may have been a second old.
    assert!(
        gone >= ttl - Duration::from_millis(1500),
        "dropped before {ttl:?} without a heartbeat"
    );

    let asked = Instant::now();
    cluster.nodes[1].signal("TERM");
    eventually("one node alive", Duration::from_secs(2), || alive(&cluster.nodes[2]) == 1.0);
    println!("a node that left was no longer counted after {:.1?}", asked.elapsed());
    assert!(cluster.nodes[1].wait().success());
}
