//! The key schema. No version and no node is in a key: nodes with different limits still
//! count the same bucket.
//!
//! | key | what | hash tag |
//! |---|---|---|
//! | `b{ns:bucket}` | a bucket's state, where the namespace does not bound its dynamic buckets | the whole name, so that they spread over all slots |
//! | `m{ns}bucket` | a bucket's state, where it does | the namespace: one slot, so that the bound is exact |
//! | `r{ns}` | that namespace's register of dynamic buckets | the namespace |
//! | `d{ns}` | the namespace's default bucket | the namespace |
//! | `g` | the global default bucket | – |
//! | `h{resource}` | a resource's leases by holder, and their sums | the resource |
//! | `w{resource}` | its holders by what they want | the resource |
//! | `e{resource}` | its holders by when their leases expire | the resource |
//! | `p{resource}` | where there is a parent: its lease, and what is wanted by priority | the resource |
//! | `x` | how nodes store states, and since when | – |
//! | `t` | where there is a parent: the node that renews leases | – |
//! | `l` | the resources that somebody holds a lease on | none, or the server's |
//! | `o` | since when the store has had its state | none, or the server's |
//! | `n` | the nodes that are alive | none, or the server's |
//!
//! In a cluster each server has the last three for itself (`l{tag}`, …), under a tag that the
//! highest of its slots is hashed from: each may lose its memory alone, and what is about all
//! of its resources or nodes must not wait for another.
//!
//! Two names never make the same key, nor can a name move a key out of its slot: inside the
//! braces `%`, `{` and `}` are written `%25`, `%7B` and `%7D`, and a namespace has no `:`.
//! A namespace that begins to bound its dynamic buckets, or ceases to, changes its layout. For as
//! long as a state from before can live, decisions are told what stands under the other key (the
//! twin, read in a call of its own: it is in another slot), and the lower balance counts.
//!
//! Letters are all that separates tollgate's keys from others', for the sake of memory: give
//! it a Redis, or at least a database, of its own.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use crate::domain::bucket::BucketKind;

/// The keys of one decision, in the order of `lua/allow.lua`. They share a hash tag.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Keys {
    pub(super) state: Vec<u8>,
    pub(super) register: Option<Vec<u8>>,
}

/// The keys that a server has for itself.
#[derive(Clone, Debug)]
pub(super) struct ServerKeys {
    /// The nodes that are alive.
    pub(super) nodes: Box<str>,
    /// Since when the store has had its state.
    pub(super) birth: Box<str>,
    /// The resources that somebody holds a lease on.
    pub(super) resources: Box<str>,
    /// What the node knows of the birth.
    pub(super) known: Arc<Birth>,
}

/// When a server was born, in µs, as far as a node knows.
#[derive(Debug, Default)]
pub(super) struct Birth {
    /// As it said last; 0: it has not said yet.
    last: AtomicI64,
    /// If its key is a new one because the server has given away the slot of the one before, and
    /// has not been told yet; else 0.
    inherited: AtomicI64,
}

impl Birth {
    pub(super) fn inherited_from(other: &Self) -> Self {
        let born = other.last();
        Self { last: AtomicI64::new(born), inherited: AtomicI64::new(born) }
    }

    pub(super) fn last(&self) -> i64 {
        self.last.load(Ordering::Relaxed)
    }

    pub(super) fn inherited(&self) -> i64 {
        self.inherited.load(Ordering::Relaxed)
    }

    /// The server has said it.
    pub(super) fn told(&self, born: i64) {
        self.last.store(born, Ordering::Relaxed);
        self.inherited.store(0, Ordering::Relaxed);
    }
}

impl ServerKeys {
    /// `tag`: what hashes to that server; empty where there is but one.
    pub(super) fn new(tag: &str, known: Birth) -> Self {
        let key = |letter: &str| match tag {
            "" => letter.into(),
            tag => format!("{letter}{{{tag}}}").into(),
        };
        Self { nodes: key("n"), birth: key("o"), resources: key("l"), known: known.into() }
    }

    /// Of a server that has no slot yet, and so no room for any.
    pub(super) fn none(known: Birth) -> Self {
        let none = Box::<str>::default;
        Self { nodes: none(), birth: none(), resources: none(), known: known.into() }
    }
}

/// How nodes store states.
pub(super) const LAYOUTS: &str = "x";

/// The node that renews leases from the parent.
pub(super) const RENEWAL: &str = "t";

/// The keys of one resource.
pub(super) struct ResourceKeys {
    pub(super) holders: Vec<u8>,
    pub(super) by_wants: Vec<u8>,
    pub(super) by_expiry: Vec<u8>,
    pub(super) upstream: Vec<u8>,
}

