//! Places for dynamic buckets in the register of their namespace, which bounds their number.
//!
//! `lua/allow.lua` gives a new bucket its place in the call that decides, if the register is on the
//! same server and has room. This module does the rest: it asks for a place on another server, and
//! makes room in a full register. Room is made by a look at the names with the lowest scores, whose
//! states are the most likely to have expired. `lua/register.lua` removes those without a state,
//! and gives the others the expiry of their state as score.

use std::sync::Arc;
use std::time::Duration;

use hashbrown::HashMap;
use redis::Value;
use tokio::sync::Mutex;
use tokio::time::Instant;

use super::cluster::routes::Routes;
use super::keys;
use super::known::KnownNames;
use super::wire::batch::Registration;
use super::wire::script::{self, Scripted};
use super::{BucketCall, Inner, Target};
use crate::domain::bucket::BucketKind;
use crate::domain::time::{ManualClock, Micros};
use crate::store::clock::Clock;
use crate::store::lock::lock;
use crate::store::look::Places;
use crate::store::{BucketRequest, Outcome, StoreError, Verdict};

/// The most names in one look.
const LOOK: usize = 100;

/// How long a register counts as full after a look that made no room. A flood of new names costs
/// the store one look for each such time, and for each name a read of its state.
const FULL_FOR: Duration = Duration::from_millis(100);

/// How long after its registration a bucket may be decided. The register keeps the name for twice
/// as long, so that no other name takes its place meanwhile.
const USABLE_US: i64 = 5_000_000;

/// The advice if that time has passed by the clock of the bucket's server, when by that of the
/// register's it has only begun.
const CLOCKS: &str = "the clocks of the masters differ by more than 5 s: synchronize them";

/// States of registers are dropped when there are so many, unless they are in use: namespaces come and
/// go with the limits.
const MANY_STATES: usize = 1024;

/// How long a register outlives the nodes that serve its namespace: 30 days.
const KEPT: Duration = Duration::from_secs(30 * 24 * 60 * 60);

/// What one thread knows of registers.
pub(super) struct Registers {
    /// By a hash of the register.
    states: std::sync::Mutex<HashMap<u64, State>>,
    /// The buckets that were enrolled lately.
    enrolled: KnownNames,
}

#[derive(Default)]
struct State {
    full_until: Option<Instant>,
    /// What the last look that changed nothing has found, and until when that is used again.
    looked: Option<(Instant, bool)>,
    /// Held by such a look.
    looking: Arc<Mutex<()>>,
    /// How often room was made.
    rooms_made: u64,
    /// Held by the request that makes room.
    making_room: Arc<Mutex<()>>,
}

/// What came of an attempt to make room in a register.
enum Room {
    /// Another request has made some.
    Made,
    /// This request has made some, and has its place.
    Placed(Answer),
    /// There is none.
    Full,
}

/// The answer of `lua/register.lua`.
struct Answer {
    placed: bool,
    names: u32,
    /// How many names with low scores were removed, or have another score than the node has seen.
    changed: u32,
    now: Micros,
}

/// A name in a register, its score, and when its state expires, in ms; `None` without a state.
struct Seen {
    name: Vec<u8>,
    score: Vec<u8>,
    expires_ms: Option<i64>,
}

impl Registers {
    pub(super) fn new() -> Self {
        Self { states: std::sync::Mutex::default(), enrolled: KnownNames::new() }
    }

    fn with<T>(&self, register: u64, f: impl FnOnce(&mut State) -> T) -> T {
        let mut states = lock(&self.states);
        if states.len() >= MANY_STATES && !states.contains_key(&register) {
            states.retain(|_, state| state.is_in_use());
        }
        f(states.entry(register).or_default())
    }

    /// Whether a look has found the register full within [`FULL_FOR`].
    fn is_full(&self, register: u64) -> bool {
        lock(&self.states).get(&register).is_some_and(State::is_full)
    }
}

impl State {
    fn is_full(&self) -> bool {
        self.full_until.is_some_and(|until| Instant::now() < until)
    }

    fn recent_look(&self) -> Option<bool> {
        let recent = self.looked.filter(|(until, _)| Instant::now() < *until);
        recent.map(|(_, has_room)| has_room)
    }

    /// Whether it is more than what a new state would say. (A new one that counts from 0 makes a waiting
    /// request ask once more.)
    fn is_in_use(&self) -> bool {
        let in_turn = |turn: &Arc<Mutex<()>>| Arc::strong_count(turn) > 1;
        self.is_full() || in_turn(&self.making_room) || in_turn(&self.looking)
    }
}

