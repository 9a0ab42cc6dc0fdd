//! The layer on Tokio's clock, with a fake: what it answers, and when it calls the inner service.

use std::convert::Infallible;
use std::future::{Ready, poll_fn, ready};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use http_body_util::BodyExt as _;
use tokio::time::{Instant, sleep, timeout};
use tollgate_client::{Bucket, Client, Fake, FakeAnswer, Fallback, QuotaLayer};
use tonic::{Code, Status};
use tonic_types::StatusExt as _;
use tower::{Layer as _, Service, ServiceExt as _};

const SECOND: Duration = Duration::from_secs(1);

type Request = http::Request<()>;

/// A service that handles one request for each time that it was found ready. A clone was not.
#[derive(Default)]
struct Strict {
    is_ready: bool,
    /// The headers `grpc-timeout` of the requests.
    handled: Arc<Mutex<Vec<Option<String>>>>,
}

impl Strict {
    fn handled(&self) -> Vec<Option<String>> {
        self.handled.lock().unwrap().clone()
    }
}

impl Clone for Strict {
    fn clone(&self) -> Self {
        Self { is_ready: false, handled: Arc::clone(&self.handled) }
    }
}

impl Service<Request> for Strict {
    type Response = http::Response<String>;
    type Error = Infallible;
    type Future = Ready<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        assert!(!self.is_ready, "a place in it is lost");
        self.is_ready = true;
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request) -> Self::Future {
        assert!(self.is_ready, "called without a place");
        self.is_ready = false;
        let timeout = request.headers().get("grpc-timeout");
        let timeout = timeout.map(|timeout| timeout.to_str().unwrap().to_owned());
        self.handled.lock().unwrap().push(timeout);
        ready(Ok(http::Response::new("handled".to_owned())))
    }
}

/// A layer for the bucket that is a request's path.
fn quota(client: Client) -> QuotaLayer<impl Fn(&Request) -> Option<Bucket>> {
    QuotaLayer::new(client, |request: &Request| match request.uri().path() {
        "/free" => None,
        path => Some(Bucket::new("web", path.to_owned())),
    })
}

fn fake(answer: FakeAnswer) -> (Fake, Client) {
    let fake = Fake::new(answer);
    let client = fake.client().build().unwrap();
    (fake, client)
}

fn request(headers: &[(&'static str, &'static str)]) -> Request {
    let request = http::Request::get("/page");
    let request =
        headers.iter().fold(request, |request, (name, text)| request.header(*name, *text));
    request.body(()).unwrap()
}

/// A call with this timeout.
fn call(timeout: &'static str) -> Request {
    request(&[("content-type", "application/grpc"), ("grpc-timeout", timeout)])
}

/// What a layer in front of `inner` answers: status, headers and text.
async fn answer<F>(
    quota: &QuotaLayer<F>,
    inner: &Strict,
    request: Request,
) -> http::Response<String>
where
    F: Fn(&Request) -> Option<Bucket>,
{
    let response = quota.layer(inner.clone()).oneshot(request).await.unwrap();
    let (parts, body) = response.into_parts();
    let text = body.collect().await.unwrap().to_bytes();
    http::Response::from_parts(parts, String::from_utf8(text.into()).unwrap())
}

async fn status<F>(quota: &QuotaLayer<F>, inner: &Strict, request: Request) -> Status
where
    F: Fn(&Request) -> Option<Bucket>,
{
    let answer = answer(quota, inner, request).await;
    assert_eq!((answer.status().as_u16(), &**answer.body()), (200, ""), "{answer:?}");
    Status::from_header_map(answer.headers()).unwrap()
}

