//! `tollgate capacity`: mostly against a fake node with scripted answers, such as learning mode, an
//! outage of the store, or errors.

mod fake;
mod real;
mod shell;

use std::io::{Read, Write};
use std::net::TcpListener;
use std::thread;

use fake::{Answer, Fake};
use testkit::command::{CommandOutput, tollgate, tollgate_with};
use testkit::{DEAD_PORT, now_s};
use tonic::Status;

/// Asserts exit code and output.
#[track_caller]
fn assert_output(done: &CommandOutput, code: i32, stdout: &str, stderr: &str) {
    assert_eq!((done.code, done.stdout.as_str(), done.stderr.as_str()), (code, stdout, stderr));
}

#[test]
fn help_and_wrong_arguments() {
    let help = tollgate(&["capacity", "--help"]);
    assert_eq!((help.code, help.stderr.as_str()), (0, ""));
    for text in [
        "tollgate capacity get app-1 db.users 100\n",
        "tollgate capacity release app-1 db.users\n",
        "tollgate capacity show db.users\n",
        "tollgate capacity shell\n",
        "Exit codes: ",
    ] {
        assert!(help.stdout.contains(text), "{text}: {}", help.stdout);
    }
    for (subcommand, options) in [
        ("get", &["<CLIENT>", "<RESOURCE>", "<WANTS>", "--priority", "--has", "--expires"][..]),
        ("release", &["<CLIENT>", "<RESOURCE>...", "--addr", "--timeout", "--json"]),
        ("show", &["[RESOURCE]", "--http", "--timeout", "--json"]),
        ("shell", &["--addr", "--follow", "wait SECONDS"]),
    ] {
        let help = tollgate(&["capacity", subcommand, "--help"]);
        assert_eq!((help.code, help.stderr.as_str()), (0, ""), "{subcommand}");
        for option in options {
            assert!(help.stdout.contains(option), "{subcommand} {option}: {}", help.stdout);
        }
    }
    for (args, word) in [
        (&[][..], "Usage: tollgate capacity"),
        (&["get", "a", "b"], "<WANTS>"),
        (&["get", "a", "b", "many"], "<WANTS>"),
        (&["get", "a", "b", "1", "--has", "1"], "--expires"),
        (&["get", "a", "b", "1", "--expires", "1"], "--has"),
        (&["get", "a", "b", "1", "--has", "1", "--expires", "soon"], "--expires"),
        (&["get", "a", "b", "1", "--priority", "1.5"], "--priority"),
        (&["release", "a"], "<RESOURCE>"),
        (&["show", "--http", "nowhere"], "--http"),
        (&["show", "a", "b"], "'b'"),
        (&["shell", "--timeout", "5"], "--timeout"),
    ] {
        let done = tollgate(&[&["capacity"], args].concat());
        assert_eq!((done.code, done.stdout.as_str()), (2, ""), "{args:?}");
        assert!(done.stderr.contains(word), "{args:?}: {}", done.stderr);
    }
}

/// Standard output with placeholders for times.
fn timeless(done: &CommandOutput) -> String {
    let mut text = String::new();
    for line in done.stdout.lines() {
        let line = match line.split_once(" UTC, in ") {
            Some((start, end)) => {
                let (time, end) = end.split_once(" s").unwrap();
                let time: u32 = time.parse().unwrap();
                let start = &start[..start.len() - "00:00:00".len()];
                // A second may begin while the command runs.
                assert!((50..=60).contains(&time) || (290..=300).contains(&time), "{line}");
                format!("{start}T, in {} s{end}", if time <= 60 { 60 } else { 300 })
            }
            None => line.to_owned(),
        };
        let line = match line.split_once("--expires ") {
            Some((start, at)) => {
                assert!((now_s() + 290..=now_s() + 300).contains(&at.parse().unwrap()), "{at}");
                format!("{start}--expires E")
            }
            None => line,
        };
        text += &(line + "\n");
    }
    text
}

