//! Settings of `tollgate serve`: invalid values, environment variables, and that the store's
//! password is never shown.

use std::ffi::OsStr;
use std::net::TcpListener;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::process::Command;

use testkit::command::{BackgroundCommand, command, run, tollgate_with};
use testkit::{DEAD_PORT, LimitsFile, Redis, TEST_TIMEOUT, eventually};

const SECRET: &str = "hunter2";

fn limits() -> LimitsFile {
    LimitsFile::new("global_default_bucket: {}")
}

/// `tollgate serve` on free ports, with valid limits.
fn serve(limits: &LimitsFile) -> Command {
    let mut command = command();
    command
        .args(["serve", "--grpc-listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0"])
        .arg("--limits")
        .arg(limits.path());
    command
}

#[test]
fn bad_settings_are_named() {
    let limits = limits();
    for (flag, value, why) in [
        ("--store", "mysql://h", "unknown kind of store"),
        ("--store", "", "not a URL"),
        ("--store", "h:6379", "unknown kind of store"),
        ("--store", "redis://", "names no host"),
        ("--store", "redis://h:x", "invalid port number"),
        ("--store", "redis://h/x", "number of a database"),
        ("--store", "redis+unix:x", "names no socket"),
        ("--store", "memory:x", "takes nothing after the colon"),
        ("--store", "redis-cluster://a:1,b:2/1", "database 0 only"),
        ("--store", "redis-cluster://a:1,,b:2", "names no host"),
        ("--store", "rediss-cluster://a:1,b:x", "invalid port number"),
        ("--store", "redis-sentinel://a:1,b:2", "names no master"),
        ("--store", "redis-sentinel://a:1,b:2/main/x", "number of a database"),
        ("--store", "rediss-sentinel://a/main?x=y", "an unknown option"),
        ("--store-timeout", "50", "like 50ms, 2s or 1m"),
        ("--store-timeout", "soon", "like 50ms, 2s or 1m"),
        ("--store-timeout", "0s", "must be from 1ms to 60s"),
        ("--store-timeout", "999us", "must be from 1ms to 60s"),
        ("--store-timeout", "60s 1ns", "must be from 1ms to 60s"),
        ("--store-timeout", "500000000years", "must be from 1ms to 60s"),
        ("--store-timeout", "-1s", ""),
        ("--drain-delay", "x", "like 50ms, 2s or 1m"),
        ("--drain-delay", "25h", "must be one day at most"),
        ("--drain-timeout", "", "like 50ms, 2s or 1m"),
        ("--max-in-flight", "0", "zero"),
        ("--max-connections", "0", "zero"),
        ("--max-buffered-bytes", "4194303", "must be at least 4194304 (4 MiB)"),
        ("--max-buffered-bytes", "128MB", "invalid digit"),
        ("--keepalive", "99ms", "must be from 100ms to one day"),
        ("--keepalive-timeout", "25h", "must be from 100ms to one day"),
        ("--http-idle", "0s", "must be from 100ms to one day"),
        ("--max-connection-age", "99ms", "must be from 100ms to 30 days, or 0"),
        ("--drain-timeout", "1day 1ns", "must be one day at most"),
        ("--threads", "0", "zero"),
        ("--threads", "many", "invalid digit"),
        ("--log-format", "xml", "possible values: text, json"),
        ("--log-level", "verbose", "\"verbose\" is no level"),
        ("--log-level", "info,tollgate_server", "\"tollgate_server\" is no level"),
        ("--log-level", "tollgate_server=loud", ""),
    ] {
        let done = run(serve(&limits).arg(format!("{flag}={value}")));
        assert_eq!((done.code, done.stdout.as_str()), (2, ""), "{flag}={value}: {}", done.stderr);
        assert!(done.stderr.contains(flag), "{flag}={value}: {}", done.stderr);
        assert!(done.stderr.contains(why), "{flag}={value}: {}", done.stderr);
    }
    // The limits of valid values; the start fails because of the store.
    for arg in
        ["--store-timeout=1ms", "--store-timeout=60s", "--drain-delay=1day", "--drain-timeout=24h"]
    {
        let done = run(serve(&limits).args([arg, "--store=mysql:"]));
        assert!(done.stderr.contains("--store: unknown kind of store"), "{arg}: {done:?}");
    }
    for (flag, value) in [
        ("--grpc-listen", "nowhere"),
        ("--grpc-listen", "localhost:1"),
        ("--http-listen", "127.0.0.1:65536"),
        ("--http-listen", "10991"),
    ] {
        let done = run(command().args(["serve", "--limits=x", flag, value]));
        assert_eq!(done.code, 2);
        assert!(done.stderr.contains(&format!("invalid value '{value}' for '{flag} ")), "{done:?}");
    }
    let done = run(command().arg("serve"));
    assert_eq!(done.code, 2);
    assert!(done.stderr.contains("--limits <FILE>"), "{done:?}");
}

