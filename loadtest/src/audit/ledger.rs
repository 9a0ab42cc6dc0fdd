//! Ledger of the tokens that each bucket granted.

use std::collections::HashMap;

/// Most keys counted by number; 8 bytes each, 128 MiB at the limit.
const MAX_NUMBERED_KEYS: u64 = 1 << 24;

/// Tokens granted per bucket that decided. Names that share a default bucket have one entry.
#[derive(Clone, Debug, Default)]
pub struct Ledger {
    pub(super) granted: HashMap<Box<str>, u64>,
    /// Tokens by key number, for requests decided by the bucket of the requested name. A map lookup
    /// by name would dominate the cost of counting.
    by_number: Vec<u64>,
    pub(super) degraded_grants: u64,
    pub(super) degraded_tokens: u64,
}

impl Ledger {
    /// Adds `tokens` granted by the bucket of key number `key` out of `keys`. Returns false if
    /// there are too many keys to count by number; use [`Ledger::grant`] then.
    pub fn grant_by_number(&mut self, key: u64, keys: u64, tokens: u64) -> bool {
        if keys > MAX_NUMBERED_KEYS {
            return false;
        }
        if self.by_number.is_empty() {
            self.by_number.resize(keys as usize, 0);
        }
        self.by_number[key as usize] += tokens;
        true
    }

    /// Moves the counts by key number to the counts by bucket name.
    pub fn resolve_names(&mut self, name: impl Fn(u64) -> String) {
        for (key, tokens) in (0..).zip(std::mem::take(&mut self.by_number)) {
            if tokens > 0 {
                self.grant(&name(key), tokens);
            }
        }
    }

    /// Adds `tokens` granted by `bucket`, which is `namespace:bucket`.
    pub fn grant(&mut self, bucket: &str, tokens: u64) {
        if let Some(sum) = self.granted.get_mut(bucket) {
            *sum += tokens;
        } else {
            self.granted.insert(bucket.into(), tokens);
        }
    }

    /// Adds tokens granted without the shared store. A degraded node sees only its own share, so
    /// these are counted separately and not audited.
    pub fn grant_degraded(&mut self, tokens: u64) {
        self.degraded_grants += 1;
        self.degraded_tokens += tokens;
    }

    /// Adds the counts of another thread.
    pub fn merge(&mut self, other: Self) {
        if self.by_number.is_empty() {
            self.by_number = other.by_number;
        } else {
            self.by_number.iter_mut().zip(other.by_number).for_each(|(sum, tokens)| *sum += tokens);
        }
        if self.granted.is_empty() {
            self.granted = other.granted;
        } else {
            for (bucket, tokens) in other.granted {
                *self.granted.entry(bucket).or_default() += tokens;
            }
        }
        self.degraded_grants += other.degraded_grants;
        self.degraded_tokens += other.degraded_tokens;
    }
}
