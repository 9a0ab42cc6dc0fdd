//! Names, invalid requests, and limits on requests.

use tollgate_server::domain::lease::{Claim, Holder, MAX_SUBCLIENTS};
use tollgate_server::domain::names::CallerId;
use tollgate_server::service::Error;
use tollgate_server::service::capacity::{CapacityRequest, LeaseCaller, PriorityWants};

use super::{Both, FAIR, SECOND, START_S, ask, ask_as, gets, holders, near, one, plain, release};
use testkit::Service;

fn odd() -> Vec<String> {
    let names = [
        "{", "}", "{}", "}{", "{a}", "a}", "%7B", "a b", " ", "a\0b", "\0", "\n", "\r\n", "\u{fe}",
        "\u{fe}a", "a", "A", "ä", "a\u{308}", "*", "h{a}", "nan", "-1", "\"", "\\", "🦀",
    ];
    let mut names: Vec<_> = names.iter().map(|&name| name.to_owned()).collect();
    names.extend(["x".repeat(1024), "x".repeat(1023), "é".repeat(512)]);
    names
}

/// Names do not collide, neither of clients nor of resources.
pub(crate) async fn names_do_not_collide<S: Both>(s: &Service<S>) {
    let names = odd();
    let count = names.len() as f64;
    s.set_limits(&one(count, FAIR));
    for round in 0..3 {
        for name in &names {
            for (at, resource) in names.iter().enumerate() {
                // All clients on one resource, and one client on all.
                if at > 0 && name != "a" {
                    continue;
                }
                let got = gets(s, name, resource, 2.0).await;
                if round == 2 {
                    near(got, if at == 0 { 1.0 } else { 2.0 });
                }
            }
        }
    }
    let mut sorted = names.clone();
    sorted.sort();
    let held: Vec<_> = holders(s, &names[0]).await.into_iter().map(|lease| lease.id).collect();
    assert_eq!(held, sorted);
    let listed = s.capacity.resources(100).await.unwrap();
    let listed: Vec<_> = listed.items.into_iter().map(|view| view.resource).collect();
    assert_eq!(listed, sorted);
    for name in &names {
        release(s, name, &names[0]).await;
        release(s, "a", name).await;
    }
    assert_eq!(s.capacity.resources(100).await.unwrap().items, []);
}

pub(crate) async fn a_client_and_a_server_of_the_same_name<S: Both>(s: &Service<S>) {
    s.set_limits(&one(100.0, FAIR));
    for name in ["a", "\u{fe}", "\u{fe}a"] {
        for _ in 0..2 {
            ask_as(s, Holder::Server(name), name, &plain(100.0), None).await;
            ask_as(s, Holder::Client(name), name, &plain(100.0), None).await;
        }
        let held: Vec<_> =
            holders(s, name).await.into_iter().map(|l| (l.id, l.server, l.has)).collect();
        let both = [false, true].map(|server| (name.to_owned(), server, 50.0));
        assert_eq!(held, both);
        release(s, name, name).await;
        let held: Vec<_> = holders(s, name).await.into_iter().map(|l| l.server).collect();
        assert_eq!(held, [true]);
        s.capacity.release(Holder::Server(name), &[name]).await.unwrap();
        assert_eq!(holders(s, name).await, []);
    }
}

fn request(resource: &str, wants: f64) -> CapacityRequest<'_> {
    CapacityRequest {
        resource,
        wants: plain(wants).into(),
        has: None,
        most_clients: MAX_SUBCLIENTS,
    }
}

fn with(resource: &str, wants: Vec<PriorityWants>) -> CapacityRequest<'_> {
    CapacityRequest { resource, wants: wants.into(), has: None, most_clients: MAX_SUBCLIENTS }
}

fn holding(capacity: f64) -> CapacityRequest<'static> {
    CapacityRequest { has: Some(Claim { capacity, expiry_s: START_S + 9 }), ..request("r", 1.0) }
}

