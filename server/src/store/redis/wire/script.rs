//! The scripts, and the commands that call them; short commands of other modules; the decoding of
//! replies that no other module decodes.

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use redis::{Arg, Cmd, Script, ToRedisArgs, Value};

use crate::domain::time::Micros;
use crate::store::members::Member;
use crate::store::redis::keys::{self, ServerKeys};

/// A script as Redis gets it: with `lua/guard.lua` around it. The lines of the file keep their numbers.
macro_rules! guarded {
    ($file:literal) => {
        concat!(
            "local function run(...) ",
            include_str!(concat!("../../../../../lua/", $file)),
            "\nend\n",
            include_str!("../../../../../lua/guard.lua"),
            "return guarded()\n"
        )
    };
}

/// A script that `lua/parts.lua` calls for each part of a call.
macro_rules! in_parts {
    ($($file:literal),+) => {
        concat!(
            $(include_str!(concat!("../../../../../lua/", $file)),)+
            include_str!("../../../../../lua/guard.lua"),
            include_str!("../../../../../lua/parts.lua")
        )
    };
}

const HEARTBEAT_TEXT: &str = guarded!("heartbeat.lua");
const MEMBERS_TEXT: &str = guarded!("members.lua");
const LAYOUTS_TEXT: &str = guarded!("layouts.lua");
const VERSIONS_TEXT: &str = guarded!("versions.lua");
const RENEWAL_TEXT: &str = guarded!("renewal.lua");

/// Its lines come after those of `lua/log.lua` and `lua/window.lua`.
const ALLOW_TEXT: &str = concat!(
    include_str!("../../../../../lua/log.lua"),
    include_str!("../../../../../lua/window.lua"),
    include_str!("../../../../../lua/allow.lua")
);
const REGISTER_TEXT: &str = include_str!("../../../../../lua/register.lua");
const LOOK_TEXT: &str = include_str!("../../../../../lua/look.lua");
const LEASE_TEXT: &str = guarded!("lease.lua");
const PARENT_TEXT: &str = guarded!("parent.lua");
const THROTTLE_TEXT: &str = in_parts!("log.lua", "throttle.lua");
const HOLDS_TEXT: &str = in_parts!("holds.lua");

static HEARTBEAT: LazyLock<Script> = LazyLock::new(|| Script::new(HEARTBEAT_TEXT));
static ALLOW: LazyLock<Script> = LazyLock::new(|| Script::new(ALLOW_TEXT));
static REGISTER: LazyLock<Script> = LazyLock::new(|| Script::new(REGISTER_TEXT));
static LOOK: LazyLock<Script> = LazyLock::new(|| Script::new(LOOK_TEXT));
static LEASE: LazyLock<Script> = LazyLock::new(|| Script::new(LEASE_TEXT));
static PARENT: LazyLock<Script> = LazyLock::new(|| Script::new(PARENT_TEXT));
static THROTTLE: LazyLock<Script> = LazyLock::new(|| Script::new(THROTTLE_TEXT));
static HOLDS: LazyLock<Script> = LazyLock::new(|| Script::new(HOLDS_TEXT));

/// The longest time for which states in a layout may exist, in µs: some 60 years.
const LONGEST_LEFT_US: f64 = 2e15;

/// A script that is called by its hash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scripted {
    /// `lua/allow.lua`
    Allow,
    /// `lua/register.lua`
    Register,
    /// `lua/look.lua`
    Look,
    /// `lua/lease.lua`
    Lease,
    /// `lua/parent.lua`
    Parent,
    /// `lua/throttle.lua`
    Throttle,
    /// `lua/holds.lua`
    Holds,
    /// `lua/heartbeat.lua`
    Heartbeat,
}

impl Scripted {
    pub(crate) const ALL: [Self; 8] = [
        Self::Allow,
        Self::Register,
        Self::Look,
        Self::Lease,
        Self::Parent,
        Self::Throttle,
        Self::Holds,
        Self::Heartbeat,
    ];

