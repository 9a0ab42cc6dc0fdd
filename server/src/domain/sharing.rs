//! How the capacity of a resource is shared: what each algorithm entitles a client to.
//!
//! All four are functions of the client and of a few sums over all clients, which are kept
//! up to date as clients come and go ([`super::lease`]). The two that share need the sums on
//! either side of a threshold: clients are ordered by what they want per subclient, and
//! split where the level of the share is.
//!
//! - FAIR_SHARE is weighted max-min fairness ("water-filling"): with the level L at which
//!   Σ min(w, n·L) = C, a client that wants w for n subclients is entitled to min(w, n·L).
//!   With those at or below L set apart, L = (C − Σ w below) / Σ n above.
//! - PROPORTIONAL_SHARE, as the older Doorman has it: with the equal share E = C / Σ n, who
//!   wants at most n·E gets it; the others get n·E, and of what those leave a part in
//!   proportion to their excess w − n·E.
//!
//! Any split gives an entitlement that is at most the exact one, and the right split the
//! exact one: clients still on the wrong side only cost others a little for a while.

use super::exact::Sum;

/// The sharing rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Everyone gets what it wants.
    NoAlgorithm,
    /// Everyone gets what it wants up to the capacity.
    Static,
    /// Equal shares, and a part of what others leave in proportion to the excess wanted.
    ProportionalShare,
    /// Weighted max-min.
    FairShare,
}

impl Kind {
    /// Every rule, in the order of its number on the wire.
    pub const ALL: [Self; 4] =
        [Self::NoAlgorithm, Self::Static, Self::ProportionalShare, Self::FairShare];

    /// Its name on the wire and in limits files.
    pub fn name(self) -> &'static str {
        match self {
            Self::NoAlgorithm => "NO_ALGORITHM",
            Self::Static => "STATIC",
            Self::ProportionalShare => "PROPORTIONAL_SHARE",
            Self::FairShare => "FAIR_SHARE",
        }
    }

    /// The most that one client can have been granted. A client that claims more lies, or was
    /// granted it when there was more.
    pub fn most_held(self, capacity: f64) -> f64 {
        match self {
            Self::NoAlgorithm => f64::INFINITY,
            Self::Static | Self::ProportionalShare | Self::FairShare => capacity,
        }
    }

    /// Whether clients share the capacity, so that what they have together never exceeds it.
    pub fn shares(self) -> bool {
        matches!(self, Self::ProportionalShare | Self::FairShare)
    }
}

/// The sums over one side of the threshold.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Side {
    /// What the clients there want.
    pub wants: Sum,
    /// How many subclients they have. Whole, so that it is exact.
    pub subclients: f64,
}

impl Side {
    /// Adds a client.
    pub fn add(&mut self, wants: f64, subclients: f64) {
        self.wants.add(wants);
        self.subclients += subclients;
    }

    /// Takes a client away. An empty side wants exactly nothing.
    pub fn remove(&mut self, wants: f64, subclients: f64) {
        self.wants.add(-wants);
        self.subclients -= subclients;
        if self.subclients <= 0.0 {
            *self = Self::default();
        }
    }

    /// Moves a group of clients over to `other`.
    pub fn hand_over(&mut self, group: Self, other: &mut Self) {
        other.wants.add_sum(group.wants);
        other.subclients += group.subclients;
        self.wants.sub_sum(group.wants);
        self.subclients -= group.subclients;
        if self.subclients <= 0.0 {
            *self = Self::default();
        }
    }
}

/// The sums over all clients of a resource, by the side of the threshold that they are on.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Split {
    /// Those that want little per subclient.
    pub below: Side,
    /// Those that want much.
    pub above: Side,
}

impl Split {
    /// What all want.
    pub fn wants(&self) -> f64 {
        let mut all = self.above.wants;
        all.add_sum(self.below.wants);
        all.value()
    }

    /// How many subclients there are.
    pub fn subclients(&self) -> f64 {
        self.below.subclients + self.above.subclients
    }

    /// Where the threshold belongs, as far as this split tells, in wants per subclient:
    /// whoever wants more belongs above it.
    pub fn level(&self, kind: Kind, capacity: f64) -> f64 {
        match kind {
            Kind::FairShare => self.below.wants.rest_of(capacity) / self.above.subclients,
            _ => capacity / self.subclients(),
        }
    }

