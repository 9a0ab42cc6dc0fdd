//! `/debug/status`: the state of the node, its store and the resources in it, as HTML and as JSON.
//! The page loads nothing from other hosts.

use std::fmt::Write as _;
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use serde_json::{Value, json};

use super::page_renderer::{PageHandle, page_channel};
use super::port_security::PortSecurity;
use crate::files::Refusal;
use crate::logging::is_unprintable;
use crate::service::Error;
use crate::service::capacity::CapacityService;
use crate::service::status::{NodeView, ResourceView};
use crate::store::{Down, LeaseStore, LeaseView, Listing, StoreError};

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
        let now_s = leases.shared().now().as_secs();
        let write = move || StatusPages {
            json: status.to_string().into(),
            html: html_page(&status, now_s).into(),
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
    let limits = leases.shared().limits();
    let snapshot = limits.current();
    let now_s = leases.shared().now().as_secs();
    json!({
        "node": {
            "id": info.id,
            "version": env!("CARGO_PKG_VERSION"),
            "uptime_s": info.started.elapsed().as_secs(),
            "grpc": info.grpc,
            "http": info.http,
            "advertise": info.advertise,
            "threads": info.threads,
            "parents": info.parents,
        },
        "store": { "kind": info.store, "up": up, "nodes": nodes, "born_at_s": born_at_s },
        "limits": {
            "path": limits.path().display().to_string(),
            "version": snapshot.limits.version,
            "namespaces": snapshot.limits.namespaces.len(),
            "buckets": snapshot.limits.bucket_count,
            "templates": snapshot.limits.resources.len(),
        },
        "now_s": now_s,
        "nodes": nodes_seen,
        "outage": (info.down)().map(|down| outage(&down, now_s)),
        "files": {
            "limits": file_state(limits.refusal()),
            "access": info.security.access.as_ref().map(|access| file_state(access.file().refusal())),
            "tls": info.security.tls.as_ref().map(|tls| {
                let mut value = file_state(tls.certificates().refusal());
                value["certificate_expires_at_s"] = tls.expiry_s().into();
                value
            }),
        },
        "resources": resources.items.iter().map(resource_json).collect::<Vec<_>>(),
        "resources_left_out": resources.left_out,
        "resources_error": error,
    })
}

/// All nodes in the store; only this one if the store registers no nodes.
fn node_list(info: &NodeInfo, mut nodes: Vec<NodeView>) -> Vec<Value> {
    if nodes.is_empty() {
        nodes.push(NodeView::of_this_build(info.id.clone()));
    }
    let node = |node: NodeView| json!({ "id": node.id, "version": node.version });
    nodes.into_iter().map(node).collect()
}

fn outage(down: &Down, now_s: i64) -> Value {
    let lasting_s = down.lasting.as_secs();
    json!({
        "error": down.error.map(|error| error.to_string()),
        "class": down.error.map(StoreError::class),
        "since_s": now_s.saturating_sub_unsigned(lasting_s),
        "lasting_s": lasting_s,
    })
}