impl Inner {
    /// What a bucket needs before it may get a state.
    pub(super) fn registration(&self, routes: &Routes, call: &BucketCall<'_>) -> Registration {
        let request = call.request;
        let BucketKind::Dynamic { max_buckets: Some(bound) } = request.kind else {
            return Registration::NotNeeded;
        };
        let key = keys::register(request.namespace);
        let is_here = is_same_server(routes, call.slot, routes.slot(&key));
        if is_here && !self.registers.is_full(self.hash(request.namespace)) {
            let enroll = request.enrolls() && !self.is_enrolled(routes, request);
            Registration::Here { key, bound, enroll }
        } else {
            Registration::Missing
        }
    }

    /// Whether the register of a bucket is on the same server as its state.
    fn is_registered_here(&self, call: &BucketCall<'_>) -> bool {
        let routes = self.router.routes(&self.connector);
        let register = keys::register(call.request.namespace);
        is_same_server(&routes, call.slot, routes.slot(&register))
    }

    /// Decides a request to a dynamic bucket that has neither a state nor a place, which a call of
    /// `lua/allow.lua` has `refused`.
    pub(super) async fn decide_new(
        &self,
        call: &BucketCall<'_>,
        refused: Outcome,
    ) -> Result<Outcome, StoreError> {
        let BucketKind::Dynamic { max_buckets: Some(bound) } = call.request.kind else {
            return Ok(refused);
        };
        let register = self.hash(call.request.namespace);
        if self.registers.is_full(register) {
            return Ok(refused);
        }
        let rooms_made = || self.registers.with(register, |state| state.rooms_made);
        let mut seen = rooms_made();
        // On the server of the bucket, the call of `lua/allow.lua` has asked the register.
        let mut has_asked = self.is_registered_here(call);
        while Instant::now() < call.deadline {
            if !self.is_registered_here(call) {
                let answer = self.call_register_script(call, Some(bound), &[]).await?;
                if answer.placed {
                    return self.decide_placed(answer, call).await;
                }
            }
            has_asked = true;
            match self.make_room(call, bound, seen).await? {
                Room::Full => break,
                Room::Placed(answer) => return self.decide_placed(answer, call).await,
                Room::Made => seen = rooms_made(),
            }
            // All that have waited for room are sent together, so that they cost few calls.
            if self.is_registered_here(call) {
                let outcome = self.decide_again(call, None).await?;
                if !has_no_place(&outcome) {
                    return Ok(outcome);
                }
            }
        }
        // Without an answer of the register, there may be room.
        if has_asked { Ok(refused) } else { Err(self.late(&self.plan(false), call)) }
    }

    /// Decides for a bucket that has got its place.
    async fn decide_placed(
        &self,
        place: Answer,
        call: &BucketCall<'_>,
    ) -> Result<Outcome, StoreError> {
        let outcome = self.decide_again(call, Some(place.usable_until())).await?;
        if has_no_place(&outcome) {
            let routes = self.router.routes(&self.connector);
            if let Some(lanes) = routes.lanes(call.slot) {
                lanes.shard.health.refused_one(&"a bucket lost its place at once", CLOCKS);
            }
            return Err(StoreError::Refused);
        }
        Ok(Outcome { live: Some(place.names), ..outcome })
    }

    /// Makes room in a register, and asks for a place in it. One request does so at a time for each
    /// register. `seen`: the value of `rooms_made` when the request was refused; a different value now
    /// means that another request has made room.
    async fn make_room(
        &self,
        call: &BucketCall<'_>,
        bound: u64,
        seen: u64,
    ) -> Result<Room, StoreError> {
        let register = self.hash(call.request.namespace);
        let turn = self.registers.with(register, |state| Arc::clone(&state.making_room));
        // The server has said that there is no place. So a request that waits for too long, as in a
        // flood of new names, is refused: it is not for the failure policy.
        let Ok(_turn) = tokio::time::timeout_at(call.deadline, turn.lock()).await else {
            return Ok(Room::Full);
        };
        if self.registers.is_full(register) || Instant::now() >= call.deadline {
            return Ok(Room::Full);
        }
        if self.registers.with(register, |state| state.rooms_made) != seen {
            return Ok(Room::Made);
        }
        loop {
            let names = self.lowest_names(call).await?;
            let names = self.with_expiries(call, names).await?;
            let answer = self.call_register_script(call, Some(bound), &names).await?;
            if answer.placed {
                self.registers.with(register, |state| state.rooms_made += 1);
                return Ok(Room::Placed(answer));
            }
            // Until a look finds nothing to change.
            if answer.changed == 0 {
                break;
            }
        }
        // The time of a test moves without regard to this thread's.
        if self.clock.is_none() {
            let until = Some(Instant::now() + FULL_FOR);
            self.registers.with(register, |state| state.full_until = until);
        }
        Ok(Room::Full)
    }

