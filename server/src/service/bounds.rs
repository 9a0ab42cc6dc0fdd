//! How many resources there may be: of a template, and of a caller. Names are the callers' to
//! choose, so without a bound whoever invents names fills the store.

use std::collections::HashMap;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::domain::names::CallerId;

/// How many resources of one template the store has, as far as this node knows: what it has counted
/// when it listed them last, and what it has made since. So a template has as many resources more
/// than its bound as other nodes make within one pass over the list, at most.
#[derive(Debug, Default)]
pub(super) struct Tally {
    counted: AtomicU64,
    created: AtomicU64,
}

impl Tally {
    /// There is no room for another one; `None`: there is no bound.
    pub(super) fn is_full(&self, most: Option<u64>) -> bool {
        let known = || {
            let created = self.created.load(Ordering::Relaxed);
            self.counted.load(Ordering::Relaxed).saturating_add(created)
        };
        most.is_some_and(|most| known() >= most)
    }

    /// A resource was made.
    pub(super) fn note_created(&self) {
        self.created.fetch_add(1, Ordering::Relaxed);
    }

    /// A pass over the list begins. What it returns is for [`end_pass`](Self::end_pass).
    pub(super) fn begin_pass(&self) -> u64 {
        self.created.load(Ordering::Relaxed)
    }

    /// A pass has counted so many.
    pub(super) fn end_pass(&self, counted: u64, begun: u64) {
        self.counted.store(counted, Ordering::Relaxed);
        self.created.fetch_sub(begun, Ordering::Relaxed);
    }
}

/// The resources that callers with a bound of their own have leases on from this node.
#[derive(Default)]
pub(super) struct Holdings {
    hasher: RandomState,
    /// By caller: hashes of resources, and when the lease on each expires, in seconds since the
    /// epoch.
    by_caller: Mutex<HashMap<CallerId, HashMap<u64, i64>>>,
}

impl Holdings {
    /// Notes that `caller` asks for a lease until `until_s`, unless that would be one resource more
    /// than `most`; tells whether it may.
    pub(super) fn admits(
        &self,
        (caller, most): (CallerId, u64),
        resource: &str,
        (now_s, until_s): (i64, i64),
    ) -> bool {
        let resource = self.hasher.hash_one(resource);
        let mut by_caller = self.by_caller.lock().unwrap_or_else(PoisonError::into_inner);
        let held = by_caller.entry(caller).or_default();
        if let Some(until) = held.get_mut(&resource) {
            *until = until_s.max(*until);
            return true;
        }
        if held.len() as u64 >= most {
            // Seldom: a caller at its bound that asks for new ones finds out here, each time.
            held.retain(|_, until_s| *until_s > now_s);
        }
        let room = (held.len() as u64) < most;
        if room {
            held.insert(resource, until_s);
        }
        room
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tally_counts_what_was_made_since_the_pass_began() {
        let tally = Tally::default();
        assert!(!tally.is_full(Some(1)) && tally.is_full(Some(0)) && !tally.is_full(None));
        (0..3).for_each(|_| tally.note_created());
        assert!(tally.is_full(Some(3)) && !tally.is_full(Some(4)));
        let begun = tally.begin_pass();
        tally.note_created();
        tally.end_pass(1, begun);
        assert!(tally.is_full(Some(2)) && !tally.is_full(Some(3)));
    }

    #[test]
    fn a_caller_holds_no_more_than_its_bound() {
        let holdings = Holdings::default();
        let (shop, other) = (CallerId::new("shop"), CallerId::new("other"));
        let admits = |caller, name, now_s| holdings.admits((caller, 2), name, (now_s, now_s + 10));
        assert!(admits(shop, "a", 0) && admits(shop, "b", 5));
        assert!(!admits(shop, "c", 9) && admits(shop, "a", 9), "only a new one is too many");
        assert!(admits(other, "c", 9), "it has a bound of its own");
        assert!(admits(shop, "c", 15), "the lease on b has expired");
        assert!(!admits(shop, "b", 15) && admits(shop, "a", 15));
    }
}
