//! Runs a list of scenarios on every store. A scenario is a function of a service over any store,
//! with a manual clock.

use tollgate_server::domain::time::ManualClock;
use tollgate_server::store::memory::MemoryStore;
use tollgate_server::store::redis::RedisStore;

use super::{START, Servers, Service, redis_store};

/// Limits without any bucket; each scenario sets its own.
const NO_LIMITS: &str = "namespaces: {}";

/// A service over an empty embedded store.
pub fn on_embedded_store() -> Service<MemoryStore> {
    let clock = ManualClock::new(START);
    Service::new(MemoryStore::with_clock(clock.clone()), clock, NO_LIMITS)
}

/// Deletes all data of the servers, and makes a service over them. The store's birth is [`START`].
pub async fn on_emptied(servers: &impl Servers) -> Service<RedisStore> {
    servers.delete_all_data();
    let clock = ManualClock::new(START);
    let store = redis_store(servers, clock.clone()).await;
    servers.set_birth(START.0);
    Service::new(store, clock, NO_LIMITS)
}

/// Makes a test for each store, which runs all scenarios in order.
#[macro_export]
macro_rules! scenarios {
    ($($scenario:path,)*) => {
        #[tokio::test]
        async fn on_the_embedded_store() {
            $($scenario(&$crate::scenarios::on_embedded_store()).await;)*
        }

        #[tokio::test]
        async fn on_redis() {
            on_servers(&$crate::Redis::start()).await;
        }

        #[tokio::test]
        async fn on_valkey() {
            match $crate::Redis::start_valkey() {
                Some(valkey) => on_servers(&valkey).await,
                None => println!("skipped: valkey-server is not installed"),
            }
        }

        #[tokio::test]
        async fn on_a_redis_cluster() {
            on_servers(&$crate::redis_cluster::RedisCluster::start_with(3, 0)).await;
        }

        async fn on_servers(servers: &impl $crate::Servers) {
            $($scenario(&$crate::scenarios::on_emptied(servers).await).await;)*
        }
    };
}
