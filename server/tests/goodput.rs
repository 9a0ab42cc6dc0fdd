//! With twice as many requests as a node's store can answer, as many are answered in time as with
//! just so many. The store is made slow, so that it is what there is too little of, and not this
//! machine; scripts/overload.sh measures the same of a node on its own.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use support::forwarder::Forwarder;
use support::load::{Load, Plan};
use support::wire::{channel, request};
use support::{LimitsFile, Node, Redis};
use tollgate_proto::quotaservice::allow_response::Status;
use tollgate_proto::quotaservice::quota_service_client::QuotaServiceClient;
use tonic::Code;
use tonic::transport::Channel;

const LIMITS: &str = "
on_store_failure: deny
namespaces:
  shop: { default_bucket: { size: 1000000, fill_rate: 1000000 } }
";

/// What the store takes longer than it would.
const SLOW: Duration = Duration::from_millis(120);

/// How long a caller waits.
const DEADLINE: Duration = Duration::from_millis(1200);

/// How long the load is the same, and how much of that is not counted: until then queues fill.
const PHASE: Duration = Duration::from_millis(3500);
const WARM_UP: Duration = Duration::from_millis(1200);

/// More streams than there are requests under way.
const CONNECTIONS: usize = 24;

/// How many times it is measured.
const ROUNDS: usize = 2;

/// A machine that does other things as well gets another chance.
const ATTEMPTS: usize = 2;

#[derive(Default)]
struct Count {
    asked: AtomicUsize,
    good: AtomicUsize,
    turned_away: AtomicUsize,
    late: AtomicUsize,
}

/// So many requests a second, sent when they are due, whatever becomes of those before. Tells how
/// many a second were granted in time.
async fn goodput(clients: &[QuotaServiceClient<Channel>], rate: f64) -> f64 {
    let (count, started, mut sent) = (Arc::new(Count::default()), Instant::now(), 0);
    let mut tick = tokio::time::interval(Duration::from_millis(5));
    let mut counted = Duration::ZERO;
    while started.elapsed() < PHASE {
        tick.tick().await;
        let at = started.elapsed();
        counted = at.saturating_sub(WARM_UP);
        while (sent as f64) < at.as_secs_f64() * rate {
            let (mut client, count) = (clients[sent % clients.len()].clone(), Arc::clone(&count));
            sent += 1;
            let mut asked = tonic::Request::new(request("shop", "b", 1));
            asked.set_timeout(DEADLINE);
            tokio::spawn(async move {
                let answer = client.allow(asked).await;
                if at < WARM_UP {
                    return;
                }
                let add = |to: &AtomicUsize| to.fetch_add(1, Ordering::Relaxed);
                add(&count.asked);
                match answer {
                    Ok(answer) if answer.get_ref().status() == Status::Ok => add(&count.good),
                    Err(status) if status.code() == Code::ResourceExhausted => {
                        add(&count.turned_away)
                    }
                    _ => add(&count.late),
                };
            });
        }
    }
    tokio::time::sleep(DEADLINE).await;
    let of = |count: &AtomicUsize| count.load(Ordering::Relaxed) as f64 / counted.as_secs_f64();
    println!(
        "{rate:.0} a second: asked {:.0}, granted in time {:.0}, turned away {:.0}, late {:.0}",
        of(&count.asked),
        of(&count.good),
        of(&count.turned_away),
        of(&count.late)
    );
    of(&count.good)
}

/// How many decisions a second there are when as many callers as ever ask again at once.
fn most(node: &Node) -> f64 {
    let plan = Plan { callers: 504, connections: 8, pace: Duration::ZERO, failover: false };
    let load = Load::start(&[node.grpc], plan, |_, _| Some(request("shop", "b", 1)));
    load.go_on(Duration::from_secs(3));
    let samples = load.finish();
    let first = samples[0].sent;
    let span = (Duration::from_secs(1), Duration::from_secs(3));
    let granted = samples.iter().filter(|sample| {
        let at = sample.answered - first;
        sample.status() == Some(Status::Ok) && at > span.0 && at <= span.1
    });
    granted.count() as f64 / (span.1 - span.0).as_secs_f64()
}

#[test]
fn twice_as_much_as_it_can_do_is_no_worse_than_just_as_much() {
    let (redis, limits) = (Redis::start(), LimitsFile::new(LIMITS));
    let forwarder = Forwarder::to(redis.port());
    let args = ["--store", &forwarder.url(), "--store-timeout", "900ms", "--threads", "1"];
    let node = Node::start(&limits.path(), &args);
    forwarder.delay(SLOW);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all();
    let runtime = { runtime }.build().unwrap();
    let mut share = 0.0;
    for attempt in 1..=ATTEMPTS {
        let rate = most(&node);
        println!("attempt {attempt}: {rate:.0} decisions a second at most");
        let (at_most, at_twice) = runtime.block_on(async {
            let mut clients = Vec::new();
            for _ in 0..CONNECTIONS {
                clients.push(QuotaServiceClient::new(channel(node.grpc).await));
            }
            let (mut at_most, mut at_twice) = (Vec::new(), Vec::new());
            for _ in 0..ROUNDS {
                at_most.push(goodput(&clients, rate).await);
                at_twice.push(goodput(&clients, 2.0 * rate).await);
            }
            (at_most, at_twice)
        });
        let peak = at_most.into_iter().fold(0.0, f64::max);
        share = at_twice.iter().sum::<f64>() / at_twice.len() as f64 / peak;
        println!("at twice the load {:.1} % of the peak", share * 100.0);
        if share >= 0.9 {
            return;
        }
    }
    panic!("{:.1} % of the peak", share * 100.0);
}