pub(crate) async fn invalid_requests_are_refused<S: Both>(s: &Service<S>) {
    s.set_limits(&one(100.0, FAIR));
    let (a, long) = (Holder::Client("a"), "x".repeat(1025));
    let band = |priority, clients| PriorityWants { priority, clients, wants: 1.0 };
    let many: Vec<String> = (0..10_001).map(|at| at.to_string()).collect();
    let of_all = |wants| many.iter().map(|name| request(name, wants)).collect::<Vec<_>>();
    let mut last_wrong = of_all(1.0);
    last_wrong.pop();
    last_wrong[9999].wants = (0..101).map(|priority| band(priority, 1)).collect();
    let at_least = "must be a finite number of at least 0, not";
    for (holder, requests, error) in [
        (Holder::Client(""), vec![request("r", 1.0)], "client_id is empty".to_owned()),
        (Holder::Server(""), vec![request("r", 1.0)], "server_id is empty".to_owned()),
        (Holder::Client(""), vec![], "client_id is empty".to_owned()),
        (
            Holder::Client(&long),
            vec![request("r", 1.0)],
            "client_id is 1025 bytes long, at most 1024 are allowed".to_owned(),
        ),
        (
            Holder::Server(&long),
            vec![request("r", 1.0)],
            "server_id is 1025 bytes long, at most 1024 are allowed".to_owned(),
        ),
        (a, vec![request("r", 1.0), request("", 1.0)], "resource_id is empty".to_owned()),
        (
            a,
            vec![request("r", 1.0), request(&long, 1.0)],
            "resource_id is 1025 bytes long, at most 1024 are allowed".to_owned(),
        ),
        (
            a,
            vec![request("r", 1.0), request("q\n", 1.0), request("q\n", 2.0)],
            "resource_id \"q\\n\" occurs more than once: name each resource once".to_owned(),
        ),
        (a, of_all(1.0), "resource: 10001 in one request, at most 10000 are allowed".to_owned()),
        (
            a,
            vec![request("q", 1.0), request("r", -0.5)],
            format!("wants of resource \"r\" {at_least} -0.5"),
        ),
        (a, vec![request("r", f64::NAN)], format!("wants of resource \"r\" {at_least} NaN")),
        (a, vec![request("r", f64::INFINITY)], format!("wants of resource \"r\" {at_least} inf")),
        (a, vec![holding(-1.0)], format!("has.capacity of resource \"r\" {at_least} -1")),
        (a, vec![holding(f64::NAN)], format!("has.capacity of resource \"r\" {at_least} NaN")),
        (
            a,
            vec![holding(f64::NEG_INFINITY)],
            format!("has.capacity of resource \"r\" {at_least} -inf"),
        ),
        (
            Holder::Server("s"),
            vec![request("q", 1.0), with("r", vec![band(0, 3), band(1, -1)])],
            "num_clients of resource \"r\" is -1, less than 0".to_owned(),
        ),
        (
            Holder::Server("s"),
            vec![request("q", 1.0), with("r", (0..101).map(|p| band(p, 1)).collect())],
            "resource \"r\": wants has more than 100 priorities".to_owned(),
        ),
        (
            Holder::Server("s"),
            last_wrong,
            "resource \"9999\": wants has more than 100 priorities".to_owned(),
        ),
    ] {
        let refused = s.capacity.get(holder, &requests).await;
        assert_eq!(refused, Err(Error::Invalid(error)));
    }
    // Valid parts of invalid requests were not decided, either.
    assert_eq!(s.capacity.resources(1).await.unwrap().items, []);

    gets(s, "a", "r", 100.0).await;
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    for (holder, resources, error) in [
        (Holder::Client(""), &["r"][..], "client_id is empty"),
        (a, &["r", &long], "resource_id is 1025 bytes long, at most 1024 are allowed"),
        (a, &many, "resource: 10001 in one request, at most 10000 are allowed"),
    ] {
        let refused = s.capacity.release(holder, resources).await;
        assert_eq!(refused, Err(Error::Invalid(error.to_owned())));
    }
    assert_eq!(holders(s, "r").await.len(), 1);
    // Older clients close with empty and repeated names.
    s.capacity.release(a, &["", "", "r", "r"]).await.unwrap();
    assert_eq!(holders(s, "r").await.len(), 0);
}

