//! Looks at buckets and explanations, on every store: they take nothing, and say what would be
//! answered.

use std::collections::HashSet;

use testkit::Service;
use tollgate_server::domain::bucket::BucketKind;
use tollgate_server::service::allow::{
    Balance, BucketView, Criticality, FillError, Filled, Query, Status,
};
use tollgate_server::service::explain::Effect;
use tollgate_server::store::look::{Look, Looks};

const SECOND: i64 = 1_000_000;

const LIMITS: &str = "
global_default_bucket: { size: 40, fill_rate: 2, max_debt_millis: 0, max_tokens_per_request: -1 }
namespaces:
  shop:
    buckets:
      cart: { size: 10, fill_rate: 2, wait_timeout_millis: 1500, max_debt_millis: 3000, max_tokens_per_request: 12 }
      soft: { size: 10, fill_rate: 1, soft_limit_percent: 50, reserve: 30% }
      shadow: { size: 3, fill_rate: 1/m, wait_timeout_millis: 0, enforce: false }
    default_bucket: { size: 5, fill_rate: 3, max_tokens_per_request: -1 }
  api:
    max_dynamic_buckets: 3
    dynamic_bucket_template: { size: 4, fill_rate: 1/m, wait_timeout_millis: 0, max_idle_millis: 9000, max_tokens_per_request: -1 }
  open: { dynamic_bucket_template: { size: 4, fill_rate: 1/m } }
  bare: { enforce: false }
";

/// The requested names: `namespace|bucket`.
const NAMES: [&str; 15] = [
    "shop|cart",
    "shop|soft",
    "shop|shadow",
    "shop|x",
    "shop|y",
    "api|a",
    "api|b",
    "api|c",
    "api|d",
    "api|{e}%7D",
    "open|a",
    "open|ключ",
    "bare|x",
    "nowhere|x",
    "a b|x",
];

fn split(name: &str) -> (&str, &str) {
    name.split_once('|').unwrap()
}

async fn view<S: Looks>(s: &Service<S>, name: &str) -> BucketView {
    s.allow.look(split(name), None).await.unwrap().unwrap()
}

async fn look<S: Looks>(s: &Service<S>, name: &str) -> Look {
    match view(s, name).await.balance {
        Balance::Shared { look, .. } => look,
        alone => panic!("{alone:?}"),
    }
}

/// The balance in tokens.
async fn tokens<S: Looks>(s: &Service<S>, name: &str) -> f64 {
    let view = view(s, name).await;
    let (look, terms) = view.balance.known().unwrap();
    terms.tokens(look.accrued_us(terms))
}

async fn fill<S: Looks>(s: &Service<S>, name: &str, of_default: bool) -> Result<Filled, FillError> {
    s.allow.fill(split(name), of_default, None).await
}

async fn ask<S: Looks>(s: &Service<S>, name: &str, tokens: i64) -> Status {
    let (namespace, bucket) = split(name);
    let query = Query { namespace, bucket, tokens, ..Query::default() };
    s.allow.allow(&query).await.unwrap().status
}

/// What an explanation says of a request for one token.
async fn explained<S: Looks>(s: &Service<S>, name: &str) -> Status {
    let (namespace, bucket) = split(name);
    let query = Query { namespace, bucket, tokens: 1, ..Query::default() };
    s.allow.explain(&query, None).await.unwrap().answer.status
}

/// Random numbers below a bound, the same in every run.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.0 >> 33) % bound
    }
}

