//! The decisions of one round trip share a budget for removing expired leases: the number of
//! removed leases does not grow with the number of decisions, and all expired leases are removed in
//! the end.

use rand::SeedableRng as _;
use rand::rngs::SmallRng;
use testkit::client_pool::ClientPool;
use testkit::{Redis, START, command_stats, redis_store};
use tollgate_server::domain::lease::DROP_LIMIT;
use tollgate_server::domain::sharing::SharingAlgorithm;
use tollgate_server::domain::time::ManualClock;
use tollgate_server::store::memory::MemoryStore;
use tollgate_server::store::{LeaseRequest, LeaseStore, MAX_REQUESTS_PER_CALL};

/// Largest number of round trips of one call: batches are small while lists are read.
const TRIPS: usize = 4;

/// Clients per resource. `TOLLGATE_BUDGET_CLIENTS=1000` measures the worst possible batch.
fn clients() -> usize {
    std::env::var("TOLLGATE_BUDGET_CLIENTS").map_or(100, |number| number.parse().unwrap())
}

/// Number of holders that the store counts.
async fn holders(store: &impl LeaseStore) -> usize {
    let all = store.resources(MAX_REQUESTS_PER_CALL).await.unwrap().items;
    all.iter().map(|(_, totals)| totals.holders as usize).sum()
}

/// Makes one decision per resource, all in one call.
async fn refresh_one_of_each(store: &impl LeaseStore, pools: &[ClientPool], random: &mut SmallRng) {
    let asks: Vec<LeaseRequest<'_>> =
        pools.iter().flat_map(|pool| pool.asks(&[0], random)).collect();
    for grant in store.lease(&asks).await {
        grant.unwrap();
    }
}

async fn many_expired_leases_take_several_decisions(
    store: &impl LeaseStore,
    clock: &ManualClock,
    spent_us: impl AsyncFn() -> u64,
) {
    let mut random = SmallRng::seed_from_u64(1);
    let pools: Vec<ClientPool> = (0..MAX_REQUESTS_PER_CALL)
        .map(|number| {
            let pool = ClientPool::new(SharingAlgorithm::FairShare, clients(), || 1.0);
            ClientPool { resource: format!("r{number}"), spread_s: 0, ..pool }
        })
        .collect();
    for pool in &pools {
        pool.refresh_all(store, &mut random).await;
    }
    let all = MAX_REQUESTS_PER_CALL * clients();
    assert_eq!(holders(store).await, all);

    clock.advance(400_000_000);
    let (mut left, mut longest_us) = (all, 0);
    let fewest = (all - MAX_REQUESTS_PER_CALL) / (TRIPS * (DROP_LIMIT + MAX_REQUESTS_PER_CALL));
    for round in 0.. {
        let before_us = spent_us().await;
        refresh_one_of_each(store, &pools, &mut random).await;
        longest_us = longest_us.max(spent_us().await - before_us);
        let now = holders(store).await;
        let dropped = left - now;
        assert!(
            dropped <= TRIPS * (DROP_LIMIT + MAX_REQUESTS_PER_CALL),
            "{dropped} removed in round {round}"
        );
        left = now;
        if left == MAX_REQUESTS_PER_CALL {
            assert!(round >= fewest);
            println!("all {all} were removed by round {round}; the longest took {longest_us} µs");
            return;
        }
        assert!(dropped > 0, "{left} are left");
    }
}

#[tokio::test]
async fn in_memory() {
    let clock = ManualClock::new(START);
    let store = MemoryStore::with_clock(clock.clone());
    many_expired_leases_take_several_decisions(&store, &clock, async || 0).await;
}

#[tokio::test]
async fn in_redis() {
    let (redis, clock) = (Redis::start(), ManualClock::new(START));
    let store = redis_store(&redis, clock.clone()).await;
    // What the scripts have taken in all, as Redis counts it.
    let spent_us = async || command_stats(&mut redis.connection(), "evalsha").us;
    many_expired_leases_take_several_decisions(&store, &clock, spent_us).await;
}
