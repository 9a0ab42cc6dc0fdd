//! Requests for hits to nodes: over gRPC and HTTP, and by the command line.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use serde_json::{Value, json};
use testkit::callers::{Callers, http_with_token, with_token};
use testkit::command::tollgate;
use testkit::grpc::channel;
use testkit::http::{HttpResponse, http};
use testkit::metrics::Scrape;
use testkit::{LimitsFile, Node, Redis, eventually};
use tollgate_proto::tollgate::v1::throttle_client::ThrottleClient;
use tollgate_proto::tollgate::v1::throttle_response::Status;
use tollgate_proto::tollgate::v1::{ThrottleRequest, ThrottleResponse};
use tonic::Code;
use tonic::transport::Endpoint;

const PATH: &str = "/v1/throttle/request";

const LIMITS: &str = "
throttles:
  - { resource: 'search', tiers: [{ limit: 10, window: 1h, active: 1h, cooldown: 1h }] }
  - { resource: 'brief', tiers: [{ limit: 1, window: 1s, active: 1h }] }
";

/// A node and its limits.
fn start(limits: &str, args: &[&str]) -> (Node, LimitsFile) {
    let limits = LimitsFile::new(limits);
    (Node::start(&limits.path(), args), limits)
}

fn request(resource: &str, domain: &str, copies: i64) -> ThrottleRequest {
    let (resource, domain) = (resource.to_owned(), domain.to_owned());
    ThrottleRequest { resource, domain, copies, min_copies: 0 }
}

fn post(node: &Node, body: &Value) -> HttpResponse {
    http(node.http, "POST", PATH, body.to_string().as_bytes())
}

/// The answer over HTTP to a request for hits of `acme` on `search`.
fn search(node: &Node, copies: i64) -> Value {
    let response = post(node, &json!({ "resource": "search", "domain": "acme", "copies": copies }));
    assert_eq!(response.status, 200, "{response:?}");
    response.json()
}

#[tokio::test]
async fn nodes_share_the_hits_over_grpc() {
    let redis = Redis::start();
    // Patient, so that a busy machine does not look like an outage.
    let store = ["--store", &redis.url(), "--store-timeout", "2s"];
    let ((first, _limits), (second, _other)) = (start(LIMITS, &store), start(LIMITS, &store));
    first.wait_for_store();
    second.wait_for_store();
    let ask = async |node: &Node, message| {
        let mut client = ThrottleClient::new(channel(node.grpc).await);
        client.request(message).await.map(tonic::Response::into_inner)
    };
    let answer = ask(&first, request("search", "acme", 4)).await.unwrap();
    let none = ThrottleResponse {
        hard_limit: -1,
        global_limit: -1,
        domain_hits_last_second: -1,
        all_hits_last_second: -1,
        tier_limit: 10,
        tier_index: 1,
        ..ThrottleResponse::default()
    };
    assert_eq!(answer, ThrottleResponse { granted: 4, tier_hits: 4, burst: true, ..none });
    let answer = ask(&second, request("search", "acme", 7)).await.unwrap();
    assert_eq!(answer, ThrottleResponse { granted: 6, tier_hits: 10, ..none });
    let mut answer = ask(&first, request("search", "acme", 1)).await.unwrap();
    assert!((7_190_000..=7_200_000).contains(&answer.retry_after_millis), "{answer:?}");
    answer.retry_after_millis = 0;
    let status = Status::Rejected.into();
    assert_eq!(answer, ThrottleResponse { status, tier_hits: 10, ..none });
    assert_eq!(ask(&first, request("search", "globex", 1)).await.unwrap().granted, 1);

    let (long, longer) = ("x".repeat(1025), "x".repeat(1 << 20));
    for (message, code) in [
        (request("search", "acme", -1), Code::InvalidArgument),
        (request("search", &long, 1), Code::InvalidArgument),
        (request(&longer, "acme", 1), Code::OutOfRange),
        (request("other", "acme", 1), Code::NotFound),
    ] {
        let status = ask(&first, message).await.unwrap_err();
        assert_eq!(status.code(), code, "{status}");
    }
}

