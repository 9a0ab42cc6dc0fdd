//! Envoy's rate limits in a running node: files in a directory, and answers on the gRPC port.

use std::fs;
use std::os::unix::fs::symlink;

use serde_json::json;
use tempfile::TempDir;
use testkit::command::tollgate;
use testkit::grpc::channel;
use testkit::http::http;
use testkit::metrics::Scrape;
use testkit::{LimitsFile, Node, Redis, TEST_TIMEOUT, eventually, in_repository, runtime};
use tollgate_proto::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use tollgate_proto::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::Entry;
use tollgate_proto::envoy::service::ratelimit::v3::rate_limit_response::Code;
use tollgate_proto::envoy::service::ratelimit::v3::rate_limit_service_client::RateLimitServiceClient;
use tollgate_proto::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};

/// The file of a domain whose key `k` has a limit.
fn domain(name: &str, limit: u32) -> String {
    format!(
        "domain: {name}
descriptors:
  - key: k
    rate_limit:
      unit: year
      requests_per_unit: {limit}
"
    )
}

/// Asks for the descriptor `k=v` of each domain.
fn ask(node: &Node, domain: &str) -> RateLimitResponse {
    let (key, value) = ("k".to_owned(), "v".to_owned());
    let entries = vec![Entry { key, value }];
    let descriptor = RateLimitDescriptor { entries, ..RateLimitDescriptor::default() };
    let descriptors = vec![descriptor];
    let request = RateLimitRequest { domain: domain.to_owned(), descriptors, hits_addend: 0 };
    runtime().block_on(async {
        let mut client = RateLimitServiceClient::new(channel(node.grpc).await);
        client.should_rate_limit(request).await.unwrap().into_inner()
    })
}

/// The limit of a domain; `None` if it has none.
fn limit(node: &Node, domain: &str) -> Option<u32> {
    let limit = ask(node, domain).statuses[0].current_limit.clone();
    limit.map(|limit| limit.requests_per_unit)
}

#[test]
fn a_directory_of_files_is_loaded_and_reloaded() {
    let (limits, dir) = (LimitsFile::new("namespaces: { ns: {} }"), TempDir::new().unwrap());
    let path = |name: &str| dir.path().join(name);
    fs::write(path("a.yaml"), domain("a", 5)).unwrap();
    fs::write(path("b.yml"), domain("b", 6)).unwrap();
    // Neither of these is a file of limits.
    fs::write(path("notes.txt"), "not: [yaml").unwrap();
    fs::write(path(".hidden.yaml"), "not: [yaml").unwrap();
    fs::create_dir(path("sub.yaml")).unwrap();
    let node = Node::start(&limits.path(), &["--envoy-limits", dir.path().to_str().unwrap()]);
    assert_eq!([limit(&node, "a"), limit(&node, "b"), limit(&node, "c")], [Some(5), Some(6), None]);
    fs::write(path("c.yaml"), domain("c", 7)).unwrap();
    eventually("a new file is loaded", TEST_TIMEOUT, || limit(&node, "c") == Some(7));
    fs::write(path("a.yaml"), domain("a", 8)).unwrap();
    eventually("a changed file is loaded", TEST_TIMEOUT, || limit(&node, "a") == Some(8));
    fs::remove_file(path("b.yml")).unwrap();
    eventually("a removed file is gone", TEST_TIMEOUT, || limit(&node, "b").is_none());
    limits.write("namespaces: { ns: {} }\nenvoy: [{ domain: d, descriptors: [{ key: k, rate_limit: { unit: day, requests_per_unit: 9 } }] }]");
    eventually("the limits file has domains, too", TEST_TIMEOUT, || limit(&node, "d") == Some(9));
    node.logged();
    fs::write(path("b.yaml"), domain("d", 1)).unwrap();
    let failures =
        || Scrape::of(node.http).get("tollgate_limits_reload_failures_total", &[]).unwrap();
    eventually("a faulty file is refused", TEST_TIMEOUT, || failures() == 1.0);
    assert_eq!([limit(&node, "a"), limit(&node, "d")], [Some(8), Some(9)]);
    // It is logged after it is counted.
    let mut refused = None;
    eventually("the reason is logged", TEST_TIMEOUT, || {
        let logged = node.logged();
        refused = logged.iter().find_map(|event| event["error"].as_str().map(str::to_owned));
        refused.is_some()
    });
    let expected = format!(
        "{}:\nline 1: domain: \"d\" is a domain or a namespace already",
        path("b.yaml").display()
    );
    assert_eq!(refused, Some(expected));
    for file in ["a.yaml", "b.yaml", "c.yaml"] {
        fs::remove_file(path(file)).unwrap();
    }
    // It may be about to be filled.
    eventually("a directory without files is refused", TEST_TIMEOUT, || failures() >= 2.0);
    assert_eq!([limit(&node, "a"), limit(&node, "d")], [Some(8), Some(9)]);
    fs::write(path("a.yaml"), domain("a", 10)).unwrap();
    eventually("files are loaded again", TEST_TIMEOUT, || limit(&node, "a") == Some(10));
}

