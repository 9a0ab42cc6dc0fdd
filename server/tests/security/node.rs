//! The access file of a running node, its commands, and warnings about access.

use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt as _;
use std::process::Stdio;
use std::time::Duration;

use tempfile::TempDir;
use testkit::callers::{Callers, LIMITS, allow, http_with_token, scrape, token};
use testkit::command::{BackgroundCommand, command, run, tollgate};
use testkit::grpc::channel;
use testkit::{LimitsFile, Node, TEST_TIMEOUT, eventually};
use tonic::Code;

#[tokio::test]
async fn a_changed_file_counts_at_once_also_on_old_connections() {
    let (limits, callers) = (LimitsFile::new(LIMITS), Callers::new());
    let node = callers.node(&limits);
    let channel = channel(node.grpc).await;
    let shop = Some(&*callers.shop);
    assert_eq!(allow(&channel, shop, "shop").await.0, Code::Ok);
    let before = fs::read_to_string(callers.path()).unwrap();
    let metric = |name: &str| scrape(&node, &callers.admin).get(name, &[]).unwrap();
    let (taken, refused) = ("tollgate_access_loads_total", "tollgate_access_reload_failures_total");
    let current = "tollgate_access_last_reload_successful";
    assert_eq!(metric(current), 1.0);

    // The same token with other rights.
    callers.write(&before.replace("sh*", "bank"));
    eventually("the change is taken", TEST_TIMEOUT, || metric(taken) == 2.0);
    assert_eq!(allow(&channel, shop, "shop").await.0, Code::PermissionDenied);
    assert_eq!(allow(&channel, shop, "bank").await.0, Code::Ok);

    // An invalid file changes nothing, not even on SIGHUP.
    callers.write("callers: nonsense");
    eventually("the fault is counted", TEST_TIMEOUT, || metric(refused) == 1.0);
    node.signal("HUP");
    eventually("it is counted again", TEST_TIMEOUT, || metric(refused) == 2.0);
    assert_eq!(metric(current), 0.0);
    assert_eq!(allow(&channel, shop, "bank").await.0, Code::Ok);

    // The token is removed.
    let without: String = before
        .lines()
        .filter(|line| !line.contains("name: shop"))
        .map(|line| format!("{line}\n"))
        .collect();
    callers.write(&without);
    eventually("the change is taken", TEST_TIMEOUT, || metric(taken) == 3.0);
    assert_eq!(metric(current), 1.0);
    assert_eq!(allow(&channel, shop, "bank").await.0, Code::Unauthenticated);

    // Rights for anyone: requests without a token get them, those with a wrong token do not.
    let anyone = "  - { name: rest, anyone: true, namespaces: [shop] }\n";
    callers.write(&(without + anyone));
    eventually("the change is taken", TEST_TIMEOUT, || metric(taken) == 4.0);
    assert_eq!(allow(&channel, None, "shop").await.0, Code::Ok);
    assert_eq!(allow(&channel, None, "bank").await.0, Code::PermissionDenied);
    assert_eq!(allow(&channel, shop, "shop").await.0, Code::Unauthenticated);
}

/// More callers on one connection than the node caches.
#[tokio::test]
async fn callers_behind_one_connection_are_told_apart() {
    let (limits, dir) = (LimitsFile::new(LIMITS), TempDir::new().unwrap());
    let path = dir.path().join("access.yaml");
    let tokens: Vec<(String, String)> = (0..12).map(|_| token()).collect();
    let caller = |(number, (_, hash)): (usize, &(String, String))| {
        format!("  - {{ name: c{number}, token_sha256: [{hash}], namespaces: [n{number}] }}\n")
    };
    let all: String = tokens.iter().enumerate().map(caller).collect();
    fs::write(&path, format!("callers:\n{all}")).unwrap();
    let node = Node::start(&limits.path(), &["--access", path.to_str().unwrap()]);
    let channel = channel(node.grpc).await;
    for round in 0..3 {
        for (number, (token, _)) in tokens.iter().enumerate() {
            let own = allow(&channel, Some(token), &format!("n{number}")).await.0;
            let next = allow(&channel, Some(token), &format!("n{}", (number + 1) % 12)).await.0;
            assert_eq!((own, next), (Code::Ok, Code::PermissionDenied), "{round} {number}");
        }
    }
}

