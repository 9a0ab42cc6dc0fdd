//! The key schema. No version and no node is in a key: nodes with different limits still
//! count the same bucket.
//!
//! | key | what | hash tag |
//! |---|---|---|
//! | `b{ns:bucket}` | the state of a configured or dynamic bucket | the whole name, so that they spread over all slots |
//! | `i{ns}` | the register of a namespace that bounds its dynamic buckets | the namespace |
//! | `d{ns}` | the namespace's default bucket | the namespace |
//! | `g` | the global default bucket | – |
//! | `p{ns:bucket}id` | the estimate that a permit of the bucket is for; its id follows the tag | the bucket's |
//! | `p{ns}id`, `P{g}id` | the same for default buckets | the bucket's |
//! | `B{ns:bucket}`, `D{ns}`, `G` | the same for buckets with fixed or sliding windows | as theirs |
//! | `L{ns:bucket}`, `M{ns}`, `N` | the same for buckets with a sliding log | as theirs |
//! | `C{ns:bucket}`, `E{ns}`, `F` | what was asked for of a bucket that may be banned | as the bucket's |
//! | `h{resource}` | a resource's leases by holder, and their sums | the resource |
//! | `w{resource}` | its holders by their wants | the resource |
//! | `e{resource}` | its holders by the expiry of their leases | the resource |
//! | `a{resource:domain}` | the hits of a domain on a resource | both names, so that they spread over all slots |
//! | `A{resource}domain` | the same if the hits of all domains are limited, too | the resource |
//! | `A{resource}` | then, the hits of all domains | the resource |
//! | `c{resource}` | the copies of a resource that are held, by session and domain | the resource |
//! | `s{resource}` | its sessions by their end, and the holds of each | the resource |
//! | `p{resource}` | with a parent: its lease, and the wants by priority | the resource |
//! | `x` | the layouts in which nodes store states, and until when states in other layouts may exist | – |
//! | `v` | versions of the limits, if the store owns them | – |
//! | `k` | the kill switch, until its end | – |
//! | `t` | with a parent: the node that renews leases | – |
//! | `l` | the resources with at least one lease | none, or the server's |
//! | `o` | the birth of the store: since when it has had its state | none, or the server's |
//! | `n` | the live nodes | none, or the server's |
//! | `q` | what each node last said of itself | none, or the server's |
//!
//! In a cluster each server has its own copy of the last four (`l{tag}`, …), with a tag that hashes
//! to the highest of its slots: one server may lose its memory while the others keep theirs, and
//! what is asked about its resources or nodes must not wait for another server.
//!
//! Different names have different keys, and no name can move a key to another slot: inside the
//! braces `%`, `{` and `}` are escaped as `%25`, `%7B` and `%7D`. Names in a register are escaped in the
//! same way. A namespace has no `:`. In `a{resource:domain}`, a `:` in the resource is escaped as `%3A`.
//!
//! Keys have no longer prefix, to save memory: give tollgate a Redis, or at least a database, of its
//! own.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use crate::domain::bucket::BucketKind;
use crate::store::BucketRequest;

/// The keys of which each server has its own copy.
#[derive(Clone, Debug)]
pub(crate) struct ServerKeys {
    /// The live nodes.
    pub(super) nodes: Box<str>,
    /// Their reports.
    pub(super) reports: Box<str>,
    /// The birth of the store.
    pub(super) birth: Box<str>,
    /// The resources with at least one lease.
    pub(super) resources: Box<str>,
    /// The birth as this node last saw it.
    pub(super) birth_seen: Arc<Birth>,
}

/// The birth of a server, in µs since the epoch, as this node knows it.
#[derive(Debug, Default)]
pub(super) struct Birth {
    /// The server's last answer; 0: none yet.
    last: AtomicI64,
    /// The birth under the server's former key, until the server has it under its new one; else 0.
    /// The key changes when the server gives away the slot of its tag.
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

    /// Records the server's answer.
    pub(super) fn told(&self, born: i64) {
        self.last.store(born, Ordering::Relaxed);
        self.inherited.store(0, Ordering::Relaxed);
    }
}