async fn explanations_say_what_is_answered<S: Looks>(s: &Service<S>) {
    s.set_limits(LIMITS);
    let (mut random, mut statuses) = (Random(7), HashSet::new());
    for step in 0..600 {
        let (namespace, bucket) = split(NAMES[random.below(NAMES.len() as u64) as usize]);
        let tokens = [0, 1, 2, 3, 4, 13, -1][random.below(7) as usize];
        let max_wait_ms = [None, None, Some(0), Some(700), Some(-1)][random.below(5) as usize];
        let criticality =
            [Criticality::Critical, Criticality::NotCritical][random.below(2) as usize];
        let query = Query { namespace, bucket, tokens, max_wait_ms, criticality };
        let explained = s.allow.explain(&query, None).await.unwrap();
        assert_eq!(explained.answer, s.allow.explain(&query, None).await.unwrap().answer, "twice");
        let answer = s.allow.allow(&query).await.unwrap();
        assert_eq!(explained.answer, answer, "step {step}: {query:?} {:?}", explained.steps);
        let refuses = explained.steps.iter().any(|step| step.effect == Effect::Refuses);
        let lifts = explained.steps.iter().any(|step| step.effect == Effect::Lifts);
        let delays = explained.steps.iter().any(|step| step.effect == Effect::Delays);
        assert_eq!(lifts, answer.shadow, "{query:?} {:?}", explained.steps);
        assert_eq!(refuses, answer.status != Status::Ok || answer.shadow && !delays, "{query:?}");
        statuses.insert(format!("{:?} {}", answer.status, answer.wait_ms > 0));
        s.clock.advance(i64::try_from(random.below(200_000)).unwrap());
    }
    for status in [
        "Ok false",
        "Ok true",
        "Timeout false",
        "TooManyBuckets false",
        "TooManyTokens false",
        "Invalid false",
    ] {
        assert!(statuses.contains(status), "{status}: {statuses:?}");
    }
    // Nothing is left of the limits but what has no bucket at all.
    s.set_limits("namespaces: { bare: { buckets: { x: {} } } }");
    let query = Query { namespace: "bare", bucket: "y", tokens: 1, ..Query::default() };
    let explained = s.allow.explain(&query, None).await.unwrap();
    assert_eq!(explained.answer, s.allow.allow(&query).await.unwrap());
    assert_eq!(explained.answer.status, Status::NoBucket);
    assert_eq!(explained.summary, "would be refused: no bucket serves the name");
}

async fn looks_take_nothing<S: Looks>(s: &Service<S>) {
    s.set_limits(LIMITS);
    let new = look(s, "api|a").await;
    assert_eq!(new.state, None);
    assert_eq!(tokens(s, "api|a").await, 4.0);
    assert_eq!(new.places.map(|places| (places.taken, places.has_place)), Some((0, false)));
    for name in ["api|a", "shop|x", "nowhere|x", "open|a"] {
        for _ in 0..3 {
            assert_eq!(look(s, name).await.state, None, "{name}");
        }
    }
    assert_eq!(ask(s, "shop|cart", 12).await, Status::Ok);
    for _ in 0..3 {
        assert_eq!(tokens(s, "shop|cart").await, -2.0);
    }
    s.clock.advance(SECOND);
    assert_eq!(tokens(s, "shop|cart").await, 0.0);
    assert!(look(s, "shop|cart").await.state.is_some());
    s.clock.advance(3600 * SECOND);
    assert_eq!(tokens(s, "shop|cart").await, 10.0);
    // Under other limits, the balance is what a request would find.
    assert_eq!(ask(s, "shop|cart", 12).await, Status::Ok);
    s.set_limits(
        &LIMITS.replace("cart: { size: 10, fill_rate: 2,", "cart: { size: 4, fill_rate: 4,"),
    );
    assert_eq!(tokens(s, "shop|cart").await, -2.0);
    // Tokens accrue at the old rate until the first request.
    s.clock.advance(SECOND);
    assert_eq!(tokens(s, "shop|cart").await, 0.0);
    // All names without another bucket share one.
    assert_eq!(ask(s, "nowhere|x", 5).await, Status::Ok);
    let view = view(s, "bare|z").await;
    assert_eq!((view.served_by.kind, view.enforced), (BucketKind::GlobalDefault, false));
    assert_eq!(tokens(s, "bare|z").await, 35.0);
}

