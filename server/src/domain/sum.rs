//! Running sums without rounding drift: adding a value and subtracting it again restores the sum.

/// A running sum of doubles, stored as a double-double (about 106 bits).
///
/// The algorithm is Knuth's two-sum followed by a renormalisation (in Joldes, Muller and
/// Popescu's "Tight and rigorous error bounds for basic building blocks of double-word
/// arithmetic", 2017: DWPlusFP). The relative error of each addition is at most 2^-105, so that
/// 10^9 additions to a sum of up to M have an error of 3·10^-23·M. A plain double has an error of
/// 10^-16·M after a single addition.
///
/// `lua/lease.lua` uses the same algorithm, with bit-identical results.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sum {
    hi: f64,
    lo: f64,
}

impl Sum {
    /// A sum from its two parts, as returned by [`parts`](Self::parts).
    pub fn from_parts([hi, lo]: [f64; 2]) -> Self {
        Self { hi, lo }
    }

    /// The two parts, high part first.
    pub fn parts(self) -> [f64; 2] {
        [self.hi, self.lo]
    }

    /// Adds `x`.
    pub fn add(&mut self, x: f64) {
        let sum = self.hi + x;
        let part = sum - self.hi;
        let error = (self.hi - (sum - part)) + (x - part) + self.lo;
        self.hi = sum + error;
        self.lo = error - (self.hi - sum);
    }

    /// Adds another sum.
    pub fn add_sum(&mut self, other: Self) {
        self.add(other.hi);
        self.add(other.lo);
    }

    /// Subtracts another sum.
    pub fn sub_sum(&mut self, other: Self) {
        self.add(-other.hi);
        self.add(-other.lo);
    }

    /// The sum rounded to the nearest double.
    pub fn value(self) -> f64 {
        self.hi
    }

    /// `whole` minus this sum.
    pub fn rest_of(self, whole: f64) -> f64 {
        (whole - self.hi) - self.lo
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_numbers_survive_large_ones() {
        let mut sum = Sum::default();
        sum.add(0.1);
        sum.add(1e16);
        sum.add(0.2);
        sum.add(-1e16);
        sum.add(-0.1);
        assert!((sum.value() - 0.2).abs() < 1e-15, "{sum:?}");
        sum.add(-0.2);
        assert!(sum.value().abs() < 1e-15, "{sum:?}");
    }

    #[test]
    fn rest_of_is_exact() {
        let mut sum = Sum::default();
        (0..10).for_each(|_| sum.add(0.1));
        // Ten times the double nearest to 0.1 is a little more than 1.
        assert!(sum.rest_of(1.0) < 0.0 && sum.rest_of(1.0) > -1e-15);
        assert_eq!(Sum::default().rest_of(3.0), 3.0);
    }
}
