//! Books of what clients hold for sure, while clients and nodes are killed: no copy is granted twice, and none
//! is lost.

use std::collections::HashMap;
use std::future::Future;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use testkit::{LimitsFile, Node, Redis};
use tokio::runtime::Builder;
use tokio::time::{sleep, timeout};
use tollgate_proto::tollgate::v1::holds_client::HoldsClient;
use tollgate_proto::tollgate::v1::reserve_response::Status as Outcome;
use tollgate_proto::tollgate::v1::{
    EndSessionRequest, KeepAliveRequest, ReleaseRequest, ReserveRequest, ReserveResponse,
    SessionToRenew, TransferRequest,
};
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Response, Status};

const RESOURCE: &str = "job";
const HOLD: &str = "h";

/// How long a client waits for an answer before it asks again.
const PATIENCE: Duration = Duration::from_secs(1);

/// The store counts in whole milliseconds.
const ROUNDING: Duration = Duration::from_millis(2);

/// Domains `d0` to `d3`; the first two are a group.
const DOMAINS: usize = 4;

/// Copies that a client holds until then, whatever happens.
struct Entry {
    domain: usize,
    copies: u64,
    until: Instant,
}

/// What is held, by session.
struct Books {
    /// The most copies of all, of each domain, and of the group.
    limits: [u64; 3],
    ttl: Duration,
    held: Mutex<HashMap<String, Entry>>,
    faults: Mutex<Vec<String>>,
    grants: AtomicU64,
    refusals: AtomicU64,
    handovers: AtomicU64,
}

impl Books {
    fn fault(&self, text: String) {
        self.faults.lock().unwrap().push(text);
    }

    /// A session begins, as of a call that was sent at that time.
    fn begin(&self, session: &str, domain: usize, copies: u64, sent: Instant) {
        let mut held = self.held.lock().unwrap();
        let now = Instant::now();
        held.retain(|_, entry| entry.until > now);
        let until = sent + self.ttl - ROUNDING;
        held.insert(session.to_owned(), Entry { domain, copies, until });
        let sum = |counts: &dyn Fn(usize) -> bool| -> u64 {
            held.values().filter(|entry| counts(entry.domain)).map(|entry| entry.copies).sum()
        };
        let sums = [sum(&|_| true), sum(&|one| one == domain), sum(&|one| one < 2)];
        if sums.iter().zip(self.limits).any(|(sum, limit)| *sum > limit) {
            self.fault(format!("{sums:?} are held, of {:?}", self.limits));
        }
    }

    fn renew(&self, session: &str, sent: Instant) {
        if let Some(entry) = self.held.lock().unwrap().get_mut(session) {
            entry.until = sent + self.ttl - ROUNDING;
        }
    }

    /// The client is about to release what it holds, or has lost it.
    fn end(&self, session: &str) -> Option<Entry> {
        self.held.lock().unwrap().remove(session)
    }

    /// The client is told that it holds nothing.
    fn lose(&self, session: &str, why: &str) {
        let left =
            self.end(session).map(|entry| entry.until.checked_duration_since(Instant::now()));
        if let Some(Some(left)) = left {
            self.fault(format!("{why}, {left:?} before its end"));
        }
    }
}

/// A process that holds copies, and is replaced by another when it is killed.
struct Client {
    books: Arc<Books>,
    nodes: Vec<HoldsClient<Channel>>,
    random: StdRng,
}

impl Client {
    /// Asks nodes until one answers, and returns also when the answered call was sent.
    async fn ask<T, F: Future<Output = Result<Response<T>, Status>>>(
        &mut self,
        call: impl Fn(HoldsClient<Channel>) -> F,
    ) -> (Instant, Result<T, Status>) {
        loop {
            let node = self.nodes[self.random.random_range(0..self.nodes.len())].clone();
            let sent = Instant::now();
            match timeout(PATIENCE, call(node)).await {
                Ok(Ok(answer)) => return (sent, Ok(answer.into_inner())),
                Ok(Err(status))
                    if [Code::NotFound, Code::InvalidArgument].contains(&status.code()) =>
                {
                    return (sent, Err(status));
                }
                _ => sleep(Duration::from_millis(20)).await,
            }
        }
    }

    fn name(&mut self) -> String {
        format!("{:032x}", self.random.random::<u128>())
    }

    async fn run(mut self) {
        loop {
            self.hold_once().await;
        }
    }

