//! Hits and holds of a fake, on Tokio's clock.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use rand::rngs::SmallRng;
use rand::{RngExt as _, SeedableRng as _};
use tokio::time::{Instant, sleep, timeout};
use tollgate_client::{
    AcquireError, Client, DecidedBy, Error, Fake, FakeAnswer, Fallback, Hold, LocalRate, NoAnswer,
    Reason, TenantRequest,
};

const S: Duration = Duration::from_secs(1);
const REQUEST: TenantRequest<'static> = TenantRequest::new("sandbox", "acme");

fn fake() -> (Fake, Client) {
    let fake = Fake::new(FakeAnswer::Grant);
    let client = fake.client().build().unwrap();
    (fake, client)
}

fn refusal(error: AcquireError) -> (Reason, Option<Duration>) {
    match error {
        AcquireError::Refused(refusal) => (refusal.reason, refusal.retry_after),
        other => panic!("{other:?}"),
    }
}

/// How long it takes until the copies are lost.
async fn time_to_loss(held: &Hold) -> Duration {
    let start = Instant::now();
    timeout(600 * S, held.lost()).await.unwrap();
    assert!(!held.is_held());
    start.elapsed()
}

#[tokio::test(start_paused = true)]
async fn a_fake_answers_about_hits() {
    let (fake, client) = fake();
    let hits = client.hits(REQUEST.copies(3)).await.unwrap();
    assert_eq!((hits.granted, hits.decided_by), (3, DecidedBy::Node));
    fake.answer_tenant("sandbox", "acme", FakeAnswer::Refuse(Some(S)));
    assert_eq!(refusal(client.hits(REQUEST).await.unwrap_err()), (Reason::Limit, Some(S)));
    fake.answer_tenant("sandbox", "acme", FakeAnswer::Rate(LocalRate::new(1.0, 4)));
    assert_eq!(client.hits(REQUEST.copies(10).min_copies(4)).await.unwrap().granted, 4);
    let start = Instant::now();
    client.hits(REQUEST.max_wait(10 * S)).await.unwrap();
    assert!(start.elapsed() >= S && start.elapsed() <= 2 * S, "{:?}", start.elapsed());
    let error = client.hits(REQUEST.copies(4).max_wait(2 * S)).await.unwrap_err();
    assert!(refusal(error).1.is_some_and(|after| after > 2 * S));
    fake.answer_tenant("sandbox", "acme", FakeAnswer::NoBucket);
    let error = client.hits(REQUEST).await.unwrap_err();
    let AcquireError::Failed(Error::NoDecision(NoAnswer::NotConfigured(_))) = error else {
        panic!("{error:?}");
    };
    fake.answer_tenant("sandbox", "acme", FakeAnswer::Invalid);
    let error = client.hits(REQUEST).await.unwrap_err();
    assert!(matches!(error, AcquireError::Failed(Error::Invalid(_))), "{error:?}");
}

#[tokio::test(start_paused = true)]
async fn a_fake_knows_what_is_held() {
    let (fake, client) = fake();
    fake.copies("sandbox", 5);
    let first = client.hold(REQUEST.copies(3)).await.unwrap();
    assert_eq!((first.copies(), first.resource(), first.domain()), (3, "sandbox", "acme"));
    let error = client.hold(REQUEST.copies(3)).await.unwrap_err();
    assert_eq!(refusal(error), (Reason::Limit, Some(S)));
    assert_eq!(refusal(client.hold(REQUEST.copies(6)).await.unwrap_err()), (Reason::Limit, None));
    let second = client.hold(REQUEST.copies(6).min_copies(1)).await.unwrap();
    assert_eq!((second.copies(), fake.held("sandbox")), (2, 5));
    first.release().await;
    assert_eq!(fake.held("sandbox"), 2);
    drop(second);
    sleep(S).await;
    assert_eq!(fake.held("sandbox"), 0);
}

#[tokio::test(start_paused = true)]
async fn what_is_lost_is_noticed_at_the_next_renewal() {
    let (fake, client) = fake();
    let held = client.hold(REQUEST.ttl(9 * S)).await.unwrap();
    sleep(100 * S).await;
    assert!(held.is_held() && held.decided_by() == DecidedBy::Node);
    fake.lose("sandbox");
    let time = time_to_loss(&held).await;
    assert!(time <= 3 * S, "{time:?}");
    // There is nothing to release.
    held.release().await;
    let other = client.hold(REQUEST).await.unwrap();
    assert!(other.is_held());
}

