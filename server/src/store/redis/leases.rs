//! Leases in Redis: the calls of `lua/lease.lua` and `lua/parent.lua`. What goes to them and what
//! they reply is in `packed`.

use std::collections::BTreeSet;
use std::time::Duration;

use redis::{Cmd, Value};
use smallvec::SmallVec;
use tokio::time::Instant;

use super::keys::{RENEWAL, ResourceKeys, ServerKeys};
use super::lane::Manner;
use super::queue::Owner;
use super::script::{self, Scripted};
use super::{RedisStore, SHARED, StoreError, To};
use crate::domain::lease::{Holder, ParentLease, Totals};
use crate::domain::time::{ManualClock, Micros};
use crate::metrics::{Corrupt, StoreMetrics};
use crate::store::{
    Cursor, Demand, Grants, LeaseRequest, LeaseStore, LeaseView, Listing, MAX_REQUESTS_PER_CALL,
    Page, freeze_number,
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

/// The groups that requests for leases, what is given back, and lists are counted for. No namespace
/// has a space in its name.
const LEASES: &str = "leases of";
const RELEASES: &str = "given back";
const LISTS: &str = "lists of resources";

/// About how many names of resources one command reads.
const NAMES_PAGE: usize = 500;

/// Holders of one resource that one command reads.
const PAGE: usize = 128;

/// What the script is to do.
#[derive(Clone, Copy)]
enum Operation {
    Ask,
    Release,
    Drop,
}

/// A call of `lua/lease.lua`, at that time (`None`: Redis' own). The lane adds the last argument:
/// how much work the call may do for others.
fn call(
    operation: Operation,
    resource: &str,
    (numbers, existing_only): ([f64; 8], bool),
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
        f64::from(u8::from(existing_only)),
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

fn ask(ask: &LeaseRequest<'_>, now: Option<Micros>, to: To<'_>) -> Cmd {
    let (rules, request) = (&ask.rules, &ask.holder_request);
    let (claimed, claim_expiry) =
        request.claim.map_or((0.0, 0.0), |claim| (claim.capacity, claim.expiry_s as f64));
    let numbers = [
        rules.algorithm.map_or(PARENTS_RULE, rule),
        rules.capacity,
        rules.lease_s as f64,
        rules.learning_s as f64,
        request.bands.iter().map(|band| band.wants).sum(),
        claimed,
        claim_expiry,
        request.learn_for_us as f64,
    ];
    let bands = encode_bands(request.bands);
    let holder = field(request.holder);
    let numbers = (numbers, ask.existing_only);
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
    call(operation, resource, ([0.0; 8], false), holder, b"", false, (now, to))
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

    /// Whom requests are counted for: a caller of the template, or where the caller has no name, the
    /// first resource of the call. All new resources of a template count as one.
    fn owners(&self, asks: &[LeaseRequest<'_>]) -> SmallVec<[Owner; 4]> {
        let now = Instant::now();
        let first = asks.first().map_or("", |ask| ask.resource);
        let owner = |ask: &LeaseRequest<'_>| {
            let group = self.0.hash((LEASES, ask.template));
            let member = match ask.caller {
                Some(caller) => caller.number(),
                None => match self.0.member((LEASES, ask.resource), now) {
                    SHARED => SHARED,
                    _ => self.0.hash((LEASES, first)),
                },
            };
            Owner { group, member }
        };
        asks.iter().map(owner).collect()
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

impl RedisStore {
    /// Some names of resources of one server, in no order.
    async fn names_page(&self, from: Cursor) -> Result<Page<String>, StoreError> {
        let servers = self.0.router.routes(&self.0.connector).one_of_each();
        // What lists is to be no flood to those who ask.
        let owner = Owner { group: self.0.hash(LISTS), member: SHARED };
        let Some(&slot) = servers.get(from.part) else {
            let none =
                if from.part == 0 { Err(StoreError::Unreachable) } else { Ok((vec![], None)) };
            return none;
        };
        let scan = |_: usize, to: To<'_>| {
            let mut scan = cmd("ZSCAN", &*to.server.resources);
            scan.arg(from.at).arg("COUNT").arg(NAMES_PAGE);
            scan
        };
        let reply = self.0.values_of(|_| owner, &[slot], None, scan).await.pop();
        let reply = list(reply.unwrap_or(Err(StoreError::Unreachable))?)?;
        let (at, names) = match reply.as_slice() {
            [] => (0, Vec::new()),
            [at, Value::Array(pairs)] => {
                let at = std::str::from_utf8(bytes(at).unwrap_or_default());
                let at = at.ok().and_then(|at| at.parse().ok()).ok_or(StoreError::Refused)?;
                let names = pairs.iter().step_by(2).filter_map(bytes);
                (at, names.map(|name| String::from_utf8_lossy(name).into_owned()).collect())
            }
            _ => return Err(StoreError::Refused),
        };
        let next = match at {
            0 => Cursor { part: from.part + 1, at },
            at => Cursor { at, ..from },
        };
        Ok((names, (next.part < servers.len()).then_some(next)))
    }

    /// What resources are like. One may have lost its last holder since its name was read.
    async fn totals_of(&self, names: &[String]) -> Result<Vec<(String, Totals)>, StoreError> {
        let owner = Owner { group: self.0.hash(LISTS), member: SHARED };
        let mut items = Vec::with_capacity(names.len());
        for page in names.chunks(MAX_REQUESTS_PER_CALL / 2) {
            let read = |at: usize, _: To<'_>| {
                let keys = ResourceKeys::new(&page[at / 2]);
                let key = if at.is_multiple_of(2) { keys.holders } else { keys.upstream };
                let mut get = cmd("HGET", key);
                get.arg("");
                get
            };
            let slots: Vec<u16> = page.iter().flat_map(|name| [self.slot(name); 2]).collect();
            let replies = self.0.values_of(|_| owner, &slots, None, read).await;
            for (name, found) in page.iter().zip(replies.chunks_exact(2)) {
                let [sums, parent] = found else { continue };
                let (sums, parent) =
                    (sums.as_ref().map_err(|e| *e)?, parent.as_ref().map_err(|e| *e)?);
                if let Some(totals) = bytes(sums).and_then(totals) {
                    let parent = bytes(parent).and_then(parent_lease);
                    items.push((name.clone(), Totals { parent, ..totals }));
                }
            }
        }
        Ok(items)
    }
}

impl LeaseStore for RedisStore {
    async fn lease(&self, asks: &[LeaseRequest<'_>]) -> Grants {
        let now = self.manual_now();
        let slots: SmallVec<[u16; 4]> = asks.iter().map(|one| self.slot(one.resource)).collect();
        let cmd = |at: usize, to: To<'_>| ask(&asks[at], now, to);
        let owners = self.owners(asks);
        let replies = self.0.values_of(|at| owners[at], &slots, Some(Scripted::Lease), cmd).await;
        let read = |reply: Result<Value, StoreError>| {
            let (grant, corrupt) = grant(&reply?).ok_or(StoreError::Refused)?;
            corrupt.into_iter().for_each(|kind| self.metrics().corrupt(kind, 1));
            Ok(grant)
        };
        replies.into_iter().map(read).collect()
    }

    async fn release(&self, holder: Holder<'_>, resources: &[&str]) -> Result<(), StoreError> {
        let (now, holder) = (self.manual_now(), field(holder));
        for page in resources.chunks(MAX_REQUESTS_PER_CALL) {
            let slots: Vec<u16> = page.iter().map(|resource| self.slot(resource)).collect();
            let cmd = |at: usize, to: To<'_>| other(Operation::Release, page[at], &holder, now, to);
            let owner = Owner { group: self.0.hash(RELEASES), member: self.0.hash(&holder) };
            let replies = self.0.values_of(|_| owner, &slots, Some(Scripted::Lease), cmd).await;
            for reply in replies {
                reply?;
            }
        }
        Ok(())
    }

    async fn resource_names(&self, most: usize) -> Result<Listing<String>, StoreError> {
        // In the order of names: in that of their ages it would be others each time.
        let (mut first, mut next) = (BTreeSet::new(), Some(Cursor::default()));
        while let Some(from) = next {
            let (names, after) = self.names_page(from).await?;
            for name in names {
                // A slot that has moved may have left the names of its resources behind.
                let last = first.last().filter(|_| first.len() >= most);
                if last.is_none_or(|last| name < *last) {
                    first.insert(name);
                    if first.len() > most {
                        first.pop_last();
                    }
                }
            }
            next = after;
        }
        let count = |reply: &Value| if let Value::Int(count) = reply { *count } else { 0 };
        let counts = self.0.of_each(|server| cmd("ZCARD", &*server.resources)).await?;
        let all = counts.iter().map(count).sum::<i64>() as u64;
        let left_out = all.saturating_sub(first.len() as u64);
        // Of one that was told of twice, there is no other.
        let left_out = if first.len() < most { 0 } else { left_out };
        Ok(Listing { items: first.into_iter().collect(), left_out })
    }

    async fn resources(&self, most: usize) -> Result<Listing<(String, Totals)>, StoreError> {
        let Listing { items: names, left_out } = self.resource_names(most).await?;
        Ok(Listing { items: self.totals_of(&names).await?, left_out })
    }

    async fn resources_page(&self, from: Cursor) -> Result<Page<(String, Totals)>, StoreError> {
        let (names, next) = self.names_page(from).await?;
        Ok((self.totals_of(&names).await?, next))
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

    async fn nodes(&self, most: usize) -> Result<Vec<String>, StoreError> {
        let list = |server: &ServerKeys| {
            let mut list = cmd("ZRANGE", &*server.nodes);
            list.arg(0).arg(most.saturating_sub(1));
            list
        };
        let replies = self.0.of_each(list).await?;
        let names = replies.iter().filter_map(Value::as_sequence).flatten();
        let name = |value: &Value| std::str::from_utf8(bytes(value)?).ok().map(str::to_owned);
        // Each server knows all nodes that reach it.
        let names: BTreeSet<String> = names.filter_map(name).collect();
        Ok(names.into_iter().take(most).collect())
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
            rule(lease.algorithm),
            lease.lease_s as f64,
        ]);
        self.parent(resource, "thaw", &lease, number).await.map(|_| ())
    }
}
