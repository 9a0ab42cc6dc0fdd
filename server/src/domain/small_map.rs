//! An ordered map that is small for a single entry.
//!
//! A `BTreeMap` allocates space for eleven entries with the first. A node may have a hundred
//! thousand resources, most of them with one holder, one priority and one expiry.

use std::collections::BTreeMap;

/// An ordered map that allocates only when it gets a second entry.
#[derive(Clone, Debug)]
pub enum SmallMap<K, V> {
    /// At most one entry.
    One(Option<(K, V)>),
    /// Any number of entries.
    Many(BTreeMap<K, V>),
}

impl<K, V> Default for SmallMap<K, V> {
    fn default() -> Self {
        Self::One(None)
    }
}

impl<K: Ord, V> SmallMap<K, V> {
    /// The value of a key.
    pub fn get_mut(&mut self, key: &K) -> Option<&mut V> {
        match self {
            Self::One(one) => one.as_mut().filter(|(at, _)| at == key).map(|(_, value)| value),
            Self::Many(many) => many.get_mut(key),
        }
    }

    /// The value of a key; a new key is added with the default value.
    pub fn get_or_default(&mut self, key: K) -> &mut V
    where
        V: Default,
    {
        if let Self::One(one) = self
            && one.as_ref().is_some_and(|(at, _)| *at != key)
        {
            *self = Self::Many(one.take().into_iter().collect());
        }
        match self {
            Self::One(one) => &mut one.get_or_insert_with(|| (key, V::default())).1,
            Self::Many(many) => many.entry(key).or_default(),
        }
    }

    /// Removes a key.
    pub fn remove(&mut self, key: &K) {
        match self {
            Self::One(one) => drop(one.take_if(|(at, _)| at == key)),
            Self::Many(many) => {
                many.remove(key);
                if many.is_empty() {
                    *self = Self::default();
                }
            }
        }
    }

    /// All entries, ordered by key.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = (&K, &V)> {
        let (one, many) = match self {
            Self::One(one) => (one.as_ref(), None),
            Self::Many(many) => (None, Some(many)),
        };
        one.map(|(key, value)| (key, value)).into_iter().chain(many.into_iter().flatten())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn matches_btree_map(
            steps in proptest::collection::vec((any::<bool>(), 0..4_u8, any::<u8>()), 0..40)
        ) {
            let (mut small, mut map) = (SmallMap::default(), BTreeMap::new());
            for (adds, key, value) in steps {
                prop_assert_eq!(small.get_mut(&key), map.get_mut(&key));
                if adds {
                    *small.get_or_default(key) = value;
                    map.insert(key, value);
                } else {
                    small.remove(&key);
                    map.remove(&key);
                }
                prop_assert!(small.iter().eq(map.iter()) && small.iter().rev().eq(map.iter().rev()));
            }
        }
    }
}
