//! Where the masters are, as a real cluster and real sentinels tell: what was set up is found,
//! and so is what becomes of it.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

mod support;

use std::sync::Arc;
use std::time::{Duration, Instant};

use support::redis_cluster::RedisCluster;
use support::sentinel::Sentinels;
use support::{Redis, free_port};
use tollgate_server::settings::StoreUrl;
use tollgate_server::store::StoreError;
use tollgate_server::store::redis::{SLOTS, Servers, Topology, slot};

/// Within this time a change must be known, from when the servers themselves agree on it.
const SOON: Duration = Duration::from_secs(3);

fn servers(url: &str) -> Servers {
    match url.parse().unwrap() {
        StoreUrl::Redis(url) => Servers::single(&url),
        StoreUrl::Cluster { seeds } => Servers::cluster(&seeds),
        StoreUrl::Sentinel { sentinels, master, server } => {
            Servers::sentinel(&sentinels, &master, &server)
        }
        StoreUrl::Memory => panic!("no servers"),
    }
    .unwrap()
}

/// The ports of the masters.
fn ports(topology: &Topology) -> Vec<u16> {
    let port = |name: &str| name.rsplit_once(':').unwrap().1.parse().unwrap();
    topology.masters().iter().map(|master| port(&master.name)).collect()
}

/// Refreshes until something holds.
async fn until(
    servers: &Servers,
    what: &str,
    mut holds: impl FnMut(&Topology) -> bool,
) -> Arc<Topology> {
    let started = Instant::now();
    loop {
        let told = servers.refresh(servers.version()).await;
        if holds(&servers.current()) {
            return servers.current();
        }
        assert!(started.elapsed() < SOON, "{what}: not within {SOON:?}: {told:?}");
    }
}

/// Every slot leads to the server that serves it, and the tag of each master to itself.
fn check(topology: &Topology, cluster: &RedisCluster) {
    assert!(topology.is_cluster());
    let all = cluster.ports();
    let masters = cluster.masters();
    let mut expected: Vec<u16> = masters.iter().map(|&number| all[number]).collect();
    expected.sort_unstable();
    let mut found = ports(topology);
    found.sort_unstable();
    assert_eq!(found, expected);
    for number in (0..SLOTS as u16).step_by(97) {
        let place = topology.master_of(number).unwrap();
        assert_eq!(ports(topology)[place], all[cluster.owner(number).unwrap()], "slot {number}");
    }
    for (place, master) in topology.masters().iter().enumerate() {
        let tagged = slot(format!("o{{{}}}", master.tag).as_bytes());
        assert_eq!(topology.master_of(tagged), Some(place));
        let above = (tagged + 1..SLOTS as u16).map(|slot| topology.master_of(slot));
        assert!(above.into_iter().all(|other| other != Some(place)), "{}", master.tag);
        // It takes the key, rather than sending it on to another.
        let mut connection =
            redis::Client::open(master.info.clone()).unwrap().get_connection().unwrap();
        let set =
            redis::cmd("SET").arg(format!("o{{{}}}", master.tag)).arg(1).exec(&mut connection);
        set.unwrap();
    }
}

#[tokio::test]
async fn a_cluster_is_found_and_followed() {
    let mut cluster = RedisCluster::start();
    let known = servers(&cluster.url());
    assert_eq!((known.version(), known.current().masters().len()), (0, 0));
    let first = known.refresh(0).await.unwrap();
    assert_eq!((first.version(), known.version()), (1, 1));
    assert_eq!(cluster.masters(), [0, 1, 2]);
    check(&first, &cluster);

    // Nothing new is no news, and who has not seen the news gets it at once.
    assert_eq!(known.refresh(1).await.unwrap().version(), 1);
    assert_eq!(known.refresh(0).await.unwrap().version(), 1);

    // A slot moves.
    let moved = slot(b"b{ns:moved}");
    let from = cluster.owner(moved).unwrap();
    let to = (from + 1) % 3;
    redis::cmd("SET").arg("b{ns:moved}").arg(1).exec(&mut cluster.connection(from)).unwrap();
    let migration = cluster.begin_migration(moved, to);
    assert_eq!(cluster.move_keys(&migration), 1);
    let asked: redis::RedisError = redis::cmd("GET")
        .arg("b{ns:moved}")
        .query::<()>(&mut cluster.connection(from))
        .unwrap_err();
    let (address, _) = asked.redirect_node().unwrap();
    let source =
        first.masters().iter().find(|m| m.name.ends_with(&cluster.ports()[from].to_string()));
    let target = source.unwrap().redirect(address).unwrap();
    assert_eq!(target.addr().to_string(), format!("127.0.0.1:{}", cluster.ports()[to]));
    let before = known.refresh(known.version()).await.unwrap();
    assert!(before.version() == 1, "until the end it is where it was");
    cluster.finish_migration(migration);
    let port = cluster.ports()[to];
    let served_by = |topology: &Topology, slot| ports(topology)[topology.master_of(slot).unwrap()];
    let topology = until(&known, "the slot moved", |now| served_by(now, moved) == port).await;
    cluster.wait_until_whole();
    check(&topology, &cluster);

    // A replica takes over, in peace, …
    let replica = cluster.replica_of(0).unwrap();
    cluster.failover(replica);
    let port = cluster.ports()[replica];
    let topology = until(&known, "the failover", |now| ports(now).contains(&port)).await;
    cluster.wait_until_whole();
    check(&topology, &cluster);

    // … and as its master dies.
    let replica = cluster.replica_of(1).unwrap();
    cluster.kill(1);
    let (dead, port) = (cluster.ports()[1], cluster.ports()[replica]);
    support::eventually("another takes over", Duration::from_secs(20), || {
        cluster.owner(8000) == Some(replica)
    });
    let topology = until(&known, "the death", |now| ports(now).contains(&port)).await;
    assert!(!ports(&topology).contains(&dead));
    cluster.wait_until_whole();
    check(&topology, &cluster);

    // What a cluster becomes that nobody knew: those that start now find the same.
    let other = servers(&cluster.url());
    assert!(other.refresh(0).await.unwrap().masters().len() == 3);
    check(&other.current(), &cluster);
}

