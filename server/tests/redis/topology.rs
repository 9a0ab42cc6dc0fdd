//! Discovery of masters through a Redis Cluster or sentinels, and of their changes.

use std::sync::Arc;
use std::time::{Duration, Instant};

use testkit::fault_proxy::{Fault, FaultProxy};
use testkit::redis_cluster::RedisCluster;
use testkit::sentinel::Sentinels;
use testkit::{PollLimit, Redis, command_stats, free_port, redis_cmd};
use tollgate_server::settings::StoreUrl;
use tollgate_server::store::StoreError;
use tollgate_server::store::redis::{SLOTS, Servers, Topology, slot};

/// Time limit to discover a change after the servers agree on it.
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

/// Ports of the masters.
fn ports(topology: &Topology) -> Vec<u16> {
    let port = |name: &str| name.rsplit_once(':').unwrap().1.parse().unwrap();
    topology.masters().iter().map(|master| port(&master.name)).collect()
}

/// Refreshes until a condition holds.
async fn until(
    servers: &Servers,
    what: &str,
    mut holds: impl FnMut(&Topology) -> bool,
) -> Arc<Topology> {
    let mut limit = PollLimit::new(SOON);
    loop {
        let told = servers.refresh(servers.version()).await;
        if holds(&servers.current()) {
            return servers.current();
        }
        limit.check(&format!("{what}: {told:?}"));
    }
}

/// Asserts that slots map to the servers that serve them, and the tag of each master to itself.
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
        // The master accepts the key, without a redirect.
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

    // A refresh without changes keeps the version; a caller with an old version gets the current
    // one at once.
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
    assert!(before.version() == 1, "the slot stays where it was until the end");
    cluster.finish_migration(migration);
    let port = cluster.ports()[to];
    let served_by = |topology: &Topology, slot| ports(topology)[topology.master_of(slot).unwrap()];
    let topology = until(&known, "the slot moved", |now| served_by(now, moved) == port).await;
    cluster.wait_until_whole();
    check(&topology, &cluster);

    // A replica takes over by a manual failover,
    let replica = cluster.replica_of(0).unwrap();
    cluster.failover(replica);
    let port = cluster.ports()[replica];
    let topology = until(&known, "the failover", |now| ports(now).contains(&port)).await;
    cluster.wait_until_whole();
    check(&topology, &cluster);

    // and after the death of its master.
    let replica = cluster.replica_of(1).unwrap();
    cluster.kill(1);
    let (dead, port) = (cluster.ports()[1], cluster.ports()[replica]);
    testkit::eventually("another takes over", Duration::from_secs(20), || {
        cluster.owner(8000) == Some(replica)
    });
    let topology = until(&known, "the death", |now| ports(now).contains(&port)).await;
    assert!(!ports(&topology).contains(&dead));
    cluster.wait_until_whole();
    check(&topology, &cluster);

    // A new client finds the same topology.
    let other = servers(&cluster.url());
    assert!(other.refresh(0).await.unwrap().masters().len() == 3);
    check(&other.current(), &cluster);
}

