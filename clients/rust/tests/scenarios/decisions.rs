//! What is granted and refused, and how long callers wait.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use testkit::metrics::Scrape;
use testkit::{LimitsFile, Node};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tollgate_client::{
    AcquireError, DecidedBy, Decision, Error, Fallback, Grant, Reason, Refusal, Request,
};

use crate::builder;

/// A bucket for each case; the namespace has no other.
const LIMITS: &str = "namespaces:
  a:
    buckets:
      slow: { size: 2, fill_rate: 1/h, wait_timeout_millis: 0, max_tokens_per_request: 2 }
      quick: { size: 1, fill_rate: 4, wait_timeout_millis: 60000 }
      waits: { size: 1, fill_rate: 1/m, wait_timeout_millis: 3600000, max_debt_millis: 3600000 }
      never_waits: { size: 1, fill_rate: 4, wait_timeout_millis: 0 }
      books: { size: 1000, fill_rate: 1/d, max_tokens_per_request: 1000, soft_limit_percent: 99 }
      banned: { size: 100, fill_rate: 100, ban: { threshold: 1, window: 1h, for: 1h } }
      reserved: { size: 2, fill_rate: 1/h, wait_timeout_millis: 0, reserve: 50% }
      shadow: { size: 1, fill_rate: 1/h, wait_timeout_millis: 0, enforce: false }
";

fn granted(decision: Result<Decision, Error>) -> Grant {
    match decision.unwrap() {
        Decision::Granted(grant) => grant,
        Decision::Refused(refusal) => panic!("{refusal:?}"),
    }
}