impl ResourceKeys {
    pub(super) fn new(resource: &str) -> Self {
        let key = |letter| tagged(letter, resource, None, "");
        Self { holders: key(b'h'), by_wants: key(b'w'), by_expiry: key(b'e'), upstream: key(b'p') }
    }
}

impl Keys {
    pub(super) fn new(kind: BucketKind, namespace: &str, name: &str) -> Self {
        match kind {
            BucketKind::GlobalDefault => Self { state: b"g".to_vec(), register: None },
            BucketKind::NamespaceDefault => {
                Self { state: tagged(b'd', namespace, None, ""), register: None }
            }
            _ if bounded(kind) => Self {
                state: together(namespace, name),
                register: Some(tagged(b'r', namespace, None, "")),
            },
            _ => Self { state: spread(namespace, name), register: None },
        }
    }
}

/// A bucket's key under the layout that its namespace does not have now, if it has a name. It
/// is in another slot, so it can't be part of the decision.
pub(super) fn twin(kind: BucketKind, namespace: &str, name: &str) -> Option<Vec<u8>> {
    match kind {
        BucketKind::GlobalDefault | BucketKind::NamespaceDefault => None,
        _ if bounded(kind) => Some(spread(namespace, name)),
        _ => Some(together(namespace, name)),
    }
}

fn bounded(kind: BucketKind) -> bool {
    matches!(
        kind,
        BucketKind::Configured { bounded: true } | BucketKind::Dynamic { max_buckets: Some(_) }
    )
}

fn spread(namespace: &str, name: &str) -> Vec<u8> {
    tagged(b'b', namespace, Some(name), "")
}

fn together(namespace: &str, name: &str) -> Vec<u8> {
    tagged(b'm', namespace, None, name)
}

fn tagged(letter: u8, namespace: &str, name: Option<&str>, after: &str) -> Vec<u8> {
    let name_len = name.map_or(0, |name| name.len() + 1);
    let mut key = Vec::with_capacity(3 + namespace.len() + name_len + after.len());
    key.extend([letter, b'{']);
    escape(namespace, &mut key);
    if let Some(name) = name {
        key.push(b':');
        escape(name, &mut key);
    }
    key.push(b'}');
    key.extend(after.as_bytes());
    key
}

