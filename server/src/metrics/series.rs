//! The registry of counters and gauges. Separate from the exporter's registry, which cannot remove
//! a series: buckets and templates that leave the limits file must leave `/metrics` too.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use hashbrown::{HashMap, HashSet};
use metrics::{Counter, Gauge, Key};
use metrics_exporter_prometheus::LabelSet;
use metrics_exporter_prometheus::formatting::{
    write_help_line, write_metric_line, write_type_line,
};
use metrics_util::registry::{AtomicStorage, Registry};

use super::label_value;
use super::names::{HOLD_PREFIX, THROTTLE_PREFIX};

/// All counters and gauges of a node.
pub(super) struct Series(Registry<Key, AtomicStorage>);

impl Series {
    pub(super) fn new() -> Self {
        Self(Registry::atomic())
    }

    pub(super) fn counter(&self, key: &Key) -> Counter {
        self.0.get_or_create_counter(key, |counter| Counter::from_arc(Arc::clone(counter)))
    }

    pub(super) fn gauge(&self, key: &Key) -> Gauge {
        self.0.get_or_create_gauge(key, |gauge| Gauge::from_arc(Arc::clone(gauge)))
    }

    pub(super) fn retain(&self, defined: &Defined) {
        self.0.retain_counters(|key, _| defined.covers(key));
        self.0.retain_gauges(|key, _| defined.covers(key));
    }

    /// Appends all series in Prometheus' text format, grouped by name.
    pub(super) fn render(&self, text: &mut String, help: impl Fn(&str) -> &'static str) {
        let mut counters: BTreeMap<String, Vec<(Key, u64)>> = BTreeMap::new();
        self.0.visit_counters(|key, value| {
            let value = value.load(Ordering::Acquire);
            counters.entry(key.name().to_owned()).or_default().push((key.clone(), value));
        });
        render_families(text, "counter", counters, &help);
        let mut gauges: BTreeMap<String, Vec<(Key, f64)>> = BTreeMap::new();
        self.0.visit_gauges(|key, value| {
            let value = f64::from_bits(value.load(Ordering::Acquire));
            gauges.entry(key.name().to_owned()).or_default().push((key.clone(), value));
        });
        render_families(text, "gauge", gauges, &help);
    }
}

/// Appends the series of `families`, which maps a metric's name to its series.
fn render_families<V: std::fmt::Display>(
    text: &mut String,
    kind: &str,
    families: BTreeMap<String, Vec<(Key, V)>>,
    help: &impl Fn(&str) -> &'static str,
) {
    for (name, series) in families {
        write_help_line(text, &name, None, None, help(&name));
        write_type_line(text, &name, None, None, kind);
        for (key, value) in series {
            let labels = LabelSet::from_key_and_global(&key, &Default::default());
            write_metric_line::<&str, V>(text, &name, None, &labels, None, value, None);
        }
        text.push('\n');
    }
}

/// Pairs of label values, by the first one.
type Pairs = HashMap<String, HashSet<String>>;

/// The label values of the buckets and templates that the current limits define.
#[derive(Default)]
pub struct Defined {
    /// By namespace.
    buckets: Pairs,
    /// Namespaces with a dynamic bucket template.
    dynamic: HashSet<String>,
    /// Algorithms by glob.
    templates: Pairs,
    /// The globs of throttles.
    throttles: HashSet<String>,
    /// The globs of holds.
    holds: HashSet<String>,
}

impl Defined {
    /// Adds a bucket. `dynamic` is `true` for the namespace's dynamic bucket template.
    pub fn bucket(&mut self, namespace: &str, bucket: &str, dynamic: bool) {
        self.buckets.entry(label_value(namespace)).or_default().insert(label_value(bucket));
        if dynamic {
            self.dynamic.insert(label_value(namespace));
        }
    }

    /// Adds a resource template.
    pub fn template(&mut self, glob: &str, algorithm: &str) {
        self.templates.entry(label_value(glob)).or_default().insert(label_value(algorithm));
    }

    /// Adds a throttle.
    pub fn throttle(&mut self, glob: &str) {
        self.throttles.insert(label_value(glob));
    }

    /// Adds holds.
    pub fn hold(&mut self, glob: &str) {
        self.holds.insert(label_value(glob));
    }

