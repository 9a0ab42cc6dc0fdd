//! Scenarios of `GetCapacity`, `GetServerCapacity` and `ReleaseCapacity`, run on every store (see
//! `testkit::scenarios`). `redis_only` tests what can only happen in Redis.

mod changes;
mod learning;
mod names;
mod redis_only;
mod sharing;
mod time;

use testkit::{START, Service};
use tollgate_server::domain::lease::{Claim, Holder, MAX_SUBCLIENTS};
use tollgate_server::service::capacity::{CapacityRequest, Lease, PriorityWants};
use tollgate_server::store::{LeaseStore, LeaseView, Store};

pub(crate) const SECOND: i64 = 1_000_000;

/// [`START`], in seconds.
pub(crate) const START_S: i64 = START.0 / SECOND;

/// An algorithm without learning mode.
pub(crate) const FAIR: &str =
    "kind: FAIR_SHARE, lease_length: 60, refresh_interval: 5, learning_mode_duration: 0";

/// Limits with one template for all resources.
pub(crate) fn one(capacity: f64, algorithm: &str) -> String {
    format!(
        "resources: [{{ identifier_glob: \"*\", capacity: {capacity}, algorithm: {{ {algorithm} }} }}]"
    )
}

/// Wants of a plain client.
pub(crate) fn plain(wants: f64) -> [PriorityWants; 1] {
    [PriorityWants { priority: 0, clients: 1, wants }]
}

/// The lease as a claim for the next refresh.
pub(crate) fn claim(lease: &Lease) -> Option<Claim> {
    Some(Claim { capacity: lease.capacity, expiry_s: lease.expiry_s })
}

/// Requests a lease on one resource for any holder.
pub(crate) async fn ask_as<S: LeaseStore>(
    s: &Service<S>,
    holder: Holder<'_>,
    resource: &str,
    wants: &[PriorityWants],
    has: Option<Claim>,
) -> Lease {
    let request =
        CapacityRequest { resource, wants: wants.into(), has, most_clients: MAX_SUBCLIENTS };
    let leases = s.capacity.get(holder, &[request]).await.unwrap();
    assert_eq!(leases.len(), 1);
    assert!(!leases[0].degraded);
    leases[0]
}

/// Requests a lease for a client without a claim.
pub(crate) async fn ask<S: LeaseStore>(
    s: &Service<S>,
    client: &str,
    resource: &str,
    wants: f64,
) -> Lease {
    ask_as(s, Holder::Client(client), resource, &plain(wants), None).await
}

/// Requests a lease, and returns its capacity.
pub(crate) async fn gets<S: LeaseStore>(
    s: &Service<S>,
    client: &str,
    resource: &str,
    wants: f64,
) -> f64 {
    ask(s, client, resource, wants).await.capacity
}

/// Releases a client's lease.
pub(crate) async fn release<S: LeaseStore>(s: &Service<S>, client: &str, resource: &str) {
    s.capacity.release(Holder::Client(client), &[resource]).await.unwrap();
}

/// Leases on a resource, by name of the holder.
pub(crate) async fn holders<S: LeaseStore>(s: &Service<S>, resource: &str) -> Vec<LeaseView> {
    let found = s.capacity.store().leases(resource, 10_000).await.unwrap();
    let mut holders = found.map(|(_, leases)| leases.items).unwrap_or_default();
    holders.sort_by(|a, b| (&a.id, a.server).cmp(&(&b.id, b.server)));
    holders
}

/// Sum of all leases on a resource. Asserts that the store's own sum is the same.
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

/// A store of tokens and leases.
pub(crate) trait Both: Store + LeaseStore {}

impl<S: Store + LeaseStore> Both for S {}

testkit::scenarios!(
    sharing::the_worked_examples_in_any_order,
    sharing::static_and_no_algorithm,
    sharing::resources_without_a_template,
    sharing::template_lookup_order,
    sharing::clients_with_equal_wants,
    sharing::safe_capacity,
    sharing::unbounded_safe_capacity_of_a_parent,
    sharing::servers_count_by_subclients,
    sharing::unusual_bands,
    sharing::a_server_gives_back_when_it_can,
    time::a_lease_ends_at_its_second,
    time::a_release_frees_at_once,
    time::a_crashed_client,
    time::a_refresh_goes_on_from_now,
    time::many_leases_expire_together,
    time::a_clock_that_steps_back,
    changes::capacity_is_lowered,
    changes::capacity_is_raised,
    changes::algorithm_changes,
    changes::lease_length_changes,
    changes::template_is_removed_and_added_again,
    learning::a_newborn_store_learns,
    learning::claims_in_learning_are_not_cut,
    learning::only_a_newborn_store_learns,
    learning::learning_lasts_as_long_as_the_template_says,
    learning::servers_are_learned_too,
    learning::a_claim_counts_at_most_what_can_have_been_granted,
    learning::a_server_keeps_what_it_has_leased_out,
    names::names_do_not_collide,
    names::a_client_and_a_server_of_the_same_name,
    names::invalid_requests_are_refused,
    names::the_largest_allowed_requests,
    names::a_template_bounds_its_resources,
    names::a_caller_bounds_its_resources,
    names::released_and_refused_resources_do_not_count,
    names::many_resources_in_order,
);
