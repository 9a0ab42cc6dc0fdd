//! Shares of holders.

use std::time::Duration;

use tollgate_server::domain::lease::{
    BOUNDLESS, Band, Claim, Holder, HolderRequest, ParentLease, Rules,
};
use tollgate_server::domain::sharing::SharingAlgorithm;
use tollgate_server::service::capacity::{Lease, PriorityWants};
use tollgate_server::store::LeaseRequest;

use super::{
    Both, FAIR, SECOND, START_S, ask, ask_as, claim, gets, holders, leased, near, one, plain,
    release,
};
use testkit::Service;

/// Every order of `0..count`.
fn orders(count: usize) -> Vec<Vec<usize>> {
    if count == 0 {
        return vec![Vec::new()];
    }
    let mut all = Vec::new();
    for order in orders(count - 1) {
        for at in 0..count {
            let mut order = order.clone();
            order.insert(at, count - 1);
            all.push(order);
        }
    }
    all
}

pub(crate) async fn the_worked_examples_in_any_order<S: Both>(s: &Service<S>) {
    for (kind, capacity, wants, expected) in [
        ("FAIR_SHARE", 120.0, &[1000.0, 50.0, 10.0][..], &[60.0, 50.0, 10.0][..]),
        (
            "PROPORTIONAL_SHARE",
            120.0,
            &[1000.0, 50.0, 10.0],
            &[69.690_721_65, 40.309_278_351, 10.0],
        ),
        (
            "PROPORTIONAL_SHARE",
            90.0,
            &[100.0, 50.0, 10.0],
            &[45.0 + 5.0 / 9.0, 34.0 + 4.0 / 9.0, 10.0],
        ),
        ("FAIR_SHARE", 160.0, &[100.0, 50.0, 45.0, 10.0], &[55.0, 50.0, 45.0, 10.0]),
    ] {
        let algorithm = format!(
            "kind: {kind}, lease_length: 60, refresh_interval: 5, learning_mode_duration: 0"
        );
        s.set_limits(&one(capacity, &algorithm));
        for order in orders(wants.len()) {
            let resource = format!("{kind} {capacity} {order:?}");
            let mut got = vec![None; wants.len()];
            for _ in 0..3 {
                for &client in &order {
                    let name = client.to_string();
                    let lease = ask_as(
                        s,
                        Holder::Client(&name),
                        &resource,
                        &plain(wants[client]),
                        got[client].as_ref().and_then(claim),
                    )
                    .await;
                    got[client] = Some(lease);
                    assert!(leased(s, &resource).await <= capacity + 1e-9, "{resource}");
                }
                s.clock.advance(5_000_000);
            }
            for (lease, expected) in got.iter().zip(expected) {
                near(lease.unwrap().capacity, *expected);
            }
        }
    }
}

/// Algorithms that share nothing.
pub(crate) async fn static_and_no_algorithm<S: Both>(s: &Service<S>) {
    let rest = "lease_length: 60, refresh_interval: 5, learning_mode_duration: 0";
    s.set_limits(&one(100.0, &format!("kind: STATIC, {rest}")));
    for (client, wants, expected) in
        [("a", 30.0, 30.0), ("b", 500.0, 100.0), ("c", 100.0, 100.0), ("d", 0.0, 0.0)]
    {
        let lease = ask(s, client, "static", wants).await;
        assert_eq!(
            (lease.capacity, lease.algorithm),
            (expected, SharingAlgorithm::Static),
            "{client}"
        );
        assert_eq!((lease.expiry_s, lease.refresh_interval_s), (START_S + 60, 5));
    }
    near(leased(s, "static").await, 230.0);

    s.set_limits(&one(100.0, &format!("kind: NO_ALGORITHM, {rest}")));
    for (client, wants) in [("a", 30.0), ("b", 1e18), ("c", 0.0)] {
        let lease = ask(s, client, "none", wants).await;
        assert_eq!(
            (lease.capacity, lease.algorithm),
            (wants, SharingAlgorithm::NoAlgorithm),
            "{client}"
        );
    }
    let servers = [3, 9].map(|priority| PriorityWants { priority, clients: 2, wants: 70.0 });
    assert_eq!(ask_as(s, Holder::Server("s"), "none", &servers, None).await.capacity, 140.0);
}

