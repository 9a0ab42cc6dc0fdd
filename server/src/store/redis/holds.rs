//! Holds in Redis: the calls of `lua/holds.lua`.

use redis::{Cmd, Value};
use tokio::time::Instant;

use super::wire::script::Scripted;
use super::{RedisStore, keys};
use crate::domain::holds::{
    HeldCopies, HoldLimits, HoldOutcome, LiveSession, NewHold, Reservation,
};
use crate::domain::time::{ManualClock, Micros};
use crate::metrics::Corrupt;
use crate::store::StoreError;
use crate::store::holds::{HoldStore, HoldTarget};
use crate::store::redis::owner::Owner;

/// The group of owners in the queues. It differs from all namespaces, which have no space in their names.
const HOLDS: &str = "holds on";

/// The bytes of the number of copies, before the domain, in the value of a hold.
const COPIES_BYTES: usize = 7;

/// The operation of a call, by its number in the script.
#[derive(Clone, Copy)]
enum Operation {
    Reserve,
    Release,
    KeepAlive,
    End,
}

/// The arguments of a call, as the script describes them.
#[derive(Clone, Copy)]
struct Call<'a> {
    operation: Operation,
    ttl_ms: i64,
    copies: u64,
    session: &'a str,
    hold: &'a str,
    new: Option<(&'a NewHold<'a>, &'a HoldLimits)>,
}

impl Call<'_> {
    /// The command at the time `now`; `None`: the server's own.
    fn cmd(&self, keys: &keys::HoldKeys, now: Option<Micros>) -> Cmd {
        let mut numbers = Vec::with_capacity(80);
        let mut write = |double: f64| numbers.extend(double.to_le_bytes());
        write(f64::from(self.operation as u8));
        write(now.map_or(0.0, |now| now.0 as f64));
        write(self.ttl_ms as f64);
        write(self.copies as f64);
        if let Some((new, limits)) = self.new {
            write(new.min_copies as f64);
            for limit in [limits.domain, limits.global, limits.max_holds] {
                write(limit.map_or(-1.0, |limit| limit as f64));
            }
            [limits.known_only, limits.enforced]
                .into_iter()
                .for_each(|flag| write(f64::from(u8::from(flag))));
        }
        let mut cmd = Scripted::Holds.call(2);
        cmd.arg(&keys.holds).arg(&keys.index).arg(numbers).arg(self.session).arg(self.hold);
        cmd.arg(self.new.map_or("", |(new, _)| new.domain));
        cmd
    }
}

impl HoldStore for RedisStore {
    async fn reserve(
        &self,
        target: &HoldTarget<'_>,
        new: &NewHold<'_>,
        limits: &HoldLimits,
    ) -> Result<Reservation, StoreError> {
        let call = Call {
            operation: Operation::Reserve,
            ttl_ms: new.ttl_ms,
            copies: new.copies,
            session: new.session,
            hold: new.hold,
            new: Some((new, limits)),
        };
        let reply = self.call_holds(target, &call).await?;
        let [outcome, granted, allowed, domain_held, all_held, has_backlog] = *numbers(&reply)?;
        let reservation = Reservation {
            outcome: *HoldOutcome::ALL.get(outcome as usize).ok_or(StoreError::Refused)?,
            granted,
            allowed,
            domain_held,
            all_held,
            has_backlog: has_backlog != 0,
        };
        Ok(reservation)
    }

    async fn release_hold(
        &self,
        target: &HoldTarget<'_>,
        session: &str,
        hold: &str,
        keep: u64,
    ) -> Result<u64, StoreError> {
        let call = Call {
            operation: Operation::Release,
            ttl_ms: 0,
            copies: keep,
            session,
            hold,
            new: None,
        };
        let [left] = *numbers(&self.call_holds(target, &call).await?)?;
        Ok(left)
    }

    async fn keep_alive(
        &self,
        target: &HoldTarget<'_>,
        session: &str,
        ttl_ms: Option<i64>,
    ) -> Result<Option<LiveSession>, StoreError> {
        let call = Call {
            operation: Operation::KeepAlive,
            ttl_ms: ttl_ms.unwrap_or_default(),
            copies: 0,
            session,
            hold: "",
            new: None,
        };
        let reply = self.call_holds(target, &call).await?;
        live_session(&reply).ok_or(StoreError::Refused)
    }

    async fn end_session(&self, target: &HoldTarget<'_>, session: &str) -> Result<u64, StoreError> {
        let call =
            Call { operation: Operation::End, ttl_ms: 0, copies: 0, session, hold: "", new: None };
        let [released] = *numbers(&self.call_holds(target, &call).await?)?;
        Ok(released)
    }
}

impl RedisStore {
    /// Calls the script, and returns its reply without the first number.
    async fn call_holds(
        &self,
        target: &HoldTarget<'_>,
        call: &Call<'_>,
    ) -> Result<Vec<Value>, StoreError> {
        let keys = keys::HoldKeys::new(target.resource);
        let slot = self.0.router.routes(&self.0.connector).slot(&keys.holds);
        let cmd = call.cmd(&keys, self.0.clock.as_ref().map(ManualClock::now));
        // The owner in the queues: a caller within the template, or the resource of an unnamed caller.
        let group = self.0.hash((HOLDS, target.template));
        let member = match target.caller {
            Some(caller) => caller.number(),
            None => self.0.note_member((HOLDS, target.resource), Instant::now()),
        };
        let owner = Owner { group, member };
        let script = Some(Scripted::Holds);
        let reply = self.0.values_of(|_| owner, &[slot], script, |_, _| cmd.clone()).await.pop();
        let Value::Array(mut parts) = reply.unwrap_or(Err(StoreError::Unreachable))? else {
            return Err(StoreError::Refused);
        };
        match parts.first() {
            Some(Value::Int(replaced @ (0 | 1))) => {
                self.metrics().corrupt(Corrupt::Holds, replaced.unsigned_abs());
                parts.remove(0);
                Ok(parts)
            }
            _ => Err(StoreError::Refused),
        }
    }
}

/// The numbers of a reply that has `N` of them.
fn numbers<const N: usize>(reply: &[Value]) -> Result<Box<[u64; N]>, StoreError> {
    let number = |value: &Value| match value {
        Value::Int(number) => u64::try_from(*number).ok(),
        _ => None,
    };
    let numbers: Option<Vec<u64>> = reply.iter().map(number).collect();
    numbers.and_then(|numbers| numbers.try_into().ok()).ok_or(StoreError::Refused)
}

/// The session in a reply. `None` if the script can't have made it.
#[expect(clippy::option_option, reason = "a reply may be of no live session")]
fn live_session(reply: &[Value]) -> Option<Option<LiveSession>> {
    let (Value::Int(ends_ms), holds) = reply.split_first()? else { return None };
    if *ends_ms == 0 {
        return holds.is_empty().then_some(None);
    }
    let text = |bytes: &[u8]| Some(std::str::from_utf8(bytes).ok()?.into());
    let hold = |pair: &[Value]| {
        let [Value::BulkString(name), Value::BulkString(value)] = pair else { return None };
        let (number, domain) = value.split_at_checked(COPIES_BYTES)?;
        let mut copies = [0; 8];
        copies[..COPIES_BYTES].copy_from_slice(number);
        let copies = u64::from_le_bytes(copies);
        Some(HeldCopies { hold: text(name)?, domain: text(domain)?, copies })
    };
    let holds: Option<Vec<HeldCopies>> = holds.chunks(2).map(hold).collect();
    Some(Some(LiveSession { ends_ms: *ends_ms, holds: holds? }))
}
