//! Leases in Redis: the calls of `lua/lease.lua` and `lua/parent.lua`. What goes to them and what
//! they reply is in `packed`.

use std::time::Duration;

use redis::{Cmd, Value};
use smallvec::SmallVec;

use super::keys::{RENEWAL, ResourceKeys, ServerKeys};
use super::lane::Manner;
use super::script::{self, Scripted};
use super::{RedisStore, StoreError, To};
use crate::domain::lease::{Holder, ParentLease, Totals};
use crate::domain::time::{ManualClock, Micros};
use crate::metrics::{Corrupt, StoreMetrics};
use crate::store::{
    AT_ONCE, Demand, Grants, LeaseAsk, LeaseStore, LeaseView, Listing, freeze_number,
};

mod packed;

#[cfg(test)]
pub(super) use packed::read_anything;
use packed::{
    bytes, demand, encode_bands, field, grant, no_more, packed, parent_lease, rule, totals, view,
};

/// The number on the wire to the scripts of "by the parent's rule".
const PARENTS_RULE: f64 = 4.0;

/// What `lua/parent.lua` replies where what is stored makes no sense.
const CORRUPT: i64 = 2;

/// Holders of one resource that one command reads.
const PAGE: usize = 128;

/// What the script is to do.
#[derive(Clone, Copy)]
enum Operation {
    Ask,
    Release,
    Drop,
}

