//! The topology of the store: which server has which key. Reads it from the replies of Redis
//! Cluster.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::LazyLock;

use redis::{ConnectionAddr, ConnectionInfo, Value};

/// The number of hash slots of a cluster.
pub const SLOTS: usize = 16384;

/// The entry of a slot that no master serves, in the table of slots.
const UNSERVED: u16 = u16::MAX;

/// The hash slot of a key. The hash covers the key's hash tag: the text between the first `{` and
/// the next `}`. If there is no such text, or it is empty, the hash covers the whole key.
pub fn slot(key: &[u8]) -> u16 {
    let tag = key.iter().position(|&byte| byte == b'{').and_then(|open| {
        let inner = &key[open + 1..];
        let close = inner.iter().position(|&byte| byte == b'}')?;
        (close > 0).then(|| &inner[..close])
    });
    crc16::State::<crc16::XMODEM>::calculate(tag.unwrap_or(key)) % SLOTS as u16
}

/// For each slot, the smallest number whose decimal text hashes to it.
static TAGS: LazyLock<Vec<Box<str>>> = LazyLock::new(|| {
    let mut tags = vec![Box::default(); SLOTS];
    let mut missing = SLOTS;
    for text in (0_u64..).map(|number| number.to_string()) {
        let tag: &mut Box<str> = &mut tags[usize::from(slot(text.as_bytes()))];
        if tag.is_empty() {
            *tag = text.into_boxed_str();
            missing -= 1;
        }
        if missing == 0 {
            break;
        }
    }
    tags
});

/// A short text that hashes to `slot`. Panics unless `slot` is less than [`SLOTS`].
pub fn tag(slot: u16) -> &'static str {
    &TAGS[usize::from(slot)]
}

/// A master: the server that has the keys of some slots, or of all.
#[derive(Clone, Debug)]
pub struct Master {
    /// Its address, and the settings of connections to it.
    pub info: ConnectionInfo,
    /// `host:port`, or the path of its socket. Unique within a topology.
    pub name: Box<str>,
    /// A text that hashes to the highest slot of this master: keys with this hash tag are stored
    /// on it. Empty without a cluster.
    pub tag: &'static str,
}

impl Master {
    /// The server at `address`, to which this master has redirected a request (MOVED or ASK), with
    /// this master's connection settings. Without a host, the host is that of this master, as Redis
    /// specifies. `None` if the text is no address, or the host is unknown (`?`).
    pub fn redirect(&self, address: &str) -> Option<ConnectionInfo> {
        let (named, port) = address.rsplit_once(':')?;
        let named = named.trim_start_matches('[').trim_end_matches(']');
        let host = match named {
            "?" => return None,
            named if is_usable(named) => named,
            _ => host(self.info.addr()),
        };
        Some(at(&self.info, host, port.parse().ok()?))
    }
}

/// The masters of a store, and the slots that each serves. Immutable: each change makes a topology
/// with a new version.
pub struct Topology {
    version: u64,
    /// Ordered by name.
    masters: Vec<Master>,
    /// For each slot, the position of its master; `None` without a cluster.
    slots: Option<Box<[u16]>>,
}

impl fmt::Debug for Topology {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let masters: Vec<&str> = self.masters.iter().map(|master| &*master.name).collect();
        f.debug_struct("Topology")
            .field("version", &self.version)
            .field("masters", &masters)
            .finish_non_exhaustive()
    }
}

impl Topology {
    /// The topology before the first answer of a server. It has no masters.
    pub(crate) fn unknown(is_cluster: bool) -> Self {
        let slots = is_cluster.then(|| vec![UNSERVED; SLOTS].into());
        Self { version: 0, masters: Vec::new(), slots }
    }

    /// The topology of one server that has all keys.
    pub(crate) fn single(info: ConnectionInfo) -> Self {
        let master = Master { name: name(info.addr()), info, tag: "" };
        Self { version: 0, masters: vec![master], slots: None }
    }

    /// The topology of a cluster, with the slot ranges that the server `source` has reported. The
    /// masters get the connection settings of `source`.
    pub(crate) fn cluster(ranges: &[Range], source: &ConnectionInfo) -> Self {
        // Ordered by name, so that the order does not depend on the server that was asked.
        let mut found: BTreeMap<Box<str>, (ConnectionInfo, u16)> = BTreeMap::new();
        for range in ranges {
            let info = at(source, &range.host, range.port);
            let (_, highest) = found.entry(name(info.addr())).or_insert((info, range.last));
            *highest = range.last.max(*highest);
        }
        let mut slots = vec![UNSERVED; SLOTS];
        let places: BTreeMap<Box<str>, u16> = found.keys().cloned().zip(0..).collect();
        for range in ranges {
            let place = places[&*name(at(source, &range.host, range.port).addr())];
            slots[usize::from(range.first)..=usize::from(range.last)].fill(place);
        }
        let master = |(name, (info, highest))| Master { info, name, tag: tag(highest) };
        let masters = found.into_iter().map(master).collect();
        Self { version: 0, masters, slots: Some(slots.into()) }
    }

