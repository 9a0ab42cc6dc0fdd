//! Figures that every report has: latencies, counts by name, times for people.

use std::collections::BTreeMap;
use std::fmt;

use hdrhistogram::Histogram;
use serde::Serialize;

/// Latencies in microseconds; null when there were none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Latency {
    /// How many latencies there are.
    pub samples: u64,
    /// Their mean.
    pub mean_us: Option<f64>,
    /// Half of them are at most this.
    pub p50_us: Option<f64>,
    /// 90 % of them are at most this.
    pub p90_us: Option<f64>,
    /// 99 % of them are at most this.
    pub p99_us: Option<f64>,
    /// 99.9 % of them are at most this.
    pub p99_9_us: Option<f64>,
    /// 99.99 % of them are at most this.
    pub p99_99_us: Option<f64>,
    /// The longest.
    pub max_us: Option<f64>,
}

impl Latency {
    /// What `histogram`, of latencies in ns, comes to.
    pub fn of(histogram: &Histogram<u64>) -> Self {
        if histogram.is_empty() {
            return Self::default();
        }
        // To three significant digits, as the histogram keeps them; 0.1 µs is plenty.
        let us = |ns: f64| Some((ns / 100.0).round() / 10.0);
        let at = |quantile| us(histogram.value_at_quantile(quantile) as f64);
        Self {
            samples: histogram.len(),
            mean_us: us(histogram.mean()),
            p50_us: at(0.5),
            p90_us: at(0.9),
            p99_us: at(0.99),
            p99_9_us: at(0.999),
            p99_99_us: at(0.9999),
            max_us: us(histogram.max() as f64),
        }
    }
}

impl fmt::Display for Latency {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "p50 {}  p90 {}  p99 {}  p99.9 {}  p99.99 {}  max {}",
            time(self.p50_us),
            time(self.p90_us),
            time(self.p99_us),
            time(self.p99_9_us),
            time(self.p99_99_us),
            time(self.max_us)
        )
    }
}

/// The counts above 0, each under its name.
pub fn occurring(
    counts: &[u64],
    name: impl Fn(usize) -> &'static str,
) -> BTreeMap<&'static str, u64> {
    let occurring = counts.iter().enumerate().filter(|(_, count)| **count > 0);
    occurring.map(|(index, count)| (name(index), *count)).collect()
}

/// Counts as text in brackets; nothing where there are none.
pub fn each(counts: &BTreeMap<&'static str, u64>) -> String {
    let each: Vec<String> = counts.iter().map(|(name, count)| format!("{name} {count}")).collect();
    if each.is_empty() { String::new() } else { format!(" ({})", each.join(", ")) }
}

/// A time as text; - where there is none.
pub fn time(us: Option<f64>) -> String {
    match us {
        None => "-".to_owned(),
        Some(us) if us < 1000.0 => format!("{us:.0} µs"),
        Some(us) if us < 1e6 => format!("{:.2} ms", us / 1e3),
        Some(us) => format!("{:.2} s", us / 1e6),
    }
}
