//! The scripts: their text, how a question becomes a call, and a reply an [`Outcome`].

use std::sync::LazyLock;

use redis::{Cmd, Script, Value};

use super::keys::{self, ServerKeys};
use crate::domain::time::Micros;
use crate::store::{Ask, Layout};

const HEARTBEAT_TEXT: &str = include_str!("../../../../lua/heartbeat.lua");

const LAYOUTS_TEXT: &str = include_str!("../../../../lua/layouts.lua");

const ALLOW_TEXT: &str = include_str!("../../../../lua/allow.lua");
const LEASE_TEXT: &str = include_str!("../../../../lua/lease.lua");
const PARENT_TEXT: &str = include_str!("../../../../lua/parent.lua");

static ALLOW: LazyLock<Script> = LazyLock::new(|| Script::new(ALLOW_TEXT));
static LEASE: LazyLock<Script> = LazyLock::new(|| Script::new(LEASE_TEXT));
static PARENT: LazyLock<Script> = LazyLock::new(|| Script::new(PARENT_TEXT));

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

    /// The command that puts the script where EVALSHA finds it.
    pub(super) fn load(self) -> Cmd {
        let mut cmd = redis::cmd("SCRIPT");
        cmd.arg("LOAD").arg(self.text());
        cmd
    }
}

/// Where the state is that a bucket may have under its namespace's other layout, and what reads
/// it, and when it expires; for buckets with a name.
pub(super) fn twin(ask: &Ask<'_>) -> Option<(Vec<u8>, [Cmd; 2])> {
    let key = keys::twin(ask.place, ask.namespace, ask.name)?;
    let read = |command| {
        let mut cmd = redis::cmd(command);
        cmd.arg(&key);
        cmd
    };
    let cmds = ["GET", "PEXPIRETIME"].map(read);
    Some((key, cmds))
}

/// The state in the replies to [`twin`], if it has not expired at `now`.
pub(super) fn twin_state<'a>(
    state: &'a Value,
    expires: &Value,
    now: Option<Micros>,
) -> Option<&'a [u8]> {
    let (Value::BulkString(state), Value::Int(expires_ms)) = (state, expires) else { return None };
    let gone = *expires_ms >= 0 && now.is_some_and(|now| now.as_millis() > *expires_ms);
    (!gone).then_some(state)
}

/// Says that a node is alive, or with `ttl_us` 0 that it leaves. A
/// whole EVAL: it is short, and needs no care about what the server has loaded.
pub(super) fn heartbeat(keys: &ServerKeys, node_id: &str, ttl_us: u64) -> Cmd {
    let mut cmd = redis::cmd("EVAL");
    cmd.arg(HEARTBEAT_TEXT).arg(1).arg(&*keys.nodes);
    cmd.arg(node_id).arg(ttl_us).arg(&*keys.birth).arg(keys.known.inherited());
    cmd
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
