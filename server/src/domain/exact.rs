//! Sums that do not drift: what was added and is taken away again leaves nothing behind.

/// A running sum of doubles, kept as two of them (about 106 bits).
///
/// The algorithm is Knuth's two-sum followed by a renormalisation (in Joldes, Muller and
/// Popescu's "Tight and rigorous error bounds for basic building blocks of double-word
/// arithmetic", 2017: DWPlusFP). Each addition is off by at most 2^-105 of the sum at that
/// time, so that 10^9 of them with a sum of up to M are off by 3·10^-23·M. A plain double
/// is off by 10^-16·M after a single one.
///
/// `lua/lease.lua` adds the same way, to the last bit.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sum {
    hi: f64,
    lo: f64,
}

impl Sum {
    /// From its two parts, the larger first, as [`parts`](Self::parts) gives them.
    pub fn from_parts([hi, lo]: [f64; 2]) -> Self {
        Self { hi, lo }
    }

    /// Its two parts.
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

    /// Takes another sum away.
    pub fn sub_sum(&mut self, other: Self) {
        self.add(-other.hi);
        self.add(-other.lo);
    }

    /// The nearest double.
    pub fn value(self) -> f64 {
        self.hi
    }

    /// What is left of `whole` after this sum.
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
    fn rest_of_a_whole() {
        let mut sum = Sum::default();
        (0..10).for_each(|_| sum.add(0.1));
        // Ten times the double nearest to 0.1 is a little more than 1.
        assert!(sum.rest_of(1.0) < 0.0 && sum.rest_of(1.0) > -1e-15);
        assert_eq!(Sum::default().rest_of(3.0), 3.0);
    }
}
