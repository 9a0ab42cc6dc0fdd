//! Requests for many resources to a node with a slow network to Redis: each page of a request fits
//! into the queues. And lease requests that are abandoned before the answer.

use std::time::{Duration, Instant};

use testkit::callers::{Callers, LIMITS};
use testkit::cluster::run_on_quarter;
use testkit::fault_proxy::{Fault, FaultProxy};
use testkit::grpc::channel;
use testkit::http::get;
use testkit::{LimitsFile, Node, PollLimit, Redis, eventually};
use tollgate_proto::doorman::capacity_client::CapacityClient;
use tollgate_proto::doorman::{
    GetCapacityRequest, Lease, ReleaseCapacityRequest, ResourceRequest, ResourceResponse,
};
use tonic::Status;
use tonic::transport::Channel;

type Client = CapacityClient<Channel>;

/// More than two lanes have room for when round trips are long.
const MANY: usize = 256;

/// A store behind a network with faults, and a node with one thread.
struct Far {
    redis: Redis,
    network: FaultProxy,
    node: Node,
    _limits: LimitsFile,
}

impl Far {
    fn start(timeout: &str) -> Self {
        let (redis, limits) = (Redis::start(), LimitsFile::new(LIMITS));
        let network = FaultProxy::to(redis.port());
        let url = network.url();
        let args = ["--store", &url, "--store-timeout", timeout, "--threads", "1"];
        let node = Node::start(&limits.path(), &args);
        eventually("the store is found", Duration::from_secs(5), || node.store_is_up());
        Self { redis, network, node, _limits: limits }
    }
}

async fn ask(
    client: &mut Client,
    name: &str,
    resources: impl Iterator<Item = String>,
    (wants, has): (f64, Option<Lease>),
) -> Result<Vec<ResourceResponse>, Status> {
    let one = |resource_id| ResourceRequest { resource_id, priority: 0, has, wants };
    let request =
        GetCapacityRequest { client_id: name.to_owned(), resource: resources.map(one).collect() };
    Ok(client.get_capacity(request).await?.into_inner().response)
}

/// Whether all of these were leased by the store.
fn is_whole(answer: Result<Vec<ResourceResponse>, Status>, count: usize) -> bool {
    let granted = |one: &ResourceResponse| one.gets.capacity == 7.0 && !one.degraded();
    answer.is_ok_and(|leases| leases.len() == count && leases.iter().all(granted))
}

/// Repeats a refresh, a look at the status and a release. Each round first makes a small request;
/// if the machine is too slow even for that, the round does not count.
#[test]
fn a_page_fits_into_the_queues_however_long_round_trips_take() {
    /// Uncounted rounds, in which both lanes measure the round trip.
    const FIRST: usize = 7;
    const ROUNDS: usize = 8;
    const FEW: usize = 100;
    run_on_quarter(async {
        // Three quarters of the timeout are less than two round trips.
        let far = Far::start("100ms");
        let mut client = CapacityClient::new(channel(far.node.grpc).await);
        let names = |count| (0..count).map(|number| format!("r{number}"));
        far.network.set(Fault::Delay(Duration::from_millis(20)));
        // Numbers of attempts, and of complete answers.
        let (mut leased, mut released, mut seen) = ([0, 0], [0, 0], [0, 0]);
        let count = |[of, whole]: &mut [usize; 2], answered| {
            *of += 1;
            *whole += usize::from(answered);
        };
        let started = Instant::now();
        for round in 0.. {
            if leased[0] == ROUNDS || started.elapsed() > Duration::from_secs(30) {
                break;
            }
            let few = ask(&mut client, "a", names(FEW), (7.0, None)).await;
            let counts = is_whole(few, FEW) && round >= FIRST;
            let many = is_whole(ask(&mut client, "a", names(MANY), (7.0, None)).await, MANY);
            // The status is read while pages of the release may be in flight.
            let looks = round % 2 == 0;
            if looks && counts {
                let status = get(&far.node, "/debug/status.json").json();
                count(&mut seen, status["resources_error"].is_null());
            }
            let request = ReleaseCapacityRequest {
                client_id: "a".to_owned(),
                resource_id: names(MANY).collect(),
            };
            let back = client.release_capacity(request).await.is_ok();
            if counts {
                count(&mut leased, many);
            }
            if counts && !looks {
                count(&mut released, back);
            }
        }
        println!("[of, whole]: leased {leased:?}, released {released:?}, seen {seen:?}");
        for [of, whole] in [leased, released, seen] {
            // If a page had no room, no request would be complete.
            assert!(whole * 4 > of || of < ROUNDS / 4, "{whole} of {of}");
        }
    });
}

