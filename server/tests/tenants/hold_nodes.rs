//! Holds through nodes: over gRPC and HTTP, and by the command line.

use std::io::{BufRead as _, BufReader, Read as _};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use testkit::callers::{Callers, http_with_token, with_token};
use testkit::command::{command, tollgate};
use testkit::grpc::channel;
use testkit::http::{HttpResponse, http};
use testkit::metrics::Scrape;
use testkit::{LimitsFile, Node, Redis, eventually};
use tollgate_proto::tollgate::v1::holds_client::HoldsClient;
use tollgate_proto::tollgate::v1::reserve_response::Status;
use tollgate_proto::tollgate::v1::{
    EndSessionRequest, HeldByGroup, Hold, KeepAliveRequest, ReleaseRequest, ReserveRequest,
    ReserveResponse, SessionToRenew, TransferRequest,
};
use tonic::Code;

const LIMITS: &str = "
holds:
  - { resource: 'sandbox', domain_limit: 5, global_limit: 8 }
  - { resource: 'job', domain_limit: 1 }
";

fn start(limits: &str, args: &[&str]) -> (Node, LimitsFile) {
    let limits = LimitsFile::new(limits);
    (Node::start(&limits.path(), args), limits)
}

fn request(session: &str, domain: &str, copies: i64) -> ReserveRequest {
    ReserveRequest {
        resource: "sandbox".to_owned(),
        session: session.to_owned(),
        hold: "h".to_owned(),
        domain: domain.to_owned(),
        copies,
        ..ReserveRequest::default()
    }
}

fn post(node: &Node, call: &str, body: &Value) -> HttpResponse {
    http(node.http, "POST", &format!("/v1/holds/{call}"), body.to_string().as_bytes())
}

/// The JSON that a call is answered.
fn call(node: &Node, call: &str, body: &Value) -> Value {
    let response = post(node, call, body);
    assert_eq!(response.status, 200, "{response:?}");
    response.json()
}

/// The answer to a request for copies of `acme`.
fn reserve(node: &Node, session: &str, copies: i64) -> Value {
    let body = json!({
        "resource": "sandbox", "session": session, "hold": "h", "domain": "acme", "copies": copies,
    });
    call(node, "reserve", &body)
}

/// The one session in an answer to KeepAlive, and whether the answer is degraded.
fn renew(node: &Node, session: &str) -> (Value, bool) {
    let body = json!({ "sessions": [{ "resource": "sandbox", "session": session }] });
    let answer = call(node, "keep-alive", &body);
    (answer["sessions"][0].clone(), answer["degraded"] == true)
}