#[test]
fn a_node_needs_no_limits_file_beside_a_directory() {
    let dir = TempDir::new().unwrap();
    fs::write(dir.path().join("a.yaml"), domain("a", 2)).unwrap();
    let dir = dir.path().to_str().unwrap();
    let node = Node::start_with(&["--envoy-limits", dir, "--envoy-headers"]);
    for (remaining, code) in [("1", Code::Ok), ("0", Code::Ok), ("0", Code::OverLimit)] {
        let answer = ask(&node, "a");
        assert_eq!(answer.overall_code(), code);
        let headers: Vec<_> = answer
            .response_headers_to_add
            .iter()
            .map(|header| (header.key.as_str(), header.value.as_str()))
            .collect();
        let reset = answer.statuses[0].duration_until_reset.unwrap().seconds.to_string();
        let expected = [
            ("x-ratelimit-limit", "2"),
            ("x-ratelimit-remaining", remaining),
            ("x-ratelimit-reset", &reset),
        ];
        assert_eq!(headers, expected);
    }
    assert!(ask(&node, "b").response_headers_to_add.is_empty());
    // The limits in use are a document like any other.
    let shown = tollgate(&["limits", "show", "--http", &node.http.to_string()]);
    let file = LimitsFile::new(&shown.stdout);
    let checked = tollgate(&["check", "--envoy-limits", dir]);
    assert_eq!((checked.code, &checked.stdout), (0, &shown.stdout));
    let checked = tollgate(&["check", file.path().to_str().unwrap()]);
    assert_eq!((checked.code, checked.stdout), (0, shown.stdout));
}

/// An outage is answered by a limit, not by an error, whose meaning the gateway would decide.
#[test]
fn without_the_store_the_failure_policy_decides() {
    let dir = TempDir::new().unwrap();
    for policy in ["local", "allow", "deny"] {
        let file = format!("on_store_failure: {policy}\n{}", domain(policy, 4));
        fs::write(dir.path().join(format!("{policy}.yaml")), file).unwrap();
    }
    let redis = Redis::start();
    let dir = dir.path().to_str().unwrap();
    let node =
        Node::start_with(&["--envoy-limits", dir, "--envoy-headers", "--store", &redis.url()]);
    node.wait_for_store();
    let said = |domain: &str| {
        let answer = ask(&node, domain);
        let status = &answer.statuses[0];
        assert_eq!(answer.overall_code, status.code);
        (status.code(), status.limit_remaining)
    };
    for policy in ["local", "allow", "deny"] {
        eventually("the store decides", TEST_TIMEOUT, || said(policy).0 == Code::Ok);
    }
    drop(redis);
    eventually("deny refuses", TEST_TIMEOUT, || said("deny") == (Code::OverLimit, 0));
    for _ in 0..10 {
        assert_eq!(said("allow"), (Code::Ok, 4));
    }
    // The node's own count, which begins with the outage.
    let counts: Vec<_> = (0..10).map(|_| said("local")).collect();
    assert!(counts.contains(&(Code::Ok, 0)), "{counts:?}");
    assert_eq!(counts.last(), Some(&(Code::OverLimit, 0)), "{counts:?}");
    assert!(counts.iter().filter(|(code, _)| *code == Code::Ok).count() <= 4, "{counts:?}");
}

#[test]
fn the_sample_is_valid() {
    let sample = in_repository("config/envoy");
    let checked = tollgate(&["check", "--envoy-limits", sample.to_str().unwrap()]);
    assert_eq!((checked.code, checked.stderr.as_str()), (0, ""), "{checked:?}");
    assert!(checked.stdout.contains("domain: edge"), "{checked:?}");
}

