//! With twice as many questions as the store can answer, as many should be answered in time as with
//! just so many. The store is made slow, so that it is what there is too little of, and not this machine.

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

/// What the store takes longer than it would, each way, …
const SLOW: Duration = Duration::from_millis(30);

/// … and how long it may take.
const TIMEOUT: Duration = Duration::from_millis(400);

/// How long the load is the same, and how much of that is not counted: until then queues fill.
const PHASE: Duration = Duration::from_millis(2600);
const WARM_UP: Duration = Duration::from_millis(1200);

/// How many times it is measured.
const ROUNDS: usize = 2;

/// A machine that does other things as well gets another chance.
const ATTEMPTS: usize = 2;

/// A store that gives up after [`TIMEOUT`].
async fn store(url: &str) -> RedisStore {
    let Ok(StoreUrl::Redis(url)) = url.parse() else { panic!("{url}") };
    let classes = StoreError::ALL.map(StoreError::class);
    let health = Arc::new(Health::new(StoreMetrics::new(&Metrics::new(), classes)));
    let connector = Connector::new(Servers::single(&url).unwrap(), TIMEOUT, Arc::clone(&health));
    let tended = connector.clone();
    tokio::spawn(async move { tended.tend("test").await });
    while !health.is_up() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    connector.open()
}

#[derive(Default)]
struct Count {
    good: AtomicUsize,
    turned_away: AtomicUsize,
    undecided: AtomicUsize,
}

async fn ask(service: Arc<Service<RedisStore>>, count: Arc<Count>) {
    let query = Query { namespace: "shop", bucket: "b", tokens: 1, max_wait_ms: None };
    let answer = service.allow.allow(&query).await;
    // Who is turned away waits before it asks again, as it is told to. All else would have the
    // one thread that there is go round with those that are answered at once.
    let good = matches!(&answer, Ok(answer) if answer.status == Status::Ok && !answer.degraded);
    let counter = match answer {
        Ok(answer) if answer.status == Status::Ok && !answer.degraded => &count.good,
        Err(Error::Overloaded) => &count.turned_away,
        // The node has waited for the store, and for nothing.
        _ => &count.undecided,
    };
    counter.fetch_add(1, Ordering::Relaxed);
    if !good {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// So many questions a second, asked when they are due, whatever becomes of those before. Tells how
/// many a second were granted in time.
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
    tokio::time::sleep(TIMEOUT + Duration::from_millis(200)).await;
    let of = |count: &AtomicUsize| {
        count.load(Ordering::Relaxed) as f64 / (PHASE - WARM_UP).as_secs_f64()
    };
    println!(
        "{rate:.0} a second, {counted} counted: granted in time {:.0} a second, turned away {:.0}, \
         waited for nothing {:.0}",
        of(&count.good),
        of(&count.turned_away),
        of(&count.undecided)
    );
    of(&count.good)
}

/// How many decisions a second there are when as many callers as fill both lanes ask again at once.
async fn most(service: &Arc<Service<RedisStore>>) -> f64 {
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
async fn twice_as_much_as_it_can_do_is_no_worse_than_just_as_much() {
    let redis = Redis::start();
    let network = FaultProxy::to(redis.port());
    let store = store(&network.url()).await;
    let service = Arc::new(Service::new(store, ManualClock::new(START), LIMITS));
    // The server has the script when it becomes slow.
    ask(Arc::clone(&service), Arc::default()).await;
    network.set(Fault::Delay(SLOW));
    let mut share = 0.0;
    for attempt in 1..=ATTEMPTS {
        let rate = most(&service).await;
        println!("attempt {attempt}: {rate:.0} decisions a second at most");
        assert!(rate > 500.0, "the store answers too little to say anything");
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
