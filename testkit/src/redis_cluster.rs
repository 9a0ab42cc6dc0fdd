//! A Redis Cluster of the test's own: every server a process on a free port, nothing but
//! commands to make it.

use std::time::Duration;

use redis::{Cmd, Connection, FromRedisValue};

use tollgate_server::store::redis::tag;

use super::cluster::alive;
use super::metrics::Scrape;
use super::{LimitsFile, Node, Redis, Servers, eventually, free_port};

/// Longer than a cluster takes to agree on anything.
const PATIENCE: Duration = Duration::from_secs(30);

/// How long a server may be silent before the others count it as gone, in ms.
const NODE_TIMEOUT_MS: &str = "1000";

const SLOTS: usize = 16384;

/// Servers that form a cluster, gone when dropped. They are numbered: the first ones begin as
/// masters, each with a like share of the slots in its turn, the others as their replicas.
pub struct RedisCluster {
    servers: Vec<Redis>,
    ids: Vec<String>,
}

impl RedisCluster {
    /// Three masters, 0 to 2, each with a replica, 3 to 5.
    pub fn start() -> Self {
        Self::start_with(3, 3)
    }

    /// So many masters and replicas, which are dealt out to the masters in turn. Waits until all
    /// servers agree, and every replica follows its master.
    pub fn start_with(masters: usize, replicas: usize) -> Self {
        let servers: Vec<Redis> = (0..masters + replicas).map(|_| server()).collect();
        let ids = servers.iter().map(|server| ask(server, "CLUSTER MYID")).collect();
        let cluster = Self { servers, ids };
        for number in 0..masters {
            let first = SLOTS * number / masters;
            let last = SLOTS * (number + 1) / masters - 1;
            cluster.tell(number, &format!("CLUSTER ADDSLOTSRANGE {first} {last}"));
            // Those that they would else find for themselves, by colliding.
            cluster.tell(number, &format!("CLUSTER SET-CONFIG-EPOCH {}", number + 1));
        }
        for (number, server) in cluster.servers.iter().enumerate() {
            let bus: (String, u16) = ask(server, "CONFIG GET cluster-port");
            for other in 0..number {
                let meet = format!("CLUSTER MEET 127.0.0.1 {} {}", server.port(), bus.1);
                cluster.tell(other, &meet);
            }
        }
        eventually("the servers know one another", PATIENCE, || {
            cluster.running().all(|server| {
                let nodes: String = ask(server, "CLUSTER NODES");
                nodes.lines().count() == cluster.servers.len()
                    && !nodes.contains("handshake")
                    && cluster.ids.iter().all(|id| nodes.contains(id))
            })
        });
        for number in masters..masters + replicas {
            let master = &cluster.ids[(number - masters) % masters];
            let follow = format!("CLUSTER REPLICATE {master}");
            eventually("a replica takes its master", PATIENCE, || {
                command(&follow).exec(&mut cluster.connection(number)).is_ok()
            });
        }
        cluster.wait_until_whole();
        cluster
    }

    /// The same, where a master that is gone takes nothing with it but its own slots.
    pub fn start_partial() -> Self {
        let cluster = Self::start();
        for number in 0..cluster.servers.len() {
            cluster.tell(number, "CONFIG SET cluster-require-full-coverage no");
        }
        cluster
    }

    /// Adds a master without any slot, and tells its number.
    pub fn add_master(&mut self) -> usize {
        let new = server();
        let bus: (String, u16) = ask(&new, "CONFIG GET cluster-port");
        self.tell(0, &format!("CLUSTER MEET 127.0.0.1 {} {}", new.port(), bus.1));
        self.ids.push(ask(&new, "CLUSTER MYID"));
        self.servers.push(new);
        eventually("all know the new one", PATIENCE, || {
            self.running().all(|server| {
                let nodes: String = ask(server, "CLUSTER NODES");
                self.ids.iter().all(|id| nodes.contains(id)) && !nodes.contains("handshake")
            })
        });
        self.wait_until_whole();
        self.servers.len() - 1
    }