/// As in the documentation of Envoy's rate limit service.
#[test]
fn json_as_in_envoys_service() {
    let limits = LimitsFile::new(
        "envoy:
           domain: dummy
           descriptors:
             - { key: one_per_day, rate_limit: { unit: day, requests_per_unit: 1 } }
             - { key: two, rate_limit: { unit: day, requests_per_unit: 2, name: n } }",
    );
    let node = Node::start(&limits.path(), &["--envoy-headers"]);
    let post = |body: &str| {
        let answer = http(node.http, "POST", "/json", body.as_bytes());
        let mut json = answer.json();
        let headers = json.as_object_mut().unwrap().remove("responseHeadersToAdd");
        let left = headers.map(|headers| headers[1].clone());
        for status in json["statuses"].as_array_mut().into_iter().flatten() {
            let reset = status["durationUntilReset"].take();
            let is_time = |text: &str| text.ends_with('s') && text != "0s";
            assert!(reset.is_null() || is_time(reset.as_str().unwrap()), "{reset}");
            status.as_object_mut().unwrap().remove("durationUntilReset");
        }
        (answer.status, left, json)
    };
    let left = |left: &str| Some(json!({ "key": "x-ratelimit-remaining", "value": left }));
    let entry = |key: &str| format!(r#"{{"entries": [{{"key": "{key}", "value": "something"}}]}}"#);
    let one = json!({ "requestsPerUnit": 1, "unit": "DAY" });
    let two = json!({ "requestsPerUnit": 2, "unit": "DAY", "name": "n" });
    let body = format!(r#"{{"domain": "dummy", "descriptors": [{}]}}"#, entry("one_per_day"));
    let expected =
        json!({ "overallCode": "OK", "statuses": [{ "code": "OK", "currentLimit": one }] });
    assert_eq!(post(&body), (200, left("0"), expected));
    let both = format!("{}, {}, {}", entry("one_per_day"), entry("two"), entry("none"));
    let body = format!(r#"{{"domain": "dummy", "descriptors": [{both}], "hits_addend": 1}}"#);
    let statuses = json!([
        { "code": "OVER_LIMIT", "currentLimit": one },
        { "code": "OK", "currentLimit": two, "limitRemaining": 1 },
        { "code": "OK" },
    ]);
    let expected = json!({ "overallCode": "OVER_LIMIT", "statuses": statuses });
    assert_eq!(post(&body), (429, left("0"), expected));
    let own = r#"{"entries": [{"key": "x", "value": "y"}], "hitsAddend": "3", "limit": {"requestsPerUnit": 5, "unit": "HOUR"}}"#;
    let body = format!(r#"{{"domain": "dummy", "descriptors": [{own}]}}"#);
    let hour = json!({ "requestsPerUnit": 5, "unit": "HOUR" });
    let status = json!({ "code": "OK", "currentLimit": hour, "limitRemaining": 2 });
    let expected = json!({ "overallCode": "OK", "statuses": [status] });
    assert_eq!(post(&body), (200, left("2"), expected));
    for (body, fault) in [
        ("{}", "domain is empty"),
        (r#"{"domain": "dummy"}"#, "there are no descriptors"),
        (
            r#"{"domain": "dummy", "descriptors": [{"limit": {}}]}"#,
            "descriptors[0].limit.unit is 0",
        ),
        (r#"{"domain": "dummy", "x": 1}"#, "the body is not a valid RateLimitRequest in JSON"),
        ("x", "the body is not a valid RateLimitRequest in JSON"),
    ] {
        let (status, _, json) = post(body);
        assert_eq!(status, 400, "{body}");
        assert!(json["error"].as_str().unwrap().contains(fault), "{json}");
    }
}

#[test]
fn faults_of_a_directory_name_the_file() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("a.yaml");
    fs::write(
        &path,
        domain("a", 2).replace("      unit:", "      unit_multiplier: 2\n      unit:"),
    )
    .unwrap();
    let checked = tollgate(&["check", "--envoy-limits", dir.path().to_str().unwrap()]);
    assert_eq!(checked.code, 1);
    let expected = format!(
        "{}:\nline 5: descriptors[0].rate_limit.unit_multiplier: unknown key \"unit_multiplier\", \
         the keys known here are unit, requests_per_unit, algorithm, unlimited, name, replaces\n",
        path.display()
    );
    assert_eq!(checked.stdout, expected);
    let missing = tollgate(&["check", "--envoy-limits", "/nowhere"]);
    assert_eq!(missing.code, 2);
    assert!(missing.stderr.contains("can't read /nowhere"), "{}", missing.stderr);
    fs::remove_file(&path).unwrap();
    symlink("/nowhere", &path).unwrap();
    let dangling = tollgate(&["check", "--envoy-limits", dir.path().to_str().unwrap()]);
    assert_eq!(dangling.code, 2);
    assert!(dangling.stderr.contains("a.yaml: No such file"), "{}", dangling.stderr);
    fs::remove_file(path).unwrap();
    let empty = tollgate(&["check", "--envoy-limits", dir.path().to_str().unwrap()]);
    assert_eq!(empty.code, 2);
    assert!(empty.stderr.contains("it has no file *.yaml or *.yml"), "{}", empty.stderr);
    let ports = ["--grpc-listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0"];
    let both = ["serve", "--limits", "store:", "--envoy-limits", "/nowhere"];
    let in_store = tollgate(&[&both[..], &ports].concat());
    assert_eq!(in_store.code, 2);
    assert!(in_store.stderr.contains("put the domains into the document"), "{}", in_store.stderr);
}
