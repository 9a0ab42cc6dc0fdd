//! Prefetch of hot buckets by three node processes on one Redis: their grants stay within the bound
//! and take few script calls. Unused tokens are returned, also by a node that drains.

use std::time::Duration;

use testkit::cluster::{Cluster, reserve_machine, up_to_three_times};
use testkit::grpc::request;
use testkit::load::{GrantAudit, Load, Plan, Sample};
use testkit::metrics::Scrape;
use testkit::{command_stats, eventually};
use tollgate_server::domain::bucket::State;
use tollgate_server::domain::time::Micros;

/// A store timeout that a busy machine does not exceed.
const PATIENT: [&str; 2] = ["--store-timeout", "2s"];

/// More than a thousand requests/s per node.
const CALLERS: Plan = Plan { callers: 48, connections: 2, pace: Duration::ZERO, failover: true };

/// Slightly longer than nodes wait before they prefetch from a new bucket.
const QUIET: Duration = Duration::from_secs(5);

const SIZE: f64 = 1_000_000.0;
const PREFETCH: f64 = 5000.0;

/// A bucket that refills by less than a token during a test.
const STILL: &str = "namespaces: { ns: { buckets: { b: { size: 1000000, fill_rate: 0.01, \
     max_tokens_per_request: 10, wait_timeout_millis: 0, max_debt_millis: 0, prefetch: 5000 } } } }";

/// Balance of the bucket of [`STILL`] in Redis, in tokens.
fn balance(cluster: &Cluster) -> f64 {
    let mut inside = cluster.redis.connection();
    let (seconds, us): (i64, i64) = redis::cmd("TIME").query(&mut inside).unwrap();
    let now = Micros(seconds * 1_000_000 + us);
    let bytes: Vec<u8> = redis::cmd("GET").arg("b{ns:b}").query(&mut inside).unwrap();
    let state = State::decode(bytes.as_slice().try_into().unwrap(), now);
    (now.0 - state.zero_us) as f64 / 100e6
}

/// Number of script calls.
fn calls(cluster: &Cluster) -> u64 {
    command_stats(&mut cluster.redis.connection(), "evalsha").calls
}

fn granted(samples: &[Sample]) -> f64 {
    samples.iter().map(Sample::granted).sum::<i64>() as f64
}

fn failed(samples: &[Sample]) -> usize {
    samples.iter().filter(|sample| sample.answer.is_err()).count()
}

fn tokens(cluster: &Cluster, fate: &str) -> f64 {
    cluster.sum("tollgate_prefetch_tokens_total", &[("fate", fate)])
}

/// Waits until the first `nodes` nodes hold no prefetched tokens, soon after the last request.
fn wait_until_returned(cluster: &Cluster, nodes: usize) {
    eventually("unused tokens are returned", Duration::from_secs(2), || {
        cluster.nodes[..nodes].iter().all(|node| {
            let metrics = Scrape::of(node.http);
            let of = |fate| metrics.sum("tollgate_prefetch_tokens_total", &[("fate", fate)]);
            of("taken") <= of("served") + of("given_back") + of("lost")
        })
    });
}

/// Callers of the first `nodes` nodes.
fn load(cluster: &Cluster, nodes: usize) -> Load {
    Load::start(&cluster.grpc()[..nodes], CALLERS, |_, _| Some(request("ns", "b", 1)))
}