pub(crate) async fn the_largest_allowed_requests<S: Both>(s: &Service<S>) {
    s.set_limits(&one(1000.0, FAIR));
    assert_eq!(s.capacity.get(Holder::Client("a"), &[]).await, Ok(Vec::new()));
    let bands: Vec<_> = (0..100)
        .flat_map(|priority| [PriorityWants { priority, clients: 1, wants: 0.5 }; 2])
        .collect();
    let lease = ask_as(s, Holder::Server("s"), "r", &bands, None).await;
    assert_eq!(lease.capacity, 100.0);
    assert_eq!(holders(s, "r").await[0].subclients, 200.0);
    let names: Vec<_> = (0..10_000).map(|at| at.to_string()).collect();
    let requests: Vec<_> = names.iter().map(|name| request(name, 1.0)).collect();
    assert_eq!(s.capacity.get(Holder::Client("a"), &requests).await.unwrap().len(), 10_000);
    let names: Vec<_> = names.iter().map(String::as_str).collect();
    s.capacity.release(Holder::Client("a"), &names).await.unwrap();
    assert_eq!(s.capacity.resources(10).await.unwrap().items.len(), 1);
}

/// Beyond a template's `max_resources`, existing resources are still leased.
pub(crate) async fn a_template_bounds_its_resources<S: Both>(s: &Service<S>) {
    let limits = |most: u64| {
        format!(
            "resources: [{{ identifier_glob: \"*\", capacity: 100, max_resources: {most}, \
             algorithm: {{ {FAIR} }} }}]"
        )
    };
    s.set_limits(&limits(2));
    for (round, expected) in [(0, [7.0, 7.0, 0.0]), (1, [7.0, 7.0, 0.0])] {
        // One by one, as the node learns the number from the answers.
        for (name, expected) in ["a", "b", "c"].into_iter().zip(expected) {
            let lease = ask(s, "client", name, 7.0).await;
            assert_eq!(lease.capacity, expected, "round {round}: {name}");
            assert_eq!((lease.refresh_interval_s, lease.learning_until_s), (5, None));
            assert_eq!(lease.expiry_s, START_S + 60);
        }
    }
    let requests = ["d", "a", "e", "b"].map(|name| request(name, 8.0));
    let leases = s.capacity.get(Holder::Client("client"), &requests).await.unwrap();
    let got: Vec<f64> = leases.iter().map(|lease| lease.capacity).collect();
    assert_eq!(got, [0.0, 8.0, 0.0, 8.0]);
    assert_eq!(s.capacity.resources(10).await.unwrap().items.len(), 2);

    // The next count finds the freed place.
    release(s, "client", "a").await;
    assert_eq!(gets(s, "client", "c", 7.0).await, 0.0);
    s.capacity.gauge().await.unwrap();
    assert_eq!(gets(s, "client", "c", 7.0).await, 7.0);
    assert_eq!(gets(s, "client", "a", 7.0).await, 0.0);

    // A new bound applies at once.
    s.set_limits(&limits(3));
    assert_eq!(gets(s, "client", "a", 7.0).await, 7.0);
    assert_eq!(gets(s, "client", "d", 7.0).await, 0.0);
    s.set_limits(&limits(0));
    assert_eq!(gets(s, "client", "d", 7.0).await, 7.0);
}

