//! What decisions of one round trip do for others beside deciding, they share: so many leases are
//! dropped however many decisions there are, and none of them is lost.

use rand::SeedableRng as _;
use rand::rngs::SmallRng;
use testkit::client_pool::ClientPool;
use testkit::{Redis, START, command_stats, redis_store};
use tollgate_server::domain::lease::DROP_LIMIT;
use tollgate_server::domain::sharing::Kind;
use tollgate_server::domain::time::ManualClock;
use tollgate_server::store::memory::MemoryStore;
use tollgate_server::store::{AT_ONCE, LeaseAsk, LeaseStore};

/// The most round trips that one call may take: while lists are read, too, batches are small.
const TRIPS: usize = 4;

/// Clients of each resource. `TOLLGATE_BUDGET_CLIENTS=1000` measures the worst batch there is.
fn clients() -> usize {
    std::env::var("TOLLGATE_BUDGET_CLIENTS").map_or(100, |number| number.parse().unwrap())
}

/// How many hold leases, as far as the store has noticed.
async fn holders(store: &impl LeaseStore) -> usize {
    let all = store.resources(AT_ONCE).await.unwrap().items;
    all.iter().map(|(_, totals)| totals.holders as usize).sum()
}

/// One decision on each resource, all in one call.
async fn one_of_each(store: &impl LeaseStore, crowds: &[ClientPool], random: &mut SmallRng) {
    let asks: Vec<LeaseAsk<'_>> =
        crowds.iter().flat_map(|crowd| crowd.asks(&[0], random)).collect();
    for grant in store.lease(&asks).await {
        grant.unwrap();
    }
}

async fn a_mass_that_expires_takes_many_decisions(
    store: &impl LeaseStore,
    clock: &ManualClock,
    spent_us: impl AsyncFn() -> u64,
) {
    let mut random = SmallRng::seed_from_u64(1);
    let crowds: Vec<ClientPool> = (0..AT_ONCE)
        .map(|number| {
            let crowd = ClientPool::new(Kind::FairShare, clients(), || 1.0);
            ClientPool { resource: format!("r{number}"), spread_s: 0, ..crowd }
        })
        .collect();
    for crowd in &crowds {
        crowd.refresh_all(store, &mut random).await;
    }
    let all = AT_ONCE * clients();
    assert_eq!(holders(store).await, all);

    clock.advance(400_000_000);
    let (mut left, mut longest_us) = (all, 0);
    let fewest = (all - AT_ONCE) / (TRIPS * (DROP_LIMIT + AT_ONCE));
    for round in 0.. {
        let before_us = spent_us().await;
        one_of_each(store, &crowds, &mut random).await;
        longest_us = longest_us.max(spent_us().await - before_us);
        let now = holders(store).await;
        let dropped = left - now;
        assert!(dropped <= TRIPS * (DROP_LIMIT + AT_ONCE), "{dropped} dropped in round {round}");
        left = now;
        if left == AT_ONCE {
            assert!(round >= fewest);
            println!("all {all} were gone after round {round}; the longest took {longest_us} µs");
            return;
        }
        assert!(dropped > 0, "{left} are left");
    }
}

#[tokio::test]
async fn in_memory() {
    let clock = ManualClock::new(START);
    let store = MemoryStore::with_clock(clock.clone());
    a_mass_that_expires_takes_many_decisions(&store, &clock, async || 0).await;
}

#[tokio::test]
async fn in_redis() {
    let (redis, clock) = (Redis::start(), ManualClock::new(START));
    let store = redis_store(&redis, clock.clone()).await;
    // What the scripts have taken in all, as Redis counts it.
    let spent_us = async || command_stats(&mut redis.connection(), "evalsha").us;
    a_mass_that_expires_takes_many_decisions(&store, &clock, spent_us).await;
}
