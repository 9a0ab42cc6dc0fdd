//! gRPC clients of a node.

use std::net::SocketAddr;

use tollgate_proto::doorman::capacity_client::CapacityClient;
use tollgate_proto::doorman::{GetCapacityRequest, Lease, ResourceRequest, ResourceResponse};
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

/// The response to a refused request: no tokens, only status and bucket.
pub fn refused(status: Status, bucket: &str) -> AllowResponse {
    AllowResponse { status: status.into(), bucket: bucket.to_owned(), ..AllowResponse::default() }
}

/// A lease client for a node.
pub async fn capacity_client(node: &Node) -> CapacityClient<Channel> {
    CapacityClient::new(channel(node.grpc).await)
}

/// A request for a lease on one resource, by a client that holds `has`.
pub fn lease_request(
    client_id: &str,
    resource_id: &str,
    wants: f64,
    has: Option<Lease>,
) -> GetCapacityRequest {
    let resource = ResourceRequest { resource_id: resource_id.to_owned(), priority: 0, has, wants };
    GetCapacityRequest { client_id: client_id.to_owned(), resource: vec![resource] }
}

/// Requests a lease on one resource.
pub async fn lease(
    client: &mut CapacityClient<Channel>,
    client_id: &str,
    resource_id: &str,
    wants: f64,
    has: Option<Lease>,
) -> ResourceResponse {
    let request = lease_request(client_id, resource_id, wants, has);
    client.get_capacity(request).await.unwrap().into_inner().response.remove(0)
}
