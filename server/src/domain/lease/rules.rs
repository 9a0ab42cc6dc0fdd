//! The rules that apply to one decision: the configured ones with the parent's lease, a freeze and
//! learning mode.

use super::Resource;
use super::model::{ParentLease, Rules};
use crate::domain::sharing::SharingAlgorithm;
use crate::domain::time::Micros;

/// While a request to the parent is in flight, clients may lease at most the capacity that the
/// request reported.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Freeze {
    capacity: f64,
    until: Micros,
}

impl Resource {
    /// Freezes the capacity during a request to the parent: until the answer or `until`, at most
    /// the current sum of all leases may be leased. Returns that sum. `number` must be unique.
    pub fn freeze(&mut self, until: Micros, number: u64) -> f64 {
        // An earlier request may still be unanswered because its node has stopped.
        self.end_freeze();
        let capacity = self.has.value().max(0.0);
        self.freeze = Some(Freeze { capacity, until });
        self.freeze_number = Some(number);
        capacity
    }

    /// Ends the freeze `number` with the parent's answer. `None` means that the answer is lost: the
    /// capacity is then at most what the request reported. Does nothing if another freeze has
    /// started since, as the answer is then outdated.
    pub fn thaw(&mut self, number: u64, lease: Option<ParentLease>) {
        if self.freeze_number != Some(number) {
            return;
        }
        self.end_freeze();
        if lease.is_some() {
            self.parent = lease;
        }
    }

    /// Ends the freeze, and limits the parent's lease to the frozen capacity.
    fn end_freeze(&mut self) {
        if let (Some(freeze), Some(parent)) = (self.freeze.take(), &mut self.parent) {
            parent.capacity = parent.capacity.min(freeze.capacity);
        }
    }

    /// The rules that apply at `now`, with the parent's lease and the freeze taken into account.
    pub(super) fn effective_rules(&self, rules: &Rules, now: Micros) -> EffectiveRules {
        let now_s = now.as_secs();
        if !rules.from_parent {
            return EffectiveRules {
                algorithm: rules.algorithm.unwrap_or(SharingAlgorithm::NoAlgorithm),
                capacity: rules.capacity,
                most_held: rules.most_held(),
                lease_s: rules.lease_s,
                learning_s: rules.learning_s,
                last_expiry_s: i64::MAX,
                parent_refresh_s: None,
            };
        }
        let Some(parent) = self.parent else {
            return EffectiveRules {
                algorithm: rules.algorithm.unwrap_or(SharingAlgorithm::FairShare),
                capacity: 0.0,
                most_held: rules.most_held(),
                lease_s: rules.lease_s,
                learning_s: rules.learning_s,
                last_expiry_s: i64::MAX,
                parent_refresh_s: None,
            };
        };
        let valid = parent.expiry_s > now_s;
        let leased = parent.capacity_at(now_s);
        let frozen = self.freeze.filter(|freeze| freeze.until > now);
        let (lease_s, learning_s) = match rules.algorithm {
            Some(_) => (rules.lease_s, rules.learning_s),
            None => (parent.lease_s, rules.learning_s.min(parent.lease_s)),
        };
        let algorithm = rules.algorithm.unwrap_or(parent.algorithm);
        EffectiveRules {
            algorithm,
            // A freeze does not limit what clients may already hold.
            most_held: algorithm.most_held(leased),
            capacity: frozen.map_or(leased, |freeze| leased.min(freeze.capacity)),
            lease_s,
            learning_s,
            last_expiry_s: if valid { parent.expiry_s } else { i64::MAX },
            parent_refresh_s: Some(parent.refresh_s),
        }
    }
}

/// The rules for one decision: [`Rules`] with the parent's lease applied.
pub(super) struct EffectiveRules {
    pub(super) algorithm: SharingAlgorithm,
    pub(super) capacity: f64,
    /// The most that a claim counts for.
    pub(super) most_held: f64,
    pub(super) lease_s: i64,
    pub(super) learning_s: i64,
    /// No lease expires later: the expiry of the parent's lease.
    pub(super) last_expiry_s: i64,
    pub(super) parent_refresh_s: Option<i64>,
}

/// The end of learning mode for a store that has had its state since `born`. `None` if learning
/// mode is over at `now`, or if `learning_s` is 0.
pub fn learning_until(
    born: Micros,
    learning_s: i64,
    learn_for_us: i64,
    now: Micros,
) -> Option<Micros> {
    let until = Micros(born.0.saturating_add(learning_s.saturating_mul(1_000_000)));
    let until = until.max(Micros(now.0.saturating_add(learn_for_us)));
    (learning_s > 0 && now < until).then_some(until)
}