/// The state of a reloadable file. A refused file is not in use, and the node would not start with
/// it.
fn file_state(refusal: Option<Refusal>) -> Value {
    json!({ "in_use": refusal.is_none(), "refused": refusal })
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
        "algorithm": view.kind.map_or("", crate::domain::sharing::Kind::name),
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

/// The status as an HTML page.
fn html_page(status: &Value, now_s: i64) -> String {
    let mut html = String::from(HEAD);
    for (title, part) in [("Node", "node"), ("Store", "store"), ("Limits", "limits")] {
        let _ = write!(html, "<section><h2>{title}</h2><dl>");
        for (name, value) in status[part].as_object().into_iter().flatten() {
            let _ = write!(html, "<dt>{}</dt><dd>{}</dd>", escape(name), escape(&cell(value)));
        }
        html.push_str("</dl></section>");
    }
    html.push_str("<h2>Resources</h2>");
    if let Some(error) = status["resources_error"].as_str() {
        let _ = write!(html, "<p class=bad>{}</p>", escape(error));
    }
    let resources = status["resources"].as_array().map_or(&[][..], Vec::as_slice);
    if resources.is_empty() && status["resources_error"].is_null() {
        html.push_str("<p>Nobody holds a lease.</p>");
    } else {
        table(&mut html, resources, now_s);
    }
    if let Some(more @ 1..) = status["resources_left_out"].as_u64() {
        let _ = write!(html, "<p>and {more} more</p>");
    }
    html.push_str("<p><a href=\"status.json\">as JSON</a></p></main></html>");
    html
}

const HEAD: &str = "<!doctype html><html lang=en><meta charset=utf-8>\
    <meta name=viewport content=\"width=device-width\">\
    <meta http-equiv=refresh content=5><title>tollgate</title><style>\
    :root{color-scheme:light dark}body{font:14px/1.5 system-ui,sans-serif;margin:2rem}\
    section{display:inline-block;vertical-align:top;margin-right:3rem}\
    dl{display:grid;grid-template-columns:auto auto;gap:0 1rem}dt{opacity:.6}dd{margin:0}\
    table{border-collapse:collapse}td,th{padding:.2rem .8rem;text-align:right}\
    th{border-bottom:1px solid;opacity:.6}.l{text-align:left}\
    tr:hover td{background:#8882}.bad{color:#c33}</style><main><h1>tollgate</h1>";

fn table(html: &mut String, resources: &[Value], now_s: i64) {
    html.push_str(
        "<table><tr><th class=l>resource<th class=l>template<th class=l>algorithm<th>capacity\
         <th>wants<th>has<th>clients<th>subclients<th>level<th class=l>learning</tr>",
    );
    for resource in resources {
        html.push_str("<tr>");
        let name = resource["resource"].as_str().unwrap_or_default();
        let link = percent(name);
        let _ =
            write!(html, "<td class=l><a href=\"resource.json?id={link}\">{}</a>", escape(name));
        for field in ["template", "algorithm"] {
            let _ = write!(html, "<td class=l>{}", escape(&cell(&resource[field])));
        }
        for field in ["capacity", "wants", "has", "clients", "subclients", "level"] {
            let _ = write!(html, "<td>{}", escape(&cell(&resource[field])));
        }
        let learning = match resource["learning_until_s"].as_i64() {
            Some(until) => {
                format!(
                    "for {} s more: clients get what they say they have",
                    (until - now_s).max(0)
                )
            }
            None => "no".to_owned(),
        };
        let _ = write!(html, "<td class=l>{learning}</tr>");
    }
    html.push_str("</table>");
}

fn cell(value: &Value) -> String {
    match value {
        Value::Null => "–".to_owned(),
        Value::String(text) => text.clone(),
        Value::Number(number) => match number.as_f64() {
            // Six decimals suffice for a reader.
            Some(float) if number.is_f64() && float.fract() != 0.0 => {
                let digits = format!("{float:.6}");
                digits.trim_end_matches('0').trim_end_matches('.').to_owned()
            }
            Some(float) if number.is_f64() => format!("{float}"),
            _ => number.to_string(),
        },
        Value::Array(values) => values.iter().map(cell).collect::<Vec<_>>().join(", "),
        other => other.to_string(),
    }
}

fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            c if is_unprintable(c) => escaped.push('\u{fffd}'),
            c => escaped.push(c),
        }
    }
    escaped
}

/// Percent-encodes a text for the query of a URL.
fn percent(text: &str) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            encoded.push(char::from(byte));
        } else {
            let _ = write!(encoded, "%{byte:02X}");
        }
    }
    encoded
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_escaped() {
        let resource = json!({ "resource": "<b>\"&'\u{7}", "template": "*", "level": 1.25,
            "capacity": 2.0, "learning_until_s": 12 });
        let status = json!({ "node": { "id": "<script>" }, "resources": [resource] });
        let html = html_page(&status, 10);
        assert!(!html.contains("<script>") && html.contains("&lt;script&gt;"), "{html}");
        assert!(html.contains("&lt;b&gt;&quot;&amp;&#39;\u{fffd}</a>"), "{html}");
        assert!(html.contains("id=%3Cb%3E%22%26%27%07\""), "{html}");
        assert!(html.contains("<td>1.25") && html.contains("<td>2<"), "{html}");
        assert!(html.contains("for 2 s more"), "{html}");
    }

    #[test]
    fn bidirectional_controls_are_replaced() {
        let name = "a\u{202e}b\u{2066}c\u{200f}d\u{feff}e";
        let html = html_page(&json!({ "resources": [{ "resource": name }] }), 0);
        assert!(html.contains("a\u{fffd}b\u{fffd}c\u{fffd}d\u{fffd}e</a>"), "{html}");
    }

    #[test]
    fn the_page_loads_nothing_from_other_hosts() {
        let html = html_page(&json!({ "resources": [] }), 0);
        assert!(!html.contains("http://") && !html.contains("https://") && !html.contains("src="));
        assert!(html.contains("Nobody holds a lease."));
    }
}
