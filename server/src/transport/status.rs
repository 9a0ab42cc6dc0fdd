//! `/debug/status`: the state of the node, its store and the resources in it, as HTML and as JSON.

use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC};
use serde_json::{Value, json};

use super::page_renderer::{PageHandle, page_channel};
use super::port_security::PortSecurity;
use crate::domain::time::Micros;
use crate::files::ReloadFailure;
use crate::service::Error;
use crate::service::capacity::CapacityService;
use crate::service::kill_switch::SwitchedOn;
use crate::service::status::{NodeName, NodeView, ResourceView};
use crate::store::{Down, LeaseStore, LeaseView, Listing, StoreError};

mod html;
mod nodes;

pub use nodes::{nodes_page, report};

/// Characters to escape in the query of a URL: all but the unreserved ones of RFC 3986.
pub const QUERY_ESCAPES: &AsciiSet =
    &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');

/// Maximum resources listed.
const MAX_RESOURCES: usize = 1000;

/// Maximum leases listed for one resource.
const MAX_LEASES: usize = 1000;

/// What the status pages show of the node.
#[derive(Clone)]
pub struct NodeInfo {
    /// The node's id.
    pub id: String,
    /// When it started.
    pub started: Instant,
    /// The address of its gRPC port.
    pub grpc: String,
    /// The address of its HTTP port.
    pub http: String,
    /// The address that clients should dial.
    pub advertise: String,
    /// Number of gRPC threads.
    pub threads: usize,
    /// The store's URL, without secrets.
    pub store: String,
    /// The addresses of its parent cluster.
    pub parents: Vec<String>,
    /// Returns the current outage of the store, if any.
    pub down: Arc<dyn Fn() -> Option<Down> + Send + Sync>,
    /// Returns why the node is not ready, if it is not.
    pub ready: Arc<dyn Fn() -> Result<(), &'static str> + Send + Sync>,
    /// Certificates and access file, for their state.
    pub security: PortSecurity,
}

/// A node without names, started now.
impl Default for NodeInfo {
    fn default() -> Self {
        let text = String::new;
        Self {
            id: text(),
            started: Instant::now(),
            grpc: text(),
            http: text(),
            advertise: text(),
            threads: 1,
            store: text(),
            parents: Vec::new(),
            down: Arc::new(|| None),
            ready: Arc::new(|| Ok(())),
            security: PortSecurity::default(),
        }
    }
}

/// Returns whether the store decides, and how many nodes share it.
pub type StoreState = dyn Fn() -> (bool, u32) + Send + Sync;

/// Minimum pause between two renderings.
const MIN_PAUSE: Duration = Duration::from_secs(1);

/// The rendered status.
#[derive(Default)]
pub struct StatusPages {
    pub(super) json: Bytes,
    pub(super) html: Bytes,
}

/// The status pages, and the future that renders them for as long as it is polled.
pub fn status_pages<S: LeaseStore>(
    info: NodeInfo,
    state: Box<StoreState>,
    leases: CapacityService<S>,
) -> (PageHandle<Arc<StatusPages>>, impl Future<Output = ()>) {
    let (handle, renderer) = page_channel();
    let render = async move || {
        let status = status(&info, &*state, &leases).await;
        let now_s = leases.state().now().as_secs();
        let write = move || StatusPages {
            json: status.to_string().into(),
            html: html::page(&status, now_s).into(),
        };
        // A join error occurs only while the process exits.
        Arc::new(tokio::task::spawn_blocking(write).await.unwrap_or_default())
    };
    (handle, renderer.run(MIN_PAUSE, render))
}

async fn status<S: LeaseStore>(
    info: &NodeInfo,
    state: &StoreState,
    leases: &CapacityService<S>,
) -> Value {
    let (up, nodes) = state();
    // The page is rendered even if the store does not answer.
    let born_at_s = leases.born_s().await.ok().flatten();
    let (resources, error) = match leases.resources(MAX_RESOURCES).await {
        Ok(resources) => (resources, None),
        Err(error) => (Listing { items: Vec::new(), left_out: 0 }, Some(error.to_string())),
    };
    let nodes_seen = leases.nodes().await.ok().map(|nodes| node_list(info, nodes));
    let limits = leases.state().limits();
    let snapshot = limits.current();
    let now = leases.state().now();
    json!({
        "node": node_json(info),
        "store": { "kind": info.store, "up": up, "nodes": nodes, "born_at_s": born_at_s },
        "limits": {
            "path": limits.source().to_string(),
            "version": snapshot.version(),
            "namespaces": snapshot.limits.namespaces.len(),
            "buckets": snapshot.limits.bucket_count,
            "templates": snapshot.limits.resources.len(),
            "throttles": snapshot.limits.throttles.len(),
            "holds": snapshot.limits.holds.len(),
        },
        "kill_switch": leases.state().kill_switch().current().map(|on| kill_switch_json(&on)),
        "now_s": now.as_secs(),
        "nodes": nodes_seen,
        "outage": (info.down)().map(|down| outage(&down, now)),
        "files": files_json(limits.reload_failure(), &info.security),
        "resources": resources.items.iter().map(resource_json).collect::<Vec<_>>(),
        "resources_left_out": resources.left_out,
        "resources_error": error,
    })
}

