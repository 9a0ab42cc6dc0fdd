//! The `tollgate` command: texts, exit codes, environment variables. `settings` tests `serve`.

use std::fs;

use tempfile::TempDir;
use testkit::command::{CommandOutput, tollgate, tollgate_with};
use testkit::{DEAD_PORT, LimitsFile, Node};

/// Asserts exit code and output.
#[track_caller]
fn assert_output(done: &CommandOutput, code: i32, stdout: &str, stderr: &str) {
    assert_eq!((done.code, done.stdout.as_str(), done.stderr.as_str()), (code, stdout, stderr));
}

#[test]
fn version_and_help() {
    let version = format!("tollgate {}\n", env!("CARGO_PKG_VERSION"));
    assert_output(&tollgate(&["--version"]), 0, &version, "");

    let help = tollgate(&["--help"]);
    assert_eq!((help.code, help.stderr.as_str()), (0, ""));
    for example in [
        "tollgate serve --limits config/limits.yaml",
        "tollgate serve --limits limits.yaml --store redis://redis:6379",
        "tollgate check limits.yaml",
        "tollgate allow Pinky_TheBrain UserService_getUser --tokens 5",
    ] {
        assert!(help.stdout.contains(&format!("\n  {example}\n")), "{example}: {}", help.stdout);
    }
    for (command, options) in [
        (
            "serve",
            &["--limits", "--envoy-limits", "--store", "--grpc-listen", "--drain-timeout"][..],
        ),
        ("check", &["[FILE]", "--access", "--envoy-limits"]),
        ("token", &["--hash"]),
        (
            "allow",
            &[
                "<NAMESPACE>",
                "<BUCKET>",
                "--tokens",
                "--max-wait",
                "--not-critical",
                "--settle",
                "--addr",
                "--ca-file",
                "--json",
            ],
        ),
        ("settle", &["<PERMIT>", "<ACTUAL>", "--addr", "--json"]),
        ("status", &["--http", "--output", "--token-file"]),
        ("health", &["--http", "--token-file"]),
        ("completions", &["<SHELL>"]),
    ] {
        assert!(help.stdout.contains(&format!("\n  {command} ")), "{command}: {}", help.stdout);
        let done = tollgate(&[command, "--help"]);
        assert_eq!((done.code, done.stderr.as_str()), (0, ""), "{command}");
        for option in options {
            assert!(done.stdout.contains(option), "{command} {option}: {}", done.stdout);
        }
    }

    // Without a command, and with unknown arguments.
    for args in [&[][..], &["nonsense"], &["serve", "--nonsense"], &["completions", "tcsh"]] {
        let done = tollgate(args);
        assert_eq!((done.code, done.stdout.as_str()), (2, ""), "{args:?}");
        assert!(done.stderr.contains("Usage: tollgate") || done.stderr.contains("--help"));
    }
}

#[test]
fn completions_for_shells() {
    for (shell, word) in [
        ("bash", "complete -F _tollgate"),
        ("zsh", "#compdef tollgate"),
        ("fish", "complete -c tollgate"),
    ] {
        let done = tollgate(&["completions", shell]);
        assert_eq!((done.code, done.stderr.as_str()), (0, ""), "{shell}");
        assert!(done.stdout.contains(word), "{shell}: {}", done.stdout);
        for command in ["serve", "check", "allow", "health", "completions"] {
            assert!(done.stdout.contains(command), "{shell} {command}");
        }
    }
}

#[test]
fn check_prints_the_limits_or_the_faults() {
    let limits = LimitsFile::new("namespaces: { ns: { buckets: { b: { fill_rate: 90/m } } } }");
    let path = limits.path();
    let check = || tollgate(&["check", path.to_str().unwrap()]);
    let understood = "on_store_failure: local
namespaces:
  ns:
    on_store_failure: local
    buckets:
      b:
        size: 100
        fill_rate: 1.5
        wait_timeout_millis: 1000
        max_idle_millis: -1
        max_debt_millis: 10000
        max_tokens_per_request: 1
";
    assert_output(&check(), 0, understood, "");
    // The output is a limits file with the same meaning.
    limits.write(understood);
    assert_output(&check(), 0, understood, "");

    limits.write("namespaces:\n  ns:\n    buckets:\n      b: { size: 0 }\n      c: { siez: 1 }\n");
    let done = check();
    assert_eq!((done.code, done.stderr.as_str()), (1, ""));
    let lines: Vec<_> = done.stdout.lines().collect();
    assert_eq!(lines.len(), 2, "{lines:#?}");
    assert!(lines[0].starts_with("line 4: namespaces.ns.buckets.b.size: "), "{lines:#?}");
    assert!(lines[1].starts_with("line 5: namespaces.ns.buckets.c.siez: "), "{lines:#?}");
    assert!(lines[1].contains("size"), "{lines:#?}");
}