impl ServerKeys {
    /// `tag`: hashes to the server; empty without a cluster.
    pub(super) fn new(tag: &str, birth_seen: Birth) -> Self {
        let key = |letter: &str| match tag {
            "" => letter.into(),
            tag => format!("{letter}{{{tag}}}").into(),
        };
        Self {
            nodes: key("n"),
            reports: key("q"),
            birth: key("o"),
            resources: key("l"),
            birth_seen: birth_seen.into(),
        }
    }

    /// The keys of a server that has no slot yet: none.
    pub(super) fn none(birth_seen: Birth) -> Self {
        let none = Box::<str>::default;
        Self {
            nodes: none(),
            reports: none(),
            birth: none(),
            resources: none(),
            birth_seen: birth_seen.into(),
        }
    }
}

/// The layouts in which nodes store states.
pub(super) const LAYOUTS: &str = "x";

/// The versions of the limits.
pub(super) const VERSIONS: &str = "v";

/// The kill switch.
pub(super) const KILL_SWITCH: &str = "k";

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
        let key = |letter| tagged(letter, resource, None);
        Self { holders: key(b'h'), by_wants: key(b'w'), by_expiry: key(b'e'), upstream: key(b'p') }
    }
}

/// The keys of the holds on a resource. They exist together.
pub(super) struct HoldKeys {
    pub(super) holds: Vec<u8>,
    pub(super) index: Vec<u8>,
}

impl HoldKeys {
    pub(super) fn new(resource: &str) -> Self {
        Self { holds: tagged(b'c', resource, None), index: tagged(b's', resource, None) }
    }
}

/// The key of the state of a request's bucket.
pub(super) fn state(request: &BucketRequest<'_>) -> Vec<u8> {
    let BucketRequest { kind, namespace, name, .. } = *request;
    let letter = request.letter();
    match kind {
        BucketKind::GlobalDefault => vec![letter],
        BucketKind::NamespaceDefault => tagged(letter, namespace, None),
        BucketKind::Configured | BucketKind::Dynamic { .. } => {
            tagged(letter, namespace, Some(name))
        }
    }
}

/// The key of a permit of a request's bucket, in the slot of the bucket's state.
pub(super) fn permit(request: &BucketRequest<'_>, id: &str) -> Vec<u8> {
    let BucketRequest { kind, namespace, name, .. } = *request;
    let mut key = match kind {
        BucketKind::GlobalDefault => b"P{g}".to_vec(),
        BucketKind::NamespaceDefault => tagged(b'p', namespace, None),
        BucketKind::Configured | BucketKind::Dynamic { .. } => tagged(b'p', namespace, Some(name)),
    };
    key.extend(id.as_bytes());
    key
}

/// The key of the hits of a domain on a resource.
pub(super) fn history(resource: &str, domain: &str) -> Vec<u8> {
    let mut key = Vec::with_capacity(4 + resource.len() + domain.len());
    key.extend(b"a{");
    for (nth, part) in resource.split(':').enumerate() {
        if nth > 0 {
            key.extend(b"%3A");
        }
        escape(part, &mut key);
    }
    key.push(b':');
    escape(domain, &mut key);
    key.push(b'}');
    key
}

/// The key of the hits of a domain on a resource on which those of all domains are limited, too; for domain
/// `""` that of the hits of all domains.
pub(super) fn limited_history(resource: &str, domain: &str) -> Vec<u8> {
    let mut key = tagged(b'A', resource, None);
    key.extend(domain.as_bytes());
    key
}

/// The register of a namespace's dynamic buckets.
pub(super) fn register(namespace: &str) -> Vec<u8> {
    tagged(b'i', namespace, None)
}

/// A bucket's name as it is in the register of its namespace.
pub(super) fn registered_name(name: &str) -> Vec<u8> {
    let mut escaped = Vec::with_capacity(name.len());
    escape(name, &mut escaped);
    escaped
}

/// The key of the state of a bucket like that of a request, by its name in the register of the namespace.
pub(super) fn registered_state(request: &BucketRequest<'_>, registered_name: &[u8]) -> Vec<u8> {
    let mut key = state(&BucketRequest { name: "", ..*request });
    key.pop();
    [&key, registered_name, b"}"].concat()
}

