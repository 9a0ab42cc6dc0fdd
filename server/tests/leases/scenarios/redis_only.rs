//! Leases in Redis only: lost data, expiries of keys, lost keys.

use redis::Connection;
use tollgate_server::domain::lease::{Band, Claim, Holder, HolderRequest, ParentLease, Rules};
use tollgate_server::domain::sharing::SharingAlgorithm;
use tollgate_server::domain::time::ManualClock;
use tollgate_server::store::redis::RedisStore;
use tollgate_server::store::{LeaseRequest, LeaseStore};

use super::{FAIR, SECOND, START_S, ask, ask_as, gets, holders, leased, near, one, plain, release};
use testkit::{Redis, START, Servers as _, Service, redis_cmd, redis_store};

type Node = Service<RedisStore>;

async fn start(limits: &str) -> (Redis, Connection, Node) {
    let redis = Redis::start();
    let clock = ManualClock::new(START);
    let store = redis_store(&redis, clock.clone()).await;
    redis.set_birth(START.0);
    let inside = redis.connection();
    (redis, inside, Service::new(store, clock, limits))
}

fn tell<T: redis::FromRedisValue>(inside: &mut Connection, words: &str) -> T {
    redis_cmd(words).query(inside).unwrap()
}

/// All keys but those of the nodes and of the birth.
fn keys(inside: &mut Connection) -> Vec<String> {
    let mut keys: Vec<String> = tell(inside, "KEYS *");
    keys.retain(|key| key != "n" && key != "o");
    keys.sort();
    keys
}

#[tokio::test]
async fn a_redis_that_is_emptied_learns_anew() {
    let learns = "kind: FAIR_SHARE, lease_length: 60, refresh_interval: 5";
    let (redis, mut inside, s) = start(&one(100.0, learns)).await;
    s.clock.advance(60 * SECOND);
    let lease = ask(&s, "a", "r", 80.0).await;
    assert_eq!((lease.capacity, lease.learning_until_s), (80.0, None));
    let () = tell(&mut inside, "FLUSHALL");
    // Without a heartbeat, the first request sets the birth.
    s.clock.advance(SECOND);
    let has = Some(Claim { capacity: 80.0, expiry_s: START_S + 120 });
    let other = ask(&s, "b", "r", 100.0).await;
    assert_eq!((other.capacity, other.learning_until_s), (0.0, Some(START_S + 121)));
    let lease = ask_as(&s, Holder::Client("a"), "r", &plain(80.0), has).await;
    assert_eq!((lease.capacity, lease.learning_until_s), (80.0, Some(START_S + 121)));
    assert_eq!(s.capacity.born_s().await.unwrap(), Some(START_S + 61));
    // Other nodes learn for the same time.
    let clock = s.clock.clone();
    let store = redis_store(&redis, clock.clone()).await;
    let node = Service::new(store, clock, &one(100.0, learns));
    node.clock.advance(59 * SECOND);
    let lease = ask_as(&node, Holder::Client("a"), "r", &plain(80.0), has).await;
    assert_eq!((lease.capacity, lease.learning_until_s), (0.0, Some(START_S + 121)));
    node.clock.advance(SECOND);
    let lease = ask(&node, "a", "r", 100.0).await;
    assert_eq!((lease.capacity, lease.learning_until_s), (100.0, None));
}

/// If only the birth is lost, leases are still known.
#[tokio::test]
async fn a_birth_that_is_lost() {
    let learns = "kind: FAIR_SHARE, lease_length: 60, refresh_interval: 5";
    let (_redis, mut inside, s) = start(&one(100.0, learns)).await;
    s.clock.advance(60 * SECOND);
    assert_eq!(gets(&s, "a", "r", 70.0).await, 70.0);
    let () = tell(&mut inside, "DEL o");
    let lease = ask(&s, "b", "r", 100.0).await;
    assert_eq!((lease.capacity, lease.learning_until_s), (30.0, None));
    assert_eq!(ask(&s, "b", "q", 1.0).await.learning_until_s, Some(START_S + 120));
}