#[test]
fn get_explains_the_answer() {
    let node = Fake::start(Answer { safe: Some(12.5), ..Answer::of(60.0) });
    let done = node.capacity(&["get", "app-1", "db.users", "100"]);
    let expected = "LESS: gets 60 of the 100 that it wants
expires   T, in 300 s; the lease is gone then
refresh   every 5 s: ask again that often, adding --has 60 --expires E
safe      12.5 may be used without a lease while no node answers
others    `tollgate capacity show db.users` shows the holders
";
    assert_eq!((done.code, timeless(&done).as_str(), done.stderr.as_str()), (0, expected, ""));
    let done = node.capacity(&["get", "app-1", "db.users", "60"]);
    assert_eq!(done.code, 0);
    assert!(timeless(&done).starts_with("OK: gets all of the 60 that it wants\nexpires "));

    // The requests: first without a lease, then with the one of the answer.
    let expires = (now_s() + 100).to_string();
    node.capacity(&[
        "get",
        "a b\n",
        "db/x",
        "7.25",
        "--has",
        "60",
        "--expires",
        &expires,
        "--priority",
        "-3",
    ]);
    let script = node.service.script();
    let last = script.asked.last().unwrap();
    assert_eq!((last.client_id.as_str(), last.resource[0].resource_id.as_str()), ("a b\n", "db/x"));
    assert_eq!((last.resource[0].wants, last.resource[0].priority), (7.25, -3));
    let has = last.resource[0].has.unwrap();
    assert_eq!((has.capacity, has.expiry_time.to_string()), (60.0, expires));
    assert_eq!((script.asked[0].resource[0].has, script.asked[0].resource[0].priority), (None, 0));
}

#[test]
fn get_without_a_grant_explains_why() {
    let node = Fake::start(Answer { learning_until: Some(now_s() + 60), ..Answer::of(0.0) });
    let learning = "NOTHING: gets 0 of the 10 that it wants
refresh   ask again in 5 s
learning  until T, in 60 s: the store is new, or has lost
          its leases, and learns them from the clients; until then each gets
          what it says it has (--has, --expires), here 0; ask again after that
          for a share
";
    let done = node.capacity(&["get", "a", "r", "10"]);
    assert_eq!((done.code, timeless(&done).as_str()), (1, learning));
    assert_eq!(node.capacity(&["get", "a", "r", "0"]).code, 0);

    node.service.script().answer = Some(Answer { degraded: Some(true), ..Answer::of(4.0) });
    let done = node.capacity(&["get", "a", "r", "10"]);
    assert_eq!(done.code, 0);
    let text = timeless(&done);
    assert!(text.starts_with("LESS: gets 4 of the 10 that it wants\n"), "{text}");
    assert!(text.contains("\ndegraded  decided without the shared store, "), "{text}");

    node.service.script().answer = Some(Answer { lasts_s: 0, ..Answer::of(0.0) });
    let done = node.capacity(&["get", "a", "r", "10", "--json"]);
    let answer: serde_json::Value = serde_json::from_str(&done.stdout).unwrap();
    assert_eq!((done.code, &answer["response"][0]["resourceId"]), (1, &"r".into()));
    assert_eq!(answer["response"][0]["gets"]["capacity"], 0.0);
    assert_eq!(answer["response"][0]["gets"]["refreshInterval"], "5");
}

#[test]
fn release_gives_back() {
    let node = Fake::start(Answer::of(1.0));
    let done = node.capacity(&["release", "app-1", "db.users", "x\u{1b}[2J"]);
    assert_output(&done, 0, "OK: app-1 holds nothing of db.users, x\\u{1b}[2J now\n", "");
    assert_output(&node.capacity(&["release", "app-1", "db.users", "--json"]), 0, "{}\n", "");
    let script = node.service.script();
    assert_eq!(script.released[0].client_id, "app-1");
    assert_eq!(script.released[0].resource_id, ["db.users", "x\u{1b}[2J"]);
}

