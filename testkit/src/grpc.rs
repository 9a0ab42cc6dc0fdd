//! gRPC clients of a node.

use std::net::SocketAddr;

use tollgate_proto::quotaservice::allow_response::Status;
use tollgate_proto::quotaservice::quota_service_client::QuotaServiceClient;
use tollgate_proto::quotaservice::{AllowRequest, AllowResponse};
use tonic::transport::{Channel, Endpoint};

use super::{Node, TEST_TIMEOUT};

/// A gRPC channel to `address`.
pub async fn channel(address: SocketAddr) -> Channel {
    let endpoint = Endpoint::from_shared(format!("http://{address}")).unwrap();
    endpoint.timeout(TEST_TIMEOUT).connect().await.unwrap()
}

/// An `Allow` client for a node.
pub async fn client(node: &Node) -> QuotaServiceClient<Channel> {
    QuotaServiceClient::new(channel(node.grpc).await)
}

/// A request for tokens with the bucket's default maximum wait.
pub fn request(namespace: &str, bucket: &str, tokens: i64) -> AllowRequest {
    AllowRequest {
        namespace: namespace.to_owned(),
        bucket_name: bucket.to_owned(),
        tokens_requested: tokens,
        ..AllowRequest::default()
    }
}

/// An expected response with only status and bucket set.
pub fn refused(status: Status, bucket: &str) -> AllowResponse {
    AllowResponse { status: status.into(), bucket: bucket.to_owned(), ..AllowResponse::default() }
}