    fn hash(self) -> &'static str {
        match self {
            Self::Allow => ALLOW.get_hash(),
            Self::Register => REGISTER.get_hash(),
            Self::Look => LOOK.get_hash(),
            Self::Lease => LEASE.get_hash(),
            Self::Parent => PARENT.get_hash(),
            Self::Throttle => THROTTLE.get_hash(),
            Self::Holds => HOLDS.get_hash(),
            Self::Heartbeat => HEARTBEAT.get_hash(),
        }
    }

    fn text(self) -> &'static str {
        match self {
            Self::Allow => ALLOW_TEXT,
            Self::Register => REGISTER_TEXT,
            Self::Look => LOOK_TEXT,
            Self::Lease => LEASE_TEXT,
            Self::Parent => PARENT_TEXT,
            Self::Throttle => THROTTLE_TEXT,
            Self::Holds => HOLDS_TEXT,
            Self::Heartbeat => HEARTBEAT_TEXT,
        }
    }

    /// Whether the script has `lua/guard.lua`.
    pub(crate) fn is_guarded(self) -> bool {
        !matches!(self, Self::Allow | Self::Register | Self::Look)
    }

    /// A call, up to the number of keys.
    pub(crate) fn call(self, keys: usize) -> Cmd {
        let mut cmd = redis::cmd("EVALSHA");
        cmd.arg(self.hash()).arg(keys);
        cmd
    }

    /// A [`call`](Self::call) with the script's text instead of its hash, for a server that may not
    /// have the script.
    pub(crate) fn with_text(self, call: &Cmd) -> Cmd {
        let mut cmd = redis::cmd("EVAL");
        cmd.arg(self.text());
        for arg in call.args_iter().skip(2) {
            if let Arg::Simple(bytes) = arg {
                cmd.arg(bytes);
            }
        }
        cmd
    }

    /// Loads the script, so that EVALSHA finds it.
    pub(crate) fn load(self) -> Cmd {
        let mut cmd = redis::cmd("SCRIPT");
        cmd.arg("LOAD").arg(self.text());
        cmd
    }
}

/// Reads the `count` names in a register with the lowest scores.
pub(crate) fn lowest_scores(register: &[u8], count: usize) -> Cmd {
    let mut cmd = redis::cmd("ZRANGE");
    cmd.arg(register).arg(0).arg(count - 1).arg("WITHSCORES");
    cmd
}

/// The reply to [`lowest_scores`]: names, each with its score as text. `None` for any other reply;
/// nil, the reply of a key of another type, has no names.
pub(crate) fn scored_names(reply: Value) -> Option<Vec<(Vec<u8>, Vec<u8>)>> {
    let parts = match reply {
        Value::Array(parts) => parts,
        Value::Nil => return Some(Vec::new()),
        _ => return None,
    };
    let text = |part| match part {
        Value::BulkString(text) => Some(text),
        _ => None,
    };
    let mut texts = parts.into_iter().map(text);
    let mut names = Vec::new();
    while let Some(name) = texts.next() {
        names.push((name?, texts.next()??));
    }
    Some(names)
}

/// Reads how many names a register has.
pub(crate) fn names_in(register: &[u8]) -> Cmd {
    let mut cmd = redis::cmd("ZCARD");
    cmd.arg(register);
    cmd
}

/// Reads the score of a name in a register: nil without one.
pub(crate) fn score(register: &[u8], registered_name: &[u8]) -> Cmd {
    let mut cmd = redis::cmd("ZSCORE");
    cmd.arg(register).arg(registered_name);
    cmd
}

/// Looks at the state under a key.
pub(crate) fn look(key: &[u8]) -> Cmd {
    let mut cmd = Scripted::Look.call(1);
    cmd.arg(key).arg(0);
    cmd
}

/// Looks at the state under a key, and removes it.
pub(crate) fn fill(key: &[u8]) -> Cmd {
    let mut cmd = Scripted::Look.call(1);
    cmd.arg(key).arg(1);
    cmd
}

/// The reply of `lua/look.lua`: a state, when it expires in ms, and the time. `None` if the script
/// can't have made the reply.
pub(crate) fn read_look_reply(reply: &Value) -> Option<(&[u8], i64, Micros)> {
    let Value::Array(parts) = reply else { return None };
    let [
        Value::BulkString(state),
        Value::Int(expires_ms),
        Value::BulkString(s),
        Value::BulkString(us),
    ] = parts.as_slice()
    else {
        return None;
    };
    let number = |text: &[u8]| std::str::from_utf8(text).ok()?.parse::<i64>().ok();
    let now_us = number(s)?.checked_mul(1_000_000)?.checked_add(number(us)?)?;
    Some((state, *expires_ms, Micros(now_us)))
}

/// Reads when a key expires, in ms: -1 if never, -2 if it does not exist.
pub(crate) fn expiry(key: &[u8]) -> Cmd {
    let mut cmd = redis::cmd("PEXPIRETIME");
    cmd.arg(key);
    cmd
}

