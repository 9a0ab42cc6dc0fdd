//! Ledger of the tokens that each bucket granted, and its audit against the limits.
//!
//! Within a span T a bucket may grant at most `size + fill_rate * T` plus its debt limit. T runs
//! from just before the first request to just after the last answer. Every grant lies within T, so
//! the audit never reports a correct server.

mod allowance;
mod ledger;

use std::time::Duration;

use serde::Serialize;

pub use allowance::{LimitSource, load_limits};
pub use ledger::Ledger;

use allowance::Allowance;

/// Violating buckets listed in a report.
const REPORTED_VIOLATIONS: usize = 10;

/// Audited grants of one bucket.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LedgerEntry {
    /// The bucket that decided, as `namespace:bucket`.
    pub bucket: String,
    /// Tokens that it granted.
    pub granted_tokens: u64,
    /// Most tokens that it may grant; `None` if no bucket of the limits file serves the name.
    pub bound_tokens: Option<f64>,
    /// Granted ÷ bound; `None` without a bound.
    pub granted_to_bound: Option<f64>,
}

/// Whether a hot bucket delivered the tokens that it accrued.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Saturation {
    /// Least expected share of `size + fill_rate * T`, where T ends with the last request.
    pub expected: f64,
    /// Delivered share.
    pub delivered: f64,
    /// Whether the bucket ever ran short (a REJECTED_TIMEOUT, or a grant with a wait). Otherwise
    /// the load was too light to judge.
    pub saturated: bool,
    /// Whether the bucket was saturated and delivered the expected share.
    pub met: bool,
}

/// Result of the audit.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Audit {
    /// Whether there were limits to check against.
    pub checked: bool,
    /// Audited time span, in seconds: from just before the first request to just after the last
    /// answer, with the warm-up.
    pub span_s: f64,
    /// Buckets that granted tokens.
    pub buckets: u64,
    /// Tokens granted, with the warm-up, without degraded grants.
    pub granted_tokens: u64,
    /// Grants made without the shared store, which are not audited.
    pub degraded_grants: u64,
    /// Tokens of the degraded grants.
    pub degraded_tokens: u64,
    /// Buckets that granted more than their bound.
    pub violations: u64,
    /// The worst violations, at most 10.
    pub violated: Vec<LedgerEntry>,
    /// Bucket with the highest share of its bound; `None` if nothing was checked.
    pub most_loaded: Option<LedgerEntry>,
    /// `None` unless a saturation was expected.
    pub saturation: Option<Saturation>,
}

impl Audit {
    /// Whether no bucket exceeded its bound and the expected saturation was met.
    pub fn passed(&self) -> bool {
        self.violations == 0 && self.saturation.as_ref().is_none_or(|saturation| saturation.met)
    }
}

/// Saturation expected of a single hot bucket.
#[derive(Clone, Copy, Debug)]
pub struct Expectation {
    /// Least share of the accrued tokens that must be delivered.
    pub share: f64,
    /// From just before the first request to just before the last one; tokens accrued later could
    /// not be delivered.
    pub request_span: Duration,
    /// Whether any request found the bucket short of tokens.
    pub saturated: bool,
}

/// Audits the grants of `ledger`, made within `span`, against the limits of `source`.
pub fn audit(
    ledger: &Ledger,
    source: Option<&LimitSource>,
    span: Duration,
    expectation: Option<Expectation>,
) -> Audit {
    let mut audit = Audit {
        checked: source.is_some(),
        span_s: span.as_secs_f64(),
        buckets: ledger.granted.len() as u64,
        granted_tokens: ledger.granted.values().sum(),
        degraded_grants: ledger.degraded_grants,
        degraded_tokens: ledger.degraded_tokens,
        violations: 0,
        violated: Vec::new(),
        most_loaded: None,
        saturation: None,
    };
    let Some(source) = source else { return audit };

    let mut comparison = Comparison::default();
    for (bucket, &granted_tokens) in &ledger.granted {
        comparison.add(bucket, granted_tokens, source.allowance(bucket), span);
    }
    let Comparison { violations, mut violated, most_loaded } = comparison;
    keep_worst(&mut violated);
    audit.violations = violations;
    audit.violated = violated.into_iter().map(|(_, entry)| entry).collect();
    audit.saturation = expectation.map(|expectation| {
        expectation.compare(most_loaded.as_ref().and_then(|(_, entry, allowance)| {
            allowance.map(|allowance| (entry.granted_tokens, allowance))
        }))
    });
    audit.most_loaded = most_loaded.map(|(_, entry, _)| entry);
    audit
}

/// The buckets compared so far. Each listed one has the granted share of its bound.
#[derive(Default)]
struct Comparison {
    violations: u64,
    /// Some of the violating buckets, the worst among them.
    violated: Vec<(f64, LedgerEntry)>,
    most_loaded: Option<(f64, LedgerEntry, Option<Allowance>)>,
}

impl Comparison {
    fn add(
        &mut self,
        bucket: &str,
        granted_tokens: u64,
        allowance: Option<Allowance>,
        span: Duration,
    ) {
        let bound_tokens = allowance.map(|allowance| allowance.bound_tokens(span));
        // A bucket that does not exist may grant nothing.
        let ratio = bound_tokens.map_or(f64::INFINITY, |bound| granted_tokens as f64 / bound);
        let leads = self.most_loaded.as_ref().is_none_or(|(most, ..)| ratio > *most);
        if !leads && ratio <= 1.0 {
            return;
        }
        let entry = LedgerEntry {
            bucket: bucket.to_owned(),
            granted_tokens,
            bound_tokens,
            granted_to_bound: bound_tokens.map(|_| ratio),
        };
        if ratio > 1.0 {
            self.violations += 1;
            self.violated.push((ratio, entry.clone()));
            // Truncated at intervals to bound memory if most buckets violate.
            if self.violated.len() >= 1000 {
                keep_worst(&mut self.violated);
            }
        }
        if leads {
            self.most_loaded = Some((ratio, entry, allowance));
        }
    }
}

impl Expectation {
    /// Compares the tokens that the bucket granted with what its allowance accrued.
    fn compare(self, bucket: Option<(u64, Allowance)>) -> Saturation {
        let Self { share, request_span, saturated } = self;
        let delivered = bucket.map_or(0.0, |(granted_tokens, allowance)| {
            granted_tokens as f64 / allowance.accrual_tokens(request_span)
        });
        let met = saturated && delivered >= share;
        Saturation { expected: share, delivered, saturated, met }
    }
}

fn keep_worst(violated: &mut Vec<(f64, LedgerEntry)>) {
    violated.sort_by(|(a, entry_a), (b, entry_b)| {
        b.total_cmp(a).then_with(|| entry_a.bucket.cmp(&entry_b.bucket))
    });
    violated.truncate(REPORTED_VIOLATIONS);
}

#[cfg(test)]
mod tests;
