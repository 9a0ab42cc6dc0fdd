//! `GET /v1/nodes`: the nodes of the cluster, each with what it says of itself in its heartbeats.

use std::future::Future;
use std::time::Duration;

use bytes::Bytes;
use serde_json::{Map, Value, json};

use super::{NodeInfo, files_json, outage};
use crate::files::ReloadFailure;
use crate::service::ServiceState;
use crate::service::capacity::CapacityService;
use crate::service::status::NodeView;
use crate::store::LeaseStore;
use crate::transport::page_renderer::{PageHandle, page_channel};

/// Minimum pause between two renderings.
const MIN_PAUSE: Duration = Duration::from_millis(100);

/// The most characters of an error in a report: all nodes' reports are read at once.
const MAX_ERROR_CHARS: usize = 300;

/// What a node says of itself.
pub fn report(info: &NodeInfo, state: &ServiceState) -> Value {
    let (limits, rates) = (state.limits(), state.rates());
    let down = (info.down)();
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "uptime_s": info.started.elapsed().as_secs(),
        "grpc": info.grpc,
        "http": info.http,
        "advertise": info.advertise,
        "not_ready": (info.ready)().err(),
        "limits": { "source": limits.source().to_string(), "version": limits.current().version() },
        "kill_switch": state.kill_switch().is_on(),
        "store": {
            "kind": info.store,
            "up": down.is_none(),
            "outage": down.map(|down| outage(&down, state.now())),
        },
        "files": files_json(limits.reload_failure().map(shortened), &info.security),
        "decided_per_s": rates.decided,
        "refused_per_s": rates.refused,
    })
}

fn shortened(mut failure: ReloadFailure) -> ReloadFailure {
    if let Some((end, _)) = failure.error.char_indices().nth(MAX_ERROR_CHARS) {
        failure.error.truncate(end);
        failure.error.push('…');
    }
    failure
}

/// The page, and the future that renders it for as long as it is polled.
pub fn nodes_page<S: LeaseStore>(
    info: NodeInfo,
    leases: CapacityService<S>,
) -> (PageHandle<Bytes>, impl Future<Output = ()>) {
    let (handle, renderer) = page_channel();
    let render = async move || {
        let found = leases.nodes().await;
        let error = found.as_ref().err().map(ToString::to_string);
        let own = report(&info, leases.state());
        let nodes = node_list(&info.id, own, found.unwrap_or_default());
        let now_s = leases.state().now().as_secs();
        Bytes::from(json!({ "now_s": now_s, "error": error, "nodes": nodes }).to_string())
    };
    (handle, renderer.run(MIN_PAUSE, render))
}

/// The nodes in the store, and this one, which says of itself `own`, wherever it is in the list or not.
fn node_list(own_id: &str, own: Value, found: Vec<NodeView>) -> Vec<Value> {
    let is_own = |node: &NodeView| node.name.id == own_id;
    let mut nodes = Vec::with_capacity(found.len() + 1);
    if !found.iter().any(is_own) {
        nodes.push(node_json(own_id, own.clone(), true, Duration::ZERO));
    }
    for node in found {
        let (own_report, is_own) = (own.clone(), is_own(&node));
        let said = if is_own { own_report } else { said(&node) };
        nodes.push(node_json(&node.name.id, said, is_own || node.is_live, node.silent));
    }
    nodes
}

/// What another node has said. Of one that has said nothing, the version that it registered with.
fn said(node: &NodeView) -> Value {
    let said: Option<Map<String, Value>> = serde_json::from_str(&node.report).ok();
    said.map_or_else(|| json!({ "version": node.name.version }), Value::Object)
}

fn node_json(id: &str, mut said: Value, is_live: bool, silent: Duration) -> Value {
    said["id"] = id.into();
    said["live"] = is_live.into();
    said["silent_millis"] = (silent.as_millis() as u64).into();
    said
}