#[tokio::test(start_paused = true)]
async fn a_hold_that_nobody_renews_is_lost_a_third_of_its_ttl_early() {
    let (fake, client) = fake();
    let held = client.hold(REQUEST.ttl(9 * S)).await.unwrap();
    fake.answer_tenant("sandbox", "acme", FakeAnswer::NoNode);
    assert_eq!(time_to_loss(&held).await, 6 * S);
}

#[tokio::test(start_paused = true)]
async fn with_a_fallback_a_hold_goes_on_and_is_recorded_again() {
    let fake = Fake::new(FakeAnswer::Grant);
    let client = fake.client().fallback(Fallback::Allow).build().unwrap();
    let held = client.hold(REQUEST.copies(2).ttl(9 * S)).await.unwrap();
    fake.answer_tenant("sandbox", "acme", FakeAnswer::NoNode);
    sleep(100 * S).await;
    assert_eq!((held.is_held(), held.decided_by()), (true, DecidedBy::Fallback));
    // Its session has ended meanwhile.
    fake.lose("sandbox");
    let other = client.hold(REQUEST.copies(7).min_copies(3)).await.unwrap();
    assert_eq!((other.copies(), other.decided_by()), (3, DecidedBy::Fallback));
    fake.answer_tenant("sandbox", "acme", FakeAnswer::Grant);
    sleep(10 * S).await;
    assert_eq!((held.is_held(), held.decided_by()), (true, DecidedBy::Node));
    assert_eq!((other.is_held(), other.decided_by()), (true, DecidedBy::Node));
    assert_eq!(fake.held("sandbox"), 5);
    fake.lose("sandbox");
    assert!(time_to_loss(&held).await <= 3 * S);
}

#[tokio::test(start_paused = true)]
async fn what_the_fallback_granted_is_lost_if_there_is_no_room_later() {
    let fake = Fake::new(FakeAnswer::Grant);
    let client = fake.client().resource_fallback("sandbox", Fallback::Allow).build().unwrap();
    let others = fake.client().build().unwrap();
    fake.copies("sandbox", 1);
    fake.answer_tenant("sandbox", "acme", FakeAnswer::NoNode);
    let held = client.hold(REQUEST.ttl(9 * S)).await.unwrap();
    let other = others.hold(TenantRequest::new("sandbox", "other")).await.unwrap();
    sleep(100 * S).await;
    assert!(held.is_held() && other.is_held());
    fake.answer_tenant("sandbox", "acme", FakeAnswer::Grant);
    assert!(time_to_loss(&held).await <= 3 * S);
    assert!(other.is_held());
    assert_eq!(fake.held("sandbox"), 1);
}

#[tokio::test(start_paused = true)]
async fn a_fallback_can_refuse_or_be_of_another_resource() {
    let fake = Fake::new(FakeAnswer::NoNode);
    let refused = Arc::new(Mutex::new(Vec::new()));
    let told = Arc::clone(&refused);
    let client = fake
        .client()
        .fallback(Fallback::Deny)
        .resource_fallback("search", Fallback::rate(0.0, 3))
        .on_tenant_refused(move |request, _| {
            let (resource, domain) = (request.resource().to_owned(), request.domain().to_owned());
            told.lock().unwrap().push(format!("{resource} {domain}"));
        })
        .build()
        .unwrap();
    assert_eq!(refusal(client.hold(REQUEST).await.unwrap_err()), (Reason::Unavailable, None));
    let search = TenantRequest::new("search", "acme").copies(10).min_copies(2);
    let hits = client.hits(search).await.unwrap();
    assert_eq!((hits.granted, hits.decided_by), (2, DecidedBy::Fallback));
    assert_eq!(refusal(client.hits(search).await.unwrap_err()), (Reason::Limit, None));
    assert_eq!(*refused.lock().unwrap(), ["sandbox acme", "search acme"]);
}

