//! Looks at buckets, and fills them up.

use redis::Value;
use smallvec::SmallVec;
use tokio::time::Instant;

use super::owner::Owner;
use super::wire::script::{self, Scripted};
use super::{BucketCall, Inner, RedisStore, SHARED, keys};
use crate::domain::bucket::{STATE_BYTES, State};
use crate::domain::time::{ManualClock, Micros};
use crate::store::look::{Look, Looks, Places};
use crate::store::{BucketRequest, StoreError};

/// The group of owners in the queues that looks count for, apart from decisions. No namespace has a
/// space in its name.
const LOOKS: &str = "looks at buckets";

impl Looks for RedisStore {
    async fn look(&self, request: &BucketRequest<'_>) -> Result<Look, StoreError> {
        self.0.look_at(request, false).await
    }

    async fn fill(&self, request: &BucketRequest<'_>) -> Result<Look, StoreError> {
        self.0.look_at(request, true).await
    }
}

impl Inner {
    /// Looks at a bucket; `fill` also fills it up.
    async fn look_at(&self, request: &BucketRequest<'_>, fill: bool) -> Result<Look, StoreError> {
        let routes = self.router.routes(&self.connector);
        let key = keys::state(request.kind, request.namespace, request.name);
        let member = request.caller.map_or(SHARED, |caller| caller.number());
        let call = BucketCall {
            request,
            owner: Owner { group: self.hash(LOOKS), member },
            slot: routes.slot(&key),
            deadline: Instant::now() + self.connector.timeout(),
        };
        let cmd = |_, _: super::Target<'_>| {
            let mut cmd = Scripted::Look.call(1);
            cmd.arg(&key).arg(u8::from(fill));
            cmd
        };
        let script = Some(Scripted::Look);
        let reply = self.values_of(|_| call.owner, &[call.slot], script, cmd).await.pop();
        let reply = reply.ok_or(StoreError::Refused)??;
        let (state, now) = self.state(&reply).ok_or(StoreError::Refused)?;
        let places = match request.bound() {
            Some(most) => Some(self.places(&call, most, state.is_some(), now).await?),
            None => None,
        };
        Ok(Look { state, now, places, prefetched: None })
    }

    /// The state in the reply of a look, and the time of the look. A value that is no state counts as
    /// absent, as in `lua/allow.lua`.
    fn state(&self, reply: &Value) -> Option<(Option<State>, Micros)> {
        let (bytes, expires_ms, server_now) = script::read_look_reply(reply)?;
        let now = self.clock.as_ref().map_or(server_now, ManualClock::now);
        let has_expired = self.clock.is_some() && expires_ms >= 0 && now.as_millis() > expires_ms;
        let bytes = <&[u8; STATE_BYTES]>::try_from(bytes).ok().filter(|_| !has_expired);
        Some((bytes.map(|bytes| State::decode(bytes, now)), now))
    }

    /// The places in the register of the bucket's namespace, of which there are `most`.
    async fn places(
        &self,
        call: &BucketCall<'_>,
        most: u64,
        has_state: bool,
        now: Micros,
    ) -> Result<Places, StoreError> {
        let register = keys::register(call.request.namespace);
        let slot = self.router.routes(&self.connector).slot(&register);
        let cmd = |at: usize, _: super::Target<'_>| match at {
            0 => script::names_in(&register),
            _ => script::score(&register, &keys::registered_name(call.request.name)),
        };
        let replies = self.values_of(|_| call.owner, &[slot, slot], None, cmd).await;
        let replies: SmallVec<[Value; 2]> = replies.into_iter().collect::<Result<_, _>>()?;
        let [count, score] = replies.as_slice() else { return Err(StoreError::Refused) };
        // A key of another type has no names: see `lua/allow.lua`.
        let taken = if let Value::Int(count) = count { count.unsigned_abs() } else { 0 };
        let has_place = matches!(score, Value::BulkString(_) | Value::Double(_));
        let is_needed = !has_state && !has_place && taken >= most;
        let has_room = taken < most || is_needed && self.could_make_room(call, now).await?;
        Ok(Places { taken, most, has_place, has_room })
    }
}

/// Reads a reply as all that this module reads.
#[cfg(test)]
pub(super) fn read_anything(reply: &Value) {
    script::read_look_reply(reply);
}