#[test]
fn limits_that_can_not_be_used_stop_the_start() {
    let limits = limits();
    let path = limits.path();
    limits.write("global_default_bucket: { size: none }");
    let done = run(&mut serve(&limits));
    assert_eq!(done.code, 2);
    let expected = format!(
        "tollgate: --limits: {}:\nline 1: global_default_bucket.size: must be a whole number",
        path.display()
    );
    assert!(done.stderr.starts_with(&expected), "{}", done.stderr);
    std::fs::remove_file(&path).unwrap();
    let done = run(&mut serve(&limits));
    let expected = format!(
        "tollgate: --limits: can't read {}: No such file or directory (os error 2)\n",
        path.display()
    );
    assert_eq!((done.code, done.stderr), (2, expected));
}

#[test]
fn a_port_in_use_is_named() {
    let limits = limits();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    for (flag, other) in [("--grpc-listen", "--http-listen"), ("--http-listen", "--grpc-listen")] {
        let mut command = command();
        command.args(["serve", flag, &address, other, "127.0.0.1:0", "--limits"]);
        let done = run(command.arg(limits.path()));
        let expected = format!(
            "tollgate: {flag} {address}: can't listen there: Address already in use (os error 98)\n"
        );
        assert_eq!((done.code, done.stderr), (2, expected));
    }
}

#[test]
fn wrong_store_urls_never_show_their_password() {
    let limits = limits();
    for url in [
        "redis://user:hunter2@",
        "redis://user:hunter2@h:99999",
        "redis://user:hunter2@h:x",
        "redis://user:hunter2@h/db",
        "redis://user:hunter2@h/0?protocol=hunter2",
        "redis://user:hunter2@[::1",
        "redis://user:hunter2%ff@h",
        "redis://user:hunter2/x@h",
        "redis://user:1/hunter2@h",
        "redis://user:hunter2@h h",
        "rediss://user:hunter2@h/#hunter2",
        "redis+unix://user:hunter2@/run/redis.sock",
        "redis+unix:hunter2",
        "redis+unix:///run/redis.sock?pass=hunter2&db=hunter2",
        "redis-cluster://user:hunter2@a:1,b:2/1",
        "redis-cluster://user:hunter2/x@a:1,b:2",
        "redis-cluster://user:x@hunter2@a:1,b:x",
        "redis-cluster://user:hunter2#x@a:1",
        "redis-sentinel://user:hunter2@a:1,b:2",
        "redis-sentinel://user:1/hunter2@a:1/main",
        "redis-sentinel://a/main?hunter2",
        "memory://user:hunter2@h",
        "mysql://user:hunter2@h",
        "//user:hunter2@h",
        "user:hunter2@h",
        "hunter2",
        " redis://user:hunter2@h",
    ] {
        for by_flag in [true, false] {
            let mut command = serve(&limits);
            command.args(["--log-level", "trace"]);
            let done = if by_flag {
                run(command.arg(format!("--store={url}")))
            } else {
                run(command.env("TOLLGATE_STORE", url))
            };
            assert_eq!(done.code, 2, "{url}: {done:?}");
            assert!(done.stderr.contains("tollgate: --store: "), "{url}: {}", done.stderr);
            let shown = done.stdout + &done.stderr;
            assert!(!shown.contains(SECRET), "{url}: {shown}");
        }
    }
    // Not valid UTF-8.
    let garbled = OsStr::from_bytes(b"redis://user:hunter2\xff@h");
    let done = run(serve(&limits).env("TOLLGATE_STORE", garbled));
    assert_eq!(done.code, 2);
    assert!(!done.stderr.contains(SECRET), "{}", done.stderr);
    // Help and other mistakes, with the password in the environment.
    let variables = [("TOLLGATE_STORE", "redis://user:hunter2@h")];
    for args in [&["serve", "--help"][..], &["serve", "-h"], &["serve", "--nonsense"], &["serve"]] {
        let done = tollgate_with(args, &variables);
        let shown = done.stdout + &done.stderr;
        assert!(!shown.is_empty() && !shown.contains(SECRET), "{args:?}: {shown}");
    }
}

