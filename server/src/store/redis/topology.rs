//! Which server decides on which key: a snapshot, and how Redis Cluster tells it.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::LazyLock;

use redis::{ConnectionAddr, ConnectionInfo, Value};

/// The slots that a cluster divides its keys into.
pub const SLOTS: usize = 16384;

/// In the table of slots: nobody serves this one.
const NOBODY: u16 = u16::MAX;

/// The slot of a key: that of its hash tag, which is what is between the first `{` and the next
/// `}`, or of all of it where there is nothing.
pub fn slot(key: &[u8]) -> u16 {
    let tag = key.iter().position(|&byte| byte == b'{').and_then(|open| {
        let inner = &key[open + 1..];
        let close = inner.iter().position(|&byte| byte == b'}')?;
        (close > 0).then(|| &inner[..close])
    });
    crc16::State::<crc16::XMODEM>::calculate(tag.unwrap_or(key)) % SLOTS as u16
}

/// For each slot the smallest number whose decimal text hashes there.
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

/// A short text that hashes to a slot, which is less than [`SLOTS`].
pub fn tag(slot: u16) -> &'static str {
    &TAGS[usize::from(slot)]
}

/// A server that decides.
#[derive(Clone, Debug)]
pub struct Master {
    /// All that it takes to connect to it.
    pub info: ConnectionInfo,
    /// `host:port`, or the path of its socket; no two masters of a topology have the same.
    pub name: Box<str>,
    /// A text that hashes to the highest slot that it serves: a key with this hash tag lives
    /// there. Empty outside of a cluster, where keys need none.
    pub tag: &'static str,
}

impl Master {
    /// How to connect to the server at `address`, to which this one has sent somebody on (MOVED,
    /// ASK); `None`: it is no address.
    pub fn redirect(&self, address: &str) -> Option<ConnectionInfo> {
        let (told, port) = address.rsplit_once(':')?;
        let told = told.trim_start_matches('[').trim_end_matches(']');
        let host = if usable(told) { told } else { host(self.info.addr()) };
        Some(at(&self.info, host, port.parse().ok()?))
    }
}

/// The masters there are, and which slots each serves. Never changes; what follows it has
/// another version.
pub struct Topology {
    version: u64,
    masters: Vec<Master>,
    /// By slot the position of its master; `None`: the only master serves all of them.
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
    /// Of servers that nobody has asked yet.
    pub(super) fn unknown(cluster: bool) -> Self {
        let slots = cluster.then(|| vec![NOBODY; SLOTS].into());
        Self { version: 0, masters: Vec::new(), slots }
    }

    /// Of one server that has all keys.
    pub(super) fn single(info: ConnectionInfo) -> Self {
        let master = Master { name: name(info.addr()), info, tag: "" };
        Self { version: 0, masters: vec![master], slots: None }
    }

    /// Of a cluster, as the server at `asked` has told it. Its other servers are connected to
    /// as that one.
    pub(super) fn cluster(ranges: &[Range], asked: &ConnectionInfo) -> Self {
        // By name, so that it does not matter who was asked.
        let mut found: BTreeMap<Box<str>, (ConnectionInfo, u16)> = BTreeMap::new();
        for range in ranges {
            let info = at(asked, &range.host, range.port);
            let (_, highest) = found.entry(name(info.addr())).or_insert((info, range.last));
            *highest = range.last.max(*highest);
        }
        let mut slots = vec![NOBODY; SLOTS];
        let places: BTreeMap<Box<str>, u16> = found.keys().cloned().zip(0..).collect();
        for range in ranges {
            let place = places[&*name(at(asked, &range.host, range.port).addr())];
            slots[usize::from(range.first)..=usize::from(range.last)].fill(place);
        }
        let master = |(name, (info, highest))| Master { info, name, tag: tag(highest) };
        let masters = found.into_iter().map(master).collect();
        Self { version: 0, masters, slots: Some(slots.into()) }
    }

    pub(super) fn with_version(self, version: u64) -> Self {
        Self { version, ..self }
    }

    /// Whether both send every key to the same server.
    pub(super) fn same(&self, other: &Self) -> bool {
        let names = |topology: &Self| -> Vec<Box<str>> {
            topology.masters.iter().map(|master| master.name.clone()).collect()
        };
        names(self) == names(other) && self.slots == other.slots
    }

    /// Which of the versions that its [`Servers`](super::Servers) have published it is.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// Every master, by name. None: nobody has told yet who they are.
    pub fn masters(&self) -> &[Master] {
        &self.masters
    }

    /// It is a cluster: a call takes keys of one slot only.
    pub fn is_cluster(&self) -> bool {
        self.slots.is_some()
    }

    /// The position among the masters of the one that serves a slot; `None`: nobody does.
    /// Outside of a cluster the only master serves every slot.
    pub fn master_of(&self, slot: u16) -> Option<usize> {
        match &self.slots {
            Some(slots) => Some(slots[usize::from(slot)]).filter(|&place| place != NOBODY),
            None => (!self.masters.is_empty()).then_some(0),
        }
        .map(usize::from)
    }
}

/// What a server is called.
pub(super) fn name(address: &ConnectionAddr) -> Box<str> {
    address.to_string().into()
}

/// How to connect to a server at another address in the same way.
pub(super) fn at(info: &ConnectionInfo, host: &str, port: u16) -> ConnectionInfo {
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

/// The host of an address; empty where it is a socket.
pub(super) fn host(address: &ConnectionAddr) -> &str {
    match address {
        ConnectionAddr::Tcp(host, _) | ConnectionAddr::TcpTls { host, .. } => host,
        _ => "",
    }
}

/// Slots that follow one another, and the master that serves them.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Range {
    first: u16,
    last: u16,
    host: String,
    port: u16,
}

