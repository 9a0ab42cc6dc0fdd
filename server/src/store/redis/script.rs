//! The scripts: their text, how a question becomes a call, and a reply an [`Outcome`].

use std::sync::LazyLock;

use redis::{Cmd, Script, Value};

use super::keys::{self, BIRTH, Keys, NODES};
use crate::domain::bucket::Place;
use crate::domain::time::Micros;
use crate::store::{Ask, Outcome, Verdict};

const HEARTBEAT_TEXT: &str = include_str!("../../../../lua/heartbeat.lua");

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

const COUNTED: u8 = 1;
const CONFIGURED: u8 = 2;

/// One question as a call of `lua/allow.lua`, where the layout of the arguments is described.
/// `now`: the time to decide at; `None`: the store's own.
pub(super) fn allow(ask: &Ask<'_>, now: Option<Micros>) -> Cmd {
    let keys = Keys::new(ask.place, ask.namespace, ask.name);
    let (flags, bound) = match ask.place {
        Place::Dynamic { max_buckets: Some(bound) } => (COUNTED, bound),
        Place::Configured { bounded: true } => (CONFIGURED, 0),
        _ => (0, 0),
    };
    let mut arguments = [0; 80];
    let numbers = [
        ask.terms.cost_us(ask.tokens),
        ask.terms.interval_us,
        ask.terms.cap_us,
        ask.max_wait_ms as f64 * 1000.0,
        ask.terms.max_debt_us,
        f64::from(ask.terms.mark.bits()),
        ask.idle_us().map_or(-1.0, |idle_us| idle_us as f64),
        bound as f64,
        f64::from(flags),
        now.map_or(0.0, |now| now.0 as f64),
    ];
    for (bytes, number) in arguments.chunks_exact_mut(8).zip(numbers) {
        bytes.copy_from_slice(&number.to_le_bytes());
    }

    let mut cmd = Scripted::Allow.call(1 + usize::from(keys.register.is_some()));
    cmd.arg(keys.state);
    if let Some(register) = keys.register {
        cmd.arg(register);
    }
    cmd.arg(&arguments).arg(if flags == 0 { "" } else { ask.name });
    cmd
}

/// Reads the state that a bucket may have under its namespace's other layout, and when it
/// expires; for buckets with a name.
pub(super) fn twin(ask: &Ask<'_>) -> Option<[Cmd; 2]> {
    let key = keys::twin(ask.place, ask.namespace, ask.name)?;
    let read = |command| {
        let mut cmd = redis::cmd(command);
        cmd.arg(&key);
        cmd
    };
    Some(["GET", "PEXPIRETIME"].map(read))
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

/// Reads a reply of `lua/allow.lua`; `None`: it is not one.
pub(super) fn outcome(reply: &Value, place: Place) -> Option<Outcome> {
    let Value::BulkString(bytes) = reply else { return None };
    let bytes: &[u8; 18] = bytes.as_slice().try_into().ok()?;
    let [verdict, created, rest @ ..] = bytes;
    let (removed, rest) = rest.split_first_chunk::<4>()?;
    let (live, rest) = rest.split_first_chunk::<4>()?;
    let accrued_us = f64::from_le_bytes(*rest.first_chunk::<8>()?);
    let dynamic = matches!(place, Place::Dynamic { .. });
    let bounded = matches!(place, Place::Dynamic { max_buckets: Some(_) });
    Some(Outcome {
        verdict: match verdict {
            0 => Verdict::Granted,
            1 => Verdict::Refused,
            2 => Verdict::TooManyBuckets,
            _ => return None,
        },
        accrued_us,
        created: dynamic && *created == 1,
        removed: u32::from_le_bytes(*removed),
        live: bounded.then(|| u32::from_le_bytes(*live)),
    })
}

/// Says that a node is alive, or with `ttl_us` 0 that it leaves. A whole EVAL: it is short,
/// and needs no care about what the server has loaded.
pub(super) fn heartbeat(node_id: &str, ttl_us: u64) -> Cmd {
    let mut cmd = redis::cmd("EVAL");
    cmd.arg(HEARTBEAT_TEXT).arg(1).arg(NODES).arg(node_id).arg(ttl_us).arg(BIRTH);
    cmd
}
