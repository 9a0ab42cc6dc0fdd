//! Tests of connections with a real client, over in-memory streams and sockets.

use std::future::pending;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use h2::client::{self, SendRequest};
use http::Method;
use tokio::task::JoinHandle;

use super::*;

mod ends;
mod requests;
mod turns;

/// Connects a client to a server that answers with `answer`. Returns the client and the tasks of
/// both ends.
async fn connected<F: Future<Output = ()> + Send + 'static>(
    stop: impl Future<Output = ()> + Send + 'static,
    answer: impl Fn(Request<RecvStream>, Responder) -> F + Send + Sync + 'static,
) -> (SendRequest<Bytes>, JoinHandle<Result<(), h2::Error>>, JoinHandle<()>) {
    let (client_io, server_io) = tokio::io::duplex(1 << 16);
    let server = tokio::spawn(async move {
        serve(server_io, DEFAULT_TIMEOUTS, stop, |request, to| Some(answer(request, to))).await
    });
    let (sender, connection) = client::handshake(client_io).await.expect("a handshake");
    (sender, tokio::spawn(connection), server)
}

fn request() -> Request<()> {
    Request::builder().method(Method::POST).uri("http://node/").body(()).expect("a request")
}

/// Counts the instances that exist.
struct CountGuard(Arc<AtomicUsize>);

impl CountGuard {
    fn new(count: &Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(count))
    }
}

impl Drop for CountGuard {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

async fn wait_until(condition: impl Fn() -> bool) {
    let met = async {
        while !condition() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), met).await.expect("the condition in time");
}

/// Waits until the server accepts no more requests.
async fn wait_until_refused(sender: &SendRequest<Bytes>) {
    let refused = async {
        while sender.clone().ready().await.is_ok() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), refused).await.expect("no more requests");
}

/// What a client sends first: the preface, and SETTINGS without parameters.
const GREETING: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
