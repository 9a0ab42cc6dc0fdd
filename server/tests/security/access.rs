//! Every role at every route of both ports, with messages that do not reveal what exists.

use h2::client;
use http::header::CONTENT_TYPE;
use prost::Message;
use testkit::callers::{
    Callers, LIMITS, allow, http_with_token, refusals, status_of, token, with_token,
};
use testkit::grpc::{channel, lease_request, request};
use testkit::http::send;
use testkit::{LimitsFile, Node};
use tollgate_proto::doorman::capacity_client::CapacityClient;
use tollgate_proto::doorman::{
    DiscoveryRequest, GetCapacityRequest, GetServerCapacityRequest, PriorityBandAggregate,
    ReleaseCapacityRequest, ResourceRequest, ServerCapacityResourceRequest,
};
use tonic::Code;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;
use tonic_reflection::pb::v1::ServerReflectionRequest;
use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;

const UNKNOWN: &str = "the credentials are missing or unknown: send a bearer token or a client certificate that is in the node's access file";
const FORBIDDEN: &str = "the node's access file does not permit this caller to make this request";

#[tokio::test]
async fn every_role_at_every_grpc_route() {
    let (limits, callers) = (LimitsFile::new(LIMITS), Callers::new());
    let node = callers.node(&limits);
    let channel = channel(node.grpc).await;
    let (shop, watcher, admin) =
        (Some(&*callers.shop), Some(&*callers.watcher), Some(&*callers.admin));
    // All callers share one connection: a caller must not be mistaken for the previous one.
    for _ in 0..2 {
        for (token, namespace, code) in [
            (shop, "shop", Code::Ok),
            (shop, "sharp", Code::Ok),
            (shop, "bank", Code::PermissionDenied),
            (shop, "no-such-namespace", Code::PermissionDenied),
            (shop, "", Code::PermissionDenied),
            (watcher, "shop", Code::PermissionDenied),
            (admin, "bank", Code::Ok),
            (None, "shop", Code::Unauthenticated),
            (Some("tollgate_wrong"), "shop", Code::Unauthenticated),
            (Some(&callers.shop[1..]), "shop", Code::Unauthenticated),
        ] {
            let text = match code {
                Code::PermissionDenied => FORBIDDEN,
                Code::Unauthenticated => UNKNOWN,
                _ => "",
            };
            let answer = allow(&channel, token, namespace).await;
            assert_eq!(answer, (code, text.to_owned()), "{token:?} {namespace}");
        }
    }

    let mut capacity = CapacityClient::new(channel.clone());
    let ids = |ids: &[&str]| ids.iter().map(|id| (*id).to_owned()).collect::<Vec<_>>();
    for (token, resources, code) in [
        (shop, &["db.users"][..], Code::Ok),
        (shop, &["db.users", "queue"], Code::PermissionDenied),
        (shop, &["no-such"], Code::PermissionDenied),
        // Names of resources may be longer than those of namespaces.
        (shop, &[&*format!("db.{}", "x".repeat(1021))], Code::Ok),
        (shop, &[&*format!("db.{}", "x".repeat(1022))], Code::PermissionDenied),
        (watcher, &["db.users"], Code::PermissionDenied),
        (watcher, &[], Code::PermissionDenied),
        (admin, &["db.users", "queue"], Code::Ok),
        (None, &["db.users"], Code::Unauthenticated),
    ] {
        let get = GetCapacityRequest {
            client_id: "c".into(),
            resource: ids(resources)
                .into_iter()
                .map(|resource_id| ResourceRequest {
                    resource_id,
                    wants: 1.0,
                    ..ResourceRequest::default()
                })
                .collect(),
        };
        assert_eq!(
            status_of(capacity.get_capacity(with_token(token, get)).await).0,
            code,
            "{resources:?}"
        );
        let wants = || vec![PriorityBandAggregate { num_clients: 1, wants: 1.0, priority: 0 }];
        let server = GetServerCapacityRequest {
            server_id: "s".into(),
            resource: ids(resources)
                .into_iter()
                .map(|resource_id| ServerCapacityResourceRequest {
                    resource_id,
                    wants: wants(),
                    ..ServerCapacityResourceRequest::default()
                })
                .collect(),
        };
        let answer = status_of(capacity.get_server_capacity(with_token(token, server)).await);
        assert_eq!(answer.0, code, "{resources:?}: {answer:?}");
        let release = ReleaseCapacityRequest { client_id: "c".into(), resource_id: ids(resources) };
        assert_eq!(status_of(capacity.release_capacity(with_token(token, release)).await).0, code);
    }
    // Older clients send empty names, which have no effect.
    let release =
        ReleaseCapacityRequest { client_id: "c".into(), resource_id: ids(&["", "db.users", ""]) };
    assert_eq!(status_of(capacity.release_capacity(with_token(shop, release)).await).0, Code::Ok);
    for (token, code) in [(shop, Code::Ok), (watcher, Code::Ok), (None, Code::Unauthenticated)] {
        assert_eq!(
            status_of(capacity.discovery(with_token(token, DiscoveryRequest {})).await).0,
            code
        );
        let list = MessageRequest::ListServices(String::new());
        let asked = ServerReflectionRequest { host: String::new(), message_request: Some(list) };
        let stream = with_token(token, tokio_stream::once(asked));
        let mut reflection = ServerReflectionClient::new(channel.clone());
        assert_eq!(status_of(reflection.server_reflection_info(stream).await).0, code);
        let check = HealthCheckRequest::default();
        let health = HealthClient::new(channel.clone()).check(with_token(token, check)).await;
        assert_eq!(status_of(health).0, Code::Ok);
    }
    let counted = |reason| refusals(&node, &callers.admin, "grpc", reason);
    assert_eq!(counted("unknown_token"), 4.0);
    assert!(counted("no_credentials") >= 5.0);
    assert!(counted("scope") >= 9.0 && counted("role") >= 6.0);
    assert_eq!(counted("unknown_certificate"), 0.0);
}

