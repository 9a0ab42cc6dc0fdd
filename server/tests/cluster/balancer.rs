//! HAProxy (Debian's package) with the `config/haproxy.cfg` of Docker Compose, in front of three
//! nodes: it distributes requests rather than connections, a killed node fails its requests in flight
//! and those sent before the balancer has noticed, and a node that drains fails none.

use std::time::{Duration, Instant};

use testkit::certs::{Ca, text};
use testkit::cluster::{Cluster, reserve_half, runs_alone};
use testkit::command::tollgate;
use testkit::grpc::request;
use testkit::haproxy::HaProxy;
use testkit::http::http;
use testkit::load::{Load, Plan, Sample, percentile};
use testkit::metrics::Scrape;
use testkit::{LimitsFile, Node, Redis, eventually};

const LIMITS: &str = "
namespaces:
  ns: { buckets: { b: { size: 1000, fill_rate: 1000, wait_timeout_millis: 0 } } }
";

/// Callers that share one connection to HAProxy, like those of one service.
const CALLERS: Plan =
    Plan { callers: 16, connections: 1, pace: Duration::from_millis(5), failover: false };

fn load(balancer: &HaProxy) -> Load {
    Load::start(&[balancer.grpc], CALLERS, |_, _| Some(request("ns", "b", 1)))
}

/// Number of gRPC requests that each node has answered.
fn requests_by_node(cluster: &Cluster) -> Vec<f64> {
    let labels = [("transport", "grpc")];
    let count = |node: &testkit::Node| {
        Scrape::of(node.http).sum("tollgate_rpc_duration_seconds_count", &labels)
    };
    cluster.nodes.iter().map(count).collect()
}

fn failed(samples: &[Sample]) -> Vec<&Sample> {
    samples.iter().filter(|sample| sample.answer.is_err()).collect()
}

#[test]
fn one_connection_is_spread_over_all_nodes() {
    let _machine = reserve_half();
    let cluster = Cluster::start(LIMITS, &[]);
    let balancer = HaProxy::start(&cluster);
    let load = Load::start(&[balancer.grpc], CALLERS, |_, count| {
        (count < 100).then(|| request("ns", "b", 1))
    });
    let samples = load.collect();
    assert_eq!((samples.len(), failed(&samples).len()), (1600, 0));
    let counts = requests_by_node(&cluster);
    let mut took: Vec<Duration> = samples.iter().map(Sample::latency).collect();
    let [p50, p99] = [0.5, 0.99].map(|part| percentile(&mut took, part));
    println!("one connection over three nodes: {counts:?}, p50 {p50:.1?}, p99 {p99:.1?}");
    assert_eq!(counts.iter().sum::<f64>(), 1600.0, "each request reaches one node once");
    // Beside other tests one may be held up; it then rightly gets fewer.
    let least = if runs_alone() { 0.2 * 1600.0 } else { 1.0 };
    assert!(counts.iter().all(|&count| count >= least), "{counts:?}");
}

#[test]
fn a_killed_node_fails_calls_only_until_the_balancer_has_noticed() {
    let _machine = reserve_half();
    let mut cluster = Cluster::start(LIMITS, &[]);
    let balancer = HaProxy::start(&cluster);
    let plan = Plan { pace: Duration::ZERO, ..CALLERS };
    let load = Load::start(&[balancer.grpc], plan, |_, _| Some(request("ns", "b", 1)));
    load.run_for(Duration::from_secs(1));
    let before = Instant::now();
    cluster.nodes[0].kill();
    let killed = Instant::now();
    load.run_for(Duration::from_secs(2));
    let samples = load.finish();
    let failed = failed(&samples);
    println!("killed: {} of {} calls failed", failed.len(), samples.len());
    // The balancer learns one by one that its connections to the node are closed. Until then, a
    // caller's next call may go to another of them.
    let noticed = killed + Duration::from_millis(500);
    for sample in &failed {
        let late = sample.answered.saturating_duration_since(killed);
        println!("  {:?} {late:.1?} after", sample.answer.as_ref().unwrap_err().code());
        assert!(sample.answered >= before);
        assert!(sample.sent <= noticed, "sent {:?} after", sample.sent.duration_since(killed));
        assert!(late <= Duration::from_secs(1), "{late:?}");
    }
    // Each caller loses at most the request in flight, and one more.
    assert!(failed.len() <= 2 * plan.callers);
    // Every caller is served again within a second.
    for caller in 0..plan.callers {
        let served =
            samples.iter().find(|s| s.caller == caller && s.sent >= killed && s.answer.is_ok());
        let late = served.unwrap().answered.saturating_duration_since(killed);
        assert!(late <= Duration::from_secs(1), "caller {caller} waited {late:?}");
    }
    eventually("the node is out", Duration::from_secs(3), || {
        balancer
            .check_results()
            .is_some_and(|all| all.iter().filter(|s| *s == "L4CON").count() == 2)
    });
}

#[test]
fn a_node_that_drains_loses_nothing() {
    let _machine = reserve_half();
    let mut cluster = Cluster::start(LIMITS, &["--drain-delay", "1s"]);
    let balancer = HaProxy::start(&cluster);
    let load = load(&balancer);
    load.run_for(Duration::from_secs(1));
    let told = Instant::now();
    cluster.nodes[2].signal("TERM");
    assert!(cluster.nodes[2].wait().success());
    let ended = told.elapsed();
    load.run_for(Duration::from_secs(1));
    let samples = load.finish();
    let failed = failed(&samples);
    println!("drained in {ended:.1?}: {} of {} calls failed", failed.len(), samples.len());
    for sample in &failed {
        println!("  {:?} {:?} after", sample.answer, sample.answered.duration_since(told));
    }
    assert!(failed.is_empty());
    assert!(ended >= Duration::from_secs(1) && ended < Duration::from_secs(5), "{ended:?}");
}