#[tokio::test]
async fn nothing_is_left_when_nobody_holds_a_lease() {
    let (_redis, mut inside, s) = start(&one(100.0, FAIR)).await;
    for (client, resource) in [("a", "r"), ("b", "r"), ("a", "q")] {
        gets(&s, client, resource, 70.0).await;
    }
    ask_as(&s, Holder::Server("s"), "r", &plain(1.0), None).await;
    let all = ["e{q}", "e{r}", "h{q}", "h{r}", "l", "w{q}", "w{r}"];
    assert_eq!(keys(&mut inside), all);
    for client in ["a", "b"] {
        release(&s, client, "r").await;
    }
    assert_eq!(keys(&mut inside), all);
    s.capacity.release(Holder::Server("s"), &["r"]).await.unwrap();
    assert_eq!(keys(&mut inside), ["e{q}", "h{q}", "l", "w{q}"]);
    release(&s, "a", "q").await;
    assert_eq!(keys(&mut inside), [""; 0]);

    // A release removes the last expired leases.
    gets(&s, "a", "r", 70.0).await;
    gets(&s, "b", "r", 70.0).await;
    s.clock.advance(60 * SECOND);
    release(&s, "nobody", "r").await;
    assert_eq!(keys(&mut inside), [""; 0]);
}

/// Without releases, keys expire by themselves, after the last lease.
#[tokio::test]
async fn every_key_has_an_expiry() {
    let fair = |length: i64| {
        let rest = "refresh_interval: 5, learning_mode_duration: 0";
        one(100.0, &format!("kind: FAIR_SHARE, lease_length: {length}, {rest}"))
    };
    let (_redis, mut inside, s) = start(&fair(60)).await;
    let mut check = |last_expiry_s: i64, longest_s: i64| {
        for key in ["h{r}", "w{r}", "e{r}"] {
            let at: i64 = tell(&mut inside, &format!("EXPIRETIME {key}"));
            assert!(
                (last_expiry_s..=last_expiry_s + longest_s).contains(&at),
                "{key} expires {} s after the last lease",
                at - last_expiry_s
            );
        }
    };
    for turn in 0..30 {
        // The holders change, and sometimes there are none.
        let lease = ask(&s, ["a", "b", "c"][turn % 3], "r", 20.0).await;
        check(lease.expiry_s, 60);
        s.clock.advance(if turn % 10 == 9 { 100 } else { 7 } * SECOND);
    }
    // Shorter leases do not shorten the expiry of keys; longer ones extend it.
    s.clock.advance(100 * SECOND);
    s.set_limits(&fair(1000));
    let long = ask(&s, "a", "r", 20.0).await.expiry_s;
    check(long, 1000);
    s.set_limits(&fair(10));
    ask(&s, "b", "r", 20.0).await;
    check(long, 1000);
    s.set_limits(&fair(5000));
    let longer = ask(&s, "c", "r", 20.0).await.expiry_s;
    check(longer, 5000);
}

/// Real time: Redis expires keys by its own clock.
#[tokio::test]
async fn keys_expire_by_themselves() {
    let redis = Redis::start();
    let store = testkit::redis_store_by_its_own_clock(&redis).await;
    let short = "kind: FAIR_SHARE, lease_length: 3, refresh_interval: 1, learning_mode_duration: 0";
    let s = Service::new(store, ManualClock::new(START), &one(100.0, short));
    assert_eq!(gets(&s, "a", "r", 100.0).await, 100.0);
    assert_eq!(gets(&s, "b", "r", 100.0).await, 0.0);
    let mut inside = redis.connection();
    assert_eq!(keys(&mut inside), ["e{r}", "h{r}", "l", "w{r}"]);
    testkit::eventually("only the register is left", testkit::TEST_TIMEOUT, || {
        keys(&mut inside) == ["l"]
    });
    // The next lease request cleans up the register.
    assert_eq!(gets(&s, "a", "q", 100.0).await, 100.0);
    let listed: Vec<String> = tell(&mut inside, "ZRANGE l 0 -1");
    assert_eq!(listed, ["q"]);
}

/// Redis may evict single keys. Whichever is lost, every request is answered, never more than the
/// capacity is leased, and released capacity is available.
#[tokio::test]
async fn a_key_that_is_lost() {
    let (_redis, mut inside, s) = start(&one(120.0, FAIR)).await;
    for letter in ["h", "w", "e", "p"] {
        let resource = format!("lost {letter}");
        let clients = [("a", 1000.0), ("b", 50.0), ("c", 10.0)];
        for _ in 0..3 {
            for (client, wants) in clients {
                gets(&s, client, &resource, wants).await;
            }
        }
        near(leased(&s, &resource).await, 120.0);
        redis::cmd("DEL").arg(format!("{letter}{{{resource}}}")).exec(&mut inside).unwrap();
        let mut held = std::collections::BTreeMap::from([("a", 60.0), ("b", 50.0), ("c", 10.0)]);
        for turn in 0..40 {
            s.clock.advance(5 * SECOND);
            // Some clients stay, some are new, change their wants, or release.
            let news = [("d", 5.0 * f64::from(turn)), ("e", 300.0 - 7.0 * f64::from(turn))];
            for (client, wants) in clients.into_iter().chain(news) {
                let got = gets(&s, client, &resource, wants).await;
                held.insert(client, got);
                assert!(got <= wants);
                // The clients' own sum, once each of them has asked.
                let sum: f64 = held.values().sum();
                assert!(turn == 0 || sum <= 120.0 + 1e-9, "{resource} {turn}: {held:?}");
            }
            if turn % 7 == 0 {
                release(&s, "d", &resource).await;
                held.remove("d");
            }
        }
        for client in ["a", "b", "c", "d", "e"] {
            release(&s, client, &resource).await;
        }
        assert_eq!(holders(&s, &resource).await, []);
        assert_eq!(gets(&s, "z", &resource, 500.0).await, 120.0);
    }
}

