//! Some of the buckets of the embedded store, and when they expire.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use hashbrown::HashTable;
use hashbrown::hash_table::Entry;

use crate::domain::algorithm::{self, Change, State};
use crate::domain::bucket::BucketKind;
use crate::domain::time::Micros;
use crate::store::key::{Key, KeyRef};
use crate::store::{BucketRequest, Outcome, TokenAction, Verdict};

/// Buckets that are not full, by key.
#[derive(Default)]
pub(super) struct Buckets {
    table: HashTable<Bucket>,
    /// The hashes of the buckets whose expiry is checked after a time, in ms. A later expiry leaves
    /// that time as it is; an earlier one adds a time. There is nothing to do for a hash without a
    /// bucket that has this time as its `due_ms`.
    due: BTreeMap<i64, Vec<u64>>,
}

struct Bucket {
    key: Key,
    hash: u64,
    state: State,
    /// The last millisecond at which the state is valid, like a key's expiry in Redis.
    expires_ms: i64,
    /// Where it is in [`Buckets::due`]: never later than `expires_ms`.
    due_ms: i64,
    /// Its place in a namespace that bounds its dynamic buckets.
    place: Option<Place>,
}

/// One of a namespace's dynamic buckets, counted until this is dropped.
pub(super) struct Place(Arc<AtomicUsize>);

impl Place {
    /// `None` if the namespace has `bound` buckets already.
    pub(super) fn take(buckets: &Arc<AtomicUsize>, bound: u64) -> Option<Self> {
        let next = |count: usize| ((count as u64) < bound).then_some(count + 1);
        let taken = buckets.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next);
        taken.is_ok().then(|| Self(Arc::clone(buckets)))
    }

    /// A place for a bucket that exists already, whatever the bound.
    pub(super) fn take_anyway(buckets: &Arc<AtomicUsize>) -> Self {
        buckets.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(buckets))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// What is there of a bucket in a namespace that bounds its dynamic buckets.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Found {
    /// No state: the bucket is full.
    Nothing,
    /// A state from before the namespace was bounded, or of a bucket that was configured then.
    State,
    /// A state with a place.
    Place,
}

impl Buckets {
    pub(super) fn len(&self) -> usize {
        self.table.len()
    }

    pub(super) fn find(&self, key: KeyRef<'_>, hash: u64, now: Micros) -> Found {
        match self.table.find(hash, |bucket| KeyRef::from(&bucket.key) == key) {
            Some(bucket) if now.as_millis() > bucket.expires_ms => Found::Nothing,
            Some(Bucket { place: Some(_), .. }) => Found::Place,
            Some(_) => Found::State,
            None => Found::Nothing,
        }
    }

    /// The state of a bucket, and whether it has a place.
    pub(super) fn look(&self, key: KeyRef<'_>, hash: u64, now: Micros) -> (Option<State>, bool) {
        let bucket = self.table.find(hash, |bucket| KeyRef::from(&bucket.key) == key);
        match bucket.filter(|bucket| now.as_millis() <= bucket.expires_ms) {
            Some(bucket) => (Some(bucket.state.clone()), bucket.place.is_some()),
            None => (None, false),
        }
    }

