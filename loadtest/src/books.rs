//! The books: what every bucket granted, held against what it may have granted.
//!
//! Over a span T a bucket grants at most `size + fill_rate * T` and its debt limit. T runs
//! from just before the first request to just after the last answer, so every grant lies
//! within it and a correct server can't be found at fault.

use std::collections::HashMap;
use std::path::Path;
use std::time::Duration;

use serde::Serialize;
use tollgate_server::config::model::Limits;
use tollgate_server::domain::bucket::BucketLimit;
use tollgate_server::domain::bucket::Place;
use tollgate_server::service::limits::{self, LoadError};

/// How many violated buckets a report names.
const NAMED_VIOLATIONS: usize = 10;

/// The most keys that have a line by number: a million of them take 8 MB.
const NUMBERED: u64 = 1 << 24;

/// What each bucket granted, under the name of the bucket that decided: names that share a
/// default bucket are booked together.
#[derive(Clone, Debug, Default)]
pub struct Ledger {
    granted: HashMap<Box<str>, u64>,
    /// What buckets granted that are called what was asked for, by the number of the key: looking
    /// up a name would cost more than anything else that is counted.
    own: Vec<u64>,
    degraded_grants: u64,
    degraded_tokens: u64,
}

impl Ledger {
    /// Books `tokens` granted by the bucket that key number `key` of `keys` asks for; `false`: by
    /// its name, please.
    pub fn grant_own(&mut self, key: u64, keys: u64, tokens: u64) -> bool {
        if keys > NUMBERED {
            return false;
        }
        if self.own.is_empty() {
            self.own.resize(keys as usize, 0);
        }
        self.own[key as usize] += tokens;
        true
    }

    /// Puts names in the place of numbers.
    pub fn settle(&mut self, name: impl Fn(u64) -> String) {
        for (key, tokens) in (0..).zip(std::mem::take(&mut self.own)) {
            if tokens > 0 {
                self.grant(&name(key), tokens);
            }
        }
    }

    /// Books `tokens` granted by `bucket`, as `namespace:bucket`.
    pub fn grant(&mut self, bucket: &str, tokens: u64) {
        if let Some(sum) = self.granted.get_mut(bucket) {
            *sum += tokens;
        } else {
            self.granted.insert(bucket.into(), tokens);
        }
    }

    /// Books tokens granted without the shared store. Such a node knows only its own share,
    /// so these are kept apart and no bound holds for them.
    pub fn grant_degraded(&mut self, tokens: u64) {
        self.degraded_grants += 1;
        self.degraded_tokens += tokens;
    }