    /// Starts two nodes on it, with further arguments, and waits until they know of one another
    /// and of all masters.
    pub fn nodes(&self, limits: &LimitsFile, args: &[&str]) -> Vec<Node> {
        let url = self.url();
        let args = [&["--store", &url], args].concat();
        let nodes: Vec<Node> = (0..2).map(|_| Node::start(&limits.path(), &args)).collect();
        for node in &nodes {
            let up = || Scrape::of(node.http).sum("tollgate_store_up", &[]) == 1.0;
            eventually("two nodes on a cluster", PATIENCE, || up() && alive(node) == 2.0);
        }
        nodes
    }

    /// Waits until every server that runs serves all slots, agrees with the others on who has
    /// which, and, if it is a replica, is in line with its master.
    pub fn wait_until_whole(&self) {
        eventually("the cluster is whole", PATIENCE, || {
            let mut told = self.running().map(|server| {
                let about: String = ask(server, "CLUSTER INFO");
                let replication: String = ask(server, "INFO replication");
                let sound = about.contains("cluster_state:ok")
                    && (replication.contains("role:master")
                        || replication.contains("master_link_status:up"));
                sound.then(|| shares(server))
            });
            let first = told.next().flatten();
            first.is_some() && told.all(|others| others == first)
        });
    }

    /// `redis-cluster://…`, of all its servers.
    pub fn url(&self) -> String {
        let hosts: Vec<String> =
            self.servers.iter().map(|server| format!("127.0.0.1:{}", server.port())).collect();
        format!("redis-cluster://{}", hosts.join(","))
    }

    /// `redis://…` of each server.
    pub fn urls(&self) -> Vec<String> {
        self.servers.iter().map(Redis::url).collect()
    }

    /// The port of each server.
    pub fn ports(&self) -> Vec<u16> {
        self.servers.iter().map(Redis::port).collect()
    }

    /// The process id of one.
    pub fn pid(&self, number: usize) -> u32 {
        self.servers[number].pid()
    }

    /// A plain connection to one, for looking inside.
    pub fn connection(&self, number: usize) -> Connection {
        self.servers[number].connection()
    }

    /// Kills one with everything that it holds.
    pub fn kill(&mut self, number: usize) {
        self.servers[number].kill();
    }

    /// Starts one again on its port, as the same member, but without data.
    pub fn start_again(&mut self, number: usize) {
        self.servers[number].start_again();
    }

    /// The masters that serve slots, by their lowest one, as any server that runs sees it.
    pub fn masters(&self) -> Vec<usize> {
        let mut masters = Vec::new();
        for (_, _, port) in shares(self.running().next().unwrap()) {
            let number = self.servers.iter().position(|server| server.port() == port).unwrap();
            if !masters.contains(&number) {
                masters.push(number);
            }
        }
        masters
    }

    /// Who serves a slot, as any server that runs sees it.
    pub fn owner(&self, slot: u16) -> Option<usize> {
        let shares = shares(self.running().next().unwrap());
        let (_, _, port) = *shares.iter().find(|share| (share.0..=share.1).contains(&slot))?;
        self.servers.iter().position(|server| server.port() == port)
    }

    /// The highest slot of one, as any server that runs sees it.
    pub fn highest_slot(&self, number: usize) -> Option<u16> {
        let port = self.servers[number].port();
        let shares = shares(self.running().next().unwrap());
        shares.into_iter().filter(|share| share.2 == port).map(|share| share.1).max()
    }

    /// A replica that runs of a master that does.
    pub fn replica_of(&self, master: usize) -> Option<usize> {
        let nodes: String = ask(&self.servers[master], "CLUSTER NODES");
        let follower = |line: &&str| {
            let mut fields = line.split(' ').skip(2);
            let (flags, of) = (fields.next().unwrap_or_default(), fields.next());
            flags.contains("slave") && !flags.contains("fail") && of == Some(&self.ids[master])
        };
        let id = nodes.lines().find(follower)?.split(' ').next()?;
        self.ids.iter().position(|known| known == id)
    }

    /// Makes a replica change places with its master, which loses nothing.
    pub fn failover(&self, replica: usize) {
        self.tell(replica, "CLUSTER FAILOVER");
        eventually("the replica is a master", PATIENCE, || {
            let role: String = ask(&self.servers[replica], "INFO replication");
            role.contains("role:master")
        });
    }

