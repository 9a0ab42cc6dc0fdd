//! The kill switch in Redis: a key with an expiry.

use std::time::Duration;

use redis::Value;

use super::wire::script;
use super::{RedisStore, keys};
use crate::store::StoreError;
use crate::store::kill_switch::{KillSwitchStore, LONGEST, TurnedOn};

impl KillSwitchStore for RedisStore {
    async fn kill_switch(&self) -> Result<Option<(TurnedOn, Duration)>, StoreError> {
        let slot = self.kill_switch_slot();
        let cmds = [script::get(keys::KILL_SWITCH), script::time_left(keys::KILL_SWITCH)];
        let replies = self.0.values(&[slot, slot], None, |at, _| cmds[at].clone()).await;
        let replies: Vec<Value> = replies.into_iter().collect::<Result<_, _>>()?;
        // A value that is not tollgate's counts as off, and so does one without an end.
        let [Value::BulkString(by), Value::Int(left_ms @ 1..)] = &replies[..] else {
            return Ok(None);
        };
        let left = Duration::from_millis(left_ms.unsigned_abs()).min(LONGEST);
        Ok(serde_json::from_slice(by).ok().map(|by| (by, left)))
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
