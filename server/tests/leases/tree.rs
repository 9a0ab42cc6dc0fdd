//! Trees of clusters: a root, and lower clusters with their own Redis, all as processes. They share
//! the root's capacity, whichever node renews, and through failures of the root.
//!
//! These tests mostly wait for refreshes, so they run in parallel.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use testkit::cluster::runs_alone;
use testkit::command::tollgate;
use testkit::http::http;
use testkit::lease_clients::{Answer, Holdings, LeaseClients, fair_shares, now_us};
use testkit::{LimitsFile, Node, Redis, eventually, free_port};

const SECOND: i64 = 1_000_000;

const CONVERGED: Duration = Duration::from_secs(20);

/// One template for everything.
fn limits(capacity: f64, lease_s: u32, refresh_s: u32, safe_capacity: &str) -> String {
    format!(
        "resources: [{{ identifier_glob: '*', capacity: {capacity}, {safe_capacity} \
         algorithm: {{ kind: FAIR_SHARE, lease_length: {lease_s}, refresh_interval: {refresh_s}, \
         learning_mode_duration: 0 }} }}]"
    )
}

/// A cluster of two nodes on one Redis, with a parent.
struct Lower {
    nodes: Vec<Node>,
    redis: Redis,
    _limits: LimitsFile,
}

impl Lower {
    fn start(id: &str, parents: &[String], limits: &str) -> Self {
        let redis = Redis::start();
        // An old birth, so that the store does not learn.
        redis::cmd("SET").arg("o").arg(1).exec(&mut redis.connection()).unwrap();
        let (limits, url) = (LimitsFile::new(limits), redis.url());
        let node = |number: usize| {
            let name = format!("{id}-{number}");
            let mut args = vec!["--store", &url, "--store-timeout", "2s"];
            args.extend(["--cluster-id", id, "--node-id", &name]);
            parents.iter().for_each(|parent| args.extend(["--parent", parent]));
            Node::start(&limits.path(), &args)
        };
        Self { nodes: (0..2).map(node).collect(), redis, _limits: limits }
    }

    fn clients(
        &self,
        count: usize,
        wants: impl Fn(usize) -> f64 + Send + Sync + 'static,
    ) -> LeaseClients {
        self.clients_of("db.r", count, wants)
    }

    fn clients_of(
        &self,
        resource: &str,
        count: usize,
        wants: impl Fn(usize) -> f64 + Send + Sync + 'static,
    ) -> LeaseClients {
        let targets: Vec<_> = self.nodes.iter().map(|node| node.grpc).collect();
        LeaseClients::start(&targets, "client", count, resource, wants)
    }

    /// Number of the node that renews.
    fn renewing(&self) -> Option<usize> {
        let found: Option<String> =
            redis::cmd("GET").arg("t").query(&mut self.redis.connection()).unwrap();
        found.and_then(|name| name.rsplit_once('-')?.1.parse().ok())
    }
}

/// A cluster's lease, as shown by the root.
#[derive(Clone, Debug, PartialEq)]
struct Held {
    wants: f64,
    has: f64,
    subclients: u64,
    expiry_s: i64,
}

fn held(root: std::net::SocketAddr, cluster: &str) -> Option<Held> {
    let page = http(root, "GET", "/debug/resource.json?id=db.r", b"");
    if page.status == 404 {
        return None;
    }
    let page = page.json();
    let holders = page["holders"].as_array().unwrap();
    let one = holders.iter().find(|one| one["id"] == cluster)?;
    assert_eq!(one["kind"], "server", "{one}");
    Some(Held {
        wants: one["wants"].as_f64().unwrap(),
        has: one["has"].as_f64().unwrap(),
        subclients: one["subclients"].as_u64().unwrap(),
        expiry_s: one["expires_at_s"].as_i64().unwrap(),
    })
}

/// Polls a cluster's lease in a background thread.
struct Watch {
    stop: Arc<AtomicBool>,
    seen: thread::JoinHandle<Vec<(i64, Held)>>,
}

impl Watch {
    fn start(root: &Node, cluster: &'static str) -> Self {
        let (stop, root) = (Arc::new(AtomicBool::new(false)), root.http);
        let stopped = Arc::clone(&stop);
        let seen = thread::spawn(move || {
            let mut seen = Vec::new();
            while !stopped.load(Ordering::Relaxed) {
                // Taken before the request: the answer is at least as new.
                let at = now_us();
                seen.extend(held(root, cluster).map(|held| (at, held)));
                thread::sleep(Duration::from_millis(30));
            }
            seen
        });
        Self { stop, seen }
    }

    fn finish(self) -> Vec<(i64, Held)> {
        self.stop.store(true, Ordering::Relaxed);
        self.seen.join().unwrap()
    }
}