/// The callers leave while Redis decides. The store stays consistent, and later refreshes get their
/// shares.
#[test]
fn abandoned_refreshes_leave_the_lease_consistent() {
    run_on_quarter(async {
        const WAIT: Duration = Duration::from_millis(40);
        let far = Far::start("2s");
        let mut client = CapacityClient::new(channel(far.node.grpc).await);
        let one = || std::iter::once("r".to_owned());
        let first = ask(&mut client, "a", one(), (80.0, None)).await.unwrap().remove(0);
        assert_eq!((first.gets.capacity, first.degraded), (80.0, None));

        far.network.set(Fault::Delay(2 * WAIT));
        let mut given_up = 0;
        for wants in 1..=20 {
            let (mut client, has) = (client.clone(), Some(first.gets));
            let refresh = ask(&mut client, "a", one(), (f64::from(wants), has));
            given_up += usize::from(tokio::time::timeout(WAIT, refresh).await.is_err());
        }
        // A test that a busy machine holds up may find an answer.
        assert!(given_up > 10, "{given_up}: an answer takes four times as long");
        far.network.set(Fault::Nothing);
        assert!(far.node.store_is_up() && get(&far.node, "/readyz").status == 200);

        // Whichever requests were decided, both together never get more than the capacity,
        let mut limit = PollLimit::new(Duration::from_secs(5));
        loop {
            let [a, b] = ["a", "b"].map(|name| (name, client.clone()));
            let mut held = Vec::new();
            for (name, mut client) in [a, b] {
                let answer = ask(&mut client, name, one(), (80.0, None)).await.unwrap().remove(0);
                assert_eq!(answer.degraded, None);
                held.push(answer.gets.capacity);
            }
            // and soon each has its share.
            if held == [50.0, 50.0] {
                break;
            }
            assert!(held.iter().sum::<f64>() <= 100.0, "{held:?}");
            limit.check(&format!("equal shares: {held:?}"));
        }
        let holders: usize =
            redis::cmd("ZCARD").arg("e{r}").query(&mut far.redis.connection()).unwrap();
        assert_eq!(holders, 2);
    });
}

/// One resource that the parent does not lease to this cluster, and one whose total wants overflow,
/// in a page with many others.
#[test]
fn a_refusal_by_the_parent_does_not_affect_other_resources() {
    run_on_quarter(refused_beside_others());
}

async fn refused_beside_others() {
    const OTHERS: usize = 150;
    let (limits, callers, redis) = (LimitsFile::new(LIMITS), Callers::new(), Redis::start());
    let root = callers.node(&limits);
    // An old birth, so that the store does not learn.
    redis::cmd("SET").arg("o").arg(1).exec(&mut redis.connection()).unwrap();
    let token = callers.dir.path().join("token");
    std::fs::write(&token, &callers.shop).unwrap();
    let (url, parent) = (redis.url(), root.grpc.to_string());
    let args = ["--store", &url, "--store-timeout", "2s", "--cluster-id", "south"];
    let token = ["--parent", &parent, "--parent-token-file", token.to_str().unwrap()];
    let node = Node::start(&limits.path(), &[&args[..], &token].concat());
    let mut client = CapacityClient::new(channel(node.grpc).await);
    let one = |name: &str| std::iter::once(name.to_owned());
    let others = || (0..OTHERS).map(|number| format!("db.{number}"));

    let started = Instant::now();
    loop {
        for name in ["a", "b"] {
            ask(&mut client, name, one("db.vast"), (1e308, None)).await.unwrap();
        }
        let secret = ask(&mut client, "a", one("secret"), (7.0, None)).await.unwrap();
        assert_eq!(secret[0].gets.capacity, 0.0, "the cluster has none");
        let leases = ask(&mut client, "a", others(), (7.0, None)).await.unwrap();
        if leases.iter().all(|one| one.gets.capacity == 7.0) {
            break;
        }
        let without = leases.iter().filter(|one| one.gets.capacity == 0.0).count();
        assert!(
            started.elapsed() < Duration::from_secs(60),
            "{without} resources have no capacity"
        );
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    println!("all {OTHERS} are leased after {:.1?}", started.elapsed());
}