/// A call of `lua/lease.lua`, at that time (`None`: Redis' own).
fn call(
    operation: Operation,
    resource: &str,
    numbers: [f64; 8],
    holder: &[u8],
    bands: &[u8],
    from_parent: bool,
    (now, to): (Option<Micros>, To<'_>),
) -> Cmd {
    let keys = ResourceKeys::new(resource);
    let [rule, capacity, lease, learning, wants, claimed, claim_expiry, learn_for] = numbers;
    let numbers = packed([
        operation as u8 as f64,
        rule,
        capacity,
        lease,
        learning,
        wants,
        claimed,
        claim_expiry,
        learn_for,
        f64::from(u8::from(from_parent)),
        now.map_or(0.0, |now| now.0 as f64),
        to.server.known.inherited() as f64,
        to.server.known.last() as f64,
    ]);
    let declared = match to.manner {
        Manner::Asking => 1,
        _ if from_parent => 4,
        _ => 3,
    };
    let keys = [keys.holders, keys.by_wants, keys.by_expiry, keys.upstream];
    let mut cmd = Scripted::Lease.call(declared);
    cmd.arg(&keys[..declared]);
    cmd.arg(numbers).arg(holder).arg(bands).arg(resource);
    cmd.arg(&*to.server.birth).arg(&*to.server.resources);
    cmd.arg(&keys[declared..]);
    cmd
}

fn ask(ask: &LeaseAsk<'_>, now: Option<Micros>, to: To<'_>) -> Cmd {
    let (rules, wish) = (&ask.rules, &ask.wish);
    let (claimed, claim_expiry) =
        wish.claim.map_or((0.0, 0.0), |claim| (claim.capacity, claim.expiry_s as f64));
    let numbers = [
        rules.kind.map_or(PARENTS_RULE, rule),
        rules.capacity,
        rules.lease_s as f64,
        rules.learning_s as f64,
        wish.bands.iter().map(|band| band.wants).sum(),
        claimed,
        claim_expiry,
        wish.learn_for_us as f64,
    ];
    let bands = encode_bands(wish.bands);
    let holder = field(wish.holder);
    call(Operation::Ask, ask.resource, numbers, &holder, &bands, rules.from_parent, (now, to))
}

/// A call that needs no numbers.
fn other(
    operation: Operation,
    resource: &str,
    holder: &[u8],
    now: Option<Micros>,
    to: To<'_>,
) -> Cmd {
    call(operation, resource, [0.0; 8], holder, b"", false, (now, to))
}

/// What a command that reads several replies; where something of another type stands, there is
/// nothing.
fn list(reply: Value) -> Result<Vec<Value>, StoreError> {
    match reply {
        Value::Array(items) => Ok(items),
        Value::Nil => Ok(Vec::new()),
        _ => Err(StoreError::Refused),
    }
}

fn cmd(name: &str, key: impl redis::ToRedisArgs) -> Cmd {
    let mut cmd = redis::cmd(name);
    cmd.arg(key);
    cmd
}

impl RedisStore {
    fn metrics(&self) -> &StoreMetrics {
        self.0.connector.health().metrics()
    }

    fn manual_now(&self) -> Option<Micros> {
        self.0.clock.as_ref().map(ManualClock::now)
    }

    /// The slot of a resource.
    fn slot(&self, resource: &str) -> u16 {
        let routes = self.0.router.routes(&self.0.connector);
        routes.slot(&ResourceKeys::new(resource).holders)
    }

    /// What one command replies that is about a resource, or about another key in that slot.
    async fn value(
        &self,
        slot: u16,
        script: Option<Scripted>,
        cmd: impl Fn(To<'_>) -> Cmd,
    ) -> Result<Value, StoreError> {
        let mut replies = self.0.values(&[slot], script, |_, to| cmd(to)).await;
        replies.pop().unwrap_or(Err(StoreError::Unreachable))
    }

    async fn parent(
        &self,
        resource: &str,
        operation: &str,
        argument: &[u8],
        number: u64,
    ) -> Result<Value, StoreError> {
        let keys = ResourceKeys::new(resource);
        let mut cmd = Scripted::Parent.call(2);
        cmd.arg(keys.holders).arg(keys.upstream).arg(operation).arg(argument);
        cmd.arg(self.manual_now().map_or(0, |now| now.0)).arg(&number.to_le_bytes());
        self.value(self.slot(resource), Some(Scripted::Parent), |_| cmd.clone()).await
    }
}

impl LeaseStore for RedisStore {
    async fn lease(&self, asks: &[LeaseAsk<'_>]) -> Grants {
        let now = self.manual_now();
        let slots: SmallVec<[u16; 4]> = asks.iter().map(|one| self.slot(one.resource)).collect();
        let cmd = |at: usize, to: To<'_>| ask(&asks[at], now, to);
        // Those of one resource are not to keep out those of others.
        let owner = |at: usize| self.0.owner_named(asks[at].resource);
        let replies = self.0.values_of(owner, &slots, Some(Scripted::Lease), cmd).await;
        let read = |reply: Result<Value, StoreError>| {
            let (grant, corrupt) = grant(&reply?).ok_or(StoreError::Refused)?;
            corrupt.into_iter().for_each(|kind| self.metrics().corrupt(kind, 1));
            Ok(grant)
        };
        replies.into_iter().map(read).collect()
    }

    async fn release(&self, holder: Holder<'_>, resources: &[&str]) -> Result<(), StoreError> {
        let (now, holder) = (self.manual_now(), field(holder));
        for page in resources.chunks(AT_ONCE) {
            let slots: Vec<u16> = page.iter().map(|resource| self.slot(resource)).collect();
            let cmd = |at: usize, to: To<'_>| other(Operation::Release, page[at], &holder, now, to);
            let owner = |at: usize| self.0.owner_named(page[at]);
            let replies = self.0.values_of(owner, &slots, Some(Scripted::Lease), cmd).await;
            for reply in replies {
                reply?;
            }
        }
        Ok(())
    }

    async fn resource_names(&self, most: usize) -> Result<Listing<String>, StoreError> {
        // In the order of names: in that of their ages it would be others each time.
        let range = |server: &ServerKeys| {
            let mut range = cmd("ZRANGE", &*server.resources);
            range.arg(0).arg(-1);
            range
        };
        let mut names = Vec::new();
        for reply in self.0.of_each(range).await? {
            let of_one = list(reply)?;
            let of_one = of_one.iter().filter_map(bytes);
            names.extend(of_one.map(|name| String::from_utf8_lossy(name).into_owned()));
        }
        names.sort_unstable();
        // A slot that has moved may have left the names of its resources behind.
        names.dedup();
        let left_out = names.len().saturating_sub(most) as u64;
        names.truncate(most);
        Ok(Listing { items: names, left_out })
    }

    async fn resources(&self, most: usize) -> Result<Listing<(String, Totals)>, StoreError> {
        let Listing { items: names, left_out } = self.resource_names(most).await?;
        let mut items = Vec::with_capacity(names.len());
        for page in names.chunks(AT_ONCE / 2) {
            let read = |at: usize, _: To<'_>| {
                let keys = ResourceKeys::new(&page[at / 2]);
                let key = if at.is_multiple_of(2) { keys.holders } else { keys.upstream };
                let mut get = cmd("HGET", key);
                get.arg("");
                get
            };
            let slots: Vec<u16> = page.iter().flat_map(|name| [self.slot(name); 2]).collect();
            // Nobody's, all of them would count as a flood while others ask.
            let owner = |at: usize| self.0.owner_named(&page[at / 2]);
            let replies = self.0.values_of(owner, &slots, None, read).await;
            for (name, found) in page.iter().zip(replies.chunks_exact(2)) {
                let [sums, parent] = found else { continue };
                let (sums, parent) =
                    (sums.as_ref().map_err(|e| *e)?, parent.as_ref().map_err(|e| *e)?);
                // It may have lost its last holder since its name was read.
                if let Some(totals) = bytes(sums).and_then(totals) {
                    let parent = bytes(parent).and_then(parent_lease);
                    items.push((name.clone(), Totals { parent, ..totals }));
                }
            }
        }
        Ok(Listing { items, left_out })
    }

    async fn leases(
        &self,
        resource: &str,
        most: usize,
    ) -> Result<Option<(Totals, Listing<LeaseView>)>, StoreError> {
        let keys = ResourceKeys::new(resource);
        let mut sums = cmd("HGET", &keys.holders);
        sums.arg("");
        let mut parent = cmd("HGET", &keys.upstream);
        parent.arg("");
        let slot = self.slot(resource);
        let reads = [sums, parent];
        let replies = self.0.values(&[slot; 2], None, |at, _| reads[at].clone()).await;
        let replies: Vec<Value> = replies.into_iter().collect::<Result<_, _>>()?;
        let [sums, parent] = replies.as_slice() else { return Err(StoreError::Refused) };
        let sums = bytes(sums).unwrap_or_default();
        let Some(totals) = totals(sums) else { return Ok(None) };
        let totals = Totals { parent: bytes(parent).and_then(parent_lease), ..totals };
        let mut ids = cmd("ZRANGE", &keys.by_expiry);
        let first = no_more(sums);
        ids.arg(first).arg(first.saturating_add(most).saturating_sub(1));
        let ids = list(self.value(slot, None, |_| ids.clone()).await?)?;
        let ids: Vec<&[u8]> = ids.iter().filter_map(bytes).collect();
        let mut items = Vec::with_capacity(ids.len());
        for page in ids.chunks(PAGE) {
            let mut read = cmd("HMGET", &keys.holders);
            page.iter().for_each(|id| {
                read.arg(*id);
            });
            let found = list(self.value(slot, None, |_| read.clone()).await?)?;
            let held = page.iter().zip(&found);
            items.extend(held.filter_map(|(id, value)| view(id, bytes(value)?)));
        }
        let left_out = totals.holders.saturating_sub(items.len() as u64);
        Ok(Some((totals, Listing { items, left_out })))
    }

    async fn born(&self) -> Result<Option<Micros>, StoreError> {
        let number = |reply: &Value| std::str::from_utf8(bytes(reply)?).ok()?.parse().ok();
        let replies = self.0.of_each(|server| cmd("GET", &*server.birth)).await?;
        // What one server has forgotten, the store has.
        Ok(replies.iter().filter_map(number).max().map(Micros))
    }

    async fn take_renewal(&self, node: &str, time: Duration) -> Result<bool, StoreError> {
        // One that is held already is prolonged, in one step with looking whose it is.
        let take = script::renewal(node, time.as_millis() as u64);
        let slot = self.0.router.routes(&self.0.connector).slot(RENEWAL.as_bytes());
        match self.value(slot, None, |_| take.clone()).await? {
            Value::Int(taken @ (0 | 1)) => Ok(taken == 1),
            Value::Int(2) => {
                self.metrics().corrupt(Corrupt::Server, 1);
                Ok(true)
            }
            _ => Err(StoreError::Refused),
        }
    }

    async fn freeze(&self, resource: &str, time: Duration) -> Result<Option<Demand>, StoreError> {
        let now = self.manual_now();
        let drop = |to: To<'_>| other(Operation::Drop, resource, b"", now, to);
        self.value(self.slot(resource), Some(Scripted::Lease), drop).await?;
        let (time, number) = (time.as_micros().to_string(), freeze_number());
        match self.parent(resource, "freeze", time.as_bytes(), number).await? {
            Value::Nil => Ok(None),
            // Somebody may hold leases that the store knows nothing of any more. That the parent
            // has heard of none must not make it take the cluster's back.
            Value::Int(CORRUPT) => Ok(Some(Demand { number, ..Demand::default() })),
            reply => demand(&reply, number).map(Some).ok_or(StoreError::Refused),
        }
    }

    async fn thaw(
        &self,
        resource: &str,
        number: u64,
        lease: Option<ParentLease>,
    ) -> Result<(), StoreError> {
        let Some(lease) = lease else {
            return self.parent(resource, "keep", b"", number).await.map(|_| ());
        };
        let lease = packed([
            lease.capacity,
            lease.expiry_s as f64,
            lease.refresh_s as f64,
            lease.safe_capacity,
            rule(lease.kind),
            lease.lease_s as f64,
        ]);
        self.parent(resource, "thaw", &lease, number).await.map(|_| ())
    }
}
