//! The keys of buckets in this process's memory.

use std::hash::{Hash, Hasher};
use std::sync::Arc;

use hashbrown::Equivalent;

use super::BucketRequest;
use crate::domain::bucket::BucketKind;

/// The key of one bucket.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Key {
    /// `b`: a configured or dynamic bucket; `d`: a namespace's default; `g`: the global default.
    pub(super) kind: u8,
    pub(super) namespace: Box<str>,
    pub(super) name: Box<str>,
}

/// A [`Key`] with borrowed names, for lookups without allocation.
#[derive(Clone, Copy, Hash)]
pub(super) struct KeyRef<'a> {
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
        self.kind == key.kind && *self.namespace == *key.namespace && *self.name == *key.name
    }
}

impl<'a> From<&'a Key> for KeyRef<'a> {
    fn from(key: &'a Key) -> Self {
        Self { kind: key.kind, namespace: &key.namespace, name: &key.name }
    }
}

impl<'a> KeyRef<'a> {
    pub(super) fn of(request: &BucketRequest<'a>) -> Self {
        match request.kind {
            BucketKind::Configured { .. } | BucketKind::Dynamic { .. } => {
                Self { kind: b'b', namespace: request.namespace, name: request.name }
            }
            BucketKind::NamespaceDefault => {
                Self { kind: b'd', namespace: request.namespace, name: "" }
            }
            BucketKind::GlobalDefault => Self { kind: b'g', namespace: "", name: "" },
        }
    }

    pub(super) fn to_key(self) -> Key {
        Key { kind: self.kind, namespace: self.namespace.into(), name: self.name.into() }
    }
}
