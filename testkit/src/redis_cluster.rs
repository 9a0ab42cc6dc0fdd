//! A private Redis Cluster: server processes on free ports, set up by Redis commands alone.

use std::time::Duration;

use redis::{Connection, FromRedisValue};

use tollgate_server::store::redis::tag;

use super::cluster::alive;
use super::{LimitsFile, Node, Redis, Servers, eventually, free_port, redis_cmd};

/// Time limit for a cluster to agree on a change.
const AGREEMENT_TIMEOUT: Duration = Duration::from_secs(30);

/// Redis' cluster-node-timeout, in ms: a server that is silent for longer counts as failed.
const NODE_TIMEOUT_MS: &str = "1000";

/// The same where no replica can take over, once the servers agree: a busy machine may hold one up.
const PATIENT_NODE_TIMEOUT_MS: &str = "4000";

const SLOTS: usize = 16384;

/// The servers of a cluster, killed when dropped. Numbers identify them: first the initial masters,
/// each with an equal range of slots, then their replicas.
pub struct RedisCluster {
    servers: Vec<Redis>,
    ids: Vec<String>,
}

impl RedisCluster {
    /// Starts three masters (0 to 2) with a replica each (3 to 5).
    pub fn start() -> Self {
        Self::start_with(3, 3)
    }

    /// Starts masters, and replicas assigned to them round-robin. Waits until all servers agree and
    /// every replica is connected to its master.
    pub fn start_with(masters: usize, replicas: usize) -> Self {
        let servers: Vec<Redis> = (0..masters + replicas).map(|_| server()).collect();
        let ids = servers.iter().map(|server| query(server, "CLUSTER MYID")).collect();
        let cluster = Self { servers, ids };
        for number in 0..masters {
            let first = SLOTS * number / masters;
            let last = SLOTS * (number + 1) / masters - 1;
            cluster.execute(number, &format!("CLUSTER ADDSLOTSRANGE {first} {last}"));
            // Distinct epochs avoid a round of conflict resolution.
            cluster.execute(number, &format!("CLUSTER SET-CONFIG-EPOCH {}", number + 1));
        }
        for (number, server) in cluster.servers.iter().enumerate() {
            let bus: (String, u16) = query(server, "CONFIG GET cluster-port");
            for other in 0..number {
                let meet = format!("CLUSTER MEET 127.0.0.1 {} {}", server.port(), bus.1);
                cluster.execute(other, &meet);
            }
        }
        eventually("the servers know one another", AGREEMENT_TIMEOUT, || {
            cluster.running().all(|server| {
                let nodes: String = query(server, "CLUSTER NODES");
                nodes.lines().count() == cluster.servers.len()
                    && !nodes.contains("handshake")
                    && cluster.ids.iter().all(|id| nodes.contains(id))
            })
        });
        for number in masters..masters + replicas {
            let master = &cluster.ids[(number - masters) % masters];
            let follow = format!("CLUSTER REPLICATE {master}");
            eventually("a replica takes its master", AGREEMENT_TIMEOUT, || {
                redis_cmd(&follow).exec(&mut cluster.connection(number)).is_ok()
            });
        }
        cluster.wait_until_whole();
        if replicas == 0 {
            for number in 0..masters {
                let patient = format!("CONFIG SET cluster-node-timeout {PATIENT_NODE_TIMEOUT_MS}");
                cluster.execute(number, &patient);
            }
        }
        cluster
    }

    /// [`Self::start`] without full slot coverage: a failed master makes only its own slots
    /// unavailable.
    pub fn start_partial() -> Self {
        let cluster = Self::start();
        for number in 0..cluster.servers.len() {
            cluster.execute(number, "CONFIG SET cluster-require-full-coverage no");
        }
        cluster
    }

    /// Adds a master without slots and returns its number.
    pub fn add_master(&mut self) -> usize {
        let new = server();
        let bus: (String, u16) = query(&new, "CONFIG GET cluster-port");
        self.execute(0, &format!("CLUSTER MEET 127.0.0.1 {} {}", new.port(), bus.1));
        self.ids.push(query(&new, "CLUSTER MYID"));
        self.servers.push(new);
        eventually("all know the new one", AGREEMENT_TIMEOUT, || {
            self.running().all(|server| {
                let nodes: String = query(server, "CLUSTER NODES");
                self.ids.iter().all(|id| nodes.contains(id)) && !nodes.contains("handshake")
            })
        });
        self.wait_until_whole();
        self.servers.len() - 1
    }

