//! Learning mode: a new store does not know the existing leases, and learns them from claims.

use tollgate_server::domain::lease::{Claim, Holder};

use super::{Both, SECOND, START_S, ask, ask_as, claim, gets, holders, leased, near, one, plain};
use testkit::Service;

/// An algorithm that learns for its lease length, the default.
const FAIR: &str = "kind: FAIR_SHARE, lease_length: 60, refresh_interval: 5";

fn has(capacity: f64, expiry_s: i64) -> Option<Claim> {
    Some(Claim { capacity, expiry_s })
}

pub(crate) async fn a_newborn_store_learns<S: Both>(s: &Service<S>) {
    s.set_limits(&one(100.0, FAIR));
    for (client, claim, expected) in [
        ("none", None, 0.0),
        ("valid", has(30.0, START_S + 20), 30.0),
        ("for a second", has(20.0, START_S + 1), 20.0),
        ("expired", has(20.0, START_S), 0.0),
        ("long expired", has(20.0, i64::MIN), 0.0),
        ("endless", has(5.0, i64::MAX), 5.0),
        ("empty", has(0.0, START_S + 20), 0.0),
    ] {
        let lease = ask_as(s, Holder::Client(client), "r", &plain(50.0), claim).await;
        assert_eq!(lease.capacity, expected, "{client}");
        assert_eq!(lease.learning_until_s, Some(START_S + 60), "{client}");
        // An ordinary lease, for the lease length from now on.
        assert_eq!((lease.expiry_s, lease.refresh_interval_s), (START_S + 60, 5), "{client}");
        assert_eq!(lease.learning_s, 60);
        let held = holders(s, "r").await;
        let held = held.iter().find(|lease| lease.id == client).unwrap();
        assert_eq!((held.has, held.wants), (expected, 50.0), "{client}");
    }
    near(leased(s, "r").await, 55.0);
    let level = async || s.capacity.holders("r", 1).await.unwrap().unwrap().0.level;
    assert_eq!(level().await, None, "there is no level while learning");
    // A client with a lease over its wants keeps it.
    let lease = ask_as(s, Holder::Client("valid"), "r", &plain(1.0), has(30.0, START_S + 20)).await;
    assert_eq!(lease.capacity, 30.0);

    s.clock.advance(60 * SECOND - 1);
    let lease =
        ask_as(s, Holder::Client("valid"), "r", &plain(100.0), has(30.0, START_S + 60)).await;
    assert_eq!((lease.capacity, lease.learning_until_s), (30.0, Some(START_S + 60)));
    // From that second on the rest is shared.
    s.clock.advance(1);
    let lease = ask(s, "new", "r", 1000.0).await;
    assert_eq!((lease.capacity, lease.learning_until_s), (50.0, None));
    assert_eq!(gets(s, "newer", "r", 1000.0).await, 20.0);
    assert!(level().await.is_some());
}

pub(crate) async fn claims_in_learning_are_not_cut<S: Both>(s: &Service<S>) {
    s.set_limits(&one(100.0, FAIR));
    s.clock.advance(SECOND / 2);
    for (client, capacity) in [("a", 80.0), ("b", 70.0)] {
        let claim = has(capacity, START_S + 30);
        let lease = ask_as(s, Holder::Client(client), "r", &plain(100.0), claim).await;
        assert_eq!(lease.capacity, capacity);
    }
    near(leased(s, "r").await, 150.0);
    s.clock.advance(30 * SECOND);
    for (client, capacity) in [("a", 80.0), ("b", 70.0)] {
        let claim = has(capacity, START_S + 60);
        ask_as(s, Holder::Client(client), "r", &plain(100.0), claim).await;
    }
    // After learning, new clients get nothing until leases over the share have shrunk.
    s.clock.advance(30 * SECOND);
    assert_eq!(gets(s, "c", "r", 100.0).await, 0.0);
    assert_eq!(gets(s, "a", "r", 100.0).await, 30.0);
    assert_eq!(gets(s, "c", "r", 100.0).await, 0.0);
    near(gets(s, "b", "r", 100.0).await, 100.0 / 3.0);
    near(gets(s, "c", "r", 100.0).await, 100.0 / 3.0);
    near(gets(s, "a", "r", 100.0).await, 100.0 / 3.0);
    near(leased(s, "r").await, 100.0);
}

pub(crate) async fn only_a_newborn_store_learns<S: Both>(s: &Service<S>) {
    s.set_limits(&one(100.0, FAIR));
    assert!(ask(s, "a", "old", 100.0).await.learning_until_s.is_some());
    s.clock.advance(60 * SECOND);
    // A new resource is leased at once,
    let claim = has(90.0, START_S + 1000);
    let lease = ask_as(s, Holder::Client("a"), "new", &plain(20.0), claim).await;
    assert_eq!((lease.capacity, lease.learning_until_s), (20.0, None));
    // and so is one without leases.
    s.capacity.release(Holder::Client("a"), &["old", "new"]).await.unwrap();
    s.clock.advance(3600 * SECOND);
    assert_eq!(ask(s, "a", "old", 100.0).await.learning_until_s, None);

    // Another node on the same store does not learn.
    let node = Service::new(s.capacity.store().clone(), s.clock.clone(), &one(100.0, FAIR));
    let lease = ask_as(&node, Holder::Client("b"), "old", &plain(100.0), claim).await;
    assert_eq!((lease.capacity, lease.learning_until_s), (0.0, None));
    assert_eq!(gets(&node, "a", "old", 100.0).await, 50.0);
    let birth = node.capacity.born_s().await.unwrap();
    assert_eq!(birth, Some(START_S));
}

