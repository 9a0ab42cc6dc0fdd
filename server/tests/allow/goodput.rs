//! Goodput under overload: at twice the store's capacity, about as many requests are granted in
//! time as at the capacity. The store is slowed down, so that it is the bottleneck, not the
//! machine.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use testkit::fault_proxy::{Fault, FaultProxy};
use testkit::{Redis, START, Service};
use tollgate_server::domain::time::ManualClock;
use tollgate_server::metrics::{Metrics, StoreMetrics};
use tollgate_server::service::Error;
use tollgate_server::service::allow::{Query, Status};
use tollgate_server::settings::StoreUrl;
use tollgate_server::store::StoreError;
use tollgate_server::store::redis::{Connector, Health, RedisStore, Servers};

const LIMITS: &str = "
namespaces:
  shop: { default_bucket: { size: 1000000, fill_rate: 1000000 } }
";

/// Added latency in each direction.
const SLOW: Duration = Duration::from_millis(30);

/// Store timeout.
const TIMEOUT: Duration = Duration::from_millis(400);

/// Length of a phase of constant load, and its uncounted first part, in which queues fill.
const PHASE: Duration = Duration::from_millis(2600);
const WARM_UP: Duration = Duration::from_millis(1200);

/// Number of measurements.
const ROUNDS: usize = 2;

/// Attempts, as other load on the machine may spoil one.
const ATTEMPTS: usize = 2;

/// A store with [`TIMEOUT`].
async fn store(url: &str) -> RedisStore {
    let Ok(StoreUrl::Redis(url)) = url.parse() else { panic!("{url}") };
    let classes = StoreError::ALL.map(StoreError::class);
    let health = Arc::new(Health::new(StoreMetrics::new(&Metrics::new(), classes)));
    let connector = Connector::new(Servers::single(&url).unwrap(), TIMEOUT, Arc::clone(&health));
    let tended = connector.clone();
    tokio::spawn(async move { tended.run("test").await });
    while !health.is_up() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    connector.open()
}

#[derive(Default)]
struct Count {
    good: AtomicUsize,
    rejected: AtomicUsize,
    undecided: AtomicUsize,
}

async fn ask(service: Arc<Service<RedisStore>>, count: Arc<Count>) {
    let query = Query { namespace: "shop", bucket: "b", tokens: 1, ..Query::default() };
    let answer = service.allow.allow(&query).await;
    // A rejected caller waits before its next request, as it is told to. Otherwise rejected callers
    // would keep the only thread busy.
    let good = matches!(&answer, Ok(answer) if answer.status == Status::Ok && !answer.degraded);
    let counter = match answer {
        Ok(answer) if answer.status == Status::Ok && !answer.degraded => &count.good,
        Err(Error::Overloaded) => &count.rejected,
        // The store did not answer in time.
        _ => &count.undecided,
    };
    counter.fetch_add(1, Ordering::Relaxed);
    if !good {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Sends `rate` requests/s in an open loop. Returns the rate of requests granted in time.
async fn goodput(service: &Arc<Service<RedisStore>>, rate: f64) -> f64 {
    let (count, ignored) = (Arc::new(Count::default()), Arc::new(Count::default()));
    let (started, mut sent, mut counted) = (Instant::now(), 0, 0);
    let mut tick = tokio::time::interval(Duration::from_millis(5));
    while started.elapsed() < PHASE {
        tick.tick().await;
        let at = started.elapsed();
        while f64::from(sent) < at.as_secs_f64() * rate {
            sent += 1;
            let to = if at < WARM_UP { &ignored } else { &count };
            counted += u32::from(at >= WARM_UP);
            tokio::spawn(ask(Arc::clone(service), Arc::clone(to)));
        }
    }
    // Lets all requests of the phase end.
    tokio::time::sleep(TIMEOUT + Duration::from_millis(200)).await;
    let of = |count: &AtomicUsize| {
        count.load(Ordering::Relaxed) as f64 / (PHASE - WARM_UP).as_secs_f64()
    };
    println!(
        "{rate:.0} requests/s, {counted} counted: granted in time {:.0}/s, rejected {:.0}/s, \
         timed out {:.0}/s",
        of(&count.good),
        of(&count.rejected),
        of(&count.undecided)
    );
    of(&count.good)
}

/// Decisions/s of a closed loop of as many callers as fill both lanes.
async fn measure_capacity(service: &Arc<Service<RedisStore>>) -> f64 {
    let (count, started) = (Arc::new(Count::default()), Instant::now());
    let span = Duration::from_secs(2);
    let callers = (0..504).map(|_| {
        let (service, count) = (Arc::clone(service), Arc::clone(&count));
        tokio::spawn(async move {
            while started.elapsed() < span {
                ask(Arc::clone(&service), Arc::clone(&count)).await;
            }
        })
    });
    for caller in callers.collect::<Vec<_>>() {
        caller.await.unwrap();
    }
    count.good.load(Ordering::Relaxed) as f64 / started.elapsed().as_secs_f64()
}

#[tokio::test]
#[ignore = "judges a rate: scripts/full.sh --only slow"]
async fn goodput_at_twice_the_capacity_stays_near_the_peak() {
    let redis = Redis::start();
    let network = FaultProxy::to(redis.port());
    let store = store(&network.url()).await;
    let service = Arc::new(Service::new(store, ManualClock::new(START), LIMITS));
    // Loads the script before the server becomes slow.
    ask(Arc::clone(&service), Arc::default()).await;
    network.set(Fault::Delay(SLOW));
    let mut share = 0.0;
    for attempt in 1..=ATTEMPTS {
        let rate = measure_capacity(&service).await;
        println!("attempt {attempt}: at most {rate:.0} decisions/s");
        assert!(rate > 500.0, "the store is too slow for this test");
        let (mut at_most, mut at_twice) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            at_most.push(goodput(&service, rate).await);
            at_twice.push(goodput(&service, 2.0 * rate).await);
        }
        let peak = at_most.iter().chain(&at_twice).copied().fold(rate, f64::max);
        share = at_twice.iter().sum::<f64>() / at_twice.len() as f64 / peak;
        println!("at twice the load {:.1} % of the peak", share * 100.0);
        if share >= 0.9 {
            return;
        }
    }
    panic!("{:.1} % of the peak", share * 100.0);
}
