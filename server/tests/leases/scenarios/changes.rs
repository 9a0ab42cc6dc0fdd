//! Limits that change while leases are held.

use super::{Both, FAIR, SECOND, START_S, ask, gets, holders, leased, near, one, release};
use testkit::Service;

const FOUR: [&str; 4] = ["a", "b", "c", "d"];

/// Each client requests 100, and no new lease may raise the sum above the capacity.
async fn request_round<S: Both>(s: &Service<S>, capacity: f64) -> Vec<f64> {
    let mut got = Vec::new();
    for client in FOUR {
        let before = leased(s, "r").await;
        got.push(gets(s, client, "r", 100.0).await);
        let after = leased(s, "r").await;
        assert!(after <= before.max(capacity) + 1e-9, "{client}: {after} after {before}");
    }
    got
}

#[track_caller]
fn all_near(found: &[f64], expected: f64) {
    found.iter().for_each(|found| near(*found, expected));
}

pub(crate) async fn capacity_is_lowered<S: Both>(s: &Service<S>) {
    s.set_limits(&one(100.0, FAIR));
    request_round(s, 100.0).await;
    request_round(s, 100.0).await;
    all_near(&request_round(s, 100.0).await, 25.0);
    s.set_limits(&one(40.0, FAIR));
    // The others still hold 75 and then 50, so nothing of 40 is left; then 25 and 10.
    assert_eq!(request_round(s, 40.0).await, [0.0, 0.0, 10.0, 10.0]);
    all_near(&request_round(s, 40.0).await, 10.0);
    // A capacity of 0, without a division by it.
    s.set_limits(&one(0.0, FAIR));
    all_near(&request_round(s, 0.0).await, 0.0);
    all_near(&request_round(s, 0.0).await, 0.0);
    assert_eq!(leased(s, "r").await, 0.0);
    // A new client gets nothing while too much is leased.
    s.set_limits(&one(100.0, FAIR));
    request_round(s, 100.0).await;
    all_near(&request_round(s, 100.0).await, 25.0);
    s.set_limits(&one(70.0, FAIR));
    assert_eq!(gets(s, "new", "r", 5.0).await, 0.0);
    release(s, "a", "r").await;
    assert_eq!(gets(s, "new", "r", 5.0).await, 0.0);
    release(s, "b", "r").await;
    assert_eq!(gets(s, "new", "r", 5.0).await, 5.0);
    assert_eq!(gets(s, "new", "r", 50.0).await, 20.0);
}

pub(crate) async fn capacity_is_raised<S: Both>(s: &Service<S>) {
    s.set_limits(&one(40.0, FAIR));
    request_round(s, 40.0).await;
    all_near(&request_round(s, 40.0).await, 10.0);
    s.set_limits(&one(100.0, FAIR));
    // Every client gets its share at once.
    all_near(&request_round(s, 100.0).await, 25.0);
    s.set_limits(&one(1000.0, FAIR));
    all_near(&request_round(s, 1000.0).await, 100.0);
}

pub(crate) async fn algorithm_changes<S: Both>(s: &Service<S>) {
    let rest = "lease_length: 60, refresh_interval: 5, learning_mode_duration: 0";
    let mut largest = f64::INFINITY;
    for (kind, expected) in [
        ("FAIR_SHARE", [60.0, 50.0, 10.0]),
        ("PROPORTIONAL_SHARE", [69.690_721_65, 40.309_278_351, 10.0]),
        ("FAIR_SHARE", [60.0, 50.0, 10.0]),
        ("STATIC", [120.0, 50.0, 10.0]),
        ("NO_ALGORITHM", [1000.0, 50.0, 10.0]),
        ("FAIR_SHARE", [60.0, 50.0, 10.0]),
        ("STATIC", [120.0, 50.0, 10.0]),
        ("PROPORTIONAL_SHARE", [69.690_721_65, 40.309_278_351, 10.0]),
        ("NO_ALGORITHM", [1000.0, 50.0, 10.0]),
    ] {
        s.set_limits(&one(120.0, &format!("kind: {kind}, {rest}")));
        let shares = kind.ends_with("SHARE");
        let mut got = [0.0; 3];
        for _ in 0..3 {
            for (at, (client, wants)) in
                [("a", 1000.0), ("b", 50.0), ("c", 10.0)].into_iter().enumerate()
            {
                let before = leased(s, "r").await;
                let lease = ask(s, client, "r", wants).await;
                assert_eq!(lease.algorithm.name(), kind);
                got[at] = lease.capacity;
                largest = leased(s, "r").await;
                assert!(!shares || largest <= before.max(120.0) + 1e-9, "{kind}: {largest}");
            }
        }
        for (found, expected) in got.into_iter().zip(expected) {
            near(found, expected);
        }
    }
    near(largest, 1060.0);
}

pub(crate) async fn lease_length_changes<S: Both>(s: &Service<S>) {
    let fair = |length: i64| {
        let rest = "refresh_interval: 5, learning_mode_duration: 0";
        one(100.0, &format!("kind: FAIR_SHARE, lease_length: {length}, {rest}"))
    };
    s.set_limits(&fair(60));
    assert_eq!(ask(s, "a", "r", 60.0).await.expiry_s, START_S + 60);
    s.set_limits(&fair(10));
    let lease = ask(s, "b", "r", 40.0).await;
    assert_eq!((lease.expiry_s, lease.lease_length_s), (START_S + 10, 10));
    // Older, longer leases keep their expiry.
    s.clock.advance(10 * SECOND);
    assert_eq!(gets(s, "c", "r", 100.0).await, 40.0);
    assert_eq!(holders(s, "r").await.len(), 2);
    // A refresh may shorten a lease.
    assert_eq!(ask(s, "a", "r", 60.0).await.expiry_s, START_S + 20);
    s.clock.advance(10 * SECOND);
    assert_eq!(gets(s, "d", "r", 100.0).await, 100.0);
    s.set_limits(&fair(1000));
    assert_eq!(ask(s, "d", "r", 100.0).await.expiry_s, START_S + 1020);
    s.clock.advance(1000 * SECOND - 1);
    assert_eq!(gets(s, "e", "r", 100.0).await, 0.0);
    s.clock.advance(1);
    assert_eq!(gets(s, "e", "r", 100.0).await, 100.0);
}

/// Leases stay valid while no template matches.
pub(crate) async fn template_is_removed_and_added_again<S: Both>(s: &Service<S>) {
    s.set_limits(&one(100.0, FAIR));
    assert_eq!(gets(s, "a", "r", 70.0).await, 70.0);
    s.set_limits("namespaces: {}");
    assert_eq!(gets(s, "b", "r", 500.0).await, 500.0);
    s.set_limits(&one(100.0, FAIR));
    assert_eq!(gets(s, "b", "r", 500.0).await, 30.0);
    // A release needs no template.
    s.set_limits("namespaces: {}");
    release(s, "a", "r").await;
    s.set_limits(&one(100.0, FAIR));
    assert_eq!(gets(s, "b", "r", 500.0).await, 100.0);
}
