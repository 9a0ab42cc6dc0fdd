//! Places in a register: when its slot moves, when it can't be read, when several nodes ask for one, when
//! it has many names, and over a slow network.

use std::time::Duration;

use futures_util::future::join_all;
use testkit::cluster::reserve_quarter;
use testkit::fault_proxy::{Fault, FaultProxy};
use testkit::redis_cluster::RedisCluster;
use testkit::{Redis, Servers};
use tollgate_server::domain::bucket::{BucketKind, BucketLimit, Terms};
use tollgate_server::metrics::Metrics;
use tollgate_server::store::redis::{RedisStore, slot};
use tollgate_server::store::{
    BucketRequest, Outcome, Store as _, StoreError, TokenAction, Verdict,
};

use crate::faults::store_with_health;
use crate::registers::{Bounded, open, register_only, registered, slow};

/// How long the store of a slow network waits for answers.
const TIMEOUT: Duration = Duration::from_secs(3);

fn node(store: &RedisStore, bound: u64) -> Bounded<'_> {
    Bounded { store, bound, max_idle_ms: None, rewrite: false }
}

/// Decides, in one call, requests to a configured bucket, to a dynamic bucket without a state, and to
/// one that has a state and must be registered again.
async fn decide_own_new_old(
    store: &RedisStore,
    terms: &Terms,
    names: [&str; 3],
) -> [Result<Outcome, StoreError>; 3] {
    let node = node(store, 5);
    let own = BucketRequest { kind: BucketKind::Configured, ..node.request(names[0], terms, 100) };
    let new = node.request(names[1], terms, 100);
    let old = BucketRequest { rewrite: true.into(), ..node.request(names[2], terms, 100) };
    store.decide(&[own, new, old]).await.into_vec().try_into().unwrap()
}

/// The tokens of a configured bucket.
async fn tokens(store: &RedisStore, terms: &Terms, name: &str) -> f64 {
    let request =
        BucketRequest { kind: BucketKind::Configured, ..node(store, 5).request(name, terms, 1) };
    store.decide(&[request]).await.pop().unwrap().unwrap().accrued_us / 1e6
}

fn verdict(outcome: &Result<Outcome, StoreError>) -> Result<Verdict, StoreError> {
    outcome.map(|outcome| outcome.verdict)
}

/// Changes the rights of the user `limited`.
fn set_rights(redis: &Redis, rights: &[&str]) {
    let mut inside = redis.connection();
    redis::cmd("ACL").arg("SETUSER").arg("limited").arg(rights).exec(&mut inside).unwrap();
}

/// A store as a user with all rights has it, and as the user `limited` does, who has them for now.
async fn stores_of_two_users(redis: &Redis) -> (RedisStore, RedisStore) {
    set_rights(redis, &["on", ">secret", "~*", "+@all"]);
    let limited = redis.url().replace("://", "://limited:secret@");
    (open(&redis.store_url()).await, open(&limited).await)
}

#[tokio::test]
async fn a_call_whose_register_cant_be_read_takes_tokens_once() {
    let _machine = reserve_quarter();
    let redis = Redis::start();
    let ((all, limited), terms) = (stores_of_two_users(&redis).await, slow());
    assert_eq!(node(&all, 5).take("old", &terms, 100).await, Verdict::Granted);

    // Heartbeats need it, too.
    set_rights(&redis, &["-zcard"]);
    let outcomes = decide_own_new_old(&limited, &terms, ["own", "new", "old"]).await;
    assert_eq!(verdict(&outcomes[0]), Ok(Verdict::Granted), "{outcomes:?}");
    assert_eq!(verdict(&outcomes[1]), Err(StoreError::Refused), "{outcomes:?}");
    let left = tokens(&all, &terms, "own").await;
    assert!((899.9..950.0).contains(&left), "{left}");
}

