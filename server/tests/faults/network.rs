//! Faults of the network between nodes and Redis.

use std::fs;
use std::process::Command;
use std::thread;
use std::time::Duration;

use tempfile::TempDir;

use super::trial::{LIMITS, Trial};
use testkit::cluster::{Cluster, reserve_quarter};
use testkit::fault_proxy::{Fault, FaultProxy};
use testkit::{Redis, eventually};

const BY_POLICY: &str = "the policy answers";

/// Runs a trial with one network fault.
fn network_trial(place: u32, name: &str, fault: Fault, class: &str, description: &str) {
    let _machine = reserve_quarter();
    let redis = Redis::start();
    let network = FaultProxy::to(redis.port());
    let mut cluster = Cluster::start_on(redis, &network.url(), &[], 3, LIMITS, &[]);
    let test = format!("faults::network::{name}");
    let shared = matches!(fault, Fault::Delay(late) if late < Duration::from_millis(10));
    let meanwhile = if shared { "decisions are shared" } else { BY_POLICY };
    Trial { place, fault: description, meanwhile, test: &test, shared, class, lost_states: 0.0 }
        .run(&mut cluster, |_| network.set(fault), |_, ()| network.set(Fault::Nothing));
}

#[test]
fn late_by_1_ms() {
    let late = Fault::Delay(Duration::from_millis(1));
    network_trial(101, "late_by_1_ms", late, "timeout", "1 ms of latency, each way");
}

/// A round trip takes slightly longer than the store timeout; lanes still receive the replies.
#[test]
fn late_by_27_ms() {
    let late = Fault::Delay(Duration::from_millis(27));
    network_trial(102, "late_by_27_ms", late, "timeout", "27 ms of latency, each way");
}

#[test]
fn late_by_40_ms() {
    let late = Fault::Delay(Duration::from_millis(40));
    network_trial(103, "late_by_40_ms", late, "timeout", "40 ms of latency, each way");
}

#[test]
fn late_by_200_ms() {
    let late = Fault::Delay(Duration::from_millis(200));
    network_trial(104, "late_by_200_ms", late, "timeout", "200 ms of latency, each way");
}

#[test]
fn late_by_5_s() {
    let late = Fault::Delay(Duration::from_secs(5));
    network_trial(105, "late_by_5_s", late, "timeout", "5 s of latency, each way");
}

#[test]
fn silent() {
    network_trial(
        106,
        "silent",
        Fault::NoReplies,
        "timeout",
        "Requests arrive, no reply comes back",
    );
}

#[test]
fn half_open() {
    network_trial(
        107,
        "half_open",
        Fault::HalfOpen,
        "timeout",
        "Half-open: the far end is gone without a word",
    );
}

#[test]
fn cut_in_the_middle_of_a_reply() {
    let description = "Every connection is reset in the middle of a reply";
    network_trial(
        108,
        "cut_in_the_middle_of_a_reply",
        Fault::CutReplies,
        "unreachable",
        description,
    );
}

#[test]
fn a_few_bytes_a_second() {
    network_trial(
        109,
        "a_few_bytes_a_second",
        Fault::RateLimit(5),
        "timeout",
        "5 bytes a second, each way",
    );
}

#[test]
fn refused() {
    network_trial(
        110,
        "refused",
        Fault::Refused,
        "unreachable",
        "Connections are reset, new ones refused",
    );
}

/// Each node has its own mount namespace, in which the test edits the hosts file. The name server
/// that is queried next never answers.
#[test]
fn a_name_that_stops_resolving() {
    const HOST: &str = "store.tollgate.test";
    let can_unshare = Command::new("unshare").args(["-m", "true"]).status();
    if !can_unshare.is_ok_and(|status| status.success()) {
        println!("skipped: only root may give a node its own hosts file");
        return;
    }
    let _machine = reserve_quarter();
    let name_server = std::net::UdpSocket::bind("127.83.14.29:53").unwrap();
    let dir = TempDir::new().unwrap();
    let file = |name: &str, text: &str| {
        let path = dir.path().join(name);
        fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let known = format!("127.0.0.1 localhost {HOST}\n");
    let hosts = file("hosts", &known);
    let switch = file("nsswitch.conf", "hosts: files dns\n");
    let address = name_server.local_addr().unwrap().ip();
    let resolver = file("resolv.conf", &format!("nameserver {address}\n"));
    let script = "mount --bind \"$0\" /etc/hosts && mount --bind \"$1\" /etc/nsswitch.conf && \
                  mount --bind \"$2\" /etc/resolv.conf && shift 2 && exec \"$@\"";
    let command = ["unshare", "-m", "sh", "-c", script, &hosts, &switch, &resolver];
    let redis = Redis::start();
    let network = FaultProxy::to(redis.port());
    let mut cluster =
        Cluster::start_on(redis, &network.url_with_host(HOST), &command, 3, LIMITS, &[]);
    let gone = || {
        // Written in place, as the nodes have this very file mounted.
        fs::write(&hosts, "127.0.0.1 localhost\n").unwrap();
        network.set(Fault::ResetOnAccept);
        // Lets the proxy reset all connections.
        thread::sleep(Duration::from_millis(50));
        network.set(Fault::Nothing);
    };
    Trial {
        place: 111,
        fault: "Redis' name resolves no more (the name server is silent), connections are reset",
        meanwhile: BY_POLICY,
        test: "faults::network::a_name_that_stops_resolving",
        shared: false,
        class: "unreachable",
        lost_states: 0.0,
    }
    .run(&mut cluster, |_| gone(), |_, ()| fs::write(&hosts, &known).unwrap());

    // Pending queries to the name server, which take five seconds and more, do not delay the exit of
    // a node. It tries for up to two seconds to return tokens and to leave the store.
    gone();
    // Lets nodes start several queries.
    thread::sleep(Duration::from_secs(1));
    for node in &mut cluster.nodes {
        let threads = node.threads();
        assert!(threads < 50, "{threads} threads");
        node.signal("TERM");
        eventually("it stops", Duration::from_secs(4), || node.try_wait().is_some());
    }
}