fn server_asks(
    server: &str,
    resource: &str,
    clients: &[i64],
    wants: f64,
) -> GetServerCapacityRequest {
    let band = |(priority, &num_clients)| PriorityBandAggregate { num_clients, wants, priority };
    let resource = ServerCapacityResourceRequest {
        resource_id: resource.to_owned(),
        wants: (0..).zip(clients).map(band).collect(),
        ..ServerCapacityResourceRequest::default()
    };
    GetServerCapacityRequest { server_id: server.to_owned(), resource: vec![resource] }
}

/// Lending to clusters is a separate, bounded right.
#[tokio::test]
async fn lending_requires_a_right() {
    let (limits, callers) = (LimitsFile::new(LIMITS), Callers::new());
    let [(plain, plain_hash), (few, few_hash)] = [token(), token()];
    let (admin, admin_hash) = token();
    callers.write(&format!(
        "callers:
  - {{ name: plain, token_sha256: [{plain_hash}], resources: ['db.*'] }}
  - {{ name: few, token_sha256: [{few_hash}], resources: ['db.*'], lend: {{ max_clients: 3 }} }}
  - {{ name: admin, role: administer, token_sha256: [{admin_hash}] }}
"
    ));
    let node = callers.node(&limits);
    let mut capacity = CapacityClient::new(channel(node.grpc).await);
    let (plain, few, admin) = (Some(&*plain), Some(&*few), Some(&*admin));
    let needs = "GetServerCapacity is for lower clusters: this caller needs \
                 `lend: { max_clients: N }` in the node's access file";
    // The message about a forbidden resource reveals nothing more.
    for (token, resource, text) in [
        (plain, "db.a", Some(needs)),
        (plain, "queue", Some(FORBIDDEN)),
        (few, "queue", Some(FORBIDDEN)),
        (few, "db.b", None),
        (admin, "queue", None),
    ] {
        let asked = with_token(token, server_asks("s", resource, &[1], 1.0));
        let expected = match text {
            Some(text) => (Code::PermissionDenied, text.to_owned()),
            None => (Code::Ok, String::new()),
        };
        assert_eq!(status_of(capacity.get_server_capacity(asked).await), expected, "{resource}");
    }
    assert_eq!(refusals(&node, admin.unwrap(), "grpc", "lend"), 1.0);

    // Only three clients count, whatever the cluster claims.
    let mut gets = Vec::new();
    for _ in 0..2 {
        let honest = with_token(plain, lease_request("honest", "db.c", 100.0, None));
        let honest = capacity.get_capacity(honest).await.unwrap().into_inner();
        let server = server_asks("s", "db.c", &[i64::MAX, i64::MAX], 1e18);
        let server =
            capacity.get_server_capacity(with_token(few, server)).await.unwrap().into_inner();
        gets = vec![honest.response[0].gets.capacity, server.response[0].gets.capacity];
    }
    assert_eq!(gets, [25.0, 75.0]);
}

