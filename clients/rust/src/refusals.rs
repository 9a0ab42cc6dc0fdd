//! The refusals of the last second. Who asks for as much again before the retry time is refused
//! without a call.

use std::hash::{BuildHasher as _, RandomState};
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use hashbrown::HashTable;
use hashbrown::hash_table::Entry;
use tokio::time::Instant;

use crate::decision::{DecidedBy, Reason, Refusal};
use crate::request::Request;

/// How long a refusal is remembered at most, so that a limit that was raised counts at once.
const LONGEST: Duration = Duration::from_secs(1);

/// The most refusals that are remembered.
const MOST: usize = 10_000;

#[derive(Default)]
pub(crate) struct Refusals {
    hasher: RandomState,
    table: Mutex<HashTable<Remembered>>,
    /// Entries of the table: without any, as in most processes, the lock is not needed.
    count: AtomicUsize,
}

struct Remembered {
    namespace: Box<str>,
    bucket: Box<str>,
    /// The least number of tokens that was refused.
    tokens: u64,
    /// The wait that would have been accepted; `None` for the bucket's own limit, which is the
    /// longest.
    max_wait: Option<Duration>,
    is_critical: bool,
    reason: Reason,
    /// When the refused request could be granted.
    retry_at: Instant,
    forget_at: Instant,
}

impl Remembered {
    fn is_of(&self, request: &Request) -> bool {
        *self.bucket == *request.bucket && *self.namespace == *request.namespace
    }

    /// Whether the request would be refused, too.
    fn covers(&self, request: &Request, now: Instant) -> bool {
        let waits_no_longer = match (self.max_wait, request.max_wait) {
            (None, _) => true,
            (Some(_), None) => false,
            (Some(refused), Some(asked)) => asked <= refused,
        };
        now < self.forget_at
            && request.tokens >= self.tokens
            && waits_no_longer
            // What is refused to a critical request is refused to all.
            && (self.is_critical || !request.is_critical)
    }
}

impl Refusals {
    /// The refusal of such a request that is still valid.
    pub(crate) fn get(&self, request: &Request, now: Instant) -> Option<Refusal> {
        if self.count.load(Ordering::Relaxed) == 0 {
            return None;
        }
        let hash = self.hash(request);
        let table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        let found = table.find(hash, |entry| entry.is_of(request))?;
        found.covers(request, now).then(|| {
            let retry_after = found.retry_at.saturating_duration_since(now);
            Refusal::new(found.reason, Some(retry_after), DecidedBy::Remembered)
        })
    }

    /// Remembers a refusal if it says when to ask again. Not that of a degraded node: another one
    /// may have tokens.
    pub(crate) fn add(&self, request: &Request, refusal: &Refusal, now: Instant) {
        if refusal.decided_by != DecidedBy::Node {
            return;
        }
        let Some(retry_after) = refusal.retry_after else { return };
        let Some(retry_at) = now.checked_add(retry_after) else { return };
        let new = Remembered {
            namespace: request.namespace.into(),
            bucket: request.bucket.into(),
            // A ban refuses any number.
            tokens: if refusal.reason == Reason::Banned { 1 } else { request.tokens },
            max_wait: request.max_wait,
            is_critical: request.is_critical,
            reason: refusal.reason,
            retry_at,
            forget_at: now + retry_after.min(LONGEST),
        };
        let hash = self.hash(request);
        let mut table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        if table.len() >= MOST {
            table.retain(|entry| now < entry.forget_at);
            // Not to look through so many with each refusal. The nodes remember, too.
            if table.len() > MOST / 2 {
                table.clear();
            }
        }
        let hash_of = |entry: &Remembered| self.hasher.hash_one((&entry.namespace, &entry.bucket));
        match table.entry(hash, |entry| entry.is_of(request), hash_of) {
            Entry::Occupied(mut entry) => *entry.get_mut() = new,
            Entry::Vacant(entry) => drop(entry.insert(new)),
        }
        self.count.store(table.len(), Ordering::Relaxed);
    }

    fn hash(&self, request: &Request) -> u64 {
        self.hasher.hash_one((request.namespace, request.bucket))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(reason: Reason, retry_ms: u64) -> Refusal {
        let retry_after = Some(Duration::from_millis(retry_ms));
        Refusal::new(reason, retry_after, DecidedBy::Node)
    }

    #[test]
    fn a_refusal_covers_what_it_says_nothing_better_about() {
        let (start, refusals) = (Instant::now(), Refusals::default());
        let at = |ms| start + Duration::from_millis(ms);
        let asked = Request::new("a", "b").tokens(5).max_wait(Duration::from_millis(100));
        assert_eq!(refusals.get(&asked, at(0)), None);
        refusals.add(&asked, &refusal(Reason::Limit, 400), at(0));
        let found = refusals.get(&asked, at(100)).unwrap();
        assert_eq!(found.retry_after, Some(Duration::from_millis(300)));
        assert_eq!(found.decided_by, DecidedBy::Remembered);
        let found = |request: Request, ms| refusals.get(&request, at(ms)).is_some();
        assert!(found(asked.tokens(6), 0) && !found(asked.tokens(4), 0));
        assert!(found(asked.max_wait(Duration::ZERO), 0));
        assert!(!found(asked.max_wait(Duration::from_millis(101)), 0));
        assert!(
            !found(Request::new("a", "b").tokens(5), 0),
            "the bucket's own limit may be longer"
        );
        assert!(found(asked.not_critical(), 0));
        assert!(!found(Request { bucket: "c", ..asked }, 0));
        assert!(!found(Request { namespace: "b", ..asked }, 0));
        assert!(found(asked, 399) && !found(asked, 400));
        // The reserve may be what refused it.
        refusals.add(&asked.not_critical(), &refusal(Reason::Limit, 400), at(1000));
        assert!(found(asked.not_critical(), 1000) && !found(asked, 1000));
        // The bucket's own limit is the longest wait.
        let asked = Request::new("a", "b").tokens(5);
        refusals.add(&asked, &refusal(Reason::Banned, 5000), at(2000));
        assert!(found(asked.max_wait(Duration::from_secs(60)).tokens(1), 2000));
        assert!(found(asked, 2999) && !found(asked, 3000), "for a second at most");
        let degraded =
            Refusal { decided_by: DecidedBy::DegradedNode, ..refusal(Reason::Limit, 500) };
        refusals.add(&Request::new("degraded", "b"), &degraded, at(3000));
        assert!(!found(Request::new("degraded", "b"), 3000));
        let never = Refusal { retry_after: None, ..refusal(Reason::Limit, 0) };
        refusals.add(&Request::new("never", "b"), &never, at(3000));
        assert!(!found(Request::new("never", "b"), 3000));
    }

    #[test]
    fn the_number_of_refusals_is_bounded() {
        let (start, refusals) = (Instant::now(), Refusals::default());
        let refusal = refusal(Reason::Limit, 1000);
        let add = |name: usize, ms| {
            let name = name.to_string();
            refusals.add(&Request::new("a", &name), &refusal, start + Duration::from_millis(ms));
        };
        for name in 0..MOST {
            add(name, if name < MOST - 100 { 0 } else { 500 });
        }
        assert_eq!(refusals.count.load(Ordering::Relaxed), MOST);
        add(MOST, 1000);
        assert_eq!(refusals.count.load(Ordering::Relaxed), 100 + 1, "expired ones go first");
        for name in 0..2 * MOST {
            add(name, 1000);
        }
        assert!(refusals.count.load(Ordering::Relaxed) <= MOST);
    }
}
