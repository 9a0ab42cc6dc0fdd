//! What is counted: ways to make decisions, each on one thread, in an order that is always the
//! same.

use std::io::Write as _;
use std::sync::Arc;
use std::time::Duration;

use bytes::{BufMut as _, Bytes, BytesMut};
use h2::client::{self, SendRequest};
use http::Request;
use http::header::CONTENT_TYPE;
use prost::Message as _;
use tokio::task::JoinSet;
use tollgate_proto::quotaservice::allow_response::Status as Wire;
use tollgate_proto::quotaservice::{AllowRequest, AllowResponse};
use tollgate_server::access::Guard;
use tollgate_server::domain::bucket::{BucketKind, BucketLimit, Terms};
use tollgate_server::metrics::{Metrics, StoreMetrics};
use tollgate_server::service::ServiceState;
use tollgate_server::service::allow::{AllowService, Query, Status};
use tollgate_server::service::limits::LiveLimits;
use tollgate_server::store::clock::Clock;
use tollgate_server::store::memory::MemoryStore;
use tollgate_server::store::prefetch_store::{PrefetchStore, PrefetchedTokens};
use tollgate_server::store::redis::{Connector, Health, RedisStore, Servers};
use tollgate_server::store::{BucketRequest, Store, StoreError, TokenAction, Verdict};
use tollgate_server::transport::budget::Budget;
use tollgate_server::transport::connection::DEFAULT_TIMEOUTS;
use tollgate_server::transport::grpc_service::GrpcService;
use tollgate_server::transport::overload::{RequestLimit, ThreadLimits};
use tonic::service::Routes;

use super::Fallible;

const NAMESPACE: &str = "loadtest";

/// Buckets of the uniform cases.
const BUCKETS: usize = 640;

/// Decisions in one batch to Redis.
const BATCH: usize = 64;

/// Requests at a time: a batch for each of a node's two lanes to Redis.
const TOGETHER: usize = 2 * BATCH;

/// Large, so that no bucket is full, or lacks a token, during a run.
const SIZE_TOKENS: u64 = 1_000_000;

const RATE: f64 = 100.0;

/// Taken before anything is counted: a full bucket is not the usual one.
const FIRST_TOKENS: i64 = 500_000;

/// No deadline passes, however slow valgrind is.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Which process is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counted {
    /// This one.
    Node,
    /// Redis.
    Redis,
}

/// What makes the decisions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// The service, on the embedded store.
    Embedded,
    /// The same behind HTTP/2 in memory, its client included.
    Rpc,
    /// The node's part of the service on Redis.
    Node,
    /// Redis' own part.
    Redis,
}

/// One thing to count.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    name: &'static str,
    way: Way,
    buckets: usize,
}

impl Case {
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self { name: "embedded store, hot", way: Way::Embedded, buckets: 1 },
        Self { name: "embedded store, uniform", way: Way::Embedded, buckets: BUCKETS },
        Self { name: "gRPC and embedded store", way: Way::Rpc, buckets: BUCKETS },
        Self { name: "node on Redis, hot", way: Way::Node, buckets: 1 },
        Self { name: "node on Redis, uniform", way: Way::Node, buckets: BUCKETS },
        Self { name: "Redis, hot", way: Way::Redis, buckets: 1 },
        Self { name: "Redis, uniform", way: Way::Redis, buckets: BUCKETS },
    ];

    /// What it is called.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Which process is counted.
    pub fn counted(&self) -> Counted {
        if self.way == Way::Redis { Counted::Redis } else { Counted::Node }
    }

    /// Whether it needs a Redis.
    pub fn asks_redis(&self) -> bool {
        matches!(self.way, Way::Node | Way::Redis)
    }

    /// How often it is counted: an odd number, for the median.
    pub fn repetitions(&self) -> usize {
        if self.way == Way::Node { 5 } else { 1 }
    }

    /// How many decisions make start and end small beside them.
    pub fn decisions(&self) -> usize {
        // The clock of the metrics takes millions to start, and never the same.
        BATCH
            * match self.way {
                Way::Embedded => 1600,
                Way::Redis if self.buckets == 1 => 400,
                Way::Rpc | Way::Node | Way::Redis => 100,
            }
    }

    /// Warms up, then makes so many decisions.
    pub fn run(&self, decisions: usize, store: &str) -> Fallible<()> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(async {
            let work = Work::new(self.buckets, decisions);
            match self.way {
                Way::Embedded => work.one_by_one(&service(MemoryStore::new())?.0).await,
                Way::Rpc => work.by_rpc(MemoryStore::new()).await,
                Way::Node => {
                    let (store, health) = redis(store).await?;
                    let prefetched = PrefetchedTokens::new(Arc::clone(health.members()));
                    let prefetching = PrefetchStore::new(store.clone(), Arc::new(prefetched));
                    let (service, _, limits) = service(prefetching)?;
                    // As in a node that has been up for a while.
                    limits.report_layouts_once(&store).await;
                    work.together(service).await
                }
                Way::Redis => work.in_batches(&redis(store).await?.0).await,
            }
        })
    }
}

