//! Figures that all reports share: latency percentiles, counts by name, formatted times.

use std::collections::BTreeMap;
use std::fmt;

use hdrhistogram::Histogram;
use serde::Serialize;

/// Latencies in microseconds; null without samples.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Latency {
    /// Number of samples.
    pub samples: u64,
    /// Mean.
    pub mean_us: Option<f64>,
    /// Median.
    pub p50_us: Option<f64>,
    /// 90th percentile.
    pub p90_us: Option<f64>,
    /// 99th percentile.
    pub p99_us: Option<f64>,
    /// 99.9th percentile.
    pub p99_9_us: Option<f64>,
    /// 99.99th percentile.
    pub p99_99_us: Option<f64>,
    /// Maximum.
    pub max_us: Option<f64>,
}

impl Latency {
    /// Percentiles of `histogram`, which holds latencies in ns.
    pub fn of(histogram: &Histogram<u64>) -> Self {
        if histogram.is_empty() {
            return Self::default();
        }
        // The histogram keeps three significant digits; round to 0.1 µs.
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
            time_text(self.p50_us),
            time_text(self.p90_us),
            time_text(self.p99_us),
            time_text(self.p99_9_us),
            time_text(self.p99_99_us),
            time_text(self.max_us)
        )
    }
}

/// The counts above 0, by name.
pub fn nonzero(
    counts: &[u64],
    name: impl Fn(usize) -> &'static str,
) -> BTreeMap<&'static str, u64> {
    let nonzero = counts.iter().enumerate().filter(|(_, count)| **count > 0);
    nonzero.map(|(index, count)| (name(index), *count)).collect()
}

/// Counts as text in brackets; empty without counts.
pub fn bracketed(counts: &BTreeMap<&'static str, u64>) -> String {
    let bracketed: Vec<String> =
        counts.iter().map(|(name, count)| format!("{name} {count}")).collect();
    if bracketed.is_empty() { String::new() } else { format!(" ({})", bracketed.join(", ")) }
}

/// Formats a time with a unit; `-` for `None`.
pub fn time_text(us: Option<f64>) -> String {
    match us {
        None => "-".to_owned(),
        Some(us) if us < 1000.0 => format!("{us:.0} µs"),
        Some(us) if us < 1e6 => format!("{:.2} ms", us / 1e3),
        Some(us) => format!("{:.2} s", us / 1e6),
    }
}