pub(crate) async fn resources_without_a_template<S: Both>(s: &Service<S>) {
    s.set_limits(&format!(
        "resources: [{{ identifier_glob: \"db.*\", capacity: 1, algorithm: {{ {FAIR} }} }}]"
    ));
    let honoured = |capacity| Lease {
        capacity,
        expiry_s: START_S + 300,
        refresh_interval_s: 5,
        safe_capacity: None,
        learning_until_s: None,
        degraded: false,
        algorithm: SharingAlgorithm::NoAlgorithm,
        lease_length_s: 300,
        learning_s: 0,
    };
    for wants in [0.0, 7.5, 1e300] {
        assert_eq!(ask(s, "a", "other", wants).await, honoured(wants));
    }
    // Claims have no effect.
    let has = Some(Claim { capacity: 99.0, expiry_s: START_S + 1000 });
    let lease = ask_as(s, Holder::Client("b"), "other", &plain(2.0), has).await;
    assert_eq!(lease, honoured(2.0));
    let bands = [1, 2].map(|priority| PriorityWants { priority, clients: 5, wants: 4.0 });
    assert_eq!(ask_as(s, Holder::Server("s"), "other", &bands, None).await, honoured(8.0));
    assert_eq!(ask_as(s, Holder::Server("s"), "other", &[], None).await, honoured(0.0));
    // Nothing is stored, and a release is valid.
    assert_eq!(holders(s, "other").await, []);
    release(s, "a", "other").await;
}

pub(crate) async fn template_lookup_order<S: Both>(s: &Service<S>) {
    let globs = ["db.*", "db.users", "a?", "a*", "[x-z]", "*"];
    let templates: Vec<_> = globs
        .iter()
        .enumerate()
        .map(|(at, glob)| {
            let capacity = at + 1;
            format!(
                "{{ identifier_glob: \"{glob}\", capacity: {capacity}, algorithm: {{ {FAIR} }} }}"
            )
        })
        .collect();
    s.set_limits(&format!("resources: [{}]", templates.join(", ")));
    for (resource, template) in [
        ("db.users", "db.users"),
        ("db.user", "db.*"),
        ("db.*", "db.*"),
        // A star does not match a slash, unless it is the whole glob.
        ("db.a/b", "*"),
        ("a/b", "*"),
        // The first match,
        ("ab", "a?"),
        ("abc", "a*"),
        ("a", "a*"),
        // unless another glob is equal to the name.
        ("a*", "a*"),
        ("a?", "a?"),
        ("y", "[x-z]"),
        ("[x-z]", "[x-z]"),
        ("DB.users", "*"),
    ] {
        let at = globs.iter().position(|glob| *glob == template).unwrap();
        near(gets(s, "a", resource, 1000.0).await, (at + 1) as f64);
    }
}

/// More clients than fit on one page of the script.
pub(crate) async fn clients_with_equal_wants<S: Both>(s: &Service<S>) {
    s.set_limits(&one(1000.0, FAIR));
    for round in 0..3 {
        for client in 0..200 {
            let wants = if client % 2 == 0 { 3.0 } else { 50.0 };
            let lease = ask(s, &client.to_string(), "r", wants).await;
            if round == 2 {
                near(lease.capacity, if client % 2 == 0 { 3.0 } else { 7.0 });
            }
        }
        assert!(leased(s, "r").await <= 1000.0 + 1e-9);
    }
}