    /// Starts two nodes with additional arguments, and waits until they count each other and the
    /// store is up.
    pub fn nodes(&self, limits: &LimitsFile, args: &[&str]) -> Vec<Node> {
        let url = self.url();
        let args = [&["--store", &url], args].concat();
        let nodes: Vec<Node> = (0..2).map(|_| Node::start(&limits.path(), &args)).collect();
        for node in &nodes {
            node.wait_for_store();
            eventually("both nodes are counted", AGREEMENT_TIMEOUT, || alive(node) == 2.0);
        }
        nodes
    }

    /// Waits until all running servers serve all slots, agree on the slot assignment, and all
    /// replicas are connected to their masters.
    pub fn wait_until_whole(&self) {
        eventually("the cluster is whole", AGREEMENT_TIMEOUT, || {
            let mut answers = self.running().map(|server| {
                let about: String = query(server, "CLUSTER INFO");
                let replication: String = query(server, "INFO replication");
                let healthy = about.contains("cluster_state:ok")
                    && (replication.contains("role:master")
                        || replication.contains("master_link_status:up"));
                healthy.then(|| slot_ranges(server))
            });
            let first = answers.next().flatten();
            first.is_some() && answers.all(|others| others == first)
        });
    }

    /// Store URL, with all servers.
    pub fn url(&self) -> String {
        let hosts: Vec<String> =
            self.servers.iter().map(|server| format!("127.0.0.1:{}", server.port())).collect();
        format!("redis-cluster://{}", hosts.join(","))
    }

    /// `redis://` URL of each server.
    pub fn urls(&self) -> Vec<String> {
        self.servers.iter().map(Redis::url).collect()
    }

    /// Port of each server.
    pub fn ports(&self) -> Vec<u16> {
        self.servers.iter().map(Redis::port).collect()
    }

    /// Process id of a server.
    pub fn pid(&self, number: usize) -> u32 {
        self.servers[number].pid()
    }

    /// A direct connection to a server, to inspect the data.
    pub fn connection(&self, number: usize) -> Connection {
        self.servers[number].connection()
    }

    /// Kills a server; its data is lost.
    pub fn kill(&mut self, number: usize) {
        self.servers[number].kill();
    }

    /// Restarts a server on its port as the same cluster member, without data.
    pub fn start_again(&mut self, number: usize) {
        self.servers[number].start_again();
    }

    /// Numbers of the masters with slots, in the order of their lowest slots.
    pub fn masters(&self) -> Vec<usize> {
        let mut masters = Vec::new();
        for (_, _, port) in slot_ranges(self.running().next().unwrap()) {
            let number = self.servers.iter().position(|server| server.port() == port).unwrap();
            if !masters.contains(&number) {
                masters.push(number);
            }
        }
        masters
    }

    /// Number of the master that serves `slot`.
    pub fn owner(&self, slot: u16) -> Option<usize> {
        let slot_ranges = slot_ranges(self.running().next().unwrap());
        let (_, _, port) =
            *slot_ranges.iter().find(|slot_range| (slot_range.0..=slot_range.1).contains(&slot))?;
        self.servers.iter().position(|server| server.port() == port)
    }

    /// Highest slot of a master.
    pub fn highest_slot(&self, number: usize) -> Option<u16> {
        let port = self.servers[number].port();
        let slot_ranges = slot_ranges(self.running().next().unwrap());
        slot_ranges
            .into_iter()
            .filter(|slot_range| slot_range.2 == port)
            .map(|slot_range| slot_range.1)
            .max()
    }

    /// A running replica of `master`.
    pub fn replica_of(&self, master: usize) -> Option<usize> {
        let nodes: String = query(&self.servers[master], "CLUSTER NODES");
        let follower = |line: &&str| {
            let mut fields = line.split(' ').skip(2);
            let (flags, of) = (fields.next().unwrap_or_default(), fields.next());
            flags.contains("slave") && !flags.contains("fail") && of == Some(&self.ids[master])
        };
        let id = nodes.lines().find(follower)?.split(' ').next()?;
        self.ids.iter().position(|known| known == id)
    }

    /// Promotes a replica by a manual failover, which loses no data.
    pub fn failover(&self, replica: usize) {
        self.execute(replica, "CLUSTER FAILOVER");
        eventually("the replica is a master", AGREEMENT_TIMEOUT, || {
            let role: String = query(&self.servers[replica], "INFO replication");
            role.contains("role:master")
        });
    }

