//! The scripts: their text, how a question becomes a call, and a reply an [`Outcome`].

use std::sync::LazyLock;
use std::time::Duration;

use redis::{Arg, Cmd, Script, Value};

use super::keys::{self, ServerKeys};
use crate::domain::time::Micros;
use crate::store::{BucketRequest, Layout};

/// A script as Redis gets it: with `lua/guard.lua` around it. Its lines keep their numbers.
macro_rules! guarded {
    ($file:literal) => {
        concat!(
            "local function run(...) ",
            include_str!(concat!("../../../../lua/", $file)),
            "\nend\n",
            include_str!("../../../../lua/guard.lua")
        )
    };
}

const HEARTBEAT_TEXT: &str = guarded!("heartbeat.lua");
const LAYOUTS_TEXT: &str = guarded!("layouts.lua");
const RENEWAL_TEXT: &str = guarded!("renewal.lua");

const ALLOW_TEXT: &str = guarded!("allow.lua");
const LEASE_TEXT: &str = guarded!("lease.lua");
const PARENT_TEXT: &str = guarded!("parent.lua");

static ALLOW: LazyLock<Script> = LazyLock::new(|| Script::new(ALLOW_TEXT));
static LEASE: LazyLock<Script> = LazyLock::new(|| Script::new(LEASE_TEXT));
static PARENT: LazyLock<Script> = LazyLock::new(|| Script::new(PARENT_TEXT));

/// No layout is about for longer, in µs: some 60 years.
const LONGEST_LEFT_US: f64 = 2e15;

/// A script that is called by its hash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scripted {
    /// `lua/allow.lua`
    Allow,
    /// `lua/lease.lua`
    Lease,
    /// `lua/parent.lua`
    Parent,
}

impl Scripted {
    pub(super) const ALL: [Self; 3] = [Self::Allow, Self::Lease, Self::Parent];

    fn hash(self) -> &'static str {
        match self {
            Self::Allow => ALLOW.get_hash(),
            Self::Lease => LEASE.get_hash(),
            Self::Parent => PARENT.get_hash(),
        }
    }

    fn text(self) -> &'static str {
        match self {
            Self::Allow => ALLOW_TEXT,
            Self::Lease => LEASE_TEXT,
            Self::Parent => PARENT_TEXT,
        }
    }

    /// A call, up to its keys.
    pub(super) fn call(self, keys: usize) -> Cmd {
        let mut cmd = redis::cmd("EVALSHA");
        cmd.arg(self.hash()).arg(keys);
        cmd
    }

    /// The same [`call`](Self::call), for a server that may not have the script.
    pub(super) fn with_text(self, call: &Cmd) -> Cmd {
        let mut cmd = redis::cmd("EVAL");
        cmd.arg(self.text());
        for arg in call.args_iter().skip(2) {
            if let Arg::Simple(bytes) = arg {
                cmd.arg(bytes);
            }
        }
        cmd
    }

    /// The command that puts the script where EVALSHA finds it.
    pub(super) fn load(self) -> Cmd {
        let mut cmd = redis::cmd("SCRIPT");
        cmd.arg("LOAD").arg(self.text());
        cmd
    }
}

/// Where the state is that a bucket may have under its namespace's other layout, and what reads
/// it, and when it expires; for buckets with a name.
pub(super) fn twin(ask: &BucketRequest<'_>) -> Option<(Vec<u8>, [Cmd; 2])> {
    let key = keys::twin(ask.kind, ask.namespace, ask.name)?;
    let read = |command| {
        let mut cmd = redis::cmd(command);
        cmd.arg(&key);
        cmd
    };
    let cmds = ["GET", "PEXPIRETIME"].map(read);
    Some((key, cmds))
}

/// The state in the replies to [`twin`], if it has not expired at `now`. What never expires is
/// none of ours.
pub(super) fn twin_state<'a>(
    state: &'a Value,
    expires: &Value,
    now: Option<Micros>,
) -> Option<&'a [u8]> {
    let (Value::BulkString(state), Value::Int(expires_ms)) = (state, expires) else { return None };
    let gone = *expires_ms < 0 || now.is_some_and(|now| now.as_millis() > *expires_ms);
    (!gone).then_some(state)
}

/// Says that a node is alive, or with `ttl_us` 0 that it leaves. A
/// whole EVAL: it is short, and needs no care about what the server has loaded.
pub(super) fn heartbeat(keys: &ServerKeys, node_id: &str, ttl_us: u64) -> Cmd {
    let mut cmd = redis::cmd("EVAL");
    cmd.arg(HEARTBEAT_TEXT).arg(1).arg(&*keys.nodes);
    cmd.arg(node_id).arg(ttl_us).arg(&*keys.birth).arg(keys.known.inherited());
    cmd.arg(&*keys.resources);
    cmd
}

/// What a server replies to a [`heartbeat`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Heard {
    /// How many nodes it knows to be alive.
    pub(super) nodes: u32,
    /// Since when it has its state, in µs since the epoch; 0: it does not know.
    pub(super) born: i64,
    /// How many values it has replaced that no node can have written.
    pub(super) corrupt: u64,
}

impl Heard {
    /// `None`: it is no reply of the script.
    pub(super) fn read(reply: &Value) -> Option<Self> {
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

/// Makes a node the one that renews leases, for so many milliseconds.
pub(super) fn renewal(node: &str, ttl_ms: u64) -> Cmd {
    let mut cmd = redis::cmd("EVAL");
    cmd.arg(RENEWAL_TEXT).arg(1).arg(keys::RENEWAL).arg(node).arg(ttl_ms);
    cmd
}

/// For how long each of so many layouts is still about, in the reply to [`layouts`], and how many
/// values were replaced that no node can have written; `None`: it is no reply of the script.
pub(super) fn settled(reply: &Value, layouts: usize) -> Option<(Vec<Duration>, u64)> {
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

/// Notes how a node stores states; `born` is of the oldest server, in µs since the epoch.
pub(super) fn layouts(layouts: &[Layout], born: i64) -> Cmd {
    let encode = |layout: &Layout| {
        let mut bytes = [0; 24];
        bytes[..8].copy_from_slice(&layout.of.to_le_bytes());
        bytes[8..16].copy_from_slice(&layout.is.to_le_bytes());
        bytes[16..].copy_from_slice(&(layout.life.as_micros() as f64).to_le_bytes());
        bytes
    };
    let told: Vec<u8> = layouts.iter().flat_map(encode).collect();
    let mut cmd = redis::cmd("EVAL");
    cmd.arg(LAYOUTS_TEXT).arg(1).arg(keys::LAYOUTS).arg(born).arg(told);
    cmd
}
