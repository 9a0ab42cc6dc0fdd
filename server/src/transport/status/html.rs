//! The status as an HTML page. The page loads nothing from other hosts.

use std::fmt::Write as _;
use std::time::{Duration, UNIX_EPOCH};

use percent_encoding::utf8_percent_encode;
use serde_json::Value;

use super::QUERY_ESCAPES;
use crate::logging::is_unprintable;

/// The status as an HTML page.
pub(super) fn page(status: &Value, now_s: i64) -> String {
    let mut html = String::from(HEAD);
    kill_switch(&mut html, &status["kill_switch"]);
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

/// A banner while the kill switch is on.
fn kill_switch(html: &mut String, on: &Value) {
    if on.is_null() {
        return;
    }
    let left = Duration::from_secs(on["left_millis"].as_u64().unwrap_or_default() / 1000);
    let (by, message) = (escape(&cell(&on["by"])), escape(&cell(&on["message"])));
    let at = UNIX_EPOCH + Duration::from_millis(on["at_ms"].as_u64().unwrap_or_default());
    let _ = write!(
        html,
        "<p class=bad>The kill switch is on: no limit of a bucket, throttle or hold is enforced. Turned on by {by} at {}, \
         ends in {}. {message}</p>",
        humantime::format_rfc3339_seconds(at),
        humantime::format_duration(left)
    );
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
        let link = utf8_percent_encode(name, QUERY_ESCAPES);
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

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn names_are_escaped() {
        let resource = json!({ "resource": "<b>\"&'\u{7}", "template": "*", "level": 1.25,
            "capacity": 2.0, "learning_until_s": 12 });
        let status = json!({ "node": { "id": "<script>" }, "resources": [resource] });
        let html = page(&status, 10);
        assert!(!html.contains("<script>") && html.contains("&lt;script&gt;"), "{html}");
        assert!(html.contains("&lt;b&gt;&quot;&amp;&#39;\u{fffd}</a>"), "{html}");
        assert!(html.contains("id=%3Cb%3E%22%26%27%07\""), "{html}");
        assert!(html.contains("<td>1.25") && html.contains("<td>2<"), "{html}");
        assert!(html.contains("for 2 s more"), "{html}");
    }

    #[test]
    fn bidirectional_controls_are_replaced() {
        let name = "a\u{202e}b\u{2066}c\u{200f}d\u{feff}e";
        let html = page(&json!({ "resources": [{ "resource": name }] }), 0);
        assert!(html.contains("a\u{fffd}b\u{fffd}c\u{fffd}d\u{fffd}e</a>"), "{html}");
    }

    #[test]
    fn the_page_loads_nothing_from_other_hosts() {
        let html = page(&json!({ "resources": [] }), 0);
        assert!(!html.contains("http://") && !html.contains("https://") && !html.contains("src="));
        assert!(html.contains("Nobody holds a lease."));
    }
}