fn tagged(letter: u8, namespace: &str, name: Option<&str>) -> Vec<u8> {
    let name_len = name.map_or(0, |name| name.len() + 1);
    let mut key = Vec::with_capacity(3 + namespace.len() + name_len);
    key.extend([letter, b'{']);
    escape(namespace, &mut key);
    if let Some(name) = name {
        key.push(b':');
        escape(name, &mut key);
    }
    key.push(b'}');
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
    use crate::domain::bucket::{BucketLimit, Terms};
    use crate::domain::window::{Window, WindowKind};
    use crate::store::TokenAction;

    const DYNAMIC: BucketKind = BucketKind::Dynamic { max_buckets: None };

    /// Those of a token bucket, of windows, of a log, and of a ban.
    fn terms() -> [Terms; 4] {
        let window = |kind| BucketLimit::of_window(1, Window { length_us: 1, kind }).terms();
        let tokens = BucketLimit::default().terms();
        let ban = WindowKind::Ban { lasting_us: 2, kept_us: 2 };
        [tokens, window(WindowKind::Sliding), window(WindowKind::Log), window(ban)]
    }

    fn request<'a>(
        kind: BucketKind,
        terms: &'a Terms,
        (namespace, name): (&'a str, &'a str),
    ) -> BucketRequest<'a> {
        BucketRequest {
            caller: None,
            namespace,
            name,
            kind,
            terms,
            max_idle_ms: None,
            tokens: 1,
            action: TokenAction::TakeAvailable,
            prefetch: None,
            rewrite: false.into(),
        }
    }

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
        let text = |key: Vec<u8>| String::from_utf8(key).unwrap();
        let [tokens, windows, log, ban] = terms();
        let names = ("ns", "a:b}");
        let key = |kind| text(state(&request(kind, &tokens, names)));
        assert_eq!(text(state(&request(DYNAMIC, &windows, names))), "B{ns:a:b%7D}");
        assert_eq!(text(state(&request(BucketKind::NamespaceDefault, &windows, names))), "D{ns}");
        assert_eq!(text(state(&request(BucketKind::GlobalDefault, &windows, names))), "G");
        assert_eq!(text(state(&request(DYNAMIC, &log, names))), "L{ns:a:b%7D}");
        assert_eq!(text(state(&request(BucketKind::NamespaceDefault, &log, names))), "M{ns}");
        assert_eq!(text(state(&request(BucketKind::GlobalDefault, &log, names))), "N");
        assert_eq!(text(state(&request(DYNAMIC, &ban, names))), "C{ns:a:b%7D}");
        assert_eq!(text(state(&request(BucketKind::NamespaceDefault, &ban, names))), "E{ns}");
        assert_eq!(text(state(&request(BucketKind::GlobalDefault, &ban, names))), "F");
        let registered = registered_state(&request(DYNAMIC, &windows, names), b"c%7D");
        assert_eq!(text(registered), "B{ns:c%7D}");
        assert_eq!(key(DYNAMIC), "b{ns:a:b%7D}");
        assert_eq!(key(BucketKind::Dynamic { max_buckets: Some(1) }), "b{ns:a:b%7D}");
        assert_eq!(key(BucketKind::Configured), "b{ns:a:b%7D}");
        assert_eq!(key(BucketKind::NamespaceDefault), "d{ns}");
        assert_eq!(key(BucketKind::GlobalDefault), "g");
        let permit = |kind| text(permit(&request(kind, &tokens, names), "0f"));
        assert_eq!(permit(DYNAMIC), "p{ns:a:b%7D}0f");
        assert_eq!(permit(BucketKind::NamespaceDefault), "p{ns}0f");
        assert_eq!(permit(BucketKind::GlobalDefault), "P{g}0f");
        assert_eq!(text(register("ns")), "i{ns}");
        assert_eq!(text(registered_name("a:b}")), "a:b%7D");
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
        let ResourceKeys { holders, by_wants, by_expiry, upstream } = ResourceKeys::new(resource);
        let [tokens, windows, log, ban] = terms();
        let key = |kind| state(&request(kind, &tokens, (namespace, bucket)));
        let of_windows = |kind| state(&request(kind, &windows, (namespace, bucket)));
        let of_log = |kind| state(&request(kind, &log, (namespace, bucket)));
        let of_ban = |kind| state(&request(kind, &ban, (namespace, bucket)));
        let mut all = vec![
            (key(DYNAMIC), format!("bucket {namespace:?} {bucket:?}")),
            (of_windows(DYNAMIC), format!("windows {namespace:?} {bucket:?}")),
            (of_windows(BucketKind::NamespaceDefault), format!("default windows {namespace:?}")),
            (of_windows(BucketKind::GlobalDefault), "global windows".to_owned()),
            (of_log(DYNAMIC), format!("log {namespace:?} {bucket:?}")),
            (of_log(BucketKind::NamespaceDefault), format!("default log {namespace:?}")),
            (of_log(BucketKind::GlobalDefault), "global log".to_owned()),
            (of_ban(DYNAMIC), format!("ban {namespace:?} {bucket:?}")),
            (of_ban(BucketKind::NamespaceDefault), format!("default ban {namespace:?}")),
            (of_ban(BucketKind::GlobalDefault), "global ban".to_owned()),
            (register(namespace), format!("register {namespace:?}")),
            (history(resource, bucket), format!("hits {resource:?} {bucket:?}")),
            (key(BucketKind::NamespaceDefault), format!("default {namespace:?}")),
            (key(BucketKind::GlobalDefault), "global".to_owned()),
        ];
        for (kind, what) in [
            (DYNAMIC, format!("permit {namespace:?} {bucket:?}")),
            (BucketKind::NamespaceDefault, format!("default permit {namespace:?}")),
            (BucketKind::GlobalDefault, "global permit".to_owned()),
        ] {
            all.push((permit(&request(kind, &tokens, (namespace, bucket)), "0f"), what));
        }
        let HoldKeys { holds, index } = HoldKeys::new(resource);
        let keys = [holders, by_wants, by_expiry, upstream, holds, index];
        for (letter, key) in ["h", "w", "e", "p", "c", "s"].iter().zip(keys) {
            all.push((key, format!("{letter} {resource:?}")));
        }
        for tag in ["", "a"] {
            let ServerKeys { nodes, reports, birth, resources, .. } =
                ServerKeys::new(tag, Birth::default());
            for key in [nodes, reports, birth, resources] {
                all.push((key.as_bytes().to_vec(), format!("server {key}")));
            }
        }
        for key in [LAYOUTS, RENEWAL, VERSIONS, KILL_SWITCH] {
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
            let HoldKeys { holds, index } = HoldKeys::new(&bucket);
            for key in [holders, by_wants, by_expiry, upstream, holds, index] {
                prop_assert_eq!(tag(&key), escaped(&bucket));
            }
            let register = register(&ns);
            prop_assert_eq!(tag(&register), escaped(&ns));
            let [tokens, ..] = terms();
            let of = |ns, bucket| request(DYNAMIC, &tokens, (ns, bucket));
            let key = state(&of(&ns, &bucket));
            prop_assert_eq!(tag(&key), &key[2..key.len() - 1]);
            let permit = permit(&of(&ns, &bucket), "0f");
            prop_assert_eq!(tag(&permit), tag(&key));
            // Register and name give the key again, here and in lua/allow.lua.
            let name = registered_name(&bucket);
            prop_assert_eq!(&registered_state(&of(&ns, ""), &name), &key);
            prop_assert_eq!(&key[register.len()..key.len() - 1], name);
        }

        #[test]
        fn different_names_have_different_keys(
            ns in "[a%{}]{1,3}", bucket in "[a:%{}]{1,4}",
            other_ns in "[a%{}]{1,3}", other_bucket in "[a:%{}]{1,4}",
        ) {
            prop_assume!((&ns, &bucket) != (&other_ns, &other_bucket));
            let [tokens, ..] = terms();
            let key = |ns, bucket| state(&request(DYNAMIC, &tokens, (ns, bucket)));
            prop_assert_ne!(key(&ns, &bucket), key(&other_ns, &other_bucket));
        }
    }
}