    /// Holds copies for some time.
    async fn hold_once(&mut self) {
        let books = Arc::clone(&self.books);
        let ttl_millis = i64::try_from(books.ttl.as_millis()).unwrap();
        let mut session = self.name();
        let domain = self.random.random_range(0..DOMAINS);
        let reserve = ReserveRequest {
            resource: RESOURCE.to_owned(),
            session: session.clone(),
            session_ttl_millis: ttl_millis,
            hold: HOLD.to_owned(),
            domain: format!("d{domain}"),
            copies: self.random.random_range(1..=3),
            min_copies: 1,
        };
        let call = |mut node: HoldsClient<Channel>| {
            let reserve = reserve.clone();
            async move { node.reserve(reserve).await }
        };
        let (sent, answer) = self.ask(call).await;
        let ReserveResponse { granted, .. } = match answer {
            Ok(answer) if answer.status() == Outcome::Ok && !answer.degraded => answer,
            answer => {
                if let Err(status) = answer {
                    books.fault(status.to_string());
                }
                books.refusals.fetch_add(1, Ordering::Relaxed);
                return sleep(Duration::from_millis(self.random.random_range(10..60))).await;
            }
        };
        books.begin(&session, domain, granted.unsigned_abs(), sent);
        books.grants.fetch_add(1, Ordering::Relaxed);
        for _ in 0..self.random.random_range(1..6) {
            sleep(books.ttl.mul_f64(self.random.random_range(0.0..0.4))).await;
            match self.random.random_range(0..10) {
                // It is killed.
                0 => return,
                1 | 2 => match self.hand_over(&session, ttl_millis).await {
                    Some(other) => session = other,
                    None => return,
                },
                _ => {
                    let renewed = SessionToRenew {
                        resource: RESOURCE.to_owned(),
                        session: session.clone(),
                        ttl_millis,
                    };
                    let request = KeepAliveRequest { sessions: vec![renewed] };
                    let call = |mut node: HoldsClient<Channel>| {
                        let request = request.clone();
                        async move { node.keep_alive(request).await }
                    };
                    let (sent, answer) = self.ask(call).await;
                    let answer = answer.unwrap();
                    if answer.degraded {
                        continue;
                    }
                    if !answer.sessions[0].alive || answer.sessions[0].holds.is_empty() {
                        return books.lose(&session, "KeepAlive says that it is over");
                    }
                    books.renew(&session, sent);
                }
            }
        }
        books.end(&session);
        self.release(session).await;
    }

    /// Moves the hold to a session of another name, which it returns; `None` if it is lost.
    async fn hand_over(&mut self, session: &str, ttl_millis: i64) -> Option<String> {
        let other = self.name();
        let request = TransferRequest {
            resource: RESOURCE.to_owned(),
            session: session.to_owned(),
            hold: HOLD.to_owned(),
            copies: 0,
            to_session: other.clone(),
            ttl_millis,
        };
        let call = |mut node: HoldsClient<Channel>| {
            let request = request.clone();
            async move { node.transfer(request).await }
        };
        match self.ask(call).await {
            (sent, Ok(answer)) => {
                if let Some(entry) = self.books.end(session) {
                    let copies = answer.moved.unsigned_abs();
                    if copies != entry.copies {
                        self.books.fault(format!("{copies} of {} were moved", entry.copies));
                    }
                    self.books.begin(&other, entry.domain, copies, sent);
                }
                self.books.handovers.fetch_add(1, Ordering::Relaxed);
                Some(other)
            }
            (_, Err(status)) => {
                self.books.lose(session, &status.to_string());
                None
            }
        }
    }

    async fn release(&mut self, session: String) {
        let resource = RESOURCE.to_owned();
        if self.random.random() {
            let request = EndSessionRequest { resource, session };
            let call = |mut node: HoldsClient<Channel>| {
                let request = request.clone();
                async move { node.end_session(request).await }
            };
            self.ask(call).await.1.unwrap();
        } else {
            let request = ReleaseRequest { resource, session, hold: HOLD.to_owned(), keep: 0 };
            let call = |mut node: HoldsClient<Channel>| {
                let request = request.clone();
                async move { node.release(request).await }
            };
            self.ask(call).await.1.unwrap();
        }
    }
}