#[tokio::test]
async fn concurrent_refreshes_share_one_query() {
    let cluster = RedisCluster::start_with(3, 0);
    let known = Arc::new(servers(&cluster.url()));
    let stats = |number| command_stats(&mut cluster.connection(number), "cluster|info");
    let asked = || (0..3).map(|number| stats(number).calls).sum::<u64>();
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
    // The same without changes.
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
async fn a_cluster_with_an_unassigned_slot_is_used() {
    let cluster = RedisCluster::start_with(3, 0);
    let known = servers(&cluster.url());
    send_to_all(&cluster, "CLUSTER DELSLOTS 7");
    let topology = known.refresh(0).await.unwrap();
    assert_eq!((topology.master_of(7), topology.masters().len()), (None, 3));
    assert!(topology.master_of(6).is_some() && topology.master_of(8).is_some());
}

#[tokio::test]
async fn an_older_view_is_used_only_without_a_newer_one() {
    // Epochs 1 and 3: the first cluster looks like an old view of the second one.
    let (old, mut new) = (RedisCluster::start_with(1, 0), RedisCluster::start_with(3, 0));
    let seeds = [old.urls(), new.urls()].concat();
    // On a busy machine the answer of the first seed may be late.
    let mut limit = PollLimit::new(SOON);
    let known = loop {
        let known = Servers::cluster(&seeds).unwrap();
        if ports(&known.refresh(0).await.unwrap()) == old.ports() {
            break known;
        }
        limit.check("the first seed is asked first");
    };
    let mut sorted = new.ports();
    sorted.sort_unstable();

    // A server that does not see all slots covered is not used,
    send_to_all(&old, "CLUSTER DELSLOTS 7");
    until(&known, "the newer one", |now| ports(now).len() == 3).await;
    send_to_all(&old, "CLUSTER ADDSLOTS 7");
    old.wait_until_whole();

    // but neither is one with an older view.
    send_to_all(&new, "CLUSTER DELSLOTS 7");
    let topology = until(&known, "the hole", |now| now.master_of(7).is_none()).await;
    let mut found = ports(&topology);
    found.sort_unstable();
    assert_eq!(found, sorted);

    (0..3).for_each(|number| new.kill(number));
    until(&known, "the older one", |now| ports(now) == old.ports()).await;
    (0..3).for_each(|number| new.start_again(number));
    until(&known, "the newer one again", |now| ports(now).len() == 3).await;
}

/// Sends a command to every server of a cluster.
fn send_to_all(cluster: &RedisCluster, words: &str) {
    for number in 0..cluster.ports().len() {
        redis_cmd(words).exec(&mut cluster.connection(number)).unwrap();
    }
}

#[tokio::test]
async fn a_server_that_hangs_delays_but_hides_nothing() {
    let cluster = RedisCluster::start_with(3, 0);
    // A slow server must not use up the time of the others.
    let known = servers(&cluster.url()).with_deadline(Duration::from_secs(1));
    known.refresh(0).await.unwrap();
    // One of the three is queried first.
    for number in 0..3 {
        testkit::signal(cluster.pid(number), "STOP");
        let started = Instant::now();
        let told = known.refresh(1).await;
        testkit::signal(cluster.pid(number), "CONT");
        assert_eq!(told.unwrap().version(), 1);
        assert!(started.elapsed() < Duration::from_secs(1), "{:?}", started.elapsed());
    }
}

#[tokio::test]
async fn a_server_far_away_is_heard_where_decisions_may_take_long() {
    let cluster = RedisCluster::start_with(1, 0);
    let network = FaultProxy::to(cluster.ports()[0]);
    network.set(Fault::Delay(Duration::from_millis(150)));
    let of = |timeout| {
        let servers = Servers::cluster(&[network.url()]).unwrap();
        servers.with_deadline(timeout)
    };
    let (error, detail) = of(Duration::from_millis(50)).refresh(0).await.unwrap_err();
    assert_eq!(error, StoreError::Timeout, "{detail}");
    let mut limit = PollLimit::new(SOON);
    let told = loop {
        match of(Duration::from_millis(400)).refresh(0).await {
            Ok(told) => break told,
            Err(error) => limit.check(&format!("{error:?}")),
        }
    };
    assert_eq!(told.masters().len(), 1);
}

#[tokio::test]
async fn a_dead_connection_is_replaced() {
    let cluster = RedisCluster::start_with(1, 0);
    let known = servers(&cluster.url()).with_deadline(Duration::from_secs(1));
    known.refresh(0).await.unwrap();
    let mut kill = redis::cmd("CLIENT");
    kill.arg("KILL").arg("TYPE").arg("normal").arg("SKIPME").arg("yes");
    let killed: u32 = kill.query(&mut cluster.connection(0)).unwrap();
    assert!(killed > 0, "no connection is kept");
    known.refresh(1).await.unwrap();
}

#[tokio::test]
async fn servers_may_announce_themselves_in_any_way() {
    let cluster = RedisCluster::start_with(3, 0);
    let set = |name: &str, value: &str| {
        for number in 0..3 {
            let mut set = redis::cmd("CONFIG");
            set.arg("SET").arg(name).arg(value);
            set.exec(&mut cluster.connection(number)).unwrap();
        }
    };
    // Servers without an endpoint of their own: the address follows from metadata, or is that of
    // the queried server.
    for kind in ["hostname", "unknown-endpoint"] {
        set("cluster-preferred-endpoint-type", kind);
        let known = servers(&cluster.url());
        check(&known.refresh(0).await.unwrap(), &cluster);
        assert!(known.current().masters().iter().all(|m| m.name.starts_with("127.0.0.1:")));
    }
    set("cluster-announce-hostname", "localhost");
    set("cluster-preferred-endpoint-type", "hostname");
    let known = servers(&cluster.url());
    let by_name = |now: &Topology| now.masters().iter().all(|m| m.name.starts_with("localhost:"));
    let named = until(&known, "the names", by_name).await;
    check(&named, &cluster);
}

#[tokio::test]
async fn the_master_of_sentinels_is_found_and_followed() {
    let mut sentinels = Sentinels::start_with(Duration::from_secs(2));
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

    // A sentinel dies together with the master.
    sentinels.wait_until_agreed();
    sentinels.kill_sentinel(2);
    let dead = sentinels.kill_master();
    let new = sentinels.new_master(Some(dead));
    let last = until(&known, "the death", |now| ports(now) == [new]).await;
    let mut connection =
        redis::Client::open(last.masters()[0].info.clone()).unwrap().get_connection().unwrap();
    redis::cmd("SET").arg("g").arg(1).exec(&mut connection).unwrap();
}

#[tokio::test]
async fn no_usable_server_is_an_error() {
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
            format!("redis-cluster://u:hunter2@127.0.0.1:{}", plain.port()),
            StoreError::Refused,
            "authentication failed",
        ),
        (
            format!("redis-sentinel://127.0.0.1:{}/main", plain.port()),
            StoreError::Refused,
            "unknown command",
        ),
    ] {
        let known = servers(&url).with_deadline(Duration::from_secs(1));
        let (told, detail) = known.refresh(0).await.unwrap_err();
        assert_eq!(told, class, "{url}: {detail}");
        assert!(detail.contains(reason) && detail.contains("127.0.0.1:"), "{url}: {detail}");
        assert!(!format!("{detail}{known:?}").contains("hunter2"), "{detail}{known:?}");
        assert_eq!(known.version(), 0);
    }
    // A single server needs no discovery.
    let single = servers(&format!("redis://127.0.0.1:{}/2", dead.0));
    assert_eq!(single.refresh(1).await.unwrap().masters()[0].info.redis_settings().db(), 2);
}
