//! Tests of the client against a server that can be stopped.

use std::net::SocketAddr;

use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tollgate_client::connection::Credentials;
use tollgate_proto::quotaservice::quota_service_server::{QuotaService, QuotaServiceServer};
use tollgate_proto::quotaservice::{AllowRequest, AllowResponse};
use tonic::transport::server::TcpIncoming;
use tonic::{Response, Status};

use super::*;
use crate::load::protocol::Allow;

/// A server whose answer depends on the requested bucket name.
struct EchoServer;

#[tonic::async_trait]
impl QuotaService for EchoServer {
    async fn allow(
        &self,
        request: tonic::Request<AllowRequest>,
    ) -> Result<Response<AllowResponse>, Status> {
        let name = &request.get_ref().bucket_name;
        match name.as_str() {
            "never" => std::future::pending().await,
            "refused" => Err(Status::permission_denied("who?")),
            // Longer than the maximum frame size, so it arrives in several frames.
            "long" => Ok(name.repeat(10_000)),
            _ => Ok(name.clone()),
        }
        .map(|bucket| Response::new(AllowResponse { bucket, ..AllowResponse::default() }))
    }
}

async fn serve(at: SocketAddr) -> (SocketAddr, JoinHandle<()>) {
    let listener = TcpListener::bind(at).await.expect("an address");
    let address = listener.local_addr().expect("an address");
    let server = tokio::spawn(async move {
        let incoming = TcpIncoming::from(listener);
        let server = tonic::transport::Server::builder()
            .add_service(QuotaServiceServer::new(EchoServer))
            .serve_with_incoming(incoming);
        let _ = server.await;
    });
    (address, server)
}

const ANY: &str = "127.0.0.1:0";
const LONG_TIMEOUT: Duration = Duration::from_secs(10);

async fn caller(address: SocketAddr, timeout: Duration) -> Caller<Allow> {
    let target = Target::new(address.into(), Credentials::default()).expect("a target");
    Caller::dial(&target, timeout).await
}

async fn ask(caller: &mut Caller<Allow>, name: &str) -> Result<String, &'static str> {
    let request = AllowRequest { bucket_name: name.to_owned(), ..AllowRequest::default() };
    let answer = caller.ask(&request, Instant::now()).await;
    answer.map(|answer| answer.bucket.clone()).map_err(|failure| Failure::name(failure.code()))
}

#[tokio::test]
async fn returns_answers_and_errors() {
    let (address, _server) = serve(ANY.parse().expect("an address")).await;
    let mut caller = caller(address, LONG_TIMEOUT).await;
    let mut other = caller.sibling();
    let long = "long".repeat(10_000);
    for (name, answer) in [
        ("b", Ok("b")),
        ("long", Ok(long.as_str())),
        ("refused", Err("PERMISSION_DENIED")),
        ("", Ok("")),
    ] {
        let (one, two) = tokio::join!(ask(&mut caller, name), ask(&mut other, name));
        assert_eq!(one.as_deref().map_err(|error| *error), answer);
        assert_eq!(one, two);
    }
}

#[tokio::test]
async fn caller_survives_a_timeout() {
    let (address, _server) = serve(ANY.parse().expect("an address")).await;
    let mut caller = caller(address, Duration::from_millis(50)).await;
    for _ in 0..2 {
        assert_eq!(ask(&mut caller, "never").await, Err("DEADLINE_EXCEEDED"));
    }
    let mut patient = caller.sibling();
    patient.timeout = LONG_TIMEOUT;
    assert_eq!(ask(&mut patient, "b").await, Ok("b".to_owned()));
}

/// A server on its own runtime, whose shutdown breaks all connections.
fn start_stoppable_server(at: SocketAddr) -> (SocketAddr, tokio::runtime::Runtime) {
    let started = std::thread::spawn(move || {
        let mut runtime = tokio::runtime::Builder::new_multi_thread();
        let runtime = runtime.enable_all().worker_threads(1).build().expect("a runtime");
        let (address, _server) = runtime.block_on(serve(at));
        (address, runtime)
    });
    started.join().expect("a server")
}

#[tokio::test]
async fn a_broken_connection_is_dialled_again() {
    let (address, server) = start_stoppable_server(ANY.parse().expect("an address"));
    let mut callers = [caller(address, LONG_TIMEOUT).await, caller(address, LONG_TIMEOUT).await];
    for caller in &mut callers {
        assert_eq!(ask(caller, "b").await, Ok("b".to_owned()));
    }
    let mut in_flight = callers[0].sibling();
    let (broken, ()) = tokio::join!(ask(&mut in_flight, "never"), async {
        tokio::task::yield_now().await;
        server.shutdown_background();
    });
    assert_eq!(broken, Err("UNAVAILABLE"));
    for caller in &mut callers {
        assert_eq!(ask(caller, "b").await, Err("UNAVAILABLE"), "nobody is there");
    }
    let (_, server) = start_stoppable_server(address);
    for caller in &mut callers {
        assert_eq!(ask(caller, "b").await, Ok("b".to_owned()));
    }
    server.shutdown_background();
}

#[test]
fn malformed_messages_are_rejected() {
    let mut answer = AllowResponse { bucket: "before".to_owned(), ..AllowResponse::default() };
    let good = frame(&mut BytesMut::new(), &AllowRequest::default());
    assert_eq!(decode(good, &mut answer), Some(()));
    assert_eq!(answer, AllowResponse::default(), "nothing stays of the answer before");
    for bad in [&[][..], &[0; 4], &[1, 0, 0, 0, 0], &[0, 0, 0, 0, 1], &[0, 0, 0, 0, 1, 0xff]] {
        assert_eq!(decode(Bytes::copy_from_slice(bad), &mut answer), None, "{bad:?}");
    }
}
