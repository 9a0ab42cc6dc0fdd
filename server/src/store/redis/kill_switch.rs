//! The kill switch in Redis: a key with an expiry.

use std::time::Duration;

use redis::Value;

use super::wire::script;
use super::{RedisStore, keys};
use crate::store::StoreError;
use crate::store::kill_switch::{KillSwitchStore, LONGEST, TurnedOn};

/// How far the server's clock may have stepped back since the switch was turned on.
const CLOCK_STEP: Duration = Duration::from_secs(60);

/// The end of the year 9999, in ms since the epoch: the last time that can be written as a date.
const LAST_MS: u64 = 253_402_300_799_999;

/// The longest value, in bytes. A message has up to 1,024 bytes, and six of JSON for each at most.
const MAX_VALUE: usize = 16 << 10;

impl KillSwitchStore for RedisStore {
    async fn kill_switch(&self) -> Result<Option<(TurnedOn, Duration)>, StoreError> {
        let slot = self.kill_switch_slot();
        let cmds =
            [script::start_of(keys::KILL_SWITCH, MAX_VALUE), script::time_left(keys::KILL_SWITCH)];
        let replies = self.0.values(&[slot, slot], None, |at, _| cmds[at].clone()).await;
        let replies: Vec<Value> = replies.into_iter().collect::<Result<_, _>>()?;
        // A value that is not tollgate's counts as off, and so does one without an end.
        let [Value::BulkString(by), Value::Int(left_ms @ 1..)] = &replies[..] else {
            return Ok(None);
        };
        let left = Duration::from_millis(left_ms.unsigned_abs());
        let by = serde_json::from_slice(by)
            .ok()
            .filter(|by: &TurnedOn| by.at_ms.max(by.ends_at_ms) <= LAST_MS)
            .filter(|_| left <= LONGEST + CLOCK_STEP);
        Ok(by.map(|by| (by, left.min(LONGEST))))
    }

    async fn turn_on(&self, by: &TurnedOn, length: Duration) -> Result<(), StoreError> {
        // Serializing plain values cannot fail.
        let value = serde_json::to_vec(by).map_err(|_| StoreError::Refused)?;
        let cmd = script::set_for(keys::KILL_SWITCH, &value, length);
        self.change_kill_switch(&cmd).await
    }

    async fn turn_off(&self) -> Result<(), StoreError> {
        self.change_kill_switch(&script::delete(keys::KILL_SWITCH)).await
    }
}

impl RedisStore {
    fn kill_switch_slot(&self) -> u16 {
        self.0.router.routes(&self.0.connector).slot(keys::KILL_SWITCH.as_bytes())
    }

    async fn change_kill_switch(&self, cmd: &redis::Cmd) -> Result<(), StoreError> {
        let slot = self.kill_switch_slot();
        let reply = self.0.values(&[slot], None, |_, _| cmd.clone()).await.pop();
        reply.ok_or(StoreError::Unreachable)?.map(drop)
    }
}