    /// Begins to move a slot to another master, up to where the old one answers ASK for keys
    /// that it has no more, and keys begin their life at the new one.
    pub fn begin_migration(&self, slot: u16, to: usize) -> Migration {
        let from = self.owner(slot).unwrap();
        let (source, target) = (&self.ids[from], &self.ids[to]);
        self.tell(to, &format!("CLUSTER SETSLOT {slot} IMPORTING {source}"));
        self.tell(from, &format!("CLUSTER SETSLOT {slot} MIGRATING {target}"));
        Migration { slot, from, to }
    }

    /// Moves all keys that the slot holds, and tells how many.
    pub fn move_keys(&self, migration: &Migration) -> usize {
        let Migration { slot, from, to } = *migration;
        let mut connection = self.connection(from);
        let keys: Vec<Vec<u8>> = command(&format!("CLUSTER GETKEYSINSLOT {slot} 100000"))
            .query(&mut connection)
            .unwrap();
        if !keys.is_empty() {
            let mut migrate = command(&format!("MIGRATE 127.0.0.1 {}", self.servers[to].port()));
            migrate.arg(b"").arg(0).arg(10_000).arg("KEYS").arg(&keys);
            migrate.exec(&mut connection).unwrap();
        }
        keys.len()
    }

    /// Ends it: the slot is the new master's, and the old one answers MOVED.
    pub fn finish_migration(&self, migration: Migration) {
        let Migration { slot, from, to } = migration;
        let others = self.masters().into_iter().filter(|&other| other != from && other != to);
        // The new master first, as the old one would else send its callers in a circle.
        for number in [to, from].into_iter().chain(others) {
            self.tell(number, &format!("CLUSTER SETSLOT {slot} NODE {}", self.ids[to]));
        }
    }

    /// Moves a slot with its keys to another master.
    pub fn migrate(&self, slot: u16, to: usize) {
        let migration = self.begin_migration(slot, to);
        self.move_keys(&migration);
        self.finish_migration(migration);
    }

    fn running(&self) -> impl Iterator<Item = &Redis> {
        self.servers.iter().filter(|server| server.runs())
    }

    fn tell(&self, number: usize, words: &str) {
        command(words).exec(&mut self.connection(number)).unwrap();
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

/// A slot under way from one master to another.
#[must_use]
#[derive(Debug)]
pub struct Migration {
    /// Which.
    pub slot: u16,
    /// Who serves it until the end.
    pub from: usize,
    /// Who serves it then.
    pub to: usize,
}

/// A server that is in a cluster with nobody yet.
fn server() -> Redis {
    let start = || {
        let bus = free_port().to_string();
        let args = ["--cluster-enabled", "yes", "--cluster-node-timeout", NODE_TIMEOUT_MS];
        let more = ["--cluster-port", &bus, "--repl-diskless-sync-delay", "0"];
        Redis::start_at(free_port(), &[&args[..], &more].concat())
    };
    (0..5).find_map(|_| start()).expect("redis-server does not start in cluster mode")
}

fn command(words: &str) -> Cmd {
    let mut words = words.split(' ');
    let mut command = redis::cmd(words.next().unwrap());
    command.arg(words.collect::<Vec<_>>());
    command
}

fn ask<T: FromRedisValue>(server: &Redis, words: &str) -> T {
    command(words).query(&mut server.connection()).unwrap()
}

/// First and last slot of each share, and the port of its master, as one server sees it.
fn shares(server: &Redis) -> Vec<(u16, u16, u16)> {
    let told: Vec<Vec<redis::Value>> = ask(server, "CLUSTER SLOTS");
    let number = |value: &redis::Value| u16::from_redis_value_ref(value).unwrap();
    let share = |entry: &Vec<redis::Value>| {
        let redis::Value::Array(master) = &entry[2] else { panic!("{entry:?}") };
        (number(&entry[0]), number(&entry[1]), number(&master[1]))
    };
    let mut shares: Vec<_> = told.iter().map(share).collect();
    shares.sort_unstable();
    shares
}