/// Lets a key expire after `time`.
pub(crate) fn expire(key: &[u8], time: Duration) -> Cmd {
    let mut cmd = redis::cmd("EXPIRE");
    cmd.arg(key).arg(time.as_secs());
    cmd
}

/// Reads the first bytes of a value, `max` at most.
pub(crate) fn start_of(key: &str, max: usize) -> Cmd {
    let mut cmd = redis::cmd("GETRANGE");
    cmd.arg(key).arg(0).arg(max - 1);
    cmd
}

/// Reads in how many ms a key expires: -1 never, -2 there is no such key.
pub(crate) fn time_left(key: &str) -> Cmd {
    let mut cmd = redis::cmd("PTTL");
    cmd.arg(key);
    cmd
}

/// Sets a value that expires after `length`.
pub(crate) fn set_for(key: impl ToRedisArgs, value: &[u8], length: Duration) -> Cmd {
    let mut cmd = redis::cmd("SET");
    cmd.arg(key).arg(value).arg("PX").arg(length.as_millis() as u64);
    cmd
}

/// Empties a value, and replies with what it was: nil without the key. Its expiry stays.
pub(crate) fn empty_and_get(key: &[u8]) -> Cmd {
    let mut cmd = redis::cmd("SET");
    cmd.arg(key).arg("").arg("XX").arg("KEEPTTL").arg("GET");
    cmd
}

/// Deletes a key.
pub(crate) fn delete(key: &str) -> Cmd {
    let mut cmd = redis::cmd("DEL");
    cmd.arg(key);
    cmd
}

/// What a heartbeat says of its node.
#[derive(Clone, Debug)]
pub(crate) struct Announcement {
    /// The name under which the node registers.
    pub(crate) name: Arc<str>,
    /// When the registration expires; 0 deregisters the node.
    pub(crate) ttl: Duration,
    /// What the node says of itself; empty: nothing yet, or too much.
    pub(crate) report: Arc<String>,
}

/// Registers or deregisters a node.
pub(crate) fn heartbeat(keys: &ServerKeys, node: &Announcement) -> Cmd {
    let mut cmd = Scripted::Heartbeat.call(1);
    cmd.arg(&*keys.nodes);
    cmd.arg(&*node.name).arg(node.ttl.as_micros() as u64);
    cmd.arg(&*keys.birth).arg(keys.birth_seen.inherited()).arg(&*keys.resources);
    cmd.arg(&*keys.reports).arg(&**node.report);
    cmd
}

/// Lists up to `most` live nodes, and as many dead ones.
pub(crate) fn members(keys: &ServerKeys, most: usize) -> Cmd {
    let mut cmd = redis::cmd("EVAL");
    cmd.arg(MEMBERS_TEXT).arg(1).arg(&*keys.nodes).arg(&*keys.reports).arg(most);
    cmd
}

/// The reply to [`members`]. A node counts as alive for `ttl` after a heartbeat. `None` if the script can't
/// have made the reply. Leaves out names that are no text, which no node has.
pub(crate) fn read_members_reply(reply: &Value, ttl: Duration) -> Option<Vec<Member>> {
    let Value::Array(parts) = reply else { return None };
    let (nodes, []) = parts.as_chunks::<3>() else { return None };
    let mut members = Vec::with_capacity(nodes.len());
    for node in nodes {
        let [Value::BulkString(name), Value::BulkString(silent_us), Value::BulkString(report)] =
            node
        else {
            return None;
        };
        let silent = Duration::from_micros(std::str::from_utf8(silent_us).ok()?.parse().ok()?);
        let Ok(name) = String::from_utf8(name.clone()) else { continue };
        let report = String::from_utf8_lossy(report).into_owned();
        members.push(Member { name, silent, is_live: silent < ttl, report });
    }
    Some(members)
}

/// Reads the number of the current version of the limits, and what is known of the version `asked`.
pub(crate) fn current_version(asked: u64) -> Cmd {
    let mut cmd = redis::cmd("HMGET");
    cmd.arg(keys::VERSIONS).arg("n").arg(format!("a{asked}"));
    cmd
}

/// Reads what is known of a version of the limits, and its text.
pub(crate) fn version(number: u64) -> Cmd {
    let mut cmd = redis::cmd("HMGET");
    cmd.arg(keys::VERSIONS).arg(format!("a{number}")).arg(format!("t{number}"));
    cmd
}