/// The user lacks the right to the command that writes the second bucket of a call.
#[tokio::test]
async fn a_call_of_which_one_write_is_refused_takes_tokens_once() {
    let _machine = reserve_quarter();
    let redis = Redis::start();
    let (all, limited) = stores_of_two_users(&redis).await;
    // So many tokens that one of them does not change when the state expires.
    let limit = BucketLimit { size_tokens: 100_000, fill_rate: 0.1, ..BucketLimit::default() };
    let terms = limit.terms();
    let request = |name, action| BucketRequest {
        kind: BucketKind::Configured,
        action,
        ..node(&all, 5).request(name, &terms, 1)
    };
    let take = TokenAction::Take { max_wait_ms: 0 };
    for (command, first, second, action, expected) in [
        ("setrange", "1-new", "2-known", take, 99_999.0),
        ("set", "3-known", "4-new", take, 99_998.0),
        ("del", "5-new", "6-known", TokenAction::GiveBack, 99_999.0),
    ] {
        let known = if first.ends_with("known") { first } else { second };
        assert_eq!(verdict(&all.decide(&[request(known, take)]).await[0]), Ok(Verdict::Granted));
        set_rights(&redis, &["+@all", &format!("-{command}")]);
        let outcomes = limited.decide(&[request(first, take), request(second, action)]).await;
        assert_eq!(verdict(&outcomes[0]), Ok(Verdict::Granted), "{command}: {outcomes:?}");
        assert_eq!(verdict(&outcomes[1]), Err(StoreError::Refused), "{command}: {outcomes:?}");
        let left = tokens(&all, &terms, first).await * limit.fill_rate;
        assert!((expected - 0.1..expected + 0.9).contains(&left), "{command}: {left}");
    }
}

/// Names of buckets whose states are in other slots of the server that has the register.
fn names_beside_register(cluster: &RedisCluster) -> [String; 3] {
    let moving = slot(b"i{ns}");
    let is_beside = |name: &String| {
        let slot = slot(format!("b{{ns:{name}}}").as_bytes());
        slot != moving && cluster.owner(slot) == cluster.owner(moving)
    };
    let mut names = (0..).map(|number| format!("user-{number}")).filter(is_beside);
    [(); 3].map(|()| names.next().unwrap())
}

/// The register has moved, and its server knows where it is.
#[tokio::test]
async fn a_call_whose_register_moves_takes_tokens_once() {
    let _machine = reserve_quarter();
    let cluster = RedisCluster::start_with(3, 0);
    let (store, terms) = (open(&cluster.store_url()).await, slow());
    let names = names_beside_register(&cluster);
    let [own, new, old] = names.each_ref().map(String::as_str);
    assert_eq!(node(&store, 5).take(old, &terms, 100).await, Verdict::Granted);

    let moving = slot(b"i{ns}");
    let migration = cluster.begin_migration(moving, (cluster.owner(moving).unwrap() + 1) % 3);
    assert_eq!(cluster.move_keys(&migration), 1);
    let outcomes = decide_own_new_old(&store, &terms, [own, new, old]).await;
    assert!(outcomes.iter().all(|one| verdict(one) == Ok(Verdict::Granted)), "{outcomes:?}");
    let left = tokens(&store, &terms, own).await;
    assert!((899.9..950.0).contains(&left), "{left}");
    cluster.finish_migration(migration);
    let mut found = registered(&mut Servers::masters(&cluster));
    found.sort_unstable();
    let mut expected = [new, old];
    expected.sort_unstable();
    assert_eq!(found, expected);
}

/// The first request of a call is refused, and its bucket has the only place. If it gave the place
/// back, the register would no longer exist, and the second one could not be registered.
#[tokio::test]
async fn a_refused_request_leaves_the_register_where_it_is() {
    let _machine = reserve_quarter();
    let cluster = RedisCluster::start_with(3, 0);
    let (store, terms) = (open(&cluster.store_url()).await, slow());
    let names = names_beside_register(&cluster);
    // The lane connects, and the server loads the script.
    tokens(&store, &terms, &names[2]).await;
    register_only(&mut Servers::masters(&cluster), &names[0], 5);

    let moving = slot(b"i{ns}");
    let migration = cluster.begin_migration(moving, (cluster.owner(moving).unwrap() + 1) % 3);
    let node = node(&store, 5);
    let requests = [node.request(&names[0], &terms, 2000), node.request(&names[1], &terms, 100)];
    let outcomes = store.decide(&requests).await;
    assert_eq!(verdict(&outcomes[0]), Ok(Verdict::Refused), "{outcomes:?}");
    assert_eq!(verdict(&outcomes[1]), Ok(Verdict::Granted), "{outcomes:?}");
    cluster.move_keys(&migration);
    cluster.finish_migration(migration);
    let found = registered(&mut Servers::masters(&cluster));
    assert!(found.contains(&names[1]), "{found:?}");
}

/// A node has got a place for a bucket, and has not decided yet.
#[tokio::test]
async fn a_refused_request_does_not_give_away_the_place_of_another_node() {
    let _machine = reserve_quarter();
    let redis = Redis::start();
    let stores = [open(&redis.store_url()).await, open(&redis.store_url()).await];
    let [one, other] = stores.each_ref().map(|store| node(store, 1));
    let terms = slow();
    register_only(&mut [redis.connection()], "x", 1);
    assert_eq!(one.take("x", &terms, 2000).await, Verdict::Refused);
    assert_eq!(other.take("y", &terms, 1).await, Verdict::TooManyBuckets);
    assert_eq!(one.take("x", &terms, 1).await, Verdict::Granted);
}

