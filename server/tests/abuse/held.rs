//! Streams that never end: the memory that they take, and that they do not take the places of other
//! callers.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use tempfile::TempDir;
use tollgate_proto::quotaservice::quota_service_client::QuotaServiceClient;

use super::leases::call_until_stopped;
use super::measure::{Target, assert_withstands, duration};
use testkit::callers::{token, with_token};
use testkit::fault_proxy::{Fault, FaultProxy};
use testkit::grpc::request;
use testkit::{Redis, runtime};

/// Streams per connection.
const STREAMS: usize = 200;

/// A request that is sent on each stream.
#[derive(Clone)]
struct Held {
    target: SocketAddr,
    connections: usize,
    path: &'static str,
    content_type: &'static str,
    body: Bytes,
    /// A GET request without a body.
    whole: bool,
    /// Flow-control window of responses; with 0 they are never read.
    window: u32,
}

impl Held {
    fn grpc(target: SocketAddr, connections: usize, path: &'static str, body: Bytes) -> Self {
        let content_type = "application/grpc";
        Self { target, connections, path, content_type, body, whole: false, window: 65_535 }
    }

    /// Opens all streams, and holds them until stopped. h2 answers the node's pings.
    fn hold(&self, stop: &AtomicBool) {
        runtime().block_on(async {
            let all: Vec<_> = (0..self.connections)
                .map(|_| {
                    let this = self.clone();
                    tokio::spawn(async move { this.connection().await })
                })
                .collect();
            while !stop.load(Ordering::Relaxed) {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            all.iter().for_each(tokio::task::JoinHandle::abort);
        });
    }

    /// One connection, reopened when the node closes it.
    async fn connection(&self) {
        loop {
            // The node may close it at any time.
            let _ = self.streams().await;
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    async fn streams(&self) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        let stream = tokio::net::TcpStream::connect(self.target).await?;
        let mut builder = h2::client::Builder::new();
        let handshake = builder.initial_window_size(self.window).handshake::<_, Bytes>(stream);
        let (mut sender, connection) = handshake.await?;
        let connection = tokio::spawn(connection);
        let mut held = Vec::new();
        for _ in 0..STREAMS {
            sender = sender.ready().await?;
            let request = http::Request::builder()
                .method(if self.whole { http::Method::GET } else { http::Method::POST })
                .uri(format!("http://node{}", self.path))
                .header("content-type", self.content_type)
                .body(())?;
            let (answer, mut body) = sender.send_request(request, self.whole)?;
            // Empty frames would be another attack.
            if !self.body.is_empty() {
                body.send_data(self.body.clone(), false)?;
            }
            held.push((answer, body));
        }
        connection.await??;
        Ok(())
    }
}

/// A message of this length, without its last byte.
fn unfinished(length: u32) -> Bytes {
    let mut bytes = vec![0];
    bytes.extend(length.to_be_bytes());
    bytes.resize(5 + length as usize - 1, 0);
    bytes.into()
}

#[test]
fn health_without_its_last_byte() {
    if duration().is_none() {
        return;
    }
    let access = Access::new();
    let target = Target::embedded(&["--access", &access.path()]).with_token(&access.quiet);
    let (grpc, path) = (target.node.grpc, "/grpc.health.v1.Health/Check");
    let held = Held::grpc(grpc, 20, path, unfinished(130_000));
    assert_withstands("health without its last byte", &target, 20, 1, move |_, stop| {
        held.hold(stop)
    });
}

/// An access file with an honest caller and an abuser, and their tokens.
struct Access {
    folder: TempDir,
    quiet: String,
    abuser: String,
}

impl Access {
    fn new() -> Self {
        let ((quiet, quiet_hash), (abuser, abuser_hash)) = (token(), token());
        let access = Self { folder: TempDir::new().unwrap(), quiet, abuser };
        let text = format!(
            "callers:
  - {{ name: quiet, token_sha256: [{quiet_hash}], namespaces: ['quiet'] }}
  - {{ name: abuser, token_sha256: [{abuser_hash}], namespaces: ['flood'] }}
"
        );
        std::fs::write(access.path(), text).unwrap();
        access
    }

    fn path(&self) -> String {
        self.folder.path().join("access.yaml").to_str().unwrap().to_owned()
    }
}

#[test]
fn bodies_without_their_last_byte() {
    if duration().is_none() {
        return;
    }
    let target = Target::embedded(&[]);
    let held = Held {
        content_type: "application/json",
        body: Bytes::from(vec![b' '; 1_000_000]),
        ..Held::grpc(target.node.http, 4, "/v1/allow", Bytes::new())
    };
    assert_withstands("bodies of 1 MB", &target, 4, 1, move |_, stop| held.hold(stop));
}

#[test]
fn lease_requests_without_their_last_byte() {
    if duration().is_none() {
        return;
    }
    let target = Target::embedded(&[]);
    let path = "/doorman.Capacity/GetCapacity";
    let held = Held::grpc(target.node.grpc, 4, path, unfinished(1 << 20));
    assert_withstands("lease requests of 1 MiB", &target, 4, 1, move |_, stop| held.hold(stop));
}

#[test]
fn allow_requests_of_4_mb() {
    if duration().is_none() {
        return;
    }
    let target = Target::embedded(&[]);
    let path = "/quotaservice.QuotaService/Allow";
    let held = Held::grpc(target.node.grpc, 20, path, unfinished(4_000_000));
    assert_withstands("decisions of 4 MB", &target, 20, 1, move |_, stop| held.hold(stop));
}

#[test]
fn http2_answers_that_are_never_read() {
    if duration().is_none() {
        return;
    }
    let target = Target::embedded(&[]);
    let held = Held {
        whole: true,
        window: 0,
        ..Held::grpc(target.node.http, 10, "/metrics", Bytes::new())
    };
    assert_withstands("answers nobody takes", &target, 10, 1, move |_, stop| held.hold(stop));
}

#[test]
fn reflection_answers_that_are_never_read() {
    if duration().is_none() {
        return;
    }
    let target = Target::embedded(&[]);
    // `list_services` with an empty content, many times.
    let message = [&[0, 0, 0, 0, 2][..], &[0x3a, 0]].concat();
    let path = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo";
    let body = Bytes::from(message.repeat(2_000));
    let held = Held { window: 0, ..Held::grpc(target.node.grpc, 40, path, body) };
    assert_withstands("reflection answers nobody takes", &target, 40, 1, move |_, stop| {
        held.hold(stop)
    });
}

#[test]
fn streams_without_a_message() {
    if duration().is_none() {
        return;
    }
    let target = Target::embedded(&["--max-in-flight", "2000"]);
    let path = "/quotaservice.QuotaService/Allow";
    let held = Held::grpc(target.node.grpc, 12, path, Bytes::new());
    assert_withstands("streams without a message", &target, 12, 1, move |_, stop| held.hold(stop));
}

#[test]
fn lease_streams_without_a_message() {
    if duration().is_none() {
        return;
    }
    let target = Target::embedded(&["--max-in-flight", "2000"]);
    let path = "/doorman.Capacity/GetCapacity";
    let held = Held::grpc(target.node.grpc, 12, path, Bytes::new());
    assert_withstands("lease streams without a message", &target, 12, 1, move |_, stop| {
        held.hold(stop)
    });
}

/// A named caller with more concurrent calls than there are slots, on a slow store.
#[test]
fn a_named_caller_that_wants_all_slots() {
    if duration().is_none() {
        return;
    }
    let (access, redis) = (Access::new(), Redis::start());
    let store = FaultProxy::to(redis.port());
    let url = store.url();
    let args = ["--threads", "1", "--max-in-flight", "100", "--store-timeout", "1s"];
    let rights = access.path();
    let args = [&args[..], &["--store", &url, "--access", &rights]].concat();
    let target = Target::embedded(&args).with_token(&access.quiet);
    store.set(Fault::Delay(Duration::from_millis(10)));
    let (grpc, abuser) = (target.node.grpc, access.abuser.clone());
    let ask = move |_: usize, stop: &AtomicBool| {
        let abuser = abuser.clone();
        call_until_stopped(grpc, 300, stop, move |channel| {
            let asked = with_token(Some(&abuser), request("flood", "b", 1));
            // It may be rejected.
            async move { drop(QuotaServiceClient::new(channel).allow(asked).await) }
        });
    };
    assert_withstands("a named caller with 300 calls under way", &target, 1, 1, ask);
}
