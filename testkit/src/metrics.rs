//! The metrics of a node, parsed from the Prometheus text format.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use super::http::{HttpResponse, http};

/// Labels by name.
pub type Labels = BTreeMap<String, String>;

/// All series at one moment, with their values.
pub struct Scrape(BTreeMap<(String, Labels), f64>);

impl Scrape {
    /// Reads the metrics of the node with this HTTP address.
    pub fn of(address: SocketAddr) -> Self {
        Self::parse_response(&http(address, "GET", "/metrics", b""))
    }

    /// Parses a response to `GET /metrics`.
    pub fn parse_response(response: &HttpResponse) -> Self {
        assert_eq!(response.status, 200, "{response:?}");
        Self::parse(&response.body)
    }

    /// Parses rendered metrics; panics on a series that it can't read, and on one that is there
    /// twice.
    pub fn parse(text: &str) -> Self {
        let mut all = BTreeMap::new();
        for line in text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
            let (series, value) = parse_line(line).unwrap_or_else(|| panic!("not valid: {line:?}"));
            assert!(all.insert(series, value).is_none(), "duplicate series: {line}");
        }
        Self(all)
    }

    /// Value of a series; `None` if it is missing.
    pub fn get(&self, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
        let labels = labels.iter().map(|(label, value)| ((*label).into(), (*value).into()));
        self.0.get(&(name.to_owned(), labels.collect())).copied()
    }

    /// Sum over the series of a metric that have these labels, and maybe others; 0 without any.
    pub fn sum(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        let has = |found: &Labels| {
            labels.iter().all(|(label, value)| found.get(*label).is_some_and(|it| it == value))
        };
        let counted = self.0.iter().filter(|((found, labels), _)| found == name && has(labels));
        counted.map(|(_, value)| value).sum()
    }

    /// Counter of the decisions about one bucket with this outcome.
    pub fn decisions(&self, namespace: &str, bucket: &str, outcome: &str) -> Option<f64> {
        let labels = [("namespace", namespace), ("bucket", bucket), ("outcome", outcome)];
        self.get("tollgate_decisions_total", &labels)
    }

    /// Number of decisions with this outcome, over all buckets.
    pub fn outcomes(&self, outcome: &str) -> f64 {
        self.sum("tollgate_decisions_total", &[("outcome", outcome)])
    }

    /// The names and labels of all series.
    pub fn series(&self) -> Vec<&(String, Labels)> {
        self.0.keys().collect()
    }
}

/// Parses `name{label="value",…} number`.
fn parse_line(line: &str) -> Option<((String, Labels), f64)> {
    let end = line.find(|c: char| !c.is_ascii_alphanumeric() && c != '_' && c != ':')?;
    let (name, mut rest) = line.split_at(end);
    let mut labels = Labels::new();
    if let Some(inner) = rest.strip_prefix('{') {
        rest = inner;
        while !rest.starts_with('}') {
            let (label, after) = rest.split_once("=\"")?;
            let mut value = String::new();
            let mut chars = after.char_indices();
            let end = loop {
                match chars.next()? {
                    (at, '"') => break at + 1,
                    (_, '\\') => value.push(match chars.next()?.1 {
                        'n' => '\n',
                        c @ ('\\' | '"') => c,
                        _ => return None,
                    }),
                    (_, c) => value.push(c),
                }
            };
            labels.insert(label.to_owned(), value);
            rest = after[end..].strip_prefix(',').unwrap_or(&after[end..]);
        }
        rest = &rest[1..];
    }
    let value = rest.strip_prefix(' ')?.parse().ok()?;
    (!name.is_empty()).then(|| ((name.to_owned(), labels), value))
}
