//! Ledger of the tokens that each bucket granted, and its audit against the limits.
//!
//! Within a span T a bucket may grant at most `size + fill_rate * T` plus its debt limit. T runs
//! from just before the first request to just after the last answer. Every grant lies within T, so
//! the audit never reports a correct server.

use std::collections::HashMap;
use std::path::Path;
use std::time::Duration;

use serde::Serialize;
use tollgate_server::config::model::Limits;
use tollgate_server::domain::bucket::BucketLimit;
use tollgate_server::domain::bucket::Place;
use tollgate_server::service::limits::{self, LoadError};

/// Violating buckets listed in a report.
const REPORTED_VIOLATIONS: usize = 10;

/// Most keys counted by number; 8 bytes each, 128 MiB at the limit.
const MAX_NUMBERED_KEYS: u64 = 1 << 24;

/// Tokens granted per bucket that decided. Names that share a default bucket have one entry.
#[derive(Clone, Debug, Default)]
pub struct Ledger {
    granted: HashMap<Box<str>, u64>,
    /// Tokens by key number, for requests decided by the bucket of the requested name. A map lookup
    /// by name would dominate the cost of counting.
    by_number: Vec<u64>,
    degraded_grants: u64,
    degraded_tokens: u64,
}

impl Ledger {
    /// Adds `tokens` granted by the bucket of key number `key` out of `keys`. Returns false if
    /// there are too many keys to count by number; use [`Ledger::grant`] then.
    pub fn grant_by_number(&mut self, key: u64, keys: u64, tokens: u64) -> bool {
        if keys > MAX_NUMBERED_KEYS {
            return false;
        }
        if self.by_number.is_empty() {
            self.by_number.resize(keys as usize, 0);
        }
        self.by_number[key as usize] += tokens;
        true
    }

    /// Moves the counts by key number to the counts by bucket name.
    pub fn resolve_names(&mut self, name: impl Fn(u64) -> String) {
        for (key, tokens) in (0..).zip(std::mem::take(&mut self.by_number)) {
            if tokens > 0 {
                self.grant(&name(key), tokens);
            }
        }
    }

    /// Adds `tokens` granted by `bucket`, which is `namespace:bucket`.
    pub fn grant(&mut self, bucket: &str, tokens: u64) {
        if let Some(sum) = self.granted.get_mut(bucket) {
            *sum += tokens;
        } else {
            self.granted.insert(bucket.into(), tokens);
        }
    }

    /// Adds tokens granted without the shared store. A degraded node sees only its own share, so
    /// these are counted separately and not audited.
    pub fn grant_degraded(&mut self, tokens: u64) {
        self.degraded_grants += 1;
        self.degraded_tokens += tokens;
    }

    /// Adds the counts of another thread.
    pub fn merge(&mut self, other: Self) {
        if self.by_number.is_empty() {
            self.by_number = other.by_number;
        } else {
            self.by_number.iter_mut().zip(other.by_number).for_each(|(sum, tokens)| *sum += tokens);
        }
        if self.granted.is_empty() {
            self.granted = other.granted;
        } else {
            for (bucket, tokens) in other.granted {
                *self.granted.entry(bucket).or_default() += tokens;
            }
        }
        self.degraded_grants += other.degraded_grants;
        self.degraded_tokens += other.degraded_tokens;
    }
}

/// Where the limits for the audit come from.
#[derive(Clone, Debug)]
pub enum LimitSource {
    /// The limits file of the nodes.
    File(Box<Limits>),
    /// The same limit for every bucket.
    Same(BucketLimit),
}

impl LimitSource {
    /// Allowance of `bucket` (`namespace:bucket`); `None` if no bucket serves that name.
    fn allowance(&self, bucket: &str) -> Option<Allowance> {
        match self {
            Self::Same(limit) => Some(Allowance::new(limit, false)),
            Self::File(limits) => {
                let (namespace, name) = bucket.split_once(':').unwrap_or((bucket, ""));
                let found = limits.find(namespace, name)?;
                let dynamic = matches!(found.place, Place::Dynamic { .. });
                Some(Allowance::new(&found.bucket.limit, dynamic))
            }
        }
    }
}

