//! Bounds on the number of resources, per template and per caller, of domains, per throttle, and of
//! sessions. Callers choose these names freely, so without a bound one caller could fill the store with new
//! names.

use std::collections::HashMap;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::domain::lease::Holder;
use crate::domain::names::CallerId;
use crate::domain::time::Micros;

/// This node's estimate of how many resources of one template the store has: the count of the last
/// pass over all resources, plus what this node has created since. A template can exceed its bound
/// by at most the number of resources that other nodes create during one pass.
#[derive(Debug, Default)]
pub(super) struct ResourceCount {
    counted: AtomicU64,
    created: AtomicU64,
}

impl ResourceCount {
    /// Whether the count has reached `max`; `None` means unbounded.
    pub(super) fn is_full(&self, max: Option<u64>) -> bool {
        let count = || {
            let created = self.created.load(Ordering::Relaxed);
            self.counted.load(Ordering::Relaxed).saturating_add(created)
        };
        max.is_some_and(|max| count() >= max)
    }

    /// Records that this node created a resource.
    pub(super) fn record_created(&self) {
        self.created.fetch_add(1, Ordering::Relaxed);
    }

    /// Starts a pass over all resources. Pass the result to [`end_pass`](Self::end_pass).
    pub(super) fn begin_pass(&self) -> u64 {
        self.created.load(Ordering::Relaxed)
    }

    /// Ends a pass that counted `counted` resources. `created_before` is the result of
    /// [`begin_pass`](Self::begin_pass).
    pub(super) fn end_pass(&self, counted: u64, created_before: u64) {
        self.counted.store(counted, Ordering::Relaxed);
        self.created.fetch_sub(created_before, Ordering::Relaxed);
    }
}

/// The names in use on the resources of a template, as far as this node knows: domains with hits, or
/// sessions with holds.
#[derive(Default)]
pub(super) struct NameCount {
    hasher: RandomState,
    known: Mutex<KnownNames>,
    /// The number of those in `known`.
    count: AtomicU64,
}

/// The shortest time between two looks at all names, in µs.
const LOOK_US: i64 = 1_000_000;

#[derive(Default)]
struct KnownNames {
    /// By the hash of resource and name: when it is no longer in use, at the latest.
    until: HashMap<u64, Micros>,
    /// Before this time it is not looked for those that have expired.
    next_look: Micros,
    /// Nor before there are so many.
    many: usize,
}

impl KnownNames {
    /// Forgets those that have expired. Looks at all: at most once a second, or when they have doubled.
    fn clear(&mut self, now: Micros) {
        self.until.retain(|_, until| *until > now);
        let first = self.until.values().min().copied().unwrap_or(now);
        self.next_look = first.max(Micros(now.0.saturating_add(LOOK_US)));
        self.many = (2 * self.until.len()).max(1024);
    }
}

impl NameCount {
    /// Whether a name may be used: fewer than `max` are, or it is one of them. Otherwise the time at which
    /// there may be room.
    pub(super) fn admits(
        &self,
        resource: &str,
        name: &str,
        max: u64,
        now: Micros,
    ) -> Result<(), Micros> {
        if self.count.load(Ordering::Relaxed) < max {
            return Ok(());
        }
        let hash = self.hasher.hash_one((resource, name));
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if known.next_look <= now {
            known.clear(now);
            self.count.store(known.until.len() as u64, Ordering::Relaxed);
        }
        let is_admitted = (known.until.len() as u64) < max || known.until.contains_key(&hash);
        if is_admitted { Ok(()) } else { Err(known.next_look) }
    }

    /// Records that a name is in use until then.
    pub(super) fn record(&self, resource: &str, name: &str, (now, until): (Micros, Micros)) {
        let hash = self.hasher.hash_one((resource, name));
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.until.insert(hash, until);
        let soon = Micros(now.0.saturating_add(LOOK_US));
        known.next_look = known.next_look.min(until.max(soon));
        if known.until.len() >= known.many {
            known.clear(now);
        }
        self.count.store(known.until.len() as u64, Ordering::Relaxed);
    }

    /// Records that a name is no longer in use.
    pub(super) fn forget(&self, resource: &str, name: &str) {
        let hash = self.hasher.hash_one((resource, name));
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.until.remove(&hash);
        self.count.store(known.until.len() as u64, Ordering::Relaxed);
    }
}

/// The resources on which callers with a `max_resources` of their own hold leases from this node.
#[derive(Default)]
pub(super) struct CallerLeases {
    hasher: RandomState,
    /// For each caller: its leases by the hash of their resource.
    by_caller: Mutex<HashMap<CallerId, HashMap<u64, CallerLease>>>,
}

/// The leases of one caller on one resource.
struct CallerLease {
    /// When the last of them expires, in seconds since the epoch.
    until_s: i64,
    /// The hash of the holder; `None` once the caller has had leases for several holders. Then it
    /// is unknown which of them still hold one, so the resource counts until `until_s`.
    holder: Option<u64>,
}