#[tokio::test(start_paused = true)]
async fn a_client_that_is_closed_lets_go() {
    let (fake, client) = fake();
    let mut held = Vec::new();
    for _ in 0..1000 {
        held.push(client.hold(REQUEST).await.unwrap());
    }
    client.close().await;
    assert_eq!(fake.held("sandbox"), 0);
    assert!(held.iter().all(|held| !held.is_held()));
    let error = client.hold(REQUEST).await.unwrap_err();
    let AcquireError::Failed(Error::NoDecision(NoAnswer::Closed)) = error else {
        panic!("{error:?}");
    };
    // Hits have no need of what was closed.
    client.hits(REQUEST).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn holds_outlive_the_client_and_end_with_its_last_hold() {
    let (fake, client) = fake();
    let held = client.hold(REQUEST).await.unwrap();
    drop(client);
    sleep(100 * S).await;
    assert!(held.is_held());
    drop(held);
    sleep(S).await;
    assert_eq!(fake.held("sandbox"), 0);
}

#[tokio::test(start_paused = true)]
async fn the_ttl_is_bounded() {
    let (_fake, client) = fake();
    for ttl in [S.mul_f64(0.999), 86_401 * S] {
        let error = client.hold(REQUEST.ttl(ttl)).await.unwrap_err();
        assert!(matches!(error, AcquireError::Failed(Error::Invalid(_))), "{error:?}");
    }
    for ttl in [S, 86_400 * S] {
        drop(client.hold(REQUEST.ttl(ttl)).await.unwrap());
    }
}

/// A hold whose runtime has ended has nobody who renews it.
#[test]
fn a_hold_whose_runtime_has_ended_is_lost() {
    let runtime = testkit::runtime();
    let (_fake, client, held) = runtime.block_on(async {
        let (fake, client) = fake();
        let held = client.hold(REQUEST).await.unwrap();
        (fake, client, held)
    });
    assert!(held.is_held());
    drop(runtime);
    assert!(!held.is_held());
    drop(client);
}

/// After any history, the nodes know exactly the copies that the application holds.
#[tokio::test(start_paused = true)]
async fn nothing_leaks_over_random_histories() {
    for seed in 0..100 {
        let mut random = SmallRng::seed_from_u64(seed);
        let fake = Fake::new(FakeAnswer::Grant);
        let builder = fake.client();
        let client = match seed % 2 {
            0 => builder.build().unwrap(),
            _ => builder.fallback(Fallback::Allow).build().unwrap(),
        };
        let may_lose = seed % 4 < 2;
        fake.copies("sandbox", 10);
        let domains = ["acme", "other"];
        let mut all: Vec<Hold> = Vec::new();
        for _ in 0..200 {
            let domain = domains[random.random_range(0..2)];
            match random.random_range(0..10) {
                0..4 => {
                    let request = TenantRequest::new("sandbox", domain);
                    let request = request.copies(random.random_range(1..5)).min_copies(1);
                    let request = request.ttl(random.random_range(1..30) * S);
                    all.extend(client.hold(request).await);
                }
                4 if !all.is_empty() => {
                    let held = all.swap_remove(random.random_range(0..all.len()));
                    held.release().await;
                }
                5 if !all.is_empty() => {
                    drop(all.swap_remove(random.random_range(0..all.len())));
                }
                6 => fake.answer_tenant("sandbox", domain, FakeAnswer::NoNode),
                7 => fake.answer_tenant("sandbox", domain, FakeAnswer::Grant),
                8 if may_lose && random.random_range(0..4) == 0 => fake.lose("sandbox"),
                _ => sleep(random.random_range(0..8000) * S / 1000).await,
            }
            let is_recorded = |held: &&Hold| held.is_held() && held.decided_by() == DecidedBy::Node;
            let recorded: u64 = all.iter().filter(is_recorded).map(Hold::copies).sum();
            // Nobody uses copies whose session is over.
            assert!(may_lose || recorded <= fake.held("sandbox"), "seed {seed}");
        }
        for domain in domains {
            fake.answer_tenant("sandbox", domain, FakeAnswer::Grant);
        }
        sleep(60 * S).await;
        all.retain(Hold::is_held);
        sleep(60 * S).await;
        let held: u64 = all.iter().map(Hold::copies).sum();
        assert_eq!(fake.held("sandbox"), held, "seed {seed}");
        assert!(all.iter().all(|held| held.decided_by() == DecidedBy::Node), "seed {seed}");
        all.clear();
        sleep(60 * S).await;
        assert_eq!(fake.held("sandbox"), 0, "seed {seed}");
    }
}
