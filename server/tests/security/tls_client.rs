//! TLS errors of the `tollgate` command: which side failed, and what to do.

use std::io::Write;
use std::net::{SocketAddr, TcpListener};
use std::thread;
use std::time::{Duration, Instant};

use testkit::certs::{Ca, Pair, text};
use testkit::command::tollgate;
use testkit::{DEAD_PORT, LimitsFile, Node};

const LIMITS: &str = "global_default_bucket: {}";

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

fn node(limits: &LimitsFile, own: &Pair, more: &[&str]) -> Node {
    let args = ["--tls-cert-file", text(&own.cert), "--tls-key-file", text(&own.key)];
    Node::start(&limits.path(), &[&args, more].concat())
}

/// Runs commands for both ports with these flags: each prints this error and nothing else.
#[track_caller]
fn assert_error(node: &Node, flags: &[&str], what: &str) {
    for _ in 0..3 {
        for (ask, flag, at) in [
            (&["allow", "a", "b"][..], "--addr", node.grpc),
            (&["capacity", "get", "a", "b", "1"], "--addr", node.grpc),
            (&["health"], "--http", node.http),
            (&["capacity", "show"], "--http", node.http),
        ] {
            let at = at.to_string();
            let done = tollgate(&[ask, &[flag, &at], flags].concat());
            let expected = what.replace("NODE", &at);
            assert_eq!((done.code, done.stdout.as_str()), (2, ""), "{ask:?}");
            assert!(done.stderr.contains(&expected), "{ask:?} {flags:?}: {}", done.stderr);
            assert_eq!(done.stderr.lines().count(), 1, "{ask:?} {flags:?}: {}", done.stderr);
        }
    }
}

#[test]
fn one_speaks_tls_and_the_other_does_not() {
    let (limits, ca) = (LimitsFile::new(LIMITS), Ca::new());
    let root = ca.file();
    let plain = Node::start(&limits.path(), &[]);
    let secure = node(&limits, &ca.server("own"), &[]);
    assert_error(&secure, &[], "NODE expects TLS: name its CA certificates with --ca-file\n");
    let expected = "NODE does not use TLS: omit --ca-file (TOLLGATE_CA_FILE), or turn on TLS at \
                    the node with --tls-cert-file\n";
    assert_error(&plain, &["--ca-file", text(&root)], expected);
}

#[test]
fn a_certificate_of_the_node_that_is_not_trusted() {
    let (limits, ca, other) = (LimitsFile::new(LIMITS), Ca::new(), Ca::new());
    let secure = node(&limits, &ca.server("own"), &[]);
    let (root, stranger) = (ca.file(), other.file());
    let expected = "the certificate of NODE is not signed by a CA in --ca-file: ";
    assert_error(&secure, &["--ca-file", text(&stranger)], expected);
    let misnamed = ["--ca-file", text(&root), "--server-name", "node.example"];
    let expected = "the certificate of NODE is for another name: use an address with a name from \
                    the certificate, or name it with --server-name (";
    assert_error(&secure, &misnamed, expected);
}

#[test]
fn a_certificate_of_the_client_that_is_missing_or_not_taken() {
    let (limits, ca, other) = (LimitsFile::new(LIMITS), Ca::new(), Ca::new());
    let root = ca.file();
    let asks = node(&limits, &ca.server("own"), &["--tls-client-ca-file", text(&root)]);
    let trusting = ["--ca-file", text(&root)];
    let expected = "NODE requires a client certificate: name one with --cert-file and --key-file\n";
    assert_error(&asks, &trusting, expected);
    let shown = |pair: &Pair| {
        let shown = ["--cert-file", text(&pair.cert), "--key-file", text(&pair.key)];
        let expected = "NODE rejects the client certificate in --cert-file: it must be signed by a CA \
                        in the node's --tls-client-ca-file, and must not have expired (";
        assert_error(&asks, &[&trusting[..], &shown].concat(), expected);
    };
    shown(&other.client("stranger", &["cn:a"]));
    shown(&ca.expiring("expired", DAY, true));
}

#[test]
fn an_unreachable_node_is_not_mistaken_for_one_without_tls() {
    let ca = Ca::new();
    let root = ca.file();
    let nobody = SocketAddr::from(([127, 0, 0, 1], DEAD_PORT)).to_string();
    let done = tollgate(&["allow", "a", "b", "--addr", &nobody, "--ca-file", text(&root)]);
    let expected =
        format!("tollgate: no node answers at {nobody}: is `tollgate serve` running there?\n");
    assert_eq!((done.code, done.stderr), (2, expected));
}

/// A server that sends its first record a byte at a time.
#[test]
fn a_handshake_that_never_ends_times_out() {
    const BYTES: usize = 200;
    let ca = Ca::new();
    let root = ca.file();
    for (ask, flag, said) in [
        (&["capacity", "show"][..], "--http", "timed out after 300ms"),
        (&["allow", "a", "b"], "--addr", "no answer after 300ms (--timeout)"),
    ] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = listener.local_addr().unwrap().to_string();
        let server = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.write_all(&[22, 3, 3, 0x40, 0]).unwrap();
            let sent = (0..BYTES).take_while(|_| {
                // The pace of the slow server.
                thread::sleep(Duration::from_millis(50));
                stream.write_all(&[2]).is_ok()
            });
            sent.count()
        });
        let more = [flag, &at, "--ca-file", text(&root), "--timeout", "300ms"];
        let start = Instant::now();
        let done = tollgate(&[ask, &more].concat());
        // Ten times the time limit.
        assert!(start.elapsed() < Duration::from_secs(3), "{ask:?} {:?}", start.elapsed());
        assert_eq!(done.code, 2, "{ask:?} {done:?}");
        assert!(done.stderr.contains(said), "{ask:?} {done:?}");
        let sent = server.join().unwrap();
        assert!(sent < BYTES, "{ask:?} read all bytes");
    }
}