    pub(crate) fn with_version(self, version: u64) -> Self {
        Self { version, ..self }
    }

    /// Whether both have the same masters, with the same slots.
    pub(crate) fn same(&self, other: &Self) -> bool {
        let names = |topology: &Self| -> Vec<Box<str>> {
            topology.masters.iter().map(|master| master.name.clone()).collect()
        };
        names(self) == names(other) && self.slots == other.slots
    }

    /// The version, which [`Servers`](super::servers::Servers) increases with each change.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// All masters, ordered by name. Empty until a server has named them.
    pub fn masters(&self) -> &[Master] {
        &self.masters
    }

    /// Whether the store is a cluster. There, all keys of a call must be in one slot.
    pub fn is_cluster(&self) -> bool {
        self.slots.is_some()
    }

    /// The position in [`masters`](Self::masters) of the master that serves `slot`; `None` if none
    /// does. Without a cluster, the only master serves every slot.
    pub fn master_of(&self, slot: u16) -> Option<usize> {
        match &self.slots {
            Some(slots) => Some(slots[usize::from(slot)]).filter(|&place| place != UNSERVED),
            None => (!self.masters.is_empty()).then_some(0),
        }
        .map(usize::from)
    }
}

/// The name of the server at an address: `host:port`, or the path of its socket.
pub(crate) fn name(address: &ConnectionAddr) -> Box<str> {
    address.to_string().into()
}

/// A server at another host and port, with the connection settings of `info`.
pub(crate) fn at(info: &ConnectionInfo, host: &str, port: u16) -> ConnectionInfo {
    let host = host.to_owned();
    let addr = match info.addr() {
        ConnectionAddr::TcpTls { insecure, tls_params, .. } => ConnectionAddr::TcpTls {
            host,
            port,
            insecure: *insecure,
            tls_params: tls_params.clone(),
        },
        _ => ConnectionAddr::Tcp(host, port),
    };
    info.clone().set_addr(addr)
}

/// The host of an address; empty for a socket.
pub(crate) fn host(address: &ConnectionAddr) -> &str {
    match address {
        ConnectionAddr::Tcp(host, _) | ConnectionAddr::TcpTls { host, .. } => host,
        _ => "",
    }
}

/// A range of consecutive slots, and the address of the master that serves them.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Range {
    first: u16,
    /// Inclusive.
    last: u16,
    host: String,
    port: u16,
}

/// Reads the reply to `CLUSTER SLOTS` of the server at the host `source`, which is used for masters
/// without a usable host. `None` if the reply has another form.
///
/// Skips masters with port 0: a master that only supports TLS has that port in replies on
/// connections without TLS.
pub(crate) fn ranges(reply: &Value, source: &str) -> Option<Vec<Range>> {
    let Value::Array(entries) = reply else { return None };
    let mut ranges = Vec::with_capacity(entries.len());
    for entry in entries {
        // The master comes first; replicas follow.
        let Value::Array(entry) = entry else { return None };
        let [Value::Int(first), Value::Int(last), Value::Array(master), ..] = &entry[..] else {
            return None;
        };
        let [host, Value::Int(port), rest @ ..] = &master[..] else { return None };
        let slot = |number: &i64| u16::try_from(*number).ok().filter(|&slot| slot < SLOTS as u16);
        let (first, last) = (slot(first)?, slot(last)?);
        let port = u16::try_from(*port).ok()?;
        if first > last {
            return None;
        }
        if port != 0 {
            let host = endpoint(host, rest).unwrap_or_else(|| source.to_owned());
            ranges.push(Range { first, last, host, port });
        }
    }
    Some(ranges)
}

/// The host of a master; `None` if the entry has no usable one. `rest` is the remainder of the
/// entry: the master's id, and metadata as alternating names and values. The host is `?` if the
/// cluster announces host names, but the master has none. The metadata then has its `ip`.
fn endpoint(host: &Value, rest: &[Value]) -> Option<String> {
    let host = match text(host)? {
        "?" => match rest {
            [_, Value::Array(metadata), ..] => {
                let ip = metadata.chunks_exact(2).find(|pair| text(&pair[0]) == Some("ip"))?;
                text(&ip[1])?
            }
            _ => return None,
        },
        host => host,
    };
    is_usable(host).then(|| host.to_owned())
}