    /// What a client is entitled to that wants `wants` for `subclients`, and is in the sums.
    /// Never negative.
    pub fn entitlement(&self, kind: Kind, capacity: f64, wants: f64, subclients: f64) -> f64 {
        match kind {
            Kind::NoAlgorithm => wants,
            Kind::Static => wants.min(capacity),
            Kind::ProportionalShare | Kind::FairShare if self.wants() <= capacity => wants,
            Kind::FairShare => {
                // The level is never below the equal share, whatever a split says that is on
                // its way; with nobody above it, it says nothing.
                let mut level = capacity / self.subclients();
                if self.above.subclients > 0.0 {
                    level = level.max(self.level(kind, capacity));
                }
                wants.min(subclients * level)
            }
            Kind::ProportionalShare => {
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

    /// Splits `(wants, subclients)` where the exact level is, found by trying every place.
    fn entitlements(kind: Kind, capacity: f64, clients: &[(f64, f64)]) -> Vec<f64> {
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
            let level = split_at(**threshold).level(kind, capacity);
            **threshold <= level && ratios.iter().all(|r| r <= *threshold || *r > level)
        };
        let split = split_at(*ratios.iter().find(fits).unwrap_or(&-1.0));
        clients.iter().map(|&(w, n)| split.entitlement(kind, capacity, w, n)).collect()
    }

    #[track_caller]
    fn check(kind: Kind, capacity: f64, clients: &[(f64, f64)], expected: &[f64]) {
        let found = entitlements(kind, capacity, clients);
        for (found, expected) in found.iter().zip(expected) {
            assert!((found - expected).abs() < 1e-7, "{kind:?} {capacity} {clients:?}: {found}");
        }
        assert!(!kind.shares() || found.iter().sum::<f64>() <= capacity * (1.0 + 1e-12));
    }

    #[test]
    fn the_worked_examples() {
        use Kind::{FairShare, ProportionalShare};
        let plain = |wants: &[f64]| wants.iter().map(|&w| (w, 1.0)).collect::<Vec<_>>();
        check(FairShare, 120.0, &plain(&[1000.0, 50.0, 10.0]), &[60.0, 50.0, 10.0]);
        check(FairShare, 160.0, &plain(&[100.0, 50.0, 45.0, 10.0]), &[55.0, 50.0, 45.0, 10.0]);
        let wants = plain(&[1000.0, 50.0, 10.0]);
        check(ProportionalShare, 120.0, &wants, &[69.690_721_65, 40.309_278_351, 10.0]);
        let wants = plain(&[100.0, 50.0, 10.0]);
        check(ProportionalShare, 90.0, &wants, &[45.0 + 5.0 / 9.0, 34.0 + 4.0 / 9.0, 10.0]);
    }

    #[test]
    fn the_rules() {
        use Kind::{FairShare, NoAlgorithm, ProportionalShare, Static};
        let two = [(30.0, 1.0), (500.0, 1.0)];
        check(NoAlgorithm, 100.0, &two, &[30.0, 500.0]);
        check(Static, 100.0, &two, &[30.0, 100.0]);
        for kind in [FairShare, ProportionalShare] {
            check(kind, 530.0, &two, &[30.0, 500.0]);
            check(kind, 100.0, &two, &[30.0, 70.0]);
            // By the number of subclients.
            check(kind, 90.0, &[(1000.0, 1.0), (2000.0, 2.0)], &[30.0, 60.0]);
            check(kind, 0.0, &two, &[0.0, 0.0]);
            check(kind, 10.0, &[(0.0, 1.0), (20.0, 1.0)], &[0.0, 10.0]);
            check(kind, 10.0, &[(20.0, 1.0); 5], &[2.0; 5]);
        }
    }

    #[test]
    fn any_split_errs_low() {
        let clients = [(1000.0, 1.0), (50.0, 1.0), (10.0, 1.0), (40.0, 2.0)];
        for kind in [Kind::FairShare, Kind::ProportionalShare] {
            let exact = entitlements(kind, 120.0, &clients);
            for sides in 0..16_u32 {
                let mut split = Split::default();
                for (at, &(w, n)) in clients.iter().enumerate() {
                    let below = sides & (1 << at) != 0;
                    (if below { &mut split.below } else { &mut split.above }).add(w, n);
                }
                for (&(w, n), exact) in clients.iter().zip(&exact) {
                    let found = split.entitlement(kind, 120.0, w, n);
                    assert!(found <= exact + 1e-9, "{kind:?} {sides:b}: {found} of {exact}");
                    assert!(found >= w.min(n * 24.0) - 1e-9, "less than an equal share");
                }
            }
        }
    }
}