#[test]
fn answers_over_http_in_json() {
    let (node, _limits) = start(LIMITS, &[]);
    let mut answer = search(&node, 4);
    let expected = json!({
        "status": "OK", "granted": "4", "hardLimit": "-1", "globalLimit": "-1", "tierLimit": "10",
        "tierIndex": "1", "domainHitsLastSecond": "-1", "allHitsLastSecond": "-1", "tierHits": "4",
        "burst": true, "limitedByHard": false, "limitedByGlobal": false, "retryAfterMillis": "0",
        "degraded": false, "shadow": false,
    });
    assert_eq!(answer, expected);
    answer = search(&node, 7);
    assert_eq!((&answer["granted"], &answer["burst"]), (&json!("6"), &json!(false)));
    assert_eq!(search(&node, 1)["status"], "REJECTED");
    for (body, status, text) in [
        (json!({ "resource": "search" }), 400, "domain is empty"),
        (json!({ "resource": "x", "domain": "acme" }), 404, "no throttle is configured"),
        (json!({ "resource": "search", "domain": "a", "copies": "9223372036854775808" }), 400, ""),
        (json!({ "resource": "search", "domain": "a", "copy": 1 }), 400, "unknown field `copy`"),
        (json!([]), 400, "not a valid ThrottleRequest"),
    ] {
        let response = post(&node, &body);
        assert_eq!(response.status, status, "{response:?}");
        assert!(response.json()["error"].as_str().unwrap().contains(text), "{response:?}");
    }
}

#[tokio::test]
async fn callers_ask_for_their_resources_only() {
    let (limits, callers) = (LimitsFile::new(LIMITS), Callers::new());
    let (token, hash) = testkit::callers::token();
    callers.write(&format!(
        "callers: [{{ name: searcher, token_sha256: [{hash}], resources: ['sea*'], domains: ['a*'] }}]"
    ));
    let node = callers.node(&limits);
    let body = |resource| json!({ "resource": resource, "domain": "acme" }).to_string();
    let globex = json!({ "resource": "search", "domain": "globex" }).to_string();
    assert_eq!(http_with_token(&node, Some(&token), "POST", PATH, &globex).status, 403);
    let status =
        |token, resource| http_with_token(&node, token, "POST", PATH, &body(resource)).status;
    let token = Some(&*token);
    assert_eq!(status(token, "search"), 200);
    // Whether it exists or not.
    assert_eq!((status(token, "brief"), status(token, "none")), (403, 403));
    assert_eq!((status(None, "search"), status(Some("wrong"), "search")), (401, 401));
    let mut client = ThrottleClient::new(channel(node.grpc).await);
    let mut code = async |token, resource| {
        let answer = client.request(with_token(token, request(resource, "acme", 1))).await;
        answer.map_or_else(|status| status.code(), |_| Code::Ok)
    };
    assert_eq!(code(token, "search").await, Code::Ok);
    assert_eq!(code(token, "brief").await, Code::PermissionDenied);
    assert_eq!(code(None, "search").await, Code::Unauthenticated);
}

#[test]
fn limits_in_shadow_and_under_the_kill_switch_are_not_enforced() {
    let (node, limits) = start(&LIMITS.replace("'search'", "'search', enforce: false"), &[]);
    let shadow = |copies| search(&node, copies)["shadow"] == true;
    assert!(!shadow(10) && shadow(1));
    limits.write(LIMITS);
    let rejected = || search(&node, 1)["status"] == "REJECTED";
    eventually("the limits are enforced", Duration::from_secs(20), rejected);
    assert_eq!(http(node.http, "PUT", "/v1/kill-switch?for=1h", b"").status, 200);
    assert!(shadow(1));
    let counted = Scrape::of(node.http);
    let template = [("template", "search")];
    assert!(counted.sum("tollgate_throttle_shadowed_decisions_total", &template) >= 2.0);
    assert_eq!(counted.sum("tollgate_throttle_hits_granted_total", &template), 10.0);
}

#[test]
fn without_the_store_the_failure_policy_decides() {
    for (policy, granted, outcome) in [
        ("local", "10", "granted_in_part"),
        ("allow", "50", "granted"),
        ("deny", "0", "server_error"),
    ] {
        let mut redis = Redis::start();
        let limits = format!("on_store_failure: {policy}{LIMITS}");
        let (node, _limits) = start(&limits, &["--store", &redis.url(), "--store-timeout", "2s"]);
        node.wait_for_store();
        let shared = search(&node, 5);
        assert_eq!((&shared["granted"], &shared["degraded"]), (&json!("5"), &json!(false)));
        redis.kill();
        eventually("the store is away", Duration::from_secs(20), || !node.store_is_up());
        for (method, status) in [("GET", 503), ("DELETE", 504)] {
            let answer = http(node.http, method, "/v1/hits/search/acme", b"");
            assert_eq!(answer.status, status, "{answer:?}");
        }
        let asked = json!({ "resource": "search", "domain": "acme", "copies": 50 }).to_string();
        let explained = http(node.http, "POST", "/v1/throttle/explain", asked.as_bytes()).json();
        let alone = search(&node, 50);
        assert_eq!((&alone["granted"], &alone["degraded"]), (&json!(granted), &json!(true)));
        assert_eq!(explained["answer"], alone, "{explained}");
        let steps = explained["steps"].to_string();
        assert!(steps.contains(&format!("(on_store_failure: {policy})")), "{explained}");
        let labels = [("template", "search"), ("outcome", outcome)];
        let counted = Scrape::of(node.http);
        // The one before was granted in full, too.
        let expected = if policy == "allow" { 2.0 } else { 1.0 };
        assert_eq!(counted.sum("tollgate_throttle_decisions_total", &labels), expected);
        let degraded = "tollgate_throttle_degraded_decisions_total";
        assert_eq!(counted.sum(degraded, &labels[..1]), 1.0);
    }
}

