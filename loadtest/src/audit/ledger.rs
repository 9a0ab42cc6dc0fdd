//! Ledger of the tokens that each bucket granted, or of the hits that each domain was granted.

use std::collections::HashMap;

/// Most keys counted by number; 8 bytes each, 128 MiB at the limit.
const MAX_NUMBERED_KEYS: u64 = 1 << 24;

/// A key by its number.
#[derive(Clone, Copy, Debug)]
pub struct Key {
    /// The number, from 0.
    pub number: u64,
    /// Number of keys.
    pub of: u64,
}

/// Amounts granted by name: tokens per bucket that decided, or hits per domain. Names that share a
/// default bucket have one entry.
#[derive(Clone, Debug, Default)]
pub struct Ledger {
    pub(super) granted: HashMap<Box<str>, u64>,
    /// Amounts by key number, for requests decided under the requested name. A map lookup by name
    /// would dominate the cost of counting.
    by_number: Vec<u64>,
    pub(super) degraded_grants: u64,
    pub(super) degraded_amount: u64,
}

impl Ledger {
    /// Adds what was granted under the name of `key`. Returns false if there are too many keys to
    /// count by number; use [`Ledger::grant`] then.
    pub fn grant_by_number(&mut self, key: Key, amount: u64) -> bool {
        if key.of > MAX_NUMBERED_KEYS {
            return false;
        }
        if self.by_number.is_empty() {
            self.by_number.resize(key.of as usize, 0);
        }
        self.by_number[key.number as usize] += amount;
        true
    }

    /// Moves the counts by key number to the counts by name.
    pub fn resolve_names(&mut self, name: impl Fn(u64) -> String) {
        for (key, amount) in (0..).zip(std::mem::take(&mut self.by_number)) {
            if amount > 0 {
                self.grant(&name(key), amount);
            }
        }
    }

    /// Adds what was granted under `name`: a bucket (`namespace:bucket`) or a domain.
    pub fn grant(&mut self, name: &str, amount: u64) {
        if let Some(sum) = self.granted.get_mut(name) {
            *sum += amount;
        } else {
            self.granted.insert(name.into(), amount);
        }
    }

    /// Adds what was granted without the shared store. A degraded node sees only its own share, so
    /// these are counted separately and not audited.
    pub fn grant_degraded(&mut self, amount: u64) {
        self.degraded_grants += 1;
        self.degraded_amount += amount;
    }

    /// Adds the counts of another thread.
    pub fn merge(&mut self, other: Self) {
        if self.by_number.is_empty() {
            self.by_number = other.by_number;
        } else {
            self.by_number.iter_mut().zip(other.by_number).for_each(|(sum, amount)| *sum += amount);
        }
        if self.granted.is_empty() {
            self.granted = other.granted;
        } else {
            for (name, amount) in other.granted {
                *self.granted.entry(name).or_default() += amount;
            }
        }
        self.degraded_grants += other.degraded_grants;
        self.degraded_amount += other.degraded_amount;
    }
}
