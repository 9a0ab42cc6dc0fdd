//! Holds in Redis: what `lua/holds.lua` is asked.

use std::borrow::Cow;

use redis::Value;
use smallvec::smallvec;
use tokio::time::Instant;

use super::wire::parts::Part;
use super::wire::script::Scripted;
use super::{RedisStore, keys};
use crate::domain::holds::{
    HeldCopies, HoldBounds, HoldLimits, HoldList, HoldOutcome, LiveSession, MAX_HELD, NewHold,
    Reservation, Transfer, Transferred,
};
use crate::domain::time::{ManualClock, Micros};
use crate::metrics::Corrupt;
use crate::store::StoreError;
use crate::store::holds::{HoldStore, HoldTarget};
use crate::store::redis::owner::Owner;

/// The group of owners in the queues. It differs from all namespaces, which have no space in their names.
const HOLDS: &str = "holds on";

/// The bytes of the number of copies at the start of the value of a hold.
const COPIES_BYTES: usize = 7;

/// The operation of a call, by its number in the script.
#[derive(Clone, Copy)]
enum Operation {
    Reserve,
    Release,
    KeepAlive,
    End,
    List,
    Transfer,
}

/// The arguments of a call, as the script describes them.
struct Call<'a> {
    operation: Operation,
    ttl_ms: i64,
    copies: u64,
    /// Further numbers.
    numbers: Vec<f64>,
    session: &'a str,
    hold: &'a str,
    /// The last argument.
    last: Cow<'a, [u8]>,
}

impl<'a> Call<'a> {
    /// An operation without further arguments.
    fn of(operation: Operation, session: &'a str) -> Self {
        let (numbers, last) = (Vec::new(), Cow::Borrowed(&[][..]));
        Self { operation, ttl_ms: 0, copies: 0, numbers, session, hold: "", last }
    }

    /// What it asks the script at the time `now`; `None`: the server's own time.
    fn part(&self, owner: Owner, keys: keys::HoldKeys, now: Option<Micros>) -> Part {
        let now_us = now.map_or(0.0, |now| now.0 as f64);
        let operation = f64::from(self.operation as u8);
        let numbers = [operation, now_us, self.ttl_ms as f64, self.copies as f64];
        let numbers = numbers.iter().chain(&self.numbers);
        let numbers: Vec<u8> = numbers.flat_map(|number| number.to_le_bytes()).collect();
        let args = [self.session.as_bytes(), self.hold.as_bytes(), &self.last];
        let args = std::iter::once(numbers).chain(args.map(<[u8]>::to_vec)).collect();
        let keys = smallvec![keys.holds, keys.index];
        let is_long = matches!(self.operation, Operation::List | Operation::End);
        Part { script: Scripted::Holds, owner, keys, args, is_long }
    }
}

fn flag(is: bool) -> f64 {
    f64::from(u8::from(is))
}

fn or_minus_one(limit: Option<u64>) -> f64 {
    limit.map_or(-1.0, |limit| limit as f64)
}

/// Groups and a domain, as the script describes them.
fn members<'a>(groups: impl ExactSizeIterator<Item = &'a str>, domain: &str) -> Vec<u8> {
    let count = u16::try_from(groups.len()).unwrap_or(u16::MAX);
    let mut members = count.to_le_bytes().to_vec();
    for group in groups.take(count.into()) {
        // Names are no longer than this.
        let length = u8::try_from(group.len()).unwrap_or(u8::MAX);
        members.push(length);
        members.extend(&group.as_bytes()[..length.into()]);
    }
    members.extend(domain.as_bytes());
    members
}

impl HoldStore for RedisStore {
    async fn reserve(
        &self,
        target: &HoldTarget<'_>,
        new: &NewHold<'_>,
        limits: &HoldLimits<'_>,
    ) -> Result<Reservation, StoreError> {
        let mut bounds = vec![
            or_minus_one(limits.bounds.max_holds),
            flag(limits.bounds.known_only),
            new.min_copies as f64,
            flag(limits.enforced),
            or_minus_one(limits.global),
        ];
        bounds.extend(limits.groups.iter().map(|group| or_minus_one(group.limit)));
        bounds.push(or_minus_one(limits.domain));
        let call = Call {
            ttl_ms: new.ttl_ms,
            copies: new.copies,
            numbers: bounds,
            hold: new.hold,
            last: members(limits.groups.iter().map(|group| group.name), new.domain).into(),
            ..Call::of(Operation::Reserve, new.session)
        };
        let mut reply = numbers(&self.call_holds(target, &call).await?)?;
        let domain_held = reply.pop();
        let groups_held = reply.split_off(reply.len().min(5));
        let [outcome, granted, allowed, has_backlog, all_held] = *reply else {
            return Err(StoreError::Refused);
        };
        let reservation = Reservation {
            outcome: *HoldOutcome::ALL.get(outcome as usize).ok_or(StoreError::Refused)?,
            granted,
            allowed,
            domain_held: domain_held.ok_or(StoreError::Refused)?,
            groups_held,
            all_held,
            has_backlog: has_backlog != 0,
        };
        let is_whole = reservation.groups_held.len() == limits.groups.len();
        is_whole.then_some(reservation).ok_or(StoreError::Refused)
    }

    async fn release_hold(
        &self,
        target: &HoldTarget<'_>,
        session: &str,
        hold: &str,
        keep: u64,
    ) -> Result<u64, StoreError> {
        let call = Call { copies: keep, hold, ..Call::of(Operation::Release, session) };
        number(&self.call_holds(target, &call).await?)
    }