async fn a_bucket_is_filled_up<S: Looks>(s: &Service<S>) {
    s.set_limits(LIMITS);
    assert_eq!(ask(s, "shop|cart", 12).await, Status::Ok);
    let filled = fill(s, "shop|cart", false).await.unwrap();
    assert_eq!(filled.terms.tokens(filled.before.accrued_us(&filled.terms)), -2.0);
    assert_eq!(tokens(s, "shop|cart").await, 10.0);
    assert_eq!(ask(s, "shop|cart", 10).await, Status::Ok);
    assert_eq!(tokens(s, "shop|cart").await, 0.0);
    // A default bucket is filled up for all of its names, and only on purpose.
    assert_eq!(ask(s, "shop|x", 5).await, Status::Ok);
    assert!(matches!(fill(s, "shop|y", false).await, Err(FillError::Shared(_))));
    assert!(matches!(fill(s, "nowhere|y", false).await, Err(FillError::Shared(_))));
    assert_eq!(fill(s, "shop|cart", true).await, Err(FillError::NotShared));
    assert_eq!(tokens(s, "shop|x").await, 0.0);
    fill(s, "shop|y", true).await.unwrap();
    assert_eq!(tokens(s, "shop|x").await, 5.0);
    assert!(fill(s, "shop|y", true).await.unwrap().before.state.is_none(), "it was full");
    // A dynamic bucket that was filled up makes room for another one.
    for name in ["api|a", "api|b", "api|c"] {
        assert_eq!(ask(s, name, 4).await, Status::Ok);
    }
    assert_eq!(ask(s, "api|d", 1).await, Status::TooManyBuckets);
    assert_eq!(explained(s, "api|d").await, Status::TooManyBuckets);
    fill(s, "api|b", false).await.unwrap();
    assert_eq!(explained(s, "api|d").await, Status::Ok);
    assert_eq!(ask(s, "api|d", 1).await, Status::Ok);
    assert_eq!(ask(s, "api|b", 1).await, Status::TooManyBuckets);
    s.set_limits("namespaces: { bare: {} }");
    assert!(matches!(fill(s, "bare|x", false).await, Err(FillError::NoBucket(_))));
}

/// With more places taken than a lowered bound allows, no new name gets one until enough are free.
async fn a_lowered_bound<S: Looks>(s: &Service<S>) {
    s.set_limits(&LIMITS.replace("max_dynamic_buckets: 3", "max_dynamic_buckets: 5"));
    for name in ["api|a", "api|b", "api|c", "api|d", "api|e"] {
        assert_eq!(ask(s, name, 1).await, Status::Ok);
    }
    s.set_limits(LIMITS);
    for (freed, status) in [
        ("api|a", Status::TooManyBuckets),
        ("api|b", Status::TooManyBuckets),
        ("api|c", Status::Ok),
    ] {
        for name in ["api|new", "api|a"] {
            assert_eq!(explained(s, name).await, ask_for_nothing(s, name).await, "{name} {freed}");
        }
        fill(s, freed, false).await.unwrap();
        assert_eq!(explained(s, "api|new").await, status, "{freed} is free");
    }
    assert_eq!(ask(s, "api|new", 1).await, Status::Ok);
}

/// The answer to a request that takes nothing in any case: it asks for more than there can be.
async fn ask_for_nothing<S: Looks>(s: &Service<S>, name: &str) -> Status {
    match ask(s, name, 1000).await {
        Status::Timeout => Status::Ok,
        other => other,
    }
}

/// An idle bucket is removed although it was looked at.
async fn looks_prolong_nothing<S: Looks>(s: &Service<S>) {
    s.set_limits(LIMITS);
    assert_eq!(ask(s, "api|a", 1).await, Status::Ok);
    for _ in 0..3 {
        s.clock.advance(3 * SECOND);
        assert!(look(s, "api|a").await.state.is_some());
    }
    s.clock.advance(SECOND);
    assert!(look(s, "api|a").await.state.is_none(), "idle for 10 s of 9");
}

testkit::scenarios!(
    explanations_say_what_is_answered,
    looks_take_nothing,
    a_bucket_is_filled_up,
    a_lowered_bound,
    looks_prolong_nothing,
);
