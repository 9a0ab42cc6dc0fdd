//! The running sums of a resource do not drift: after a million requests and releases with wants
//! from a millionth to 10^12, they equal exact sums of the same leases.

use rand::rngs::SmallRng;
use rand::{RngExt as _, SeedableRng as _};
use testkit::START;
use tollgate_server::domain::lease::{Band, Claim, Grant, Holder, HolderRequest, Resource, Rules};
use tollgate_server::domain::sharing::SharingAlgorithm;

const HOLDERS: usize = 200;
const OPERATIONS: usize = 1_000_000;

/// Largest number of additions to a sum per operation.
const ADDITIONS: f64 = 1e3;

/// The number as a multiple of 2^-`places`, exact if it is one.
fn fixed(number: f64, places: i32) -> i128 {
    let bits = number.to_bits();
    let exponent = (bits >> 52) as i32;
    assert!((0..0x7ff).contains(&exponent), "{number}");
    let mantissa = i128::from(bits & ((1 << 52) - 1)) | i128::from(exponent > 0) << 52;
    let shift = exponent.max(1) - 1075 + places;
    assert!(shift < 127 - 53, "{number}");
    if shift >= 0 {
        mantissa << shift
    } else {
        mantissa.checked_shr(shift.unsigned_abs()).unwrap_or(0)
    }
}

/// An exact sum.
struct Exact {
    places: i32,
    sum: i128,
    most: f64,
}

impl Exact {
    fn new(places: i32) -> Self {
        Self { places, sum: 0, most: 0.0 }
    }

    fn change(&mut self, before: f64, after: f64) {
        self.sum += fixed(after, self.places) - fixed(before, self.places);
        self.most = self.most.max(self.value());
    }

    fn value(&self) -> f64 {
        self.sum as f64 * 2_f64.powi(-self.places)
    }

    /// Allowed error of a running sum: the rounding to a double when it is read, 2^-105 of the
    /// largest sum for each addition, and the digits beyond `places`.
    fn bound(&self, operations: usize) -> f64 {
        let drift = operations as f64 * ADDITIONS * 2_f64.powi(-105) * self.most;
        self.value() * 2_f64.powi(-52) + drift + HOLDERS as f64 * 2_f64.powi(-self.places)
    }
}

/// A resource, with exact sums.
struct Counted {
    resource: Resource,
    rules: Rules,
    ids: Vec<String>,
    /// Wants, subclients and capacity of each holder; all 0 without a lease.
    held: Vec<(f64, u32, f64)>,
    wants: Exact,
    has: Exact,
    operations: usize,
}

impl Counted {
    fn new(algorithm: SharingAlgorithm) -> Self {
        Self {
            resource: Resource::new(START),
            rules: Rules {
                algorithm: Some(algorithm),
                capacity: 1e6,
                lease_s: 300,
                learning_s: 0,
                from_parent: false,
            },
            ids: (0..HOLDERS).map(|at| format!("cluster-{at}")).collect(),
            held: vec![(0.0, 0, 0.0); HOLDERS],
            wants: Exact::new(60),
            has: Exact::new(100),
            operations: 0,
        }
    }

    fn record(&mut self, at: usize, wants: f64, subclients: u32, has: f64) {
        self.operations += 1;
        self.wants.change(self.held[at].0, wants);
        self.has.change(self.held[at].2, has);
        self.held[at] = (wants, subclients, has);
    }

    fn ask(&mut self, at: usize, wants: f64, subclients: u32) {
        let bands = [Band { priority: 0, subclients, wants }];
        let holder = Holder::Server(&self.ids[at]);
        // The cluster has leased out none of its capacity.
        let claim = Some(Claim { capacity: 0.0, expiry_s: START.as_secs() });
        let request = HolderRequest { holder, bands: &bands, claim, learn_for_us: 0 };
        let Grant { has, .. } = self.resource.decide(&request, &self.rules, START);
        self.record(at, wants, subclients, has);
    }

    fn release(&mut self, at: usize) {
        self.resource.release(Holder::Server(&self.ids[at]), START);
        self.record(at, 0.0, 0, 0.0);
    }

    /// Asserts that the sums are within [`Exact::bound`], and returns their errors.
    fn check(&self) -> [f64; 2] {
        let totals = self.resource.totals();
        let subclients: u32 = self.held.iter().map(|(_, n, _)| n).sum();
        assert_eq!(totals.split.subclients(), f64::from(subclients));
        [(totals.split.wants(), &self.wants), (totals.has, &self.has)].map(|(found, exact)| {
            let off = (found - exact.value()).abs();
            let bound = exact.bound(self.operations);
            assert!(off <= bound, "{found} instead of {}: {off} off", exact.value());
            off
        })
    }
}

#[test]
fn a_million_operations_leave_no_drift() {
    for algorithm in [SharingAlgorithm::FairShare, SharingAlgorithm::ProportionalShare] {
        let mut random = SmallRng::seed_from_u64(4);
        let mut counted = Counted::new(algorithm);
        let mut naive = 0.0;
        for operation in 0..OPERATIONS / 2 {
            let at = random.random_range(0..HOLDERS);
            naive -= counted.held[at].0;
            if random.random_range(0..5) == 0 {
                if counted.held[at].1 > 0 {
                    counted.release(at);
                }
            } else {
                let wants = 10_f64.powf(random.random_range(-6.0..12.0));
                // A multiple of the exact sum's smallest unit.
                let wants = (wants * 2_f64.powi(60)).round() * 2_f64.powi(-60);
                counted.ask(at, wants, 1 + random.random_range(0..5) as u32);
                naive += wants;
            }
            if operation % 1000 == 0 {
                counted.check();
            }
        }
        counted.check();
        // Large holders leave. The rest is small, so an error becomes visible.
        for at in 0..HOLDERS {
            if counted.held[at].0 > 1.0 {
                naive -= counted.held[at].0;
                counted.release(at);
            }
        }
        let [off, off_has] = counted.check();
        let left = counted.wants.value();
        assert!(left > 0.0 && off <= 1e-9 * left, "{off} of {left}");
        let naive_off = (naive - left).abs();
        println!(
            "{algorithm:?}: error {off:.1e} of {left:.3} wanted, {off_has:.1e} of {:.3} leased; \
             a plain sum has an error of {naive_off:.1e}",
            counted.has.value(),
        );
        assert!(naive_off > 1e-4, "a plain sum would pass this test");
    }
}