    async fn transfer(
        &self,
        target: &HoldTarget<'_>,
        transfer: &Transfer<'_>,
        bounds: &HoldBounds,
    ) -> Result<Transferred, StoreError> {
        let call = Call {
            ttl_ms: transfer.ttl_ms,
            // All copies: as many as there can be.
            copies: transfer.copies.unwrap_or(MAX_HELD),
            numbers: vec![or_minus_one(bounds.max_holds), flag(bounds.known_only)],
            hold: transfer.hold,
            last: Cow::Borrowed(transfer.to_session.as_bytes()),
            ..Call::of(Operation::Transfer, transfer.session)
        };
        match *numbers(&self.call_holds(target, &call).await?)? {
            [0, copies] => Ok(Transferred::Copies(copies)),
            [1, 0] => Ok(Transferred::TooMany),
            [2, 0] => Ok(Transferred::NoSuchHold),
            [3, 0] => Ok(Transferred::OtherDomain),
            _ => Err(StoreError::Refused),
        }
    }

    async fn keep_alive(
        &self,
        target: &HoldTarget<'_>,
        session: &str,
        ttl_ms: Option<i64>,
    ) -> Result<Option<LiveSession>, StoreError> {
        let ttl_ms = ttl_ms.unwrap_or_default();
        let call = Call { ttl_ms, ..Call::of(Operation::KeepAlive, session) };
        match &*self.call_holds(target, &call).await? {
            [Value::Int(0)] => Ok(None),
            reply => live_session(reply).map(Some).ok_or(StoreError::Refused),
        }
    }

    async fn end_session(&self, target: &HoldTarget<'_>, session: &str) -> Result<u64, StoreError> {
        number(&self.call_holds(target, &Call::of(Operation::End, session)).await?)
    }

    async fn list_holds(
        &self,
        target: &HoldTarget<'_>,
        groups: &[&str],
    ) -> Result<HoldList, StoreError> {
        let last = members(groups.iter().copied(), "").into();
        let call = Call { last, ..Call::of(Operation::List, "") };
        let mut reply = self.call_holds(target, &call).await?;
        let Some(Value::Array(sessions)) = reply.pop() else { return Err(StoreError::Refused) };
        let [all_held, holds, has_more, groups_held @ ..] = &*numbers(&reply)? else {
            return Err(StoreError::Refused);
        };
        let session = |session: &Value| {
            let Value::Array(parts) = session else { return None };
            let (Value::BulkString(name), live) = parts.split_first()? else { return None };
            Some((text(name)?, live_session(live)?))
        };
        let sessions: Option<Vec<_>> = sessions.iter().map(session).collect();
        Ok(HoldList {
            all_held: *all_held,
            holds: *holds,
            groups_held: groups_held.to_vec(),
            sessions: sessions.ok_or(StoreError::Refused)?,
            has_more: *has_more != 0,
        })
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
        let now = self.0.clock.as_ref().map(ManualClock::now);
        // The owner in the queues: a caller within the template, or the resource of an unnamed caller.
        let group = self.0.hash((HOLDS, target.template));
        let member = match target.caller {
            Some(caller) => caller.number(),
            None => self.0.note_member((HOLDS, target.resource), Instant::now()),
        };
        let owner = Owner { group, member };
        let reply = self.0.value_of_part(slot, call.part(owner, keys, now)).await?;
        let Value::Array(mut parts) = reply else {
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

/// The numbers of a reply.
fn numbers(reply: &[Value]) -> Result<Vec<u64>, StoreError> {
    let number = |value: &Value| match value {
        Value::Int(number) => u64::try_from(*number).ok(),
        _ => None,
    };
    reply.iter().map(number).collect::<Option<_>>().ok_or(StoreError::Refused)
}

/// The number of a reply that has one.
fn number(reply: &[Value]) -> Result<u64, StoreError> {
    match *numbers(reply)? {
        [number] => Ok(number),
        _ => Err(StoreError::Refused),
    }
}

/// The end of a session, and its holds. `None` if the script can't have made it.
fn live_session(reply: &[Value]) -> Option<LiveSession> {
    let (Value::Int(ends_ms), holds) = reply.split_first()? else { return None };
    let hold = |pair: &[Value]| {
        let [Value::BulkString(name), Value::BulkString(value)] = pair else { return None };
        let (number, members) = value.split_at_checked(COPIES_BYTES)?;
        let mut copies = [0; 8];
        copies[..COPIES_BYTES].copy_from_slice(number);
        let copies = u64::from_le_bytes(copies);
        Some(HeldCopies { hold: text(name)?, domain: text(domain_of(members)?)?, copies })
    };
    let holds: Option<Vec<HeldCopies>> = holds.chunks(2).map(hold).collect();
    Some(LiveSession { ends_ms: *ends_ms, holds: holds? })
}

/// The domain in [`members`].
fn domain_of(members: &[u8]) -> Option<&[u8]> {
    let (groups, mut rest) = members.split_first_chunk()?;
    for _ in 0..u16::from_le_bytes(*groups) {
        let (length, group) = rest.split_first()?;
        rest = group.get(usize::from(*length)..)?;
    }
    Some(rest)
}

fn text(bytes: &[u8]) -> Option<Box<str>> {
    Some(std::str::from_utf8(bytes).ok()?.into())
}
