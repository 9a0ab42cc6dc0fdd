//! Leases of a server that the test leads: what it is asked, and what it answers.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use testkit::{free_port, now_s};
use tokio::net::TcpListener;
use tokio::time::{Instant, timeout};
use tokio_stream::wrappers::TcpListenerStream;
use tollgate_client::{Capacity, Client, Mode};
use tollgate_proto::doorman::capacity_server::{Capacity as CapacityService, CapacityServer};
use tollgate_proto::doorman::{
    DiscoveryRequest, DiscoveryResponse, GetCapacityRequest, GetCapacityResponse,
    GetServerCapacityRequest, GetServerCapacityResponse, Lease, Mastership, ReleaseCapacityRequest,
    ReleaseCapacityResponse, ResourceRequest, ResourceResponse,
};
use tonic::{Request, Response, Status};

use super::until;
use crate::builder;

/// A Doorman. It is the master, or names another one; clients get all that they want.
#[derive(Clone, Default)]
struct Doorman(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    /// The address of another master.
    master: Option<String>,
    safe: Option<f64>,
    /// The names that begin so are leased to nobody, and released for nobody.
    forbidden: Option<&'static str>,
    degraded: bool,
    /// How long the leases are valid, and when to refresh them.
    length_s: i64,
    interval_s: i64,
    /// How long an answer takes.
    delay: Duration,
    /// The requests so far: when they came, and the resources of each.
    asked: Vec<(Instant, Vec<String>)>,
    released: Vec<String>,
}

impl State {
    fn mastership(&self) -> Option<Mastership> {
        self.master.clone().map(|address| Mastership { master_address: Some(address) })
    }

    fn check(&self, names: &[String]) -> Result<(), Status> {
        let forbids = |name: &String| self.forbidden.is_some_and(|start| name.starts_with(start));
        match names.iter().any(forbids) {
            true => Err(Status::permission_denied("not yours")),
            false => Ok(()),
        }
    }
}

impl Doorman {
    async fn start() -> (Self, SocketAddr) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let doorman = Self::default();
        doorman.set(|state| (state.length_s, state.interval_s) = (60, 1));
        let service = CapacityServer::new(doorman.clone());
        let serving = tonic::transport::Server::builder().add_service(service);
        tokio::spawn(serving.serve_with_incoming(TcpListenerStream::new(listener)));
        (doorman, address)
    }

    fn set<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        change(&mut self.0.lock().unwrap())
    }

    fn calls(&self) -> usize {
        self.set(|state| state.asked.len())
    }

    fn released(&self) -> Vec<String> {
        self.set(|state| state.released.clone())
    }
}

#[tonic::async_trait]
impl CapacityService for Doorman {
    async fn get_capacity(
        &self,
        request: Request<GetCapacityRequest>,
    ) -> Result<Response<GetCapacityResponse>, Status> {
        let asked = request.into_inner().resource;
        let (response, delay) = self.set(|state| {
            let names: Vec<_> = asked.iter().map(|asked| asked.resource_id.clone()).collect();
            let checked = state.check(&names);
            state.asked.push((Instant::now(), names));
            checked?;
            let mastership = state.mastership();
            let answer = |asked: ResourceRequest| ResourceResponse {
                resource_id: asked.resource_id,
                gets: Lease {
                    expiry_time: now_s() + state.length_s,
                    refresh_interval: state.interval_s,
                    capacity: asked.wants,
                },
                safe_capacity: state.safe,
                degraded: Some(state.degraded),
                ..ResourceResponse::default()
            };
            let answers = asked.into_iter().filter(|_| mastership.is_none()).map(answer);
            let response = GetCapacityResponse { response: answers.collect(), mastership };
            Ok::<_, Status>((response, state.delay))
        })?;
        tokio::time::sleep(delay).await;
        Ok(Response::new(response))
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
        request: Request<ReleaseCapacityRequest>,
    ) -> Result<Response<ReleaseCapacityResponse>, Status> {
        let names = request.into_inner().resource_id;
        let mastership = self.set(|state| {
            state.check(&names)?;
            let mastership = state.mastership();
            if mastership.is_none() {
                state.released.extend(names);
            }
            Ok::<_, Status>(mastership)
        })?;
        Ok(Response::new(ReleaseCapacityResponse { mastership }))
    }
}

