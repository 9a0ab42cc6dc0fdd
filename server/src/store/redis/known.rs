//! A table of recently used names. In a queue, all new names of a group count as one owner, so
//! that a client gains nothing from inventing names (see `queue`), and a name that the table has
//! counts on its own. `registers` has another one, of the buckets that it has registered again.
//!
//! The table has a fixed size, so that invented names use no memory. A name keeps its entry for a
//! while after its last use, so that a flood of new names does not evict the names in use.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::Instant;

/// The number of entries in the table: 128 KiB for each thread's store.
const ENTRIES: usize = 16_384;

/// How long an entry is reserved for its name after the first use, in s.
const NEW_S: u32 = 10;

/// How long an entry is reserved for its name after each later use, in s.
const KEPT_S: u32 = 600;

/// Recently used names, by hash.
pub(super) struct KnownNames {
    /// Entries in pairs: a name may have either entry of its pair. The upper half of an entry is
    /// the upper half of the name's hash. The lower half is the time until which the entry is
    /// reserved for the name, in s since `created`, plus 1; 0 if the entry is empty.
    pairs: Box<[[AtomicU64; 2]]>,
    created: Instant,
}

impl KnownNames {
    pub(super) fn new() -> Self {
        let pairs = (0..ENTRIES / 2).map(|_| Default::default()).collect();
        Self { pairs, created: Instant::now() }
    }

    /// Whether the table has a name.
    pub(super) fn has(&self, hash: u64) -> bool {
        let pair = &self.pairs[hash as usize % self.pairs.len()];
        let upper_hash = hash >> 32 << 32;
        pair.iter()
            .map(|entry| entry.load(Ordering::Relaxed))
            .any(|value| value as u32 > 0 && value >> 32 << 32 == upper_hash)
    }

    /// Records that a name is used at `now`. Returns whether the table had it already.
    pub(super) fn note(&self, hash: u64, now: Instant) -> bool {
        let pair = &self.pairs[hash as usize % self.pairs.len()];
        let upper_hash = hash >> 32 << 32;
        // Starts at 1, so that an empty entry, whose time is 0, is free.
        let now_s = seconds(now.duration_since(self.created)).saturating_add(1);
        let mut free = None;
        for entry in pair {
            let value = entry.load(Ordering::Relaxed);
            let until_s = value as u32;
            if until_s > 0 && value >> 32 << 32 == upper_hash {
                let renewed = upper_hash | u64::from(now_s.saturating_add(KEPT_S));
                // At most one write a second for each name.
                if value != renewed {
                    entry.store(renewed, Ordering::Relaxed);
                }
                return true;
            }
            if until_s < now_s {
                free = Some(entry);
            }
        }
        if let Some(entry) = free {
            entry.store(upper_hash | u64::from(now_s.saturating_add(NEW_S)), Ordering::Relaxed);
        }
        false
    }
}

/// Whole seconds of a duration.
fn seconds(time: Duration) -> u32 {
    u32::try_from(time.as_secs()).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The hash of a test's name. Different numbers give hashes that differ in both halves.
    fn hash(number: u64) -> u64 {
        (number + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }

    #[test]
    fn a_name_is_known_from_its_second_use_on() {
        let (known, now) = (KnownNames::new(), Instant::now());
        assert!(!known.note(hash(1), now));
        assert!(known.note(hash(1), now) && !known.note(hash(2), now));
        assert!(
            known.note(hash(1), now + Duration::from_secs(5000)),
            "no other name has needed its entry"
        );
    }

    #[test]
    fn a_flood_of_new_names_does_not_evict_names_in_use() {
        let (known, began) = (KnownNames::new(), Instant::now());
        assert!(!known.note(hash(0), began));
        for minute in 0..20 {
            let now = began + Duration::from_secs(60 * minute + 9);
            assert!(known.note(hash(0), now), "minute {minute}");
            let new = (1..=50_000).map(|n| n + 50_000 * minute);
            let taken = new.filter(|n| known.note(hash(*n), now)).count();
            assert!(taken < 10, "{taken} new names were taken for known ones");
        }
    }

    #[test]
    fn entries_become_free_again() {
        let (known, began) = (KnownNames::new(), Instant::now());
        assert!((0..100_000).filter(|n| known.note(hash(*n), began)).count() < 10);
        let late = 100_000..101_000;
        let note = |now| late.clone().filter(|n| known.note(hash(*n), now)).count();
        assert_eq!(note(began), 0);
        assert!(note(began) < 10, "the table is full");
        let later = began + Duration::from_secs(u64::from(NEW_S) + 2);
        note(later);
        assert!(note(later) > 800);
    }
}
