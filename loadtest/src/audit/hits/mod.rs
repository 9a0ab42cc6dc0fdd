//! The audit of hits: what each domain was granted in a whole run, and all domains together, against
//! the most that their limits allow. See [`bound`].

use std::time::Duration;

use serde::Serialize;
use tollgate_server::config::model::Throttle;

use super::comparison::{Comparison, Entry, ratio};
use super::ledger::Ledger;

pub mod bound;

/// Audited hits of one domain.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DomainEntry {
    /// The domain.
    pub domain: String,
    /// Hits granted to it.
    pub granted_hits: u64,
    /// Most hits that its limits allow.
    pub bound_hits: f64,
    /// Granted ÷ bound; null for a bound of 0.
    pub granted_to_bound: f64,
}

/// Audited hits of all domains.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct AllDomains {
    /// Most hits that the `global_limit` allows.
    pub bound_hits: f64,
    /// Granted ÷ bound; null for a bound of 0.
    pub granted_to_bound: f64,
    /// Whether the hits of all domains are within the bound.
    pub kept: bool,
}

/// Result of the audit.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct HitAudit {
    /// Whether there were limits to check against.
    pub checked: bool,
    /// Audited time span, in seconds: from just before the first request to just after the last
    /// answer, with the warm-up.
    pub span_s: f64,
    /// Domains with hits.
    pub domains: u64,
    /// Hits granted, with the warm-up, without degraded and shadow grants.
    pub granted_hits: u64,
    /// Grants made without the shared store, which are not audited.
    pub degraded_grants: u64,
    /// Hits of the degraded grants.
    pub degraded_hits: u64,
    /// All domains together; `None` without a `global_limit`.
    pub all: Option<AllDomains>,
    /// Domains that were granted more than their bound.
    pub violations: u64,
    /// The worst violations, at most 10.
    pub violated: Vec<DomainEntry>,
    /// Domain with the highest share of its bound; `None` if nothing was checked.
    pub most_loaded: Option<DomainEntry>,
}

impl HitAudit {
    /// Audits the grants of `ledger`, made within `span`, against the limits of `throttle`.
    pub fn new(ledger: &Ledger, throttle: Option<&Throttle>, span: Duration) -> Self {
        let granted_hits = ledger.granted.values().sum();
        let mut audit = Self {
            checked: throttle.is_some(),
            span_s: span.as_secs_f64(),
            domains: ledger.granted.len() as u64,
            granted_hits,
            degraded_grants: ledger.degraded_grants,
            degraded_hits: ledger.degraded_amount,
            all: None,
            violations: 0,
            violated: Vec::new(),
            most_loaded: None,
        };
        let Some(throttle) = throttle else { return audit };

        let span_us = bound::span_us(span);
        let comparison = Comparison::new(ledger, |domain| {
            Some(bound::domain_hits(&throttle.limits_of(domain), span_us) as f64)
        });
        audit.violations = comparison.violations;
        audit.violated = comparison.violated.into_iter().map(DomainEntry::from).collect();
        audit.most_loaded = comparison.most_loaded.map(DomainEntry::from);
        audit.all = throttle.global_limit.map(|limit| {
            let bound_hits = bound::second_hits(limit, span_us) as f64;
            let granted_to_bound = ratio(granted_hits, bound_hits);
            AllDomains { bound_hits, granted_to_bound, kept: granted_to_bound <= 1.0 }
        });
        audit
    }

    /// Whether no domain, nor all together, exceeded the bound.
    pub fn passed(&self) -> bool {
        self.violations == 0 && self.all.as_ref().is_none_or(|all| all.kept)
    }
}

impl From<Entry> for DomainEntry {
    fn from(Entry { name, granted, bound, ratio }: Entry) -> Self {
        Self {
            domain: name.into(),
            granted_hits: granted,
            bound_hits: bound.unwrap_or(0.0),
            granted_to_bound: ratio,
        }
    }
}

#[cfg(test)]
mod tests;
