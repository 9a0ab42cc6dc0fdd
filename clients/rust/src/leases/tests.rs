//! When the keeper asks, and for what, on Tokio's clock; and what is used of a lease.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use testkit::now_s;
use tokio::time::{Instant, sleep};
use tollgate_proto::doorman::{
    GetCapacityRequest, GetCapacityResponse, Lease, ReleaseCapacityRequest,
    ReleaseCapacityResponse, ResourceRequest, ResourceResponse,
};

use super::desk::{Desk, Handle, Stock};
use super::keeper::{Caller, Keeper, Lessor};
use super::kept::{Kept, Now};
use super::resource::{Mode, Resource};
use super::{LeaseBuilder, Leases, Unmeasured};
use crate::backend::Backend;
use crate::decision::{Error, NoAnswer};
use crate::fake::{Fake, FakeAnswer};
use crate::tasks::Tasks;

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);

/// Nodes that the test leads. Clients get all that they want.
#[derive(Clone, Default)]
struct Nodes(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    /// The names that contain it are leased to nobody, and released for nobody.
    forbidden: Option<&'static str>,
    /// How long the leases are valid, and when to refresh them.
    length_s: i64,
    interval_s: i64,
    /// The requests so far: when they came, and the resources of each.
    asked: Vec<(Instant, Vec<String>)>,
    released: Vec<String>,
}

impl State {
    fn check(&self, names: &[String]) -> Result<(), Error> {
        let forbids = |name: &String| self.forbidden.is_some_and(|part| name.contains(part));
        match names.iter().any(forbids) {
            true => Err(Error::NoDecision(NoAnswer::Forbidden("not yours".into()))),
            false => Ok(()),
        }
    }

    fn answer(&self, asked: &ResourceRequest) -> ResourceResponse {
        ResourceResponse {
            resource_id: asked.resource_id.clone(),
            gets: Lease {
                expiry_time: now_s() + self.length_s,
                refresh_interval: self.interval_s,
                capacity: asked.wants,
            },
            ..ResourceResponse::default()
        }
    }
}

impl Lessor for Nodes {
    async fn get_capacity(
        &self,
        request: &GetCapacityRequest,
        _: Instant,
    ) -> Result<GetCapacityResponse, Error> {
        let names: Vec<_> = request.resource.iter().map(|one| one.resource_id.clone()).collect();
        self.set(|state| {
            state.asked.push((Instant::now(), names.clone()));
            state.check(&names)?;
            let response = request.resource.iter().map(|asked| state.answer(asked)).collect();
            Ok(GetCapacityResponse { response, mastership: None })
        })
    }

    async fn release_capacity(
        &self,
        request: &ReleaseCapacityRequest,
        _: Instant,
    ) -> Result<ReleaseCapacityResponse, Error> {
        self.set(|state| {
            state.check(&request.resource_id)?;
            state.released.extend(request.resource_id.clone());
            Ok(ReleaseCapacityResponse::default())
        })
    }
}

impl Nodes {
    fn set<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        change(&mut self.0.lock().unwrap())
    }

    fn calls(&self) -> usize {
        self.set(|state| state.asked.len())
    }
}

/// Nodes, and the leases of a client of theirs.
fn start(interval_s: i64) -> (Nodes, Arc<Desk>) {
    let nodes = Nodes::default();
    nodes.set(|state| (state.length_s, state.interval_s) = (24 * 60 * 60, interval_s));
    (nodes, Arc::default())
}

fn lease(nodes: &Nodes, desk: &Arc<Desk>, name: &str) -> Handle {
    let resource = Resource::new(name, Mode::Safe, Some(1.0), Arc::new(Unmeasured));
    let (handle, is_first) = desk.add(resource).unwrap();
    if is_first {
        let caller = Caller { lessor: nodes.clone(), client_id: "client".to_owned() };
        tokio::spawn(Keeper::new(caller, Arc::clone(desk)).run());
    }
    handle
}

#[tokio::test(start_paused = true)]
async fn what_is_urgent_is_asked_for_together() {
    let (nodes, desk) = start(60 * 60);
    let all: Vec<_> = (0..50).map(|at| lease(&nodes, &desk, &format!("r{at}"))).collect();
    for (at, wants) in (0..1000_u32).enumerate() {
        all[at % all.len()].set_wants(f64::from(wants));
        sleep(10 * MS).await;
    }
    // One every 100 ms.
    let calls = nodes.calls();
    assert!((90..=110).contains(&calls), "{calls} calls");
    // New ones, too.
    let mut new = Vec::new();
    for at in 0..100 {
        new.push(lease(&nodes, &desk, &format!("new{at}")));
        sleep(10 * MS).await;
    }
    let calls = nodes.calls() - calls;
    assert!((9..=11).contains(&calls), "{calls} calls for new ones");
}

#[tokio::test(start_paused = true)]
async fn the_same_wants_are_not_asked_for_again() {
    let (nodes, desk) = start(60 * 60);
    let db = lease(&nodes, &desk, "db");
    for _ in 0..100 {
        db.set_wants(5.0);
        sleep(10 * MS).await;
    }
    assert_eq!((nodes.calls(), db.capacity()), (1, 5.0));
    db.set_wants(6.0);
    sleep(MS).await;
    assert_eq!((nodes.calls(), db.capacity()), (2, 6.0));
}