impl CallerLeases {
    /// Records a lease of `caller` for `holder` on `resource` until `until_s`. Returns `false` and
    /// records nothing if that would be more than `max` resources.
    pub(super) fn admits(
        &self,
        (caller, max): (CallerId, u64),
        holder: Holder<'_>,
        resource: &str,
        (now_s, until_s): (i64, i64),
    ) -> bool {
        let (holder, resource) = (self.hasher.hash_one(holder), self.hasher.hash_one(resource));
        let mut by_caller = self.by_caller.lock().unwrap_or_else(PoisonError::into_inner);
        let held = by_caller.entry(caller).or_default();
        if let Some(lease) = held.get_mut(&resource) {
            lease.until_s = until_s.max(lease.until_s);
            lease.holder = lease.holder.filter(|first| *first == holder);
            return true;
        }
        if held.len() as u64 >= max {
            // This scan is rare: only a caller at its bound that asks for new resources causes it.
            held.retain(|_, lease| lease.until_s > now_s);
        }
        let has_room = (held.len() as u64) < max;
        if has_room {
            held.insert(resource, CallerLease { until_s, holder: Some(holder) });
        }
        has_room
    }

    /// Records that `holder` holds no lease on `resource`.
    pub(super) fn forget(&self, caller: CallerId, holder: Holder<'_>, resource: &str) {
        let (holder, resource) = (self.hasher.hash_one(holder), self.hasher.hash_one(resource));
        let mut by_caller = self.by_caller.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(held) = by_caller.get_mut(&caller) else { return };
        if held.get(&resource).is_some_and(|lease| lease.holder == Some(holder)) {
            held.remove(&resource);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn count_includes_resources_created_since_the_pass_began() {
        let count = ResourceCount::default();
        assert!(!count.is_full(Some(1)) && count.is_full(Some(0)) && !count.is_full(None));
        (0..3).for_each(|_| count.record_created());
        assert!(count.is_full(Some(3)) && !count.is_full(Some(4)));
        let created_before = count.begin_pass();
        count.record_created();
        count.end_pass(1, created_before);
        assert!(count.is_full(Some(2)) && !count.is_full(Some(3)));
    }

    #[test]
    fn domains_beyond_the_bound_are_not_admitted() {
        let domains = NameCount::default();
        let at = |seconds: i64| Micros(seconds * 1_000_000);
        let admits = |domain, now_s| domains.admits("search", domain, 2, at(now_s)).is_ok();
        let record = |domain, times_s: (i64, i64)| {
            domains.record("search", domain, (at(times_s.0), at(times_s.1)));
        };
        assert!(admits("a", 0) && admits("c", 0), "nothing is recorded");
        record("a", (0, 10));
        record("b", (0, 20));
        assert!(admits("a", 9) && admits("b", 9) && !admits("c", 9));
        assert_eq!(domains.admits("other", "a", 2, at(9)), Err(at(10)));
        record("a", (9, 15));
        assert!(!admits("c", 10) && admits("c", 15), "a has expired");
        record("c", (15, 30));
        assert!(!admits("a", 19) && admits("a", 20));
        record("a", (20, 40));
        assert!(!admits("d", 20));
        domains.forget("search", "a");
        assert!(admits("d", 20));
        record("long", (20, 1000));
        record("brief", (20, 22));
        assert!(!admits("d", 22), "long and c");
        assert!(admits("d", 30), "although long is the first since the last look");
    }

    #[test]
    fn expired_domains_are_forgotten_below_the_bound() {
        let domains = NameCount::default();
        for number in 0..100_000_i64 {
            let domain = number.to_string();
            domains.record("search", &domain, (Micros(number), Micros(number + 10)));
        }
        assert!(domains.count.load(Ordering::Relaxed) <= 2048);
    }

    const CLIENT: Holder<'_> = Holder::Client("client");

    #[test]
    fn caller_holds_no_more_than_its_bound() {
        let leases = CallerLeases::default();
        let (shop, other) = (CallerId::new("shop"), CallerId::new("other"));
        let admits =
            |caller, name, now_s| leases.admits((caller, 2), CLIENT, name, (now_s, now_s + 10));
        assert!(admits(shop, "a", 0) && admits(shop, "b", 5));
        assert!(!admits(shop, "c", 9) && admits(shop, "a", 9), "only a new resource is refused");
        assert!(admits(other, "c", 9), "each caller has its own bound");
        assert!(admits(shop, "c", 15), "the lease on b has expired");
        assert!(!admits(shop, "b", 15) && admits(shop, "a", 15));
    }

    #[test]
    fn forgotten_leases_do_not_count() {
        let leases = CallerLeases::default();
        let shop = CallerId::new("shop");
        let admits = |holder, name| leases.admits((shop, 2), holder, name, (0, 10));
        assert!(admits(CLIENT, "a") && admits(CLIENT, "b"));
        leases.forget(shop, Holder::Server("client"), "a");
        leases.forget(CallerId::new("other"), CLIENT, "a");
        assert!(!admits(CLIENT, "c"), "a different holder, a different caller");
        leases.forget(shop, CLIENT, "a");
        assert!(admits(CLIENT, "c") && !admits(CLIENT, "a"));
        assert!(admits(Holder::Client("2"), "b"));
        leases.forget(shop, CLIENT, "b");
        assert!(!admits(CLIENT, "a"), "the other client still holds a lease on b");
    }
}