/// Reads the reply to `CLUSTER SLOTS` of the server at the host `asked`; `None`: it is none.
/// A master without a port, as those are that speak only TLS to who asks without, serves
/// nothing.
pub(super) fn ranges(reply: &Value, asked: &str) -> Option<Vec<Range>> {
    let Value::Array(entries) = reply else { return None };
    let mut ranges = Vec::with_capacity(entries.len());
    for entry in entries {
        // The master comes first; replicas follow.
        let Value::Array(entry) = entry else { return None };
        let [Value::Int(first), Value::Int(last), Value::Array(master), ..] = &entry[..] else {
            return None;
        };
        let [host, Value::Int(port), more @ ..] = &master[..] else { return None };
        let slot = |number: &i64| u16::try_from(*number).ok().filter(|&slot| slot < SLOTS as u16);
        let (first, last) = (slot(first)?, slot(last)?);
        let port = u16::try_from(*port).ok()?;
        if first > last {
            return None;
        }
        if port != 0 {
            let host = endpoint(host, more).unwrap_or_else(|| asked.to_owned());
            ranges.push(Range { first, last, host, port });
        }
    }
    Some(ranges)
}

/// The host to connect to, if a server tells. Where it is announced by a host name that it does
/// not have, the address is among the rest that is told of it: its id, and names with values.
fn endpoint(host: &Value, more: &[Value]) -> Option<String> {
    let host = match text(host)? {
        "?" => match more {
            [_, Value::Array(told), ..] => {
                let told = told.chunks_exact(2).find(|told| text(&told[0]) == Some("ip"))?;
                text(&told[1])?
            }
            _ => return None,
        },
        host => host,
    };
    usable(host).then(|| host.to_owned())
}

/// Somebody else can connect to a server by it.
fn usable(host: &str) -> bool {
    !matches!(host, "" | "?" | "0.0.0.0" | "::")
}

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
        // Nothing in the braces, or no end to them: all of it counts.
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
        let told = |names: &[&str]| Value::Array(names.iter().map(|name| bulk(name)).collect());
        for (host, more, expected) in [
            (bulk("10.0.0.1"), vec![bulk("id")], "10.0.0.1"),
            (
                bulk("redis-1.example"),
                vec![bulk("id"), told(&["ip", "10.0.0.1"])],
                "redis-1.example",
            ),
            (bulk("2001:db8::1"), vec![], "2001:db8::1"),
            (Value::Nil, vec![bulk("id")], "asked"),
            (Value::Nil, vec![bulk("id"), told(&["ip", "10.0.0.1"])], "asked"),
            (bulk(""), vec![], "asked"),
            (bulk("0.0.0.0"), vec![], "asked"),
            (bulk("::"), vec![], "asked"),
            (bulk("?"), vec![bulk("id")], "asked"),
            (bulk("?"), vec![bulk("id"), told(&[])], "asked"),
            (bulk("?"), vec![bulk("id"), told(&["x", "y", "ip", "10.0.0.2"])], "10.0.0.2"),
            (bulk("?"), vec![bulk("id"), told(&["ip", ""])], "asked"),
        ] {
            let master = [vec![host.clone(), Value::Int(7000)], more.clone()].concat();
            let found = ranges(&Value::Array(vec![entry(0, 5, master)]), "asked").unwrap();
            let expected = Range { first: 0, last: 5, host: expected.to_owned(), port: 7000 };
            assert_eq!(found, [expected], "{host:?} {more:?}");
        }
    }

    #[test]
    fn what_is_no_reply_is_refused() {
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
        // Nobody can connect to port 0.
        assert_eq!(ranges(&Value::Array(vec![entry(0, 1, master(0))]), "a"), Some(vec![]));
    }

    fn range(first: u16, last: u16, host: &str, port: u16) -> Range {
        Range { first, last, host: host.to_owned(), port }
    }

    fn info(url: &str) -> ConnectionInfo {
        url.into_connection_info().unwrap()
    }

    #[test]
    fn a_cluster_with_a_hole() {
        let asked = info("rediss://user:pass@seed:1");
        let ranges = [
            range(9000, 9999, "b", 2),
            range(0, 4999, "b", 1),
            range(10001, 16383, "a", 1),
            range(5000, 8999, "a", 1),
        ];
        let topology = Topology::cluster(&ranges, &asked);
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

        // Whoever is asked, in whatever order it tells.
        let mut turned = ranges;
        turned.reverse();
        assert!(topology.same(&Topology::cluster(&turned, &info("rediss://other:2"))));
        turned[0].last -= 1;
        assert!(!topology.same(&Topology::cluster(&turned, &asked)));
        turned[0].last += 1;
        turned[0].host = "c".to_owned();
        assert!(!topology.same(&Topology::cluster(&turned, &asked)));
    }

    #[test]
    fn where_a_server_sends_on_to() {
        let master = |url| Topology::single(info(url)).masters()[0].clone();
        for (from, address, expected) in [
            ("redis://a:1", "10.0.0.1:7000", Some("10.0.0.1:7000")),
            ("redis://a:1", "b.example:7000", Some("b.example:7000")),
            ("redis://a:1", "::1:7000", Some("::1:7000")),
            ("redis://a:1", "[::1]:7000", Some("::1:7000")),
            ("redis://a:1", ":7000", Some("a:7000")),
            ("redis://a:1", "?:7000", Some("a:7000")),
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
