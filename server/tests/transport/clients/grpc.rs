//! Scenarios over gRPC.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use prost::Message as _;
use serde_json::{Value, json};
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse};
use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;
use tonic_reflection::pb::v1::{ServerReflectionRequest, ServerReflectionResponse};

use super::driver::{Driver, GroupResult, Streamed, node_js, python};
use super::report::{Statuses, all, only, row, sum};
use testkit::cluster::Cluster;
use testkit::fault_proxy::{Fault, FaultProxy};
use testkit::grpc::request;
use testkit::metrics::Scrape;
use testkit::{LimitsFile, Node, Redis, TEST_TIMEOUT, eventually};

const LIMITS: &str = "
namespaces:
  shop: { default_bucket: { size: 1000000000, fill_rate: 1000000, max_tokens_per_request: -1 } }
";

const ALLOW: &str = "/quotaservice.QuotaService/Allow";
const CHECK: &str = "/grpc.health.v1.Health/Check";
const WATCH: &str = "/grpc.health.v1.Health/Watch";

/// Unary methods that are open to callers without rights.
const UNARY: [&str; 5] = [
    ALLOW,
    CHECK,
    "/doorman.Capacity/Discovery",
    "/doorman.Capacity/GetCapacity",
    "/doorman.Capacity/ReleaseCapacity",
];

/// A client library.
pub struct Client {
    name: &'static str,
    /// Number of calls in the overload scenario.
    flood: u64,
    command: Command,
}

impl Client {
    pub fn grpcio() -> Option<Self> {
        Some(Self { name: "grpcio", flood: 6_000, command: python("grpc", "grpcio_driver.py") })
    }

    pub fn grpc_js() -> Option<Self> {
        let driver = fetched("TOLLGATE_GRPC_JS")?;
        Some(Self { name: "grpc-js", flood: 40_000, command: node_js(Path::new(&driver)) })
    }

    pub fn grpc_go() -> Option<Self> {
        let driver = fetched("TOLLGATE_GRPC_GO")?;
        Some(Self { name: "grpc-go", flood: 40_000, command: Command::new(driver) })
    }

    fn driver(&mut self) -> Driver {
        Driver::start(&mut self.command)
    }
}

/// A driver built by `scripts/clients.sh`, as its libraries come from the network.
fn fetched(variable: &str) -> Option<String> {
    let driver = std::env::var(variable).ok();
    if driver.is_none() {
        println!("skipped: {variable} is not set; scripts/clients.sh sets it");
    }
    driver
}

/// Default options of a channel.
fn channel(addresses: &[SocketAddr]) -> Value {
    json!({
        "do": "open", "channel": "it", "addresses": addresses, "authority": null,
        "keepalive_ms": 0, "compression": "", "round_robin": false,
    })
}

/// Default options of calls.
fn calls() -> Value {
    json!({
        "channel": "it", "path": ALLOW, "request": hex(&request("shop", "b", 1).encode_to_vec()),
        "messages": 1, "callers": 1, "calls": 1, "deadline_ms": 20_000, "cancel_ms": 0,
        "metadata": 0, "again": false,
    })
}

