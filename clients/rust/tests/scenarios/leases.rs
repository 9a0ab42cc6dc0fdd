//! Leases: rates, gauges, wants, modes, and what happens to them.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use testkit::fault_proxy::{Fault, FaultProxy};
use testkit::metrics::Scrape;
use testkit::{LimitsFile, Node, PollLimit, TEST_TIMEOUT, now_s};
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_stream::wrappers::TcpListenerStream;
use tollgate_client::{Capacity, Client, Closed, Fake, FakeAnswer, LeaseError, Mode};
use tollgate_proto::doorman::capacity_server::{Capacity as CapacityService, CapacityServer};
use tollgate_proto::doorman::{
    DiscoveryRequest, DiscoveryResponse, GetCapacityRequest, GetCapacityResponse,
    GetServerCapacityRequest, GetServerCapacityResponse, Lease, Mastership, ReleaseCapacityRequest,
    ReleaseCapacityResponse, ResourceResponse,
};
use tonic::{Request, Response, Status};

use crate::builder;

const LIMITS: &str = "resources:
  - { identifier_glob: 'short*', capacity: 100, safe_capacity: 7,
      algorithm: { kind: FAIR_SHARE, lease_length: 2, refresh_interval: 1, learning_mode_duration: 0 } }
  - { identifier_glob: '*', capacity: 100, safe_capacity: 7,
      algorithm: { kind: FAIR_SHARE, lease_length: 60, refresh_interval: 1, learning_mode_duration: 0 } }
";

fn node() -> (LimitsFile, Node) {
    let limits = LimitsFile::new(LIMITS);
    let node = Node::start(&limits.path(), &[]);
    (limits, node)
}