fn last(fleet: &LeaseClients, clients: usize) -> Vec<f64> {
    (0..clients).map(|one| fleet.last(one).map_or(f64::NAN, |one| one.capacity)).collect()
}

fn near(has: &[f64], shares: &[f64]) -> bool {
    has.iter().zip(shares).all(|(has, share)| (has - share).abs() <= 1e-9 * share)
}

/// Asserts that no lease of a client outlives its cluster's lease. Returns the number of checks.
fn none_outlives(answers: &[Answer], seen: &[(i64, Held)]) -> usize {
    let mut checked = 0;
    for one in answers.iter().filter(|one| one.capacity > 0.0) {
        if let Some((_, held)) = seen.iter().find(|(at, _)| *at >= one.got) {
            assert!(one.expiry <= held.expiry_s * SECOND, "{one:?} of {held:?}");
            checked += 1;
        }
    }
    checked
}

/// Bands of a cluster as stored by the root: priority, subclients, wants.
fn bands(root: &Redis, cluster: &str) -> Vec<(i64, u32, f64)> {
    let field = [&[254], cluster.as_bytes()].concat();
    let mut connection = root.connection();
    let value: Vec<u8> =
        redis::cmd("HGET").arg("h{db.r}").arg(field).query(&mut connection).unwrap();
    let bands = value[12..].chunks_exact(20).map(|band| {
        let priority = i64::from_le_bytes(band[..8].try_into().unwrap());
        let subclients = u32::from_le_bytes(band[8..12].try_into().unwrap());
        (priority, subclients, f64::from_le_bytes(band[12..].try_into().unwrap()))
    });
    bands.collect()
}

#[test]
fn two_clusters_share_what_the_root_has() {
    const SOUTH: [f64; 4] = [50.0, 50.0, 50.0, 10.0];
    let store = Redis::start();
    let file = LimitsFile::new(&limits(120.0, 20, 4, ""));
    let root = Node::start(&file.path(), &["--store", &store.url(), "--store-timeout", "2s"]);
    let parents = [root.grpc.to_string()];
    // A cluster with a parent ignores the capacity in its own file. Leases of 60 seconds are longer
    // than its own.
    let south = Lower::start("south", &parents, &limits(1e6, 60, 30, ""));
    // The other cluster takes all settings from the root.
    let north = Lower::start("north", &parents, "global_default_bucket: { size: 1 }");
    let watches = [Watch::start(&root, "south"), Watch::start(&root, "north")];
    let began = Instant::now();
    let fleets = [south.clients(4, |client| SOUTH[client]), north.clients(2, |_| 100.0)];

    // Shares by subclients: a sixth of the capacity each; one client in the south wants less.
    let shares = [fair_shares(&SOUTH, 80.0), vec![20.0, 20.0]];
    eventually("all have their shares", CONVERGED, || {
        near(&last(&fleets[0], 4), &shares[0]) && near(&last(&fleets[1], 2), &shares[1])
    });
    let took = began.elapsed();
    let south_held = held(root.http, "south").unwrap();
    let north_held = held(root.http, "north").unwrap();
    assert_eq!((south_held.wants, south_held.subclients), (160.0, 4));
    assert_eq!((north_held.wants, north_held.subclients), (200.0, 2));
    assert!(near(&[south_held.has, north_held.has], &[80.0, 40.0]));
    // Clients with even numbers have priority 0, others 1.
    assert_eq!(bands(&store, "south"), [(0, 2, 100.0), (1, 2, 60.0)]);
    assert_eq!(bands(&store, "north"), [(0, 1, 100.0), (1, 1, 100.0)]);
    // Several renewals of four seconds each must be observed.
    thread::sleep(Duration::from_secs(5).saturating_sub(took));

    let records = fleets.map(LeaseClients::finish);
    for (record, watch) in records.iter().zip(watches) {
        assert!(record.failures.is_empty(), "{:?}", record.failures[0]);
        let seen = watch.finish();
        let checked = none_outlives(&record.answers, &seen);
        assert!(checked > 4, "{checked} leases checked");
        // Refresh intervals: 4 s between servers, 2 s for clients, 1 s until the root has answered.
        let told: BTreeSet<i64> = record.answers.iter().map(|one| one.refresh_s).collect();
        assert_eq!(told, BTreeSet::from([1, 2]));
        let renewed: BTreeSet<i64> = seen.iter().map(|(_, held)| held.expiry_s).collect();
        let renewed: Vec<i64> = renewed.into_iter().collect();
        let steps: Vec<i64> = renewed.windows(2).map(|pair| pair[1] - pair[0]).collect();
        assert!(
            !steps.is_empty() && steps.iter().all(|&step| (4..=5).contains(&step)),
            "{steps:?}"
        );
        println!(
            "{checked} leases of clients, none longer than the cluster's, renewed every {steps:?} s"
        );
    }
    println!("all shares after {took:.1?}, the root's refresh interval being 4 s");
    let holdings = Holdings::of(&[&records[0].answers, &records[1].answers]);
    let (_, high) = holdings.range(0, now_us());
    assert!(high <= 120.0 * (1.0 + 1e-9), "clients held {high} of 120");
}

