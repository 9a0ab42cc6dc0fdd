//! Looks at buckets, and fills them up.

use redis::{Cmd, Value};
use smallvec::SmallVec;
use tokio::time::{Instant, timeout_at};

use super::owner::Owner;
use super::wire::script::{self, Scripted};
use super::{BucketCall, Inner, RedisStore, SHARED, Target, keys};
use crate::domain::algorithm::State;
use crate::domain::time::{ManualClock, Micros};
use crate::store::look::{Look, Looks, Places};
use crate::store::{BucketRequest, StoreError};

/// The group of owners in the queues that looks count for, apart from decisions. No namespace has a
/// space in its name.
const LOOKS: &str = "looks at buckets";

impl Looks for RedisStore {
    async fn look(&self, request: &BucketRequest<'_>) -> Result<Look, StoreError> {
        let inner = &*self.0;
        let call = inner.look_call(request);
        let looked = timeout_at(call.deadline, inner.look_at(&call)).await;
        looked.unwrap_or(Err(StoreError::Timeout))
    }

    async fn has_room(
        &self,
        request: &BucketRequest<'_>,
        places: Places,
    ) -> Result<bool, StoreError> {
        let inner = &*self.0;
        let call = inner.look_call(request);
        let looked = timeout_at(call.deadline, inner.has_room(&call, places)).await;
        looked.unwrap_or(Err(StoreError::Timeout))
    }

    async fn fill(&self, request: &BucketRequest<'_>) -> Result<Look, StoreError> {
        let inner = &*self.0;
        let (state, now) = inner.state_by(&inner.look_call(request), script::fill).await?;
        Ok(Look { state, now, places: None })
    }
}

impl Inner {
    fn look_call<'a>(&self, request: &'a BucketRequest<'a>) -> BucketCall<'a> {
        let key = keys::state(request);
        let member = request.caller.map_or(SHARED, |caller| caller.number());
        BucketCall {
            request,
            owner: Owner { group: self.hash(LOOKS), member },
            slot: self.router.routes(&self.connector).slot(&key),
            deadline: Instant::now() + self.connector.timeout(),
        }
    }

    async fn look_at(&self, call: &BucketCall<'_>) -> Result<Look, StoreError> {
        let (state, now) = self.state_by(call, script::look).await?;
        let places = match call.request.bound() {
            None => None,
            Some(most) => match self.places(call, most).await {
                Ok(places) => Some(places),
                // The bucket needs no place.
                Err(_) if state.is_some() => None,
                Err(error) => return Err(error),
            },
        };
        Ok(Look { state, now, places })
    }

    /// The state of a bucket before the command that `cmd` makes from its key, and the time.
    async fn state_by(
        &self,
        call: &BucketCall<'_>,
        cmd: fn(&[u8]) -> Cmd,
    ) -> Result<(Option<State>, Micros), StoreError> {
        let request = call.request;
        let key = keys::state(request);
        let script = Some(Scripted::Look);
        let make = |_: usize, _: Target<'_>| cmd(&key);
        let reply = self.values_of(|_| call.owner, &[call.slot], script, make).await.pop();
        let reply = reply.ok_or(StoreError::Refused)??;
        let (bytes, now) = self.looked_at(&reply).ok_or(StoreError::Refused)?;
        // A value that is no state counts as absent, as in `lua/allow.lua`.
        Ok((State::decode(bytes, request.terms, now), now))
    }

    /// The value in the reply of a look, empty if there is none, and the time of the look.
    pub(super) fn looked_at<'r>(&self, reply: &'r Value) -> Option<(&'r [u8], Micros)> {
        let (bytes, expires_ms, server_now) = script::read_look_reply(reply)?;
        let now = self.clock.as_ref().map_or(server_now, ManualClock::now);
        let has_expired = self.clock.is_some() && expires_ms >= 0 && now.as_millis() > expires_ms;
        Some((if has_expired { &[] } else { bytes }, now))
    }

    /// The places in the register of the bucket's namespace, of which there are `most`.
    async fn places(&self, call: &BucketCall<'_>, most: u64) -> Result<Places, StoreError> {
        let register = keys::register(call.request.namespace);
        let slot = self.router.routes(&self.connector).slot(&register);
        let cmd = |at: usize, _: Target<'_>| match at {
            0 => script::names_in(&register),
            _ => script::score(&register, &keys::registered_name(call.request.name)),
        };
        let replies = self.values_of(|_| call.owner, &[slot, slot], None, cmd).await;
        let replies: SmallVec<[Value; 2]> = replies.into_iter().collect::<Result<_, _>>()?;
        let [count, score] = replies.as_slice() else { return Err(StoreError::Refused) };
        // A key of another type has no names: see `lua/allow.lua`.
        let taken = if let Value::Int(count) = count { count.unsigned_abs() } else { 0 };
        let has_place = matches!(score, Value::BulkString(_) | Value::Double(_));
        Ok(Places { taken, most, has_place })
    }
}

/// Reads a reply as all that this module reads.
#[cfg(test)]
pub(super) fn read_anything(reply: &Value) {
    script::read_look_reply(reply);
}