pub(crate) async fn safe_capacity<S: Both>(s: &Service<S>) {
    s.set_limits(&one(100.0, FAIR));
    for (client, safe) in [("a", 100.0), ("b", 50.0), ("c", 100.0 / 3.0), ("a", 100.0 / 3.0)] {
        near(ask(s, client, "r", 10.0).await.safe_capacity.unwrap(), safe);
    }
    let five = [PriorityWants { priority: 0, clients: 5, wants: 10.0 }];
    let lease = ask_as(s, Holder::Server("s"), "r", &five, None).await;
    near(lease.safe_capacity.unwrap(), 100.0 / 8.0);
    release(s, "b", "r").await;
    near(ask(s, "a", "r", 10.0).await.safe_capacity.unwrap(), 100.0 / 7.0);

    // A configured value applies for any number of clients.
    for safe in [12.5, 0.0, 1e6, -1.0] {
        s.set_limits(&format!(
            "resources: [{{ identifier_glob: \"*\", capacity: 100, safe_capacity: {safe}, \
             algorithm: {{ {FAIR} }} }}]"
        ));
        for client in ["a", "b"] {
            assert_eq!(ask(s, client, "r", 10.0).await.safe_capacity, Some(safe));
        }
    }
}

/// A cluster that may use any amount after the lease from its parent has expired.
pub(crate) async fn unbounded_safe_capacity_of_a_parent<S: Both>(s: &Service<S>) {
    let store = s.capacity.store();
    let algorithm = SharingAlgorithm::FairShare;
    let rules = Rules {
        algorithm: Some(algorithm),
        capacity: 0.0,
        lease_s: 60,
        learning_s: 0,
        from_parent: true,
    };
    let bands = [Band { priority: 0, subclients: 1, wants: 1e12 }];
    let ask = |id| {
        let request = HolderRequest {
            holder: Holder::Client(id),
            bands: &bands,
            claim: None,
            learn_for_us: 0,
        };
        [LeaseRequest::new("r", rules, request)]
    };
    assert_eq!(store.lease(&ask("a")).await[0].as_ref().unwrap().has, 0.0);
    let frozen = store.freeze("r", Duration::from_secs(1)).await.unwrap().unwrap();
    let lease = ParentLease {
        capacity: 5.0,
        expiry_s: START_S + 1,
        refresh_s: 1,
        safe_capacity: BOUNDLESS,
        algorithm,
        lease_s: 60,
    };
    store.thaw("r", frozen.number, Some(lease)).await.unwrap();
    s.clock.advance(2 * SECOND);
    for id in ["a", "b"] {
        let grant = *store.lease(&ask(id)).await[0].as_ref().unwrap();
        assert_eq!((grant.has, grant.capacity), (1e12, BOUNDLESS), "{id}");
    }
}

fn band(priority: i64, clients: i64, wants: f64) -> PriorityWants {
    PriorityWants { priority, clients, wants }
}

pub(crate) async fn servers_count_by_subclients<S: Both>(s: &Service<S>) {
    s.set_limits(&one(120.0, FAIR));
    let south = [band(0, 2, 100.0), band(5, 1, 100.0)];
    let north = [band(-7, 1, 10.0), band(9, 1, 20.0)];
    let mut got = [0.0; 3];
    for _ in 0..3 {
        got = [
            ask_as(s, Holder::Server("south"), "r", &south, None).await.capacity,
            ask_as(s, Holder::Server("north"), "r", &north, None).await.capacity,
            gets(s, "a", "r", 500.0).await,
        ];
        assert!(leased(s, "r").await <= 120.0 + 1e-9);
    }
    // North wants 15 for each of two subclients, less than the level: (120 - 30) / 4.
    near(got[0], 67.5);
    near(got[1], 30.0);
    near(got[2], 22.5);
    let view: Vec<_> = holders(s, "r")
        .await
        .into_iter()
        .map(|lease| (lease.id, lease.server, lease.wants, lease.subclients))
        .collect();
    let expected =
        [("a", false, 500.0, 1.0), ("north", true, 30.0, 2.0), ("south", true, 200.0, 3.0)];
    assert_eq!(view, expected.map(|(id, server, w, n)| (id.to_owned(), server, w, n)));
}

