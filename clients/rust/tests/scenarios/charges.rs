//! What requests have cost beyond their tokens.

use std::time::Duration;

use testkit::metrics::Scrape;
use testkit::{LimitsFile, Node, TEST_TIMEOUT, eventually};
use tokio::time::sleep;
use tollgate_client::{Fake, FakeAnswer, LocalRate};

use crate::builder;

const S: Duration = Duration::from_secs(1);

#[tokio::test(start_paused = true)]
async fn charges_are_put_together() {
    let fake = Fake::new(FakeAnswer::Grant);
    let client = fake.client().build().unwrap();
    for _ in 0..1000 {
        client.charge("db", "rows", 3);
        client.charge("db", "bytes", 0);
    }
    sleep(S).await;
    assert_eq!(fake.asked("db", "rows"), [3000]);
    assert!(fake.asked("db", "bytes").is_empty());
    client.charge("db", "rows", 7);
    sleep(S).await;
    assert_eq!(fake.asked("db", "rows"), [3000, 7]);
}

#[tokio::test(start_paused = true)]
async fn what_is_refused_is_charged_later_and_what_is_too_much_in_parts() {
    let fake = Fake::new(FakeAnswer::Grant);
    // More than eight are never granted at once.
    let rate = LocalRate::new(10.0, 8);
    fake.answer("db", "rows", FakeAnswer::Rate(rate));
    let client = fake.client().build().unwrap();
    client.charge("db", "rows", 100);
    sleep(20 * S).await;
    let asked = fake.asked("db", "rows");
    assert_eq!(asked[..5], [100, 50, 25, 12, 6]);
    // Without an answer, later, too.
    fake.answer("db", "rows", FakeAnswer::NoNode);
    client.charge("db", "rows", 5);
    sleep(5 * S).await;
    let before = fake.asked("db", "rows").len();
    fake.answer("db", "rows", FakeAnswer::Grant);
    sleep(10 * S).await;
    assert_eq!(fake.asked("db", "rows")[before..], [5]);
    // What can never be charged is dropped.
    fake.answer("db", "rows", FakeAnswer::NoBucket);
    client.charge("db", "rows", 5);
    sleep(5 * S).await;
    fake.answer("db", "rows", FakeAnswer::Grant);
    let before = fake.asked("db", "rows").len();
    sleep(5 * S).await;
    assert_eq!(fake.asked("db", "rows").len(), before);
}

#[tokio::test(start_paused = true)]
async fn what_nobody_takes_for_a_minute_is_dropped() {
    let fake = Fake::new(FakeAnswer::Refuse(Some(100 * S)));
    let client = fake.client().build().unwrap();
    for _ in 0..100 {
        client.charge("db", "rows", 5);
        sleep(S).await;
    }
    // What was charged in the first minute is gone.
    fake.answer("db", "rows", FakeAnswer::Grant);
    sleep(20 * S).await;
    let asked = fake.asked("db", "rows");
    assert!(asked.last().is_some_and(|last| *last < 300), "{asked:?}");
    // Each refused request was made after a longer pause than the one before.
    assert!(asked.len() < 40, "{asked:?}");
}

#[tokio::test(start_paused = true)]
async fn what_is_open_is_charged_when_the_client_ends() {
    let fake = Fake::new(FakeAnswer::Grant);
    let client = fake.client().build().unwrap();
    client.close().await;
    client.charge("db", "rows", 5);
    client.close().await;
    assert_eq!(fake.asked("db", "rows"), [5]);
    client.charge("db", "rows", 6);
    drop(client);
    sleep(S).await;
    assert_eq!(fake.asked("db", "rows"), [5, 6]);
}

#[tokio::test(flavor = "multi_thread")]
async fn charges_are_taken_from_the_bucket() {
    let limits = "namespaces:
  a:
    buckets:
      rows: { size: 10000, fill_rate: 1/h, max_tokens_per_request: 1000 }
";
    let limits = LimitsFile::new(limits);
    let node = Node::start(&limits.path(), &[]);
    let clients = [(); 2].map(|()| builder(&[node.grpc]).build().unwrap());
    for _ in 0..500 {
        for client in &clients {
            client.charge("a", "rows", 7);
        }
    }
    let granted = || {
        let labels = [("namespace", "a"), ("bucket", "rows")];
        Scrape::of(node.http).sum("tollgate_tokens_granted_total", &labels)
    };
    eventually("all is charged", TEST_TIMEOUT, || granted() >= 7000.0);
    for client in &clients {
        client.close().await;
    }
    assert_eq!(granted(), 7000.0);
}
