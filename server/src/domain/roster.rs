//! The holders of leases on one resource, found by id and by when their leases expire.
//!
//! To find one, and to move one to another expiry, touches a few places in memory, however
//! many there are: what a decision costs with very many holders is the caches that it misses.

use std::hash::BuildHasher;

use hashbrown::{DefaultHashBuilder, HashTable};

use super::few::Few;
use super::lease::{Held, Holder};

/// A [`Holder`] that owns its id.
#[derive(Debug)]
enum Key {
    Client(Box<str>),
    Server(Box<str>),
}

impl Key {
    fn of(holder: Holder<'_>) -> Self {
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
    key: Key,
    held: Held,
    /// Where it is in the list of those that expire in the same second.
    at: u32,
}

/// Where a holder is. Good until holders are added or removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place(u32);

/// Holders and their leases.
#[derive(Debug, Default)]
pub struct Roster {
    hasher: DefaultHashBuilder,
    by_id: HashTable<u32>,
    slots: Vec<Slot>,
    by_expiry: Few<i64, Vec<u32>>,
}

impl Roster {
    /// How many there are.
    pub fn len(&self) -> usize {
        self.slots.len()
    }

    /// There are none.
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// Looks for a holder.
    pub fn find(&self, holder: Holder<'_>) -> Option<Place> {
        let same = |&at: &u32| self.slots[at as usize].key.holder() == holder;
        self.by_id.find(self.hasher.hash_one(holder), same).map(|&at| Place(at))
    }

    /// Its lease.
    pub fn held(&self, place: Place) -> &Held {
        &self.slots[place.0 as usize].held
    }

    /// Adds a holder, which must be new.
    pub fn add(&mut self, holder: Holder<'_>, held: Held) {
        let place = self.slots.len() as u32;
        let Self { hasher, by_id, slots, .. } = self;
        by_id.insert_unique(hasher.hash_one(holder), place, |&at| {
            hasher.hash_one(slots[at as usize].key.holder())
        });
        let at = self.enlist(held.expiry_s, place);
        if self.slots.is_empty() {
            // Most resources of a template have one holder, and there may be very many of them.
            self.slots.reserve_exact(1);
        }
        self.slots.push(Slot { key: Key::of(holder), held, at });
    }

    /// Replaces the lease of a holder.
    pub fn replace(&mut self, Place(place): Place, held: Held) {
        let slot = &mut self.slots[place as usize];
        let (before, after) = (slot.held.expiry_s, held.expiry_s);
        slot.held = held;
        if before != after {
            let at = slot.at;
            self.strike(before, at);
            self.slots[place as usize].at = self.enlist(after, place);
        }
    }

    /// Removes a holder.
    pub fn remove(&mut self, Place(place): Place) -> Held {
        let hash =
            |roster: &Self, at: u32| roster.hasher.hash_one(roster.slots[at as usize].key.holder());
        if let Ok(entry) = self.by_id.find_entry(hash(self, place), |&at| at == place) {
            entry.remove();
        }
        let Slot { at, ref held, .. } = self.slots[place as usize];
        self.strike(held.expiry_s, at);
        // The last one takes its place.
        let last = self.slots.len() as u32 - 1;
        if last != place {
            let hash = hash(self, last);
            if let Some(at) = self.by_id.find_mut(hash, |&at| at == last) {
                *at = place;
            }
            let Slot { at, ref held, .. } = self.slots[last as usize];
            if let Some(list) = self.by_expiry.get_mut(&held.expiry_s) {
                list[at as usize] = place;
            }
        }
        self.slots.swap_remove(place as usize).held
    }

    /// One of those whose leases expire first, if that is by `now_s`.
    pub fn expired(&self, now_s: i64) -> Option<Place> {
        let (expiry_s, list) = self.by_expiry.iter().next()?;
        (*expiry_s <= now_s).then(|| list.last().map(|&at| Place(at)))?
    }

    /// When the last lease expires, in seconds since the epoch.
    pub fn last_expiry_s(&self) -> Option<i64> {
        self.by_expiry.iter().next_back().map(|(expiry_s, _)| *expiry_s)
    }

    /// All, those that expire first at the head.
    pub fn iter(&self) -> impl Iterator<Item = (Holder<'_>, &Held)> {
        self.by_expiry.iter().flat_map(|(_, list)| list).map(|&at| {
            let slot = &self.slots[at as usize];
            (slot.key.holder(), &slot.held)
        })
    }

    /// Puts a holder on the list of those that expire then, and tells where.
    fn enlist(&mut self, expiry_s: i64, place: u32) -> u32 {
        let list = self.by_expiry.get_or_default(expiry_s);
        list.push(place);
        list.len() as u32 - 1
    }

    /// Takes the one at `at` off that list.
    fn strike(&mut self, expiry_s: i64, at: u32) {
        let Some(list) = self.by_expiry.get_mut(&expiry_s) else { return };
        list.swap_remove(at as usize);
        match list.get(at as usize) {
            Some(&moved) => self.slots[moved as usize].at = at,
            None if list.is_empty() => self.by_expiry.remove(&expiry_s),
            None => {}
        }
    }
}