    /// Starts the migration of a slot: the old master answers ASK for keys that it no longer has,
    /// and new keys are created at the new master.
    pub fn begin_migration(&self, slot: u16, to: usize) -> Migration {
        let from = self.owner(slot).unwrap();
        let (source, target) = (&self.ids[from], &self.ids[to]);
        self.execute(to, &format!("CLUSTER SETSLOT {slot} IMPORTING {source}"));
        self.execute(from, &format!("CLUSTER SETSLOT {slot} MIGRATING {target}"));
        Migration { slot, from, to }
    }

    /// Moves all keys of the slot and returns their number.
    pub fn move_keys(&self, migration: &Migration) -> usize {
        let Migration { slot, from, to } = *migration;
        let mut connection = self.connection(from);
        let keys: Vec<Vec<u8>> = redis_cmd(&format!("CLUSTER GETKEYSINSLOT {slot} 100000"))
            .query(&mut connection)
            .unwrap();
        if !keys.is_empty() {
            let mut migrate = redis_cmd(&format!("MIGRATE 127.0.0.1 {}", self.servers[to].port()));
            migrate.arg(b"").arg(0).arg(10_000).arg("KEYS").arg(&keys);
            migrate.exec(&mut connection).unwrap();
        }
        keys.len()
    }

    /// Completes a migration: the new master owns the slot, and the old one answers MOVED.
    pub fn finish_migration(&self, migration: Migration) {
        let Migration { slot, from, to } = migration;
        let others = self.masters().into_iter().filter(|&other| other != from && other != to);
        // The new master first: otherwise the two would redirect clients to each other.
        for number in [to, from].into_iter().chain(others) {
            self.execute(number, &format!("CLUSTER SETSLOT {slot} NODE {}", self.ids[to]));
        }
    }

    /// Moves a slot and its keys to another master.
    pub fn migrate(&self, slot: u16, to: usize) {
        let migration = self.begin_migration(slot, to);
        self.move_keys(&migration);
        self.finish_migration(migration);
    }

    fn running(&self) -> impl Iterator<Item = &Redis> {
        self.servers.iter().filter(|server| server.runs())
    }

    fn execute(&self, number: usize, command_line: &str) {
        redis_cmd(command_line).exec(&mut self.connection(number)).unwrap();
    }
}

impl Servers for RedisCluster {
    fn store_url(&self) -> String {
        self.url()
    }

    fn masters(&self) -> Vec<Connection> {
        self.masters().into_iter().map(|number| self.connection(number)).collect()
    }

    fn birth_keys(&self) -> Vec<String> {
        let highest = |number: usize| self.highest_slot(number).unwrap();
        let key = |number| format!("o{{{}}}", tag(highest(number)));
        self.masters().into_iter().map(key).collect()
    }
}

/// A slot migration in progress.
#[must_use]
#[derive(Debug)]
pub struct Migration {
    /// The slot.
    pub slot: u16,
    /// Master that owns it until completion.
    pub from: usize,
    /// Master that owns it afterwards.
    pub to: usize,
}

/// A server in cluster mode that has not joined a cluster.
fn server() -> Redis {
    let start = || {
        let bus = free_port().to_string();
        let args = ["--cluster-enabled", "yes", "--cluster-node-timeout", NODE_TIMEOUT_MS];
        let more = ["--cluster-port", &bus, "--repl-diskless-sync-delay", "0"];
        Redis::start_at(free_port(), &[&args[..], &more].concat())
    };
    (0..5).find_map(|_| start()).expect("redis-server does not start in cluster mode")
}

fn query<T: FromRedisValue>(server: &Redis, command_line: &str) -> T {
    redis_cmd(command_line).query(&mut server.connection()).unwrap()
}

/// First slot, last slot and master port of each slot range, as reported by `server`.
fn slot_ranges(server: &Redis) -> Vec<(u16, u16, u16)> {
    let answers: Vec<Vec<redis::Value>> = query(server, "CLUSTER SLOTS");
    let number = |value: &redis::Value| u16::from_redis_value_ref(value).unwrap();
    let slot_range = |entry: &Vec<redis::Value>| {
        let redis::Value::Array(master) = &entry[2] else { panic!("{entry:?}") };
        (number(&entry[0]), number(&entry[1]), number(&master[1]))
    };
    let mut slot_ranges: Vec<_> = answers.iter().map(slot_range).collect();
    slot_ranges.sort_unstable();
    slot_ranges
}