fn lease(client: &Client, resource: &str, wants: f64) -> Capacity {
    client.lease(resource).wants(wants).capacity().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_doorman_that_moves_its_master_is_followed() {
    let (servers, addresses): (Vec<_>, Vec<_>) =
        [Doorman::start().await, Doorman::start().await].into_iter().unzip();
    let set_master = |at: usize| {
        let [master, other] = [at, 1 - at].map(|at| &servers[at]);
        master.set(|state| state.master = None);
        other.set(|state| state.master = Some(addresses[at].to_string()));
    };
    set_master(1);
    // The client knows the first one only.
    let client = builder(&addresses[..1]).build().unwrap();
    let db = lease(&client, "db", 5.0);
    until("leased by the second", || db.get() == 5.0).await;
    set_master(0);
    db.set_wants(6.0);
    until("leased by the first", || db.get() == 6.0).await;
    set_master(1);
    db.set_wants(7.0);
    until("leased by the second", || db.get() == 7.0).await;
    // None for a while.
    servers[1].set(|state| state.master = Some(String::new()));
    db.set_wants(8.0);
    let before = servers[1].calls();
    until("asked in vain", || servers[1].calls() > before + 1).await;
    assert_eq!(db.get(), 7.0);
    set_master(1);
    until("leased by the second", || db.get() == 8.0).await;
    // One that does not answer: the client asks the first one again.
    let dead = format!("127.0.0.1:{}", free_port());
    for server in &servers {
        server.set(|state| state.master = Some(dead.clone()));
    }
    db.set_wants(9.0);
    let before = servers[0].calls();
    until("asked again", || servers[0].calls() > before).await;
    set_master(0);
    until("leased by the first", || db.get() == 9.0).await;
    // The master moves between the last refresh and the release.
    set_master(1);
    client.close().await;
    assert_eq!(servers[1].released(), ["db"]);
    assert!(servers[0].released().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn all_leases_are_refreshed_in_one_call() {
    const RESOURCES: usize = 20;
    let (doorman, address) = Doorman::start().await;
    let client = builder(&[address]).build().unwrap();
    let leases: Vec<_> = (0..RESOURCES).map(|at| lease(&client, &format!("r{at}"), 1.0)).collect();
    until("leased", || leases.iter().all(|lease| lease.get() == 1.0)).await;
    let before = doorman.calls();
    until("refreshed three times", || doorman.calls() >= before + 3).await;
    let asked = doorman.set(|state| state.asked[before..].to_vec());
    for pair in asked.windows(2) {
        assert_eq!(pair[1].1.len(), RESOURCES);
        // At the interval that the server says, less a tenth.
        assert!(pair[1].0 - pair[0].0 >= Duration::from_millis(850), "{asked:?}");
    }
    // Those without a handle are released, and refreshed no more.
    drop(leases);
    until("released", || doorman.released().len() == RESOURCES).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lease_whose_handle_was_dropped_can_be_leased_again_at_once() {
    let (doorman, address) = Doorman::start().await;
    let client = builder(&[address]).build().unwrap();
    for wants in 1..50_u32 {
        let mut db = lease(&client, "db", f64::from(wants));
        // It would be another value first if anything of the last handle were left.
        assert_eq!(db.changed().await, Ok(f64::from(wants)));
    }
    client.close().await;
    assert_eq!(doorman.released().last().map(String::as_str), Some("db"));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_safe_capacity_outlives_a_degraded_answer() {
    let (doorman, address) = Doorman::start().await;
    let client = builder(&[address]).build().unwrap();
    doorman.set(|state| (state.safe, state.length_s) = (Some(3.0), 2));
    let db = lease(&client, "db", 5.0);
    until("leased", || db.get() == 5.0).await;
    // A node without the store does not know the resource's safe capacity.
    doorman.set(|state| (state.safe, state.degraded) = (None, true));
    let before = doorman.calls();
    until("refreshed", || doorman.calls() > before + 1).await;
    // No node any more.
    doorman.set(|state| state.master = Some(String::new()));
    until("run out", || db.get() == 3.0).await;
    // One that knows of none.
    doorman.set(|state| (state.master, state.degraded) = (None, false));
    until("leased", || db.get() == 5.0).await;
    doorman.set(|state| state.master = Some(String::new()));
    until("run out", || db.get() == 0.0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn threads_do_not_refuse_each_other() {
    let (_doorman, address) = Doorman::start().await;
    let client = builder(&[address]).build().unwrap();
    let rate = client.lease("rate").wants(1e6).rate_limiter().unwrap();
    let gauge = client.lease("gauge").wants(1e6).mode(Mode::Pessimistic).gauge().unwrap();
    until("leased", || rate.capacity() == 1e6 && gauge.capacity() == 1e6).await;
    // The burst is there after a tenth of a second.
    until("the burst", || rate.try_use(50_000)).await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    let refused: usize = thread::scope(|scope| {
        let use_all = || {
            let refused = |_: &u32| !rate.try_use(1) || gauge.try_acquire().is_none();
            (0..10_000).filter(refused).count()
        };
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(use_all)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    assert_eq!(refused, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn demand_that_comes_during_a_request_does_not_wait_for_the_next_interval() {
    let (doorman, address) = Doorman::start().await;
    let delay = Duration::from_millis(200);
    doorman.set(|state| (state.interval_s, state.delay) = (60, delay));
    let client = builder(&[address]).build().unwrap();
    let other = lease(&client, "other", 1.0);
    let rate = client.lease("rate").rate_limiter().unwrap();
    let gauge = client.lease("gauge").gauge().unwrap();
    until("asked without any demand", || {
        let asked = doorman.set(|state| state.asked.clone());
        asked.iter().map(|(_, names)| names.len()).sum::<usize>() == 3
    })
    .await;
    let before = doorman.calls();
    let soon = Duration::from_secs(20);
    timeout(soon, rate.wait(1)).await.unwrap().unwrap();
    let _place = timeout(soon, gauge.acquire()).await.unwrap().unwrap();
    until("the other", || other.get() == 1.0).await;
    // Only what was in a hurry was asked for again.
    let asked = doorman.set(|state| state.asked[before..].to_vec());
    assert!(asked.iter().all(|(_, names)| !names.contains(&"other".to_owned())), "{asked:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_release_that_is_refused_for_one_resource_releases_the_others() {
    let (doorman, address) = Doorman::start().await;
    let client = builder(&[address]).build().unwrap();
    let leases = ["a", "b", "not-c", "d", "e"].map(|name| lease(&client, name, 1.0));
    until("leased", || leases.iter().all(|lease| lease.get() == 1.0)).await;
    // The right is lost between the last refresh and the release.
    doorman.set(|state| (state.forbidden, state.interval_s) = (Some("not"), 60));
    client.close().await;
    let mut released = doorman.released();
    released.sort();
    assert_eq!(released, ["a", "b", "d", "e"]);
}