#[test]
fn a_running_node_never_shows_the_password() {
    let limits = limits();
    let redis = Redis::start();
    let _: () = redis::cmd("CONFIG")
        .arg(&["SET", "requirepass", SECRET])
        .query(&mut redis.connection())
        .unwrap();
    let host = redis.url().replace("redis://", "");
    let nobody = DEAD_PORT;
    for (url, shown, until) in [
        (
            format!("redis://:hunter2@{host}/0"),
            format!("redis://:***@{host}/0"),
            "the store answers",
        ),
        (
            format!("redis://default:hunter2@{host}"),
            format!("redis://default:***@{host}"),
            "the store answers",
        ),
        (
            format!("redis://user:hunter2wrong@{host}"),
            format!("redis://user:***@{host}"),
            "no answer from the store",
        ),
        (format!("redis://hunter2@{host}"), format!("redis://***@{host}"), "no answer"),
        (
            format!("redis://u:hunter2@127.0.0.1:{nobody}?hunter2#hunter2"),
            format!("redis://u:***@127.0.0.1:{nobody}?***"),
            "no answer from the store",
        ),
        (
            "redis+unix:///nowhere.sock?user=u&pass=hunter2".to_owned(),
            "redis+unix:///nowhere.sock?***".to_owned(),
            "no answer from the store",
        ),
    ] {
        for level in ["debug", "trace"] {
            let node = BackgroundCommand::start(
                serve(&limits).env("TOLLGATE_STORE", &url).env("TOLLGATE_LOG_LEVEL", level),
            );
            node.wait_for_output(until);
            let said = node.stop();
            assert!(said.contains(&format!("starting store={shown} ")), "{url}: {said}");
            assert!(!said.contains(SECRET), "{url}: {said}");
        }
    }
}

#[test]
fn help_shows_what_the_environment_says() {
    let variables = [
        ("--limits", "TOLLGATE_LIMITS", "from-env.yaml"),
        ("--grpc-listen", "TOLLGATE_GRPC_LISTEN", "127.0.0.2:1"),
        ("--http-listen", "TOLLGATE_HTTP_LISTEN", "127.0.0.2:2"),
        ("--advertise", "TOLLGATE_ADVERTISE", "lb.example:443"),
        ("--node-id", "TOLLGATE_NODE_ID", "node-from-env"),
        ("--expected-nodes", "TOLLGATE_EXPECTED_NODES", "5"),
        ("--store-timeout", "TOLLGATE_STORE_TIMEOUT", "77ms"),
        ("--threads", "TOLLGATE_THREADS", "3"),
        ("--drain-delay", "TOLLGATE_DRAIN_DELAY", "11s"),
        ("--drain-timeout", "TOLLGATE_DRAIN_TIMEOUT", "12s"),
        ("--max-in-flight", "TOLLGATE_MAX_IN_FLIGHT", "21"),
        ("--max-connections", "TOLLGATE_MAX_CONNECTIONS", "22"),
        ("--max-buffered-bytes", "TOLLGATE_MAX_BUFFERED_BYTES", "26000000"),
        ("--keepalive", "TOLLGATE_KEEPALIVE", "23s"),
        ("--keepalive-timeout", "TOLLGATE_KEEPALIVE_TIMEOUT", "24s"),
        ("--http-idle", "TOLLGATE_HTTP_IDLE", "25s"),
        ("--max-connection-age", "TOLLGATE_MAX_CONNECTION_AGE", "26m"),
        ("--log-format", "TOLLGATE_LOG_FORMAT", "json"),
        ("--log-level", "TOLLGATE_LOG_LEVEL", "debug"),
        ("--tls-cert-file", "TOLLGATE_TLS_CERT_FILE", "own.crt"),
        ("--tls-key-file", "TOLLGATE_TLS_KEY_FILE", "own.key"),
        ("--tls-client-ca-file", "TOLLGATE_TLS_CLIENT_CA_FILE", "clients.crt"),
        ("--access", "TOLLGATE_ACCESS", "access.yaml"),
        ("--store-user-file", "TOLLGATE_STORE_USER_FILE", "user"),
        ("--store-password-file", "TOLLGATE_STORE_PASSWORD_FILE", "password"),
        ("--store-ca-file", "TOLLGATE_STORE_CA_FILE", "redis.crt"),
        ("--store-cert-file", "TOLLGATE_STORE_CERT_FILE", "node.crt"),
        ("--store-key-file", "TOLLGATE_STORE_KEY_FILE", "node.key"),
        ("--parent-ca-file", "TOLLGATE_PARENT_CA_FILE", "parent.crt"),
        ("--parent-cert-file", "TOLLGATE_PARENT_CERT_FILE", "node.crt"),
        ("--parent-key-file", "TOLLGATE_PARENT_KEY_FILE", "node.key"),
        ("--parent-token-file", "TOLLGATE_PARENT_TOKEN_FILE", "token"),
    ];
    let set: Vec<_> = variables.iter().map(|(_, name, value)| (*name, *value)).collect();
    let help = tollgate_with(&["serve", "--help"], &set).stdout;
    for (flag, name, value) in variables {
        assert!(help.contains(&format!("{flag} <")), "{flag}: {help}");
        assert!(help.contains(&format!("[env: {name}={value}]")), "{name}: {help}");
    }
    assert!(help.contains("[env: TOLLGATE_STORE]"), "{help}");
}