/// Reads what is known of some versions of the limits.
pub(crate) fn abouts(numbers: impl Iterator<Item = u64>) -> Cmd {
    let mut cmd = redis::cmd("HMGET");
    cmd.arg(keys::VERSIONS);
    for number in numbers {
        cmd.arg(format!("a{number}"));
    }
    cmd
}

/// Makes a version of the limits the current one; see `lua/versions.lua`.
pub(crate) fn put_version(is_next: bool, number: u64, about: &[u8], text: &[u8], kept: u64) -> Cmd {
    let mut cmd = redis::cmd("EVAL");
    cmd.arg(VERSIONS_TEXT).arg(1).arg(keys::VERSIONS);
    cmd.arg(u8::from(is_next)).arg(number).arg(about).arg(text).arg(kept);
    cmd
}

/// A server's reply to a [`heartbeat`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HeartbeatReply {
    /// The number of live nodes that it knows.
    pub(crate) nodes: u32,
    /// Its birth, in µs since the epoch; 0: unknown.
    pub(crate) born: i64,
    /// The number of corrupt values that it has replaced.
    pub(crate) corrupt: u64,
}

impl HeartbeatReply {
    /// `None` if the script can't have made the reply.
    pub(crate) fn read(reply: &Value) -> Option<Self> {
        let Value::Array(parts) = reply else { return None };
        let (nodes, born, corrupt) = match parts.as_slice() {
            [Value::Int(nodes), Value::BulkString(born)] => (nodes, born, 0),
            [Value::Int(nodes), Value::BulkString(born), Value::Int(corrupt)] => {
                (nodes, born, u64::try_from(*corrupt).ok()?)
            }
            _ => return None,
        };
        Some(Self {
            nodes: u32::try_from(*nodes).ok()?,
            born: std::str::from_utf8(born).ok()?.parse().ok().filter(|born| *born >= 0)?,
            corrupt,
        })
    }
}

/// Makes `node` the one that renews leases from the parent for `ttl_ms` ms, unless another one is.
/// Reply: 1 if it is now, 0 if another one is, 2 if a corrupt value was replaced.
pub(crate) fn renewal(node: &str, ttl_ms: u64) -> Cmd {
    let mut cmd = redis::cmd("EVAL");
    cmd.arg(RENEWAL_TEXT).arg(1).arg(keys::RENEWAL).arg(node).arg(ttl_ms);
    cmd
}

/// The reply to [`layouts`]: for each layout, how long states in another one may still exist, and the
/// number of corrupt values that were replaced. `None` if the script can't have made the reply.
pub(crate) fn read_layouts_reply(reply: &Value, layouts: usize) -> Option<(Vec<Duration>, u64)> {
    let Value::BulkString(bytes) = reply else { return None };
    let (numbers, []) = bytes.as_chunks::<8>() else { return None };
    let mut numbers = numbers.iter().map(|bytes| f64::from_le_bytes(*bytes));
    let left = numbers.by_ref().take(layouts).map(|left_us| {
        let known = (0.0..=LONGEST_LEFT_US).contains(&left_us);
        known.then(|| Duration::from_micros(left_us as u64))
    });
    let left: Vec<Duration> = left.collect::<Option<_>>()?;
    let corrupt = numbers.next().map_or(0, |corrupt| corrupt as u64);
    (left.len() == layouts && numbers.next().is_none()).then_some((left, corrupt))
}

/// Records the layouts in which a node stores states. Each has a hash of the bucket, a hash of the
/// layout, and the longest life of a state. `born`: birth of the oldest server, in µs since the epoch.
pub(crate) fn layouts(layouts: &[(u64, u64, Duration)], born: i64) -> Cmd {
    let encode = |&(bucket_hash, settings_hash, life): &(u64, u64, Duration)| {
        let mut bytes = [0; 24];
        bytes[..8].copy_from_slice(&bucket_hash.to_le_bytes());
        bytes[8..16].copy_from_slice(&settings_hash.to_le_bytes());
        bytes[16..].copy_from_slice(&(life.as_micros() as f64).to_le_bytes());
        bytes
    };
    let told: Vec<u8> = layouts.iter().flat_map(encode).collect();
    let mut cmd = redis::cmd("EVAL");
    cmd.arg(LAYOUTS_TEXT).arg(1).arg(keys::LAYOUTS).arg(born).arg(told);
    cmd
}
