//! The sums over all holders of a resource, and the threshold that divides them.

use std::ops::Bound::{Excluded, Included};

use super::Resource;
use super::model::{Band, ratio, subclients, wants};
use super::rules::EffectiveRules;
use crate::domain::roster::SlotIndex;
use crate::domain::sum::Sum;

impl Resource {
    /// Subtracts a holder's lease and wants from the sums.
    pub(super) fn subtract_from_sums(&mut self, slot: SlotIndex) {
        let held = self.holders.held(slot);
        self.has.add(-held.has);
        if self.holders.len() == 1 {
            // The last holder leaves: clear any rounding error.
            self.has = Sum::default();
        }
        let below = ratio(&held.bands) <= self.low;
        let side = if below { &mut self.split.below } else { &mut self.split.above };
        side.remove(held.wants(), held.subclients());
    }

    /// Removes a holder's wants from the indexes by wants and by priority.
    pub(super) fn unindex_wants(&mut self, bands: &[Band]) {
        self.by_wants.remove(wants(bands), subclients(bands));
        for band in bands {
            if let Some(side) = self.bands.get_mut(&band.priority) {
                side.remove(band.wants, f64::from(band.subclients));
                if side.subclients <= 0.0 {
                    self.bands.remove(&band.priority);
                }
            }
        }
    }

    /// Subtracts a known holder from the sums, and indexes the holder's new wants by wants and by
    /// priority.
    pub(super) fn change_wants(&mut self, slot: Option<SlotIndex>, bands: &[Band]) {
        if let Some(slot) = slot {
            self.subtract_from_sums(slot);
            let old = &self.holders.held(slot).bands;
            if old.as_slice() == bands {
                return;
            }
            let old = old.clone();
            self.unindex_wants(&old);
        }
        self.by_wants.add(wants(bands), subclients(bands));
        for band in bands {
            let side = self.bands.get_or_default(band.priority);
            side.add(band.wants, f64::from(band.subclients));
        }
    }

    /// Adds a holder's wants to the sums on its side of the threshold.
    pub(super) fn add_to_split(&mut self, bands: &[Band], effective: &EffectiveRules) {
        let (ratio, wants, subclients) = (ratio(bands), wants(bands), subclients(bands));
        if ratio <= self.low {
            self.split.below.add(wants, subclients);
            return;
        }
        let above_before = self.split.above;
        self.split.above.add(wants, subclients);
        if ratio < self.high {
            // No holder is between `low` and `high`, so the threshold may be on either side of this
            // holder.
            let level = self.split.level(effective.algorithm, effective.capacity);
            if above_before.subclients > 0.0 && ratio <= level {
                self.split.above = above_before;
                self.split.below.add(wants, subclients);
                self.low = ratio;
            } else {
                self.high = ratio;
            }
        }
    }

    /// Moves the threshold to the level, past at most `limit` groups.
    pub(super) fn move_threshold(&mut self, effective: &EffectiveRules, limit: usize) {
        let mut last = None;
        for _ in 0..limit {
            let level = self.split.level(effective.algorithm, effective.capacity);
            let up = if level >= self.high {
                true
            } else if level < self.low {
                false
            } else {
                return;
            };
            // A change of direction is due to rounding: either position is good enough.
            if last.is_some_and(|last| last != up) {
                return;
            }
            last = Some(up);
            let moved = if up { self.move_up(level) } else { self.move_down(level) };
            if !moved {
                return;
            }
        }
    }

    /// Moves the threshold up past the lowest group above it, unless that group wants more than
    /// the level. The group at `high` may have been removed. The last group always stays above:
    /// when the total wants exceed the capacity, some group must, whatever rounding does to the
    /// level.
    fn move_up(&mut self, level: f64) -> bool {
        let next = self.by_wants.first(Included(self.high));
        self.high = next.map_or(f64::INFINITY, |(ratio, _)| ratio);
        let Some((ratio, group)) = next else { return false };
        if ratio > level || group.subclients >= self.split.above.subclients {
            return false;
        }
        self.split.above.move_group(group, &mut self.split.below);
        self.low = ratio;
        self.high = self.by_wants.first(Excluded(ratio)).map_or(f64::INFINITY, |(next, _)| next);
        true
    }

    /// Moves the threshold down past the highest group below it, if that group wants more than the
    /// level.
    fn move_down(&mut self, level: f64) -> bool {
        let next = self.by_wants.last(Included(self.low));
        self.low = next.map_or(f64::NEG_INFINITY, |(ratio, _)| ratio);
        let Some((ratio, group)) = next else { return false };
        if ratio <= level {
            return false;
        }
        self.split.below.move_group(group, &mut self.split.above);
        self.high = ratio;
        self.low = self.by_wants.last(Excluded(ratio)).map_or(f64::NEG_INFINITY, |(next, _)| next);
        true
    }
}
