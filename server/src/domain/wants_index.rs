//! An index of a resource's holders, ordered by their wants per subclient.
//!
//! Only the holders near the threshold of [`super::lease`] must be in exact index. Holders with
//! similar wants therefore share a bin. A bin is sorted when the threshold first reaches it, or
//! when it has grown large. This keeps the searched data small enough for the processor's caches.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::ops::Bound;

use super::sharing::Side;

/// The most holders in an unsorted bin.
const MAX_UNSORTED: usize = 256;

/// Wants per subclient; never NaN.
#[derive(Clone, Copy, Debug)]
struct Ratio(f64);

impl PartialEq for Ratio {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Ratio {}

impl PartialOrd for Ratio {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Ratio {
    fn cmp(&self, other: &Self) -> Ordering {
        self.0.total_cmp(&other.0)
    }
}

impl Ratio {
    /// The number of the bin: sign, exponent and 8 bits of the mantissa. Bin numbers sort like the
    /// ratios.
    fn bin(self) -> i32 {
        let bits = self.0.to_bits() as i64;
        ((bits ^ (((bits >> 63) as u64) >> 1) as i64) >> 44) as i32
    }
}

/// Holders with similar wants per subclient; never empty.
#[derive(Debug)]
enum Bin {
    /// Wants and subclients of each holder.
    Unsorted(Vec<(f64, f64)>),
    /// Sums of each group of holders with equal wants per subclient.
    Sorted(BTreeMap<Ratio, Side>),
}

fn add(groups: &mut BTreeMap<Ratio, Side>, wants: f64, subclients: f64) {
    groups.entry(Ratio(wants / subclients)).or_default().add(wants, subclients);
}

impl Bin {
    fn sorted(&mut self) -> &BTreeMap<Ratio, Side> {
        if let Self::Unsorted(holders) = self {
            let mut groups = BTreeMap::new();
            holders.iter().for_each(|&(wants, n)| add(&mut groups, wants, n));
            *self = Self::Sorted(groups);
        }
        match self {
            Self::Sorted(groups) => groups,
            Self::Unsorted(_) => unreachable!("the bin has just been sorted"),
        }
    }

    fn add(&mut self, wants: f64, subclients: f64) {
        match self {
            Self::Sorted(groups) => add(groups, wants, subclients),
            Self::Unsorted(holders) => {
                holders.push((wants, subclients));
                if holders.len() > MAX_UNSORTED {
                    self.sorted();
                }
            }
        }
    }

    /// Removes a holder; returns whether the bin is now empty.
    fn remove(&mut self, wants: f64, subclients: f64) -> bool {
        match self {
            Self::Unsorted(holders) => {
                if let Some(at) = holders.iter().position(|&holder| holder == (wants, subclients)) {
                    holders.swap_remove(at);
                }
                holders.is_empty()
            }
            Self::Sorted(groups) => {
                let ratio = Ratio(wants / subclients);
                if let Some(group) = groups.get_mut(&ratio) {
                    group.remove(wants, subclients);
                    if group.subclients <= 0.0 {
                        groups.remove(&ratio);
                    }
                }
                groups.is_empty()
            }
        }
    }
}

/// Holders ordered by wants per subclient. Holders with equal wants per subclient form a group.
#[derive(Debug, Default)]
pub struct WantsIndex {
    bins: BTreeMap<i32, Bin>,
}

impl WantsIndex {
    /// Adds a holder.
    pub fn add(&mut self, wants: f64, subclients: f64) {
        let bin = Ratio(wants / subclients).bin();
        self.bins.entry(bin).or_insert(Bin::Unsorted(Vec::new())).add(wants, subclients);
    }

    /// Removes a holder that was added with exactly these arguments.
    pub fn remove(&mut self, wants: f64, subclients: f64) {
        let number = Ratio(wants / subclients).bin();
        if let Some(bin) = self.bins.get_mut(&number)
            && bin.remove(wants, subclients)
        {
            self.bins.remove(&number);
        }
    }

    /// The first group at or after `from`: its wants per subclient, and its sums.
    pub fn first(&mut self, from: Bound<f64>) -> Option<(f64, Side)> {
        let from = from.map(Ratio);
        let start = from.map(Ratio::bin);
        let start = if let Bound::Excluded(bin) = start { Bound::Included(bin) } else { start };
        let mut bins = self.bins.range_mut((start, Bound::Unbounded));
        let found = bins.find_map(|(_, bin)| bin.sorted().range((from, Bound::Unbounded)).next());
        found.map(|(ratio, group)| (ratio.0, *group))
    }

    /// The last group at or before `to`: its wants per subclient, and its sums.
    pub fn last(&mut self, to: Bound<f64>) -> Option<(f64, Side)> {
        let to = to.map(Ratio);
        let end = to.map(Ratio::bin);
        let end = if let Bound::Excluded(bin) = end { Bound::Included(bin) } else { end };
        let mut bins = self.bins.range_mut((Bound::Unbounded, end)).rev();
        let found =
            bins.find_map(|(_, bin)| bin.sorted().range((Bound::Unbounded, to)).next_back());
        found.map(|(ratio, group)| (ratio.0, *group))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn finds_groups_in_order(
            steps in proptest::collection::vec((0..6_u8, 0..40_u32, 1..4_u32, -3..3_i32), 1..900)
        ) {
            let mut index = WantsIndex::default();
            let mut holders: Vec<(f64, f64)> = Vec::new();
            for (step, wants, n, power) in steps {
                // Put many holders into few bins: these differ by less than the width of a bin.
                let wants = (1.0 + f64::from(wants) * 1e-4) * 10_f64.powi(power / 2);
                let (wants, n) = (wants * f64::from(n), f64::from(n));
                match step {
                    0 => {
                        let ratio = wants / n;
                        let key = |&(w, n): &(f64, f64)| w / n;
                        let from = holders.iter().map(key).filter(|r| *r >= ratio);
                        let found = index.first(Bound::Included(ratio));
                        prop_assert_eq!(found.map(|f| f.0), from.min_by(f64::total_cmp));
                        let after = holders.iter().map(key).filter(|r| *r > ratio);
                        let found = index.first(Bound::Excluded(ratio));
                        prop_assert_eq!(found.map(|f| f.0), after.min_by(f64::total_cmp));
                        let to = holders.iter().map(key).filter(|r| *r <= ratio);
                        let found = index.last(Bound::Included(ratio));
                        prop_assert_eq!(found.map(|f| f.0), to.max_by(f64::total_cmp));
                        let before = holders.iter().map(key).filter(|r| *r < ratio);
                        let found = index.last(Bound::Excluded(ratio));
                        prop_assert_eq!(found.map(|f| f.0), before.max_by(f64::total_cmp));
                        if let Some((ratio, group)) = found {
                            let members = holders.iter().filter(|holder| key(holder) == ratio);
                            let sum = |(w, n), holder: &(f64, f64)| (w + holder.0, n + holder.1);
                            let (w, n) = members.fold((0.0, 0.0), sum);
                            prop_assert!((group.wants.value() - w).abs() < 1e-9);
                            prop_assert_eq!(group.subclients, n);
                        }
                    }
                    1 => {
                        if let Some((wants, n)) = holders.pop() {
                            index.remove(wants, n);
                        }
                    }
                    _ => {
                        holders.push((wants, n));
                        index.add(wants, n);
                    }
                }
            }
            holders.iter().for_each(|&(wants, n)| index.remove(wants, n));
            prop_assert!(index.bins.is_empty());
        }
    }
}
