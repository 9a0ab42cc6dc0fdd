//! The sharing algorithms: what share of a resource's capacity a client is entitled to.
//!
//! All four algorithms are functions of the client and of a few sums over all clients, which
//! [`super::lease`] keeps up to date. The two algorithms that share need separate sums for the two
//! sides of a threshold: clients are ordered by wants per subclient, and split at the level.
//!
//! - FAIR_SHARE is weighted max-min fairness ("water-filling"): with the level L at which
//!   Σ min(w, n·L) = C, a client that wants w for n subclients is entitled to min(w, n·L).
//!   With the sums on both sides of L, L = (C − Σ w below) / Σ n above.
//! - PROPORTIONAL_SHARE follows Doorman: with the equal share E = C / Σ n, a client that wants at
//!   most n·E gets its wants. Each other client gets n·E, and a part of the capacity that remains,
//!   in proportion to its excess w − n·E.
//!
//! With the right split, the entitlement is exact. With any other split it is lower, never higher:
//! clients that are still on the wrong side cost others a little for a short time.

use super::sum::Sum;

/// A sharing algorithm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SharingAlgorithm {
    /// Each client gets what it wants.
    NoAlgorithm,
    /// Each client gets what it wants, up to the capacity.
    Static,
    /// Equal shares; the unused rest is divided in proportion to the excess wants.
    ProportionalShare,
    /// Weighted max-min fairness.
    FairShare,
}

impl SharingAlgorithm {
    /// All algorithms, in the order of their numbers on the wire.
    pub const ALL: [Self; 4] =
        [Self::NoAlgorithm, Self::Static, Self::ProportionalShare, Self::FairShare];

    /// The name on the wire and in limits files.
    pub fn name(self) -> &'static str {
        match self {
            Self::NoAlgorithm => "NO_ALGORITHM",
            Self::Static => "STATIC",
            Self::ProportionalShare => "PROPORTIONAL_SHARE",
            Self::FairShare => "FAIR_SHARE",
        }
    }

    /// The most that one client can have been granted. A larger claim is false, or dates from when
    /// the capacity was larger.
    pub fn most_held(self, capacity: f64) -> f64 {
        match self {
            Self::NoAlgorithm => f64::INFINITY,
            Self::Static | Self::ProportionalShare | Self::FairShare => capacity,
        }
    }

    /// Whether the sum of all leases is limited to the capacity.
    pub fn shares(self) -> bool {
        matches!(self, Self::ProportionalShare | Self::FairShare)
    }
}

/// The sums over one side of the threshold.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Side {
    /// Sum of the clients' wants.
    pub wants: Sum,
    /// Number of their subclients: a whole number, and so exact.
    pub subclients: f64,
}

impl Side {
    /// Adds a client.
    pub fn add(&mut self, wants: f64, subclients: f64) {
        self.wants.add(wants);
        self.subclients += subclients;
    }

    /// Removes a client. The sums of an empty side are exactly 0.
    pub fn remove(&mut self, wants: f64, subclients: f64) {
        self.wants.add(-wants);
        self.subclients -= subclients;
        if self.subclients <= 0.0 {
            *self = Self::default();
        }
    }

    /// Moves a group of clients to `other`.
    pub fn move_group(&mut self, group: Self, other: &mut Self) {
        other.wants.add_sum(group.wants);
        other.subclients += group.subclients;
        self.wants.sub_sum(group.wants);
        self.subclients -= group.subclients;
        if self.subclients <= 0.0 {
            *self = Self::default();
        }
    }
}

/// The sums over all clients of a resource, by side of the threshold.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Split {
    /// Clients that want at most the threshold per subclient.
    pub below: Side,
    /// Clients that want more.
    pub above: Side,
}

impl Split {
    /// Total wants of all clients.
    pub fn wants(&self) -> f64 {
        let mut all = self.above.wants;
        all.add_sum(self.below.wants);
        all.value()
    }

    /// Total number of subclients.
    pub fn subclients(&self) -> f64 {
        self.below.subclients + self.above.subclients
    }

    /// Where this split puts the threshold, in wants per subclient: clients that want more belong
    /// above it.
    pub fn level(&self, algorithm: SharingAlgorithm, capacity: f64) -> f64 {
        match algorithm {
            SharingAlgorithm::FairShare => {
                self.below.wants.rest_of(capacity) / self.above.subclients
            }
            _ => capacity / self.subclients(),
        }
    }