/// Whether other machines can connect to this host: not if it is unknown or a wildcard address.
fn is_usable(host: &str) -> bool {
    !matches!(host, "" | "?" | "0.0.0.0" | "::")
}

/// The text of a string reply; `None` for other replies.
fn text(value: &Value) -> Option<&str> {
    match value {
        Value::BulkString(bytes) => std::str::from_utf8(bytes).ok(),
        Value::SimpleString(text) => Some(text),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use redis::IntoConnectionInfo;

    use super::*;

    #[test]
    fn slots_of_known_keys() {
        // The check value of CRC16/XMODEM, and keys from the specification of Redis Cluster.
        assert_eq!(crc16::State::<crc16::XMODEM>::calculate(b"123456789"), 0x31C3);
        for (key, expected) in [
            ("", 0),
            ("123456789", 0x31C3),
            ("foo", 12182),
            ("bar", 5061),
            ("{foo}", 12182),
            ("b{foo}bar", 12182),
            ("{foo}{bar}", 12182),
            ("x}{foo}", 12182),
            ("{user1000}.following", 3443),
        ] {
            assert_eq!(slot(key.as_bytes()), expected, "{key}");
        }
        // Empty braces, or no closing brace: the whole key is hashed.
        for key in ["foo{}{bar}", "foo{bar", "{}"] {
            assert_eq!(
                slot(key.as_bytes()),
                crc16::State::<crc16::XMODEM>::calculate(key.as_bytes()) % 16384
            );
        }
        assert_eq!(slot(b"foo{{bar}}zap"), slot(b"{bar"));
    }

    #[test]
    fn every_slot_has_a_tag() {
        for number in 0..SLOTS as u16 {
            let tag = tag(number);
            assert_eq!(slot(format!("o{{{tag}}}").as_bytes()), number, "{tag}");
            assert!(tag.len() <= 6 && tag.parse::<u32>().is_ok(), "{tag}");
        }
    }

    fn bulk(text: &str) -> Value {
        Value::BulkString(text.into())
    }

    fn entry(first: i64, last: i64, master: Vec<Value>) -> Value {
        let replica = Value::Array(vec![bulk("replica"), Value::Int(1), bulk("id")]);
        Value::Array(vec![Value::Int(first), Value::Int(last), Value::Array(master), replica])
    }

    #[test]
    fn hosts_of_masters() {
        let metadata = |texts: &[&str]| Value::Array(texts.iter().map(|text| bulk(text)).collect());
        for (host, rest, expected) in [
            (bulk("10.0.0.1"), vec![bulk("id")], "10.0.0.1"),
            (
                bulk("redis-1.example"),
                vec![bulk("id"), metadata(&["ip", "10.0.0.1"])],
                "redis-1.example",
            ),
            (bulk("2001:db8::1"), vec![], "2001:db8::1"),
            (Value::Nil, vec![bulk("id")], "source"),
            (Value::Nil, vec![bulk("id"), metadata(&["ip", "10.0.0.1"])], "source"),
            (bulk(""), vec![], "source"),
            (bulk("0.0.0.0"), vec![], "source"),
            (bulk("::"), vec![], "source"),
            (bulk("?"), vec![bulk("id")], "source"),
            (bulk("?"), vec![bulk("id"), metadata(&[])], "source"),
            (bulk("?"), vec![bulk("id"), metadata(&["x", "y", "ip", "10.0.0.2"])], "10.0.0.2"),
            (bulk("?"), vec![bulk("id"), metadata(&["ip", ""])], "source"),
        ] {
            let master = [vec![host.clone(), Value::Int(7000)], rest.clone()].concat();
            let found = ranges(&Value::Array(vec![entry(0, 5, master)]), "source").unwrap();
            let expected = Range { first: 0, last: 5, host: expected.to_owned(), port: 7000 };
            assert_eq!(found, [expected], "{host:?} {rest:?}");
        }
    }

    #[test]
    fn malformed_replies_are_rejected() {
        let master = |port| vec![bulk("h"), Value::Int(port)];
        for entries in [
            vec![Value::Nil],
            vec![Value::Array(vec![])],
            vec![Value::Array(vec![Value::Int(0), Value::Int(1)])],
            vec![entry(0, 16384, master(1))],
            vec![entry(-1, 1, master(1))],
            vec![entry(2, 1, master(1))],
            vec![entry(0, 1, master(65536))],
            vec![entry(0, 1, vec![bulk("h")])],
            vec![entry(0, 1, master(1)), bulk("x")],
        ] {
            assert_eq!(ranges(&Value::Array(entries.clone()), "a"), None, "{entries:?}");
        }
        assert_eq!(ranges(&bulk("x"), "a"), None);
        assert_eq!(ranges(&Value::Array(vec![]), "a"), Some(vec![]));
        // No server listens on port 0.
        assert_eq!(ranges(&Value::Array(vec![entry(0, 1, master(0))]), "a"), Some(vec![]));
    }

    fn range(first: u16, last: u16, host: &str, port: u16) -> Range {
        Range { first, last, host: host.to_owned(), port }
    }

    fn info(url: &str) -> ConnectionInfo {
        url.into_connection_info().unwrap()
    }

    #[test]
    fn a_cluster_with_an_unserved_slot() {
        let source = info("rediss://user:pass@seed:1");
        let ranges = [
            range(9000, 9999, "b", 2),
            range(0, 4999, "b", 1),
            range(10001, 16383, "a", 1),
            range(5000, 8999, "a", 1),
        ];
        let topology = Topology::cluster(&ranges, &source);
        let shown = |master: &Master| format!("{} {}", master.name, slot(master.tag.as_bytes()));
        let masters: Vec<String> = topology.masters().iter().map(shown).collect();
        assert_eq!(masters, ["a:1 16383", "b:1 4999", "b:2 9999"]);
        for (slot, expected) in [
            (0, Some(1)),
            (4999, Some(1)),
            (5000, Some(0)),
            (8999, Some(0)),
            (9000, Some(2)),
            (9999, Some(2)),
            (10000, None),
            (10001, Some(0)),
            (16383, Some(0)),
        ] {
            assert_eq!(topology.master_of(slot), expected, "{slot}");
        }
        assert!(topology.is_cluster());
        for master in topology.masters() {
            assert!(matches!(master.info.addr(), ConnectionAddr::TcpTls { .. }));
            let settings = master.info.redis_settings();
            assert_eq!((settings.username(), settings.password()), (Some("user"), Some("pass")));
        }

        // The topology does not depend on the server that was asked, or on the order of the ranges.
        let mut reversed = ranges;
        reversed.reverse();
        assert!(topology.same(&Topology::cluster(&reversed, &info("rediss://other:2"))));
        reversed[0].last -= 1;
        assert!(!topology.same(&Topology::cluster(&reversed, &source)));
        reversed[0].last += 1;
        reversed[0].host = "c".to_owned();
        assert!(!topology.same(&Topology::cluster(&reversed, &source)));
    }

    #[test]
    fn addresses_of_redirects() {
        let master = |url| Topology::single(info(url)).masters()[0].clone();
        for (from, address, expected) in [
            ("redis://a:1", "10.0.0.1:7000", Some("10.0.0.1:7000")),
            ("redis://a:1", "b.example:7000", Some("b.example:7000")),
            ("redis://a:1", "::1:7000", Some("::1:7000")),
            ("redis://a:1", "[::1]:7000", Some("::1:7000")),
            ("redis://a:1", ":7000", Some("a:7000")),
            ("redis://a:1", "?:7000", None),
            ("redis://a:1", "b", None),
            ("redis://a:1", "b:", None),
            ("redis://a:1", "b:65536", None),
        ] {
            let found = master(from).redirect(address).map(|info| info.addr().to_string());
            assert_eq!(found.as_deref(), expected, "{address}");
        }
        let secured = master("rediss://u:p@a:1").redirect(":2").unwrap();
        assert!(matches!(secured.addr(), ConnectionAddr::TcpTls { .. }));
        assert_eq!(secured.redis_settings().password(), Some("p"));
    }

    #[test]
    fn one_server_has_every_slot() {
        let topology = Topology::single(info("redis://[::1]:7/2"));
        let [master] = topology.masters() else { panic!("{topology:?}") };
        assert_eq!((master.tag, &*master.name), ("", "::1:7"));
        assert_eq!((topology.master_of(0), topology.master_of(16383)), (Some(0), Some(0)));
        assert!(!topology.is_cluster());
        for unknown in [Topology::unknown(true), Topology::unknown(false)] {
            assert_eq!((unknown.master_of(7), unknown.masters().len()), (None, 0));
        }
    }
}