/// A caller can't use the client ids of others.
#[tokio::test]
async fn client_ids_are_the_callers_own() {
    let (limits, callers) = (LimitsFile::new(LIMITS), Callers::new());
    let [(shop, shop_hash), (free, free_hash)] = [token(), token()];
    callers.write(&format!(
        "callers:
  - {{ name: 'sh*p', token_sha256: [{shop_hash}], resources: ['*'], client_ids: '{{caller}}/*', lend: {{ max_clients: 9 }} }}
  - {{ name: free, token_sha256: [{free_hash}], resources: ['*'] }}
"
    ));
    let node = callers.node(&limits);
    let mut capacity = CapacityClient::new(channel(node.grpc).await);
    let long = format!("sh*p/{}", "x".repeat(1020));
    for (id, allowed) in [
        ("sh*p/1", true),
        ("sh*p/", true),
        ("shop/1", false),
        ("sh*p", false),
        ("sh*p/1/2", false),
        ("free/1", false),
        ("", false),
        (&long, false),
    ] {
        let code = if allowed { Code::Ok } else { Code::PermissionDenied };
        let text = if allowed { "" } else { FORBIDDEN };
        let expected = (code, text.to_owned());
        let token = Some(&*shop);
        let got = capacity.get_capacity(with_token(token, lease_request(id, "r", 1.0, None))).await;
        assert_eq!(status_of(got), expected, "{id}");
        let resource_id = vec!["r".to_owned()];
        let release = ReleaseCapacityRequest { client_id: id.to_owned(), resource_id };
        let released = capacity.release_capacity(with_token(token, release)).await;
        assert_eq!(status_of(released), expected, "{id}");
        let server = with_token(token, server_asks(id, "r", &[1], 1.0));
        assert_eq!(status_of(capacity.get_server_capacity(server).await), expected, "{id}");
    }
    let any = with_token(Some(&*free), lease_request("sh*p/1", "r", 1.0, None));
    assert_eq!(
        status_of(capacity.get_capacity(any).await).0,
        Code::Ok,
        "without the key any client id is allowed"
    );
}

/// gRPC status of a handmade call.
async fn raw(node: &Node, token: Option<&str>, path: &str, message: Vec<u8>) -> Code {
    let stream = tokio::net::TcpStream::connect(node.grpc).await.unwrap();
    let (sender, connection) = client::handshake(stream).await.unwrap();
    tokio::spawn(connection);
    let uri = format!("http://node{path}");
    let mut head = http::Request::post(uri).header(CONTENT_TYPE, "application/grpc+other");
    if let Some(token) = token {
        head = head.header("authorization", format!("Bearer {token}"));
    }
    let mut sender = sender.ready().await.unwrap();
    let (response, mut body) = sender.send_request(head.body(()).unwrap(), false).unwrap();
    let prefix = [&[0][..], &(message.len() as u32).to_be_bytes()].concat();
    // Unknown callers are refused before the message is read.
    let _ = body.send_data([prefix, message].concat().into(), true);
    let (head, mut body) = response.await.unwrap().into_parts();
    while let Some(data) = body.data().await {
        body.flow_control().release_capacity(data.unwrap().len()).unwrap();
    }
    let status = head.headers.get("grpc-status").cloned();
    let status = match status {
        Some(status) => status,
        None => body.trailers().await.unwrap().unwrap()["grpc-status"].clone(),
    };
    Code::from_bytes(status.as_bytes())
}

/// An unusual request to `Allow`, which takes another code path in the node.
async fn unusual_allow(node: &Node, token: Option<&str>, namespace: &str) -> Code {
    let message = request(namespace, "b", 1).encode_to_vec();
    raw(node, token, "/quotaservice.QuotaService/Allow", message).await
}

/// Large lease requests are refused early.
#[tokio::test]
async fn requests_for_leases_are_bounded() {
    let (limits, callers) = (LimitsFile::new(LIMITS), Callers::new());
    let node = callers.node(&limits);
    let (shop, watcher) = (Some(&*callers.shop), Some(&*callers.watcher));
    let many = |count: usize| ReleaseCapacityRequest {
        client_id: "c".to_owned(),
        resource_id: vec!["queue".to_owned(); count],
    };
    let large = vec![0; 1024 * 1024 + 1];
    for method in ["GetCapacity", "GetServerCapacity", "ReleaseCapacity"] {
        let path = format!("/doorman.Capacity/{method}");
        for (token, message, code) in [
            (watcher, vec![0xff], Code::PermissionDenied),
            (watcher, large.clone(), Code::PermissionDenied),
            (shop, vec![0xff], Code::Internal),
            (shop, large.clone(), Code::OutOfRange),
        ] {
            assert_eq!(raw(&node, token, &path, message).await, code, "{method} {token:?}");
        }
    }
    let release = "/doorman.Capacity/ReleaseCapacity";
    for (count, code) in [(10_000, Code::PermissionDenied), (10_001, Code::InvalidArgument)] {
        assert_eq!(raw(&node, shop, release, many(count).encode_to_vec()).await, code, "{count}");
    }
}

