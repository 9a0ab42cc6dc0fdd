//! The keys of buckets in this process's memory.

use std::hash::{Hash, Hasher};
use std::sync::Arc;

use hashbrown::Equivalent;

use super::BucketRequest;
use crate::domain::bucket::BucketKind;

/// The key of one bucket.
#[derive(PartialEq, Eq)]
pub(super) struct Key {
    kind: u8,
    /// The namespace, and then the name.
    names: Box<str>,
    namespace_len: usize,
}

impl Key {
    pub(super) fn namespace(&self) -> &str {
        &self.names[..self.namespace_len]
    }

    pub(super) fn name(&self) -> &str {
        &self.names[self.namespace_len..]
    }
}

/// A [`Key`] with borrowed names, for lookups without allocation.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct KeyRef<'a> {
    /// [`BucketRequest::letter`]
    kind: u8,
    namespace: &'a str,
    name: &'a str,
}

impl Hash for Key {
    fn hash<H: Hasher>(&self, state: &mut H) {
        KeyRef::from(self).hash(state);
    }
}

impl Equivalent<Arc<Key>> for KeyRef<'_> {
    fn equivalent(&self, key: &Arc<Key>) -> bool {
        *self == KeyRef::from(&**key)
    }
}

impl<'a> From<&'a Key> for KeyRef<'a> {
    fn from(key: &'a Key) -> Self {
        Self { kind: key.kind, namespace: key.namespace(), name: key.name() }
    }
}

impl<'a> KeyRef<'a> {
    pub(super) fn of(request: &BucketRequest<'a>) -> Self {
        let (namespace, name) = match request.kind {
            BucketKind::Configured | BucketKind::Dynamic { .. } => {
                (request.namespace, request.name)
            }
            BucketKind::NamespaceDefault => (request.namespace, ""),
            BucketKind::GlobalDefault => ("", ""),
        };
        Self { kind: request.letter(), namespace, name }
    }

    pub(super) fn to_key(self) -> Key {
        let names = [self.namespace, self.name].concat().into();
        Key { kind: self.kind, names, namespace_len: self.namespace.len() }
    }
}