#[test]
fn the_sample_is_valid() {
    let path = testkit::in_repository("config/access.yaml");
    let done = tollgate(&["check", "--access", path.to_str().unwrap()]);
    let expected = r#"checkout: ask
    namespaces  ["Pinky_*"]
    resources   ["db.*"]
    known by    2 tokens
batch: ask
    namespaces  none
    resources   ["db.*"]
    known by    certificates ["uri:spiffe://example.org/batch", "dns:*.batch.example.org"]
south: ask
    namespaces  none
    resources   ["db.*"]
    client ids  "south"
    lends       to clusters of at most 10000 clients
    known by    1 token
prometheus: observe
    namespaces  ["*"]
    resources   ["*"]
    known by    1 token
operators: administer
    everything
    known by    certificates ["cn:operator"]
"#;
    assert_eq!((done.code, done.stdout.as_str(), done.stderr.as_str()), (0, expected, ""));
}

#[test]
fn a_bad_file_prevents_the_start() {
    let (limits, callers) = (LimitsFile::new(LIMITS), Callers::new());
    let path = callers.path();
    let path = path.to_str().unwrap();
    let good = tollgate(&["check", "--access", path]);
    assert_eq!((good.code, good.stderr.as_str()), (0, ""));
    assert!(good.stdout.starts_with("shop: ask\n    namespaces  [\"sh*\"]\n"), "{}", good.stdout);
    let admin = "\nadmin: administer\n    everything\n    known by    1 token\n";
    assert!(good.stdout.contains(admin), "{}", good.stdout);

    callers.write("callers:\n  - { name: x, token_sha256: [hunter2], namespaces: ['*'] }\n");
    let bad = tollgate(&["check", "--access", path]);
    assert_eq!(bad.code, 1);
    assert!(bad.stdout.starts_with("line 2: callers[0].token_sha256[0]: must be the SHA-256"));
    let limits = limits.path();
    let start = ["serve", "--grpc-listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0"];
    let args = [&start[..], &["--limits", limits.to_str().unwrap(), "--access", path]].concat();
    let node = tollgate(&args);
    assert_eq!(node.code, 2, "{node:?}");
    assert!(node.stderr.contains("tollgate: --access: ") && node.stderr.contains("line 2: "));
    assert!(!format!("{node:?}{bad:?}").contains("hunter2"));
}

