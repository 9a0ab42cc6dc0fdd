//! Settlements through real nodes: gRPC, JSON, the command line, rights, and a store that is down.

use serde_json::{Value, json};
use testkit::callers::{Callers, LIMITS as CALLER_LIMITS, http_with_token, status_of, with_token};
use testkit::command::tollgate;
use testkit::grpc::{channel, client, request};
use testkit::http::{HttpResponse, http};
use testkit::metrics::Scrape;
use testkit::{LimitsFile, Node, Redis};
use tollgate_proto::quotaservice::AllowRequest;
use tollgate_proto::tollgate::v1::buckets_client::BucketsClient;
use tollgate_proto::tollgate::v1::settle_response::Status;
use tollgate_proto::tollgate::v1::{SettleRequest, SettleResponse};
use tonic::Code;

const LIMITS: &str = "
namespaces:
  ns:
    on_store_failure: allow
    buckets:
      b: { size: 1000, fill_rate: 1/d, max_tokens_per_request: -1, settle_within: 1h }
      window: { algorithm: fixed_window, limit: 1000, window: 1d }
";

fn to_settle(namespace: &str, tokens: i64) -> AllowRequest {
    AllowRequest { settle: true, ..request(namespace, "b", tokens) }
}

fn whole(answer: SettleResponse) -> (Status, i64, f64) {
    (answer.status(), answer.charged, answer.tokens_available.round())
}

fn post(node: &Node, path: &str, body: &Value) -> HttpResponse {
    http(node.http, "POST", path, body.to_string().as_bytes())
}

fn settle_json(node: &Node, permit: &str, actual: i64) -> HttpResponse {
    post(node, "/v1/settle", &json!({ "permit": permit, "actual": actual.to_string() }))
}

#[tokio::test]
async fn over_grpc_json_and_the_command_line() {
    let limits = LimitsFile::new(LIMITS);
    let redis = Redis::start();
    let nodes = [&[][..], &["--store", &redis.url(), "--store-timeout", "5s"]];
    for args in nodes {
        let node = Node::start(&limits.path(), args);
        if !args.is_empty() {
            node.wait_for_store();
        }
        let mut buckets = BucketsClient::new(channel(node.grpc).await);
        let mut settle = async |permit: &str, actual| {
            let request = SettleRequest { permit: permit.to_owned(), actual };
            buckets.settle(request).await.map(|answer| whole(answer.into_inner()))
        };
        let mut quota = client(&node).await;
        let answer = quota.allow(request("ns", "b", 100)).await.unwrap().into_inner();
        assert_eq!(answer.permit, "", "it did not ask for a permit");
        let answer = quota.allow(to_settle("ns", 100)).await.unwrap().into_inner();
        assert_eq!((answer.tokens_granted, answer.tokens_available.round()), (100, 800.0));
        let permit = answer.permit;
        assert!(permit.ends_with(":ns:b"), "{permit}");
        assert_eq!(settle(&permit, 150).await.unwrap(), (Status::Settled, 50, 750.0));
        assert_eq!(settle(&permit, 150).await.unwrap(), (Status::AlreadySettled, 0, 0.0));
        for (permit, actual, field) in
            [("x", 1, "permit"), ("", 1, "permit"), (&permit, -1, "actual")]
        {
            let status = settle(permit, actual).await.unwrap_err();
            assert_eq!(status.code(), Code::InvalidArgument);
            assert!(status.message().starts_with(field), "{status:?}");
        }
        let mut other = to_settle("ns", 1);
        other.bucket_name = "window".to_owned();
        assert_eq!(quota.allow(other).await.unwrap().into_inner().permit, "");

        let ask =
            json!({ "namespace": "ns", "bucketName": "b", "tokensRequested": 50, "settle": true });
        let answer = post(&node, "/v1/allow", &ask).json();
        let permit = answer["permit"].as_str().unwrap();
        let answer = settle_json(&node, permit, 0);
        assert_eq!((answer.status, &answer.json()["status"]), (200, &json!("SETTLED")));
        assert_eq!(answer.json()["charged"], "-50");
        assert_eq!(settle_json(&node, permit, 0).json()["status"], "ALREADY_SETTLED");
        for (permit, actual) in [(permit, -1), ("x", 0)] {
            assert_eq!(settle_json(&node, permit, actual).status, 400);
        }
        assert_eq!(http(node.http, "POST", "/v1/settle", b"{").status, 400);

        let address = node.grpc.to_string();
        let said =
            tollgate(&["allow", "ns", "b", "--tokens", "50", "--settle", "--addr", &address]);
        let line = said.stdout.lines().find(|line| line.starts_with("permit ")).unwrap();
        let permit = line.split_whitespace().nth(1).unwrap();
        let said = tollgate(&["settle", permit, "75", "--addr", &address]);
        assert!(
            said.stdout.starts_with("SETTLED: 25 tokens more charged\navailable  675"),
            "{said:?}"
        );
        let said = tollgate(&["settle", permit, "75", "--addr", &address]);
        assert_eq!((said.code, &*said.stdout), (0, "ALREADY_SETTLED: nothing has changed\n"));
        let unknown = format!("{:032x}:ns:b", 1);
        assert_eq!(tollgate(&["settle", &unknown, "75", "--addr", &address]).code, 1);
        assert_eq!(tollgate(&["settle", "x", "75", "--addr", &address]).code, 2);

        let metrics = Scrape::of(node.http);
        for (outcome, count) in [("settled", 3.0), ("already", 3.0), ("unknown", 1.0)] {
            let labels = [("namespace", "ns"), ("bucket", "b"), ("outcome", outcome)];
            assert_eq!(
                metrics.get("tollgate_settlements_total", &labels),
                Some(count),
                "{outcome}"
            );
        }
    }
}

