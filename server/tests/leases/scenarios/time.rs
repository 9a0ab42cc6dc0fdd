//! Expiry of leases.

use tollgate_server::domain::lease::Holder;

use super::{
    Both, FAIR, SECOND, START_S, ask, ask_as, claim, gets, holders, leased, near, one, plain,
    release,
};
use testkit::Service;

pub(crate) async fn a_lease_ends_at_its_second<S: Both>(s: &Service<S>) {
    s.set_limits(&one(100.0, FAIR));
    // Expiries are whole seconds, so the lease is slightly shorter than its length.
    s.clock.advance(999_999);
    let lease = ask(s, "a", "r", 100.0).await;
    assert_eq!((lease.capacity, lease.expiry_s), (100.0, START_S + 60));
    assert_eq!((lease.refresh_interval_s, lease.lease_length_s), (5, 60));
    assert_eq!(gets(s, "b", "r", 100.0).await, 0.0);
    release(s, "b", "r").await;
    s.clock.advance(59 * SECOND);
    assert_eq!(s.clock.now().0, (START_S + 60) * SECOND - 1);
    assert_eq!(gets(s, "b", "r", 100.0).await, 0.0);
    s.clock.advance(1);
    assert_eq!(gets(s, "b", "r", 100.0).await, 100.0);
    let held: Vec<_> = holders(s, "r").await.into_iter().map(|lease| lease.id).collect();
    assert_eq!(held, ["b"]);
    // A late holder is an ordinary client.
    assert_eq!(gets(s, "a", "r", 100.0).await, 0.0);
}

pub(crate) async fn a_release_frees_at_once<S: Both>(s: &Service<S>) {
    s.set_limits(&one(100.0, FAIR));
    assert_eq!(gets(s, "a", "r", 100.0).await, 100.0);
    assert_eq!(gets(s, "a", "q", 100.0).await, 100.0);
    assert_eq!(gets(s, "b", "r", 100.0).await, 0.0);
    // Leases that are not held are ignored; an unknown resource is valid.
    for (client, resource) in [("nobody", "r"), ("a", "unknown"), ("b", "q")] {
        release(s, client, resource).await;
        assert_eq!((leased(s, "r").await, leased(s, "q").await), (100.0, 100.0));
    }
    s.capacity.release(Holder::Client("a"), &[]).await.unwrap();
    s.capacity.release(Holder::Client("a"), &["r", "unknown"]).await.unwrap();
    assert_eq!(gets(s, "b", "r", 100.0).await, 100.0);
    // Only the named lease is released.
    assert_eq!(leased(s, "q").await, 100.0);
    // A second time changes nothing.
    release(s, "a", "r").await;
    assert_eq!(leased(s, "r").await, 100.0);
    for resource in ["r", "q"] {
        for client in ["a", "b"] {
            release(s, client, resource).await;
        }
        assert_eq!(holders(s, resource).await, []);
    }
    assert_eq!(s.capacity.resources(10).await.unwrap().items, []);
}

pub(crate) async fn a_crashed_client<S: Both>(s: &Service<S>) {
    s.set_limits(&one(90.0, FAIR));
    for _ in 0..2 {
        for client in ["a", "b", "crashes"] {
            ask(s, client, "r", 100.0).await;
        }
    }
    near(leased(s, "r").await, 90.0);
    for second in (5..60).step_by(5) {
        s.clock.advance(5 * SECOND);
        for client in ["a", "b"] {
            near(gets(s, client, "r", 100.0).await, 30.0);
        }
        assert!(second < 60);
        near(leased(s, "r").await, 90.0);
    }
    s.clock.advance(5 * SECOND);
    for client in ["a", "b"] {
        near(gets(s, client, "r", 100.0).await, 45.0);
    }
}

pub(crate) async fn a_refresh_goes_on_from_now<S: Both>(s: &Service<S>) {
    s.set_limits(&one(100.0, FAIR));
    let mut lease = ask(s, "a", "r", 70.0).await;
    for refresh in 1..=20 {
        s.clock.advance(5 * SECOND);
        let has = claim(&lease);
        lease = ask_as(s, Holder::Client("a"), "r", &plain(70.0), has).await;
        assert_eq!((lease.capacity, lease.expiry_s), (70.0, START_S + 5 * refresh + 60));
        assert_eq!(gets(s, "b", "r", 30.0).await, 30.0);
    }
    // The client holds one lease, also with other wants.
    assert_eq!(gets(s, "a", "r", 20.0).await, 20.0);
    assert_eq!(gets(s, "b", "r", 100.0).await, 80.0);
    assert_eq!(holders(s, "r").await.len(), 2);
}

/// More leases than one decision removes. Leases that are not removed yet still count.
pub(crate) async fn many_leases_expire_together<S: Both>(s: &Service<S>) {
    const MASS: usize = 1500;
    s.set_limits(&one(MASS as f64, FAIR));
    for client in 0..MASS {
        assert_eq!(gets(s, &client.to_string(), "r", 1.0).await, 1.0);
    }
    s.clock.advance(60 * SECOND);
    let first = gets(s, "new", "r", MASS as f64).await;
    assert!(first <= 1000.0, "{first}");
    assert_eq!(gets(s, "new", "r", MASS as f64).await, MASS as f64);
    assert_eq!(holders(s, "r").await.len(), 1);
}

/// Leases only last longer.
pub(crate) async fn a_clock_that_steps_back<S: Both>(s: &Service<S>) {
    s.set_limits(&one(100.0, FAIR));
    ask(s, "a", "r", 60.0).await;
    s.clock.advance(-30 * SECOND);
    let lease = ask(s, "b", "r", 60.0).await;
    assert_eq!((lease.capacity, lease.expiry_s), (40.0, START_S + 30));
    s.clock.advance(60 * SECOND);
    assert_eq!(gets(s, "c", "r", 60.0).await, 40.0);
    s.clock.advance(30 * SECOND);
    release(s, "c", "r").await;
    assert_eq!(gets(s, "d", "r", 100.0).await, 100.0);
}