/// A kill switch that is on.
pub(super) fn kill_switch_json(SwitchedOn { by, left }: &SwitchedOn) -> Value {
    json!({
        "on": true,
        "left_millis": left.as_millis() as u64,
        "ends_at_ms": by.ends_at_ms,
        "at_ms": by.at_ms,
        "by": by.by,
        "message": by.message,
    })
}

fn node_json(info: &NodeInfo) -> Value {
    json!({
        "id": info.id,
        "version": env!("CARGO_PKG_VERSION"),
        "uptime_s": info.started.elapsed().as_secs(),
        "grpc": info.grpc,
        "http": info.http,
        "advertise": info.advertise,
        "threads": info.threads,
        "parents": info.parents,
    })
}

/// The states of the reloadable files. `refused_limits`: why the limits file is not in use.
fn files_json(refused_limits: Option<ReloadFailure>, security: &PortSecurity) -> Value {
    let tls = security.tls.as_ref().map(|tls| {
        let mut value = file_state(tls.certificates().reload_failure());
        value["certificate_expires_at_s"] = tls.expiry_s().into();
        value
    });
    json!({
        "limits": file_state(refused_limits),
        "access": security.access.as_ref().map(|access| file_state(access.file().reload_failure())),
        "tls": tls,
    })
}

/// All live nodes in the store; only this one if the store registers no nodes.
fn node_list(info: &NodeInfo, nodes: Vec<NodeView>) -> Vec<Value> {
    let live = nodes.into_iter().filter(|node| node.is_live);
    let mut names: Vec<NodeName> = live.map(|node| node.name).collect();
    if names.is_empty() {
        names.push(NodeName::of_this_build(info.id.clone()));
    }
    let name = |name: NodeName| json!({ "id": name.id, "version": name.version });
    names.into_iter().map(name).collect()
}

fn outage(down: &Down, now: Micros) -> Value {
    let lasting_us = i64::try_from(down.lasting.as_micros()).unwrap_or(i64::MAX);
    json!({
        "error": down.error.map(|error| error.to_string()),
        "class": down.error.map(StoreError::class),
        "since_s": Micros(now.0.saturating_sub(lasting_us)).as_secs(),
        "lasting_s": down.lasting.as_secs(),
    })
}

/// The state of a reloadable file. A refused file is not in use, and the node would not start with
/// it.
fn file_state(failure: Option<ReloadFailure>) -> Value {
    json!({ "in_use": failure.is_none(), "refused": failure })
}

/// One resource and its leases; `None` if it has none.
pub(super) async fn resource<S: LeaseStore>(
    leases: &CapacityService<S>,
    id: &str,
) -> Result<Option<Value>, Error> {
    let Some((found, holders)) = leases.holders(id, MAX_LEASES).await? else { return Ok(None) };
    let mut value = resource_json(&found);
    value["holders"] = holders.items.iter().map(lease_json).collect();
    value["holders_left_out"] = holders.left_out.into();
    Ok(Some(value))
}

fn resource_json(view: &ResourceView) -> Value {
    json!({
        "resource": view.resource,
        "template": view.template,
        "algorithm": view.algorithm.map_or("", crate::domain::sharing::SharingAlgorithm::name),
        "capacity": view.capacity,
        "wants": view.wants,
        "has": view.has,
        "subclients": view.subclients as u64,
        "clients": view.holders,
        "level": view.level,
        "learning_until_s": view.learning_until_s,
    })
}

fn lease_json(lease: &LeaseView) -> Value {
    json!({
        "id": lease.id,
        "kind": if lease.server { "server" } else { "client" },
        "wants": lease.wants,
        "has": lease.has,
        "subclients": lease.subclients as u64,
        "expires_at_s": lease.expiry_s,
    })
}