#[tokio::test]
async fn nodes_share_the_holds_over_grpc() {
    let redis = Redis::start();
    let store = ["--store", &redis.url(), "--store-timeout", "2s"];
    let ((first, _limits), (second, _other)) = (start(LIMITS, &store), start(LIMITS, &store));
    [&first, &second].into_iter().for_each(Node::wait_for_store);
    let mut clients =
        [HoldsClient::new(channel(first.grpc).await), HoldsClient::new(channel(second.grpc).await)];
    let [first, second] = &mut clients;
    let limits = ReserveResponse { domain_limit: 5, global_limit: 8, ..ReserveResponse::default() };
    let made = ReserveResponse { granted: 3, domain_held: 3, all_held: 3, ..limits.clone() };
    for client in [&mut *first, &mut *second] {
        let answer = client.reserve(request("a", "acme", 3)).await.unwrap().into_inner();
        assert_eq!(answer, made, "sent again, to another node");
    }
    let answer = second.reserve(request("b", "acme", 4)).await.unwrap().into_inner();
    assert_eq!(
        answer,
        ReserveResponse { granted: 2, domain_held: 5, all_held: 5, ..limits.clone() }
    );
    let answer = first.reserve(request("c", "acme", 1)).await.unwrap().into_inner();
    let rejected = ReserveResponse { status: 1, retry_after_millis: 1000, ..limits };
    assert_eq!(answer, ReserveResponse { domain_held: 5, all_held: 5, ..rejected });
    let session = |session: &str| SessionToRenew {
        resource: "sandbox".to_owned(),
        session: session.to_owned(),
        ttl_millis: 30_000,
    };
    let sessions = vec![session("b"), session("c"), session("a")];
    let answer = second.keep_alive(KeepAliveRequest { sessions }).await.unwrap().into_inner();
    let [b, c, a] = &*answer.sessions else { panic!("{answer:?}") };
    assert_eq!((b.alive, c.alive, a.alive, answer.degraded), (true, false, true, false));
    assert_eq!((&*a.session, c.expires_at_unix_millis), ("a", 0));
    let hold = Hold { hold: "h".to_owned(), domain: "acme".to_owned(), copies: 3 };
    assert_eq!(a.holds, [hold]);
    let release = ReleaseRequest {
        resource: "sandbox".to_owned(),
        session: "a".to_owned(),
        hold: "h".to_owned(),
        keep: 1,
    };
    assert_eq!(second.release(release).await.unwrap().into_inner().left, 1);
    let transfer = TransferRequest {
        resource: "sandbox".to_owned(),
        session: "a".to_owned(),
        hold: "h".to_owned(),
        copies: 1,
        to_session: "d".to_owned(),
        ttl_millis: 0,
    };
    for client in [&mut *first, &mut *second] {
        assert_eq!(client.transfer(transfer.clone()).await.unwrap().into_inner().moved, 1);
    }
    let none = TransferRequest { session: "c".to_owned(), to_session: "e".to_owned(), ..transfer };
    assert_eq!(first.transfer(none).await.unwrap_err().code(), Code::NotFound);
    for released in [2, 0] {
        let end = EndSessionRequest { resource: "sandbox".to_owned(), session: "b".to_owned() };
        assert_eq!(first.end_session(end).await.unwrap().into_inner().released, released);
    }
    for (wrong, code) in [
        (request("a", "acme", -1), Code::InvalidArgument),
        (request("d", "globex", 1), Code::InvalidArgument),
        (request(&"x".repeat(1 << 20), "acme", 1), Code::OutOfRange),
        (ReserveRequest { resource: "x".to_owned(), ..request("a", "acme", 1) }, Code::NotFound),
    ] {
        let status = first.reserve(wrong).await.unwrap_err();
        assert_eq!(status.code(), code, "{status}");
    }
}

