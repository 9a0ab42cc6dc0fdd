//! Clients of capacity leases: each asks, holds what it gets and refreshes it when it is told
//! to, over gRPC, and all that they were told is on record.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::runtime::Runtime;
use tokio::task::JoinHandle;
use tollgate_proto::doorman::capacity_client::CapacityClient;
use tollgate_proto::doorman::{GetCapacityRequest, Lease, ReleaseCapacityRequest, ResourceRequest};
use tonic::transport::{Channel, Endpoint};

/// Microseconds since the epoch, as expiries count.
pub fn now_us() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_micros() as i64
}

/// One answer to one client.
#[derive(Clone, Debug)]
pub struct Answer {
    /// To whom.
    pub client: usize,
    /// By which of the targets.
    pub target: usize,
    /// When it was first asked for; there may have been tries that failed in between.
    pub sent: i64,
    /// When it was there.
    pub got: i64,
    /// The lease; nothing where one was given back.
    pub capacity: f64,
    /// Until when it holds, in microseconds since the epoch like all times here.
    pub expiry: i64,
    /// When to ask again, in seconds.
    pub refresh_s: i64,
    /// What may be used without a lease.
    pub safe_capacity: Option<f64>,
    /// The store learns.
    pub learning: bool,
    /// Decided without the store.
    pub degraded: bool,
}

/// A call that failed.
#[derive(Clone, Debug)]
pub struct Failure {
    /// Whose.
    pub client: usize,
    /// At which of the targets.
    pub target: usize,
    /// When.
    pub at: i64,
    /// Why.
    pub status: tonic::Status,
}

/// All that clients were told.
#[derive(Default)]
pub struct Record {
    /// In the order in which they came.
    pub answers: Vec<Answer>,
    /// The same.
    pub failures: Vec<Failure>,
}

/// What a client wants at a moment, from its number; 0 gives its lease back.
type Wants = dyn Fn(usize) -> f64 + Send + Sync;

/// Clients at work.
pub struct Fleet {
    runtime: Runtime,
    stop: Arc<AtomicBool>,
    tasks: Vec<JoinHandle<()>>,
    record: Arc<Mutex<Record>>,
}

impl Fleet {
    /// Lets clients loose on the targets, dealt out in turn, all within their first second.
    /// They are called `name 0`, …, their priority is their number modulo 2.
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
        let all = |target| (0..CONNECTIONS).map(|_| connect(target)).collect();
        let channels: Vec<Vec<Channel>> = targets.iter().map(all).collect();
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

    /// Looks at what they were told so far.
    pub fn look<T>(&self, look: impl FnOnce(&Record) -> T) -> T {
        look(&self.record.lock().unwrap())
    }

    /// The last answer to one of them.
    pub fn last(&self, client: usize) -> Option<Answer> {
        self.look(|record| record.answers.iter().rfind(|one| one.client == client).cloned())
    }

    /// What they hold together at the moment.
    pub fn holds(&self) -> f64 {
        let now = now_us();
        self.look(|record| Holdings::of(&[&record.answers]).at(now))
    }

    /// Tells them to stop, and hands over the record.
    pub fn finish(mut self) -> Record {
        self.stop.store(true, Ordering::Relaxed);
        for task in std::mem::take(&mut self.tasks) {
            task.abort();
            // One that was cut short is as good.
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
        let [one] = response.response.as_slice() else { panic!("{response:?}") };
        self.held = Some(one.gets);
        Ok(Answer {
            client,
            target,
            sent,
            got: now_us(),
            capacity: one.gets.capacity,
            expiry: one.gets.expiry_time * 1_000_000,
            refresh_s: one.gets.refresh_interval,
            safe_capacity: one.safe_capacity,
            learning: one.learning_until.is_some(),
            degraded: one.degraded(),
        })
    }
}

/// What clients held together, at every moment.
///
/// The moment of a decision is somewhere between asking and being told. A client is held to
/// count on more only once it was told of it, and on less from when it asked: so this is never
/// more than what was decided adds up to, and no delay on the way makes it look like too much.
pub struct Holdings(Vec<(i64, f64)>);

impl Holdings {
    /// Of several fleets.
    pub fn of(fleets: &[&[Answer]]) -> Self {
        let mut changes = Vec::new();
        for answers in fleets {
            let clients = answers.iter().map(|one| one.client + 1).max().unwrap_or(0);
            let mut last: Vec<Option<&Answer>> = vec![None; clients];
            for one in *answers {
                let before = last[one.client].replace(one);
                let had = before.map_or(0.0, |before| before.capacity);
                let from = if one.capacity < had { one.sent } else { one.got };
                if let Some(before) = before {
                    changes.push((from.min(before.expiry), -had));
                }
                changes.push((from.min(one.expiry), one.capacity));
            }
            let ends = last.iter().flatten();
            changes.extend(ends.map(|one| (one.expiry, -one.capacity)));
        }
        // What is lost at a moment, before what is gained.
        changes.sort_by(|a, b| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)));
        let mut sum = 0.0;
        for (_, change) in &mut changes {
            sum += *change;
            *change = sum;
        }
        // Within one moment only the last counts.
        changes.reverse();
        changes.dedup_by_key(|(at, _)| *at);
        changes.reverse();
        Self(changes)
    }

    /// At one moment.
    pub fn at(&self, moment: i64) -> f64 {
        let past = self.0.partition_point(|(at, _)| *at <= moment);
        past.checked_sub(1).map_or(0.0, |at| self.0[at].1)
    }

    /// The least and the most from one moment to another.
    pub fn range(&self, from: i64, to: i64) -> (f64, f64) {
        let within = self.0.iter().filter(|(at, _)| (from..=to).contains(at));
        let start = self.at(from);
        within.fold((start, start), |(low, high), (_, sum)| (low.min(*sum), high.max(*sum)))
    }

    /// Every moment of change within a time, and what was held from then on.
    pub fn changes(&self, from: i64, to: i64) -> impl Iterator<Item = (i64, f64)> {
        self.0.iter().copied().filter(move |(at, _)| (from..=to).contains(at))
    }
}

/// Weighted max-min with weights of 1: what each gets who wants that of a capacity.
pub fn fair_shares(wants: &[f64], capacity: f64) -> Vec<f64> {
    let mut sorted: Vec<f64> = wants.to_vec();
    sorted.sort_by(f64::total_cmp);
    let (mut left, mut level) = (capacity, f64::INFINITY);
    for (at, want) in sorted.iter().enumerate() {
        let equal = left / (sorted.len() - at) as f64;
        if *want > equal {
            level = equal;
            break;
        }
        left -= want;
    }
    wants.iter().map(|want| want.min(level)).collect()
}
