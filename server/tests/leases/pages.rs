//! Requests for many resources, to nodes whose way to Redis is long: each page of one fits into
//! the queues. And requests whose callers go away before the answer.

use std::time::{Duration, Instant};

use testkit::callers::{Callers, LIMITS};
use testkit::cluster::run_on_half;
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

/// More than two lanes have room for where round trips are long.
const MANY: usize = 256;

/// A store that has lived for long, at the other end of a network, and a node of one thread.
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

/// Whether these were all leased by the store.
fn whole(answer: Result<Vec<ResourceResponse>, Status>, count: usize) -> bool {
    let whole = |one: &ResourceResponse| one.gets.capacity == 7.0 && !one.degraded();
    answer.is_ok_and(|leases| leases.len() == count && leases.iter().all(whole))
}

/// Refreshes, looks and gives back, again and again. What fits whatever happens is asked for first:
/// where this machine is too slow for that, nothing is shown.
#[test]
fn a_page_fits_into_the_queues_however_long_round_trips_take() {
    /// So many, until both lanes know how long it takes.
    const FIRST: usize = 7;
    const ROUNDS: usize = 8;
    const FEW: usize = 100;
    run_on_half(async {
        // Three quarters of the deadline are less than two round trips.
        let far = Far::start("100ms");
        let mut client = CapacityClient::new(channel(far.node.grpc).await);
        let names = |count| (0..count).map(|number| format!("r{number}"));
        far.network.set(Fault::Delay(Duration::from_millis(20)));
        // How often, and how often all of it was answered.
        let (mut leased, mut released, mut seen) = ([0, 0], [0, 0], [0, 0]);
        let count = |[of, whole]: &mut [usize; 2], is_whole| {
            *of += 1;
            *whole += usize::from(is_whole);
        };
        let started = Instant::now();
        for round in 0.. {
            if leased[0] == ROUNDS || started.elapsed() > Duration::from_secs(30) {
                break;
            }
            let few = ask(&mut client, "a", names(FEW), (7.0, None)).await;
            let counts = whole(few, FEW) && round >= FIRST;
            let many = whole(ask(&mut client, "a", names(MANY), (7.0, None)).await, MANY);
            // Whatever comes next does so while others ask.
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
            // Without room for a page it is none.
            assert!(whole * 4 > of || of < ROUNDS / 4, "{whole} of {of}");
        }
    });
}

/// Their callers have gone while Redis decides: the store has what it has decided, and the
/// refreshes that follow get what is theirs.
#[test]
fn a_refresh_that_nobody_waits_for_any_more_leaves_the_lease_right() {
    run_on_half(async {
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
        assert_eq!(given_up, 20, "no answer is there before its question");
        far.network.set(Fault::Nothing);
        assert!(far.node.store_is_up() && get(&far.node, "/readyz").status == 200);

        // Whatever of them was decided, no more than there is can be had by both, …
        let mut limit = PollLimit::new(Duration::from_secs(5));
        loop {
            let [a, b] = ["a", "b"].map(|name| (name, client.clone()));
            let mut held = Vec::new();
            for (name, mut client) in [a, b] {
                let answer = ask(&mut client, name, one(), (80.0, None)).await.unwrap().remove(0);
                assert_eq!(answer.degraded, None);
                held.push(answer.gets.capacity);
            }
            // … and soon each has its share.
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

/// One that the parent does not lease to this cluster, and one of which its clients want more than
/// there are numbers for, in a page with many others.
#[test]
fn what_a_parent_refuses_keeps_no_other_resource_from_its_lease() {
    run_on_half(refused_beside_others());
}

async fn refused_beside_others() {
    const OTHERS: usize = 150;
    let (limits, callers, redis) = (LimitsFile::new(LIMITS), Callers::new(), Redis::start());
    let root = callers.node(&limits);
    // It has lived for long: what it does not know is not there.
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
        assert_eq!(secret[0].gets.capacity, 0.0, "it has none to give");
        let leases = ask(&mut client, "a", others(), (7.0, None)).await.unwrap();
        if leases.iter().all(|one| one.gets.capacity == 7.0) {
            break;
        }
        let without = leases.iter().filter(|one| one.gets.capacity == 0.0).count();
        assert!(started.elapsed() < Duration::from_secs(60), "{without} have nothing");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    println!("all {OTHERS} are leased after {:.1?}", started.elapsed());
}