/// Repeated priorities, no bands, and bands without clients.
pub(crate) async fn unusual_bands<S: Both>(s: &Service<S>) {
    s.set_limits(&one(1000.0, FAIR));
    for (bands, wants, subclients) in [
        (&[band(1, 1, 10.0), band(1, 2, 20.0)][..], 30.0, 3.0),
        // A band with wants counts as one client.
        (&[band(1, 0, 5.0), band(2, 0, 0.0), band(3, 2, 0.0)], 5.0, 3.0),
        (&[band(i64::MIN, 1, 1.0), band(i64::MAX, 1, 2.0)], 3.0, 2.0),
        (&[band(0, i64::MAX, 8.0)], 8.0, 1e9),
        (&[band(0, i64::MAX, 4.0), band(0, i64::MAX, 4.0)], 8.0, 1e9),
        (&[band(0, i64::MAX, 4.0), band(1, i64::MAX, 4.0)], 8.0, 1e9),
    ] {
        let lease = ask_as(s, Holder::Server("s"), "r", bands, None).await;
        assert_eq!(lease.capacity, wants, "{bands:?}");
        let held = holders(s, "r").await;
        assert_eq!((held[0].wants, held[0].subclients), (wants, subclients), "{bands:?}");
    }
    // A server without clients and without a claim holds no lease.
    for bands in [&[][..], &[band(1, 0, 0.0)]] {
        ask_as(s, Holder::Server("s"), "r", &[band(0, 1, 1.0)], None).await;
        let lease = ask_as(s, Holder::Server("s"), "r", bands, None).await;
        assert_eq!((lease.capacity, holders(s, "r").await.len()), (0.0, 0));
    }
}

/// A server with a lowered lease has leased out more: others get the difference only as its clients
/// return it.
pub(crate) async fn a_server_gives_back_when_it_can<S: Both>(s: &Service<S>) {
    s.set_limits(&one(100.0, FAIR));
    let server = async |out: Option<f64>, lasts_s: i64| {
        let expiry_s = s.clock.now().as_secs() + lasts_s;
        let has = out.map(|capacity| Claim { capacity, expiry_s });
        ask_as(s, Holder::Server("s"), "r", &plain(100.0), has).await.capacity
    };
    assert_eq!(server(None, 0).await, 100.0);
    assert_eq!(gets(s, "a", "r", 100.0).await, 0.0);
    // Its share is 50, but it claims 100, then 60, then 55.
    assert_eq!(server(Some(100.0), 60).await, 50.0);
    assert_eq!(gets(s, "a", "r", 100.0).await, 0.0);
    assert_eq!(server(Some(60.0), 60).await, 50.0);
    assert_eq!(gets(s, "a", "r", 100.0).await, 40.0);
    near(leased(s, "r").await, 100.0);
    assert_eq!(server(Some(55.0), 60).await, 50.0);
    assert_eq!(gets(s, "a", "r", 100.0).await, 45.0);
    assert_eq!(server(Some(20.0), 60).await, 50.0);
    assert_eq!(gets(s, "a", "r", 100.0).await, 50.0);
    // A claim over its former lease does not count.
    assert_eq!(server(Some(1000.0), 60).await, 50.0);
    near(leased(s, "r").await, 100.0);
    // Nor does an expired claim, nor a server without a claim.
    s.set_limits(&one(40.0, FAIR));
    assert_eq!(server(Some(50.0), 0).await, 0.0);
    near(leased(s, "r").await, 50.0);
    // Another holder gets 20.
    assert_eq!(gets(s, "a", "r", 100.0).await, 20.0);
    assert_eq!(server(None, 0).await, 20.0);
    // A client's claim does not count: it holds what it is granted.
    let has = Some(Claim { capacity: 100.0, expiry_s: START_S + 60 });
    s.set_limits(&one(10.0, FAIR));
    let lease = ask_as(s, Holder::Client("a"), "r", &plain(100.0), has).await;
    assert_eq!(lease.capacity, 0.0);
    near(leased(s, "r").await, 20.0);
}
