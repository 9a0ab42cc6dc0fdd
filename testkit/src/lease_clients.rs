//! Lease clients over gRPC: each requests a lease and refreshes it at the interval of its answer.
//! All answers are recorded.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::runtime::Runtime;
use tokio::task::JoinHandle;
use tollgate_proto::doorman::capacity_client::CapacityClient;
use tollgate_proto::doorman::{GetCapacityRequest, Lease, ReleaseCapacityRequest, ResourceRequest};
use tonic::transport::{Channel, Endpoint};

/// Microseconds since the Unix epoch, the clock of lease expiries.
pub fn now_us() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_micros() as i64
}

/// One answer to one client.
#[derive(Clone, Debug)]
pub struct Answer {
    /// Client number.
    pub client: usize,
    /// Index of the target that answered.
    pub target: usize,
    /// Time of the first attempt of the request, in µs since the epoch; earlier attempts may have
    /// failed.
    pub sent: i64,
    /// Time of the answer, in µs since the epoch.
    pub got: i64,
    /// Leased capacity; 0 after a release.
    pub capacity: f64,
    /// Expiry, in µs since the epoch.
    pub expiry: i64,
    /// Refresh interval, in seconds.
    pub refresh_s: i64,
    /// Capacity that may be used without a lease.
    pub safe_capacity: Option<f64>,
    /// Granted in learning mode.
    pub learning: bool,
    /// Granted without the shared store.
    pub degraded: bool,
}

/// A failed call.
#[derive(Clone, Debug)]
pub struct Failure {
    /// Client number.
    pub client: usize,
    /// Index of the target.
    pub target: usize,
    /// Time, in µs since the epoch.
    pub at: i64,
    /// gRPC status.
    pub status: tonic::Status,
}

/// Results of all clients.
#[derive(Default)]
pub struct Record {
    /// Answers in order of arrival.
    pub answers: Vec<Answer>,
    /// Failures in order of arrival.
    pub failures: Vec<Failure>,
}

/// Current wants of a client, by its number; 0 releases its lease.
type Wants = dyn Fn(usize) -> f64 + Send + Sync;

/// BackgroundCommand clients.
pub struct LeaseClients {
    runtime: Runtime,
    stop: Arc<AtomicBool>,
    tasks: Vec<JoinHandle<()>>,
    record: Arc<Mutex<Record>>,
}

impl LeaseClients {
    /// Starts the clients, distributed round-robin over the targets and over the first second. They
    /// are named `<name> 0`, `<name> 1` and so on; their priority is their number modulo 2.
    pub fn start(
        targets: &[SocketAddr],
        name: &str,
        clients: usize,
        resource: &str,
        wants: impl Fn(usize) -> f64 + Send + Sync + 'static,
    ) -> Self {
        const CONNECTIONS: usize = 4;
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.unwrap();
        let connect = |target: &SocketAddr| {
            let endpoint = Endpoint::from_shared(format!("http://{target}")).unwrap();
            let endpoint = endpoint.connect_timeout(Duration::from_secs(5));
            runtime.block_on(endpoint.timeout(Duration::from_secs(10)).connect()).unwrap()
        };
        let connect_all = |target| (0..CONNECTIONS).map(|_| connect(target)).collect();
        let channels: Vec<Vec<Channel>> = targets.iter().map(connect_all).collect();
        let (stop, record) = (Arc::default(), Arc::default());
        let wants: Arc<Wants> = Arc::new(wants);
        let tasks = (0..clients)
            .map(|number| {
                let client = Client {
                    number,
                    id: format!("{name} {number}"),
                    resource: resource.to_owned(),
                    target: number % targets.len(),
                    clients: channels
                        .iter()
                        .map(|to| to[number / targets.len() % to.len()].clone())
                        .map(CapacityClient::new)
                        .collect(),
                    wants: Arc::clone(&wants),
                    held: None,
                    stop: Arc::clone(&stop),
                    record: Arc::clone(&record),
                };
                let wait = Duration::from_secs(1) * number as u32 / clients as u32;
                runtime.spawn(async move {
                    tokio::time::sleep(wait).await;
                    client.run().await;
                })
            })
            .collect();
        Self { runtime, stop, tasks, record }
    }

    /// Reads the record so far.
    pub fn look<T>(&self, look: impl FnOnce(&Record) -> T) -> T {
        look(&self.record.lock().unwrap())
    }

    /// Latest answer to a client.
    pub fn last(&self, client: usize) -> Option<Answer> {
        self.look(|record| record.answers.iter().rfind(|answer| answer.client == client).cloned())
    }

    /// Capacity that all clients hold now.
    pub fn holds(&self) -> f64 {
        let now = now_us();
        self.look(|record| Holdings::of(&[&record.answers]).at(now))
    }

    /// Stops the clients and returns the record.
    pub fn finish(mut self) -> Record {
        self.stop.store(true, Ordering::Relaxed);
        for task in std::mem::take(&mut self.tasks) {
            task.abort();
            // A cancelled task is expected.
            let ended = self.runtime.block_on(task);
            assert!(ended.is_ok() || ended.is_err_and(|error| error.is_cancelled()));
        }
        std::mem::take(&mut self.record.lock().unwrap())
    }
}

struct Client {
    number: usize,
    id: String,
    resource: String,
    target: usize,
    clients: Vec<CapacityClient<Channel>>,
    wants: Arc<Wants>,
    held: Option<Lease>,
    stop: Arc<AtomicBool>,
    record: Arc<Mutex<Record>>,
}