/// The options with some values replaced.
fn with(mut value: Value, others: Value) -> Value {
    let Value::Object(others) = others else { panic!("{others} is no object") };
    for (key, other) in others {
        assert!(value.get(&key).is_some(), "{key} is no key of {value}");
        value[key] = other;
    }
    value
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Vec<u8> {
    let byte = |at| u8::from_str_radix(&text[at..at + 2], 16).unwrap();
    (0..text.len()).step_by(2).map(byte).collect()
}

/// A node on a Redis that can be slowed down, behind a proxy that counts the client's connections.
struct Slow {
    store: FaultProxy,
    way: FaultProxy,
    node: Node,
    _redis: Redis,
    _limits: LimitsFile,
}

impl Slow {
    /// Latency of a request once the store is slow.
    const ROUND_TRIP: Duration = Duration::from_millis(300);

    fn start(args: &[&str]) -> Self {
        let (redis, limits) = (Redis::start(), LimitsFile::new(LIMITS));
        let store = FaultProxy::to(redis.port());
        let url = store.url();
        let args = [&["--store", &url, "--store-timeout", "20s", "--threads", "1"], args].concat();
        let node = Node::start(&limits.path(), &args);
        let way = FaultProxy::to(node.grpc.port());
        Self { store, way, node, _redis: redis, _limits: limits }
    }

    /// Connects the channel, then slows down Redis.
    fn slow_down(&self, driver: &mut Driver) {
        driver.order(&channel(&[self.way.address()]));
        all(&driver.run(calls()).statuses, "OK", 1);
        self.store.set(Fault::Delay(Self::ROUND_TRIP / 2));
    }

    /// Asserts that all of these calls succeeded.
    #[track_caller]
    fn assert_all_ok(&self, seen: &GroupResult, calls: u64) {
        let expected = Statuses::from([("OK".to_owned(), calls)]);
        assert_eq!(seen.statuses, expected, "{:?} {:?}", seen.texts, self.node.logged());
    }

    /// Asserts that all calls used one connection, which the node did not close.
    #[track_caller]
    fn assert_one_connection(&self) {
        let connections = self.way.accepted();
        assert_eq!(connections, 1, "all calls went over one connection: {:?}", self.node.logged());
    }
}

/// Asserts that most calls had this status. On a busy machine some may succeed instead.
fn assert_most(statuses: &Statuses, status: &str) {
    only(statuses, &[status, "OK"]);
    assert!(statuses[status] >= 100, "most are {status}: {statuses:?}");
}

fn deadlines(mut client: Client) {
    let (slow, mut driver) = (Slow::start(&[]), client.driver());
    slow.slow_down(&mut driver);
    let waiting = driver.begin(with(calls(), json!({ "calls": 10 })));
    let short = json!({ "callers": 2, "calls": 100, "deadline_ms": 30 });
    let seen = driver.run(with(calls(), short));
    row("deadlines", client.name, &seen.statuses);
    slow.assert_all_ok(&driver.wait(waiting), 10);
    assert_most(&seen.statuses, "DEADLINE_EXCEEDED");
    slow.assert_one_connection();
}

fn cancellation(mut client: Client) {
    let (slow, mut driver) = (Slow::start(&[]), client.driver());
    slow.slow_down(&mut driver);
    let waiting = driver.begin(with(calls(), json!({ "calls": 10 })));
    let cancelled = json!({ "callers": 2, "calls": 100, "cancel_ms": 20 });
    let seen = driver.run(with(calls(), cancelled));
    row("cancellation", client.name, &seen.statuses);
    slow.assert_all_ok(&driver.wait(waiting), 10);
    assert_most(&seen.statuses, "CANCELLED");
    slow.assert_one_connection();
}

fn keepalive(mut client: Client) {
    let limits = LimitsFile::new(LIMITS);
    // grpcio checks an idle connection every 5 s.
    let args = ["--keepalive", "1s", "--keepalive-timeout", "8s"];
    let node = Node::start(&limits.path(), &args);
    let way = FaultProxy::to(node.grpc.port());
    let mut driver = client.driver();
    // Libraries raise this to their minimum, mostly 10 s.
    driver.order(&with(channel(&[way.address()]), json!({ "keepalive_ms": 1000 })));
    let first = driver.run(calls()).statuses;
    // Real time for two pings.
    std::thread::sleep(Duration::from_secs(25));
    let seen = sum([&first, &driver.run(calls()).statuses]);
    row("keepalive", client.name, &seen);
    all(&seen, "OK", 2);
    assert_eq!(way.accepted(), 1, "the node keeps a connection that answers pings");
}

fn compression(mut client: Client) {
    let limits = LimitsFile::new(LIMITS);
    let node = Node::start(&limits.path(), &[]);
    let mut driver = client.driver();
    driver.order(&with(channel(&[node.grpc]), json!({ "compression": "gzip" })));
    // Some libraries do not compress short messages.
    let long = request("shop", &"b".repeat(250), 1).encode_to_vec();
    let seen = driver.run(with(calls(), json!({ "calls": 50, "request": hex(&long) })));
    row("gzip", client.name, &seen.statuses);
    all(&seen.statuses, "OK", 50);
}

fn overload(mut client: Client) {
    let slow = Slow::start(&["--max-in-flight", "4"]);
    let mut driver = client.driver();
    slow.slow_down(&mut driver);
    let flood = json!({ "callers": 200, "calls": client.flood / 200 });
    let flood = driver.run(with(calls(), flood)).statuses;
    slow.store.set(Fault::Nothing);
    let after = driver.run(with(calls(), json!({ "calls": 10, "again": true }))).statuses;
    row("overload", client.name, &sum([&flood, &after]));
    only(&flood, &["OK", "RESOURCE_EXHAUSTED"]);
    // More than h2's limit of 1,024 reset streams.
    assert!(flood["RESOURCE_EXHAUSTED"] > 2_048, "not an overload: {flood:?}");
    all(&after, "OK", 10);
    slow.assert_one_connection();
}

fn round_robin(mut client: Client) {
    let mut cluster = Cluster::start(LIMITS, &["--drain-delay", "1s"]);
    let (addresses, mut driver) = (cluster.grpc(), client.driver());
    driver.order(&with(channel(&addresses), json!({ "round_robin": true })));
    // Until all three connections are open, calls go to the first node.
    let decided = |node: &Node| Scrape::of(node.http).sum("tollgate_decisions_total", &[]);
    let mut first = Vec::new();
    eventually("all three nodes are asked", TEST_TIMEOUT, || {
        let seen = driver.run(with(calls(), json!({ "calls": 30 })));
        let answered = seen.statuses.keys().all(|status| status == "OK");
        first.push(seen.statuses);
        !answered || cluster.nodes.iter().all(|node| decided(node) > 0.0)
    });
    let group = driver.begin(with(calls(), json!({ "callers": 20, "calls": 0 })));
    let ports = [cluster.nodes[1].grpc.port(), cluster.nodes[1].http.port()];
    cluster.nodes[1].signal("TERM");
    cluster.nodes[1].wait_for_exit(TEST_TIMEOUT);
    let url = cluster.redis.url();
    cluster.nodes[1] = Node::start_on(ports, &cluster.limits.path(), &["--store", &url]);
    let started = Instant::now();
    while decided(&cluster.nodes[1]) == 0.0 && started.elapsed() < TEST_TIMEOUT {
        std::thread::sleep(Duration::from_millis(20));
    }
    driver.stop(group);
    let restart = driver.wait(group);
    let seen = sum(first.iter().chain([&restart.statuses]));
    row("round_robin", client.name, &seen);
    only(&seen, &["OK"]);
    assert!(decided(&cluster.nodes[1]) > 0.0, "the restarted node is used");
}

/// Opens a stream, sends messages, and reads the replies.
fn streamed(driver: &mut Driver, path: &str, requests: &[Vec<u8>]) -> Streamed {
    let requests: Vec<String> = requests.iter().map(|request| hex(request)).collect();
    let answer = driver.order(&json!({
        "do": "stream", "channel": "it", "path": path, "answers": requests.len(),
        "requests": requests, "hold_ms": 500,
    }));
    serde_json::from_value(answer).unwrap()
}

fn health(mut client: Client) {
    let limits = LimitsFile::new(LIMITS);
    let node = Node::start(&limits.path(), &[]);
    let mut driver = client.driver();
    driver.order(&channel(&[node.grpc]));
    let asked = |service: &str| HealthCheckRequest { service: service.to_owned() }.encode_to_vec();
    let mut check = |service| {
        driver.run(with(calls(), json!({ "path": CHECK, "request": hex(&asked(service)) })))
    };
    let (known, unknown) = (check(""), check("unknown"));
    let watch = streamed(&mut driver, WATCH, &[asked("unknown")]);
    let open = BTreeMap::from([(watch.status.clone().unwrap_or("open".to_owned()), 1)]);
    row("health", client.name, &sum([&known.statuses, &unknown.statuses, &open]));
    all(&known.statuses, "OK", 1);
    all(&unknown.statuses, "NOT_FOUND", 1);
    assert_eq!(watch.status, None, "a watch of an unknown service stays open");
    let [first] = &watch.answers[..] else { panic!("{watch:?} has no answer") };
    let first = HealthCheckResponse::decode(&*unhex(first)).unwrap();
    assert_eq!(first.status(), ServingStatus::ServiceUnknown);
}

fn reflection(mut client: Client) {
    let limits = LimitsFile::new(LIMITS);
    let node = Node::start(&limits.path(), &[]);
    let mut driver = client.driver();
    driver.order(&channel(&[node.grpc]));
    let asked = |what| {
        ServerReflectionRequest { host: String::new(), message_request: Some(what) }.encode_to_vec()
    };
    let symbol = |name: &str| asked(MessageRequest::FileContainingSymbol(name.to_owned()));
    let requests = [
        symbol("no.such.Symbol"),
        symbol("google.rpc.RetryInfo"),
        asked(MessageRequest::ListServices(String::new())),
    ];
    let versions = ["v1", "v1alpha"].map(|version| {
        let path = format!("/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo");
        streamed(&mut driver, &path, &requests)
    });
    let ends = versions.iter().map(|one| (one.status.clone().unwrap_or("open".to_owned()), 1));
    row(
        "reflection",
        client.name,
        &sum(ends.map(|end| BTreeMap::from([end])).collect::<Vec<_>>().iter()),
    );
    for streamed in versions {
        assert_eq!(streamed.status, None, "the stream stays open: {streamed:?}");
        let answers = streamed.answers.iter().map(|answer| {
            let answer = ServerReflectionResponse::decode(&*unhex(answer)).unwrap();
            answer.message_response.unwrap()
        });
        let answers: Vec<_> = answers.collect();
        assert!(
            matches!(
                &answers[..],
                [
                    MessageResponse::ErrorResponse(_),
                    MessageResponse::FileDescriptorResponse(_),
                    MessageResponse::ListServicesResponse(_),
                ]
            ),
            "{answers:?}"
        );
    }
}

fn authorities(mut client: Client) {
    let limits = LimitsFile::new(LIMITS);
    let node = Node::start(&limits.path(), &[]);
    let mut driver = client.driver();
    let odd = ["a%2Cb", "10.0.0.1:10990,10.0.0.2:10990", "a:b:c", "::1", "/run/it.sock", "a b"];
    let seen = odd.map(|authority| {
        driver.order(&with(channel(&[node.grpc]), json!({ "authority": authority })));
        let seen = driver.run(calls());
        println!("{authority:?}: {seen:?}");
        seen.statuses
    });
    row("authorities", client.name, &sum(&seen));
    all(&sum(&seen), "OK", odd.len() as u64);
}

fn metadata(mut client: Client) {
    let limits = LimitsFile::new(LIMITS);
    let node = Node::start(&limits.path(), &[]);
    let way = FaultProxy::to(node.grpc.port());
    let mut driver = client.driver();
    driver.order(&channel(&[way.address()]));
    let long = driver.run(with(calls(), json!({ "calls": 5, "metadata": 20_000 })));
    let after = driver.run(calls());
    row("metadata of 20 kB", client.name, &sum([&long.statuses, &after.statuses]));
    all(&after.statuses, "OK", 1);
    let said = |status: &str| long.texts.get(status).cloned().flatten().unwrap_or_default();
    if said("INTERNAL").contains("violates the maximum size") {
        // grpc-go respects the size that the node has announced, and sends nothing.
        return all(&long.statuses, "INTERNAL", 5);
    }
    all(&long.statuses, "RESOURCE_EXHAUSTED", 5);
    assert!(!said("RESOURCE_EXHAUSTED").is_empty(), "the status has no text: {long:?}");
}

/// No message or two messages in a unary call.
fn messages(mut client: Client) {
    let limits = LimitsFile::new(LIMITS);
    let node = Node::start(&limits.path(), &[]);
    let mut driver = client.driver();
    driver.order(&channel(&[node.grpc]));
    for count in [0, 2] {
        let seen = UNARY.map(|path| {
            // An empty message is valid for each type.
            let order = json!({ "path": path, "messages": count, "request": "" });
            let seen: GroupResult = driver.run(with(calls(), order));
            println!("{path}, {count} messages: {seen:?}");
            seen
        });
        row(&format!("{count} messages"), client.name, &sum(seen.iter().map(|one| &one.statuses)));
        for one in &seen {
            only(&one.statuses, &["INTERNAL", "UNIMPLEMENTED"]);
            assert_eq!(one.statuses, seen[0].statuses, "all methods have the same statuses");
            assert!(one.texts.values().all(|text| text.as_deref().is_some_and(|t| !t.is_empty())));
        }
    }
}

fn unknown_method(mut client: Client) {
    let limits = LimitsFile::new(LIMITS);
    let node = Node::start(&limits.path(), &[]);
    let mut driver = client.driver();
    driver.order(&channel(&[node.grpc]));
    let paths = ["/quotaservice.QuotaService/Refuse", "/no.such.Service/Do"];
    for path in paths {
        let seen = driver.run(with(calls(), json!({ "path": path, "calls": 20 })));
        row(&format!("unknown method {}", &path[1..]), client.name, &seen.statuses);
        all(&seen.statuses, "UNIMPLEMENTED", 20);
        let text = seen.texts["UNIMPLEMENTED"].clone().unwrap_or_default();
        let method = path.rsplit('/').next().unwrap();
        assert!(text.contains(method), "{text:?} names {method}");
    }
}

macro_rules! clients {
    ($($client:ident: $scenarios:tt;)*) => { $(mod $client { scenarios!($client $scenarios); })* };
}

macro_rules! scenarios {
    ($client:ident ($($scenario:ident)*)) => { $(
        #[test]
        fn $scenario() {
            if let Some(client) = super::Client::$client() {
                super::$scenario(client);
            }
        }
    )* };
}

clients! {
    grpcio: (deadlines cancellation keepalive compression overload round_robin health reflection
             authorities metadata messages unknown_method);
    grpc_js: (deadlines cancellation keepalive compression overload round_robin health reflection
              authorities metadata messages unknown_method);
    grpc_go: (deadlines cancellation keepalive compression overload round_robin health reflection
              authorities metadata messages unknown_method);
}
