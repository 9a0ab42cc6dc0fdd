//! Connection attempts of nodes that have lost their store.

use std::thread;
use std::time::{Duration, Instant};

use super::trial::LIMITS;
use testkit::cluster::{Cluster, reserve_machine};
use testkit::fault_proxy::{Fault, FaultProxy};
use testkit::grpc::request;
use testkit::load::{Load, Plan};
use testkit::report::Row;
use testkit::{Node, Redis, eventually};

/// Length of each outage.
const AWAY: Duration = Duration::from_secs(3);

/// Upper bound of a node's probes: ten a second, with a random deviation of a quarter.
const PROBES_A_SECOND: f64 = 14.0;

/// Connections of one node: two lanes for each of two threads and for the HTTP port, and the
/// heartbeat's.
const CONNECTIONS: u64 = 2 * 2 + 2 + 1;

/// Three nodes under load lose their store for three seconds: once connections are reset on accept,
/// once they are accepted and stay silent.
#[test]
fn no_storm_of_connections() {
    let _machine = reserve_machine();
    let redis = Redis::start();
    let network = FaultProxy::to(redis.port());
    let url = network.url();
    let cluster = Cluster::start_on(redis, &url, &[], 3, LIMITS, &["--threads", "2"]);
    let plan =
        Plan { callers: 30, connections: 4, pace: Duration::from_millis(20), failover: false };
    let load = Load::start(&cluster.grpc(), plan, |_, _| Some(request("local", "b", 1)));
    let mut counts = Vec::new();
    for fault in [Fault::ResetOnAccept, Fault::HalfOpen] {
        eventually("the store is up", Duration::from_secs(3), || {
            cluster.nodes.iter().all(Node::store_is_up)
        });
        let (before, gone) = (network.accepted(), Instant::now());
        network.set(fault);
        // Real time: connection attempts are counted over it.
        thread::sleep(AWAY);
        let while_away = network.accepted() - before;
        let away = gone.elapsed();
        network.set(Fault::Nothing);
        let back = Instant::now();
        load.run_for(Duration::from_secs(1));
        let after = network.accepted() - before - while_away;
        let since = back.elapsed();
        // The trials judge the recovery time, as they detect stalls of the machine.
        eventually("the store is up again", Duration::from_secs(4), || {
            cluster.nodes.iter().all(Node::store_is_up)
        });
        println!("{fault:?}: {while_away} connections in {away:?}, {after} in {since:?} after it");
        let probes = |time: Duration| (PROBES_A_SECOND * time.as_secs_f64()).ceil() as u64;
        // Each connection of a node may have been retried once before the node noticed.
        let most = 3 * (probes(away) + CONNECTIONS);
        assert!(while_away <= most, "{fault:?}: {while_away} connections, over {most}");
        let most = 3 * (probes(since) + 2 * CONNECTIONS);
        assert!(after <= most, "{fault:?}: {after} connections afterwards, over {most}");
        counts.push((while_away, after));
    }
    drop(load.finish());
    let [(slammed, slammed_after), (silent, silent_after)] = counts[..] else { unreachable!() };
    Row {
        fault: "Three nodes are without their store for 3 s: how often they try to connect",
        meanwhile: "one probe a node",
        worst: "–".to_owned(),
        recovery: format!(
            "{slammed} connections where they are reset at once, {silent} where nothing is \
             answered; {slammed_after} and {silent_after} in the second afterwards"
        ),
        tokens: "–".to_owned(),
        test: "faults::storm::no_storm_of_connections",
    }
    .write(301);
}