#[test]
fn failed_requests() {
    let node = Fake::start(Answer::of(1.0));
    let addr = node.address;
    node.service.script().error = Some(Status::invalid_argument("wants: is\u{7} negative"));
    let expected =
        format!("tollgate: no lease from {addr}: InvalidArgument: wants: is\\u{{7}} negative\n");
    assert_output(&node.capacity(&["get", "a", "r", "-5"]), 2, "", &expected);
    assert_eq!(node.service.script().asked[0].resource[0].wants, -5.0);
    let expected = expected.replace("lease", "release");
    assert_output(&node.capacity(&["release", "a", "r"]), 2, "", &expected);

    let nobody = format!("127.0.0.1:{DEAD_PORT}");
    let expected =
        format!("tollgate: no node answers at {nobody}: is `tollgate serve` running there?\n");
    for args in [&["get", "a", "r", "1"][..], &["release", "a", "r"], &["shell"]] {
        let url = format!("http://{nobody}");
        let args = [&["capacity"], args].concat();
        assert_output(&tollgate_with(&args, &[("TOLLGATE_ADDR", &url)]), 2, "", &expected);
    }
    let done = tollgate(&["capacity", "show", "--http", &nobody]);
    let expected = format!(
        "tollgate: no answer from {nobody}: Connection refused (os error 111); is it the HTTP \
         address of a node?\n"
    );
    assert_output(&done, 2, "", &expected);
}

const ASK_A_NODE: &str = "it does not show leases: --http must be the HTTP address of a node, not of a \
                          load balancer, and the node must not be older than this command";

/// Result of `show` for one response of a node, and the requested path.
fn show_response(args: &[&str], status: &str, body: &str) -> (CommandOutput, String) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let http = listener.local_addr().unwrap().to_string();
    let answer = format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\n\r\n{body}", body.len());
    let node = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut asked = Vec::new();
        while !asked.ends_with(b"\r\n\r\n") {
            let mut byte = [0];
            stream.read_exact(&mut byte).unwrap();
            asked.push(byte[0]);
        }
        stream.write_all(answer.as_bytes()).unwrap();
        String::from_utf8(asked).unwrap()
    });
    let done = tollgate(&[&["capacity", "show", "--http", &http], args].concat());
    let asked = node.join().unwrap();
    (done, asked.split(' ').nth(1).unwrap().to_owned())
}

#[test]
fn show_what_is_leased() {
    let status = r#"{"store": {"kind": "memory", "up": true}, "resources": [{"resource": "db.users",
        "template": null, "algorithm": "STATIC", "capacity": 5.0, "wants": 7.5, "has": 5.0,
        "subclients": 1, "clients": 1, "level": null, "learning_until_s": null}],
        "resources_left_out": 0}"#;
    let (done, path) = show_response(&[], "200 OK", status);
    let expected = "\
resource  template  algorithm  capacity  wants  has  clients  subclients  level  learning
db.users  -         STATIC            5    7.5    5        1           1      -  -
";
    assert_output(&done, 0, expected, "");
    assert_eq!(path, "/debug/status.json");
    assert_output(&show_response(&["--json"], "200 OK", status).0, 0, &format!("{status}\n"), "");

    let (done, path) = show_response(&["a/ä b&"], "404 Not Found", r#"{"error": "nobody has it"}"#);
    assert_output(&done, 1, "nobody has it\n", "");
    assert_eq!(path, "/debug/resource.json?id=a%2F%C3%A4%20b%26");
    let (done, _) =
        show_response(&["r", "--json"], "404 Not Found", r#"{"error": "nobody has it"}"#);
    assert_output(&done, 1, "{\"error\": \"nobody has it\"}\n", "");

    for (args, status, body, error) in [
        (&[][..], "503 Service Unavailable", r#"{"error": "no store"}"#, "no store"),
        (&["r"], "503 Service Unavailable", r#"{"error": "no\u0007"}"#, "no\\u{7}"),
        (&["r"], "404 Not Found", "<html>", ASK_A_NODE),
        (&[], "404 Not Found", "", ASK_A_NODE),
        (&[], "500 Oops", "", "HTTP status 500"),
        (
            &[],
            "200 OK",
            r#"{"store": {"kind": "redis", "up": false}, "resources": []}"#,
            "the store (redis) does not answer: leases cannot be shown",
        ),
    ] {
        let (done, _) = show_response(args, status, body);
        assert_eq!((done.code, done.stdout.as_str()), (2, ""), "{body}");
        assert!(done.stderr.ends_with(&format!(": {error}\n")), "{error}: {}", done.stderr);
    }
    let (done, _) = show_response(&["--json"], "200 OK", "<html>");
    assert_eq!((done.code, done.stdout.as_str()), (2, ""));
    assert!(done.stderr.contains(": can't read the answer: "), "{}", done.stderr);
}