pub(crate) async fn learning_lasts_as_long_as_the_template_says<S: Both>(s: &Service<S>) {
    let resources = [("never", 0), ("shortly", 10), ("long", 600)].map(|(name, learning)| {
        format!(
            "{{ identifier_glob: {name}, capacity: 100, algorithm: {{ {FAIR}, \
             learning_mode_duration: {learning} }} }}"
        )
    });
    s.set_limits(&format!("resources: [{}]", resources.join(", ")));
    let mut learns = Vec::new();
    for after_s in [0, 9, 10, 59, 60, 599, 600] {
        s.clock.advance((START_S + after_s) * SECOND - s.clock.now().0);
        for resource in ["never", "shortly", "long"] {
            // A client without a lease.
            let client = after_s.to_string();
            let lease = ask(s, &client, resource, 1.0).await;
            assert_eq!(lease.capacity, if lease.learning_until_s.is_some() { 0.0 } else { 1.0 });
            if let Some(until_s) = lease.learning_until_s {
                learns.push((after_s, resource, until_s - START_S));
            }
        }
    }
    let long = |after_s| (after_s, "long", 600);
    assert_eq!(
        learns,
        [
            (0, "shortly", 10),
            long(0),
            (9, "shortly", 10),
            long(9),
            long(10),
            long(59),
            long(60),
            long(599)
        ]
    );
    // A reload can prolong the learning of a young store.
    s.set_limits(&one(100.0, &format!("{FAIR}, learning_mode_duration: 1000")));
    assert_eq!(ask(s, "x", "never", 1.0).await.learning_until_s, Some(START_S + 1000));
    s.set_limits(&one(100.0, &format!("{FAIR}, learning_mode_duration: 0")));
    assert_eq!(ask(s, "x", "never", 1.0).await.learning_until_s, None);
}

pub(crate) async fn servers_are_learned_too<S: Both>(s: &Service<S>) {
    s.set_limits(&one(100.0, FAIR));
    let claim = has(80.0, START_S + 60);
    let lease = ask_as(s, Holder::Server("s"), "r", &plain(100.0), claim).await;
    assert_eq!((lease.capacity, lease.learning_until_s), (80.0, Some(START_S + 60)));
    assert_eq!(gets(s, "a", "r", 100.0).await, 0.0);
    s.clock.advance(59 * SECOND);
    let claim = has(80.0, START_S + 60);
    ask_as(s, Holder::Server("s"), "r", &plain(100.0), claim).await;
    s.clock.advance(SECOND);
    assert_eq!(gets(s, "a", "r", 100.0).await, 20.0);
}

pub(crate) async fn a_claim_counts_at_most_what_can_have_been_granted<S: Both>(s: &Service<S>) {
    for (kind, most) in [
        ("FAIR_SHARE", 100.0),
        ("PROPORTIONAL_SHARE", 100.0),
        ("STATIC", 100.0),
        // This algorithm grants all wants.
        ("NO_ALGORITHM", 1e9),
    ] {
        s.set_limits(&one(100.0, &format!("kind: {kind}, lease_length: 60, refresh_interval: 5")));
        for holder in [Holder::Client("liar"), Holder::Server("liar")] {
            let claim = has(1e9, START_S + 60);
            let lease = ask_as(s, holder, kind, &plain(1e9), claim).await;
            assert_eq!((lease.capacity, lease.learning_until_s), (most, Some(START_S + 60)));
            let held = holders(s, kind).await;
            assert!(held.iter().all(|lease| lease.has == most), "{kind} {held:?}");
        }
        s.capacity.release(Holder::Server("liar"), &[kind]).await.unwrap();
        // Others keep their leases, and get their shares after learning.
        let claim = has(40.0, START_S + 60);
        let lease = ask_as(s, Holder::Client("honest"), kind, &plain(40.0), claim).await;
        assert_eq!(lease.capacity, 40.0, "{kind}");
    }
    s.clock.advance(60 * SECOND);
    for kind in ["FAIR_SHARE", "PROPORTIONAL_SHARE"] {
        s.set_limits(&one(100.0, &format!("kind: {kind}, lease_length: 60, refresh_interval: 5")));
        assert_eq!(gets(s, "honest", kind, 40.0).await, 40.0, "{kind}");
    }
}

/// After the capacity is lowered, clients of a lower cluster may still use more.
pub(crate) async fn a_server_keeps_what_it_has_leased_out<S: Both>(s: &Service<S>) {
    s.set_limits(&one(100.0, super::FAIR));
    let lease = ask_as(s, Holder::Server("s"), "r", &plain(80.0), None).await;
    assert_eq!(lease.capacity, 80.0);
    s.set_limits(&one(50.0, super::FAIR));
    let lease = ask_as(s, Holder::Server("s"), "r", &plain(80.0), claim(&lease)).await;
    assert_eq!(lease.capacity, 50.0);
    near(leased(s, "r").await, 80.0);
    assert_eq!(gets(s, "a", "r", 10.0).await, 0.0);
}