    /// Removes a bucket's state, and with it its place: the bucket is full.
    pub(super) fn remove(&mut self, key: KeyRef<'_>, hash: u64, in_use: &AtomicUsize) {
        if let Ok(found) = self.table.find_entry(hash, |bucket| KeyRef::from(&bucket.key) == key) {
            found.remove();
            in_use.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Decides for one bucket. If it has no place yet, a new state of it gets `place`.
    pub(super) fn decide(
        &mut self,
        request: &BucketRequest<'_>,
        (key, hash): (KeyRef<'_>, u64),
        now: Micros,
        place: Option<Place>,
        in_use: &AtomicUsize,
    ) -> Outcome {
        let found =
            self.table.entry(hash, |bucket| KeyRef::from(&bucket.key) == key, |bucket| bucket.hash);
        let known = match &found {
            Entry::Occupied(old) if now.as_millis() <= old.get().expires_ms => Some(old.get()),
            _ => None,
        };
        let state = known.map(|known| &known.state);
        let decision = algorithm::decide(state, request.terms, &request.charge(), now);
        let is_removed = decision.change == Change::Remove;
        let kept = match decision.change {
            Change::Put(state) => Some(state),
            // Rewrite the unchanged state if its expiry may have to change.
            Change::Keep => state.filter(|state| request.rewrites() || state.is_carried()).cloned(),
            Change::Remove => None,
        };
        let known_ms = known.map(|known| known.expires_ms);
        // When the known state of a window itself expires.
        let window_ends_ms = match &kept {
            Some(State::Window(_)) => known.and_then(|known| known.state.expires_ms(request.terms)),
            _ => None,
        };
        let ends_ms = kept.as_ref().and_then(|kept| kept.expires_ms(request.terms));
        if let (Some(kept), Some(ends_ms)) = (kept, ends_ms) {
            let idle_at_ms =
                request.idle_us().map(|idle_us| ceil_ms(now.0.saturating_add(idle_us)));
            let expires_ms = ends_ms.min(idle_at_ms.unwrap_or(i64::MAX));
            let expires_ms = match known_ms {
                // Nodes with longer windows may still need the state.
                Some(known_ms) if request.has_windows() && request.rewrites() => {
                    expires_ms.max(known_ms)
                }
                // Further counts of the same window.
                Some(known_ms) if window_ends_ms == Some(ends_ms) => known_ms,
                _ => expires_ms,
            };
            match found {
                Entry::Occupied(mut old) => {
                    let old = old.get_mut();
                    if known_ms.is_none() {
                        old.place = None;
                    }
                    old.place = old.place.take().or(place);
                    (old.state, old.expires_ms) = (kept, expires_ms);
                    if expires_ms < old.due_ms {
                        old.due_ms = expires_ms;
                        self.due.entry(expires_ms).or_default().push(hash);
                    }
                }
                Entry::Vacant(vacant) => {
                    let (key, due_ms) = (key.to_key(), expires_ms);
                    vacant.insert(Bucket { key, hash, state: kept, expires_ms, due_ms, place });
                    self.due.entry(due_ms).or_default().push(hash);
                    in_use.fetch_add(1, Ordering::Relaxed);
                }
            }
        } else if is_removed && let Entry::Occupied(old) = found {
            old.remove();
            in_use.fetch_sub(1, Ordering::Relaxed);
        }
        let was_full = decision.balance >= request.terms.cap_us;
        Outcome {
            verdict: if decision.granted { Verdict::Granted } else { Verdict::Refused },
            accrued_us: decision.balance,
            retry: decision.retry,
            created: decision.granted
                && was_full
                && request.tokens > 0
                && request.action != TokenAction::GiveBack
                && matches!(request.kind, BucketKind::Dynamic { .. }),
            live: None,
        }
    }

    /// Checks up to `limit` due buckets and removes the expired ones. Returns whether more may be
    /// due.
    pub(super) fn clear(&mut self, now_ms: i64, limit: usize, in_use: &AtomicUsize) -> bool {
        for _ in 0..limit {
            let Some(mut first) = self.due.first_entry().filter(|due| *due.key() < now_ms) else {
                return false;
            };
            let due_ms = *first.key();
            let Some(hash) = first.get_mut().pop() else {
                first.remove();
                continue;
            };
            let is_due = |bucket: &Bucket| bucket.hash == hash && bucket.due_ms == due_ms;
            let Ok(mut due) = self.table.find_entry(hash, is_due) else { continue };
            let expires_ms = due.get().expires_ms;
            if expires_ms >= now_ms {
                due.get_mut().due_ms = expires_ms;
                self.due.entry(expires_ms).or_default().push(hash);
            } else {
                due.remove();
                in_use.fetch_sub(1, Ordering::Relaxed);
            }
        }
        true
    }
}

fn ceil_ms(us: i64) -> i64 {
    us.div_euclid(1000) + i64::from(us.rem_euclid(1000) != 0)
}