fn escape(name: &str, key: &mut Vec<u8>) {
    for &byte in name.as_bytes() {
        match byte {
            b'%' => key.extend(b"%25"),
            b'{' => key.extend(b"%7B"),
            b'}' => key.extend(b"%7D"),
            _ => key.push(byte),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SPREAD: BucketKind = BucketKind::Dynamic { max_buckets: None };
    const TOGETHER: BucketKind = BucketKind::Dynamic { max_buckets: Some(1) };

    /// What Redis Cluster hashes: from the first `{` to the next `}`, if anything is between.
    fn tag(key: &[u8]) -> &[u8] {
        let Some(open) = key.iter().position(|&b| b == b'{') else { return key };
        match key[open + 1..].iter().position(|&b| b == b'}') {
            None | Some(0) => key,
            Some(len) => &key[open + 1..open + 1 + len],
        }
    }

    #[test]
    fn schema() {
        let keys = |kind| Keys::new(kind, "ns", "a:b}");
        let text = |key: Option<Vec<u8>>| String::from_utf8(key.unwrap()).unwrap();
        let twin = |kind| text(twin(kind, "ns", "a:b}"));
        assert_eq!(text(Some(keys(SPREAD).state)), "b{ns:a:b%7D}");
        assert_eq!(keys(SPREAD).register, None);
        assert_eq!(twin(SPREAD), "m{ns}a:b}");
        assert_eq!(text(Some(keys(TOGETHER).state)), "m{ns}a:b}");
        assert_eq!(text(keys(TOGETHER).register), "r{ns}");
        assert_eq!(twin(TOGETHER), "b{ns:a:b%7D}");
        assert_eq!(text(Some(keys(BucketKind::NamespaceDefault).state)), "d{ns}");
        assert_eq!(text(Some(keys(BucketKind::GlobalDefault).state)), "g");
    }

    /// Text of every kind of byte that text has, and of what means something in a key.
    fn name() -> impl Strategy<Value = String> {
        let part = prop_oneof![
            4 => "[a%{}:]{1,3}",
            1 => Just("%7B".to_owned()),
            1 => Just("}{".to_owned()),
            1 => "[\\x00\\n\\r\\x1b\\x7f ]",
            1 => "[\u{80}\u{ff}\u{202e}\u{feff}\u{10ffff}]",
            1 => any::<char>().prop_map(String::from),
        ];
        proptest::collection::vec(part, 1..6).prop_map(|parts| parts.concat())
    }

    /// All the keys that come of some names: each with what it is about.
    fn all_keys(namespace: &str, bucket: &str, resource: &str) -> Vec<(Vec<u8>, String)> {
        let bounded = Keys::new(TOGETHER, namespace, bucket);
        let default = Keys::new(BucketKind::NamespaceDefault, namespace, bucket).state;
        let ResourceKeys { holders, by_wants, by_expiry, upstream } = ResourceKeys::new(resource);
        let pair = format!("{namespace:?} {bucket:?}");
        let mut all = vec![
            (Keys::new(SPREAD, namespace, bucket).state, format!("spread {pair}")),
            (bounded.state, format!("together {pair}")),
            (bounded.register.unwrap(), format!("register {namespace:?}")),
            (default, format!("default {namespace:?}")),
            (Keys::new(BucketKind::GlobalDefault, namespace, bucket).state, "global".to_owned()),
        ];
        for (letter, key) in
            ["h", "w", "e", "p"].iter().zip([holders, by_wants, by_expiry, upstream])
        {
            all.push((key, format!("{letter} {resource:?}")));
        }
        for tag in ["", "a"] {
            let ServerKeys { nodes, birth, resources, .. } = ServerKeys::new(tag, Birth::default());
            for key in [nodes, birth, resources] {
                all.push((key.as_bytes().to_vec(), format!("server {key}")));
            }
        }
        for key in [LAYOUTS, RENEWAL] {
            all.push((key.as_bytes().to_vec(), key.to_owned()));
        }
        all
    }

    proptest! {
        /// Whatever the names, two things never have one key.
        #[test]
        fn nothing_shares_a_key(
            // A namespace has no colon: see domain::names.
            spaces in proptest::array::uniform2(name().prop_map(|name| name.replace(':', ""))),
            buckets in proptest::array::uniform2(name()),
            resources in proptest::array::uniform2(name()),
        ) {
            let mut seen = std::collections::HashMap::new();
            for at in 0..2 {
                for (key, what) in all_keys(&spaces[at], &buckets[at], &resources[at]) {
                    let other = seen.entry(key).or_insert_with(|| what.clone());
                    prop_assert_eq!(&*other, &what);
                }
            }
        }

        /// A name can't move a key out of its slot, nor the keys of one resource apart.
        #[test]
        fn a_name_stays_in_its_braces(ns in name(), bucket in name()) {
            let escaped = |name: &str| {
                let mut bytes = Vec::new();
                escape(name, &mut bytes);
                bytes
            };
            let ResourceKeys { holders, by_wants, by_expiry, upstream } = ResourceKeys::new(&bucket);
            for key in [holders, by_wants, by_expiry, upstream] {
                prop_assert_eq!(tag(&key), escaped(&bucket));
            }
            let bounded = Keys::new(TOGETHER, &ns, &bucket);
            prop_assert_eq!(tag(&bounded.state), escaped(&ns));
            let register = bounded.register.unwrap();
            prop_assert_eq!(tag(&register), escaped(&ns));
        }

        #[test]
        fn different_names_have_different_keys(
            ns in "[a%{}]{1,3}", bucket in "[a:%{}]{1,4}",
            other_ns in "[a%{}]{1,3}", other_bucket in "[a:%{}]{1,4}",
        ) {
            prop_assume!((&ns, &bucket) != (&other_ns, &other_bucket));
            for kind in [SPREAD, TOGETHER] {
                let key = Keys::new(kind, &ns, &bucket);
                let other = Keys::new(kind, &other_ns, &other_bucket);
                prop_assert_ne!(&key.state, &other.state);
                prop_assert_ne!(twin(kind, &ns, &bucket), twin(kind, &other_ns, &other_bucket));
            }
        }

        #[test]
        fn one_slot_for_a_bounded_namespace(ns in "[a%{}]{1,4}", bucket in "[a:%{}]{1,4}") {
            let keys = Keys::new(TOGETHER, &ns, &bucket);
            let register = keys.register.unwrap();
            prop_assert_eq!(tag(&keys.state), tag(&register));
            // An unbounded one spreads by the whole name, braces or not.
            let spread = Keys::new(SPREAD, &ns, &bucket).state;
            prop_assert_eq!(tag(&spread), &spread[2..spread.len() - 1]);
        }
    }
}