#[tokio::test]
async fn many_who_ask_are_one_question() {
    let cluster = RedisCluster::start_with(3, 0);
    let known = Arc::new(servers(&cluster.url()));
    let asked = || -> u64 {
        (0..3)
            .map(|number| {
                let about: String = redis::cmd("INFO")
                    .arg("commandstats")
                    .query(&mut cluster.connection(number))
                    .unwrap();
                let line = about.lines().find(|line| line.starts_with("cmdstat_cluster|info:"));
                line.map_or(0, |line| {
                    line.split(['=', ',']).nth(1).unwrap().parse::<u64>().unwrap()
                })
            })
            .sum()
    };
    let before = asked();
    let mut callers = tokio::task::JoinSet::new();
    for _ in 0..100 {
        let known = Arc::clone(&known);
        callers.spawn(async move { known.refresh(0).await.unwrap().version() });
    }
    while let Some(version) = callers.join_next().await {
        assert_eq!(version.unwrap(), 1);
    }
    assert_eq!(asked() - before, 1);
    // Nothing is new: those that come while it is asked share that answer, too.
    for _ in 0..100 {
        let known = Arc::clone(&known);
        callers.spawn(async move { known.refresh(1).await.unwrap().version() });
    }
    while let Some(version) = callers.join_next().await {
        assert_eq!(version.unwrap(), 1);
    }
    assert!(asked() - before <= 3, "{}", asked() - before);
}

#[tokio::test]
async fn a_cluster_with_a_hole_is_one() {
    let cluster = RedisCluster::start_with(3, 0);
    let known = servers(&cluster.url());
    for number in 0..3 {
        let _: () = redis::cmd("CLUSTER")
            .arg("DELSLOTS")
            .arg(7)
            .query(&mut cluster.connection(number))
            .unwrap();
    }
    let topology = known.refresh(0).await.unwrap();
    assert_eq!((topology.master_of(7), topology.masters().len()), (None, 3));
    assert!(topology.master_of(6).is_some() && topology.master_of(8).is_some());
}

#[tokio::test]
async fn the_master_of_sentinels_is_found_and_followed() {
    let mut sentinels = Sentinels::start();
    let known = servers(&sentinels.url());
    assert_eq!(known.current().masters().len(), 0);
    let first = known.refresh(0).await.unwrap();
    assert_eq!(ports(&first), [sentinels.master().unwrap()]);
    assert_eq!((first.masters()[0].tag, first.master_of(16383)), ("", Some(0)));
    assert!(!first.is_cluster());
    assert_eq!(known.refresh(1).await.unwrap().version(), 1);

    let new = sentinels.failover();
    assert_ne!(ports(&first), [new]);
    until(&known, "the failover", |now| ports(now) == [new]).await;

    // One of the sentinels may go with it.
    sentinels.kill_sentinel(2);
    let dead = sentinels.kill_master();
    let new = sentinels.new_master(Some(dead));
    let last = until(&known, "the death", |now| ports(now) == [new]).await;
    let mut connection =
        redis::Client::open(last.masters()[0].info.clone()).unwrap().get_connection().unwrap();
    redis::cmd("SET").arg("g").arg(1).exec(&mut connection).unwrap();
}

#[tokio::test]
async fn nobody_who_could_tell_is_an_error() {
    let dead = (free_port(), free_port());
    let plain = Redis::start();
    for (url, class, reason) in [
        (
            format!("redis-cluster://u:hunter2@127.0.0.1:{},127.0.0.1:{}", dead.0, dead.1),
            StoreError::Unreachable,
            "Connection refused",
        ),
        (
            format!("redis-sentinel://u:hunter2@127.0.0.1:{}/main", dead.0),
            StoreError::Unreachable,
            "Connection refused",
        ),
        (
            format!("redis-cluster://127.0.0.1:{}", plain.port()),
            StoreError::Refused,
            "cluster support disabled",
        ),
        (
            format!("redis-sentinel://127.0.0.1:{}/main", plain.port()),
            StoreError::Refused,
            "unknown command",
        ),
    ] {
        let known = servers(&url);
        let (told, detail) = known.refresh(0).await.unwrap_err();
        assert_eq!(told, class, "{url}: {detail}");
        assert!(detail.contains(reason) && detail.contains("127.0.0.1:"), "{url}: {detail}");
        assert!(!format!("{detail}{known:?}").contains("hunter2"), "{detail}{known:?}");
        assert_eq!(known.version(), 0);
    }
    // A single one is where it is, whatever it says.
    let single = servers(&format!("redis://127.0.0.1:{}/2", dead.0));
    assert_eq!(single.refresh(1).await.unwrap().masters()[0].info.redis_settings().db(), 2);
}
