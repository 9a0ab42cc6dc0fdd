//! What the limits allow each bucket to grant.

use std::path::Path;
use std::time::Duration;

use tollgate_server::config::model::Limits;
use tollgate_server::domain::bucket::{Algorithm, BucketKind, BucketLimit};
use tollgate_server::service::limits::{self, LoadError};

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
    pub(super) fn allowance(&self, bucket: &str) -> Option<Allowance> {
        match self {
            Self::Same(limit) => Some(Allowance::new(limit, false)),
            Self::File(limits) => {
                let (namespace, name) = bucket.split_once(':').unwrap_or((bucket, ""));
                let found = limits.find(namespace, name)?;
                let dynamic = matches!(found.kind, BucketKind::Dynamic { .. });
                Some(Allowance::new(&found.bucket.limit, dynamic))
            }
        }
    }
}

/// Upper bounds for one bucket.
#[derive(Clone, Copy, Debug)]
pub(super) struct Allowance {
    size_tokens: f64,
    fill_rate: f64,
    debt_tokens: f64,
    has_windows: bool,
    /// Idle time after which a dynamic bucket is removed and starts full again.
    renewed_after: Option<Duration>,
}

impl Allowance {
    fn new(limit: &BucketLimit, dynamic: bool) -> Self {
        Self {
            size_tokens: limit.size_tokens as f64,
            fill_rate: limit.fill_rate,
            debt_tokens: match limit.algorithm {
                // A time may touch two windows more than fit into it.
                Algorithm::Windows(_) => limit.size_tokens as f64,
                _ => limit.fill_rate * limit.max_debt_ms as f64 / 1000.0,
            },
            has_windows: limit.algorithm.windows().is_some(),
            renewed_after: limit.max_idle_ms.filter(|_| dynamic).map(Duration::from_millis),
        }
    }

    /// Most tokens that it may grant within `span`.
    pub(super) fn bound_tokens(&self, span: Duration) -> f64 {
        // Each renewal needs `renewed_after` without a request, which limits their number.
        let renewals = self
            .renewed_after
            .map_or(0.0, |idle| (span.as_secs_f64() / idle.as_secs_f64().max(0.001)).floor());
        (1.0 + renewals) * (self.size_tokens + self.debt_tokens)
            + self.fill_rate * span.as_secs_f64()
    }

    /// Initial tokens plus those filled within `span`; of windows, the limits of those that begin and end
    /// within it, or of the first one.
    pub(super) fn accrual_tokens(&self, span: Duration) -> f64 {
        let filled = self.fill_rate * span.as_secs_f64();
        match self.has_windows {
            true => self.size_tokens * ((filled / self.size_tokens).floor() - 1.0).max(1.0),
            false => self.size_tokens + filled,
        }
    }
}

/// Reads a limits file.
pub fn load_limits(path: &Path) -> Result<Limits, LoadError> {
    limits::read(path).map(|parsed| parsed.limits)
}
