//! Many refusals on one connection.

use tokio::sync::Notify;

use super::*;
use crate::access::Access;

/// A store that answers each call after one notification.
#[derive(Clone)]
struct Signalled(Arc<Notify>, MemoryStore);

impl Store for Signalled {
    async fn decide(&self, asks: &[BucketRequest<'_>]) -> Outcomes {
        self.0.notified().await;
        self.1.decide(asks).await
    }
}

impl PermitStore for Signalled {
    async fn record_permit(
        &self,
        permit: &PermitKey<'_>,
        tokens: u64,
        within: Duration,
    ) -> Result<(), StoreError> {
        self.1.record_permit(permit, tokens, within).await
    }

    async fn use_permit(&self, permit: &PermitKey<'_>) -> Result<PermitUse, StoreError> {
        self.1.use_permit(permit).await
    }
}

/// Number of refusals of one kind on one connection. h2 closes it after 1,024 resets.
fn refusals() -> usize {
    let count = std::env::var("TOLLGATE_REFUSALS").ok();
    count.map_or(3_000, |count| count.parse().expect("a number"))
}

/// A call that is refused.
struct RefusedCall {
    path: &'static str,
    timeout: Option<&'static str>,
    /// What the client sends before the refusal.
    message: Bytes,
    /// Whether the request ends with `message`; it ends after the refusal otherwise.
    ends: bool,
    status: &'static str,
}

impl RefusedCall {
    /// A call whose message has not arrived completely when it is refused.
    fn unfinished(path: &'static str, status: &'static str) -> Self {
        let message = allow_request().slice(..7);
        Self { path, timeout: None, message, ends: false, status }
    }
}

/// Sends refused calls on one connection, with messages before and after the refusal. One call
/// waits for the store meanwhile, and health checks are answered.
async fn refuse_calls(call: &RefusedCall) {
    const LEFT_OPEN: usize = 16;
    let directory = tempfile::tempdir().expect("a directory");
    let callers = directory.path().join("access.yaml");
    let no_leases = "callers: [{ name: all, anyone: true, namespaces: ['*'] }]";
    std::fs::write(&callers, no_leases).expect("written");
    let access = Access::load(&callers, &Metrics::new()).expect("an access file");
    let guard = Guard::grpc(Some(Arc::new(access)), None);

    let signal = Arc::new(Notify::new());
    let store = Signalled(Arc::clone(&signal), MemoryStore::new());
    let (timeouts, budget) = (DEFAULT_TIMEOUTS, Budget::unlimited());
    let grpc_service = grpc_service(store, health(), timeouts, budget);
    let mut sender = connected_through(guard, &grpc_service).await;
    let waiting = send_call(&mut sender, ALLOW, allow_request());
    settle().await;
    assert!(!grpc_service.limits.requests.begin(None), "the waiting call holds the only slot");
    let mut left_open = Vec::new();
    for number in 0..refusals() {
        sender = sender.ready().await.expect("the connection is open");
        let (response, mut body) = begin_call_within(&mut sender, call.path, call.timeout);
        if number % 2 == 0 {
            settle().await;
        }
        body.send_data(call.message.clone(), call.ends).expect("sent");
        assert_eq!(status(response).await, call.status, "{}, {number}", call.path);
        if number < LEFT_OPEN {
            left_open.push(body);
        } else if !call.ends {
            body.send_data(allow_request(), true).expect("the stream is open");
        }
        if number % 100 == 0 {
            assert_checks_are_answered(&mut sender).await;
        }
    }
    signal.notify_one();
    assert_eq!(status(waiting).await, "none", "{}: the waiting call is answered", call.path);
}

#[tokio::test]
async fn refusals_do_not_close_the_connection() {
    let too_long = framed(&[0; 5 << 20]).slice(..100);
    let calls = [
        RefusedCall { message: allow_request(), ends: true, ..RefusedCall::unfinished(ALLOW, "8") },
        RefusedCall::unfinished("/no.Such/Method", "12"),
        RefusedCall::unfinished(LEASES, "7"),
        RefusedCall { message: too_long, ..RefusedCall::unfinished(ALLOW, "11") },
        RefusedCall { timeout: Some("1n"), ..RefusedCall::unfinished(ALLOW, "4") },
        RefusedCall { timeout: Some("1"), ..RefusedCall::unfinished(ALLOW, "13") },
    ];
    for call in &calls {
        refuse_calls(call).await;
    }
}