#[test]
fn answers_over_http_in_json() {
    let (node, _limits) =
        start(&format!("{LIMITS}throttles: [{{ resource: hits, tiers: [] }}]"), &[]);
    let expected = json!({
        "status": "OK", "granted": "5", "domainLimit": "5", "globalLimit": "8", "domainHeld": "5",
        "allHeld": "5", "groups": [], "retryAfterMillis": "0", "degraded": false, "shadow": false,
    });
    assert_eq!(reserve(&node, "s", 7), expected);
    let (session, _) = renew(&node, "s");
    assert_eq!(session["holds"], json!([{ "hold": "h", "domain": "acme", "copies": "5" }]));
    let ends: i64 = session["expiresAtUnixMillis"].as_str().unwrap().parse().unwrap();
    assert!(ends > 1_700_000_000_000, "{ends}");
    let hold = json!({ "resource": "sandbox", "session": "s", "hold": "h", "keep": 2 });
    assert_eq!(call(&node, "release", &hold), json!({ "left": "2", "degraded": false }));
    let transfer = json!({ "resource": "sandbox", "session": "s", "hold": "h", "toSession": "t" });
    assert_eq!(call(&node, "transfer", &transfer), json!({ "moved": "2" }));
    let session = json!({ "resource": "sandbox", "session": "t" });
    assert_eq!(call(&node, "end-session", &session), json!({ "released": "2" }));
    assert_eq!(post(&node, "transfer", &transfer).status, 404);
    let on = |resource| json!({ "resource": resource, "session": "s", "hold": "h", "domain": "d" });
    for (path, body, status, text) in [
        ("reserve", json!({ "resource": "sandbox" }), 400, "session is empty"),
        ("reserve", on("other"), 404, "no holds are configured"),
        ("reserve", on("hits"), 409, "limits on hits"),
        (
            "release",
            json!({ "resource": "hits", "session": "s", "hold": "h" }),
            409,
            "limits on hits",
        ),
        ("release", json!({ "copies": 1 }), 400, "unknown field `copies`"),
        ("keep-alive", json!([]), 400, "not a valid KeepAliveRequest"),
        ("end-session", json!({}), 400, "resource is empty"),
    ] {
        let response = post(&node, path, &body);
        assert_eq!(response.status, status, "{response:?}");
        assert!(response.json()["error"].as_str().unwrap().contains(text), "{response:?}");
    }
    let hits =
        http(node.http, "POST", "/v1/throttle/request", br#"{"resource":"job","domain":"d"}"#);
    assert_eq!(hits.status, 409, "{hits:?}");
}

#[tokio::test]
async fn callers_hold_their_resources_only() {
    let (limits, callers) = (LimitsFile::new(LIMITS), Callers::new());
    let (token, hash) = testkit::callers::token();
    callers.write(&format!(
        "callers: [{{ name: runner, token_sha256: [{hash}], resources: ['sand*'], domains: ['a*'] }}]"
    ));
    let node = callers.node(&limits);
    let status = |token, call, resource, domain| {
        let mut body = json!({ "resource": resource, "session": "s" });
        match call {
            "reserve" => (body["domain"], body["hold"]) = (json!(domain), json!("h")),
            "release" => body["hold"] = json!("h"),
            "transfer" => (body["hold"], body["toSession"]) = (json!("h"), json!("t")),
            "keep-alive" => body = json!({ "sessions": [body] }),
            _ => {}
        }
        let path = format!("/v1/holds/{call}");
        http_with_token(&node, token, "POST", &path, &body.to_string()).status
    };
    let named = Some(&*token);
    assert_eq!(status(named, "reserve", "sandbox", "globex"), 403);
    for call in ["reserve", "keep-alive", "transfer", "release", "end-session"] {
        assert_eq!(status(named, call, "sandbox", "acme"), 200, "{call}");
        // Whether it exists or not.
        assert_eq!(status(named, call, "job", "acme"), 403, "{call}");
        assert_eq!(status(named, call, "none", "acme"), 403, "{call}");
        assert_eq!(status(None, call, "sandbox", "acme"), 401, "{call}");
    }
    let mut client = HoldsClient::new(channel(node.grpc).await);
    let mut code = async |token, domain| {
        let answer = client.reserve(with_token(token, request("t", domain, 1))).await;
        answer.map_or_else(|status| status.code(), |_| Code::Ok)
    };
    assert_eq!(code(named, "acme").await, Code::Ok);
    assert_eq!(code(named, "globex").await, Code::PermissionDenied);
    assert_eq!(code(None, "acme").await, Code::Unauthenticated);
}

const GROUPS: &str = "
holds:
  - resource: 'sand*/*'
    domain_limit: 5
    groups: { trial: { domains: ['t-*'], limit: 3 }, all: { domains: ['*'] } }
";

#[tokio::test]
async fn groups_are_told_and_sessions_shown_and_ended() {
    let redis = Redis::start();
    for store in [&[][..], &["--store", &redis.url(), "--store-timeout", "2s"]] {
        let (node, _limits) = start(GROUPS, store);
        if !store.is_empty() {
            node.wait_for_store();
        }
        let mut client = HoldsClient::new(channel(node.grpc).await);
        let resource = "sand/box %".to_owned();
        let on = |request| ReserveRequest { resource: resource.clone(), ..request };
        let group = |name: &str, limit, held| HeldByGroup { name: name.to_owned(), limit, held };
        let made = client.reserve(on(request("a/b", "t-1", 5))).await.unwrap().into_inner();
        assert_eq!(made.granted, 3);
        assert_eq!(made.groups, [group("trial", 3, 3), group("all", -1, 3)]);
        let never = client.reserve(ReserveRequest { min_copies: 4, ..on(request("c", "t-2", 4)) });
        let never = never.await.unwrap().into_inner();
        assert_eq!((never.status(), never.retry_after_millis), (Status::Rejected, 0));
        client.reserve(on(request("d", "acme", 1))).await.unwrap();

        let address = node.http.to_string();
        let run = |args: &[&str]| tollgate(&[&["holds"], args, &["--http", &address]].concat());
        let shown = run(&["show", &resource]);
        let lines: Vec<_> = shown.stdout.lines().collect();
        let [resource_line, limits, held, trial, all, first, hold, ..] = &*lines else {
            panic!("{shown:?}")
        };
        assert_eq!(
            [resource_line, limits, held, trial, all],
            [
                &"resource  \"sand/box %\"",
                &"limits    at most 5 a domain, no limit in all, as configured for \"sand*/*\"",
                &"held      4 copies, in 2 holds of at most 100000",
                &"group     \"trial\": 3 copies, at most 3 in the group",
                &"group     \"all\": 4 copies, no limit in the group",
            ]
        );
        assert!(first.starts_with("session   \"a/b\", until "), "{shown:?}");
        assert_eq!(*hold, "          3 copies for \"t-1\", hold \"h\"");
        let explained = run(&["explain", &resource, "t-2", "--copies", "2"]);
        assert_eq!(
            (explained.code, &*explained.stdout),
            (
                1,
                "REJECTED: would be refused until enough copies are released\n\n\
                 step          effect\n\
                 request       notes    asks for 2 copies, or 1 at least, of sand/box % for t-2, in a new session\n\
                 holds         notes    the limits on holds of sand*/* decide\n\
                 max_holds     permits  at most 100000 holds, and as many sessions, at once (max_holds): there \
                 are fewer\n\
                 domain_limit  permits  the domain holds 0 copies of at most 5 (domain_limit)\n\
                 group         refuses  its group trial holds 3 copies of at most 3\n\
                 group         permits  its group all holds 4 copies, without a limit\n\
                 global_limit  permits  all domains hold 4 copies, without a limit\n"
            ),
            "{explained:?}"
        );
        assert_eq!(run(&["explain", &resource, "acme", "--copies", "2"]).code, 0);
        let ended = run(&["end", &resource, "a/b"]);
        assert_eq!(ended.code, 0);
        assert!(ended.stdout.starts_with("the session is over, and 3 copies free"), "{ended:?}");
        let again = run(&["end", &resource, "a/b", "--output", "json"]);
        assert_eq!((again.code, again.stdout.trim()), (1, r#"{"released":0}"#));
        let json: Value =
            serde_json::from_str(&run(&["show", &resource, "--output", "json"]).stdout).unwrap();
        let session = &json["sessions"][0];
        assert_eq!((&session["session"], &json["sessions"][1]), (&json!("d"), &Value::Null));
        assert_eq!(session["holds"], json!([{ "hold": "h", "domain": "acme", "copies": 1 }]));
        assert_eq!(json["groups"][0], json!({ "name": "trial", "limit": 3, "held": 0 }));
        assert_eq!((run(&["show", "x"]).code, run(&["show", ""]).code), (1, 1));
    }
}

#[test]
fn only_administrators_see_and_end_sessions() {
    let (limits, callers) = (LimitsFile::new(LIMITS), Callers::new());
    let node = callers.node(&limits);
    let ask =
        |token, method: &str, path: &str| http_with_token(&node, token, method, path, "").status;
    let body = json!({ "resource": "sandbox", "session": "s", "hold": "h", "domain": "d" });
    let admin = Some(&*callers.admin);
    let made = http_with_token(&node, admin, "POST", "/v1/holds/reserve", &body.to_string()).json();
    assert_eq!(made["granted"], "1");
    for (token, status) in
        [(Some(&*callers.shop), 403), (Some(&*callers.watcher), 403), (None, 401), (admin, 200)]
    {
        for (method, path) in [("GET", "/v1/held/sandbox"), ("DELETE", "/v1/held/sandbox/x")] {
            assert_eq!(ask(token, method, path), status, "{token:?} {path}");
        }
        // It tells no sessions, so it is for all who may ask for copies, or observe.
        let explained =
            http_with_token(&node, token, "POST", "/v1/holds/explain", &body.to_string()).status;
        let is_watcher = token == Some(&*callers.watcher);
        assert_eq!(explained, if is_watcher { 200 } else { status }, "{token:?}");
    }
    for (method, path, status) in [
        ("GET", "/v1/held/", 404),
        ("GET", "/v1/held/none", 404),
        ("GET", "/v1/held/%", 400),
        ("GET", "/v1/held/%FF", 400),
        ("GET", "/v1/held/sand/box", 400),
        ("DELETE", "/v1/held/sandbox", 400),
        ("DELETE", "/v1/held/sandbox/", 400),
        ("DELETE", "/v1/held//s", 400),
        ("PUT", "/v1/held/sandbox/s", 405),
    ] {
        assert_eq!(ask(admin, method, path), status, "{method} {path}");
    }
    let ended = http_with_token(&node, admin, "DELETE", "/v1/held/sandbox/s", "");
    assert_eq!(ended.json(), json!({ "released": 1 }));
    let mut logged = Vec::new();
    eventually("the end is in the log, without the name", Duration::from_secs(5), || {
        logged.extend(node.logged());
        logged.iter().any(|event| {
            event["change"] == "a session was ended; copies freed: 1"
                && event["path"] == "/v1/held/sandbox/…"
        })
    });
}

#[test]
fn without_the_store_nothing_ends_and_the_failure_policy_decides() {
    for (policy, granted, outcome) in [
        ("local", "2", "granted_in_part"),
        ("allow", "2", "granted_in_part"),
        ("deny", "0", "server_error"),
    ] {
        let mut redis = Redis::start();
        let limits = format!("on_store_failure: {policy}{LIMITS}");
        let (node, _limits) = start(&limits, &["--store", &redis.url(), "--store-timeout", "2s"]);
        node.wait_for_store();
        assert_eq!(reserve(&node, "before", 2)["granted"], "2");
        redis.kill();
        eventually("the store is away", Duration::from_secs(20), || !node.store_is_up());
        let body = json!({
            "resource": "sandbox", "session": "s", "hold": "h", "domain": "acme", "copies": 9,
            "minCopies": 2,
        });
        let explained = call(&node, "explain", &body);
        let alone = call(&node, "reserve", &body);
        assert_eq!(explained["answer"], alone, "{explained}");
        let steps = explained["steps"].to_string();
        assert!(steps.contains(&format!("(on_store_failure: {policy})")), "{explained}");
        assert_eq!((&alone["granted"], &alone["degraded"]), (&json!(granted), &json!(true)));
        assert_eq!((&alone["domainHeld"], &alone["allHeld"]), (&json!("-1"), &json!("-1")));
        let (session, degraded) = renew(&node, "before");
        assert_eq!(
            (&session["alive"], &session["holds"], degraded),
            (&json!(true), &json!([]), true)
        );
        let hold = json!({ "resource": "sandbox", "session": "before", "hold": "h", "keep": 1 });
        assert_eq!(call(&node, "release", &hold), json!({ "left": "1", "degraded": true }));
        let session = json!({ "resource": "sandbox", "session": "before" });
        assert_eq!(post(&node, "end-session", &session).status, 504);
        let transfer =
            json!({ "resource": "sandbox", "session": "before", "hold": "h", "toSession": "t" });
        assert_eq!(post(&node, "transfer", &transfer).status, 504);
        assert_eq!(http(node.http, "GET", "/v1/held/sandbox", b"").status, 503);
        assert_eq!(http(node.http, "DELETE", "/v1/held/sandbox/before", b"").status, 504);
        let labels = [("template", "sandbox"), ("outcome", outcome)];
        let counted = Scrape::of(node.http);
        assert_eq!(counted.sum("tollgate_hold_decisions_total", &labels), 1.0);
        assert_eq!(counted.sum("tollgate_hold_degraded_decisions_total", &labels[..1]), 1.0);
        let mut never = body.clone();
        never["minCopies"] = json!(6);
        let granted = if policy == "allow" { "6" } else { "0" };
        assert_eq!(call(&node, "reserve", &never)["granted"], granted, "{policy}");
        // A store that has lost its data ends all sessions.
        redis.start_again();
        eventually("the store is back", Duration::from_secs(20), || node.store_is_up());
        let (session, degraded) = renew(&node, "before");
        assert_eq!((&session["alive"], degraded), (&json!(false), false));
        assert_eq!(reserve(&node, "after", 5)["granted"], "5");
    }
}

#[test]
fn limits_in_shadow_and_under_the_kill_switch_are_not_enforced() {
    let (node, _limits) = start(LIMITS, &[]);
    assert_eq!(reserve(&node, "a", 5)["shadow"], false);
    assert_eq!(reserve(&node, "b", 5)["status"], "REJECTED");
    assert_eq!(http(node.http, "PUT", "/v1/kill-switch?for=1h", b"").status, 200);
    let answer = reserve(&node, "b", 5);
    assert_eq!((&answer["granted"], &answer["shadow"]), (&json!("5"), &json!(true)));
    assert_eq!(renew(&node, "b").0["alive"], true, "it is recorded");
    let template = [("template", "sandbox")];
    let shadowed = Scrape::of(node.http).sum("tollgate_hold_shadowed_decisions_total", &template);
    assert_eq!(shadowed, 1.0);
}

/// `tollgate hold` in the background.
fn hold(node: &Node, args: &[&str]) -> Child {
    start_command(command(), node, args)
}

/// The same, as `command` with further arguments.
fn start_command(mut command: Command, node: &Node, args: &[&str]) -> Child {
    command.args(["hold", "--addr", &node.grpc.to_string()]).args(args);
    for set in [Command::stdin, Command::stdout, Command::stderr] {
        set(&mut command, Stdio::piped());
    }
    command.spawn().unwrap()
}

/// What is left of the standard output of a command, after its first line.
fn after_first_line(child: &mut Child) -> BufReader<ChildStdout> {
    let mut stdout = BufReader::new(child.stdout.take().unwrap());
    stdout.read_line(&mut String::new()).unwrap();
    stdout
}

/// Closes the standard input of a command, and waits for its exit code and its output.
fn output(child: Child) -> (Option<i32>, String) {
    let output = child.wait_with_output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code(), text(&output.stdout) + &text(&output.stderr))
}

fn copies_held(node: &Node, resource: &str) -> String {
    let body = json!({ "resource": resource, "session": "look", "hold": "h", "domain": "look" });
    let answer = call(node, "reserve", &body);
    call(node, "end-session", &json!({ "resource": resource, "session": "look" }));
    let all: i64 = answer["allHeld"].as_str().unwrap().parse().unwrap();
    (all - 1).to_string()
}

#[test]
fn the_command_holds_while_its_command_runs() {
    let (node, limits) = start(LIMITS, &[]);
    let address = node.grpc.to_string();
    let run = |args: &[&str]| {
        let output = tollgate(&[&["hold", "--addr", &address][..], args].concat());
        (output.code, output.stdout + &output.stderr)
    };
    let (code, text) = run(&["job", "acme", "--", "sh", "-c", "echo done; exit 7"]);
    assert_eq!((code, &*text), (7, "done\n"));
    assert_eq!(run(&["job", "acme", "--", "sh", "-c", "kill -9 $$"]).0, 137);
    assert_eq!(run(&["job", "acme", "--", "no-such-command"]).0, 127);
    let (code, text) = run(&["job", "acme", "--copies", "2", "--", "true"]);
    assert_eq!(
        (code, &*text),
        (1, "tollgate: the limits never grant so many copies: acme holds 0 of 1\n")
    );
    let (code, text) = run(&["other", "acme", "--", "true"]);
    assert_eq!(code, 2);
    assert!(text.contains("no holds are configured for this resource"), "{text}");

    // One waits for the other. Another domain does not.
    let first =
        hold(&node, &["job", "acme", "--ttl", "6s", "--", "sh", "-c", "read _; echo first"]);
    eventually("a copy is held", Duration::from_secs(10), || copies_held(&node, "job") == "1");
    let began = Instant::now();
    let (code, text) = run(&["job", "acme", "--max-wait", "7s", "--", "true"]);
    assert_eq!(
        (code, &*text),
        (1, "tollgate: the copies are not free: acme holds 1 of 1\n"),
        "renewed beyond its ttl"
    );
    assert!(began.elapsed() >= Duration::from_secs(7));
    assert_eq!(run(&["job", "acme", "--max-wait", "0s", "--", "true"]).0, 1);
    assert_eq!(run(&["job", "globex", "--", "true"]).0, 0);
    let second = hold(&node, &["job", "acme", "--", "echo", "second"]);
    assert_eq!(output(first), (Some(0), "first\n".to_owned()));
    assert_eq!(output(second), (Some(0), "second\n".to_owned()));
    assert_eq!(copies_held(&node, "job"), "0", "released at once");
    drop(limits);
}

#[test]
fn the_command_ends_with_its_hold() {
    let (mut node, _limits) = start(LIMITS, &[]);
    let sleeper = ["job", "acme", "--ttl", "1s", "--", "sh", "-c", "echo $$; exec sleep 60"];
    let signal = |id: u32, name: &str| {
        let id = id.to_string();
        assert!(std::process::Command::new("kill").args([name, &id]).status().unwrap().success());
    };
    let is_held = || copies_held(&node, "job") == "1";
    // SIGTERM is for the command.
    let trap = "trap 'exit 3' TERM; echo ready; while :; do sleep 0.05; done";
    let mut told = hold(&node, &["job", "acme", "--", "sh", "-c", trap]);
    after_first_line(&mut told);
    assert!(is_held());
    signal(told.id(), "-TERM");
    assert_eq!(output(told).0, Some(3));
    assert!(!is_held());

    // SIGKILL can't be passed on: the command ends all the same, and the copy is free after the ttl.
    let mut killed = hold(&node, &sleeper);
    let mut stdout = after_first_line(&mut killed);
    signal(killed.id(), "-KILL");
    killed.wait().unwrap();
    // The command had the other end of this pipe.
    assert_eq!(stdout.read_to_string(&mut String::new()).unwrap(), 0);
    eventually("the copy is free", Duration::from_secs(10), || !is_held());

    // No node answers. A command that says that all went well does not hide it.
    let fine = "trap 'exit 0' TERM; echo ready; while :; do sleep 0.05; done";
    let mut unaware = hold(&node, &["job", "globex", "--ttl", "6s", "--", "sh", "-c", fine]);
    after_first_line(&mut unaware);
    let alone = hold(&node, &sleeper);
    eventually("a copy is held", Duration::from_secs(10), || copies_held(&node, "job") == "2");
    node.kill();
    assert_eq!(output(unaware).0, Some(1));
    let (code, text) = output(alone);
    assert_eq!(code, Some(143));
    assert!(
        text.ends_with("no node has renewed the session in time: the command gets SIGTERM\n"),
        "{text}"
    );
}

#[test]
fn an_interrupt_from_the_terminal_ends_the_command_and_releases_its_copies() {
    let (node, _limits) = start(LIMITS, &[]);
    let trap = "trap 'exit 4' INT; echo ready; while :; do sleep 0.05; done";
    for (script, code) in [(trap, 4), ("echo ready; exec sleep 60", 130)] {
        // A terminal sends it to all processes of the group. It is not ignored, as it may be in this process.
        let hold = command();
        let mut in_a_group = Command::new("env");
        in_a_group.arg("--default-signal=INT").arg(hold.get_program()).process_group(0);
        hold.get_envs().for_each(|(name, _)| {
            in_a_group.env_remove(name);
        });
        let mut child =
            start_command(in_a_group, &node, &["job", "acme", "--", "sh", "-c", script]);
        after_first_line(&mut child);
        assert_eq!(copies_held(&node, "job"), "1");
        let interrupt = |to: &str| {
            assert!(Command::new("kill").args(["-INT", "--", to]).status().unwrap().success());
        };
        // To `tollgate hold` alone it means nothing.
        interrupt(&child.id().to_string());
        assert_eq!(copies_held(&node, "job"), "1");
        assert_eq!(child.try_wait().unwrap(), None);
        interrupt(&format!("-{}", child.id()));
        assert_eq!(output(child).0, Some(code));
        assert_eq!(copies_held(&node, "job"), "0", "released at once");
    }
}

#[test]
fn the_command_survives_an_outage_of_the_store_but_not_the_loss_of_its_data() {
    let mut redis = Redis::start();
    let (node, _limits) = start(LIMITS, &["--store", &redis.url(), "--store-timeout", "2s"]);
    node.wait_for_store();
    let commands = ["job", "acme", "--ttl", "4s", "--", "sleep", "60"];
    let mut child = hold(&node, &commands);
    eventually("a copy is held", Duration::from_secs(10), || copies_held(&node, "job") == "1");
    redis.kill();
    eventually("the store is away", Duration::from_secs(20), || !node.store_is_up());
    // Twice its ttl.
    std::thread::sleep(Duration::from_secs(8));
    assert_eq!(child.try_wait().unwrap(), None, "it goes on");
    // A store without data has no session, but room for it.
    redis.start_again();
    eventually("the hold is recorded again", Duration::from_secs(20), || {
        node.store_is_up() && copies_held(&node, "job") == "1"
    });
    assert_eq!(child.try_wait().unwrap(), None);
    // A store that loses its data without an outage has ended the session.
    let _: () = redis::cmd("FLUSHALL").query(&mut redis.connection()).unwrap();
    let (code, text) = output(child);
    assert_eq!(code, Some(143), "{text}");
    assert!(text.contains("warning: the session is over: the command gets SIGTERM"), "{text}");
}
