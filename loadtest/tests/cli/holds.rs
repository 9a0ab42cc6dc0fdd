//! `tollgate-loadtest holds` from the outside: its exit codes, its report, and what it finds.

use std::fs;
use std::path::PathBuf;

use tempfile::TempDir;
use tollgate_proto::tollgate::v1::holds_server::{Holds, HoldsServer};
use tollgate_proto::tollgate::v1::{
    EndSessionRequest, EndSessionResponse, Hold, KeepAliveRequest, KeepAliveResponse,
    ReleaseRequest, ReleaseResponse, RenewedSession, ReserveRequest, ReserveResponse,
    TransferRequest, TransferResponse,
};
use tonic::{Request, Response, Status};

use crate::common::{Run, run, serve};
use crate::node::Node;

const SHORT: &str = "--warmup 50ms --duration 1s --clients 20 --connections 2 --resource job";

const LIMITS: &str = "
holds:
  - resource: job
    global_limit: 12
    domain_limit: 3
    domains: { d7: 1 }
    groups: { low: { domains: ['d[0-4]'], limit: 6 } }
";

fn limits() -> (TempDir, PathBuf) {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("limits.yaml");
    fs::write(&path, LIMITS).unwrap();
    (dir, path)
}

/// Grants everything, and renews sessions unless it forgets them.
struct Generous {
    forgets: bool,
    degraded: bool,
}

#[tonic::async_trait]
impl Holds for Generous {
    async fn reserve(
        &self,
        request: Request<ReserveRequest>,
    ) -> Result<Response<ReserveResponse>, Status> {
        let (granted, degraded) = (request.get_ref().copies, self.degraded);
        Ok(Response::new(ReserveResponse { granted, degraded, ..Default::default() }))
    }

    async fn keep_alive(
        &self,
        request: Request<KeepAliveRequest>,
    ) -> Result<Response<KeepAliveResponse>, Status> {
        let alive = !self.forgets;
        let hold = Hold { hold: "loadtest".to_owned(), ..Hold::default() };
        let renewed = |_| RenewedSession {
            alive,
            holds: if alive { vec![hold.clone()] } else { vec![] },
            ..RenewedSession::default()
        };
        let sessions = request.get_ref().sessions.iter().map(renewed).collect();
        Ok(Response::new(KeepAliveResponse { sessions, degraded: false }))
    }

    async fn release(
        &self,
        _: Request<ReleaseRequest>,
    ) -> Result<Response<ReleaseResponse>, Status> {
        Ok(Response::new(ReleaseResponse::default()))
    }

    async fn transfer(
        &self,
        _: Request<TransferRequest>,
    ) -> Result<Response<TransferResponse>, Status> {
        Err(Status::unimplemented(""))
    }

    async fn end_session(
        &self,
        _: Request<EndSessionRequest>,
    ) -> Result<Response<EndSessionResponse>, Status> {
        Ok(Response::new(EndSessionResponse::default()))
    }
}

/// Runs a load on a server that grants everything.
fn generous(server: Generous, load: &str) -> Run {
    let (_dir, path) = limits();
    let (address, _stop) = serve(move |mut builder| builder.add_service(HoldsServer::new(server)));
    run(&format!("holds --target {address} {SHORT} --limits {} {load}", path.display()))
}

#[test]
fn the_books_of_a_node_are_kept() {
    let (_dir, path) = limits();
    let node = Node::start(vec![("--limits", path.clone().into())]);
    for load in [
        "--keys uniform:10 --domain-prefix d --hold-for 20ms --copies 2",
        "--keys zipf:10 --domain-prefix d --hold-for 300ms --ttl 150ms",
    ] {
        let limits = path.display();
        let run =
            run(&format!("holds --target {} {SHORT} --limits {limits} {load} --json", node.grpc));
        assert_eq!(run.code, 0, "{run:?}");
        let report = run.json();
        assert_eq!((&report["verdict"], &report["errors"]), (&"ok".into(), &0.into()), "{report}");
        assert!(report["refused"].as_u64().unwrap() > 0, "{report}");
        assert!(report["sessions"]["released"].as_u64().unwrap() > 0, "{report}");
        assert_eq!(report["sessions"]["release_errors"], 0, "{report}");
        let most_held = report["books"]["all"]["most_held"].as_u64().unwrap();
        assert!((1..=12).contains(&most_held), "{report}");
        assert_eq!(report["books"]["all"]["limit"], 12);
    }
}

#[test]
fn a_server_that_grants_too_much_is_found_out() {
    let load = "--keys uniform:8 --domain-prefix d --copies 2 --hold-for 10s";
    let server = || Generous { forgets: false, degraded: false };
    let text = generous(server(), load);
    assert_eq!(text.code, 3, "{text:?}");
    assert!(text.stdout.contains("too many: all together held "), "{text:?}");
    assert!(text.stdout.contains("too many: group low held "), "{text:?}");
    assert!(text.stdout.contains("too many: d7 held "), "{text:?}");
    let report = generous(server(), &format!("{load} --json")).json();
    assert_eq!(report["verdict"], "books_failed");
    assert_eq!(report["books"]["violated"][0]["of"], "all");
    assert!(report["books"]["violations"].as_u64().unwrap() > 0, "{report}");
}

#[test]
fn sessions_that_end_before_their_time_are_found_out() {
    let server = Generous { forgets: true, degraded: false };
    let run = generous(server, "--keys hot --domain d9 --hold-for 5s --ttl 600ms --json");
    assert_eq!(run.code, 3, "{run:?}");
    let sessions = &run.json()["sessions"];
    assert!(sessions["lost_early"].as_u64().unwrap() > 0, "{run:?}");
    assert_eq!(sessions["renewals"], sessions["lost"], "{run:?}");
}

#[test]
fn copies_without_the_shared_store_are_not_held() {
    let run = generous(Generous { forgets: false, degraded: true }, "--copies 9 --json");
    assert_eq!(run.code, 0, "{run:?}");
    let report = run.json();
    assert_eq!(report["degraded"], report["granted"], "{report}");
    assert_eq!(report["books"]["all"]["most_held"], 0, "{report}");
}

#[test]
fn a_dead_target_fails_the_run() {
    // The system gives this port to no other test.
    let run = run(&format!("holds --target 127.0.0.1:1 {SHORT}"));
    assert_eq!(run.code, 2, "{run:?}");
    assert!(run.stdout.contains("UNAVAILABLE"), "{run:?}");
    assert!(run.stdout.contains("NOT CHECKED (give --limits)"), "{run:?}");
}
