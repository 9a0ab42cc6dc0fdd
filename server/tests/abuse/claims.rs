//! False claims of a caller do not affect others.

use std::fs;

use tempfile::TempDir;
use tollgate_proto::doorman::capacity_client::CapacityClient;
use tollgate_proto::doorman::{
    GetServerCapacityRequest, Lease, PriorityBandAggregate, ResourceResponse,
    ServerCapacityResourceRequest,
};
use tonic::Code;

use testkit::callers::{token, with_token};
use testkit::grpc::{capacity_client, channel, lease};
use testkit::{LimitsFile, Node, Redis, TEST_TIMEOUT, eventually, now_s};

const CAPACITY: f64 = 100.0;

fn limits(learning_s: u64) -> LimitsFile {
    LimitsFile::new(&format!(
        "resources:
  - identifier_glob: 'static/*'
    capacity: {CAPACITY}
    algorithm: {{ kind: STATIC, lease_length: 60, refresh_interval: 5, learning_mode_duration: {learning_s} }}
  - identifier_glob: 'proportional/*'
    capacity: {CAPACITY}
    algorithm: {{ kind: PROPORTIONAL_SHARE, lease_length: 60, refresh_interval: 5, learning_mode_duration: {learning_s} }}
  - identifier_glob: '*'
    capacity: {CAPACITY}
    algorithm: {{ kind: FAIR_SHARE, lease_length: 60, refresh_interval: 5, learning_mode_duration: {learning_s} }}
"
    ))
}

/// A resource of each kind.
const RESOURCES: [&str; 3] = ["static/1", "proportional/1", "fair/1"];

/// Claims to hold a billion, and requests as much.
async fn claim(node: &Node, resource: &str) -> ResourceResponse {
    let has = Lease { expiry_time: now_s() + 60, refresh_interval: 5, capacity: 1e9 };
    lease(&mut capacity_client(node).await, "greedy", resource, 1e9, Some(has)).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_counts_at_most_the_capacity_while_learning() {
    let limits = limits(600);
    let node = Node::start(&limits.path(), &[]);
    for resource in RESOURCES {
        let answer = claim(&node, resource).await;
        assert!(answer.gets.capacity <= CAPACITY, "{answer:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_counts_at_most_the_capacity_without_a_store() {
    let (limits, mut redis) = (limits(0), Redis::start());
    let node = Node::start(&limits.path(), &["--store", &redis.url()]);
    redis.kill();
    eventually("the store is down", TEST_TIMEOUT, || !node.store_is_up());
    for resource in RESOURCES {
        let answer = claim(&node, resource).await;
        assert!(answer.degraded(), "{answer:?}");
        assert!(answer.gets.capacity <= CAPACITY, "{answer:?}");
    }
}

/// A request of a cluster that claims nearly 2^63 clients.
fn cluster_request() -> GetServerCapacityRequest {
    let band = PriorityBandAggregate { priority: 0, num_clients: i64::MAX, wants: 1e18 };
    let resource_id = "fair/1".to_owned();
    let resource = ServerCapacityResourceRequest {
        resource_id,
        wants: vec![band],
        ..ServerCapacityResourceRequest::default()
    };
    GetServerCapacityRequest { server_id: "cluster".to_owned(), resource: vec![resource] }
}

#[tokio::test(flavor = "multi_thread")]
async fn lending_to_clusters_is_a_right_of_its_own() {
    let ((asks, asks_hash), (admin, admin_hash)) = (token(), token());
    let (folder, limits) = (TempDir::new().unwrap(), limits(0));
    let access = folder.path().join("access.yaml");
    let text = format!(
        "callers:
  - {{ name: asks, token_sha256: [{asks_hash}], resources: ['*'] }}
  - {{ name: admin, role: administer, token_sha256: [{admin_hash}] }}
"
    );
    fs::write(&access, text).unwrap();
    let node = Node::start(&limits.path(), &["--access", access.to_str().unwrap()]);
    let channel = channel(node.grpc).await;
    let ask = async |token: &str| {
        let asked = with_token(Some(token), cluster_request());
        CapacityClient::new(channel.clone()).get_server_capacity(asked).await
    };
    let refused = ask(&asks).await.unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied, "{refused:?}");
    assert!(refused.message().contains("lend"), "the text must name the key: {refused:?}");
    ask(&admin).await.unwrap();
}