    /// Whether a name would get a place in a register with these `places`. Changes nothing. Checks only
    /// the names whose states are the most likely to have expired, once for each [`FULL_FOR`]. Does not
    /// wait for requests that make room, nor they for it.
    pub(super) async fn has_room(
        &self,
        call: &BucketCall<'_>,
        places: Places,
    ) -> Result<bool, StoreError> {
        let register = self.hash(call.request.namespace);
        let turn = self.registers.with(register, |state| Arc::clone(&state.looking));
        let _turn = turn.lock().await;
        let (is_full, looked) =
            self.registers.with(register, |state| (state.is_full(), state.recent_look()));
        if let Some(has_room) = is_full.then_some(false).or(looked) {
            return Ok(has_room);
        }
        let names = self.lowest_names(call).await?;
        let seen = self.with_expiries(call, names).await?;
        let now = self.clock.as_ref().map_or_else(|| Clock::system().now(), ManualClock::now);
        let free = seen.iter().filter(|name| name.is_free(now)).count() as u64;
        let has_room = places.taken.saturating_sub(free) < places.most;
        if self.clock.is_none() {
            let looked = Some((Instant::now() + FULL_FOR, has_room));
            self.registers.with(register, |state| state.looked = looked);
        }
        Ok(has_room)
    }

    /// Makes sure that a bucket that has a state is registered, after a request to it was decided with
    /// this `outcome`.
    pub(super) async fn enroll(
        &self,
        routes: &Routes,
        call: &BucketCall<'_>,
        outcome: &Outcome,
    ) -> Result<(), StoreError> {
        if self.is_enrolled(routes, call.request) {
            return Ok(());
        }
        // A call that had the register, and so tells the number of its names, has registered the
        // bucket if it has a state.
        if outcome.live.is_none() {
            self.call_register_script(call, None, &[]).await?;
        }
        if let Some(name) = self.enrolled_name(routes, call.request) {
            self.registers.enrolled.note(name, Instant::now());
        }
        Ok(())
    }

    /// Whether this thread has registered a bucket since its register was lost, if that was lately.
    fn is_enrolled(&self, routes: &Routes, request: &BucketRequest<'_>) -> bool {
        self.enrolled_name(routes, request).is_some_and(|name| self.registers.enrolled.has(name))
    }

    /// What stands for a bucket in its register; `None` if it is not known who has the register.
    fn enrolled_name(&self, routes: &Routes, request: &BucketRequest<'_>) -> Option<u64> {
        let register = routes.register_id(request.namespace).ok()?;
        Some(self.hash((register, request.namespace, request.name)))
    }

    /// Keeps the registers of namespaces for another [`KEPT`], so that only those of namespaces that
    /// no node serves any more expire. If a server gives no answer, the next call tries again.
    pub(super) async fn keep_registers(&self, routes: &Routes, namespaces: &[&str]) {
        let keys: Vec<_> = namespaces.iter().map(|namespace| keys::register(namespace)).collect();
        let slots: Vec<u16> = keys.iter().map(|key| routes.slot(key)).collect();
        self.values(&slots, None, |at, _| script::expire(&keys[at], KEPT)).await;
    }