/// Upper bounds for one bucket.
#[derive(Clone, Copy, Debug)]
struct Allowance {
    size_tokens: f64,
    fill_rate: f64,
    debt_tokens: f64,
    /// Idle time after which a dynamic bucket is removed and starts full again.
    renewed_after: Option<Duration>,
}

impl Allowance {
    fn new(limit: &BucketLimit, dynamic: bool) -> Self {
        Self {
            size_tokens: limit.size_tokens as f64,
            fill_rate: limit.fill_rate,
            debt_tokens: limit.fill_rate * limit.max_debt_ms as f64 / 1000.0,
            renewed_after: limit.max_idle_ms.filter(|_| dynamic).map(Duration::from_millis),
        }
    }

    /// Most tokens that it may grant within `span`.
    fn bound_tokens(&self, span: Duration) -> f64 {
        // Each renewal needs `renewed_after` without a request, which limits their number.
        let renewals = self
            .renewed_after
            .map_or(0.0, |idle| (span.as_secs_f64() / idle.as_secs_f64().max(0.001)).floor());
        (1.0 + renewals) * (self.size_tokens + self.debt_tokens)
            + self.fill_rate * span.as_secs_f64()
    }

    /// Initial tokens plus those filled within `span`.
    fn accrual_tokens(&self, span: Duration) -> f64 {
        self.size_tokens + self.fill_rate * span.as_secs_f64()
    }
}

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

    let mut most_loaded: Option<(f64, LedgerEntry, Option<Allowance>)> = None;
    let mut violated = Vec::new();
    for (bucket, &granted_tokens) in &ledger.granted {
        let allowance = source.allowance(bucket);
        let bound_tokens = allowance.map(|allowance| allowance.bound_tokens(span));
        // A bucket that does not exist may grant nothing.
        let ratio = bound_tokens.map_or(f64::INFINITY, |bound| granted_tokens as f64 / bound);
        let leads = most_loaded.as_ref().is_none_or(|(most, ..)| ratio > *most);
        if !leads && ratio <= 1.0 {
            continue;
        }
        let entry = LedgerEntry {
            bucket: bucket.to_string(),
            granted_tokens,
            bound_tokens,
            granted_to_bound: bound_tokens.map(|_| ratio),
        };
        if ratio > 1.0 {
            audit.violations += 1;
            violated.push((ratio, entry.clone()));
            // Truncated at intervals to bound memory if most buckets violate.
            if violated.len() >= 1000 {
                keep_worst(&mut violated);
            }
        }
        if leads {
            most_loaded = Some((ratio, entry, allowance));
        }
    }
    keep_worst(&mut violated);
    audit.violated = violated.into_iter().map(|(_, entry)| entry).collect();
    audit.saturation = expectation.map(|expectation| {
        expectation.compare(most_loaded.as_ref().and_then(|(_, entry, allowance)| {
            allowance.map(|allowance| (entry.granted_tokens, allowance))
        }))
    });
    audit.most_loaded = most_loaded.map(|(_, entry, _)| entry);
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

fn keep_worst(violated: &mut Vec<(f64, LedgerEntry)>) {
    violated.sort_by(|(a, entry_a), (b, entry_b)| {
        b.total_cmp(a).then_with(|| entry_a.bucket.cmp(&entry_b.bucket))
    });
    violated.truncate(REPORTED_VIOLATIONS);
}

/// Reads a limits file.
pub fn load_limits(path: &Path) -> Result<Limits, LoadError> {
    limits::read(path).map(|parsed| parsed.limits)
}

#[cfg(test)]
#[path = "books_tests.rs"]
mod tests;
