//! The HTTP port: the JSON API, malformed requests, metrics, health.

use std::time::Duration;

use serde_json::json;
use testkit::grpc::{channel, client, request};
use testkit::http::{get, http, post_allow};
use testkit::metrics::Scrape;
use testkit::{DEAD_PORT, LimitsFile, Node, PollLimit, Redis, eventually};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

const LIMITS: &str = "
namespaces:
  ns:
    buckets:
      b: { size: 100, fill_rate: 1/d, max_tokens_per_request: 50 }
      slow: { size: 1, fill_rate: 1/d, wait_timeout_millis: 0 }
";

/// For gateways and scripts that look at the status only.
#[test]
fn refusals_have_the_status_that_is_asked_for() {
    let limits = LimitsFile::new(
        "namespaces:
           ns:
             buckets:
               b: { size: 10, fill_rate: 1/d, max_debt_millis: 0, wait_timeout_millis: 0, max_tokens_per_request: 20 }
               window: { algorithm: fixed_window, limit: 5, window: 1d }
               waits: { size: 1, fill_rate: 1/m, max_debt_millis: 600000, wait_timeout_millis: 600000 }
               'q\"é%': { algorithm: leaky_bucket, rate: 0.001, queue: 0 }",
    );
    let node = Node::start(&limits.path(), &[]);
    let ask = |query: &str, bucket: &str, tokens: i64| {
        let body = json!({ "namespace": "ns", "bucketName": bucket, "tokensRequested": tokens });
        http(node.http, "POST", &format!("/v1/allow{query}"), body.to_string().as_bytes())
    };
    let header = |head: &str, name: &str| {
        let line = head.lines().find_map(|line| line.strip_prefix(&format!("{name}: ")));
        line.map(|value| value.trim().to_owned())
    };
    let headers = |head: &str| {
        ["ratelimit-policy", "ratelimit", "retry-after"].map(|name| header(head, name))
    };
    let some = |text: &str| Some(text.to_owned());
    for (query, bucket, tokens, status, said) in [
        ("?status=429", "b", 4, 200, "OK"),
        ("?status=429", "b", 7, 429, "REJECTED_TIMEOUT"),
        ("?status=403", "b", 7, 403, "REJECTED_TIMEOUT"),
        ("?status=503&x=y", "b", 7, 503, "REJECTED_TIMEOUT"),
        ("", "b", 7, 200, "REJECTED_TIMEOUT"),
        ("?x=y", "b", 7, 200, "REJECTED_TIMEOUT"),
        ("?status=429", "b", 21, 429, "REJECTED_TOO_MANY_TOKENS_REQUESTED"),
        ("?status=429", "none", 1, 429, "REJECTED_NO_BUCKET"),
        ("?status=429", "b", -1, 400, "REJECTED_INVALID_REQUEST"),
        ("?status=429", "waits", 1, 200, "OK"),
        ("?status=429", "waits", 1, 200, "OK"),
        ("?status=429", "waits", 1, 200, "OK"),
    ] {
        let answer = ask(query, bucket, tokens);
        let found = (answer.status, answer.json()["status"].clone());
        assert_eq!(found, (status, json!(said)), "{query} {bucket} {tokens}");
        if !query.contains("status") || said != "OK" && said != "REJECTED_TIMEOUT" {
            assert_eq!(header(&answer.head, "retry-after"), None, "{query} {tokens}");
        }
        if !query.contains("status") {
            assert_eq!(headers(&answer.head), [None, None, None]);
        }
    }
    // 6 of 10 are left, and 7 are there after a day, less what has passed.
    let refused = ask("?status=429", "b", 7);
    let [policy, limit, retry] = headers(&refused.head);
    let retry: u64 = retry.unwrap().parse().unwrap();
    assert!((86_300..=86_400).contains(&retry), "{retry}");
    assert_eq!(policy, some("\"ns:b\";q=10;w=864000"));
    assert_eq!(limit, Some(format!("\"ns:b\";r=6;t={retry}")));
    let granted = ask("?status=429", "window", 2);
    let expected = [some("\"ns:window\";q=5;w=86400"), some("\"ns:window\";r=3"), None];
    assert_eq!(headers(&granted.head), expected);
    let never = ask("?status=429", "window", 6);
    let expected = [some("\"ns:window\";q=5;w=86400"), some("\"ns:window\";r=3"), None];
    assert_eq!(headers(&never.head), expected);
    let [policy, ..] = headers(&ask("?status=429", "q\"é%", 1).head);
    assert_eq!(policy, some("\"ns:q%22%c3%a9%25\";q=1;w=1000"));
    // The bucket was not asked, so nobody knows what is left.
    let too_many = ask("?status=429", "b", 21);
    assert_eq!(headers(&too_many.head), [some("\"ns:b\";q=10;w=864000"), None, None]);
    assert_eq!(headers(&ask("?status=429", "none", 1).head), [None, None, None]);
    for query in ["?status=200", "?status=x", "?status=", "?status=600", "?status=403&status=429"] {
        let answer = ask(query, "b", 1);
        let text = "status must be a number from 400 to 599: the HTTP status of refusals";
        assert_eq!((answer.status, answer.json()["error"].as_str()), (400, Some(text)), "{query}");
    }
    assert_eq!(ask(&format!("?status=429&x={}", "y".repeat(256 - 13)), "b", 7).status, 429);
    assert_eq!(ask(&format!("?status=429&x={}", "y".repeat(256 - 12)), "b", 7).status, 414);
}