#[tokio::test]
async fn unusual_requests_are_guarded_too() {
    let (limits, callers) = (LimitsFile::new(LIMITS), Callers::new());
    let node = callers.node(&limits);
    let (shop, watcher) = (Some(&*callers.shop), Some(&*callers.watcher));
    for (token, namespace, code) in [
        (shop, "shop", Code::Ok),
        (shop, "bank", Code::PermissionDenied),
        (watcher, "shop", Code::PermissionDenied),
        (None, "shop", Code::Unauthenticated),
    ] {
        let status = unusual_allow(&node, token, namespace).await;
        assert_eq!(status, code, "{namespace}");
    }
}

#[test]
fn every_role_at_every_http_route() {
    let (limits, callers) = (LimitsFile::new(LIMITS), Callers::new());
    let node = callers.node(&limits);
    let (shop, watcher, admin) =
        (Some(&*callers.shop), Some(&*callers.watcher), Some(&*callers.admin));
    let ask = |namespace: &str| format!(r#"{{"namespace":"{namespace}","bucketName":"b"}}"#);
    for (token, namespace, status) in [
        (shop, "shop", 200),
        (shop, "bank", 403),
        (shop, "no-such", 403),
        (watcher, "shop", 403),
        (admin, "bank", 200),
        (None, "shop", 401),
        (Some("x"), "shop", 401),
    ] {
        let answer = http_with_token(&node, token, "POST", "/v1/allow", &ask(namespace));
        assert_eq!(answer.status, status, "{namespace}: {answer:?}");
        match status {
            401 => {
                assert!(answer.head.contains("\r\nwww-authenticate: bearer"), "{answer:?}");
                assert_eq!(answer.body, format!("{{\"error\":\"{UNKNOWN}\"}}"));
            }
            403 => assert_eq!(answer.body, format!("{{\"error\":\"{FORBIDDEN}\"}}")),
            _ => assert_eq!(answer.json()["status"], "OK"),
        }
    }
    // Unknown callers are refused before their request is parsed.
    assert_eq!(http_with_token(&node, None, "POST", "/v1/allow", "nonsense").status, 401);
    assert_eq!(http_with_token(&node, shop, "POST", "/v1/allow", "nonsense").status, 400);
    for path in ["/metrics", "/debug/status", "/debug/status.json"] {
        for (token, status) in [(shop, 403), (watcher, 200), (admin, 200), (None, 401)] {
            assert_eq!(http_with_token(&node, token, "GET", path, "").status, status, "{path}");
        }
    }
    // No lease is held, so 404 shows that the caller has the right.
    let path = "/debug/resource.json?id=db.users";
    for (token, status) in [(shop, 403), (watcher, 404), (admin, 404), (None, 401)] {
        assert_eq!(http_with_token(&node, token, "GET", path, "").status, status);
    }
    for path in ["/healthz", "/readyz"] {
        assert_eq!(http_with_token(&node, None, "GET", path, "").status, 200);
    }
    assert_eq!(
        (
            http_with_token(&node, None, "GET", "/x", "").status,
            http_with_token(&node, shop, "GET", "/x", "").status
        ),
        (401, 404)
    );
    let counted = |reason| refusals(&node, &callers.admin, "http", reason);
    assert_eq!((counted("unknown_token"), counted("no_credentials")), (1.0, 7.0));
    assert_eq!((counted("scope"), counted("role")), (2.0, 5.0));
}

#[test]
fn valid_authorization_headers() {
    let (limits, callers) = (LimitsFile::new(LIMITS), Callers::new());
    let node = callers.node(&limits);
    let status = |headers: &str| send(node.http, "GET", "/x", headers, b"").unwrap().status;
    let token = &callers.shop;
    for (headers, known) in [
        (format!("Authorization: Bearer {token}\r\n"), true),
        (format!("authorization: bEARER {token}\r\n"), true),
        (format!("Authorization: Basic {token}\r\n"), false),
        (format!("Authorization: {token}\r\n"), false),
        (format!("Authorization: Bearer  {token}\r\n"), false),
        (format!("Authorization: Bearer {token}x\r\n"), false),
        ("Authorization: Bearer\r\n".to_owned(), false),
        (format!("Authorization: Bearer {}\r\n", "x".repeat(5000)), false),
        (format!("Authorization: Bearer {token}\r\nAuthorization: Bearer {token}\r\n"), false),
    ] {
        assert_eq!(status(&headers), if known { 404 } else { 401 }, "{headers}");
    }
}
