//! Ledger of the tokens that each bucket granted, and its audit against the limits; [`hits`] is the
//! same for hits of domains.
//!
//! Within a span T a bucket may grant at most `size + fill_rate * T` plus its debt limit. T runs
//! from just before the first request to just after the last answer. Every grant lies within T, so
//! the audit never reports a correct server.

pub mod hits;

mod allowance;
mod comparison;
mod ledger;

use std::time::Duration;

use serde::Serialize;

pub use allowance::{LimitSource, load_limits};
pub use ledger::{Key, Ledger};

use allowance::Allowance;
use comparison::{Comparison, Entry};

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

impl From<Entry> for LedgerEntry {
    fn from(entry: Entry) -> Self {
        let granted_to_bound = entry.granted_to_bound();
        let Entry { name, granted, bound, .. } = entry;
        Self { bucket: name.into(), granted_tokens: granted, bound_tokens: bound, granted_to_bound }
    }
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
        degraded_tokens: ledger.degraded_amount,
        violations: 0,
        violated: Vec::new(),
        most_loaded: None,
        saturation: None,
    };
    let Some(source) = source else { return audit };

    let Comparison { violations, violated, most_loaded } = Comparison::new(ledger, |bucket| {
        source.allowance(bucket).map(|allowance| allowance.bound_tokens(span))
    });
    audit.violations = violations;
    audit.violated = violated.into_iter().map(LedgerEntry::from).collect();
    audit.saturation = expectation.map(|expectation| {
        expectation.compare(most_loaded.as_ref().and_then(|entry| {
            source.allowance(&entry.name).map(|allowance| (entry.granted, allowance))
        }))
    });
    audit.most_loaded = most_loaded.map(LedgerEntry::from);
    audit
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

#[cfg(test)]
mod tests;