#[test]
fn check_of_unreadable_files() {
    let dir = TempDir::new().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    fs::write(path("latin1.yaml"), b"namespaces: { caf\xe9: {} }").unwrap();
    for (name, reason) in [
        ("missing.yaml", "No such file or directory (os error 2)"),
        ("", "Is a directory (os error 21)"),
        ("latin1.yaml", "stream did not contain valid UTF-8"),
    ] {
        let path = path(name);
        assert_output(
            &tollgate(&["check", &path]),
            2,
            "",
            &format!("tollgate: can't read {path}: {reason}\n"),
        );
    }
    let done = tollgate(&["check"]);
    assert_eq!((done.code, done.stdout.as_str()), (2, ""));
}

#[test]
fn allow_prints_the_decision() {
    let limits = LimitsFile::new(
        "namespaces:
  ns:
    buckets:
      b: { size: 100, fill_rate: 100, max_tokens_per_request: 50 }
      slow: { size: 1, fill_rate: 1/h, wait_timeout_millis: 7200000, max_debt_millis: 36000000 }
      tiny: { size: 1, fill_rate: 1, max_debt_millis: 0, max_tokens_per_request: -1 }
      kept: { size: 1, fill_rate: 1, reserve: 100% }
      soft: { size: 10, fill_rate: 1/d, soft_limit_percent: 10, max_tokens_per_request: 10 }",
    );
    let node = Node::start(&limits.path(), &[]);
    let addr = node.grpc.to_string();
    let allow = |bucket: &str, args: &[&str]| {
        tollgate(&[&["allow", "ns", bucket, "--addr", &addr], args].concat())
    };
    assert_output(&allow("b", &[]), 0, "OK: 1 token, go now\nbucket     ns:b\navailable  99\n", "");
    // The available tokens grow between calls, so only the other lines are compared.
    let said = |done: &CommandOutput| done.stdout.lines().take(2).collect::<Vec<_>>().join("|");
    let done = allow("b", &["--tokens", "0"]);
    assert_eq!((done.code, said(&done).as_str()), (0, "OK: 1 token, go now|bucket     ns:b"));
    let done = allow("soft", &["--tokens", "7"]);
    assert_eq!(
        (done.code, done.stdout.as_str()),
        (0, "OK: 7 tokens, go now\nbucket     ns:soft\navailable  3\npast the soft limit\n")
    );
    // A wait of an hour: allowed, then over the limit.
    allow("slow", &[]);
    allow("slow", &[]);
    let done = allow("slow", &[]);
    assert_eq!(done.code, 0);
    let wait = done.stdout.strip_prefix("OK: 1 token, use after waiting ").unwrap();
    let wait: u64 = wait.split_once(" ms\n").unwrap().0.parse().unwrap();
    assert!((3_500_000..=3_600_000).contains(&wait), "{wait}");
    let done = allow("slow", &["--max-wait", "250ms"]);
    assert_eq!((done.code, done.stderr.as_str()), (1, ""));
    let retry = done.stdout.strip_prefix("REJECTED_TIMEOUT: try again in ").unwrap();
    let retry: u64 = retry.split_once(" ms\n").unwrap().0.parse().unwrap();
    assert!((7_100_000..=7_200_000).contains(&retry), "{retry}");

    let never = "REJECTED_TIMEOUT: this request can never be granted\n\
                 bucket     ns:tiny\navailable  1\n";
    assert_output(&allow("tiny", &["--tokens", "2"]), 1, never, "");
    let kept = never.replace("tiny", "kept");
    assert_output(&allow("kept", &["--not-critical"]), 1, &kept, "");
    assert_eq!(allow("kept", &[]).code, 0);
    let too_many = "REJECTED_TOO_MANY_TOKENS_REQUESTED\nbucket     ns:b\n";
    assert_output(&allow("b", &["--tokens", "51"]), 1, too_many, "");
    assert_output(&allow("other", &[]), 1, "REJECTED_NO_BUCKET\n", "");
    assert_output(&allow("b", &["--tokens", "-5"]), 1, "REJECTED_INVALID_REQUEST\n", "");
    assert_output(
        &allow("b", &["--tokens=-9223372036854775808"]),
        1,
        "REJECTED_INVALID_REQUEST\n",
        "",
    );
    assert_output(&allow("b b", &[]), 1, "REJECTED_INVALID_REQUEST\n", "");
    // An address with a scheme, from the environment.
    let url = format!("http://{addr}");
    let done = tollgate_with(&["allow", "ns", "other"], &[("TOLLGATE_ADDR", &url)]);
    assert_output(&done, 1, "REJECTED_NO_BUCKET\n", "");

    let done = allow("other", &["--json"]);
    let json = r#"{"status":"REJECTED_NO_BUCKET","tokensGranted":"0","waitMillis":"0","retryAfterMillis":"0","tokensAvailable":0.0,"bucket":"","softLimited":false,"degraded":false,"shadow":false,"permit":"","size":"0","fillRate":0.0,"banned":false}"#;
    assert_output(&done, 1, &format!("{json}\n"), "");
    let done = allow("soft", &["--tokens", "1", "--json"]);
    let answer: serde_json::Value = serde_json::from_str(&done.stdout).unwrap();
    assert_eq!((done.code, &answer["status"]), (0, &"OK".into()));
    assert_eq!((&answer["tokensGranted"], &answer["softLimited"]), (&"1".into(), &true.into()));
}

