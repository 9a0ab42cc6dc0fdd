//! Leases during and after an outage of Redis: nodes renew held leases, and grant no new ones.

use std::time::{Duration, Instant};

use testkit::cluster::run_on_quarter;
use testkit::grpc::{capacity_client, lease};
use testkit::http::get;
use testkit::metrics::Scrape;
use testkit::{LimitsFile, Node, PollLimit, Redis, TEST_TIMEOUT, eventually, now_s};
use tollgate_proto::doorman::capacity_client::CapacityClient;
use tollgate_proto::doorman::{
    DiscoveryRequest, GetCapacityRequest, GetServerCapacityRequest, Lease, PriorityBandAggregate,
    ReleaseCapacityRequest, ResourceResponse, ServerCapacityResourceRequest, algorithm,
};
use tonic::Code;
use tonic::transport::Channel;

type Client = CapacityClient<Channel>;

/// Long leases, and leases so short that they expire during an outage. A node without its store
/// renews them with three seconds left, so a client may be held up for two.
const LIMITS: &str = "
resources:
  - { identifier_glob: \"long*\", capacity: 100, safe_capacity: 7, algorithm: { kind: FAIR_SHARE, lease_length: 60, refresh_interval: 5, learning_mode_duration: 0 } }
  - { identifier_glob: \"short*\", capacity: 100, algorithm: { kind: FAIR_SHARE, lease_length: 6, refresh_interval: 2 } }
";

/// Time limit for shared decisions once the store answers again.
const RESUMED: Duration = Duration::from_secs(1);

fn holds(capacity: f64, expiry_time: i64) -> Option<Lease> {
    Some(Lease { capacity, expiry_time, refresh_interval: 5 })
}

async fn release(client: &mut Client, name: &str, resource: &str) -> Result<(), Code> {
    let request = ReleaseCapacityRequest {
        client_id: name.to_owned(),
        resource_id: vec![resource.to_owned()],
    };
    client.release_capacity(request).await.map(|_| ()).map_err(|status| status.code())
}

fn start() -> (Redis, LimitsFile, Node) {
    let (redis, limits) = (Redis::start(), LimitsFile::new(LIMITS));
    // A stall of the machine must not count as an outage.
    let node = Node::start(&limits.path(), &["--store", &redis.url(), "--store-timeout", "500ms"]);
    node.wait_for_store();
    (redis, limits, node)
}

/// Requests leases until the store decides, at most a second.
async fn wait_for_store_decision(
    client: &mut Client,
    name: &str,
    resource: &str,
    has: Option<Lease>,
) {
    let (back, mut limit) = (Instant::now(), PollLimit::new(RESUMED));
    while lease(client, name, resource, 100.0, has).await.degraded() {
        limit.check("a decision of the store");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    println!("decided by the store {:.0?} after the outage", back.elapsed());
}

#[test]
fn without_the_store_clients_keep_what_they_hold() {
    run_on_quarter(async {
        let (mut redis, _limits, node) = start();
        let mut client = capacity_client(&node).await;
        let held = lease(&mut client, "a", "long", 80.0, None).await;
        assert_eq!((held.gets.capacity, held.degraded), (80.0, None));
        redis.kill();

        // The first request may be the one that notices the outage.
        let started = Instant::now();
        let first = lease(&mut client, "a", "long", 80.0, Some(held.gets)).await;
        assert!(started.elapsed() < Duration::from_secs(1), "{:?}", started.elapsed());
        assert_eq!((first.gets.capacity, first.degraded), (80.0, Some(true)));
        let now = now_s();
        // The claim, the granted capacity, and the seconds until its expiry.
        for (has, capacity, lasts) in [
            (None, 0.0, 60),
            (holds(80.0, now - 1), 0.0, 60),
            (holds(80.0, 0), 0.0, 60),
            (holds(80.0, i64::MIN), 0.0, 60),
            // Lasts for the next refreshes: keeps its expiry, which the store knows.
            (holds(80.0, now + 40), 80.0, 40),
            // Renewed.
            (holds(80.0, now + 5), 80.0, 60),
            // No longer than the lease length.
            (holds(80.0, now + 3600), 80.0, 60),
            (holds(80.0, i64::MAX), 80.0, 60),
            (holds(0.0, now + 40), 0.0, 40),
            // No more than the capacity, whatever a client claims.
            (holds(1e9, now + 40), 100.0, 40),
            (holds(1e9, now + 5), 100.0, 60),
        ] {
            // Wants have no effect.
            for wants in [1.0, 80.0, 1e9] {
                let answer = lease(&mut client, "a", "long", wants, has).await;
                assert_eq!(
                    (answer.gets.capacity, answer.degraded),
                    (capacity, Some(true)),
                    "{has:?}"
                );
                let expiry = answer.gets.expiry_time - now;
                assert!((lasts..=lasts + 2).contains(&expiry), "{has:?}: {expiry} s");
                assert_eq!((answer.gets.refresh_interval, answer.safe_capacity), (5, Some(7.0)));
                assert_eq!(answer.learning_until, None);
            }
        }
        // The same for clusters; their answers include the algorithm.
        let band = PriorityBandAggregate { priority: 1, num_clients: 3, wants: 500.0 };
        let request = GetServerCapacityRequest {
            server_id: "s".to_owned(),
            resource: vec![ServerCapacityResourceRequest {
                resource_id: "long".to_owned(),
                has: holds(30.0, now + 40),
                wants: vec![band],
                forgotten: None,
            }],
        };
        let answer =
            client.get_server_capacity(request).await.unwrap().into_inner().response.remove(0);
        assert_eq!((answer.gets.capacity, answer.degraded), (30.0, Some(true)));
        let algorithm = answer.algorithm.unwrap();
        assert_eq!((algorithm.kind(), algorithm.lease_length), (algorithm::Kind::FairShare, 60));

        // Answers that need no store are unchanged.
        let other = lease(&mut client, "a", "other", 5.0, None).await;
        assert_eq!((other.gets.capacity, other.degraded), (5.0, None));
        assert!(client.discovery(DiscoveryRequest {}).await.unwrap().into_inner().is_master);
        let refused = GetCapacityRequest { client_id: String::new(), resource: Vec::new() };
        let refused = client.get_capacity(refused).await.unwrap_err();
        assert_eq!(
            (refused.code(), refused.message()),
            (Code::InvalidArgument, "client_id is empty")
        );
        // A release can't be stored.
        assert_eq!(release(&mut client, "a", "long").await, Err(Code::Unavailable));

        // The status pages show the outage.
        eventually("the store is down", TEST_TIMEOUT, || !node.store_is_up());
        let status = get(&node, "/debug/status.json");
        let status = (status.status, status.json());
        assert_eq!((status.0, &status.1["store"]["up"]), (200, &false.into()));
        let error = "the store does not answer, try again in a moment";
        assert_eq!(status.1["resources_error"], error);
        let page = get(&node, "/debug/status");
        assert!(page.status == 200 && page.body.contains(error), "{page:?}");
        let resource = get(&node, "/debug/resource.json?id=long");
        assert_eq!((resource.status, &resource.json()["error"]), (503, &error.into()));
        let labels = [("template", "long*"), ("algorithm", "FAIR_SHARE"), ("outcome", "degraded")];
        let counted = Scrape::of(node.http).get("tollgate_lease_decisions_total", &labels);
        assert_eq!(counted, Some(35.0));

        redis.start_again();
        wait_for_store_decision(&mut client, "a", "long", None).await;
        assert_eq!(release(&mut client, "a", "long").await, Ok(()));
    });
}

/// Nodes have renewed leases without the store. After the outage it learns for as long as these
/// may last.
#[test]
fn after_a_long_outage_the_store_learns() {
    run_on_quarter(async {
        let (mut redis, limits, node) = start();
        let other = Node::start(&limits.path(), &["--store", &redis.url()]);
        other.wait_for_store();
        let (mut here, mut there) = (capacity_client(&node).await, capacity_client(&other).await);
        // Waits until the store has learned after its birth.
        let mut held = None;
        let mut limit = PollLimit::new(Duration::from_secs(10));
        loop {
            let answer = lease(&mut here, "a", "short", 80.0, held).await;
            held = Some(answer.gets);
            if answer.gets.capacity > 0.0 {
                assert_eq!((answer.gets.capacity, answer.learning_until), (80.0, None));
                break;
            }
            limit.check("the store has learned");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        // An outage longer than the store keeps an expired lease.
        // Real time: leases expire by the clock of Redis.
        testkit::signal(redis.pid(), "STOP");
        let stopped = Instant::now();
        while stopped.elapsed() < Duration::from_secs(10) {
            let answer = lease(&mut here, "a", "short", 80.0, held).await;
            assert_eq!((answer.gets.capacity, answer.degraded), (80.0, Some(true)));
            held = Some(answer.gets);
            // Real time: the lease expires in Redis meanwhile.
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
        eventually("the store is down", TEST_TIMEOUT, || !other.store_is_up());
        testkit::signal(redis.pid(), "CONT");
        wait_for_store_decision(&mut there, "b", "short", None).await;
        // The store has forgotten the lease, which may last for six more seconds. Until then no
        // other client gets the capacity, at any node.
        let lasts = held.unwrap().expiry_time;
        let mut asked = 0;
        while now_s() < lasts {
            for client in [&mut here, &mut there] {
                let answer = lease(client, "b", "short", 100.0, None).await;
                if now_s() < lasts && !answer.degraded() {
                    assert_eq!(answer.gets.capacity, 0.0, "{answer:?}");
                    assert!(answer.learning_until.is_some(), "{answer:?}");
                    asked += 1;
                }
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        assert!(asked > 2, "{asked} requests");
        // Afterwards the capacity is free.
        let mut limit = PollLimit::new(Duration::from_secs(10));
        while lease(&mut there, "b", "short", 100.0, None).await.gets.capacity < 100.0 {
            limit.check("the store has learned");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        redis.kill();
    });
}

/// The store knows every lease, so a node that starts has nothing to learn.
#[test]
fn a_restarted_node_does_not_learn() {
    run_on_quarter(async {
        let (redis, limits, node) = start();
        let birth: i64 = redis::cmd("GET").arg("o").query(&mut redis.connection()).unwrap();
        eventually("the store is old enough", TEST_TIMEOUT, || now_s() > birth / 1_000_000 + 7);
        drop(node);
        // A stall of the machine counts as an outage.
        let mut answer = ResourceResponse::default();
        for _ in 0..3 {
            let args = ["--store", &redis.url(), "--store-timeout", "500ms"];
            let node = Node::start(&limits.path(), &args);
            node.wait_for_store();
            answer = lease(&mut capacity_client(&node).await, "a", "short", 80.0, None).await;
            if answer.learning_until.is_none() && !answer.degraded() {
                break;
            }
        }
        let got = (answer.gets.capacity, answer.learning_until, answer.degraded);
        assert_eq!(got, (80.0, None, None));
    });
}
