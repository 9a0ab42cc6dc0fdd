//! The scripts: their text, how a question becomes a call, and a reply an [`Outcome`].

use std::sync::LazyLock;

use redis::{Cmd, Script, Value};

use super::keys::{Keys, NODES};
use crate::domain::bucket::Place;
use crate::domain::time::Micros;
use crate::store::{Ask, Outcome, Verdict};

const ALLOW_TEXT: &str = include_str!("../../../../lua/allow.lua");
const HEARTBEAT_TEXT: &str = include_str!("../../../../lua/heartbeat.lua");

static ALLOW: LazyLock<Script> = LazyLock::new(|| Script::new(ALLOW_TEXT));

const COUNTED: u8 = 1;
const CONFIGURED: u8 = 2;
const TWIN: u8 = 4;

/// The command that puts the script for [`allow`] where EVALSHA finds it.
pub(super) fn load_allow() -> Cmd {
    let mut cmd = redis::cmd("SCRIPT");
    cmd.arg("LOAD").arg(ALLOW_TEXT);
    cmd
}

/// One question as a call of `lua/allow.lua`, where the layout of the arguments is described.
/// `now`: the time to decide at; `None`: the store's own.
pub(super) fn allow(ask: &Ask<'_>, now: Option<Micros>) -> Cmd {
    let keys = Keys::new(ask.place, ask.namespace, ask.name);
    let (mut flags, bound) = match ask.place {
        Place::Dynamic { max_buckets: Some(bound) } => (COUNTED, bound),
        Place::Configured { bounded: true } => (CONFIGURED, 0),
        _ => (0, 0),
    };
    let named = flags != 0;
    if keys.twin.is_some() {
        flags |= TWIN;
    }
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

    let mut cmd = redis::cmd("EVALSHA");
    let extra = [keys.register, keys.twin];
    cmd.arg(ALLOW.get_hash()).arg(1 + extra.iter().flatten().count()).arg(keys.state);
    for key in extra.into_iter().flatten() {
        cmd.arg(key);
    }
    cmd.arg(&arguments);
    if named {
        cmd.arg(ask.name);
    }
    cmd
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
    cmd.arg(HEARTBEAT_TEXT).arg(1).arg(NODES).arg(node_id).arg(ttl_us);
    cmd
}
