//! What decides when no node does.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use crate::decision::{DecidedBy, Decision, Grant, Reason, Refusal};

/// What decides when no node does: there is no answer in time, no node can be reached, a node
/// answers with an error, the nodes can't reach the shared state and their policy is to refuse, or
/// the limits have no bucket or resource of the name. Of hits and copies, it grants the fewest that
/// the request accepts; of a hold, also when no node renews it.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Fallback {
    /// Grants everything.
    Allow,
    /// Refuses everything, with [`Reason::Unavailable`].
    Deny,
    /// Grants at a rate of this process alone; see [`Fallback::rate`].
    Rate(LocalRate),
}

impl Fallback {
    /// Grants `per_second` tokens a second, and up to `burst` at once; see [`LocalRate::new`]. All
    /// buckets and resources that the fallback is set for share the rate.
    ///
    /// Each process has a rate of its own: with ten processes, a tenth of what the resource bears
    /// is the right size.
    pub fn rate(per_second: f64, burst: u64) -> Self {
        Self::Rate(LocalRate::new(per_second, burst))
    }

    pub(crate) fn decide(&self, tokens: u64, now: Instant) -> Decision {
        let refused = |reason, retry_after| {
            Decision::Refused(Refusal::new(reason, retry_after, DecidedBy::Fallback))
        };
        match self {
            Self::Deny => return refused(Reason::Unavailable, None),
            Self::Allow => {}
            Self::Rate(rate) => match rate.take(tokens, now) {
                Ok(()) => {}
                Err(retry_after) => return refused(Reason::Limit, retry_after),
            },
        }
        Decision::Granted(Grant {
            tokens,
            wait: Duration::ZERO,
            soft_limited: false,
            shadow: false,
            decided_by: DecidedBy::Fallback,
            level: None,
        })
    }
}

/// A token bucket in this process. Clones share it.
#[derive(Clone, Debug)]
pub struct LocalRate(Arc<Rate>);

#[derive(Debug)]
struct Rate {
    per_second: f64,
    burst: u64,
    /// The tokens, and when they were counted; `None` if it is full.
    state: Mutex<Option<(f64, Instant)>>,
}

impl LocalRate {
    /// A full bucket that grants `per_second` tokens a second, and up to `burst` at once.
    ///
    /// # Panics
    ///
    /// If `per_second` is negative or not a number.
    pub fn new(per_second: f64, burst: u64) -> Self {
        assert!(per_second >= 0.0, "a rate of {per_second} tokens a second");
        Self(Arc::new(Rate { per_second, burst, state: Mutex::default() }))
    }

    /// Takes tokens; or says after how long there are enough, `None` for never.
    pub(crate) fn take(&self, tokens: u64, now: Instant) -> Result<(), Option<Duration>> {
        let Rate { per_second, burst, state } = &*self.0;
        if tokens > *burst {
            return Err(None);
        }
        let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
        let full = *burst as f64;
        // Others may have come first with a later time.
        let now = state.map_or(now, |(_, at)| now.max(at));
        let there = state.map_or(full, |(tokens, at)| {
            (tokens + now.duration_since(at).as_secs_f64() * per_second).min(full)
        });
        let left = there - tokens as f64;
        if left < 0.0 {
            // A rate of 0, or one that takes longer than any time there is.
            return Err(Duration::try_from_secs_f64(-left / per_second).ok());
        }
        *state = Some((left, now));
        Ok(())
    }
}

/// The fallbacks of a client: the most specific one counts.
#[derive(Clone, Debug, Default)]
pub(crate) struct Fallbacks {
    pub(crate) everything: Option<Fallback>,
    pub(crate) namespaces: HashMap<String, NamespaceFallbacks>,
    /// Those for hits and holds.
    pub(crate) resources: HashMap<String, Fallback>,
}

/// The fallbacks within a namespace.
#[derive(Clone, Debug, Default)]
pub(crate) struct NamespaceFallbacks {
    pub(crate) all_buckets: Option<Fallback>,
    pub(crate) buckets: HashMap<String, Fallback>,
}

impl Fallbacks {
    pub(crate) fn get(&self, namespace: &str, bucket: &str) -> Option<&Fallback> {
        let within = self.namespaces.get(namespace);
        within
            .and_then(|within| within.buckets.get(bucket).or(within.all_buckets.as_ref()))
            .or(self.everything.as_ref())
    }

    pub(crate) fn of_resource(&self, resource: &str) -> Option<&Fallback> {
        self.resources.get(resource).or(self.everything.as_ref())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_local_rate_refills_up_to_its_burst() {
        let rate = LocalRate::new(10.0, 3);
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        for _ in 0..3 {
            assert_eq!(rate.take(1, at(0)), Ok(()));
        }
        assert_eq!(rate.take(1, at(0)), Err(Some(Duration::from_millis(100))));
        assert_eq!(rate.take(2, at(50)), Err(Some(Duration::from_millis(150))));
        assert_eq!(rate.take(1, at(100)), Ok(()));
        assert_eq!(rate.take(3, at(60_000)), Ok(()), "full");
        assert_eq!(rate.take(1, at(60_000)), Err(Some(Duration::from_millis(100))));
        // An earlier time than that of another caller gives nothing.
        assert_eq!(rate.take(1, at(0)), Err(Some(Duration::from_millis(100))));
        assert_eq!(rate.take(1, at(60_100)), Ok(()));
        assert_eq!(rate.take(1, at(60_200)), Ok(()));
        assert_eq!(rate.take(0, at(60_100)), Ok(()));
        assert_eq!(rate.take(1, at(60_200)), Err(Some(Duration::from_millis(100))));
        assert_eq!(rate.take(4, at(120_000)), Err(None), "more than it ever holds");
        let never = LocalRate::new(0.0, 1);
        assert_eq!(never.take(1, at(0)), Ok(()));
        assert_eq!(never.take(1, at(0)), Err(None));
    }

    #[test]
    fn the_most_specific_fallback_counts() {
        let mut fallbacks = Fallbacks::default();
        assert!(fallbacks.get("a", "b").is_none());
        fallbacks.everything = Some(Fallback::Allow);
        let within = fallbacks.namespaces.entry("a".to_owned()).or_default();
        within.buckets.insert("b".to_owned(), Fallback::rate(1.0, 1));
        assert!(matches!(fallbacks.get("a", "b"), Some(Fallback::Rate(_))));
        assert!(matches!(fallbacks.get("a", "c"), Some(Fallback::Allow)));
        fallbacks.namespaces.get_mut("a").unwrap().all_buckets = Some(Fallback::Deny);
        assert!(matches!(fallbacks.get("a", "c"), Some(Fallback::Deny)));
        assert!(matches!(fallbacks.get("b", "b"), Some(Fallback::Allow)));
    }
}