#[tokio::test(start_paused = true)]
async fn the_content_type_decides_the_form_of_a_refusal() {
    let (_fake, client) = fake(FakeAnswer::Refuse(Some(SECOND)));
    let (quota, inner) = (quota(client), Strict::default());
    for kind in ["application/grpc", "application/grpc+proto", "application/grpc-web+proto"] {
        let answer = answer(&quota, &inner, request(&[("content-type", kind)])).await;
        assert_eq!(answer.status(), 200);
        assert_eq!(answer.headers()["content-type"], kind);
        assert_eq!(answer.headers()["grpc-status"], "8");
    }
    let json: &[_] = &[("content-type", "application/json")];
    for headers in [json, &[], &[("grpc-timeout", "0S")]] {
        let answer = answer(&quota, &inner, request(headers)).await;
        assert_eq!(answer.status(), 429, "{answer:?}");
        assert!(!answer.headers().contains_key("grpc-status"), "{answer:?}");
    }
    assert_eq!(inner.handled(), []);
}

#[tokio::test(start_paused = true)]
async fn each_answer_of_the_quota_service_has_its_status() {
    let ms = Duration::from_millis;
    let cases = [
        (FakeAnswer::Refuse(Some(ms(2001))), 429, Some("3"), Code::ResourceExhausted),
        (FakeAnswer::Refuse(Some(ms(2000))), 429, Some("2"), Code::ResourceExhausted),
        (FakeAnswer::Refuse(Some(ms(1))), 429, Some("1"), Code::ResourceExhausted),
        (FakeAnswer::Refuse(None), 429, None, Code::ResourceExhausted),
        (FakeAnswer::NoBucket, 429, None, Code::ResourceExhausted),
        (FakeAnswer::Invalid, 400, None, Code::InvalidArgument),
        (FakeAnswer::NoNode, 503, None, Code::Unavailable),
    ];
    for (given, http, retry_after, grpc) in cases {
        let (_fake, client) = fake(given.clone());
        let (quota, inner) = (quota(client), Strict::default());
        let answer = answer(&quota, &inner, request(&[])).await;
        assert_eq!(answer.status(), http, "{given:?}");
        let header = answer.headers().get("retry-after").map(|header| header.to_str().unwrap());
        assert_eq!(header, retry_after, "{given:?}");
        assert!(!answer.body().is_empty(), "{given:?}");
        let status = status(&quota, &inner, call("9S")).await;
        assert_eq!((status.code(), status.message()), (grpc, &**answer.body()), "{given:?}");
        let delay = status.get_details_retry_info().and_then(|info| info.retry_delay);
        let given_delay = match given {
            FakeAnswer::Refuse(delay) => delay,
            _ => None,
        };
        assert_eq!(delay, given_delay, "{given:?}");
        assert_eq!(inner.handled(), []);
    }
}

#[tokio::test(start_paused = true)]
async fn without_a_node_the_fallback_decides() {
    let client = Fake::new(FakeAnswer::NoNode).client().fallback(Fallback::Allow).build().unwrap();
    let inner = Strict::default();
    assert_eq!(answer(&quota(client), &inner, request(&[])).await.status(), 200);
    assert_eq!(inner.handled(), [None]);
}