#[test]
fn allow_speaks_protobufs_json() {
    let limits = LimitsFile::new(LIMITS);
    let node = Node::start(&limits.path(), &[]);
    let page = post_allow(&node, r#"{"namespace":"ns","bucketName":"b","tokensRequested":"5"}"#);
    assert_eq!(page.status, 200);
    assert!(page.head.contains("content-type: application/json"), "{}", page.head);
    let mut answer = page.json();
    let available = answer["tokensAvailable"].as_f64().unwrap();
    assert!((95.0..95.1).contains(&available), "{answer}");
    answer["tokensAvailable"] = json!(95.0);
    // The JSON reader of this test rounds the last digit.
    let rate = answer["fillRate"].as_f64().unwrap();
    assert!((rate * 86400.0 - 1.0).abs() < 1e-9, "{answer}");
    answer["fillRate"] = json!("1/d");
    let expected = json!({
        "status": "OK", "tokensGranted": "5", "waitMillis": "0", "retryAfterMillis": "0",
        "tokensAvailable": 95.0, "bucket": "ns:b", "softLimited": false, "degraded": false,
        "shadow": false, "permit": "", "size": "100", "fillRate": "1/d", "banned": false,
    });
    assert_eq!(answer, expected);

    // Field names in both forms, numbers as strings or numbers, and one token by default.
    for (body, granted) in [
        (r#"{"namespace":"ns","bucket_name":"b","tokens_requested":3}"#, "3"),
        (r#"{"namespace":"ns","bucketName":"b","tokens_requested":"2"}"#, "2"),
        (r#"{"namespace":"ns","bucketName":"b"}"#, "1"),
        (
            r#"{"namespace":"ns","bucketName":"b","maxWaitMillisOverride":"9223372036854775807",
                "maxWaitTimeOverride":true}"#,
            "1",
        ),
        (
            r#"{"namespace":"ns","bucket_name":"b","max_wait_millis_override":0,
                "max_wait_time_override":true}"#,
            "1",
        ),
    ] {
        let answer = post_allow(&node, body).json();
        assert_eq!((&answer["status"], &answer["tokensGranted"]), (&json!("OK"), &json!(granted)));
    }
    assert_eq!(Scrape::of(node.http).outcomes("granted"), 6.0);

    // Rejections have status 200, too.
    for (body, status) in [
        (json!({"namespace": "ns", "bucketName": "slow", "tokensRequested": 1}), "OK"),
        (json!({"namespace": "ns", "bucketName": "slow"}), "REJECTED_TIMEOUT"),
        (json!({"namespace": "no", "bucketName": "b"}), "REJECTED_NO_BUCKET"),
        (
            json!({"namespace": "ns", "bucketName": "b", "tokensRequested": i64::MAX}),
            "REJECTED_TOO_MANY_TOKENS_REQUESTED",
        ),
        (
            json!({"namespace": "ns", "bucketName": "b", "tokensRequested": i64::MIN.to_string()}),
            "REJECTED_INVALID_REQUEST",
        ),
        (json!({}), "REJECTED_INVALID_REQUEST"),
        (json!({"namespace": "ns", "bucketName": "x".repeat(1 << 20)}), "REJECTED_INVALID_REQUEST"),
    ] {
        let page = post_allow(&node, &body.to_string());
        assert_eq!((page.status, &page.json()["status"]), (200, &json!(status)));
    }
}

#[test]
fn malformed_requests_are_refused() {
    let limits = LimitsFile::new(LIMITS);
    let node = Node::start(&limits.path(), &[]);
    for (body, word) in [
        ("", "EOF while parsing"),
        ("{", "EOF while parsing"),
        ("nonsense", "expected ident"),
        ("[]", "invalid type: sequence"),
        ("5", "invalid type: integer `5`"),
        (r#"{"namespace":"ns","bucketName":"b"} x"#, "trailing characters"),
        (r#"{"namespace":"ns","bucket":"b"}"#, "unknown field `bucket`, expected one of"),
        (r#"{"namespace":"ns","namespace":"ns"}"#, "duplicate field `namespace`"),
        (r#"{"namespace":5}"#, "invalid type: integer `5`, expected a string"),
        (r#"{"tokensRequested":"many"}"#, "invalid digit"),
        (r#"{"tokensRequested":1.5}"#, "did not match"),
        (r#"{"tokensRequested":9223372036854775808}"#, "did not match"),
        (r#"{"tokensRequested":"9223372036854775808"}"#, "too large"),
        (r#"{"tokensRequested":1e400}"#, "out of range"),
        (r#"{"maxWaitTimeOverride":"yes"}"#, "expected a boolean"),
    ] {
        let page = post_allow(&node, body);
        assert_eq!(page.status, 400, "{body}: {page:?}");
        assert!(page.head.contains("content-type: application/json"), "{}", page.head);
        let error = page.json();
        assert_eq!(error.as_object().unwrap().len(), 1, "{error}");
        let error = error["error"].as_str().unwrap();
        assert!(error.starts_with("the body is not a valid AllowRequest in JSON: "), "{error}");
        assert!(error.contains(word), "{body}: {error}");
    }
    let page = http(node.http, "POST", "/v1/allow", b"{\"namespace\":\"\xff\"}");
    assert_eq!(page.status, 400, "{page:?}");
    assert_eq!(http(node.http, "POST", "/v1/allow", &vec![b' '; 3 << 20]).status, 413);
    for (method, path, status) in [
        ("GET", "/v1/allow", 405),
        ("PUT", "/v1/allow", 405),
        ("POST", "/metrics", 405),
        ("POST", "/readyz", 405),
        ("GET", "/", 404),
        ("GET", "/v1/allow/", 404),
    ] {
        assert_eq!(http(node.http, method, path, b"{}").status, status, "{method} {path}");
    }
    // None of these was counted or decided.
    let scrape = Scrape::of(node.http);
    for outcome in ["granted", "invalid", "no_bucket", "timeout"] {
        assert_eq!(scrape.outcomes(outcome), 0.0, "{outcome}");
    }
}

#[tokio::test]
async fn decisions_are_counted() {
    let limits = LimitsFile::new(
        "global_default_bucket: { size: 10, fill_rate: 1/d }
namespaces:
  ns:
    buckets:
      b: { size: 10, fill_rate: 1/d, max_tokens_per_request: 10, wait_timeout_millis: 0, soft_limit_percent: 50 }
      patient: { size: 1, fill_rate: 1/m, max_tokens_per_request: 5, wait_timeout_millis: 3600000, max_debt_millis: 3600000 }
    default_bucket: { size: 10, fill_rate: 1/d }
  few: { max_dynamic_buckets: 2, dynamic_bucket_template: { size: 10, fill_rate: 1/d } }",
    );
    let node = Node::start(&limits.path(), &[]);
    let mut client = client(&node).await;
    for (namespace, bucket, tokens) in [
        ("ns", "b", 4),
        ("ns", "b", 8),
        ("ns", "b", 1),
        ("ns", "b", 11),
        ("ns", "patient", 5),
        ("ns", "patient", 1),
        ("ns", "x", 1),
        ("ns", "y", 1),
        ("few", "one", 1),
        ("few", "two", 1),
        ("few", "three", 1),
        ("elsewhere", "z", 1),
        ("", "z", 1),
    ] {
        client.allow(request(namespace, bucket, tokens)).await.unwrap();
    }
    post_allow(&node, r#"{"namespace":"ns","bucketName":"b"}"#);

    let scrape = Scrape::of(node.http);
    for (namespace, bucket, outcome, count) in [
        ("ns", "b", "granted", 3.0),
        ("ns", "b", "timeout", 1.0),
        ("ns", "b", "too_many_tokens", 1.0),
        ("ns", "b", "no_bucket", 0.0),
        ("ns", "patient", "granted", 1.0),
        ("ns", "patient", "granted_after_wait", 1.0),
        ("ns", "default bucket", "granted", 2.0),
        ("few", "dynamic template", "granted", 2.0),
        ("few", "dynamic template", "too_many_buckets", 1.0),
        ("", "global default bucket", "granted", 1.0),
        ("", "", "invalid", 1.0),
    ] {
        let counted = scrape.decisions(namespace, bucket, outcome);
        assert_eq!(counted, Some(count), "{namespace} {bucket} {outcome}");
    }
    let tokens = |bucket, waited| {
        let labels = [("namespace", "ns"), ("bucket", bucket), ("waited", waited)];
        scrape.get("tollgate_tokens_granted_total", &labels)
    };
    assert_eq!((tokens("b", "false"), tokens("b", "true")), (Some(6.0), Some(0.0)));
    assert_eq!((tokens("patient", "false"), tokens("patient", "true")), (Some(5.0), Some(1.0)));
    let soft = [("namespace", "ns"), ("bucket", "b")];
    assert_eq!(scrape.get("tollgate_soft_limited_total", &soft), Some(1.0));
    let few = [("namespace", "few")];
    assert_eq!(scrape.get("tollgate_dynamic_buckets_created_total", &few), Some(2.0));
    assert_eq!(scrape.get("tollgate_dynamic_buckets", &few), Some(2.0));
    for (transport, count) in [("grpc", 13.0), ("http", 1.0)] {
        let labels = [("transport", transport)];
        let counted = scrape.get("tollgate_rpc_duration_seconds_count", &labels);
        assert_eq!(counted, Some(count), "{transport}");
    }
    assert_eq!(scrape.get("tollgate_limits_loads_total", &[]), Some(1.0));
    assert_eq!(scrape.get("tollgate_limits_reload_failures_total", &[]), Some(0.0));
    let version = [("version", env!("CARGO_PKG_VERSION"))];
    assert_eq!(scrape.get("tollgate_build_info", &version), Some(1.0));
    let text = get(&node, "/metrics");
    assert!(text.head.contains("content-type: text/plain; version=0.0.4"), "{}", text.head);
    for (name, labels) in scrape.series() {
        assert!(name.starts_with("tollgate_"), "{name}{labels:?}");
        // The name of the histogram that a series belongs to.
        let base = ["_bucket", "_sum", "_count"].iter().find_map(|end| name.strip_suffix(end));
        let described = |name: &str| {
            text.body.contains(&format!("# HELP {name} "))
                && text.body.contains(&format!("# TYPE {name} "))
        };
        assert!(described(name) || base.is_some_and(described), "{name} has no help or type");
    }
}

#[tokio::test]
async fn requested_names_create_no_series() {
    let limits = LimitsFile::new(
        "global_default_bucket: {}
namespaces: { users: { dynamic_bucket_template: {} }, some: { default_bucket: {} } }",
    );
    let node = Node::start(&limits.path(), &[]);
    let mut client = client(&node).await;
    let all = ["users", "some", "unknown"];
    for namespace in all {
        client.allow(request(namespace, "first", 1)).await.unwrap();
    }
    let before: Vec<_> = Scrape::of(node.http).series().into_iter().cloned().collect();
    for number in 0..100 {
        for namespace in all {
            let name = format!("n{number}\"\\");
            client.allow(request(namespace, &name, 1)).await.unwrap();
        }
        client.allow(request(&format!("owner{number}"), "b", 1)).await.unwrap();
        client.allow(request("a\nb", "c\"} 1\nd{", 1)).await.unwrap();
    }
    let after = Scrape::of(node.http);
    assert_eq!(after.series(), before.iter().collect::<Vec<_>>());
    assert_eq!(after.decisions("users", "dynamic template", "granted"), Some(101.0));
    assert_eq!(after.decisions("", "", "invalid"), Some(100.0));
}

#[tokio::test]
async fn names_are_escaped_in_metrics() {
    let names = [
        r#"quo"te"#,
        r"back\slash",
        r"back\\slash",
        r#"both\"of"#,
        r#"both"of"#,
        r"ends\",
        r"\n",
        r#""}{="#,
        "ключ",
    ];
    let buckets = names.map(|name| format!("{}: {{}}", json!(name))).join(", ");
    let text = format!("namespaces: {{ {}: {{ buckets: {{ {buckets} }} }} }}", json!(r#"n"\s"#));
    let limits = LimitsFile::new(&text);
    let node = Node::start(&limits.path(), &[]);
    let mut client = client(&node).await;
    for (number, name) in names.iter().enumerate() {
        for _ in 0..=number {
            client.allow(request(r#"n"\s"#, name, 1)).await.unwrap();
        }
    }
    let scrape = Scrape::of(node.http);
    for (number, name) in names.iter().enumerate() {
        let counted = scrape.decisions(r#"n"\s"#, name, "granted");
        assert_eq!(counted, Some((number + 1) as f64), "{name}");
    }
}

/// gRPC health status, which is the same for the node and its service.
async fn serving(node: &Node) -> ServingStatus {
    let statuses = statuses(node).await;
    assert_eq!(statuses[0], statuses[1]);
    statuses[0]
}

/// gRPC health statuses of the node and of its service, which may be changing.
async fn statuses(node: &Node) -> Vec<ServingStatus> {
    let mut health = HealthClient::new(channel(node.grpc).await);
    let mut statuses = Vec::new();
    for service in ["", "quotaservice.QuotaService"] {
        let asked = HealthCheckRequest { service: service.to_owned() };
        statuses.push(health.check(asked).await.unwrap().into_inner().status());
    }
    statuses
}

#[tokio::test]
async fn grpc_health_agrees_with_readyz() {
    use ServingStatus::{NotServing, Serving};
    let limits = LimitsFile::new("on_store_failure: deny\nglobal_default_bucket: {}");
    let mut redis = Redis::start();
    redis.kill();
    let node = Node::start(&limits.path(), &["--store", &redis.url()]);
    assert_eq!((serving(&node).await, get(&node, "/readyz").status), (NotServing, 503));
    redis.start_again();
    eventually("ready", Duration::from_secs(5), || get(&node, "/readyz").status == 200);
    let mut limit = PollLimit::new(Duration::from_secs(5));
    while statuses(&node).await != [Serving, Serving] {
        limit.check("health follows readiness");
    }
    redis.kill();
    eventually("the store is down", Duration::from_secs(5), || !node.store_is_up());
    // The absence of a change takes real time to see: a few checks of the node.
    tokio::time::sleep(Duration::from_millis(600)).await;
    assert_eq!((serving(&node).await, get(&node, "/readyz").status), (Serving, 200));

    let node = Node::start(&limits.path(), &["--store", "memory:"]);
    assert_eq!(serving(&node).await, Serving);
}

#[test]
fn not_ready_if_the_store_never_answered_and_the_policy_denies() {
    let health = |node: &Node| get(node, "/healthz");
    let ready = |node: &Node| {
        let page = get(node, "/readyz");
        (page.status, page.body)
    };
    let good = (200, "ready\n".to_owned());
    let refusing = LimitsFile::new(
        "namespaces: { a: { buckets: { b: {} } }, c: { on_store_failure: deny, buckets: { d: {} } } }",
    );
    let deciding =
        LimitsFile::new("on_store_failure: local\nnamespaces: { a: { buckets: { b: {} } } }");
    let nobody = format!("redis://127.0.0.1:{DEAD_PORT}");

    let node = Node::start(&refusing.path(), &["--store", &nobody]);
    let reason =
        "not ready: the store has never answered, and the limits say to refuse without it\n";
    assert_eq!(ready(&node), (503, reason.to_owned()));
    assert_eq!((health(&node).status, health(&node).body.as_str()), (200, "ok\n"));

    let node = Node::start(&deciding.path(), &["--store", &nobody]);
    assert_eq!(ready(&node), good);
    let node = Node::start(&refusing.path(), &["--store", "memory:"]);
    assert_eq!(ready(&node), good);

    // After the first answer a node stays ready: an outage would otherwise remove all nodes at
    // once.
    let mut redis = Redis::start();
    let node = Node::start(&refusing.path(), &["--store", &redis.url()]);
    eventually("ready", Duration::from_secs(5), || ready(&node) == good);
    redis.kill();
    eventually("the store is down", Duration::from_secs(5), || !node.store_is_up());
    assert_eq!(ready(&node), good);
}