#[test]
fn demand_jumps_between_clusters_and_a_renewing_node_dies() {
    const CLIENTS: usize = 30;
    const CAPACITY: f64 = 1000.0;
    let file = LimitsFile::new(&limits(CAPACITY, 20, 2, ""));
    let root = Node::start(&file.path(), &[]);
    let parents = [root.grpc.to_string()];
    let mut lower =
        ["south", "north"].map(|id| Lower::start(id, &parents, &limits(1.0, 20, 1, "")));
    let watch = Watch::start(&root, "south");
    let demand: Arc<[AtomicI64; 2]> = Arc::default();
    let fleets = [0, 1].map(|at: usize| {
        let demand = Arc::clone(&demand);
        lower[at].clients(CLIENTS, move |client| {
            demand[at].load(Ordering::Relaxed) as f64 * (1.0 + client as f64)
        })
    });
    let want = |phase: [i64; 2]| {
        demand.iter().zip(phase).for_each(|(to, wants)| to.store(wants, Ordering::Relaxed));
    };
    // Multiplied by 465, the demand is between half of the capacity and far more, or zero.
    for phase in [[9, 1], [1, 9], [9, 9], [0, 5], [5, 0], [1, 1], [9, 9], [0, 9]] {
        want(phase);
        // Each phase lasts slightly longer than the refresh interval.
        thread::sleep(Duration::from_millis(1300));
    }
    want([9, 5]);
    // Lets the demand of the last phase spread.
    thread::sleep(Duration::from_secs(1));
    // There is no renewing node between two turns.
    let mut dead = None;
    eventually("a node renews", Duration::from_secs(2), || {
        dead = lower[0].renewing();
        dead.is_some()
    });
    let dead = dead.unwrap();
    lower[0].nodes[dead].kill();
    let killed = Instant::now();
    eventually("the other renews", Duration::from_secs(2), || {
        lower[0].renewing().is_some_and(|node| node != dead)
    });
    let taken_over = killed.elapsed();
    let began = Instant::now();
    let all = || fleets.iter().map(LeaseClients::holds).sum::<f64>();
    // Longer than any refresh interval.
    let mut since = Instant::now();
    eventually("all capacity stays in use", CONVERGED, || {
        if all() < 0.999 * CAPACITY {
            since = Instant::now();
        }
        since.elapsed() >= Duration::from_millis(3500)
    });
    let settled = since - began;
    let used = now_us() - 3 * SECOND;
    let records = fleets.map(LeaseClients::finish);
    let end = now_us();

    let holdings = Holdings::of(&[&records[0].answers, &records[1].answers]);
    let (_, high) = holdings.range(0, end);
    let (low, _) = holdings.range(used, end);
    let seen = watch.finish();
    let checked = none_outlives(&records[0].answers, &seen);
    // The age follows from the expiry, which is rounded down.
    let age =
        |(at, held): &(i64, Held)| (at - (held.expiry_s - 20) * SECOND) as f64 / SECOND as f64;
    let oldest = seen.iter().filter(|(_, held)| held.wants > 0.0).map(age).fold(0.0, f64::max);
    println!(
        "{} leases of clients, never more than {:.6} % of the capacity; the other node renewed \
         {taken_over:.2?} after the kill, no lease of the cluster got older than {oldest:.1} s; \
         all was used {settled:.1?} later, and {:.4} % of it went on being; {checked} leases \
         of clients not longer than the cluster's",
        records.iter().map(|record| record.answers.len()).sum::<usize>(),
        100.0 * high / CAPACITY,
        100.0 * low / CAPACITY,
    );
    assert!(high <= CAPACITY * (1.0 + 1e-9), "clients held {high} of {CAPACITY}");
    assert!(high >= 0.999 * CAPACITY && low >= 0.999 * CAPACITY, "{low} to {high} were used");
    // A lease lasts for 20 s. Beside other tests its renewal may be held up.
    let most = if runs_alone() { 2.0 + 1.0 + 1.5 } else { 20.0 };
    assert!(oldest <= most, "a lease was {oldest} s old");
    for failure in records.iter().flat_map(|record| &record.failures) {
        assert_eq!(failure.target, dead, "{failure:?}");
    }
}