fn refused(decision: Result<Decision, Error>) -> Refusal {
    match decision.unwrap() {
        Decision::Granted(grant) => panic!("{grant:?}"),
        Decision::Refused(refusal) => refusal,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn each_answer_of_a_node() {
    let limits = LimitsFile::new(LIMITS);
    let node = Node::start(&limits.path(), &[]);
    let client = builder(&[node.grpc]).build().unwrap();
    let ask = |bucket: &'static str| client.allow(Request::new("a", bucket));
    let grant = granted(ask("slow").await);
    assert_eq!((grant.tokens, grant.wait), (1, Duration::ZERO));
    assert_eq!(grant.decided_by, DecidedBy::Node);
    assert!(!grant.soft_limited && !grant.shadow);
    granted(ask("slow").await);
    let refusal = refused(ask("slow").await);
    assert_eq!((refusal.reason, refusal.decided_by), (Reason::Limit, DecidedBy::Node));
    let hour = Duration::from_secs(3600);
    assert!(refusal.retry_after.is_some_and(|after| after > hour / 2 && after <= hour));
    // A wait, as the bucket allows it, and not as this request allows it.
    granted(ask("waits").await);
    granted(ask("waits").await);
    let wait = granted(ask("waits").await).wait;
    assert!(wait > Duration::ZERO && wait <= Duration::from_secs(60), "{wait:?}");
    let impatient = Request::new("a", "waits").max_wait(Duration::from_millis(1));
    assert_eq!(refused(client.allow(impatient).await).reason, Reason::Limit);
    granted(ask("banned").await);
    let refusal = refused(ask("banned").await);
    assert_eq!(refusal.reason, Reason::Banned);
    assert!(refusal.retry_after.is_some_and(|after| after > hour));
    granted(client.allow(Request::new("a", "reserved").not_critical()).await);
    refused(client.allow(Request::new("a", "reserved").not_critical()).await);
    granted(ask("reserved").await);
    granted(ask("shadow").await);
    assert!(granted(ask("shadow").await).shadow);
    let many = client.allow(Request::new("a", "books").tokens(2000)).await;
    assert_eq!(refused(many).reason, Reason::TooManyTokens);
    let refusal = refused(ask("unknown").await);
    assert_eq!((refusal.reason, refusal.retry_after), (Reason::NoBucket, None));
    let error = client.allow(Request::new("", "b")).await.unwrap_err();
    assert!(matches!(error, Error::Invalid(_)), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_mistake_of_the_caller_is_an_error_whatever_the_fallback() {
    let limits = LimitsFile::new(LIMITS);
    let node = Node::start(&limits.path(), &[]);
    let client = builder(&[node.grpc]).fallback(Fallback::Allow).build().unwrap();
    for name in ["b\n", &*"x".repeat(5 << 20)] {
        // As often as would open a circuit.
        for _ in 0..3 {
            let error = client.allow(Request::new("a", name)).await.unwrap_err();
            assert!(matches!(error, Error::Invalid(_)), "{error}");
        }
    }
    // No bucket is a mistake of the limits.
    let grant = granted(client.allow(Request::new("a", "unknown").tokens(7)).await);
    assert_eq!((grant.tokens, grant.decided_by), (7, DecidedBy::Fallback));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refusal_is_remembered_until_its_retry_time_and_for_a_second_at_most() {
    let limits = LimitsFile::new(LIMITS);
    let node = Node::start(&limits.path(), &[]);
    let client = builder(&[node.grpc]).build().unwrap();
    let asked = || {
        let scrape = Scrape::of(node.http);
        scrape.sum("tollgate_decisions_total", &[("namespace", "a"), ("bucket", "slow")])
    };
    let request = Request::new("a", "slow").tokens(2);
    let start = Instant::now();
    granted(client.allow(request.tokens(1)).await);
    assert_eq!(refused(client.allow(request).await).decided_by, DecidedBy::Node);
    let mut remembered = 0;
    loop {
        let refusal = refused(client.allow(request).await);
        if refusal.decided_by == DecidedBy::Node {
            break;
        }
        assert_eq!(refusal.decided_by, DecidedBy::Remembered);
        assert!(refusal.retry_after.is_some_and(|after| after > Duration::from_secs(1800)));
        remembered += 1;
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert!(start.elapsed() >= Duration::from_secs(1) && remembered > 0);
    assert_eq!(asked(), 3.0);
    // Fewer tokens may be there.
    assert_eq!(granted(client.allow(request.tokens(1)).await).decided_by, DecidedBy::Node);
}

#[tokio::test(flavor = "multi_thread")]
async fn acquire_waits_as_long_as_the_node_says() {
    let limits = LimitsFile::new(LIMITS);
    let node = Node::start(&limits.path(), &[]);
    let client = builder(&[node.grpc]).build().unwrap();
    let start = Instant::now();
    for _ in 0..5 {
        client.acquire(Request::new("a", "quick")).await.unwrap();
    }
    // One token is there, one is lent, and three come at four a second.
    assert!(start.elapsed() >= Duration::from_millis(740), "{:?}", start.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn acquire_asks_again_where_the_bucket_has_nobody_wait() {
    let limits = LimitsFile::new(LIMITS);
    let node = Node::start(&limits.path(), &[]);
    let client = builder(&[node.grpc]).build().unwrap();
    let request = Request::new("a", "never_waits");
    let start = Instant::now();
    let mut waiting = JoinSet::new();
    for _ in 0..5 {
        let client = client.clone();
        let request = request.max_wait(Duration::from_secs(60));
        waiting.spawn(async move { client.acquire(request).await.map(|grant| grant.tokens) });
    }
    for granted in waiting.join_all().await {
        assert_eq!(granted.unwrap(), 1);
    }
    assert!(start.elapsed() >= Duration::from_millis(740), "{:?}", start.elapsed());
    // It does not wait for what comes too late, and says when that would be.
    client.acquire(Request::new("a", "slow").tokens(1)).await.unwrap();
    let start = Instant::now();
    let late = Request::new("a", "slow").tokens(2).max_wait(Duration::from_secs(60));
    let error = client.acquire(late).await.unwrap_err();
    assert!(matches!(error, AcquireError::Refused(_)), "{error}");
    assert!(error.retry_after().is_some_and(|after| after > Duration::from_secs(60)));
    assert!(start.elapsed() < Duration::from_secs(30), "{:?}", start.elapsed());
}

/// Where the bucket would have callers wait for longer than this one wants, asking again is no use.
#[tokio::test(flavor = "multi_thread")]
async fn acquire_gives_up_at_once_what_comes_too_late() {
    let limits = LimitsFile::new(LIMITS);
    let node = Node::start(&limits.path(), &[]);
    let client = builder(&[node.grpc]).build().unwrap();
    for _ in 0..2 {
        granted(client.allow(Request::new("a", "waits")).await);
    }
    let start = Instant::now();
    let request = Request::new("a", "waits").max_wait(Duration::from_secs(30));
    let error = client.acquire(request).await.unwrap_err();
    // The node says how long until a request with this wait is granted.
    assert!(error.retry_after().is_some_and(|after| after < Duration::from_secs(40)));
    assert!(start.elapsed() < Duration::from_secs(15), "{:?}", start.elapsed());
    let labels = [("namespace", "a"), ("bucket", "waits")];
    assert_eq!(Scrape::of(node.http).sum("tollgate_decisions_total", &labels), 3.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn many_clients_get_exactly_what_is_in_the_books() {
    let limits = LimitsFile::new(LIMITS);
    let nodes = Node::start(&limits.path(), &[]);
    let mut asking = JoinSet::new();
    for _ in 0..50 {
        let client = builder(&[nodes.grpc]).build().unwrap();
        asking.spawn(async move {
            let mut granted = 0;
            for _ in 0..30 {
                let decision = client.allow(Request::new("a", "books")).await.unwrap();
                granted += u64::from(decision.is_granted());
            }
            granted
        });
    }
    let granted: u64 = asking.join_all().await.into_iter().sum();
    assert_eq!(granted, 1000);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_application_is_told_of_refusals_and_soft_limits() {
    let limits = LimitsFile::new(LIMITS);
    let node = Node::start(&limits.path(), &[]);
    let told = Arc::new(Mutex::new(Vec::new()));
    let (soft, hard) = (Arc::clone(&told), Arc::clone(&told));
    let client = builder(&[node.grpc])
        .on_soft_limited(move |request, grant| {
            soft.lock().unwrap().push(format!("soft {} {}", request.bucket(), grant.tokens));
        })
        .on_refused(move |request, refusal| {
            let who = refusal.decided_by;
            hard.lock().unwrap().push(format!("refused {} {who:?}", request.bucket()));
        })
        .build()
        .unwrap();
    for tokens in [1, 998, 1, 1, 1] {
        client.allow(Request::new("a", "books").tokens(tokens)).await.unwrap();
    }
    let told = told.lock().unwrap();
    assert_eq!(
        *told,
        ["soft books 998", "soft books 1", "refused books Node", "refused books Remembered"]
    );
}