/// The service over a store, with limits for the namespace.
fn service<S: Store>(store: S) -> Fallible<(AllowService<S>, Arc<Metrics>, Arc<LiveLimits>)> {
    let mut file = tempfile::NamedTempFile::new()?;
    write!(
        file,
        "namespaces: {{ {NAMESPACE}: {{ dynamic_bucket_template: \
         {{ size: {SIZE_TOKENS}, fill_rate: {RATE}, max_tokens_per_request: -1 }} }} }}"
    )?;
    let metrics = Arc::new(Metrics::new());
    let limits = Arc::new(LiveLimits::load(file.path().into(), Arc::clone(&metrics))?);
    let state = ServiceState::new(Arc::clone(&limits), None, Clock::system(), false, &metrics);
    Ok((AllowService::new(store, Arc::new(state)), metrics, limits))
}

async fn redis(url: &str) -> Fallible<(RedisStore, Arc<Health>)> {
    let classes = StoreError::ALL.map(StoreError::class);
    let health = Arc::new(Health::new(StoreMetrics::new(&Metrics::new(), classes)));
    let connector = Connector::new(Servers::single(url)?, TIMEOUT, Arc::clone(&health));
    connector.register("instructions").await;
    Ok((connector.open(), health))
}

/// Decisions to make.
struct Work {
    names: Vec<String>,
    decisions: usize,
}

impl Work {
    fn new(buckets: usize, decisions: usize) -> Self {
        let names = (0..buckets).map(|number| format!("key{number:09}")).collect();
        Self { names, decisions }
    }

    /// The bucket and the tokens of each request: all buckets once, twice so that each has been
    /// found in use, then the decisions. Neighbours are in no order.
    fn requests(&self) -> impl Iterator<Item = (&str, i64)> {
        let names = self.names.len();
        // Prime to the number of buckets, so that each has its turn.
        let name = move |turn: usize| self.names[turn * 389 % names].as_str();
        let rounds = names.next_multiple_of(TOGETHER);
        let first =
            (0..rounds).map(move |turn| (name(turn), if turn < names { FIRST_TOKENS } else { 1 }));
        first.chain((0..rounds + self.decisions).map(move |turn| (name(turn), 1)))
    }

    async fn one_by_one<S: Store>(&self, service: &AllowService<S>) -> Fallible<()> {
        for (bucket, tokens) in self.requests() {
            ask(service, bucket, tokens).await?;
        }
        Ok(())
    }

    async fn together<S: Store>(self, service: AllowService<S>) -> Fallible<()> {
        let requests: Vec<(&str, i64)> = self.requests().collect();
        for some in requests.chunks(TOGETHER) {
            let mut asked = JoinSet::new();
            for &(bucket, tokens) in some {
                let (service, bucket) = (service.clone(), bucket.to_owned());
                asked.spawn(async move { ask(&service, &bucket, tokens).await });
            }
            while let Some(answer) = asked.join_next().await {
                answer??;
            }
        }
        Ok(())
    }