#[test]
fn a_store_that_lost_scripts_or_data_goes_on() {
    let mut redis = Redis::start();
    let (node, _limits) = start(LIMITS, &["--store", &redis.url(), "--store-timeout", "2s"]);
    node.wait_for_store();
    assert_eq!(search(&node, 4)["tierHits"], "4");
    redis::cmd("SCRIPT").arg("FLUSH").exec(&mut redis.connection()).unwrap();
    let answer = search(&node, 4);
    assert_eq!((&answer["tierHits"], &answer["degraded"]), (&json!("8"), &json!(false)));
    redis.kill();
    eventually("the store is away", Duration::from_secs(20), || !node.store_is_up());
    assert_eq!(search(&node, 1)["degraded"], true);
    // It comes back empty.
    redis.start_again();
    eventually("the store is back", Duration::from_secs(20), || node.store_is_up());
    let answer = search(&node, 4);
    assert_eq!((&answer["tierHits"], &answer["degraded"]), (&json!("4"), &json!(false)));
}

#[test]
fn hits_are_counted_while_the_store_hangs_and_comes_back_with_its_data() {
    let redis = Redis::start();
    let (node, _limits) = start(LIMITS, &["--store", &redis.url(), "--store-timeout", "3s"]);
    node.wait_for_store();
    assert_eq!(search(&node, 4)["tierHits"], "4");
    testkit::signal(redis.pid(), "STOP");
    eventually("the store hangs", Duration::from_secs(20), || !node.store_is_up());
    assert_eq!(search(&node, 1)["degraded"], true);
    testkit::signal(redis.pid(), "CONT");
    eventually("the store is back", Duration::from_secs(20), || node.store_is_up());
    let answer = search(&node, 9);
    assert_eq!(answer["degraded"], false);
    // Redis may also have counted requests that it got before the node saw that it hangs.
    let granted: u64 = answer["granted"].as_str().unwrap().parse().unwrap();
    assert!(granted <= 6, "{answer}");
}

