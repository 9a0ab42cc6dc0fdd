//! The holders of leases on one resource, indexed by id and by lease expiry.
//!
//! Finding a holder, or changing its expiry, touches only a few cache lines, however many holders
//! there are: with very many holders, cache misses dominate the cost of a decision.

use std::hash::BuildHasher;

use hashbrown::{DefaultHashBuilder, HashTable};

use super::lease::model::{HeldLease, Holder};
use super::small_map::SmallMap;

/// A [`Holder`] that owns its id.
#[derive(Debug)]
enum OwnedHolder {
    Client(Box<str>),
    Server(Box<str>),
}

impl OwnedHolder {
    fn new(holder: Holder<'_>) -> Self {
        match holder {
            Holder::Client(id) => Self::Client(id.into()),
            Holder::Server(id) => Self::Server(id.into()),
        }
    }

    fn holder(&self) -> Holder<'_> {
        match self {
            Self::Client(id) => Holder::Client(id),
            Self::Server(id) => Holder::Server(id),
        }
    }
}

#[derive(Debug)]
struct Slot {
    key: OwnedHolder,
    held: HeldLease,
    /// Position in the list of the holders whose leases expire in the same second.
    expiry_position: u32,
}

/// The index of a holder's slot. Valid until a holder is added or removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotIndex(u32);

/// Holders and their leases.
#[derive(Debug, Default)]
pub struct Roster {
    hasher: DefaultHashBuilder,
    /// Slot indices by the hash of the holder.
    by_id: HashTable<u32>,
    slots: Vec<Slot>,
    /// Slot indices by expiry, in seconds since the epoch.
    by_expiry: SmallMap<i64, Vec<u32>>,
}

impl Roster {
    /// The number of holders.
    pub fn len(&self) -> usize {
        self.slots.len()
    }

    /// Whether there are no holders.
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// Finds a holder.
    pub fn find(&self, holder: Holder<'_>) -> Option<SlotIndex> {
        let same = |&at: &u32| self.slots[at as usize].key.holder() == holder;
        self.by_id.find(self.hasher.hash_one(holder), same).map(|&at| SlotIndex(at))
    }

    /// The lease of a holder.
    pub fn held(&self, slot_index: SlotIndex) -> &HeldLease {
        &self.slots[slot_index.0 as usize].held
    }

    /// Adds a holder, which must be new.
    pub fn add(&mut self, holder: Holder<'_>, held: HeldLease) {
        let slot_index = self.slots.len() as u32;
        let Self { hasher, by_id, slots, .. } = self;
        by_id.insert_unique(hasher.hash_one(holder), slot_index, |&at| {
            hasher.hash_one(slots[at as usize].key.holder())
        });
        let expiry_position = self.add_to_expiry(held.expiry_s, slot_index);
        if self.slots.is_empty() {
            // Most resources have one holder, and there may be very many resources.
            self.slots.reserve_exact(1);
        }
        self.slots.push(Slot { key: OwnedHolder::new(holder), held, expiry_position });
    }

    /// Replaces the lease of a holder.
    pub fn replace(&mut self, SlotIndex(slot_index): SlotIndex, held: HeldLease) {
        let slot = &mut self.slots[slot_index as usize];
        let (before, after) = (slot.held.expiry_s, held.expiry_s);
        slot.held = held;
        if before != after {
            let position = slot.expiry_position;
            self.remove_from_expiry(before, position);
            self.slots[slot_index as usize].expiry_position = self.add_to_expiry(after, slot_index);
        }
    }

    /// Removes a holder and returns its lease.
    pub fn remove(&mut self, SlotIndex(slot_index): SlotIndex) -> HeldLease {
        let hash =
            |roster: &Self, at: u32| roster.hasher.hash_one(roster.slots[at as usize].key.holder());
        if let Ok(entry) = self.by_id.find_entry(hash(self, slot_index), |&at| at == slot_index) {
            entry.remove();
        }
        let Slot { expiry_position, ref held, .. } = self.slots[slot_index as usize];
        self.remove_from_expiry(held.expiry_s, expiry_position);
        // `swap_remove` below moves the last slot here.
        let last = self.slots.len() as u32 - 1;
        if last != slot_index {
            let hash = hash(self, last);
            if let Some(at) = self.by_id.find_mut(hash, |&at| at == last) {
                *at = slot_index;
            }
            let Slot { expiry_position, ref held, .. } = self.slots[last as usize];
            if let Some(list) = self.by_expiry.get_mut(&held.expiry_s) {
                list[expiry_position as usize] = slot_index;
            }
        }
        self.slots.swap_remove(slot_index as usize).held
    }

    /// A holder with the earliest expiry, if that is at or before `now_s`.
    pub fn expired(&self, now_s: i64) -> Option<SlotIndex> {
        let (expiry_s, list) = self.by_expiry.iter().next()?;
        (*expiry_s <= now_s).then(|| list.last().map(|&at| SlotIndex(at)))?
    }

    /// The latest expiry of all leases, in seconds since the epoch.
    pub fn last_expiry_s(&self) -> Option<i64> {
        self.by_expiry.iter().next_back().map(|(expiry_s, _)| *expiry_s)
    }

    /// All holders and their leases, earliest expiry first.
    pub fn iter(&self) -> impl Iterator<Item = (Holder<'_>, &HeldLease)> {
        self.by_expiry.iter().flat_map(|(_, list)| list).map(|&at| {
            let slot = &self.slots[at as usize];
            (slot.key.holder(), &slot.held)
        })
    }

    /// Adds a holder to the list for `expiry_s`, and returns its position there.
    fn add_to_expiry(&mut self, expiry_s: i64, slot_index: u32) -> u32 {
        let list = self.by_expiry.get_or_default(expiry_s);
        list.push(slot_index);
        list.len() as u32 - 1
    }

    /// Removes the holder at `position` from the list for `expiry_s`.
    fn remove_from_expiry(&mut self, expiry_s: i64, position: u32) {
        let Some(list) = self.by_expiry.get_mut(&expiry_s) else { return };
        list.swap_remove(position as usize);
        match list.get(position as usize) {
            Some(&moved) => self.slots[moved as usize].expiry_position = position,
            None if list.is_empty() => self.by_expiry.remove(&expiry_s),
            None => {}
        }
    }
}