#[tokio::test(start_paused = true)]
async fn refusals_cost_a_bounded_number_of_calls() {
    let (nodes, desk) = start(1);
    nodes.set(|state| state.forbidden = Some("not"));
    let forbidden: Vec<_> = (0..200).map(|at| lease(&nodes, &desk, &format!("not-{at}"))).collect();
    let allowed = lease(&nodes, &desk, "allowed");
    // A hundred calls a refresh, and those that were split off before, until each is known.
    sleep(10 * SECOND).await;
    let asked = nodes.set(|state| state.asked.clone());
    assert_eq!(asked[0].1.len(), 201);
    assert!((300..=450).contains(&asked.len()), "{} calls", asked.len());
    assert_eq!(allowed.capacity(), 1.0);
    // Those that are refused are not asked for again with the others.
    assert_eq!(asked[asked.len() - 1].1, ["allowed"]);
    // Half a minute later, all of them are.
    sleep(30 * SECOND).await;
    let again = nodes.calls() - asked.len();
    assert!((100..=150).contains(&again), "{again} calls again");
    drop(forbidden);
}

#[tokio::test(start_paused = true)]
async fn many_that_are_refused_take_no_lease_from_the_others() {
    let (nodes, desk) = start(1);
    nodes.set(|state| state.length_s = 20);
    let names = |kind| (0..60).map(move |at| format!("{at}-{kind}"));
    let allowed: Vec<_> = names("ok").map(|name| lease(&nodes, &desk, &name)).collect();
    let refused: Vec<_> = names("not").map(|name| lease(&nodes, &desk, &name)).collect();
    sleep(SECOND / 2).await;
    // The right to half of them is lost.
    nodes.set(|state| state.forbidden = Some("not"));
    for second in 0..100 {
        let held = allowed.iter().filter(|one| one.capacity() == 1.0).count();
        assert_eq!(held, 60, "after {second} s");
        sleep(SECOND).await;
    }
    desk.close().await;
    let mut released = nodes.set(|state| state.released.clone());
    released.sort();
    let mut expected: Vec<_> = names("ok").collect();
    expected.sort();
    assert_eq!(released, expected);
    drop(refused);
}

#[tokio::test(start_paused = true)]
async fn those_that_are_refused_are_asked_for_again_together_and_apart_from_the_others() {
    let (nodes, desk) = start(60 * 60);
    let start = Instant::now();
    nodes.set(|state| state.forbidden = Some("not"));
    let allowed = ["a", "not-b"].map(|name| lease(&nodes, &desk, name));
    sleep(20 * SECOND).await;
    let later = lease(&nodes, &desk, "not-c");
    sleep(9 * SECOND).await;
    nodes.set(|state| {
        state.forbidden = None;
        state.asked.clear();
    });
    sleep(2 * SECOND).await;
    let asked = nodes.set(|state| state.asked.clone());
    let names: Vec<_> = asked.iter().map(|(_, names)| names.clone()).collect();
    assert_eq!(names, [vec!["a"], vec!["not-b", "not-c"]]);
    // Half a minute after the first refusal.
    let after = asked[1].0 - start;
    assert!((30 * SECOND..30 * SECOND + 10 * MS).contains(&after), "{after:?}");
    assert!(allowed.iter().chain([&later]).all(|one| one.capacity() == 1.0));
}

#[tokio::test(start_paused = true)]
async fn a_lease_that_runs_out_while_the_machine_sleeps_is_used_no_more() {
    let backend = Arc::new(Backend::Fake(Fake::new(FakeAnswer::Grant)));
    let leases = Leases::new(backend, "client".to_owned(), Tasks::here());
    let builder = |name| LeaseBuilder::new(&leases, name);
    let rate = builder("rate").wants(100.0).rate_limiter().unwrap();
    let measured = builder("measured").gauge().unwrap();
    let gauge = builder("gauge").wants(100.0).gauge().unwrap();
    let mut capacity = builder("capacity").wants(100.0).capacity().unwrap();
    assert_eq!(capacity.changed().await, Ok(100.0));
    let place = measured.acquire().await.unwrap();
    sleep(SECOND / 2).await;
    assert!(rate.try_use(1) && gauge.try_acquire().is_some());
    // By the time of day, it is later.
    let Stock::Live(resources) = leases.desk.stock(true) else { panic!("closed") };
    for resource in &resources {
        resource.hold(|held| held.ends = Duration::ZERO);
    }
    assert!(!rate.try_use(1) && gauge.try_acquire().is_none());
    assert_eq!((rate.capacity(), gauge.capacity(), capacity.get()), (0.0, 0.0, 0.0));
    assert_eq!(capacity.changed().await, Ok(0.0));
    // Who is refused would not get more before the lease is renewed.
    assert!(measured.try_acquire().is_none());
    assert!(!resources.iter().any(|one| one.is_urgent()));
    sleep(SECOND).await;
    assert!(rate.try_use(1) && gauge.try_acquire().is_some());
    drop(place);
}

#[test]
fn a_capacity_that_is_no_number_is_none() {
    let resource = Arc::new(Resource::new("db", Mode::Safe, Some(8.0), Arc::new(Unmeasured)));
    let mut kept = Kept::new(Arc::clone(&resource));
    for capacity in [f64::NAN, -1.0, f64::NEG_INFINITY] {
        kept.request(0.0, Now::read());
        let gets = Lease { expiry_time: i64::MAX, refresh_interval: 1, capacity };
        let answer = ResourceResponse { gets, ..ResourceResponse::default() };
        kept.answered(&answer, Now::read());
        assert_eq!(resource.capacity(), 0.0);
        // It is not sent, either: the nodes would refuse it.
        let has = kept.request(0.0, Now::read()).has.unwrap();
        assert_eq!(has.capacity, 0.0);
    }
}