/// Without the order by expiry, a crashed client would keep its share forever.
#[tokio::test]
async fn a_crashed_client_expires_although_the_order_by_expiry_is_lost() {
    let (_redis, mut inside, s) = start(&one(120.0, FAIR)).await;
    for (client, wants) in [("a", 60.0), ("b", 50.0), ("c", 10.0)] {
        assert_eq!(gets(&s, client, "r", wants).await, wants);
    }
    let () = tell(&mut inside, "DEL e{r}");
    for _ in 0..13 {
        s.clock.advance(5 * SECOND);
        assert_eq!(gets(&s, "b", "r", 50.0).await, 50.0);
        assert_eq!(gets(&s, "c", "r", 10.0).await, 10.0);
    }
    assert_eq!(gets(&s, "d", "r", 60.0).await, 60.0);
    assert_eq!(holders(&s, "r").await.len(), 3);
}

/// The register of resources is cleaned up in steps of a hundred names.
#[tokio::test]
async fn a_register_of_many_that_are_gone() {
    let (_redis, mut inside, s) = start(&one(120.0, FAIR)).await;
    for at in 0..250 {
        redis::cmd("ZADD").arg("l").arg(START_S - 1).arg(at).exec(&mut inside).unwrap();
    }
    for (resource, left) in [("q", 151), ("r", 52), ("s", 3)] {
        gets(&s, "a", resource, 1.0).await;
        assert_eq!(tell::<usize>(&mut inside, "ZCARD l"), left);
    }
}

/// Also if `from_parent` changes for a moment, or the resource is older than the parent.
#[tokio::test]
async fn what_is_known_of_the_parent_has_an_expiry() {
    let redis = Redis::start();
    let clock = ManualClock::new(START);
    let store = redis_store(&redis, clock.clone()).await;
    redis.set_birth(START.0);
    let mut inside = redis.connection();
    let alone = Rules {
        algorithm: Some(SharingAlgorithm::FairShare),
        capacity: 100.0,
        lease_s: 60,
        learning_s: 0,
        from_parent: false,
    };
    let tree = Rules { from_parent: true, ..alone };
    let lease = ParentLease {
        capacity: 100.0,
        expiry_s: START_S + 10_000,
        refresh_s: 5,
        safe_capacity: 0.0,
        algorithm: SharingAlgorithm::FairShare,
        lease_s: 60,
    };
    for (resource, first) in [("new", tree), ("old", alone)] {
        for turn in 0..5 {
            let rules = if turn == 0 { first } else { tree };
            let bands = [Band { priority: turn % 2, subclients: 1, wants: 1.0 }];
            let request = HolderRequest {
                holder: Holder::Client("a"),
                bands: &bands,
                claim: None,
                learn_for_us: 0,
            };
            // Twice: the second request creates nothing.
            for _ in 0..2 {
                let asks = [LeaseRequest::new(resource, rules, request)];
                assert!(store.lease(&asks).await[0].is_ok());
            }
            if turn == 1 && resource == "old" {
                let time = std::time::Duration::from_secs(2);
                let asked = store.freeze(resource, time).await.unwrap().unwrap();
                store.thaw(resource, asked.number, Some(lease)).await.unwrap();
            }
            let [holders, upstream] = ["h", "p"]
                .map(|key| tell::<i64>(&mut inside, &format!("EXPIRETIME {key}{{{resource}}}")));
            assert!(upstream == holders || upstream == -2, "{resource} {turn}: {upstream}");
            clock.advance(if turn % 2 == 0 { 1 } else { 50 } * SECOND);
        }
        assert_eq!(tell::<i64>(&mut inside, &format!("EXISTS p{{{resource}}}")), 1);
    }
}