    /// Whether everything that `other` defines is defined here, too.
    pub fn includes(&self, other: &Self) -> bool {
        let includes_all = |here: &Pairs, other: &Pairs| {
            let mut other = other.iter();
            other.all(|(first, all)| here.get(first).is_some_and(|here| all.is_subset(here)))
        };
        includes_all(&self.buckets, &other.buckets)
            && includes_all(&self.templates, &other.templates)
            && other.dynamic.is_subset(&self.dynamic)
            && other.throttles.is_subset(&self.throttles)
            && other.holds.is_subset(&self.holds)
    }

    /// Whether a series belongs to a defined bucket or template, or is independent of the limits.
    fn covers(&self, key: &Key) -> bool {
        let [mut namespace, mut bucket, mut template, mut algorithm] = [None; 4];
        for label in key.labels() {
            let place = match label.key() {
                "namespace" => &mut namespace,
                "bucket" => &mut bucket,
                "template" => &mut template,
                "algorithm" => &mut algorithm,
                _ => continue,
            };
            *place = Some(label.value());
        }
        // Requests without a matching definition have empty labels.
        let contains = |defined: &Pairs, pair: [&str; 2]| {
            pair == ["", ""] || defined.get(pair[0]).is_some_and(|all| all.contains(pair[1]))
        };
        match (namespace, bucket, template, algorithm) {
            (Some(namespace), Some(bucket), ..) => contains(&self.buckets, [namespace, bucket]),
            (Some(namespace), ..) => self.dynamic.contains(namespace),
            (_, _, Some(glob), Some(algorithm)) => contains(&self.templates, [glob, algorithm]),
            (_, _, Some(""), None) => true,
            (_, _, Some(glob), None) => match key.name() {
                name if name.starts_with(THROTTLE_PREFIX) => self.throttles.contains(glob),
                name if name.starts_with(HOLD_PREFIX) => self.holds.contains(glob),
                _ => self.templates.contains_key(glob),
            },
            _ => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{AllowOutcome, BucketMetrics, CapacityMetrics, Metrics};
    use super::*;

    #[test]
    fn removes_series_that_are_no_longer_defined() {
        let metrics = Metrics::new();
        let bucket = |name, dynamic| BucketMetrics::new(&metrics, r"a\b", name, dynamic);
        let (kept, removed) = (bucket("kept", false), bucket("gone", true));
        let unmatched = BucketMetrics::new(&metrics, "", "", false);
        for counts in [&kept, &removed, &unmatched] {
            counts.count(AllowOutcome::Granted, 3);
        }
        let _unmatched_leases = CapacityMetrics::unmatched(&metrics, false);
        let _templates = [("*", "FAIR_SHARE"), ("*", "STATIC"), ("old.*", "STATIC")]
            .map(|(glob, algorithm)| CapacityMetrics::new(&metrics, glob, algorithm));
        let text = metrics.render();
        let lines = |text: &str, what: &str| text.lines().filter(|l| l.contains(what)).count();
        assert!(lines(&text, "gone") > 8 && lines(&text, "STATIC") == 24, "{text}");
        let dynamic = "tollgate_dynamic_buckets{";
        assert_eq!(lines(&text, dynamic), 1);

        let mut defined = Defined::default();
        defined.bucket(r"a\b", "kept", false);
        defined.template("*", "FAIR_SHARE");
        metrics.forget_all_but(&defined);
        kept.count(AllowOutcome::Granted, 1);
        let after = metrics.render();
        assert_eq!(lines(&text, "template=\"old.*\""), 13);
        for what in ["gone", "STATIC", "template=\"old.*\"", dynamic] {
            assert_eq!(lines(&after, what), 0, "{what}: {after}");
        }
        let series = r#"{namespace="a\\b",bucket="kept",outcome="granted"} 2"#;
        assert_eq!(lines(&after, series), 1, "{after}");
        for what in [
            r#"namespace="",bucket="""#,
            "tollgate_lease_unmatched_total",
            "template=\"*\",algorithm=\"FAIR_SHARE\"",
            "template=\"*\"}",
            "template=\"\"",
        ] {
            assert_eq!(lines(&after, what), lines(&text, what), "{what}");
        }
        assert_eq!(lines(&after, "# TYPE tollgate_decisions_total counter"), 1);
    }
}