/// A node with all settings from its environment.
fn from_environment(limits: PathBuf, store: &str) -> Command {
    let mut command = command();
    command.arg("serve").env("TOLLGATE_LIMITS", limits).env("TOLLGATE_STORE", store).envs([
        ("TOLLGATE_GRPC_LISTEN", "127.0.0.2:0"),
        ("TOLLGATE_HTTP_LISTEN", "127.0.0.3:0"),
        ("TOLLGATE_ADVERTISE", "lb.example:443"),
        ("TOLLGATE_NODE_ID", "node-from-env"),
        ("TOLLGATE_STORE_TIMEOUT", "60ms"),
        ("TOLLGATE_THREADS", "3"),
        ("TOLLGATE_DRAIN_DELAY", "300ms"),
        ("TOLLGATE_DRAIN_TIMEOUT", "9s"),
        ("TOLLGATE_LOG_FORMAT", "json"),
        ("TOLLGATE_LOG_LEVEL", "info"),
    ]);
    command
}

#[test]
fn the_environment_is_obeyed() {
    let redis = Redis::start();
    let limits = limits();
    let node = BackgroundCommand::start(&mut from_environment(limits.path(), &redis.url()));
    node.wait_for_output(r#""message":"serving""#);
    let serving = node.output();
    let serving = serving.lines().find(|line| line.contains(r#""message":"serving""#)).unwrap();
    let serving: serde_json::Value = serde_json::from_str(serving).unwrap();
    assert!(serving["grpc"].as_str().unwrap().starts_with("127.0.0.2:"), "{serving}");
    assert!(serving["http"].as_str().unwrap().starts_with("127.0.0.3:"), "{serving}");
    assert_eq!((&serving["threads"], &serving["advertise"]), (&3.into(), &"lb.example:443".into()));
    node.wait_for_output("the store answers");
    // Nodes register under their configured names.
    let mut connection = redis.connection();
    eventually("the name is in Redis", TEST_TIMEOUT, || {
        let keys: Vec<String> = redis::cmd("KEYS").arg("*").query(&mut connection).unwrap();
        keys.iter().any(|key| {
            let members = redis::cmd("ZRANGE").arg(&[key, "0", "-1"]).query(&mut connection);
            let named = |member: &String| member.starts_with("node-from-env ");
            members.is_ok_and(|members: Vec<String>| members.iter().any(named))
        })
    });
    let stopping = std::time::Instant::now();
    node.stop();
    assert!(stopping.elapsed().as_millis() >= 300, "the delay was {:?}", stopping.elapsed());

    // Flags have precedence. Values of variables are checked like those of flags.
    let mut stronger = from_environment(limits.path(), "redis-cluster://a:1");
    let node = BackgroundCommand::start(stronger.args(["--store=memory:", "--log-format=text"]));
    node.wait_for_output(" INFO ");
    node.wait_for_output("starting store=memory: ");
    node.wait_for_output("serving grpc=127.0.0.2:");
    node.stop();
    for (name, flag) in [
        ("TOLLGATE_GRPC_LISTEN", "--grpc-listen"),
        ("TOLLGATE_HTTP_LISTEN", "--http-listen"),
        ("TOLLGATE_STORE_TIMEOUT", "--store-timeout"),
        ("TOLLGATE_THREADS", "--threads"),
        ("TOLLGATE_DRAIN_DELAY", "--drain-delay"),
        ("TOLLGATE_DRAIN_TIMEOUT", "--drain-timeout"),
        ("TOLLGATE_LOG_FORMAT", "--log-format"),
        ("TOLLGATE_LOG_LEVEL", "--log-level"),
        ("TOLLGATE_STORE", "--store"),
        ("TOLLGATE_LIMITS", "--limits"),
    ] {
        let done = run(from_environment(limits.path(), "memory:").env(name, "nonsense"));
        assert_eq!(done.code, 2, "{name}: {done:?}");
        assert!(done.stderr.contains(flag), "{name}: {}", done.stderr);
    }
}

#[test]
fn the_log_level_filters_messages() {
    let limits = limits();
    let store = format!("redis://127.0.0.1:{DEAD_PORT}");
    let node =
        BackgroundCommand::start(serve(&limits).args(["--log-level", "warn", "--store", &store]));
    node.wait_for_output("no answer from the store");
    node.wait_for_output("advice=\"see that Redis runs, and that --store names it\"");
    let said = node.stop();
    assert!(!said.contains(" INFO "), "{said}");
    for filter in ["", "off", "ERROR", "info,tollgate_server=debug", "warn,h2=info"] {
        let done = run(serve(&limits).args(["--log-level", filter, "--store", "mysql:"]));
        assert!(done.stderr.contains("--store: "), "{filter}: {}", done.stderr);
    }
}
