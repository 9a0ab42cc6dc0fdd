//! `tollgate-loadtest throttle` from the outside: its exit codes, its report, and what it finds.

use std::fs;
use std::net::SocketAddr;
use std::path::PathBuf;

use tempfile::TempDir;
use tokio::sync::oneshot;
use tollgate_proto::tollgate::v1::throttle_server::{Throttle, ThrottleServer};
use tollgate_proto::tollgate::v1::{ThrottleRequest, ThrottleResponse};
use tonic::{Request, Response, Status};

use crate::common::{Run, run, serve};
use crate::node::Node;

const SHORT: &str = "--warmup 50ms --duration 1s --connections 2";

const LIMITS: &str = "
throttles:
  - resource: 'api.*'
    hard_limit: 15
    global_limit: 40
    tiers:
      - { limit: 3, window: 50ms, active: 1h, cooldown: 0s }
      - { limit: 10, window: 50ms, active: 100ms, cooldown: 200ms }
  - resource: bulk
    tiers: []
    domains:
      acme: { tiers: [{ limit: 150, window: 100ms, active: 1d, cooldown: 0s }] }
  - resource: tried
    enforce: false
    tiers: [{ limit: 5, window: 1h, active: 1h }]
";

fn limits() -> (TempDir, PathBuf) {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("limits.yaml");
    fs::write(&path, LIMITS).unwrap();
    (dir, path)
}

/// Runs loads on one real node with [`LIMITS`].
fn honest(loads: &[&str]) -> Vec<Run> {
    let (_dir, path) = limits();
    let node = Node::start(vec![("--limits", path.clone().into())]);
    let limits = path.display();
    let load = |load: &&str| {
        run(&format!("throttle --target {} {SHORT} --limits {limits} {load} --json", node.grpc))
    };
    loads.iter().map(load).collect()
}

/// Answers every request the same.
struct Fixed(ThrottleResponse);

#[tonic::async_trait]
impl Throttle for Fixed {
    async fn request(
        &self,
        _: Request<ThrottleRequest>,
    ) -> Result<Response<ThrottleResponse>, Status> {
        Ok(Response::new(self.0))
    }
}

/// Runs a load on a server that answers every request the same.
fn fixed(answer: ThrottleResponse, load: &str) -> Run {
    let (_dir, path) = limits();
    let (address, _stop): (SocketAddr, oneshot::Sender<()>) =
        serve(move |mut server| server.add_service(ThrottleServer::new(Fixed(answer))));
    run(&format!("throttle --target {address} {SHORT} --limits {} {load}", path.display()))
}

#[test]
fn the_books_of_a_node_are_kept() {
    let runs = honest(&[
        "--resource api.hot",
        "--resource bulk --domain acme --copies 7",
        "--resource api.all --keys uniform:300 --threads 2",
        "--resource api.slow --keys zipf:10 --rate 400 --arrivals poisson",
        "--resource api.polite --keys uniform:3 --honour-wait --copies 4 --min-copies 2",
    ]);
    for run in &runs {
        assert_eq!(run.code, 0, "{run:?}");
        let report = run.json();
        assert_eq!((&report["verdict"], &report["errors"]), (&"ok".into(), &0.into()), "{report}");
        assert!(report["books"]["checked"].as_bool().unwrap(), "{report}");
        assert!(report["books"]["granted_hits"].as_u64().unwrap() > 0, "{report}");
    }
    let [hot, acme, all] = [0, 1, 2].map(|index: usize| runs[index].json());
    assert_eq!(hot["books"]["most_loaded"]["domain"], "hot");
    assert!(hot["refused"].as_u64().unwrap() > 0, "{hot}");
    assert!(!hot["refused_by"].as_object().unwrap().is_empty(), "{hot}");
    assert_eq!(acme["load"]["copies"], 7);
    assert_eq!(all["books"]["all"]["kept"], true);
    assert!(all["refused_by"]["global"].as_u64().unwrap() > 0, "{all}");
}

#[test]
fn hits_in_shadow_are_counted_and_left_out_of_the_books() {
    for run in honest(&["--resource tried --copies 2"]) {
        assert_eq!(run.code, 0, "{run:?}");
        let report = run.json();
        assert!(report["shadow"].as_u64().unwrap() > 0, "{report}");
        assert_eq!(report["books"]["granted_hits"], 4, "{report}");
        assert_eq!(report["refused"], 0, "{report}");
    }
}

#[test]
fn a_server_that_grants_too_much_is_found_out() {
    let all = ThrottleResponse { granted: 9, burst: true, ..ThrottleResponse::default() };
    let load = "--resource api.x --keys uniform:5 --domain-prefix u --copies 9";
    let text = fixed(all, load);
    assert_eq!(text.code, 3, "{text:?}");
    assert!(text.stdout.contains("VIOLATED for 5 domains"), "{text:?}");
    assert!(text.stdout.contains("too many: u"), "{text:?}");
    let report = fixed(all, &format!("{load} --json")).json();
    assert_eq!(report["verdict"], "books_failed");
    assert_eq!(report["books"]["violations"], 5);
    assert_eq!(report["books"]["all"]["kept"], false);
    assert_eq!(report["bursts"], report["granted"]);
}

#[test]
fn hits_without_the_shared_store_break_no_bound() {
    let degraded = ThrottleResponse { granted: 9, degraded: true, ..ThrottleResponse::default() };
    let run = fixed(degraded, "--resource api.x --copies 9");
    assert_eq!(run.code, 0, "{run:?}");
    assert!(run.stdout.contains("left out: "), "{run:?}");
}

#[test]
fn a_resource_without_limits_is_refused_or_fails_the_run() {
    let unknown = honest(&["--resource other"]);
    assert_eq!(unknown[0].code, 2, "{unknown:?}");
    let reason = "has no throttle for --resource other";
    assert!(unknown[0].stderr.contains(reason), "{unknown:?}");
    let (_dir, path) = limits();
    let node = Node::start(vec![("--limits", path.into())]);
    let run = run(&format!("throttle --target {} {SHORT} --resource other", node.grpc));
    assert_eq!(run.code, 2, "{run:?}");
    assert!(run.stdout.contains("(NOT_FOUND "), "{run:?}");
}