    /// One call of `lua/register.lua`: asks for a place among `bound` (`None`: for a bucket with a
    /// state, which gets one in any case), and tells what was `seen` of names with low scores.
    async fn call_register_script(
        &self,
        call: &BucketCall<'_>,
        bound: Option<u64>,
        seen: &[Seen],
    ) -> Result<Answer, StoreError> {
        let key = keys::register(call.request.namespace);
        let name = keys::registered_name(call.request.name);
        let slot = self.router.routes(&self.connector).slot(&key);
        let now = self.clock.as_ref().map_or(Micros(0), ManualClock::now);
        let cmd = |_: usize, _: Target<'_>| {
            let mut cmd = Scripted::Register.call(1);
            cmd.arg(&key).arg(now.0).arg(&name).arg(bound.map_or(-1.0, |bound| bound as f64));
            for Seen { name, score, expires_ms } in seen {
                cmd.arg(name).arg(score);
                match expires_ms {
                    Some(expires_ms) => cmd.arg(*expires_ms),
                    None => cmd.arg(""),
                };
            }
            cmd
        };
        let script = Some(Scripted::Register);
        let reply = self.values_of(|_| call.owner, &[slot], script, cmd).await.pop();
        Answer::read(&reply.ok_or(StoreError::Refused)??).ok_or(StoreError::Refused)
    }

    /// The names with the lowest scores in the register, with their scores.
    async fn lowest_names(
        &self,
        call: &BucketCall<'_>,
    ) -> Result<Vec<(Vec<u8>, Vec<u8>)>, StoreError> {
        let key = keys::register(call.request.namespace);
        let slot = self.router.routes(&self.connector).slot(&key);
        let lowest = |_: usize, _: Target<'_>| script::lowest_scores(&key, LOOK);
        let reply = self.values_of(|_| call.owner, &[slot], None, lowest).await.pop();
        script::scored_names(reply.ok_or(StoreError::Refused)??).ok_or(StoreError::Refused)
    }

    /// Finds out when the states of registered names expire. Leaves names out whose server gives no
    /// answer: they keep their places.
    async fn with_expiries(
        &self,
        call: &BucketCall<'_>,
        names: Vec<(Vec<u8>, Vec<u8>)>,
    ) -> Result<Vec<Seen>, StoreError> {
        let routes = self.router.routes(&self.connector);
        let state = |(name, _): &(Vec<u8>, _)| keys::registered_state(call.request, name);
        let states: Vec<_> = names.iter().map(state).collect();
        let slots: Vec<u16> = states.iter().map(|key| routes.slot(key)).collect();
        let expiry = |at: usize, _: Target<'_>| script::expiry(&states[at]);
        let expiries = self.values_of(|_| call.owner, &slots, None, expiry).await;
        let now = self.clock.as_ref().map(ManualClock::now);
        let mut seen = Vec::with_capacity(names.len());
        for ((name, score), expiry) in names.into_iter().zip(expiries) {
            let Ok(expiry) = expiry else { continue };
            let Value::Int(expires_ms) = expiry else { return Err(StoreError::Refused) };
            // States always expire. A key that does not is not one.
            let exists = expires_ms >= 0 && now.is_none_or(|now| now.as_millis() <= expires_ms);
            seen.push(Seen { name, score, expires_ms: exists.then_some(expires_ms) });
        }
        Ok(seen)
    }
}

impl Seen {
    /// Whether `lua/register.lua` would remove the name: it has no state, and is not waiting for its
    /// first one.
    fn is_free(&self, now: Micros) -> bool {
        let score_ms = std::str::from_utf8(&self.score).ok().and_then(|text| text.parse().ok());
        let waits = |score_ms: f64| score_ms % 1.0 != 0.0 && score_ms > now.as_millis() as f64;
        self.expires_ms.is_none() && !score_ms.is_some_and(waits)
    }
}

fn is_same_server(routes: &Routes, a: u16, b: u16) -> bool {
    matches!((routes.lanes(a), routes.lanes(b)), (Some(a), Some(b)) if Arc::ptr_eq(a, b))
}

impl Answer {
    /// Until when a bucket that has got its place may get its state.
    fn usable_until(&self) -> Micros {
        Micros(self.now.0.saturating_add(USABLE_US))
    }

    /// `None` if the script can't have made the reply.
    fn read(reply: &Value) -> Option<Self> {
        let Value::Array(parts) = reply else { return None };
        let [Value::Int(placed), Value::Int(names), Value::Int(changed), now] = parts.as_slice()
        else {
            return None;
        };
        let Value::BulkString(now) = now else { return None };
        Some(Self {
            placed: *placed == 1,
            names: u32::try_from(*names).ok()?,
            changed: u32::try_from(*changed).ok()?,
            now: Micros(std::str::from_utf8(now).ok()?.parse().ok()?),
        })
    }
}

/// Whether a request found neither a state nor a place.
pub(super) fn has_no_place(outcome: &Outcome) -> bool {
    outcome.verdict == Verdict::TooManyBuckets
}

/// Reads a reply as all that this module reads.
#[cfg(test)]
pub(super) fn read_anything(reply: &Value) {
    Answer::read(reply);
    script::scored_names(reply.clone());
}
