//! `GET /v1/nodes`: the nodes of the cluster, each with what it says of itself in its heartbeats.

use std::collections::BTreeMap;
use std::future::Future;
use std::time::Duration;

use bytes::Bytes;
use serde_json::{Map, Value, json};

use super::{NodeInfo, files_json, outage};
use crate::service::ServiceState;
use crate::service::capacity::CapacityService;
use crate::service::status::NodeView;
use crate::store::LeaseStore;
use crate::transport::page_renderer::{PageHandle, page_channel};

/// Minimum pause between two renderings: heartbeats bring nothing new more often.
const MIN_PAUSE: Duration = Duration::from_secs(1);

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
        "files": shortened(files_json(limits.reload_failure(), &info.security)),
        "decided_per_s": rates.decided,
        "refused_per_s": rates.refused,
    })
}

/// With no more than the beginning of each error.
fn shortened(mut files: Value) -> Value {
    for file in files.as_object_mut().into_iter().flat_map(Map::values_mut) {
        let error = file.pointer_mut("/refused/error");
        if let Some(Value::String(error)) = error
            && let Some((end, _)) = error.char_indices().nth(MAX_ERROR_CHARS)
        {
            error.truncate(end);
            error.push('…');
        }
    }
    files
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
        let own = (info.id.clone(), report(&info, leases.state()));
        let now_s = leases.state().now().as_secs();
        let write = move || {
            let nodes = node_list(own, found.unwrap_or_default());
            Bytes::from(json!({ "now_s": now_s, "error": error, "nodes": nodes }).to_string())
        };
        // A join error occurs only while the process exits.
        tokio::task::spawn_blocking(write).await.unwrap_or_default()
    };
    (handle, renderer.run(MIN_PAUSE, render))
}

/// The nodes in the store and this one, whether the store has it or not, sorted by id. `own`: the id of
/// this one, and what it says of itself.
fn node_list((own_id, own): (String, Value), found: Vec<NodeView>) -> Vec<Value> {
    let others = found.into_iter().map(|node| {
        let json = node_json(&node.name.id, said(&node), node.is_live, node.silent);
        (node.name.id, json)
    });
    let mut nodes: BTreeMap<String, Value> = others.collect();
    let own = node_json(&own_id, own, true, Duration::ZERO);
    nodes.insert(own_id, own);
    nodes.into_values().collect()
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