/// Whoever may ask in a namespace may settle there; a refusal uses up nothing.
#[tokio::test]
async fn callers_without_the_right_are_refused() {
    let (limits, callers) = (LimitsFile::new(CALLER_LIMITS), Callers::new());
    let node = callers.node(&limits);
    let channel = channel(node.grpc).await;
    let mut quota = tollgate_proto::quotaservice::quota_service_client::QuotaServiceClient::new(
        channel.clone(),
    );
    let mut buckets = BucketsClient::new(channel);
    let (shop, admin) = (Some(&*callers.shop), Some(&*callers.admin));
    let refused = quota.allow(with_token(shop, to_settle("bank", 10))).await;
    assert_eq!(status_of(refused).0, Code::PermissionDenied);
    let granted = quota.allow(with_token(admin, to_settle("bank", 10))).await.unwrap();
    let permit = granted.into_inner().permit;
    let settle = SettleRequest { permit: permit.clone(), actual: 1 };
    for (token, code) in [
        (shop, Code::PermissionDenied),
        (Some(&*callers.watcher), Code::PermissionDenied),
        (None, Code::Unauthenticated),
    ] {
        let refused = buckets.settle(with_token(token, settle.clone())).await;
        assert_eq!(status_of(refused).0, code);
    }
    let body = json!({ "permit": permit, "actual": 1 }).to_string();
    assert_eq!(http_with_token(&node, shop, "POST", "/v1/settle", &body).status, 403);
    let settled = buckets.settle(with_token(admin, settle)).await.unwrap().into_inner();
    assert_eq!((settled.status(), settled.charged), (Status::Settled, -9));
}

#[tokio::test]
async fn while_redis_is_down() {
    let limits = LimitsFile::new(LIMITS);
    let mut redis = Redis::start();
    let args = ["--store", &redis.url(), "--store-timeout", "2s"];
    let node = Node::start(&limits.path(), &args);
    node.wait_for_store();
    let mut quota = client(&node).await;
    let permit = quota.allow(to_settle("ns", 10)).await.unwrap().into_inner().permit;
    assert_ne!(permit, "");
    redis.kill();
    let answer = quota.allow(to_settle("ns", 10)).await.unwrap().into_inner();
    assert_eq!((answer.tokens_granted, answer.degraded, &*answer.permit), (10, true, ""));
    let mut buckets = BucketsClient::new(channel(node.grpc).await);
    let failed = buckets.settle(SettleRequest { permit: permit.clone(), actual: 1 }).await;
    assert_eq!(status_of(failed).0, Code::Unavailable);
    assert_eq!(settle_json(&node, &permit, 1).status, 503);
    // What is not in the store any more is unknown.
    redis.start_again();
    node.wait_for_store();
    let lost = buckets.settle(SettleRequest { permit, actual: 1 }).await.unwrap().into_inner();
    assert_eq!(lost.status(), Status::Unknown);
}