    async fn by_rpc(&self, store: MemoryStore) -> Fallible<()> {
        let mut sender = serve(store).await?;
        let requests: Vec<(&str, i64)> = self.requests().collect();
        for some in requests.chunks(TOGETHER) {
            let mut answers = Vec::with_capacity(some.len());
            for &(bucket, tokens) in some {
                sender = sender.ready().await?;
                let (answer, mut body) = sender.send_request(head()?, false)?;
                body.send_data(message(bucket, tokens), true)?;
                answers.push(answer);
            }
            for answer in answers {
                let mut body = answer.await?.into_body();
                let data = body.data().await.ok_or("no message")??;
                body.flow_control().release_capacity(data.len())?;
                let answer = AllowResponse::decode(data.get(5..).unwrap_or_default())?;
                body.trailers().await?;
                if answer.status() != Wire::Ok {
                    return Err(format!("{answer:?}").into());
                }
            }
        }
        Ok(())
    }

    async fn in_batches(&self, store: &RedisStore) -> Fallible<()> {
        let terms =
            BucketLimit { size_tokens: SIZE_TOKENS, fill_rate: RATE, ..BucketLimit::default() }
                .terms();
        let requests: Vec<(&str, i64)> = self.requests().collect();
        for some in requests.chunks(BATCH) {
            let asks: Vec<BucketRequest<'_>> =
                some.iter().map(|&(name, tokens)| question(name, tokens as u64, &terms)).collect();
            for outcome in store.decide(&asks).await {
                if outcome?.verdict != Verdict::Granted {
                    return Err("refused".into());
                }
            }
        }
        Ok(())
    }
}

async fn ask<S: Store>(service: &AllowService<S>, bucket: &str, tokens: i64) -> Fallible<()> {
    let query = Query { namespace: NAMESPACE, bucket, tokens, ..Query::default() };
    let answer = service.allow(&query).await?;
    if answer.status != Status::Ok || answer.degraded {
        return Err(format!("{answer:?}").into());
    }
    Ok(())
}

fn question<'a>(name: &'a str, tokens: u64, terms: &'a Terms) -> BucketRequest<'a> {
    BucketRequest {
        caller: None,
        namespace: NAMESPACE,
        name,
        kind: BucketKind::Dynamic { max_buckets: None },
        terms,
        max_idle_ms: None,
        tokens,
        action: TokenAction::Take { max_wait_ms: 1000 },
        prefetch: None,
        rewrite: false.into(),
    }
}

/// Serves one connection as a node does, but from memory to memory.
async fn serve(store: MemoryStore) -> Fallible<SendRequest<Bytes>> {
    let (service, metrics, _) = service(store)?;
    let (took, requests) =
        (metrics.rpc_duration("grpc"), RequestLimit::new(10_000, metrics.shed("grpc")));
    let limits = ThreadLimits { requests, timeouts: DEFAULT_TIMEOUTS, budget: Budget::unlimited() };
    let grpc_service = Arc::new(GrpcService::new(service, took, Routes::default(), limits));
    let (near, far) = tokio::io::duplex(1 << 20);
    let guard = Guard::grpc(None, None);
    tokio::spawn(grpc_service.serve(far, std::future::pending(), guard, None));
    let (sender, connection) = client::handshake(near).await?;
    tokio::spawn(connection);
    Ok(sender)
}

fn head() -> Result<Request<()>, http::Error> {
    Request::post("http://node/quotaservice.QuotaService/Allow")
        .header(CONTENT_TYPE, "application/grpc")
        .header("te", "trailers")
        .body(())
}

/// A request for tokens as it is on the wire.
fn message(bucket: &str, tokens: i64) -> Bytes {
    let request = AllowRequest {
        namespace: NAMESPACE.to_owned(),
        bucket_name: bucket.to_owned(),
        tokens_requested: tokens,
        ..AllowRequest::default()
    };
    let mut bytes = BytesMut::new();
    bytes.put_u8(0);
    bytes.put_u32(request.encoded_len() as u32);
    request.encode_raw(&mut bytes);
    bytes.freeze()
}
