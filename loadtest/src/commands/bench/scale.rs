//! Nodes on the shards of a Redis Cluster. On a single machine the rate does not show how this
//! scales, so the measure is CPU time per decision.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::time::{Duration, Instant};

use redis::{Connection, cmd};

use crate::commands::bench::args::BenchArgs;
use crate::commands::bench::buckets::fill;
use crate::commands::bench::error::Error;
use crate::commands::bench::plan::Keys;
use crate::commands::bench::process::{Redis, Server, free_port, pause};
use crate::commands::bench::rig::Rig;
use crate::commands::bench::run::{command_line, drive_measured};
use crate::commands::bench::stats::Round;
use crate::measurement::figures::Latency;
use crate::measurement::progress::log_line;

const SLOTS: usize = 16384;

/// Time limit for the servers of a cluster to agree.
const AGREE_TIMEOUT: Duration = Duration::from_secs(30);

/// Connections per node, and callers per connection.
const CALLERS: (usize, usize) = (4, 32);

/// The running clusters by number of nodes and shards; `None` if the node does not support them.
#[derive(Default)]
pub struct Clusters(HashMap<usize, Option<Cluster>>);

impl Clusters {
    /// The cluster of this size, started and filled on first use.
    fn get(&mut self, rig: &Rig, number: usize) -> Result<Option<&mut Cluster>, Error> {
        let cluster = match self.0.entry(number) {
            Entry::Occupied(cluster) => cluster.into_mut(),
            Entry::Vacant(place) => place.insert(Cluster::start(rig, number)?),
        };
        Ok(cluster.as_mut())
    }
}

/// Shards (masters without replicas) and the nodes that use them.
struct Cluster {
    nodes: Vec<Server>,
    shards: Vec<(Redis, Connection)>,
}

impl Cluster {
    /// Starts `number` nodes and shards and fills the buckets. `None` if a node does not start.
    fn start(rig: &Rig, number: usize) -> Result<Option<Self>, Error> {
        let shards = start_shards(rig, number)?;
        let addresses: Vec<&str> = shards.iter().map(|(redis, _)| redis.address.as_str()).collect();
        let url = format!("redis-cluster://{}", addresses.join(","));
        let nodes: Result<Vec<_>, _> = (0..number).map(|_| rig.node(&url)).collect();
        let nodes = match nodes {
            Ok(nodes) => nodes,
            Err(error) => {
                log_line(&format!("left out: {error}"));
                return Ok(None);
            }
        };
        fill(&nodes[0], rig.buckets())?;
        Ok(Some(Self { nodes, shards }))
    }
}

/// Starts `number` servers and joins them to a Redis Cluster, with the slots spread evenly.
fn start_shards(rig: &Rig, number: usize) -> Result<Vec<(Redis, Connection)>, Error> {
    let mut shards = Vec::new();
    let mut buses = Vec::new();
    for _ in 0..number {
        let bus = free_port().map_err(Error::Io)?.to_string();
        let file = format!("cluster-{bus}.conf");
        let args = ["--cluster-enabled", "yes", "--cluster-port", &bus];
        let args = [&args[..], &["--cluster-config-file", &file]].concat();
        let redis = Redis::start(rig.dir(), &args)?;
        let connection = redis.connect()?;
        shards.push((redis, connection));
        buses.push(bus);
    }
    let addresses: Vec<String> = shards.iter().map(|(redis, _)| redis.address.clone()).collect();
    for (at, (_, connection)) in shards.iter_mut().enumerate() {
        let (first, last) = (SLOTS * at / number, SLOTS * (at + 1) / number - 1);
        cmd("CLUSTER").arg("ADDSLOTSRANGE").arg(first).arg(last).exec(connection)?;
        // Distinct epochs avoid a round of conflict resolution.
        cmd("CLUSTER").arg("SET-CONFIG-EPOCH").arg(at + 1).exec(connection)?;
        for (address, bus) in addresses.iter().zip(&buses).take(at) {
            let (host, port) = address.split_once(':').unwrap_or_default();
            cmd("CLUSTER").arg("MEET").arg(host).arg(port).arg(bus).exec(connection)?;
        }
    }
    let started = Instant::now();
    while !agreed(&mut shards)? {
        if started.elapsed() > AGREE_TIMEOUT {
            return Err(Error::Other("the cluster does not agree".to_owned()));
        }
        pause(Duration::from_millis(20));
    }
    Ok(shards)
}

/// Whether every server reports all slots served and all shards known.
fn agreed(shards: &mut [(Redis, Connection)]) -> Result<bool, Error> {
    let number = shards.len();
    for (_, connection) in shards {
        let info: String = cmd("CLUSTER").arg("INFO").query(connection)?;
        let has = |what: String| info.lines().any(|line| line.trim() == what);
        if !has("cluster_state:ok".to_owned()) || !has(format!("cluster_size:{number}")) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Measures `number` nodes on as many shards, with uniform keys.
pub fn measure(
    clusters: &mut Clusters,
    rig: &Rig,
    args: &BenchArgs,
    number: usize,
    round: &mut Round,
) -> Result<(), Error> {
    let Some(Cluster { nodes, shards }) = clusters.get(rig, number)? else { return Ok(()) };
    let mut command_line = command_line(args, Keys::Uniform, rig.buckets());
    let (connections, in_flight) = CALLERS;
    command_line += &format!(" --connections {} --in-flight {in_flight}", number * connections);
    for node in nodes.iter() {
        command_line += &format!(" --target {}", node.address);
    }
    let servers: Vec<u32> = nodes.iter().map(|node| node.process.id()).collect();
    let stores =
        shards.iter_mut().map(|(redis, connection)| (redis.process.id(), connection)).collect();
    let (tally, before, after) = drive_measured(&command_line, &servers, stores)?;
    let (name, decided) = (format!("scale/{number}x{number}"), tally.decided_in_time as f64);
    after.record(before, decided, &name, round);
    let both = after.servers_us + after.stores_us - before.servers_us - before.stores_us;
    round.insert(format!("{name}.both_us"), both / decided.max(1.0));
    round.insert(format!("{name}.rate"), decided / args.seconds);
    let counts = &tally.counts;
    let failed = (counts.failed() + counts.degraded) as f64 / counts.requests().max(1) as f64;
    round.insert(format!("{name}.failed"), failed);
    if let Some(p50_us) = Latency::of(&tally.latency).p50_us {
        round.insert(format!("{name}.p50_us"), p50_us);
    }
    Ok(())
}