/// Three nodes with clients that ask without end, and nodes that are killed: no more is granted than the limit, and
/// as much as that but for the answers that were lost.
#[test]
fn no_hit_is_granted_twice_while_nodes_are_killed() {
    const LIMIT: u64 = 3000;
    let redis = Redis::start();
    let limits = LimitsFile::new(&format!(
        "on_store_failure: deny\nthrottles:\n  - {{ resource: 'search', tiers: [{{ limit: {LIMIT}, window: 1h, active: 1h }}] }}\n"
    ));
    let url = redis.url();
    let args = ["--store", &*url, "--store-timeout", "2s"];
    let mut nodes: Vec<_> = (0..3).map(|_| Node::start(&limits.path(), &args)).collect();
    nodes.iter().for_each(Node::wait_for_store);
    let addresses: Vec<_> = nodes.iter().map(|node| node.grpc).collect();
    let (granted, refused, lost) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
    let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    let client = async |number: usize| {
        let mut nodes: Vec<_> = addresses
            .iter()
            .map(|address| Endpoint::from_shared(format!("http://{address}")).unwrap())
            .map(|endpoint| ThrottleClient::new(endpoint.connect_lazy()))
            .collect();
        for nth in number.. {
            // Some more, so that refusals are seen.
            if count(&refused) > 100 {
                break;
            }
            match nodes[nth % 3].request(request("search", "acme", 1)).await {
                Ok(answer) if answer.get_ref().granted == 1 => {
                    granted.fetch_add(1, Ordering::Relaxed);
                }
                Ok(answer) if !answer.get_ref().degraded => {
                    refused.fetch_add(1, Ordering::Relaxed);
                }
                // Nothing has arrived where nobody listens.
                Err(status) if status.message().contains("tcp connect error") => {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
                _ => {
                    lost.fetch_add(1, Ordering::Relaxed);
                }
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let mut kills = 0;
    std::thread::scope(|scope| {
        let clients = scope.spawn(|| {
            let clients = async { join_all((0..20).map(client)).await };
            testkit::runtime().block_on(clients)
        });
        while !clients.is_finished() {
            std::thread::sleep(Duration::from_millis(150));
            let victim = &mut nodes[kills % 3];
            let ports = [victim.grpc.port(), victim.http.port()];
            victim.kill();
            *victim = Node::start_on(ports, &limits.path(), &args);
            kills += 1;
        }
    });
    let [granted, lost] = [&granted, &lost].map(count);
    println!("{granted} granted, {lost} lost, {kills} nodes killed");
    assert!(granted <= LIMIT && granted + lost >= LIMIT && kills > 2, "{granted}, {lost}");
    assert!(granted > LIMIT / 2, "{granted}");
}

#[test]
fn the_command_waits_for_hits() {
    let (node, _limits) = start(LIMITS, &[]);
    let address = node.grpc.to_string();
    let ask = |args: &[&str]| {
        let command = [&["request"][..], args, &["--addr", &address]].concat();
        let output = tollgate(&command);
        (output.code, output.stdout + &output.stderr)
    };
    let granted = "OK: 6 hits\ntier 1, 6 hits of 10 in its window\nentered a tier\n";
    assert_eq!(ask(&["search", "acme", "--copies", "6"]), (0, granted.to_owned()));
    let (code, text) = ask(&["search", "acme", "--copies", "6", "--min", "5", "--max-wait", "9s"]);
    assert_eq!(code, 1);
    assert!(text.starts_with("REJECTED: try again in 7"), "{text}");
    let (code, text) = ask(&["search", "acme", "--copies", "11", "--min", "11"]);
    assert_eq!(
        (code, text.lines().next()),
        (1, Some("REJECTED: this request can never be granted"))
    );
    assert_eq!(ask(&["brief", "acme"]).0, 0);
    // The hit expires after a second.
    let (code, text) = ask(&["brief", "acme", "--max-wait", "30s", "--json"]);
    assert_eq!((code, text.contains(r#""granted":"1""#)), (0, true), "{text}");
    let (code, text) = ask(&["other", "acme"]);
    assert_eq!(code, 2);
    assert!(text.contains("no throttle is configured for this resource"), "{text}");
}

/// Limits of which the second tier is entered by the second hit.
const LOOKED_AT: &str = "
throttles:
  - resource: 'sea*/*'
    hard_limit: 100
    max_domains: 2
    tiers:
      - { limit: 1, window: 1h, active: 1h }
      - { limit: 2, window: 1h, active: 1h, cooldown: 1d, skippable: true }
    domains: { 'own \"d\"': { tiers: [] } }
";

#[test]
fn hits_are_shown_and_forgotten() {
    let redis = Redis::start();
    for store in [&[][..], &["--store", &redis.url(), "--store-timeout", "2s"]] {
        let (node, _limits) = start(LOOKED_AT, store);
        if !store.is_empty() {
            node.wait_for_store();
        }
        let address = node.http.to_string();
        let run = |args: &[&str]| tollgate(&[&["throttle"], args, &["--http", &address]].concat());
        let ask = |domain: &str, copies: i64| {
            let body = json!({ "resource": "sea/rch %", "domain": domain, "copies": copies });
            post(&node, &body).json()["granted"].clone()
        };
        let shown = run(&["show", "sea/rch %", "a/b"]);
        assert_eq!(
            shown.stdout,
            "resource  \"sea/rch %\"\n\
             domain    \"a/b\"\n\
             limits    those of all domains without their own, for \"sea*/*\"\n\
             second    0 of 100 for the domain, no limit for all domains\n\
             tier 1    inactive: 1 hit in 1h, for 1h\n\
             tier 2    inactive, skippable: 2 hits in 1h, for 1h, then 1day of cooldown\n\
             next hit  now\n",
            "{shown:?}"
        );
        let explained = run(&["explain", "sea/rch %", "a/b", "--copies", "9", "--min", "2"]);
        assert_eq!(
            (explained.code, &*explained.stdout),
            (
                0,
                "OK: 3 of 9 hits would be granted\n\n\
                 step         effect\n\
                 request      notes    asks for 9 hits, or 2 at least, on sea/rch % for a/b\n\
                 throttle     notes    the throttle of sea*/* decides\n\
                 max_domains  notes    at most 2 domains have hits at once (max_domains): other domains may \
                 be refused\n\
                 hard_limit   permits  the domain had 0 hits in the last second; 100 at most (hard_limit)\n\
                 tier         notes    tier 1 can be entered: 1 hit in 1h\n\
                 tier         notes    tier 2 can be entered: 2 hits in 1h\n\
                 tiers        permits  the tiers have room for 3 hits\n"
            ),
            "{explained:?}"
        );
        assert_eq!(ask("a/b", 9), "3");
        let explained = run(&["explain", "sea/rch %", "a/b"]);
        assert_eq!(explained.code, 1);
        let start = "REJECTED: would be refused; it could be granted in 59m 5";
        assert!(explained.stdout.starts_with(start), "{explained:?}");
        let last = "refuses  the tiers have room for 0 hits\n";
        assert!(explained.stdout.ends_with(last), "{explained:?}");
        let shown = run(&["show", "sea/rch %", "a/b"]);
        let lines: Vec<_> = shown.stdout.lines().collect();
        assert!(lines[4].starts_with("tier 1    active for 59m 5"), "{shown:?}");
        assert!(lines[5].ends_with(", skippable: 2 of 2 hits in 1h"), "{shown:?}");
        assert!(lines[6].starts_with("next hit  in 59m 5"), "{shown:?}");
        // Looking has made no domain.
        let json = |args: &[&str]| -> Value {
            let out = run(&[args, &["--output", "json"]].concat());
            serde_json::from_str(&out.stdout).unwrap_or_else(|_| panic!("{out:?}"))
        };
        assert_eq!((ask("c", 1), ask("d", 1)), ("1".into(), "0".into()));
        let too_many = json(&["show", "sea/rch %", "d"]);
        assert_eq!(too_many["now"]["too_many_domains"], true);
        let text = run(&["show", "sea/rch %", "d"]).stdout;
        assert!(text.contains(", as there are max_domains already\n"), "{text}");
        let own = json(&["show", "sea/rch %", "own \"d\""]);
        let never = (&own["limits"]["of_the_domain"], &own["now"]["next_hit_in_millis"]);
        assert_eq!(never, (&json!(true), &Value::Null));

        let reset = run(&["reset", "sea/rch %", "a/b"]);
        let expected =
            "the hits are forgotten\nbefore    tier 2 was the current one; next hit in 59m";
        assert!(reset.stdout.starts_with(expected), "{reset:?}");
        let after = json(&["show", "sea/rch %", "a/b"]);
        assert_eq!((&after["now"]["tier_index"], ask("a/b", 9)), (&json!(0), "3".into()));
        let unknown = run(&["show", "none", "a"]);
        assert_eq!((unknown.code, unknown.stdout.as_str()), (1, ""));
        assert!(unknown.stderr.contains("no throttle is configured for this resource"));
    }
}

#[test]
fn who_may_ask_for_hits_may_look_and_administrators_forget() {
    let (limits, callers) = (LimitsFile::new(LIMITS), Callers::new());
    let node = callers.node(&limits);
    let ask = |token, method, path: &str| http_with_token(&node, token, method, path, "").status;
    let path = "/v1/hits/search/acme";
    for (token, [look, forget]) in [
        (None, [401, 401]),
        (Some(&*callers.shop), [403, 403]),
        (Some(&*callers.watcher), [200, 403]),
        (Some(&*callers.admin), [200, 200]),
    ] {
        assert_eq!((ask(token, "GET", path), ask(token, "DELETE", path)), (look, forget));
        let asked = r#"{"resource":"search","domain":"acme"}"#;
        let explained = http_with_token(&node, token, "POST", "/v1/throttle/explain", asked);
        assert_eq!(explained.status, look, "{token:?}");
    }
    let admin = Some(&*callers.admin);
    for (method, path, status) in [
        ("GET", "/v1/hits/search", 400),
        ("GET", "/v1/hits/search/", 400),
        ("GET", "/v1/hits//acme", 400),
        ("GET", "/v1/hits/search/%FF", 400),
        ("GET", "/v1/hits/none/acme", 404),
        ("DELETE", "/v1/hits/none/acme", 404),
        ("PUT", "/v1/hits/search/acme", 405),
    ] {
        assert_eq!(ask(admin, method, path), status, "{method} {path}");
    }
    let mut logged = Vec::new();
    eventually("the change is in the log", Duration::from_secs(5), || {
        logged.extend(node.logged());
        logged.iter().any(|event| {
            event["path"] == path
                && event["change"] == "the hits of a domain were forgotten: no tier was active"
        })
    });
}