/// A full register of 1,000 buckets, all but one of which are in use for longer than their scores say.
#[tokio::test]
async fn room_is_found_behind_a_thousand_outdated_scores() {
    let _machine = reserve_quarter();
    let redis = Redis::start();
    let (store, terms) = (open(&redis.store_url()).await, slow());
    let node = node(&store, 1000);
    let names: Vec<String> = (0..1000).map(|number| format!("user-{number}")).collect();
    for names in names.chunks(100) {
        let requests: Vec<_> = names.iter().map(|name| node.request(name, &terms, 1)).collect();
        let outcomes = store.decide(&requests).await;
        assert!(outcomes.iter().all(|one| verdict(one) == Ok(Verdict::Granted)), "{outcomes:?}");
    }
    let outdate = "for _, name in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
        redis.call('ZADD', KEYS[1], 1, name) end
        redis.call('ZADD', KEYS[1], 2, 'user-7')";
    let mut inside = redis.connection();
    redis::cmd("EVAL").arg(outdate).arg(1).arg("i{ns}").exec(&mut inside).unwrap();
    redis::cmd("DEL").arg("b{ns:user-7}").exec(&mut inside).unwrap();
    assert_eq!(node.take("new", &terms, 1).await, Verdict::Granted);
    let names = registered(&mut [inside]);
    assert!(names.len() == 1000 && !names.contains(&"user-7".to_owned()));
    assert_eq!(node.take("one-more", &terms, 1).await, Verdict::TooManyBuckets);
}

/// Another node has given the name a new score since this one has looked.
#[test]
fn a_look_that_is_out_of_date_counts_as_a_change() {
    let redis = Redis::start();
    let mut inside = redis.connection();
    redis::cmd("ZADD").arg("i{ns}").arg(5).arg("x").exec(&mut inside).unwrap();
    let mut reply = |score: &str| -> Vec<redis::Value> {
        let text = include_str!("../../../lua/register.lua");
        let mut look = redis::cmd("EVAL");
        look.arg(text).arg(1).arg("i{ns}").arg(0).arg("y").arg(1);
        look.arg("x").arg(score).arg(5).query(&mut inside).unwrap()
    };
    let int = redis::Value::Int;
    assert_eq!(reply("4")[..3], [int(0), int(1), int(1)]);
    assert_eq!(reply("5")[..3], [int(0), int(1), int(0)]);
}

/// A store of which one bucket of one is in use, and each round trip takes two fifths of the timeout.
async fn slow_store(redis: &Redis) -> (FaultProxy, RedisStore) {
    let network = FaultProxy::to(redis.port());
    let (connector, _) = store_with_health(&network.url(), TIMEOUT, &Metrics::new()).await;
    let store = connector.open();
    assert_eq!(node(&store, 1).take("old", &slow(), 1).await, Verdict::Granted);
    network.set(Fault::Delay(TIMEOUT / 5));
    (network, store)
}

/// All calls for it together have the time of one.
#[tokio::test]
async fn a_new_bucket_is_decided_within_the_timeout() {
    let _machine = reserve_quarter();
    let redis = Redis::start();
    let (_network, store) = slow_store(&redis).await;
    let terms = slow();
    let outcomes = store.decide(&[node(&store, 1).request("new", &terms, 1)]).await;
    assert_eq!(verdict(&outcomes[0]), Err(StoreError::Timeout));
}

/// One of them looks for room until its time is up. The others are told that there is none.
#[tokio::test]
async fn a_flood_of_new_names_is_refused_although_the_store_is_slow() {
    let _machine = reserve_quarter();
    let redis = Redis::start();
    let (_network, store) = slow_store(&redis).await;
    let (node, terms) = (node(&store, 1), slow());
    let names: Vec<String> = (0..20).map(|number| format!("new-{number}")).collect();
    let requests: Vec<_> = names.iter().map(|name| [node.request(name, &terms, 1)]).collect();
    let outcomes = join_all(requests.iter().map(|request| store.decide(request))).await;
    let refused = outcomes.iter().filter(|of| verdict(&of[0]) == Ok(Verdict::TooManyBuckets));
    assert_eq!(refused.count(), 19, "{outcomes:?}");
}
