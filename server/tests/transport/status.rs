//! Leases in the status page, in its JSON form, and in the metrics.

use std::time::Duration;

use serde_json::{Value, json};
use testkit::grpc::{capacity_client, lease};
use testkit::http::{get, http};
use testkit::metrics::Scrape;
use testkit::{LimitsFile, Node, Redis, eventually, now_s};
use tollgate_proto::doorman::capacity_client::CapacityClient;
use tollgate_proto::doorman::{
    GetServerCapacityRequest, PriorityBandAggregate, ServerCapacityResourceRequest,
};
use tonic::transport::Channel;

type Client = CapacityClient<Channel>;

const LIMITS: &str = "
resources:
  - { identifier_glob: \"db.*\", capacity: 100, algorithm: { kind: FAIR_SHARE, lease_length: 60, refresh_interval: 5, learning_mode_duration: 0 } }
  - { identifier_glob: \"<i>*\", capacity: 10, algorithm: { kind: STATIC, lease_length: 60, refresh_interval: 5, learning_mode_duration: 0 } }
  - { identifier_glob: young, capacity: 100, algorithm: { kind: PROPORTIONAL_SHARE, lease_length: 60, refresh_interval: 5, learning_mode_duration: 3600 } }
";

const ODD: &str = "<i>\"&'<script>alert(1)";

/// Longer than the refresh interval of gauges.
const GAUGED: Duration = Duration::from_secs(12);

async fn ask(client: &mut Client, name: &str, resource: &str, wants: f64) -> f64 {
    lease(client, name, resource, wants, None).await.gets.capacity
}

async fn ask_as_server(client: &mut Client, name: &str, resource: &str, wants: f64) -> f64 {
    let band = PriorityBandAggregate { priority: 0, num_clients: 3, wants };
    let resource = ServerCapacityResourceRequest {
        resource_id: resource.to_owned(),
        wants: vec![band],
        ..ServerCapacityResourceRequest::default()
    };
    let request = GetServerCapacityRequest { server_id: name.to_owned(), resource: vec![resource] };
    let answer = client.get_server_capacity(request).await.unwrap().into_inner();
    answer.response[0].gets.capacity
}

/// Four clients and a server, on all templates and on none.
async fn take_leases(node: &Node) {
    let mut client = capacity_client(node).await;
    for _ in 0..2 {
        ask(&mut client, "a", "db.users", 1000.0).await;
        ask(&mut client, ODD, "db.users", 10.0).await;
        ask_as_server(&mut client, "a", "db.users", 30.5).await;
    }
    assert_eq!(ask(&mut client, "a", ODD, 20.0).await, 10.0);
    assert_eq!(ask(&mut client, "a", "young", 20.0).await, 0.0);
    assert_eq!(ask(&mut client, "a", "elsewhere", 20.0).await, 20.0);
    assert_eq!(ask(&mut client, "a", "elsewhere 2", 20.0).await, 20.0);
}

fn assert_status(node: &Node, store: &str) {
    let page = get(node, "/debug/status.json");
    assert_eq!(page.status, 200);
    assert!(page.head.contains("content-type: application/json"), "{}", page.head);
    let status = page.json();
    assert_eq!(status["node"]["grpc"], node.grpc.to_string());
    assert_eq!(status["node"]["http"], node.http.to_string());
    assert_eq!(status["node"]["advertise"], node.grpc.to_string());
    assert_eq!(status["node"]["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!((&status["store"]["up"], &status["store"]["nodes"]), (&json!(true), &json!(1)));
    assert!(status["store"]["kind"].as_str().unwrap().starts_with(store), "{status}");
    let born = status["store"]["born_at_s"].as_i64().unwrap();
    assert!((now_s() - 60..=now_s()).contains(&born), "{born}");
    let templates = (&status["limits"]["templates"], &status["limits"]["namespaces"]);
    assert_eq!(templates, (&json!(3), &json!(0)));
    assert_eq!(
        (&status["resources_left_out"], &status["resources_error"]),
        (&json!(0), &Value::Null)
    );
    let resource = |name: &str, template: &str, algorithm: &str| {
        json!({
            "resource": name, "template": template, "algorithm": algorithm, "capacity": 100.0,
            "clients": 1, "subclients": 1, "wants": 20.0, "has": 0.0, "level": null,
            "learning_until_s": null,
        })
    };
    let mut odd = resource(ODD, "<i>*", "STATIC");
    (odd["has"], odd["capacity"]) = (json!(10.0), json!(10.0));
    let mut users = resource("db.users", "db.*", "FAIR_SHARE");
    users["wants"] = json!(1040.5);
    (users["clients"], users["subclients"]) = (json!(3), json!(5));
    (users["has"], users["level"]) = (json!(100.0), json!(59.5));
    let mut young = resource("young", "young", "PROPORTIONAL_SHARE");
    young["learning_until_s"] = status["resources"][2]["learning_until_s"].clone();
    let learning = young["learning_until_s"].as_i64().unwrap();
    assert!((born + 3600..=born + 3601).contains(&learning), "{learning}");
    assert_eq!(status["resources"], json!([odd, users, young]));

    let page = get(node, "/debug/resource.json?id=db.users");
    assert_eq!(page.status, 200);
    let mut found = page.json();
    let mut holders = found["holders"].take();
    let holders = holders.as_array_mut().unwrap();
    holders.sort_by_key(|holder| (holder["id"].to_string(), holder["kind"].to_string()));
    for holder in holders.iter_mut() {
        let expires = holder["expires_at_s"].take().as_i64().unwrap();
        assert!((now_s() + 30..=now_s() + 60).contains(&expires), "{expires}");
    }
    let holder = |id: &str, kind: &str, wants: f64, has: f64, subclients: u32| {
        json!({ "id": id, "kind": kind, "wants": wants, "has": has, "subclients": subclients,
            "expires_at_s": null })
    };
    assert_eq!(
        *holders,
        [
            holder(ODD, "client", 10.0, 10.0, 1),
            holder("a", "client", 1000.0, 59.5, 1),
            holder("a", "server", 30.5, 30.5, 3),
        ]
    );
    (users["holders"], users["holders_left_out"]) = (Value::Null, json!(0));
    assert_eq!(found, users);

    for id in ["elsewhere", "db.user", "db.users/"] {
        let page = get(node, &format!("/debug/resource.json?id={id}"));
        assert_eq!(page.status, 404, "{id}");
        assert_eq!(page.json(), json!({ "error": "nobody holds a lease on that resource" }));
    }
    for query in ["", "?id=", "?name=db.users"] {
        let path = &format!("/debug/resource.json{query}");
        assert_eq!(get(node, path).status, 400, "{path}");
    }
    for path in ["/debug/status", "/debug/status.json", "/debug/resource.json?id=db.users"] {
        assert_eq!(http(node.http, "POST", path, b"").status, 405, "{path}");
    }
    assert_status_page(node);
}

fn assert_status_page(node: &Node) {
    let page = get(node, "/debug/status");
    assert_eq!(page.status, 200);
    assert!(page.head.contains("content-type: text/html; charset=utf-8"), "{}", page.head);
    let html = page.body;
    assert!(html.starts_with("<!doctype html>") && html.ends_with("</html>"), "{html}");
    // Names are escaped.
    assert!(!html.contains("<script") && !html.contains("<i>"), "{html}");
    let shown = "&lt;i&gt;&quot;&amp;&#39;&lt;script&gt;alert(1)</a>";
    assert!(html.contains(shown), "{html}");
    assert!(html.contains("<td>59.5<"), "{html}");
    assert!(html.contains("clients get what they say they have"), "{html}");
    // The page needs no external resources.
    for word in ["://", "src=", "url(", "@import", "href=\"/", "<link", "<img", "<iframe"] {
        // The store's address is plain text.
        let html = html.replace("<dd>redis://127.0.0.1", "<dd>");
        assert!(!html.contains(word), "{word}: {html}");
    }
    // Its links work.
    let links: Vec<_> =
        html.split("href=\"").skip(1).map(|rest| rest.split('"').next().unwrap()).collect();
    assert_eq!(links.len(), 4, "{links:?}");
    for (link, resource) in links.iter().zip([ODD, "db.users", "young"]) {
        let page = get(node, &format!("/debug/{link}"));
        assert_eq!((page.status, &page.json()["resource"]), (200, &json!(resource)));
    }
    assert_eq!(get(node, &format!("/debug/{}", links[3])).json()["resources"][0]["resource"], ODD);
}

#[tokio::test]
async fn a_node_on_its_own_shows_its_leases() {
    let limits = LimitsFile::new(LIMITS);
    let node = Node::start(&limits.path(), &[]);
    let empty = get(&node, "/debug/status");
    assert!(empty.status == 200 && empty.body.contains("Nobody holds a lease."), "{empty:?}");
    take_leases(&node).await;
    assert_status(&node, "memory");
}

#[tokio::test]
async fn a_node_on_redis_shows_its_leases() {
    let (redis, limits) = (Redis::start(), LimitsFile::new(LIMITS));
    let args = ["--store", &redis.url(), "--store-timeout", "2s"];
    let node = Node::start(&limits.path(), &args);
    node.wait_for_store();
    take_leases(&node).await;
    assert_status(&node, "redis://127.0.0.1");
}

#[tokio::test]
async fn lease_metrics() {
    let limits = LimitsFile::new(LIMITS);
    let node = Node::start(&limits.path(), &[]);
    let decided = |scrape: &Scrape, template: &str, algorithm: &str, outcome: &str| {
        let labels = [("template", template), ("algorithm", algorithm), ("outcome", outcome)];
        scrape.get("tollgate_lease_decisions_total", &labels)
    };
    let before = Scrape::of(node.http);
    assert_eq!(decided(&before, "db.*", "FAIR_SHARE", "full"), Some(0.0));
    assert_eq!(before.get("tollgate_lease_unmatched_total", &[]), Some(0.0));
    take_leases(&node).await;
    let scrape = Scrape::of(node.http);
    for (template, algorithm, outcome, count) in [
        // At first one client has all, and the others nothing.
        ("db.*", "FAIR_SHARE", "full", 2.0),
        ("db.*", "FAIR_SHARE", "part", 2.0),
        ("db.*", "FAIR_SHARE", "nothing", 2.0),
        ("db.*", "FAIR_SHARE", "learning", 0.0),
        ("db.*", "FAIR_SHARE", "degraded", 0.0),
        ("<i>*", "STATIC", "part", 1.0),
        ("young", "PROPORTIONAL_SHARE", "learning", 1.0),
        ("young", "PROPORTIONAL_SHARE", "nothing", 0.0),
        ("", "", "full", 2.0),
    ] {
        let counted = decided(&scrape, template, algorithm, outcome);
        assert_eq!(counted, Some(count), "{template} {outcome}");
    }
    assert_eq!(scrape.get("tollgate_lease_unmatched_total", &[]), Some(2.0));
    let labels = [("transport", "grpc")];
    assert_eq!(scrape.get("tollgate_rpc_duration_seconds_count", &labels), Some(10.0));

    let gauges = |template: &str| {
        let scrape = Scrape::of(node.http);
        let algorithm = match template {
            "db.*" => "FAIR_SHARE",
            "<i>*" => "STATIC",
            "young" => "PROPORTIONAL_SHARE",
            _ => "",
        };
        let labels = [("template", template), ("algorithm", algorithm)];
        [
            "tollgate_resources",
            "tollgate_resource_capacity",
            "tollgate_resource_wants",
            "tollgate_resource_has",
            "tollgate_resource_subclients",
            "tollgate_resources_learning",
        ]
        .map(|name| scrape.get(name, &labels).unwrap_or(f64::NAN))
    };
    let mut client = capacity_client(&node).await;
    // A second resource of the same template.
    ask(&mut client, "b", "db.orders", 7.5).await;
    eventually("the gauges count it", GAUGED, || {
        gauges("db.*") == [2.0, 200.0, 1048.0, 107.5, 6.0, 0.0]
    });
    assert_eq!(gauges("<i>*"), [1.0, 10.0, 20.0, 10.0, 1.0, 0.0]);
    assert_eq!(gauges("young"), [1.0, 100.0, 20.0, 0.0, 1.0, 1.0]);
    assert_eq!(gauges(""), [0.0; 6]);
    let until = |template: &str, algorithm: &str| {
        let labels = [("template", template), ("algorithm", algorithm)];
        let name = "tollgate_resource_learning_until_timestamp_seconds";
        Scrape::of(node.http).get(name, &labels).unwrap_or(f64::NAN)
    };
    assert_eq!(until("db.*", "FAIR_SHARE"), 0.0);
    assert!(until("young", "PROPORTIONAL_SHARE") > 1.7e9);
    for name in ["tollgate_lease_decisions_total", "tollgate_resource_has"] {
        let mut labels: Vec<_> = Scrape::of(node.http)
            .series()
            .iter()
            .filter(|(series, _)| series == name)
            .map(|(_, labels)| labels["template"].clone())
            .collect();
        labels.dedup();
        labels.sort_unstable();
        labels.dedup();
        assert_eq!(labels, ["", "<i>*", "db.*", "young"], "{name}: no series of a resource");
    }
    // Released leases leave the gauges.
    let request = tollgate_proto::doorman::ReleaseCapacityRequest {
        client_id: "a".to_owned(),
        resource_id: vec![ODD.to_owned()],
    };
    client.release_capacity(request).await.unwrap();
    eventually("the gauges no longer count it", GAUGED, || gauges("<i>*") == [0.0; 6]);
}

#[test]
fn nodes_and_an_outage_are_shown() {
    let (mut redis, limits) = (Redis::start(), LimitsFile::new(LIMITS));
    let store = ["--store", &redis.url(), "--store-timeout", "5s", "--node-id"];
    let start = |id| Node::start(&limits.path(), &[store.as_slice(), &[id]].concat());
    let nodes = [start("node1"), start("node 2")];
    let status = || get(&nodes[0], "/debug/status.json").json();
    let version = env!("CARGO_PKG_VERSION");
    let known = |id: &str| json!({ "id": id, "version": version });
    eventually("both nodes are listed", GAUGED, || {
        status()["nodes"] == json!([known("node 2"), known("node1")])
    });
    // A node of an older version, which does not report its version.
    let mut inside = redis.connection();
    let older = json!({ "id": "older", "version": null });
    eventually("the older node is listed", GAUGED, || {
        let now_us = now_s() * 1_000_000;
        redis::cmd("ZADD").arg("n").arg(now_us).arg("older").exec(&mut inside).unwrap();
        status()["nodes"].as_array().is_some_and(|nodes| nodes.contains(&older))
    });
    let before = status();
    assert_eq!(before["outage"], Value::Null);
    assert!((now_s() - 5..=now_s()).contains(&before["now_s"].as_i64().unwrap()), "{before}");

    redis.kill();
    eventually("the outage is shown", GAUGED, || status()["outage"]["class"] == "unreachable");
    let during = status();
    let since = during["outage"]["since_s"].as_i64().unwrap();
    assert!((now_s() - 20..=now_s()).contains(&since), "{during}");
    assert_eq!(during["outage"]["error"], "the store can't be reached");
    assert!(during["outage"]["lasting_s"].is_u64());
    assert_eq!((&during["nodes"], &during["store"]["up"]), (&Value::Null, &json!(false)));
    redis.start_again();
    eventually("the outage is over", GAUGED, || status()["outage"].is_null());
}

#[test]
fn a_refused_limits_file_is_shown() {
    let limits = LimitsFile::new(LIMITS);
    let node = Node::start(&limits.path(), &["--node-id", "alone"]);
    let status = || get(&node, "/debug/status.json").json();
    let first = status();
    assert_eq!(first["files"]["limits"], json!({ "in_use": true, "refused": null }));
    let others = (&first["files"]["access"], &first["files"]["tls"]);
    assert_eq!(others, (&Value::Null, &Value::Null));
    let version = env!("CARGO_PKG_VERSION");
    assert_eq!(first["nodes"], json!([{ "id": "alone", "version": version }]));
    limits.write("namespaces: { ns: { bukets: {} } }");
    eventually("the refusal is shown", GAUGED, || status()["files"]["limits"]["in_use"] == false);
    let refused = status()["files"]["limits"]["refused"].clone();
    assert!(refused["error"].as_str().unwrap().contains("namespaces.ns.bukets"), "{refused}");
    assert!((now_s() - 20..=now_s()).contains(&refused["since_s"].as_i64().unwrap()), "{refused}");
    limits.write(LIMITS);
    eventually("the new file is in use", GAUGED, || status()["files"]["limits"]["in_use"] == true);
}
