//! A map of values that expire.

use std::borrow::Borrow;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::hash::Hash;
use std::sync::Arc;

use hashbrown::{DefaultHashBuilder, Equivalent, HashMap};

use crate::domain::time::Micros;

/// A map of values, each of which expires after a millisecond since the epoch.
pub(super) struct Expiring<K: ?Sized, V> {
    values: HashMap<Arc<K>, Kept<V>, DefaultHashBuilder>,
    /// One entry for each value: the millisecond after which it is looked at, at most a minute ahead. The
    /// value may expire at another time, as that may change.
    by_expiry: BinaryHeap<Reverse<(i64, Arc<K>)>>,
}

/// How long a value that expires earlier than it was to at first may stay, in milliseconds.
const LOOK_MS: i64 = 60_000;

/// A value in an [`Expiring`].
pub(super) struct Kept<V> {
    pub(super) value: V,
    /// The last millisecond in which it is there.
    pub(super) expires_ms: i64,
}

impl<K: ?Sized + Hash + Ord, V> Expiring<K, V> {
    pub(super) fn new(hasher: DefaultHashBuilder) -> Self {
        Self { values: HashMap::with_hasher(hasher), by_expiry: BinaryHeap::new() }
    }

    /// The value, which may have expired.
    pub(super) fn get_mut<Q: ?Sized + Hash + Equivalent<Arc<K>>>(
        &mut self,
        key: &Q,
    ) -> Option<&mut Kept<V>> {
        self.values.get_mut(key)
    }

    /// Adds a value. There must be none with this key.
    pub(super) fn insert(&mut self, key: Arc<K>, value: V, expires_ms: i64, now_ms: i64) {
        self.look_at(Arc::clone(&key), expires_ms, now_ms);
        self.values.insert(key, Kept { value, expires_ms });
    }

    fn look_at(&mut self, key: Arc<K>, expires_ms: i64, now_ms: i64) {
        let look_ms = expires_ms.min(now_ms.saturating_add(LOOK_MS));
        self.by_expiry.push(Reverse((look_ms, key)));
    }

    /// Looks at up to `limit` values that may have expired, and removes those that have. Returns
    /// whether there may be more.
    pub(super) fn remove_expired(&mut self, now: Micros, limit: usize) -> bool {
        for _ in 0..limit {
            match self.by_expiry.peek() {
                Some(Reverse((expires_ms, _))) if *expires_ms < now.as_millis() => {}
                _ => return false,
            }
            let Some(Reverse((_, key))) = self.by_expiry.pop() else { return false };
            let name: &K = key.borrow();
            match self.values.get(name) {
                Some(kept) if kept.expires_ms >= now.as_millis() => {
                    let expires_ms = kept.expires_ms;
                    self.look_at(key, expires_ms, now.as_millis());
                }
                _ => drop(self.values.remove(name)),
            }
        }
        true
    }

    pub(super) fn clear(&mut self) {
        self.values.clear();
        self.by_expiry.clear();
    }

    /// The number of values, including expired ones that are not yet removed.
    pub(super) fn len(&self) -> usize {
        self.values.len()
    }
}
