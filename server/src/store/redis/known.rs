//! Which names have been asked for before. Names that nobody has seen share one place in a queue
//! (see `queue`), so that inventing names gains nothing; a name that is asked for again has a place
//! of its own.
//!
//! A fixed table, so that invented names cost no memory. A name keeps its slot for a while after
//! its last use: a flood of new names can't drive out those in use.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::Instant;

/// Slots in the table: 128 kB a store.
const SLOTS: usize = 16_384;

/// A slot is kept for so many seconds after the first use of a name, …
const NEW_S: u32 = 10;

/// … and after each later use.
const KEPT_S: u32 = 600;

/// Names that were asked for lately, by hash.
pub(super) struct KnownNames {
    /// Pairs of slots. The upper half is a part of the name's hash, the lower half the second until
    /// which no other name takes the slot.
    slots: Box<[[AtomicU64; 2]]>,
    began: Instant,
}

impl KnownNames {
    pub(super) fn new() -> Self {
        let slots = (0..SLOTS / 2).map(|_| Default::default()).collect();
        Self { slots, began: Instant::now() }
    }

    /// Notes that a name is asked for at `now`, and tells whether it was before.
    pub(super) fn note(&self, hash: u64, now: Instant) -> bool {
        let pair = &self.slots[hash as usize % self.slots.len()];
        let tag = hash >> 32 << 32;
        // 0 is before every second, so that an empty slot is free.
        let now_s = seconds(now.duration_since(self.began)).saturating_add(1);
        let mut free = None;
        for slot in pair {
            let value = slot.load(Ordering::Relaxed);
            let until_s = value as u32;
            if until_s > 0 && value >> 32 << 32 == tag {
                let until = tag | u64::from(now_s.saturating_add(KEPT_S));
                if value != until {
                    slot.store(until, Ordering::Relaxed);
                }
                return true;
            }
            if until_s < now_s {
                free = Some(slot);
            }
        }
        if let Some(slot) = free {
            slot.store(tag | u64::from(now_s.saturating_add(NEW_S)), Ordering::Relaxed);
        }
        false
    }
}

fn seconds(time: Duration) -> u32 {
    u32::try_from(time.as_secs()).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Hashes that differ from each other in both halves.
    fn hash(number: u64) -> u64 {
        (number + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }

    #[test]
    fn a_name_is_known_from_its_second_use_on() {
        let (known, now) = (KnownNames::new(), Instant::now());
        assert!(!known.note(hash(1), now));
        assert!(known.note(hash(1), now) && !known.note(hash(2), now));
        assert!(known.note(hash(1), now + Duration::from_secs(5000)), "nobody has needed its slot");
    }

    #[test]
    fn a_flood_of_new_names_does_not_drive_out_those_in_use() {
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
    fn slots_become_free_again() {
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