impl Client {
    async fn run(mut self) {
        while !self.stop.load(Ordering::Relaxed) {
            let sent = now_us();
            let answer = loop {
                match self.ask(sent).await {
                    Ok(answer) => break answer,
                    Err(status) => {
                        let (client, target) = (self.number, self.target);
                        let failure = Failure { client, target, at: now_us(), status };
                        self.record.lock().unwrap().failures.push(failure);
                        self.target = (self.target + 1) % self.clients.len();
                        tokio::time::sleep(Duration::from_millis(1)).await;
                    }
                }
            };
            let pause = Duration::from_secs(answer.refresh_s as u64);
            self.record.lock().unwrap().answers.push(answer);
            tokio::time::sleep(pause).await;
        }
    }

    async fn ask(&mut self, sent: i64) -> Result<Answer, tonic::Status> {
        let wants = (self.wants)(self.number);
        let (client_id, resource_id) = (self.id.clone(), self.resource.clone());
        let node = &mut self.clients[self.target];
        let (client, target) = (self.number, self.target);
        if wants <= 0.0 {
            if self.held.is_some() {
                let resource_id = vec![resource_id];
                node.release_capacity(ReleaseCapacityRequest { client_id, resource_id }).await?;
            }
            self.held = None;
            return Ok(Answer {
                client,
                target,
                sent,
                got: now_us(),
                capacity: 0.0,
                expiry: i64::MAX,
                refresh_s: 1,
                safe_capacity: None,
                learning: false,
                degraded: false,
            });
        }
        let resource = ResourceRequest {
            resource_id,
            priority: self.number as i64 % 2,
            has: self.held,
            wants,
        };
        let request = GetCapacityRequest { client_id, resource: vec![resource] };
        let response = node.get_capacity(request).await?.into_inner();
        let [answer] = response.response.as_slice() else { panic!("{response:?}") };
        self.held = Some(answer.gets);
        Ok(Answer {
            client,
            target,
            sent,
            got: now_us(),
            capacity: answer.gets.capacity,
            expiry: answer.gets.expiry_time * 1_000_000,
            refresh_s: answer.gets.refresh_interval,
            safe_capacity: answer.safe_capacity,
            learning: answer.learning_until.is_some(),
            degraded: answer.degraded(),
        })
    }
}

/// Total capacity that the clients held, over time.
///
/// The time of a decision lies between request and answer. An increase counts from the answer on
/// and a decrease from the request on. So the total never exceeds what the servers granted,
/// whatever the network delays.
pub struct Holdings(Vec<(i64, f64)>);

impl Holdings {
    /// Totals over several fleets.
    pub fn of(fleets: &[&[Answer]]) -> Self {
        let mut changes = Vec::new();
        for answers in fleets {
            let clients = answers.iter().map(|answer| answer.client + 1).max().unwrap_or(0);
            let mut last: Vec<Option<&Answer>> = vec![None; clients];
            for answer in *answers {
                let before = last[answer.client].replace(answer);
                let had = before.map_or(0.0, |before| before.capacity);
                let from = if answer.capacity < had { answer.sent } else { answer.got };
                if let Some(before) = before {
                    changes.push((from.min(before.expiry), -had));
                }
                changes.push((from.min(answer.expiry), answer.capacity));
            }
            let ends = last.iter().flatten();
            changes.extend(ends.map(|answer| (answer.expiry, -answer.capacity)));
        }
        // Decreases before increases at the same moment.
        changes.sort_by(|a, b| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)));
        let mut sum = 0.0;
        for (_, change) in &mut changes {
            sum += *change;
            *change = sum;
        }
        // Keep only the last total of each moment.
        changes.reverse();
        changes.dedup_by_key(|(at, _)| *at);
        changes.reverse();
        Self(changes)
    }

    /// Total at `moment`, in µs since the epoch.
    pub fn at(&self, moment: i64) -> f64 {
        let past = self.0.partition_point(|(at, _)| *at <= moment);
        past.checked_sub(1).map_or(0.0, |at| self.0[at].1)
    }

    /// Minimum and maximum between two moments.
    pub fn range(&self, from: i64, to: i64) -> (f64, f64) {
        let within = self.0.iter().filter(|(at, _)| (from..=to).contains(at));
        let start = self.at(from);
        within.fold((start, start), |(low, high), (_, sum)| (low.min(*sum), high.max(*sum)))
    }

    /// Moments of change within an interval, with the total from then on.
    pub fn changes(&self, from: i64, to: i64) -> impl Iterator<Item = (i64, f64)> {
        self.0.iter().copied().filter(move |(at, _)| (from..=to).contains(at))
    }
}

/// Max-min fair shares with equal weights: the allocation of `capacity` to each of `wants`.
pub fn fair_shares(wants: &[f64], capacity: f64) -> Vec<f64> {
    let mut sorted: Vec<f64> = wants.to_vec();
    sorted.sort_by(f64::total_cmp);
    let (mut remaining, mut level) = (capacity, f64::INFINITY);
    for (at, want) in sorted.iter().enumerate() {
        let equal = remaining / (sorted.len() - at) as f64;
        if *want > equal {
            level = equal;
            break;
        }
        remaining -= want;
    }
    wants.iter().map(|want| want.min(level)).collect()
}
