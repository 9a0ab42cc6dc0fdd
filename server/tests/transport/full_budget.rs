//! A budget of bytes (`--max-buffered-bytes`) that other connections use up.

use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use h2::client::SendRequest;
use testkit::grpc::{client, request};
use testkit::http::{get, post_allow};
use testkit::metrics::Scrape;
use testkit::{LimitsFile, Node, TEST_TIMEOUT, eventually};
use tokio::time::timeout;

const LIMITS: &str = "
namespaces:
  shop: { default_bucket: { size: 1000, fill_rate: 1000 } }
";

/// The smallest budget, in bytes.
const BUDGET: u64 = 4 << 20;

/// Unfinished bodies per connection, and bytes of each. A connection may buffer half of what is
/// free, and ends up to 64 kB above that.
const BODIES: usize = 15;
const BODY_BYTES: usize = 200_000;
const CONNECTIONS: usize = 10;

/// A request must be answered within this time. The node gives unfinished bodies up after 10 s.
const AT_ONCE: Duration = Duration::from_secs(5);

async fn connect(address: SocketAddr) -> SendRequest<Bytes> {
    let stream = tokio::net::TcpStream::connect(address).await.unwrap();
    let (sender, connection) = h2::client::handshake(stream).await.unwrap();
    tokio::spawn(connection);
    sender.ready().await.unwrap()
}

/// Sends bodies without an end until the node reads no more.
async fn fill(node: &Node) -> Vec<h2::SendStream<Bytes>> {
    let mut bodies = Vec::new();
    for _ in 0..CONNECTIONS {
        let mut sender = connect(node.http).await;
        for _ in 0..BODIES {
            sender = sender.ready().await.unwrap();
            let post = http::Request::post("http://localhost/v1/allow").body(()).unwrap();
            let (_, mut body) = sender.send_request(post, false).unwrap();
            body.send_data(vec![b' '; BODY_BYTES].into(), false).unwrap();
            bodies.push(body);
        }
    }
    let buffered = || Scrape::of(node.http).get("tollgate_buffered_bytes", &[]).unwrap();
    eventually("the budget is used up", TEST_TIMEOUT, || buffered() >= BUDGET as f64);
    bodies
}

#[tokio::test(flavor = "multi_thread")]
async fn small_requests_are_answered_while_the_budget_is_used_up() {
    let limits = LimitsFile::new(LIMITS);
    let budget = BUDGET.to_string();
    let node = Node::start(&limits.path(), &["--max-buffered-bytes", &budget]);
    let mut allow = client(&node).await;
    let _bodies = fill(&node).await;
    let answers = async {
        // A connection whose message and end of stream arrive separately.
        let mut sender = connect(node.grpc).await;
        let call = http::Request::post("http://node/quotaservice.QuotaService/Allow")
            .header("content-type", "application/grpc");
        let (answer, mut body) = sender.send_request(call.body(()).unwrap(), false).unwrap();
        body.send_data(Bytes::from_static(&[0; 5]), false).unwrap();
        // The node has read the message when it answers the ping after it.
        allow.allow(request("shop", "b", 1)).await.unwrap();
        body.send_data(Bytes::new(), true).unwrap();
        assert_eq!(answer.await.unwrap().status(), 200);
        let posted = tokio::task::block_in_place(|| {
            (post_allow(&node, r#"{"namespace":"shop","bucketName":"b"}"#), get(&node, "/metrics"))
        });
        (posted.0.status, posted.1.status)
    };
    assert_eq!(timeout(AT_ONCE, answers).await.expect("answers at once"), (200, 200));
}