#[tokio::test(start_paused = true)]
async fn a_request_without_a_bucket_takes_no_tokens() {
    let (fake, client) = fake(FakeAnswer::Refuse(None));
    let inner = Strict::default();
    let request = http::Request::get("/free").body(()).unwrap();
    let answer = answer(&quota(client), &inner, request).await;
    assert_eq!((answer.status().as_u16(), &**answer.body()), (200, "handled"));
    assert!(fake.asked("web", "/free").is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_request_waits_no_longer_than_the_layer_says() {
    let (fake, client) = fake(FakeAnswer::GrantAfter(3 * SECOND));
    let (quota, inner) = (quota(client), Strict::default());
    // Without a word, it does not wait.
    let start = Instant::now();
    let refused = answer(&quota, &inner, request(&[])).await;
    assert_eq!(refused.status(), 429);
    assert_eq!(refused.headers()["retry-after"], "3");
    assert_eq!(start.elapsed(), Duration::ZERO);
    let quota = quota.max_wait(4 * SECOND);
    assert_eq!(answer(&quota, &inner, request(&[])).await.status(), 200);
    assert!(start.elapsed() >= 3 * SECOND && start.elapsed() < 4 * SECOND);
    fake.answer("web", "/page", FakeAnswer::GrantAfter(5 * SECOND));
    assert_eq!(answer(&quota, &inner, request(&[])).await.status(), 429);
    assert_eq!(inner.handled(), [None]);
}

#[tokio::test(start_paused = true)]
async fn a_call_goes_on_with_what_is_left_of_its_timeout() {
    let (_fake, client) = fake(FakeAnswer::GrantAfter(3 * SECOND));
    let (quota, inner) = (quota(client).max_wait(60 * SECOND), Strict::default());
    answer(&quota, &inner, call("10S")).await;
    // A malformed timeout is the service's business, and so is that of a request of HTTP.
    answer(&quota, &inner, call("10")).await;
    answer(&quota, &inner, request(&[("grpc-timeout", "10S")])).await;
    let handled: Vec<String> = inner.handled().into_iter().flatten().collect();
    let left: u32 = handled[0].trim_end_matches('u').parse().unwrap();
    assert!(left <= 7_000_000 && left > 6_900_000, "{left}");
    assert_eq!(handled[1..], ["10", "10S"]);
}

#[tokio::test(start_paused = true)]
async fn a_call_whose_timeout_is_shorter_than_the_wait_is_refused_within_it() {
    let (_fake, client) = fake(FakeAnswer::GrantAfter(3 * SECOND));
    let (quota, inner) = (quota(client).max_wait(60 * SECOND), Strict::default());
    let start = Instant::now();
    for timeout in ["3S", "1m", "5n"] {
        let status = status(&quota, &inner, call(timeout)).await;
        assert_eq!(status.code(), Code::ResourceExhausted, "{timeout}: {status}");
    }
    assert!(start.elapsed() <= 3 * SECOND, "{:?}", start.elapsed());
    assert_eq!(inner.handled(), []);
}

#[tokio::test(start_paused = true)]
async fn a_call_with_nothing_left_of_its_timeout_is_not_made() {
    let (_fake, client) = fake(FakeAnswer::Grant);
    let inner = Strict::default();
    let status = status(&quota(client), &inner, call("0S")).await;
    assert_eq!(status.code(), Code::DeadlineExceeded, "{status}");
    assert_eq!(inner.handled(), []);
}

/// The service that was found ready handles the request, not its clone. And while one request
/// waits, the next may be accepted.
#[tokio::test(start_paused = true)]
async fn each_request_is_handled_by_the_service_that_was_ready_for_it() {
    let (fake, client) = fake(FakeAnswer::GrantAfter(3 * SECOND));
    let inner = Strict::default();
    let mut service = quota(client).max_wait(60 * SECOND).layer(inner.clone());
    let mut waiting = Vec::new();
    for _ in 0..3 {
        poll_fn(|cx| service.poll_ready(cx)).await.unwrap();
        waiting.push(tokio::spawn(service.call(request(&[]))));
    }
    sleep(SECOND).await;
    assert_eq!(fake.asked("web", "/page"), [1, 1, 1]);
    assert_eq!(inner.handled(), [], "called before the tokens may be used");
    for one in waiting {
        assert_eq!(one.await.unwrap().unwrap().status(), 200);
    }
    assert_eq!(inner.handled().len(), 3);
}

#[tokio::test(start_paused = true)]
async fn a_request_that_is_dropped_while_it_waits_is_not_handled() {
    let (fake, client) = fake(FakeAnswer::GrantAfter(3 * SECOND));
    let inner = Strict::default();
    let quota = quota(client).max_wait(60 * SECOND);
    let waiting = answer(&quota, &inner, request(&[]));
    timeout(SECOND, waiting).await.unwrap_err();
    sleep(60 * SECOND).await;
    assert_eq!(fake.asked("web", "/page"), [1]);
    assert_eq!(inner.handled(), []);
    // One that is never polled takes no tokens.
    let mut service = quota.layer(inner.clone());
    poll_fn(|cx| service.poll_ready(cx)).await.unwrap();
    drop(service.call(request(&[])));
    assert_eq!(fake.asked("web", "/page"), [1]);
}