/// Waits until a capacity has this property.
async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let mut limit = PollLimit::new(TEST_TIMEOUT);
    while !holds() {
        limit.check(what);
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// What the node has leased.
fn leased(node: &Node) -> f64 {
    Scrape::of(node.http).sum("tollgate_resource_has", &[])
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_share_a_capacity_and_give_it_back() {
    let (_limits, node) = node();
    let clients = [(); 2].map(|()| builder(&[node.grpc]).build().unwrap());
    let lease = |client: &Client| client.lease("db").wants(80.0).capacity().unwrap();
    let mut first = lease(&clients[0]);
    assert_eq!(first.changed().await, Ok(80.0));
    // An invalid number does not spoil the request for the others.
    let invalid = clients[0].lease("invalid").wants(f64::NAN).capacity().unwrap();
    assert_eq!(clients[0].lease("").capacity().err(), Some(LeaseError::InvalidName));
    let second = lease(&clients[1]);
    until("half for each", || first.get() == 50.0 && second.get() == 50.0).await;
    second.set_wants(10.0);
    until("what each wants", || first.get() == 80.0 && second.get() == 10.0).await;
    assert_eq!(invalid.get(), 0.0);
    assert_eq!(clients[0].lease("db").capacity().err(), Some(LeaseError::AlreadyLeased));
    // By the last handle that is dropped, and by closing the client.
    drop(second);
    let third = clients[1].lease("db").wants(20.0).capacity().unwrap();
    until("leased anew", || third.get() == 20.0).await;
    clients[1].close().await;
    assert_eq!(clients[1].lease("other").capacity().err(), Some(LeaseError::Closed));
    first.set_wants(100.0);
    until("all for the first", || first.get() == 100.0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rates_of_several_processes_stay_within_the_capacity() {
    let (_limits, node) = node();
    let mut using = JoinSet::new();
    let stop = Arc::new(AtomicBool::new(false));
    let used = Arc::new(AtomicUsize::new(0));
    for _ in 0..3 {
        let rate = builder(&[node.grpc]).build().unwrap().lease("api").rate_limiter().unwrap();
        // More callers than the rate can serve.
        for _ in 0..50 {
            let (rate, stop, used) = (rate.clone(), Arc::clone(&stop), Arc::clone(&used));
            using.spawn(async move {
                while !stop.load(Ordering::Relaxed) {
                    rate.wait(1).await.unwrap();
                    used.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
    }
    // The wants grow until the whole capacity is leased.
    let rate = |used: usize, time: Duration| used as f64 / time.as_secs_f64();
    let mut limit = PollLimit::new(TEST_TIMEOUT);
    loop {
        let (before, start) = (used.load(Ordering::Relaxed), Instant::now());
        tokio::time::sleep(Duration::from_secs(1)).await;
        let rate = rate(used.load(Ordering::Relaxed) - before, start.elapsed());
        // The bursts of three clients come on top.
        assert!(rate <= 100.0 + 3.0 * 10.0, "{rate} a second");
        if rate > 90.0 {
            break;
        }
        limit.check("the capacity is used");
    }
    stop.store(true, Ordering::Relaxed);
    using.join_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gauge_lets_in_as_many_as_are_leased() {
    let (_limits, node) = node();
    let client = builder(&[node.grpc]).build().unwrap();
    let other = builder(&[node.grpc]).build().unwrap();
    let gauge = client.lease("connections").gauge().unwrap();
    let (inside, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let mut users = JoinSet::new();
    for _ in 0..150 {
        let (gauge, inside, most) = (gauge.clone(), Arc::clone(&inside), Arc::clone(&most));
        users.spawn(async move {
            let _place = gauge.acquire().await.unwrap();
            let now = inside.fetch_add(1, Ordering::SeqCst) + 1;
            most.fetch_max(now, Ordering::SeqCst);
            tokio::time::sleep(Duration::from_millis(100)).await;
            inside.fetch_sub(1, Ordering::SeqCst);
        });
    }
    users.join_all().await;
    let most = most.load(Ordering::SeqCst);
    assert!((1..=100).contains(&most), "{most} at once");
    // Another client wants all of it: what is left shrinks, and places are refused.
    let _all = other.lease("connections").wants(1000.0).capacity().unwrap();
    until("a place is refused", || {
        let places: Vec<_> = (0..60).map_while(|_| gauge.try_acquire()).collect();
        places.len() < 60
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lease_that_runs_out_leaves_what_the_mode_says() {
    let (_limits, node) = node();
    let proxy = FaultProxy::to(node.grpc.port());
    let client = builder(&[proxy.address()]).build().unwrap();
    let modes = [Mode::Safe, Mode::Pessimistic, Mode::Optimistic];
    let lease = |(at, mode): (usize, Mode)| {
        client.lease(&format!("short-{at}")).wants(30.0).mode(mode).capacity().unwrap()
    };
    let leases: Vec<Capacity> = modes.into_iter().enumerate().map(lease).collect();
    let all = || leases.iter().map(Capacity::get).collect::<Vec<_>>();
    // Before the first answer, nothing is known of a safe capacity.
    until("leased", || all() == [30.0; 3]).await;
    proxy.set(Fault::NoReplies);
    until("run out", || all() == [7.0, 0.0, 30.0]).await;
    proxy.set(Fault::Nothing);
    until("leased again", || all() == [30.0; 3]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_is_closed_during_a_refresh_lets_go() {
    let (_limits, node) = node();
    let proxy = FaultProxy::to(node.grpc.port());
    let client = builder(&[proxy.address()]).build().unwrap();
    let rate = client.lease("db").wants(50.0).rate_limiter().unwrap();
    rate.wait(1).await.unwrap();
    let waiting = tokio::spawn({
        let rate = rate.clone();
        async move { rate.wait(1_000_000).await.and(rate.wait(1).await) }
    });
    until("leased", || leased(&node) == 50.0).await;
    proxy.set(Fault::Delay(Duration::from_millis(300)));
    // A refresh is sent every second, and takes longer than half of it.
    tokio::time::sleep(Duration::from_millis(1200)).await;
    client.close().await;
    assert_eq!(waiting.await.unwrap(), Err(Closed));
    until("released", || leased(&node) == 0.0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn all_leases_are_refreshed_in_one_call() {
    let (_limits, node) = node();
    let client = builder(&[node.grpc]).build().unwrap();
    let leases: Vec<Capacity> =
        (0..20).map(|at| client.lease(&format!("r{at}")).wants(1.0).capacity().unwrap()).collect();
    until("leased", || leases.iter().all(|lease| lease.get() == 1.0)).await;
    let calls = || Scrape::of(node.http).sum("tollgate_lease_requests_total", &[]);
    let (before, start) = (calls(), Instant::now());
    tokio::time::sleep(Duration::from_secs(3)).await;
    let most = 20.0 * (start.elapsed().as_secs_f64() / 0.9 + 1.0);
    assert!(calls() - before <= most, "{} requests for leases", calls() - before);
}

/// A Doorman: it is the master, or names another one.
#[derive(Clone, Default)]
struct Doorman {
    master: Arc<Mutex<Option<String>>>,
    asked: Arc<AtomicUsize>,
}

#[tonic::async_trait]
impl CapacityService for Doorman {
    async fn get_capacity(
        &self,
        request: Request<GetCapacityRequest>,
    ) -> Result<Response<GetCapacityResponse>, Status> {
        self.asked.fetch_add(1, Ordering::SeqCst);
        if let Some(master) = self.master.lock().unwrap().clone() {
            let mastership = Some(Mastership { master_address: Some(master) });
            return Ok(Response::new(GetCapacityResponse { response: Vec::new(), mastership }));
        }
        let response = request.into_inner().resource.into_iter().map(|asked| ResourceResponse {
            resource_id: asked.resource_id,
            gets: Lease { expiry_time: now_s() + 60, refresh_interval: 1, capacity: asked.wants },
            ..ResourceResponse::default()
        });
        Ok(Response::new(GetCapacityResponse { response: response.collect(), mastership: None }))
    }

    async fn discovery(
        &self,
        _: Request<DiscoveryRequest>,
    ) -> Result<Response<DiscoveryResponse>, Status> {
        Err(Status::unimplemented("not asked for here"))
    }

    async fn get_server_capacity(
        &self,
        _: Request<GetServerCapacityRequest>,
    ) -> Result<Response<GetServerCapacityResponse>, Status> {
        Err(Status::unimplemented("not asked for here"))
    }

    async fn release_capacity(
        &self,
        _: Request<ReleaseCapacityRequest>,
    ) -> Result<Response<ReleaseCapacityResponse>, Status> {
        Ok(Response::new(ReleaseCapacityResponse { mastership: None }))
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_doorman_that_moves_its_master_is_followed() {
    let servers = [Doorman::default(), Doorman::default()];
    let mut addresses = Vec::new();
    for server in &servers {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        addresses.push(listener.local_addr().unwrap());
        let service = CapacityServer::new(server.clone());
        let serving = tonic::transport::Server::builder().add_service(service);
        tokio::spawn(serving.serve_with_incoming(TcpListenerStream::new(listener)));
    }
    let set_master = |at: usize| {
        let [master, other] = [at, 1 - at].map(|at| &servers[at]);
        *master.master.lock().unwrap() = None;
        *other.master.lock().unwrap() = Some(addresses[at].to_string());
    };
    set_master(1);
    // The client knows the first one only.
    let client = builder(&addresses[..1]).build().unwrap();
    let lease = client.lease("db").wants(5.0).capacity().unwrap();
    until("leased by the second", || lease.get() == 5.0).await;
    set_master(0);
    lease.set_wants(6.0);
    until("leased by the first", || lease.get() == 6.0).await;
    set_master(1);
    lease.set_wants(7.0);
    until("leased by the second", || lease.get() == 7.0).await;
    // None for a while.
    *servers[1].master.lock().unwrap() = Some(String::new());
    lease.set_wants(8.0);
    let before = servers[1].asked.load(Ordering::SeqCst);
    until("asked in vain", || servers[1].asked.load(Ordering::SeqCst) > before + 1).await;
    assert_eq!(lease.get(), 7.0);
    set_master(1);
    until("leased by the second", || lease.get() == 8.0).await;
}

#[tokio::test(start_paused = true)]
async fn a_fake_leases_without_a_node() {
    let fake = Fake::new(FakeAnswer::Grant);
    fake.capacity("db", 5.0);
    let client = fake.client().build().unwrap();
    let rate = client.lease("db").rate_limiter().unwrap();
    let start = Instant::now();
    for _ in 0..100 {
        rate.wait(1).await.unwrap();
    }
    // At five a second, after a second or two of finding out how much is wanted.
    let seconds = start.elapsed().as_secs_f64();
    assert!((19.0..30.0).contains(&seconds), "{seconds}");
}
