//! Health checks and watches.

use super::super::call::MAX_LONG_CALLS;
use super::super::head::HEALTH;
use super::*;

#[tokio::test]
async fn health_watches_per_connection_are_limited() {
    let (mut sender, grpc_service) = client(Silent, health()).await;
    let mut watches = Vec::new();
    for _ in 0..MAX_LONG_CALLS {
        let (headers, watch) = call_health(&mut sender, WATCH, true).await;
        assert!(!headers.contains_key(GRPC_STATUS), "{headers:?}");
        watches.push(watch);
    }
    let (headers, _) = call_health(&mut sender, WATCH, true).await;
    assert_eq!(headers[GRPC_STATUS], "8", "above the limit");
    let (headers, _) = call_health(&mut connected(&grpc_service).await, WATCH, true).await;
    assert!(!headers.contains_key(GRPC_STATUS), "another connection has its own limit");
    assert_checks_are_answered(&mut sender).await;
    let (_, mut body) = watches.pop().expect("a watch");
    body.send_reset(h2::Reason::CANCEL);
    let freed =
        async { while call_health(&mut sender, WATCH, true).await.0.contains_key(GRPC_STATUS) {} };
    tokio::time::timeout(Duration::from_secs(10), freed).await.expect("a slot is free again");
}

#[tokio::test]
async fn unknown_health_methods_are_refused() {
    // Calls that reach the router get another answer.
    let router = axum::Router::new().fallback(async || "here");
    let (mut sender, grpc_service) = client(Silent, router.into()).await;
    // All slots are taken. Health needs none.
    assert!(grpc_service.limits.requests.begin(None));
    for path in ["List", "check", "Watch/", ""] {
        let (headers, _) = call_health(&mut sender, &format!("{HEALTH}{path}"), true).await;
        assert_eq!(headers[GRPC_STATUS], "12", "{path}");
    }
}

#[tokio::test]
async fn health_checks_time_out_and_watches_do_not() {
    let timeouts = Timeouts { call: Duration::from_millis(100), ..DEFAULT_TIMEOUTS };
    let grpc_service = grpc_service(Silent, health(), timeouts, Budget::unlimited());
    let mut sender = connected(&grpc_service).await;
    let (headers, _) = call_health(&mut sender, CHECK, false).await;
    assert_eq!(headers[GRPC_STATUS], "4", "it times out: {headers:?}");
    let (headers, (mut received, _)) = call_health(&mut sender, WATCH, true).await;
    assert!(!headers.contains_key(GRPC_STATUS), "{headers:?}");
    received.data().await.expect("the status").expect("data");
    let more = tokio::time::timeout(Duration::from_millis(300), received.data());
    assert!(more.await.is_err(), "a watch stays open");
}

#[tokio::test]
async fn a_watch_past_its_deadline_ends_with_a_status() {
    let (mut sender, _) = client(Silent, health()).await;
    for ended in [true, false] {
        let (response, mut body) = begin_call_within(&mut sender, WATCH, Some("300m"));
        body.send_data(framed(&[]), ended).expect("sent");
        let mut received = response.await.expect("an answer").into_body();
        while let Some(data) = received.data().await {
            data.expect("no reset");
        }
        let trailers = received.trailers().await.expect("no reset").expect("trailers");
        assert_eq!(trailers[GRPC_STATUS], "4", "{trailers:?}");
    }
}