    /// Adds what another thread booked.
    pub fn merge(&mut self, other: Self) {
        if self.own.is_empty() {
            self.own = other.own;
        } else {
            self.own.iter_mut().zip(other.own).for_each(|(sum, tokens)| *sum += tokens);
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

/// Where the buckets' limits are known from.
#[derive(Clone, Debug)]
pub enum Source {
    /// The limits file that the nodes run with.
    File(Box<Limits>),
    /// One limit for every bucket.
    Same(BucketLimit),
}

impl Source {
    /// What `bucket`, as `namespace:bucket`, may grant; `None`: no bucket serves that name.
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

/// What one bucket may grant.
#[derive(Clone, Copy, Debug)]
struct Allowance {
    size_tokens: f64,
    fill_rate: f64,
    debt_tokens: f64,
    /// A dynamic bucket that is removed after so long without use starts full again.
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

    /// The most tokens that it may grant within `span`.
    fn bound_tokens(&self, span: Duration) -> f64 {
        // Each renewal takes `renewed_after` without a request, so there can't be more of them.
        let renewals = self
            .renewed_after
            .map_or(0.0, |idle| (span.as_secs_f64() / idle.as_secs_f64().max(0.001)).floor());
        (1.0 + renewals) * (self.size_tokens + self.debt_tokens)
            + self.fill_rate * span.as_secs_f64()
    }

    /// What it accrues within `span`, with what it held at the start.
    fn accrual_tokens(&self, span: Duration) -> f64 {
        self.size_tokens + self.fill_rate * span.as_secs_f64()
    }
}

/// One bucket's line in the books.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Line {
    /// The bucket that decided, `namespace:bucket`.
    pub bucket: String,
    /// Tokens granted by it.
    pub granted_tokens: u64,
    /// The most that it may have granted; `None`: no bucket of the limits file serves it.
    pub bound_tokens: Option<f64>,
    /// Granted ÷ bound; `None` where there is no bound.
    pub granted_to_bound: Option<f64>,
}

/// Whether a hot bucket delivered what it accrued.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Saturation {
    /// The least share of `size + fill_rate * T` that was to be delivered, where T ends with
    /// the last request.
    pub expected: f64,
    /// The share that was delivered.
    pub delivered: f64,
    /// Whether the bucket ever ran short: a request was refused with REJECTED_TIMEOUT or had
    /// to wait. Without that the load was too light to tell.
    pub saturated: bool,
    /// Whether the bucket was saturated and delivered what was expected.
    pub met: bool,
}

/// What came of holding the books against the limits.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Audit {
    /// Whether limits were given to check against.
    pub checked: bool,
    /// From just before the first request to just after the last answer, warm-up included.
    pub span_s: f64,
    /// Buckets that granted anything.
    pub buckets: u64,
    /// Tokens granted, warm-up included, degraded grants left out.
    pub granted_tokens: u64,
    /// Grants made without the shared store: left out of the check.
    pub degraded_grants: u64,
    /// Tokens of those grants.
    pub degraded_tokens: u64,
    /// Buckets that granted more than their bound.
    pub violations: u64,
    /// The worst of them, at most 10.
    pub violated: Vec<Line>,
    /// The bucket with the highest share of its bound; `None` when nothing was checked.
    pub most_loaded: Option<Line>,
    /// `None` unless an expectation was given.
    pub saturation: Option<Saturation>,
}

impl Audit {
    /// Whether no bucket broke its bound and every expectation was met.
    pub fn passed(&self) -> bool {
        self.violations == 0 && self.saturation.as_ref().is_none_or(|saturation| saturation.met)
    }
}

/// What the audit of a run expects of its one hot bucket.
#[derive(Clone, Copy, Debug)]
pub struct Expectation {
    /// The least share of what accrued that is to be delivered.
    pub share: f64,
    /// From just before the first request to just before the last: what accrues later could
    /// not be delivered.
    pub asking: Duration,
    /// Whether any request found the bucket short.
    pub saturated: bool,
}

/// Holds `ledger`, kept over `span`, against the limits of `source`.
pub fn audit(
    ledger: &Ledger,
    source: Option<&Source>,
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

    let mut most_loaded: Option<(f64, Line, Option<Allowance>)> = None;
    let mut violated = Vec::new();
    for (bucket, &granted_tokens) in &ledger.granted {
        let allowance = source.allowance(bucket);
        let bound_tokens = allowance.map(|allowance| allowance.bound_tokens(span));
        // A bucket that doesn't exist may grant nothing: any grant is infinitely too much.
        let ratio = bound_tokens.map_or(f64::INFINITY, |bound| granted_tokens as f64 / bound);
        let leads = most_loaded.as_ref().is_none_or(|(most, ..)| ratio > *most);
        if !leads && ratio <= 1.0 {
            continue;
        }
        let line = Line {
            bucket: bucket.to_string(),
            granted_tokens,
            bound_tokens,
            granted_to_bound: bound_tokens.map(|_| ratio),
        };
        if ratio > 1.0 {
            audit.violations += 1;
            violated.push((ratio, line.clone()));
            // Cut back now and then, so that a server that fails everywhere costs no memory.
            if violated.len() >= 1000 {
                keep_worst(&mut violated);
            }
        }
        if leads {
            most_loaded = Some((ratio, line, allowance));
        }
    }
    keep_worst(&mut violated);
    audit.violated = violated.into_iter().map(|(_, line)| line).collect();
    audit.saturation = expectation.map(|Expectation { share, asking, saturated }| {
        let delivered = match &most_loaded {
            Some((_, line, Some(allowance))) => {
                line.granted_tokens as f64 / allowance.accrual_tokens(asking)
            }
            _ => 0.0,
        };
        let met = saturated && delivered >= share;
        Saturation { expected: share, delivered, saturated, met }
    });
    audit.most_loaded = most_loaded.map(|(_, line, _)| line);
    audit
}

fn keep_worst(violated: &mut Vec<(f64, Line)>) {
    violated.sort_by(|(a, line_a), (b, line_b)| {
        b.total_cmp(a).then_with(|| line_a.bucket.cmp(&line_b.bucket))
    });
    violated.truncate(NAMED_VIOLATIONS);
}

/// Reads a limits file.
pub fn load_limits(path: &Path) -> Result<Limits, LoadError> {
    limits::read(path).map(|parsed| parsed.limits)
}

#[cfg(test)]
#[path = "books_tests.rs"]
mod tests;
