//! Versions of the limits, on every store.

use testkit::redis_cluster::RedisCluster;
use testkit::{Redis, START, Servers, redis_store};
use tollgate_server::config;
use tollgate_server::domain::time::ManualClock;
use tollgate_server::store::StoreError;
use tollgate_server::store::memory::MemoryStore;
use tollgate_server::store::redis::slot;
use tollgate_server::store::versions::{About, KEPT_VERSIONS, Version, Versions, Written};

pub fn version(number: u64, text: &str) -> Version {
    let (by, message) = (format!("author {number}"), "a \"message\"\n".to_owned());
    let (at_ms, checksum) = (1_700_000_000_000 + number, config::checksum(text));
    let about = About { number, at_ms, by, message, copy_of: None, checksum };
    Version { about, text: text.into() }
}

async fn versions_replace_each_other(store: &impl Versions) {
    assert_eq!(store.current_number().await, Ok(0));
    assert_eq!(store.version(1).await, Ok(None));
    assert_eq!(store.history().await, Ok(Vec::new()));
    assert_eq!(store.write(&version(2, "too early")).await, Ok(Written::Conflict(0)));
    assert_eq!(store.write(&version(1, "one")).await, Ok(Written::Yes));
    assert_eq!(store.write(&version(1, "one again")).await, Ok(Written::Conflict(1)));
    assert_eq!(store.write(&version(3, "too early")).await, Ok(Written::Conflict(1)));
    assert_eq!(store.write(&version(2, "two, ключ")).await, Ok(Written::Yes));
    assert_eq!(store.current_number().await, Ok(2));
    for kept in [version(1, "one"), version(2, "two, ключ")] {
        assert_eq!(store.version(kept.about.number).await, Ok(Some(kept)));
    }
    let history = [version(2, "two, ключ").about, version(1, "one").about];
    assert_eq!(store.history().await, Ok(history.to_vec()));
    // Long texts, which Redis has compressed.
    let long = "size: 100 # a comment\n".repeat(500_000);
    assert_eq!(store.write(&version(3, &long)).await, Ok(Written::Yes));
    assert_eq!(store.version(3).await, Ok(Some(version(3, &long))));
}

async fn the_last_hundred_are_kept(store: &impl Versions) {
    for number in 4..=KEPT_VERSIONS + 10 {
        assert_eq!(store.write(&version(number, "text")).await, Ok(Written::Yes));
    }
    let history = store.history().await.unwrap();
    let numbers: Vec<u64> = history.iter().map(|about| about.number).collect();
    assert_eq!(numbers, (11..=110).rev().collect::<Vec<_>>());
    assert_eq!(store.version(10).await, Ok(None));
    assert!(store.version(11).await.unwrap().is_some());
}

async fn a_version_is_given_back(store: &impl Versions) {
    assert_eq!(store.give_back(&version(110, "older")).await, Ok(Written::Conflict(110)));
    assert_eq!(store.give_back(&version(500, "ahead")).await, Ok(Written::Yes));
    assert_eq!(store.version(500).await, Ok(Some(version(500, "ahead"))));
    assert_eq!(store.history().await.unwrap().len(), 1, "the gap has no versions");
    assert_eq!(store.write(&version(501, "next")).await, Ok(Written::Yes));
    assert_eq!(store.version(110).await, Ok(None), "long ago");
}

async fn scenarios(store: &impl Versions) {
    versions_replace_each_other(store).await;
    the_last_hundred_are_kept(store).await;
    a_version_is_given_back(store).await;
}

async fn on_servers(servers: &impl Servers) {
    let store = redis_store(servers, ManualClock::new(START)).await;
    scenarios(&store).await;
    // A value of another type counts as none.
    for mut master in servers.masters() {
        let _ = redis::cmd("DEL").arg("v").exec(&mut master);
        let _ = redis::cmd("SET").arg("v").arg("x").exec(&mut master);
    }
    assert_eq!(store.current_number().await, Ok(0));
    assert_eq!(store.write(&version(8, "eight")).await, Ok(Written::Conflict(0)));
    assert_eq!(store.write(&version(1, "one")).await, Ok(Written::Yes));
    assert_eq!(store.version(1).await, Ok(Some(version(1, "one"))));
    // So does a number that is none, or beyond all versions.
    for (foreign, number) in [("many", 2), ("1000000000000000", 3)] {
        for mut master in servers.masters() {
            let _ = redis::cmd("HSET").arg("v").arg("n").arg(foreign).exec(&mut master);
        }
        assert_eq!(store.current_number().await, Ok(0));
        assert_eq!(store.give_back(&version(number, "again")).await, Ok(Written::Yes));
        assert_eq!(store.current_number().await, Ok(number));
    }
    // What is known of a version must be about that version.
    let other = serde_json::to_string(&version(9, "").about).unwrap();
    for mut master in servers.masters() {
        let _ = redis::cmd("HSET").arg("v").arg("a2").arg(&other).exec(&mut master);
    }
    assert_eq!(store.version(2).await, Err(StoreError::Refused));
}

#[tokio::test]
async fn on_the_embedded_store() {
    scenarios(&MemoryStore::new()).await;
}

#[tokio::test]
async fn on_redis() {
    on_servers(&Redis::start()).await;
}

#[tokio::test]
async fn on_a_redis_cluster() {
    on_servers(&RedisCluster::start_with(3, 0)).await;
}

/// A change while the slot of the versions moves: before its key has moved, after that, and when another
/// server has the slot.
#[tokio::test]
async fn a_change_while_a_slot_moves() {
    let cluster = RedisCluster::start_with(3, 0);
    let store = redis_store(&cluster, ManualClock::new(START)).await;
    let slot = slot(b"v");
    let migration = cluster.begin_migration(slot, (cluster.owner(slot).unwrap() + 1) % 3);
    assert_eq!(store.write(&version(1, "one")).await, Ok(Written::Yes), "at the new server");
    assert_eq!(store.version(1).await, Ok(Some(version(1, "one"))));
    assert_eq!(store.current_number().await, Ok(1));
    assert_eq!(cluster.move_keys(&migration), 0, "the key is there already");
    assert_eq!(store.write(&version(2, "two")).await, Ok(Written::Yes));
    cluster.finish_migration(migration);
    assert_eq!(store.write(&version(3, "three")).await, Ok(Written::Yes));
    assert_eq!(store.version(2).await, Ok(Some(version(2, "two"))));
    assert_eq!(store.history().await.unwrap().len(), 3);
}