/// So many clients hold copies for so long.
fn run(clients: u64, duration: Duration, ttl: Duration) {
    let redis = Redis::start();
    let limits = [clients, clients * 2 / 5, clients / 2];
    let [all, domain, group] = limits;
    let file = LimitsFile::new(&format!(
        "
on_store_failure: deny
holds:
  - resource: {RESOURCE}
    global_limit: {}
    domain_limit: {domain}
    domains: {{ checker: -1 }}
    groups: {{ pair: {{ domains: [d0, d1], limit: {group} }} }}
",
        all + 1,
    ));
    let url = redis.url();
    let args = ["--store", &*url, "--store-timeout", "2s"];
    let mut nodes: Vec<_> = (0..3).map(|_| Node::start(&file.path(), &args)).collect();
    nodes.iter().for_each(Node::wait_for_store);
    let books = Arc::new(Books {
        limits,
        ttl,
        held: Mutex::default(),
        faults: Mutex::default(),
        grants: AtomicU64::new(0),
        refusals: AtomicU64::new(0),
        handovers: AtomicU64::new(0),
    });
    let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    // This keeps the counts from expiring as a whole.
    runtime.block_on(async {
        let mut node = HoldsClient::new(testkit::grpc::channel(nodes[0].grpc).await);
        let keeper = reservation("keeper", 1, Duration::from_secs(3600));
        assert_eq!(node.reserve(keeper).await.unwrap().into_inner().granted, 1);
    });
    let inside = runtime.enter();
    // As many clients share a connection as a node serves at once on it.
    let mut random = StdRng::seed_from_u64(1);
    let tasks: Vec<_> = (0..clients.div_ceil(50))
        .flat_map(|_| {
            let channels: Vec<_> = nodes
                .iter()
                .map(|node| {
                    let address = format!("http://{}", node.grpc);
                    HoldsClient::new(Endpoint::from_shared(address).unwrap().connect_lazy())
                })
                .collect();
            let client = |_| Client {
                books: Arc::clone(&books),
                nodes: channels.clone(),
                random: StdRng::from_rng(&mut random),
            };
            (0..50).map(client).collect::<Vec<_>>()
        })
        .take(usize::try_from(clients).unwrap())
        .map(|client| tokio::spawn(client.run()))
        .collect();
    drop(inside);
    let ends = Instant::now() + duration;
    let mut kills = 0;
    while Instant::now() < ends {
        thread::sleep(Duration::from_millis(random.random_range(300..1200)));
        let victim = &mut nodes[random.random_range(0..3)];
        let ports = [victim.grpc.port(), victim.http.port()];
        victim.kill();
        *victim = Node::start_on(ports, &file.path(), &args);
        kills += 1;
    }
    assert!(tasks.iter().all(|task| !task.is_finished()), "a client has failed");
    tasks.iter().for_each(tokio::task::JoinHandle::abort);
    let [grants, refusals, handovers] = [&books.grants, &books.refusals, &books.handovers]
        .map(|count| count.load(Ordering::Relaxed));
    println!("{grants} grants, {refusals} refusals, {handovers} handed over, {kills} nodes killed");
    let faults = books.faults.lock().unwrap();
    assert!(faults.is_empty(), "{} faults, such as {:?}", faults.len(), faults.first());
    assert!(grants > clients && refusals > clients && handovers > clients / 4 && kills > 1);

    // What the killed clients held is free after the ttl. Calls that nobody waits for may still be on
    // their way, longer on a busy machine.
    thread::sleep(3 * PATIENCE + ttl);
    runtime.block_on(async {
        let mut node = HoldsClient::new(testkit::grpc::channel(nodes[0].grpc).await);
        for number in 0..DOMAINS {
            take_all(&mut node, &format!("d{number}"), domain).await;
        }
        take_all(&mut node, "checker", all).await;
    });
}

fn reservation(domain: &str, copies: u64, ttl: Duration) -> ReserveRequest {
    let copies = i64::try_from(copies).unwrap();
    ReserveRequest {
        resource: RESOURCE.to_owned(),
        session: domain.to_owned(),
        session_ttl_millis: i64::try_from(ttl.as_millis()).unwrap(),
        hold: HOLD.to_owned(),
        domain: domain.to_owned(),
        copies,
        min_copies: copies,
    }
}

/// Reserves and releases all copies that the limits grant.
async fn take_all(node: &mut HoldsClient<Channel>, domain: &str, copies: u64) {
    let request = reservation(domain, copies, Duration::from_secs(60));
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        let answer = node.reserve(request.clone()).await.unwrap().into_inner();
        if answer.status() == Outcome::Ok && !answer.degraded {
            break;
        }
        // Freed in portions, as the answer says.
        let is_backlog = answer.retry_after_millis == 1 || answer.degraded;
        assert!(is_backlog && Instant::now() < deadline, "{domain}: {answer:?}");
        sleep(Duration::from_millis(1)).await;
    }
    let request = EndSessionRequest { resource: RESOURCE.to_owned(), session: domain.to_owned() };
    let ended = node.end_session(request).await.unwrap().into_inner();
    assert_eq!(ended.released.unsigned_abs(), copies);
}

#[test]
fn no_copy_is_granted_twice_or_lost() {
    run(60, Duration::from_secs(6), Duration::from_secs(1));
}

#[test]
#[ignore = "takes more than a minute: scripts/full.sh --only slow"]
fn a_thousand_clients_for_a_minute() {
    run(1000, Duration::from_secs(60), Duration::from_secs(3));
}