#[test]
fn the_http_frontend_serves_allow_but_no_pages() {
    let _machine = reserve_half();
    let cluster = Cluster::start(LIMITS, &[]);
    let balancer = HaProxy::start(&cluster);
    let body = br#"{"namespace":"ns","bucketName":"b","tokensRequested":"3"}"#;
    let response = http(balancer.http, "POST", "/v1/allow", body);
    assert_eq!(response.status, 200, "{response:?}");
    let answer = response.json();
    assert_eq!((&answer["tokensGranted"], &answer["bucket"]), (&"3".into(), &"ns:b".into()));
    // A look takes nothing, so it does not matter which node answers. Changes don't pass.
    let bucket = "/v1/buckets/ns/b";
    assert_eq!(http(balancer.http, "GET", bucket, b"").json()["served_by"]["bucket"], "ns:b");
    let hits = http(balancer.http, "GET", "/v1/hits/search/acme", b"").json();
    assert_eq!(hits["error"], "no throttle is configured for this resource");
    for (method, path, status) in [
        ("POST", "/v1/explain", 200),
        // Of a node, which does not know these fields.
        ("POST", "/json", 400),
        ("POST", "/v1/settle", 400),
        ("POST", "/v1/throttle/request", 400),
        ("POST", "/v1/throttle/explain", 400),
        ("POST", "/v1/holds/reserve", 400),
        ("POST", "/v1/holds/explain", 400),
        ("POST", "/v1/holds/release", 400),
        ("POST", "/v1/holds/keep-alive", 400),
        ("POST", "/v1/holds/transfer", 400),
        ("POST", "/v1/holds/end-session", 400),
        ("DELETE", "/v1/hits/search/acme", 404),
        ("GET", "/v1/held/sandbox", 404),
        ("DELETE", "/v1/held/sandbox/s", 404),
        ("DELETE", bucket, 404),
        ("PUT", bucket, 404),
        ("GET", "/v1/limits", 404),
        ("PUT", "/v1/limits", 404),
        ("GET", "/v1/limits/versions", 404),
        ("POST", "/v1/limits/rollback?to=1", 404),
        ("GET", "/v1/nodes", 404),
        ("PUT", "/v1/kill-switch?for=1h", 404),
        ("GET", "/v1/allow/../../metrics", 404),
        ("GET", "/x", 404),
    ] {
        assert_eq!(http(balancer.http, method, path, body).status, status, "{method} {path}");
    }
    // Each request would reach another node.
    for path in ["/metrics", "/debug/status", "/debug/status.json", "/debug/resource.json?id=x"] {
        assert_eq!(http(balancer.http, "GET", path, b"").status, 404, "{path}");
    }
    let at = balancer.http.to_string();
    for ask in [&["capacity", "show"][..], &["capacity", "show", "x"]] {
        let done = tollgate(&[ask, &["--http", &at]].concat());
        assert_eq!((done.code, done.stdout.as_str()), (2, ""), "{ask:?}");
        assert!(
            done.stderr.contains("--http must be the HTTP address of a node"),
            "{ask:?} {done:?}"
        );
    }
    assert_eq!(http(balancer.stats, "GET", "/healthz", b"").status, 200);
}

/// The setup of `docs/security.md`: TLS from callers to HAProxy, and from HAProxy to nodes that
/// require a client certificate.
#[test]
fn tls_on_each_leg() {
    const NAME: &str = "nodes.example";
    let _machine = reserve_half();
    let (redis, limits, ca) = (Redis::start(), LimitsFile::new(LIMITS), Ca::new());
    let root = ca.file();
    let own = ca.named_server("node", NAME);
    let nodes: Vec<Node> = (0..3)
        .map(|_| {
            let tls = ["--tls-cert-file", text(&own.cert), "--tls-key-file", text(&own.key)];
            let more = ["--tls-client-ca-file", text(&root), "--store", &redis.url()];
            Node::start(&limits.path(), &[tls, more].concat())
        })
        .collect();
    let cert = ca.server("balancer").in_one_file();
    let shown = ca.client("to-nodes", &["cn:balancer"]).in_one_file();
    let variables = |name| {
        [
            ("TOLLGATE_LB_CERT", text(&cert)),
            ("TOLLGATE_LB_NODES_CA", text(&root)),
            ("TOLLGATE_LB_NODES_CERT", text(&shown)),
            ("TOLLGATE_LB_NODES_NAME", name),
        ]
    };
    let balancer = HaProxy::start_for(&nodes, &variables(NAME));
    balancer.wait_until_checks_pass();
    let (grpc, http) = (balancer.grpc.to_string(), balancer.http.to_string());
    for _ in 0..9 {
        let allow = ["allow", "ns", "b", "--addr", &grpc, "--ca-file", text(&root)];
        let done = tollgate(&allow);
        assert_eq!(done.code, 0, "{done:?}");
    }
    assert_eq!(tollgate(&["health", "--http", &http, "--ca-file", text(&root)]).code, 0);
    let done = tollgate(&["capacity", "show", "--http", &http, "--ca-file", text(&root)]);
    assert!(done.stderr.contains("--http must be the HTTP address of a node"), "{done:?}");

    // HAProxy uses no node whose certificate has another name.
    let strict = HaProxy::start_for(&nodes, &variables("other.example"));
    eventually("haproxy has checked every node", Duration::from_secs(10), || {
        strict.check_results().is_some_and(|all| all == ["L6RSP"; 6])
    });
}