#[test]
#[ignore = "waits long, alone: scripts/full.sh --only slow"]
fn a_root_that_goes_and_comes_back() {
    const CLIENTS: usize = 5;
    let file = LimitsFile::new(&limits(100.0, 5, 1, "safe_capacity: 10,"));
    let port = free_port();
    let mut root = Node::start_at(port, &file.path(), &[]);
    // The first address of the parent is dead.
    let parents = [format!("127.0.0.1:{}", free_port()), root.grpc.to_string()];
    let south = Lower::start("south", &parents, &limits(1.0, 30, 1, ""));
    let wanted = Arc::new(AtomicI64::new(50));
    let wants = Arc::clone(&wanted);
    // Makes the cluster find the live address.
    let other = south.clients_of("db.other", 1, |_| 1.0);
    eventually("a lease", CONVERGED, || other.holds() > 0.0);
    other.finish();

    // A resource that is new to the cluster: no capacity at first, but soon.
    let alone = south.clients_of("db.new", 1, |_| 1.0);
    eventually("a lease", CONVERGED, || alone.holds() > 0.0);
    let alone = alone.finish().answers;
    assert!(alone[0].capacity == 0.0 && alone[0].refresh_s == 1, "{:?}", alone[0]);
    let first = alone.iter().find(|one| one.capacity > 0.0).unwrap();
    let first_lease = (first.got - alone[0].sent) as f64 / SECOND as f64;
    assert!(first_lease <= 1.5, "first capacity after {first_lease} s");

    let fleet = south.clients(CLIENTS, move |_| wants.load(Ordering::Relaxed) as f64);
    eventually("equal shares", CONVERGED, || near(&last(&fleet, CLIENTS), &[20.0; CLIENTS]));
    let expiry = held(root.http, "south").unwrap().expiry_s * SECOND;
    root.kill();
    let killed = now_us();
    let until = |moment: i64| {
        thread::sleep(Duration::from_micros(u64::try_from(moment - now_us()).unwrap_or(0)));
    };
    // The lease may have been renewed once more. Real time passes until it expires.
    until(expiry + 5 * SECOND);
    let (low, high) = fleet.look(|record| {
        let holdings = Holdings::of(&[&record.answers]);
        let kept = holdings.range(killed, expiry - 1);
        let safe = holdings.range(expiry + 4 * SECOND, now_us());
        assert!(kept.0 >= 99.9 && kept.1 <= 100.0 * (1.0 + 1e-9), "{kept:?} were held");
        safe
    });
    assert!(low >= 9.99 && high <= 10.0 * (1.0 + 1e-9), "{low} to {high}, not the safe 10");

    root = Node::start_at(port, &file.path(), &[]);
    let back = Instant::now();
    eventually("all is used again", CONVERGED, || fleet.holds() >= 99.9);
    let recovered = back.elapsed();

    // On a busy machine a node may lose its turn to renew. The next node does not know what is to
    // be returned, so the lease expires instead. Hence several attempts.
    let given_back = (0..3).find_map(|_| {
        wanted.store(50, Ordering::Relaxed);
        eventually("all is used", CONVERGED, || fleet.holds() >= 99.9);
        wanted.store(0, Ordering::Relaxed);
        eventually("all was released", CONVERGED, || fleet.holds() == 0.0);
        let released = Instant::now();
        while released.elapsed() < Duration::from_millis(1500) {
            if held(root.http, "south").is_none() {
                return Some(released.elapsed());
            }
            thread::sleep(Duration::from_millis(10));
        }
        None
    });
    println!(
        "first capacity after {first_lease:.2} s; kept for {:.1} s without the root, then the \
         safe {high}; all of it {recovered:.1?} after the root was back; given back {:.2?} after \
         the last client's release",
        (expiry - killed) as f64 / SECOND as f64,
        given_back.expect("the lease is not given back"),
    );
    let record = fleet.finish();
    assert!(record.failures.is_empty(), "{:?}", record.failures[0]);
}

#[test]
fn a_parent_requires_a_cluster_id() {
    let file = LimitsFile::new(&limits(1.0, 20, 1, ""));
    let path = file.path();
    let args = ["serve", "--limits", path.to_str().unwrap(), "--parent", "127.0.0.1:1"];
    let listen = ["--grpc-listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0"];
    let done = tollgate(&[&args[..], &listen].concat());
    assert_ne!(done.code, 0);
    let said = done.stderr + &done.stdout;
    for part in ["--parent", "--cluster-id", "--advertise"] {
        assert!(said.contains(part), "{part} is not in {said:?}");
    }
}
