//! Limits on what clients may leave unfinished: slots, flow-control windows, deadlines and buffered
//! bytes.

use std::future::poll_fn;
use std::task::Poll;

use super::super::call::MAX_UNFINISHED;
use super::*;
use crate::metrics::BudgetMetrics;

#[tokio::test]
async fn an_unfinished_request_holds_no_slot() {
    let (mut sender, _) = client(MemoryStore::new(), Routes::default()).await;
    let mut open_calls = Vec::new();
    for path in [ALLOW, LEASES].into_iter().cycle().take(100) {
        let (response, mut body) = begin_call(&mut sender, path);
        body.send_data(allow_request().slice(..7), false).expect("sent");
        open_calls.push((response, body));
    }
    settle().await;
    let response = send_call(&mut sender, ALLOW, allow_request());
    assert_eq!(status(response).await, "none", "answered with a message");
}

/// Four frames of unread data would fill the connection's window of 65,535 bytes.
#[tokio::test]
async fn discarded_data_does_not_fill_the_window() {
    const FRAME: usize = 16 << 10;
    let too_long = framed(&[0; 2 * FRAME]).slice(..FRAME);
    let two_messages = [framed(&[]), vec![0; FRAME].into()].concat().into();
    for (data, expected) in [(too_long, "11"), (two_messages, "12")] {
        let (mut sender, _) = client(Silent, health()).await;
        let mut refused = Vec::new();
        for _ in 0..4 {
            let (response, mut body) = begin_call(&mut sender, CHECK);
            body.send_data(Bytes::clone(&data), false).expect("sent");
            assert_eq!(status(response).await, expected);
            refused.push(body);
        }
        assert_checks_are_answered(&mut sender).await;
        for body in &mut refused {
            let reset = poll_fn(|context| Poll::Ready(body.poll_reset(context))).await;
            assert!(reset.is_pending(), "answered before the refused requests end: {reset:?}");
        }
    }
}

/// Neither the bytes of the message nor those that follow it.
#[tokio::test]
async fn data_of_watches_does_not_fill_the_window() {
    const FRAME: usize = 16 << 10;
    let (mut sender, _) = client(Silent, health()).await;
    let mut watches = Vec::new();
    for _ in 0..5 {
        let (response, mut body) = begin_call(&mut sender, WATCH);
        // A field that the health service does not know.
        let message = [&[0x7a, 0xf4, 0x07][..], &[0; 1012]].concat();
        body.send_data(framed(&message), false).expect("sent");
        let response = response.await.expect("an answer");
        body.send_data(vec![0; FRAME].into(), false).expect("sent");
        watches.push((response, body));
    }
    assert_checks_are_answered(&mut sender).await;
}

#[tokio::test]
async fn a_deadline_ends_an_unfinished_request() {
    let (mut sender, _) = client(Silent, Routes::default()).await;
    for path in [ALLOW, LEASES] {
        let (response, mut body) = begin_call_within(&mut sender, path, Some("50m"));
        body.send_data(framed(&[0; 1000]).slice(..500), false).expect("sent");
        assert_eq!(status(response).await, "4", "{path}");
        body.send_data(Bytes::from_static(&[0; 505]), true).expect("the stream is open");
    }
}

#[tokio::test]
async fn a_deadline_ends_the_wait_for_a_store() {
    let (mut sender, _) = client(Silent, Routes::default()).await;
    let (response, mut body) = begin_call_within(&mut sender, ALLOW, Some("50m"));
    body.send_data(allow_request(), true).expect("sent");
    let response = response.await.expect("an answer");
    assert_eq!(response.headers()[GRPC_STATUS], "4", "{response:?}");
}

#[tokio::test]
async fn unfinished_health_checks_are_limited() {
    let (mut sender, _) = client(Silent, health()).await;
    let mut open_calls = Vec::new();
    for _ in 0..2 * MAX_UNFINISHED {
        let (response, mut body) = begin_call(&mut sender, CHECK);
        body.send_data(framed(&[0; 100]).slice(..100), false).expect("sent");
        open_calls.push((response, body));
    }
    settle().await;
    assert_checks_are_answered(&mut sender).await;
    for (number, (response, _body)) in open_calls.into_iter().enumerate() {
        let expected = if number < MAX_UNFINISHED { "4" } else { "8" };
        assert_eq!(status(response).await, expected, "{number}");
    }
    let (response, mut body) = begin_call(&mut sender, CHECK);
    body.send_data(framed(&[]).slice(..1), false).expect("sent");
    settle().await;
    body.send_data(framed(&[]).slice(1..), true).expect("sent");
    assert_eq!(status(response).await, "none", "slots are free again");
}

#[tokio::test]
async fn long_requests_stay_within_the_budget() {
    const LIMIT: usize = 1 << 20;
    let budget = Budget::new(LIMIT, BudgetMetrics::noop());
    let grpc_service = grpc_service(Silent, Routes::default(), DEFAULT_TIMEOUTS, budget.clone());
    // 20 MB in total, of unfinished messages.
    let mut open_calls = Vec::new();
    for _ in 0..4 {
        let mut sender = connected(&grpc_service).await;
        for _ in 0..5 {
            let (response, mut body) = begin_call(&mut sender, LEASES);
            body.send_data(framed(&[0; 1_000_000]).slice(..999_000), false).expect("queued");
            open_calls.push((response, body));
        }
    }
    wait_until(|| budget.used() >= LIMIT / 2).await;
    for _ in 0..200 {
        assert!(budget.used() <= LIMIT + (256 << 10), "{}", budget.used());
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    // The router has no lease methods. UNIMPLEMENTED shows that the request was read and found a
    // slot.
    let response = send_call(&mut connected(&grpc_service).await, LEASES, framed(&[0x0a, 1, b'c']));
    assert_eq!(status(response).await, "12", "other requests are served");
    drop(open_calls);
    wait_until(|| budget.used() == 0).await;
}
