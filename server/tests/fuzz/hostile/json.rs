//! The HTTP port: any method, path, headers and body lead to a status from 200 to 499.
//!
//! An input resembles HTTP/1.1: a line with method and path, headers, an empty line, the body. Lines
//! end with LF.

use std::net::IpAddr;
use std::sync::Arc;

use axum::body::Body;
use axum::extract::ConnectInfo;
use http::header::HOST;
use http::{HeaderName, HeaderValue, Method, Request, Uri};
use http_body_util::BodyExt as _;
use serde_json::Value;
use tollgate_server::access::Guard;
use tollgate_server::domain::time::ManualClock;
use tollgate_server::metrics::Metrics;
use tollgate_server::store::memory::MemoryStore;
use tollgate_server::transport::UseCases;
use tollgate_server::transport::budget::Budget;
use tollgate_server::transport::connection::DEFAULT_TIMEOUTS;
use tollgate_server::transport::http::ConnectionContext;
use tollgate_server::transport::http::{
    Admission, Hosts, NodeInfo, Pages, Services, metrics_page, nodes_page, router, status_pages,
};
use tollgate_server::transport::overload::RequestLimit;
use tower_service::Service as _;

use super::LIMITS;
use testkit::{START, Service, runtime};

/// Parses an input; `None` if it is not an HTTP request.
fn request(input: &[u8]) -> Option<Request<Body>> {
    let end = input.windows(2).position(|two| two == b"\n\n");
    let (head, body) = match end {
        Some(end) => (&input[..end], &input[end + 2..]),
        None => (input, &b""[..]),
    };
    let mut lines = head.split(|byte| *byte == b'\n');
    let first = lines.next()?;
    let space = first.iter().position(|byte| *byte == b' ')?;
    let mut request = Request::new(Body::from(body.to_vec()));
    *request.method_mut() = Method::from_bytes(&first[..space]).ok()?;
    *request.uri_mut() = Uri::try_from(&first[space + 1..]).ok()?;
    for line in lines {
        let colon = line.iter().position(|byte| *byte == b':')?;
        let name = HeaderName::from_bytes(&line[..colon]).ok()?;
        request
            .headers_mut()
            .append(name, HeaderValue::from_bytes(line[colon + 1..].trim_ascii()).ok()?);
    }
    if !request.headers().contains_key(HOST) {
        request.headers_mut().insert(HOST, HeaderValue::from_static("node"));
    }
    Some(request)
}

#[test]
fn any_request_over_http() {
    let runtime = runtime();
    let clock = ManualClock::new(START);
    let service = Service::new(MemoryStore::with_clock(clock.clone()), clock.clone(), LIMITS);
    let metrics = Arc::new(Metrics::new());
    let (status, make_status) =
        status_pages(NodeInfo::default(), Box::new(|| (true, 1)), service.capacity.clone());
    let (nodes, _) = nodes_page(NodeInfo::default(), service.capacity.clone());
    let (metrics_page, make_metrics) = metrics_page(Arc::clone(&metrics));
    runtime.spawn(make_metrics);
    let admission = Admission {
        requests: RequestLimit::new(1, metrics.shed("http")),
        hosts: Hosts::default(),
        timeouts: DEFAULT_TIMEOUTS,
    };
    let pages = Pages { metrics: metrics_page, status, nodes };
    let (took, ready) = (metrics.rpc_duration("http"), Box::new(|| Ok(())));
    let Service { allow, capacity, throttles, holds, documents, kill_switch, .. } = service;
    let services = Services {
        use_cases: UseCases { allow, capacity, throttles, holds },
        documents,
        kill_switch,
        envoy_headers: None,
    };
    let port = router(services, pages, took, ready, admission);
    let budget = Budget::unlimited();
    let peer = IpAddr::from([127, 0, 0, 1]);
    let context = ConnectionContext::new(Guard::http(None, None), peer, &budget);
    // A request for one of these pages waits for its next rendering, up to a second: skip it.
    drop(make_status);
    let is_rendered = |path: &str| !path.starts_with("/debug/status") && path != "/v1/nodes";
    testkit::fuzz::run("json", &[], |input| {
        clock.advance(10_000);
        let Some(mut request) = request(input).filter(|one| is_rendered(one.uri().path())) else {
            return;
        };
        request.extensions_mut().insert(ConnectInfo(context.clone()));
        let asks = |path| request.uri().path() == path && request.method() == Method::POST;
        let (allow, hits) = (asks("/v1/allow"), asks("/v1/throttle/request"));
        let holds =
            request.uri().path().starts_with("/v1/holds/") && request.method() == Method::POST;
        let (status, body) = runtime.block_on(async {
            let Ok(answer) = port.clone().call(request).await;
            let status = answer.status().as_u16();
            (status, answer.into_body().collect().await.unwrap().to_bytes())
        });
        assert!((200..500).contains(&status), "{status} {body:?}");
        if allow {
            let answer: Value = serde_json::from_slice(&body).expect("JSON");
            match status {
                200 => {
                    assert!(answer["tokensAvailable"].is_number(), "{answer}");
                    let granted: i64 = answer["tokensGranted"].as_str().unwrap().parse().unwrap();
                    assert!(granted == 0 || answer["status"] == "OK", "{answer}");
                }
                400 | 403 | 413 | 415 => assert!(answer["error"].is_string(), "{answer}"),
                status => panic!("{status} {answer}"),
            }
        }
        if holds {
            let answer: Value = serde_json::from_slice(&body).expect("JSON");
            match status {
                200 => assert!(answer.is_object(), "{answer}"),
                400 | 403 | 404 | 409 | 413 | 415 => {
                    assert!(answer["error"].is_string(), "{answer}")
                }
                status => panic!("{status} {answer}"),
            }
        }
        if hits {
            let answer: Value = serde_json::from_slice(&body).expect("JSON");
            match status {
                200 => {
                    let granted: i64 = answer["granted"].as_str().unwrap().parse().unwrap();
                    assert_eq!(granted > 0, answer["status"] == "OK", "{answer}");
                }
                400 | 403 | 404 | 409 | 413 | 415 => {
                    assert!(answer["error"].is_string(), "{answer}")
                }
                status => panic!("{status} {answer}"),
            }
        }
    });
}
