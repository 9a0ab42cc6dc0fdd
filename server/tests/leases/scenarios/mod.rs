//! What `GetCapacity`, `GetServerCapacity` and `ReleaseCapacity` decide, scenario by scenario,
//! on every store.
//!
//! Each scenario is a function over any store, with a clock that is moved by hand. The list at
//! the end runs every one on the embedded store, on a real Redis, on a real Redis Cluster, and on
//! Valkey where it is installed. What only Redis can do to leases is in `redis_only`.

mod changes;
mod learning;
mod names;
mod redis_only;
mod sharing;
mod time;

use testkit::redis_cluster::RedisCluster;
use testkit::{Redis, START, Servers, Service, redis_store};
use tollgate_server::domain::lease::{Claim, Holder, MAX_SUBCLIENTS};
use tollgate_server::domain::time::ManualClock;
use tollgate_server::service::capacity::{Lease, PriorityWants, Request};
use tollgate_server::store::memory::MemoryStore;
use tollgate_server::store::{LeaseStore, LeaseView, Store};

pub(crate) const SECOND: i64 = 1_000_000;

/// [`START`], in seconds.
pub(crate) const START_S: i64 = START.0 / SECOND;

/// An algorithm that needs no time to learn.
pub(crate) const FAIR: &str =
    "kind: FAIR_SHARE, lease_length: 60, refresh_interval: 5, learning_mode_duration: 0";

/// Limits with one template for everything.
pub(crate) fn one(capacity: f64, algorithm: &str) -> String {
    format!(
        "resources: [{{ identifier_glob: \"*\", capacity: {capacity}, algorithm: {{ {algorithm} }} }}]"
    )
}

/// What a plain client wants.
pub(crate) fn plain(wants: f64) -> [PriorityWants; 1] {
    [PriorityWants { priority: 0, clients: 1, wants }]
}

/// A lease as its holder claims it at the next refresh.
pub(crate) fn claim(lease: &Lease) -> Option<Claim> {
    Some(Claim { capacity: lease.capacity, expiry_s: lease.expiry_s })
}

/// Asks for one resource on behalf of anybody.
pub(crate) async fn ask_as<S: LeaseStore>(
    s: &Service<S>,
    holder: Holder<'_>,
    resource: &str,
    wants: &[PriorityWants],
    has: Option<Claim>,
) -> Lease {
    let request = Request { resource, wants: wants.into(), has, most_clients: MAX_SUBCLIENTS };
    let leases = s.capacity.get(holder, &[request]).await.unwrap();
    assert_eq!(leases.len(), 1);
    assert!(!leases[0].degraded);
    leases[0]
}

/// Asks as a client that says nothing of what it holds.
pub(crate) async fn ask<S: LeaseStore>(
    s: &Service<S>,
    client: &str,
    resource: &str,
    wants: f64,
) -> Lease {
    ask_as(s, Holder::Client(client), resource, &plain(wants), None).await
}

/// How much a client gets.
pub(crate) async fn gets<S: LeaseStore>(
    s: &Service<S>,
    client: &str,
    resource: &str,
    wants: f64,
) -> f64 {
    ask(s, client, resource, wants).await.capacity
}

/// Gives back what a client holds of a resource.
pub(crate) async fn release<S: LeaseStore>(s: &Service<S>, client: &str, resource: &str) {
    s.capacity.release(Holder::Client(client), &[resource]).await.unwrap();
}

/// Who holds leases on a resource, by name.
pub(crate) async fn holders<S: LeaseStore>(s: &Service<S>, resource: &str) -> Vec<LeaseView> {
    let found = s.capacity.store().leases(resource, 10_000).await.unwrap();
    let mut holders = found.map(|(_, leases)| leases.items).unwrap_or_default();
    holders.sort_by(|a, b| (&a.id, a.server).cmp(&(&b.id, b.server)));
    holders
}

/// What all leases on a resource add up to, counted one by one; the sum that the store keeps
/// must say the same.
pub(crate) async fn leased<S: LeaseStore>(s: &Service<S>, resource: &str) -> f64 {
    let counted: f64 = holders(s, resource).await.iter().map(|lease| lease.has).sum();
    let found = s.capacity.store().leases(resource, 1).await.unwrap();
    near(found.map_or(0.0, |(totals, _)| totals.has), counted);
    counted
}

#[track_caller]
pub(crate) fn near(found: f64, expected: f64) {
    assert!((found - expected).abs() <= 1e-7 * expected.abs().max(1.0), "{found}, not {expected}");
}

/// Both traits of a store.
pub(crate) trait Both: Store + LeaseStore {}

impl<S: Store + LeaseStore> Both for S {}

macro_rules! scenarios {
    ($($module:ident { $($scenario:ident,)* })*) => {
        #[tokio::test]
        async fn on_the_embedded_store() {
            $($({
                let clock = ManualClock::new(START);
                let store = MemoryStore::with_clock(clock.clone());
                $module::$scenario(&Service::new(store, clock, "namespaces: {}")).await;
            })*)*
        }

        #[tokio::test]
        async fn on_redis() {
            on_servers(&Redis::start()).await;
        }

        #[tokio::test]
        async fn on_valkey() {
            match Redis::start_valkey() {
                Some(valkey) => on_servers(&valkey).await,
                None => println!("not run: there is no valkey-server"),
            }
        }

        #[tokio::test]
        async fn on_a_redis_cluster() {
            on_servers(&RedisCluster::start()).await;
        }

        async fn on_servers(servers: &impl Servers) {
            $($({
                servers.empty();
                let clock = ManualClock::new(START);
                let store = redis_store(servers, clock.clone()).await;
                servers.born(START.0);
                $module::$scenario(&Service::new(store, clock, "namespaces: {}")).await;
            })*)*
        }
    };
}

scenarios!(
    sharing {
        the_worked_examples_in_any_order,
        each_client_for_itself,
        what_no_template_matches,
        which_template,
        clients_with_equal_wants,
        what_may_be_used_without_a_lease,
        a_parent_whose_safe_capacity_has_no_bound,
        servers_count_as_many_as_they_stand_for,
        bands_as_they_come,
        a_server_gives_back_when_it_can,
    }
    time {
        a_lease_ends_at_its_second,
        a_release_frees_at_once,
        a_crashed_client,
        a_refresh_goes_on_from_now,
        a_mass_that_expires_together,
        a_clock_that_steps_back,
    }
    changes {
        less_to_share,
        more_to_share,
        another_algorithm,
        another_lease_length,
        a_template_that_goes_and_comes_back,
    }
    learning {
        a_newborn_store_learns,
        claims_in_learning_are_not_cut,
        only_a_newborn_store_learns,
        for_as_long_as_the_template_says,
        servers_are_learned_too,
        a_claim_counts_at_most_what_can_have_been_granted,
        a_server_keeps_what_it_has_leased_out,
    }
    names {
        names_are_apart,
        a_client_and_a_server_of_the_same_name,
        what_makes_no_sense_is_refused,
        as_much_as_is_allowed,
        one_resource_too_many,
        one_resource_of_a_caller_too_many,
        released_and_refused_resources_do_not_count,
        many_resources_in_order,
    }
);