/// A caller's bound does not affect others.
pub(crate) async fn a_caller_bounds_its_resources<S: Both>(s: &Service<S>) {
    s.set_limits(&one(100.0, FAIR));
    let shop = LeaseCaller { id: Some(CallerId::new("shop")), max_resources: Some(2) };
    let bank = LeaseCaller { id: Some(CallerId::new("bank")), max_resources: None };
    for (caller, names, expected) in [
        (shop, ["a", "b", "c"], [7.0, 7.0, 0.0]),
        (bank, ["c", "d", "e"], [7.0, 7.0, 7.0]),
        (shop, ["c", "b", "a"], [0.0, 7.0, 7.0]),
    ] {
        let requests = names.map(|name| request(name, 7.0));
        let leases = s.capacity.get_for(caller, Holder::Client("client"), &requests).await.unwrap();
        let got: Vec<f64> = leases.iter().map(|lease| lease.capacity).collect();
        assert_eq!(got, expected);
        assert!(leases.iter().all(|lease| lease.refresh_interval_s == 5));
    }
    s.clock.advance(61 * SECOND);
    let requests = [request("c", 7.0)];
    let leases = s.capacity.get_for(shop, Holder::Client("client"), &requests).await.unwrap();
    assert_eq!(leases[0].capacity, 7.0, "its leases have expired");
}

/// A resource whose lease was released or refused does not count against its caller's bound.
pub(crate) async fn released_and_refused_resources_do_not_count<S: Both>(s: &Service<S>) {
    let limits = format!(
        "resources:
  - {{ identifier_glob: \"full.*\", capacity: 100, max_resources: 1, algorithm: {{ {FAIR} }} }}
  - {{ identifier_glob: \"*\", capacity: 100, algorithm: {{ {FAIR} }} }}
"
    );
    s.set_limits(&limits);
    gets(s, "other", "full.1", 7.0).await;
    let shop = LeaseCaller { id: Some(CallerId::new("shop")), max_resources: Some(1) };
    let get = async |holder, name| {
        s.capacity.get_for(shop, holder, &[request(name, 7.0)]).await.unwrap()[0].capacity
    };
    let client = Holder::Client("client");
    assert_eq!(get(client, "full.2").await, 0.0, "the template is full");
    assert_eq!(get(client, "a").await, 7.0);
    assert_eq!(get(client, "b").await, 0.0);
    s.capacity.release_for(shop, client, &["a"]).await.unwrap();

    let server = Holder::Server("server");
    assert_eq!(get(server, "b").await, 7.0);
    let release = CapacityRequest { wants: [][..].into(), ..request("b", 0.0) };
    s.capacity.get_for(shop, server, &[release]).await.unwrap();
    assert_eq!(get(server, "c").await, 7.0);
}

pub(crate) async fn many_resources_in_order<S: Both>(s: &Service<S>) {
    s.set_limits(&format!(
        "resources: [{{ identifier_glob: \"even.*\", capacity: 300, algorithm: {{ {FAIR} }} }}]"
    ));
    let names: Vec<_> =
        (0..600).map(|at| format!("{}.{at}", if at % 2 == 0 { "even" } else { "odd" })).collect();
    let requests: Vec<_> =
        names.iter().enumerate().map(|(at, name)| request(name, at as f64)).collect();
    let leases = s.capacity.get(Holder::Client("a"), &requests).await.unwrap();
    let got: Vec<_> = leases.iter().map(|lease| lease.capacity).collect();
    // The odd ones match no template.
    let expected: Vec<_> =
        (0..600).map(|at| f64::from(if at % 2 == 0 { at.min(300) } else { at })).collect();
    assert_eq!(got, expected);
    let lengths: Vec<_> = leases.iter().map(|lease| lease.lease_length_s).collect();
    assert_eq!(lengths, [60, 300].repeat(300));
    for at in [0, 2, 298, 598] {
        assert_eq!(holders(s, &names[at]).await[0].wants, at as f64);
    }
    assert_eq!(s.capacity.resources(1000).await.unwrap().items.len(), 300);
    let names: Vec<_> = names.iter().map(String::as_str).collect();
    s.capacity.release(Holder::Client("a"), &names).await.unwrap();
    assert_eq!(s.capacity.resources(1000).await.unwrap().items, []);
}