#[test]
fn allow_without_the_store_says_so() {
    let limits = LimitsFile::new("on_store_failure: deny\nglobal_default_bucket: {}");
    let store = format!("redis://127.0.0.1:{DEAD_PORT}");
    let node = Node::start(&limits.path(), &["--store", &store]);
    let expected = "REJECTED_SERVER_ERROR\nbucket     :global default bucket\n\
                    decided without the shared store\n";
    assert_output(
        &tollgate(&["allow", "a", "b", "--addr", &node.grpc.to_string()]),
        1,
        expected,
        "",
    );
    let http = node.http.to_string();
    let reason =
        "not ready: the store has never answered, and the limits say to refuse without it\n";
    assert_output(&tollgate(&["health", "--http", &http]), 1, reason, "");
}

#[test]
fn allow_that_gets_no_answer() {
    let nobody = format!("127.0.0.1:{DEAD_PORT}");
    let expected =
        format!("tollgate: no node answers at {nobody}: is `tollgate serve` running there?\n");
    assert_output(&tollgate(&["allow", "ns", "b", "--addr", &nobody]), 2, "", &expected);
    let done = tollgate(&["allow", "ns", "b", "--addr", "not an address"]);
    assert_eq!((done.code, done.stdout.as_str()), (2, ""));
    let expected = "\"not an address\" is not a valid address: write HOST:PORT";
    assert!(done.stderr.contains(expected), "{done:?}");
    let done = tollgate(&["allow", "ns", "b", "--addr", "https://localhost:1"]);
    let expected = "tollgate: https://localhost:1 needs TLS: name the CA certificates with \
                    --ca-file\n";
    assert_output(&done, 2, "", expected);
    // Someone who listens and says nothing.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let silent = listener.local_addr().unwrap().to_string();
    let done = tollgate(&["allow", "ns", "b", "--addr", &silent, "--timeout", "200ms"]);
    assert_eq!((done.code, done.stdout.as_str()), (2, ""));
    assert!(done.stderr.starts_with(&format!("tollgate: no decision from {silent}: ")));

    for args in [
        &["--tokens", "many"][..],
        &["--tokens", "9223372036854775808"],
        &["--tokens", "1.5"],
        &["--max-wait", "5"],
        &["--max-wait=-5ms"],
        &["--max-wait", "99999999999y"],
        &["--timeout", "soon"],
    ] {
        let done = tollgate(&[&["allow", "ns", "b", "--addr", &nobody], args].concat());
        assert_eq!((done.code, done.stdout.as_str()), (2, ""), "{args:?}");
        let flag = args[0].split('=').next().unwrap();
        assert!(done.stderr.contains(flag), "{args:?}: {}", done.stderr);
    }
    assert_eq!(tollgate(&["allow", "ns"]).code, 2);
}

#[test]
fn health() {
    let limits = LimitsFile::new("global_default_bucket: {}");
    let node = Node::start(&limits.path(), &[]);
    let http = node.http.to_string();
    assert_output(&tollgate(&["health", "--http", &http]), 0, "ready\n", "");
    // As in the container: a node on all interfaces is reached on loopback.
    let everywhere = format!("0.0.0.0:{}", node.http.port());
    assert_output(
        &tollgate_with(&["health"], &[("TOLLGATE_HTTP_LISTEN", &everywhere)]),
        0,
        "ready\n",
        "",
    );

    let nobody = format!("127.0.0.1:{DEAD_PORT}");
    let expected = format!("tollgate: {nobody}: Connection refused (os error 111)\n");
    assert_output(&tollgate(&["health", "--http", &nobody]), 2, "", &expected);
    assert_eq!(tollgate(&["health", "--http", "nowhere"]).code, 2);
}
