//! TLS, client certificates and tokens.

use std::fs;

use testkit::certs::{Ca, text};
use testkit::command::tollgate;
use testkit::{LimitsFile, Node};
use tollgate_client::{Client, DecidedBy, Fallback, Request};

use crate::{PATIENT, ask_until_decided_by};

const LIMITS: &str = "global_default_bucket: {}";

const REQUEST: Request<'static> = Request::new("a", "b");

#[tokio::test(flavor = "multi_thread")]
async fn tls_with_a_certificate_of_the_client() {
    let (limits, ca) = (LimitsFile::new(LIMITS), Ca::new());
    let (own, root) = (ca.server("own"), ca.file());
    let args = ["--tls-cert-file", text(&own.cert), "--tls-key-file", text(&own.key)];
    let args = [&args[..], &["--tls-client-ca-file", text(&root)]].concat();
    let node = Node::start(&limits.path(), &args);
    let address = format!("https://{}", node.grpc);
    let builder = || Client::builder([&*address]).deadline(PATIENT);
    let mine = ca.client("mine", &["cn:a"]);
    let client = builder().ca_file(&root).certificate(&mine.cert, &mine.key).build().unwrap();
    assert_eq!(client.allow(REQUEST).await.unwrap().decided_by(), DecidedBy::Node);
    // By a name that resolves, and whose certificate is of another name.
    let name = format!("localhost:{}", node.grpc.port());
    let named = Client::builder([&*name]).ca_file(&root).server_name("127.0.0.1");
    let named = named.certificate(&mine.cert, &mine.key).deadline(PATIENT).build().unwrap();
    assert_eq!(named.allow(REQUEST).await.unwrap().decided_by(), DecidedBy::Node);
    // Each of these is refused during the handshake, and the fallback decides.
    let other = Ca::new();
    let stranger = other.client("stranger", &["cn:a"]);
    for builder in [
        builder().ca_file(&root),
        builder().ca_file(&root).certificate(&stranger.cert, &stranger.key),
        builder().ca_file(other.file()).certificate(&mine.cert, &mine.key),
        builder().ca_file(&root).certificate(&mine.cert, &mine.key).server_name("node.example"),
        Client::builder([node.grpc.to_string()]).deadline(PATIENT),
    ] {
        let client = builder.fallback(Fallback::Deny).build().unwrap();
        assert_eq!(client.allow(REQUEST).await.unwrap().decided_by(), DecidedBy::Fallback);
    }
    assert_eq!(client.allow(REQUEST).await.unwrap().decided_by(), DecidedBy::Node);
}

/// A new token and its hash.
fn token() -> (String, String) {
    let made = tollgate(&["token"]).stdout;
    let value = |name: &str| {
        let line = made.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.unwrap().trim().to_owned()
    };
    (value("token"), value("token_sha256"))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_that_is_replaced() {
    let limits = LimitsFile::new(LIMITS);
    let dir = tempfile::tempdir().unwrap();
    let [token_file, access] = ["token", "access.yaml"].map(|name| dir.path().join(name));
    let [(first, first_hash), (second, second_hash)] = [token(), token()];
    let callers =
        |hash: &str| format!("callers: [{{ name: a, token_sha256: [{hash}], namespaces: ['a'] }}]");
    fs::write(&access, callers(&first_hash)).unwrap();
    fs::write(&token_file, first).unwrap();
    let node = Node::start(&limits.path(), &["--access", text(&access)]);
    let builder = || Client::builder([node.grpc.to_string()]).deadline(PATIENT);
    let client = builder().token_file(&token_file).fallback(Fallback::Deny).build().unwrap();
    assert_eq!(client.allow(REQUEST).await.unwrap().decided_by(), DecidedBy::Node);
    // Without the right there is no decision, but the node is well.
    let other = client.allow(Request::new("other", "b")).await.unwrap();
    assert_eq!(other.decided_by(), DecidedBy::Fallback);
    assert_eq!(client.allow(REQUEST).await.unwrap().decided_by(), DecidedBy::Node);
    let error = builder().build().unwrap().allow(REQUEST).await.unwrap_err().to_string();
    assert!(error.starts_with("no decision: Unauthenticated: "), "{error}");
    // The node takes only the second token now, which the client reads from its file.
    fs::write(&access, callers(&second_hash)).unwrap();
    ask_until_decided_by(&client, REQUEST, DecidedBy::Fallback).await;
    fs::write(&token_file, second).unwrap();
    ask_until_decided_by(&client, REQUEST, DecidedBy::Node).await;
}