#[test]
fn a_token_and_its_hash_belong_together() {
    let (secret, sha256) = token();
    let mut child = command()
        .args(["token", "--hash"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(format!("{secret}\n").as_bytes()).unwrap();
    let said = child.wait_with_output().unwrap();
    assert_eq!(String::from_utf8(said.stdout).unwrap(), format!("{sha256}\n"));
    let none = run(command().args(["token", "--hash"]));
    assert_eq!((none.code, none.stdout.as_str()), (2, ""), "{none:?}");
}

#[test]
fn commands_send_a_token() {
    let (limits, callers) = (LimitsFile::new(LIMITS), Callers::new());
    let node = callers.node(&limits);
    let file = callers.dir.path().join("token");
    fs::write(&file, format!("{}\n", callers.admin)).unwrap();
    let file = file.to_str().unwrap();
    let (grpc, http) = (node.grpc.to_string(), node.http.to_string());
    for args in [
        &["allow", "shop", "b", "--addr", &grpc][..],
        &["capacity", "get", "c", "db.users", "1", "--addr", &grpc],
        &["capacity", "show", "--http", &http],
    ] {
        let without = tollgate(args);
        assert_eq!(without.code, 2, "{without:?}");
        assert!(without.stderr.contains("the credentials are missing or unknown"), "{without:?}");
        let done = tollgate(&[args, &["--token-file", file]].concat());
        assert_eq!(done.code, 0, "{done:?}");
    }
    // Readiness needs no token.
    assert_eq!(tollgate(&["health", "--http", &http]).code, 0);
    let gone = tollgate(&["allow", "shop", "b", "--addr", &grpc, "--token-file", "/no/such"]);
    assert_eq!(gone.code, 2);
    assert!(gone.stderr.contains("can't read /no/such"), "{gone:?}");
}

/// Log lines of a node on these addresses about being open.
fn warnings(grpc: &str, http: &str, more: &[&str]) -> Vec<String> {
    lines("the node is open to the network", grpc, http, more)
}

/// Log lines with this text of a node on these addresses.
fn lines(text: &str, grpc: &str, http: &str, more: &[&str]) -> Vec<String> {
    let limits = LimitsFile::new(LIMITS);
    let node = BackgroundCommand::start(
        command()
            .args(["serve", "--grpc-listen", grpc, "--http-listen", http, "--limits"])
            .arg(limits.path())
            .args(more),
    );
    node.wait_for_output("serving");
    let said = node.stop();
    said.lines().filter(|line| line.contains(text)).map(ToOwned::to_owned).collect()
}

#[test]
fn an_open_node_warns_once() {
    let callers = Callers::new();
    let path = callers.path();
    let access = ["--access", path.to_str().unwrap()];
    let (here, everywhere) = ("127.0.0.1:0", "0.0.0.0:0");
    assert!(warnings(here, here, &[]).is_empty());
    assert!(warnings(here, "[::1]:0", &[]).is_empty());
    for (grpc, http) in [(everywhere, everywhere), (everywhere, here), (here, everywhere)] {
        let said = warnings(grpc, http, &[]);
        assert_eq!(said.len(), 1, "{said:?}");
        assert!(said[0].contains("WARN") && said[0].contains("docs/security.md"), "{said:?}");
        assert!(said[0].contains("--access") && said[0].contains("--tls-cert-file"), "{said:?}");
    }
    let said = warnings(everywhere, everywhere, &access);
    assert_eq!(said.len(), 1);
    assert!(!said[0].contains("--access") && said[0].contains("--tls-cert-file"), "{said:?}");
}

#[test]
fn a_token_in_clear_text_is_warned_of_once() {
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("token");
    fs::write(&file, "tollgate_x\n").unwrap();
    let file = file.to_str().unwrap();
    let said = |parents: &[&str], more: &[&str]| {
        let parents = parents.iter().flat_map(|parent| ["--parent", parent]);
        let args: Vec<&str> = parents.chain(["--cluster-id", "x"]).chain(more.to_vec()).collect();
        lines("sent unencrypted", "127.0.0.1:0", "127.0.0.1:0", &args)
    };
    // Addresses reserved for documentation.
    let (one, other) = ("192.0.2.1:1", "192.0.2.2:1");
    let token = ["--parent-token-file", file];
    let warned = said(&[one, other], &token);
    assert_eq!(warned.len(), 1, "{warned:?}");
    assert!(warned[0].contains("WARN") && warned[0].contains("--parent-ca-file"), "{warned:?}");
    assert!(said(&[one], &[]).is_empty() && said(&["localhost:1"], &token).is_empty());
    for (args, count) in [
        (&["allow", "shop", "b", "--timeout", "10ms", "--token-file", file, "--addr", one][..], 1),
        (&["capacity", "show", "--timeout", "10ms", "--token-file", file, "--http", one], 1),
        (&["allow", "shop", "b", "--timeout", "10ms", "--addr", one], 0),
        (&["allow", "shop", "b", "--token-file", file, "--addr", "127.0.0.1:1"], 0),
    ] {
        let done = tollgate(args);
        assert_eq!(done.stderr.matches("unencrypted").count(), count, "{args:?} {done:?}");
    }
}

#[test]
fn a_private_key_that_others_may_read_is_warned_of() {
    let dir = TempDir::new().unwrap();
    let own = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
    let (cert, key) = (dir.path().join("cert"), dir.path().join("key"));
    fs::write(&cert, own.cert.pem()).unwrap();
    fs::write(&key, own.signing_key.serialize_pem()).unwrap();
    let [cert, key_file] = [&cert, &key].map(|path| path.to_str().unwrap());
    for (mode, count) in [(0o644, 2), (0o604, 2), (0o640, 0), (0o600, 0)] {
        fs::set_permissions(&key, fs::Permissions::from_mode(mode)).unwrap();
        let args = [
            ["--tls-cert-file", cert, "--tls-key-file", key_file],
            ["--parent", "127.0.0.1:1", "--cluster-id", "x"],
            ["--parent-ca-file", cert, "--parent-cert-file", cert],
            ["--parent-key-file", key_file, "--log-level", "info"],
        ];
        let loopback = "127.0.0.1:0";
        let said = lines("may read a private key", loopback, loopback, args.as_flattened());
        assert_eq!(said.len(), count, "{mode:o} {said:?}");
        let flags = ["--tls-key-file", "--parent-key-file"];
        assert!(said.iter().zip(flags).all(|(line, flag)| line.contains(flag)), "{said:?}");
    }
}

#[test]
fn refusals_are_logged_once_a_second_without_input() {
    let (limits, callers) = (LimitsFile::new(LIMITS), Callers::new());
    let node = callers.node(&limits);
    let body = r#"{"namespace":"bank\u001b[31m","bucketName":"b"}"#;
    for _ in 0..50 {
        http_with_token(&node, Some("tollgate_hunter2"), "POST", "/v1/allow", body);
        http_with_token(&node, Some(&callers.shop), "POST", "/v1/allow", body);
    }
    let mut events = Vec::new();
    eventually("it is said", Duration::from_secs(5), || {
        events.extend(node.logged());
        let refused = |event: &&serde_json::Value| {
            event["message"].as_str().unwrap_or_default().starts_with("a request was refused")
        };
        (1..10).contains(&events.iter().filter(refused).count())
    });
    let all = format!("{events:?}");
    assert!(!all.contains("hunter2") && !all.contains("bank") && !all.contains("31m"), "{all}");
}
