//! The kill switch in this process's memory.

use std::sync::Mutex;
use std::time::Duration;

use super::MemoryStore;
use crate::domain::time::Micros;
use crate::store::StoreError;
use crate::store::kill_switch::{KillSwitchStore, TurnedOn};
use crate::store::lock::lock;

/// Who turned the switch on, and when it ends.
#[derive(Default)]
pub(super) struct KillSwitch(Mutex<Option<(TurnedOn, Micros)>>);

impl KillSwitchStore for MemoryStore {
    async fn kill_switch(&self) -> Result<Option<(TurnedOn, Duration)>, StoreError> {
        let (now, kept) = (self.now(), lock(&self.0.kill_switch.0).clone());
        Ok(kept.and_then(|(by, end)| {
            let left_us = u64::try_from(end.0 - now.0).ok().filter(|left_us| *left_us > 0)?;
            Some((by, Duration::from_micros(left_us)))
        }))
    }

    async fn turn_on(&self, by: &TurnedOn, length: Duration) -> Result<(), StoreError> {
        let length_us = i64::try_from(length.as_micros()).unwrap_or(i64::MAX);
        let end = Micros(self.now().0.saturating_add(length_us));
        *lock(&self.0.kill_switch.0) = Some((by.clone(), end));
        Ok(())
    }

    async fn turn_off(&self) -> Result<(), StoreError> {
        *lock(&self.0.kill_switch.0) = None;
        Ok(())
    }
}