#[test]
fn prefetch_saves_calls_and_returns_unused_tokens() {
    let _machine = reserve_machine();
    let mut cluster = Cluster::start(STILL, &PATIENT);
    let warming = load(&cluster, 3);
    warming.run_for(QUIET);
    let mut all = granted(&warming.finish());

    let before = calls(&cluster);
    let hot = load(&cluster, 3);
    hot.run_for(Duration::from_secs(3));
    let samples = hot.finish();
    let made = calls(&cluster) - before;
    println!("{} requests, {made} calls of the script", samples.len());
    assert_eq!((failed(&samples), granted(&samples)), (0, samples.len() as f64));
    assert!(made * 10 < samples.len() as u64);
    all += granted(&samples);

    wait_until_returned(&cluster, 3);
    // The size is reduced by what nodes may hold; the rest of the balance is unchanged.
    let kept = 3.0 * PREFETCH;
    let left = |all: f64| SIZE - kept - all;
    println!("{} in Redis, {} left", balance(&cluster), left(all));
    assert!((balance(&cluster) - left(all)).abs() < 1.0);
    let [taken, served, given_back] =
        ["taken", "served", "given_back"].map(|f| tokens(&cluster, f));
    println!("{taken} taken, {served} served, {given_back} returned");
    assert!(served > 0.9 * granted(&samples) && given_back > 0.0);
    assert_eq!((taken, tokens(&cluster, "lost")), (served + given_back, 0.0));

    // A node drains while it holds tokens.
    let hot = load(&cluster, 3);
    hot.run_for(Duration::from_millis(500));
    cluster.nodes[2].signal("TERM");
    assert!(cluster.nodes[2].wait().success());
    let samples = hot.finish();
    all += granted(&samples);
    wait_until_returned(&cluster, 2);
    let missing = left(all) - balance(&cluster);
    println!(
        "{missing} tokens missing after a node has drained, {} requests failed",
        failed(&samples)
    );
    assert!(missing > -1.0 && missing < failed(&samples) as f64 + 1.0);
    all += missing;

    // A node dies.
    let hot = load(&cluster, 2);
    hot.run_for(Duration::from_millis(1000));
    cluster.nodes[1].kill();
    hot.run_for(Duration::from_millis(500));
    let samples = hot.finish();
    all += granted(&samples);
    wait_until_returned(&cluster, 1);
    let missing = left(all) - balance(&cluster);
    println!(
        "{missing} tokens missing after a node was killed, {} requests failed",
        failed(&samples)
    );
    assert!(missing > -1.0 && missing <= PREFETCH + failed(&samples) as f64);
}

#[test]
#[ignore = "judges a rate: scripts/full.sh --only slow"]
fn a_burst_after_idling_and_saturation_stay_within_the_bound() {
    const SIZE: f64 = 6000.0;
    let _machine = reserve_machine();
    up_to_three_times(|| {
        let cluster = Cluster::start(
            "namespaces: { ns: { buckets: { b: { size: 6000, fill_rate: 6000, wait_timeout_millis: 0, max_debt_millis: 0, prefetch: 500 } } } }",
            &PATIENT,
        );
        // About 4500 requests/s.
        let paced = Plan { pace: Duration::from_millis(10), ..CALLERS };
        let first = Load::start(&cluster.grpc(), paced, |_, _| Some(request("ns", "b", 1)));
        first.run_for(QUIET + Duration::from_secs(3));
        let before = first.finish();
        assert_eq!((failed(&before), granted(&before)), (0, before.len() as f64));
        assert!(tokens(&cluster, "served") > 0.0);
        wait_until_returned(&cluster, 3);

        // Far more than the limit, in requests of several tokens.
        let second = Load::start(&cluster.grpc(), CALLERS, |caller, _| {
            Some(request("ns", "b", 10 + (caller % 5) as i64))
        });
        second.run_for(Duration::from_secs(8));
        let after = second.finish();
        assert_eq!(failed(&after), 0);
        let burst: Vec<&Sample> = after.iter().collect();
        let kept = 3.0 * 500.0;
        let audit = GrantAudit::of(&burst, SIZE - kept, 6000.0, 0.0);
        println!("{:.2} % of the lower bound without what nodes may hold", audit.share() * 100.0);
        if audit.share() < 0.99 {
            return Err(format!(
                "{:.4} of the lower bound without what nodes may hold",
                audit.share()
            ));
        }
        GrantAudit::of(&burst, SIZE, 6000.0, 0.0).check("a burst, then saturation", 0.95)?;
        let all: Vec<&Sample> = before.iter().chain(&after).collect();
        GrantAudit::of(&all, SIZE, 6000.0, 0.0).check("from the start", 0.5)?;
        Ok(())
    });
}