    /// The entitlement of a client that wants `wants` for `subclients` and is included in the sums.
    /// Never negative.
    pub fn entitlement(
        &self,
        algorithm: SharingAlgorithm,
        capacity: f64,
        wants: f64,
        subclients: f64,
    ) -> f64 {
        match algorithm {
            SharingAlgorithm::NoAlgorithm => wants,
            SharingAlgorithm::Static => wants.min(capacity),
            SharingAlgorithm::ProportionalShare | SharingAlgorithm::FairShare
                if self.wants() <= capacity =>
            {
                wants
            }
            SharingAlgorithm::FairShare => {
                // The level is never below the equal share, even if the split is not exact yet.
                // Without clients above the threshold, the split gives no level.
                let mut level = capacity / self.subclients();
                if self.above.subclients > 0.0 {
                    level = level.max(self.level(algorithm, capacity));
                }
                wants.min(subclients * level)
            }
            SharingAlgorithm::ProportionalShare => {
                let equal = capacity / self.subclients();
                let own = subclients * equal;
                if wants <= own {
                    return wants;
                }
                let left = self.below.subclients * equal - self.below.wants.value();
                let excess = self.above.wants.value() - self.above.subclients * equal;
                if left <= 0.0 || excess <= 0.0 {
                    return own;
                }
                wants.min(own + left * ((wants - own) / excess))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The exact entitlements of clients given as `(wants, subclients)`. Finds the right split by
    /// trying each one.
    fn entitlements(
        algorithm: SharingAlgorithm,
        capacity: f64,
        clients: &[(f64, f64)],
    ) -> Vec<f64> {
        let mut ratios: Vec<f64> = clients.iter().map(|(w, n)| w / n).collect();
        ratios.sort_by(f64::total_cmp);
        let split_at = |threshold: f64| {
            let mut split = Split::default();
            for &(w, n) in clients {
                let side = if w / n <= threshold { &mut split.below } else { &mut split.above };
                side.add(w, n);
            }
            split
        };
        let fits = |threshold: &&f64| {
            let level = split_at(**threshold).level(algorithm, capacity);
            **threshold <= level && ratios.iter().all(|r| r <= *threshold || *r > level)
        };
        let split = split_at(*ratios.iter().find(fits).unwrap_or(&-1.0));
        clients.iter().map(|&(w, n)| split.entitlement(algorithm, capacity, w, n)).collect()
    }

    #[track_caller]
    fn check(algorithm: SharingAlgorithm, capacity: f64, clients: &[(f64, f64)], expected: &[f64]) {
        let found = entitlements(algorithm, capacity, clients);
        for (found, expected) in found.iter().zip(expected) {
            assert!(
                (found - expected).abs() < 1e-7,
                "{algorithm:?} {capacity} {clients:?}: {found}"
            );
        }
        assert!(!algorithm.shares() || found.iter().sum::<f64>() <= capacity * (1.0 + 1e-12));
    }

    #[test]
    fn worked_examples() {
        use SharingAlgorithm::{FairShare, ProportionalShare};
        let plain = |wants: &[f64]| wants.iter().map(|&w| (w, 1.0)).collect::<Vec<_>>();
        check(FairShare, 120.0, &plain(&[1000.0, 50.0, 10.0]), &[60.0, 50.0, 10.0]);
        check(FairShare, 160.0, &plain(&[100.0, 50.0, 45.0, 10.0]), &[55.0, 50.0, 45.0, 10.0]);
        let wants = plain(&[1000.0, 50.0, 10.0]);
        check(ProportionalShare, 120.0, &wants, &[69.690_721_65, 40.309_278_351, 10.0]);
        let wants = plain(&[100.0, 50.0, 10.0]);
        check(ProportionalShare, 90.0, &wants, &[45.0 + 5.0 / 9.0, 34.0 + 4.0 / 9.0, 10.0]);
    }

    #[test]
    fn algorithms() {
        use SharingAlgorithm::{FairShare, NoAlgorithm, ProportionalShare, Static};
        let two = [(30.0, 1.0), (500.0, 1.0)];
        check(NoAlgorithm, 100.0, &two, &[30.0, 500.0]);
        check(Static, 100.0, &two, &[30.0, 100.0]);
        for algorithm in [FairShare, ProportionalShare] {
            check(algorithm, 530.0, &two, &[30.0, 500.0]);
            check(algorithm, 100.0, &two, &[30.0, 70.0]);
            // Shares are weighted by the number of subclients.
            check(algorithm, 90.0, &[(1000.0, 1.0), (2000.0, 2.0)], &[30.0, 60.0]);
            check(algorithm, 0.0, &two, &[0.0, 0.0]);
            check(algorithm, 10.0, &[(0.0, 1.0), (20.0, 1.0)], &[0.0, 10.0]);
            check(algorithm, 10.0, &[(20.0, 1.0); 5], &[2.0; 5]);
        }
    }

    #[test]
    fn entitlement_of_any_split_is_at_most_the_exact_one() {
        let clients = [(1000.0, 1.0), (50.0, 1.0), (10.0, 1.0), (40.0, 2.0)];
        for algorithm in [SharingAlgorithm::FairShare, SharingAlgorithm::ProportionalShare] {
            let exact = entitlements(algorithm, 120.0, &clients);
            for sides in 0..16_u32 {
                let mut split = Split::default();
                for (at, &(w, n)) in clients.iter().enumerate() {
                    let below = sides & (1 << at) != 0;
                    (if below { &mut split.below } else { &mut split.above }).add(w, n);
                }
                for (&(w, n), exact) in clients.iter().zip(&exact) {
                    let found = split.entitlement(algorithm, 120.0, w, n);
                    assert!(found <= exact + 1e-9, "{algorithm:?} {sides:b}: {found} of {exact}");
                    assert!(found >= w.min(n * 24.0) - 1e-9, "less than an equal share");
                }
            }
        }
    }
}
