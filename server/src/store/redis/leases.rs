//! Leases in Redis: the calls of `lua/lease.lua` and `lua/parent.lua`. `packed` encodes their
//! arguments and decodes their replies.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use redis::{Cmd, Value};
use smallvec::SmallVec;
use tokio::time::Instant;

use super::keys::{RENEWAL, ResourceKeys};
use super::lanes::job::SendMode;
use super::wire::script::{self, Scripted};
use super::{NODE_TTL, RedisStore, SHARED, StoreError, Target};
use crate::domain::lease::{Holder, ParentLease, Totals};
use crate::domain::time::{ManualClock, Micros};
use crate::metrics::{Corrupt, StoreMetrics};
use crate::store::members::Member;
use crate::store::redis::owner::Owner;
use crate::store::{
    Cursor, Demand, Grants, LeaseRequest, LeaseStore, LeaseView, Listing, MAX_REQUESTS_PER_CALL,
    Page, freeze_number,
};

mod packed;

#[cfg(test)]
pub(super) use packed::read_anything;
use packed::{
    algorithm_number, bytes, demand, encode_bands, ghosts, grant, holder_field, packed,
    parent_lease, totals, view,
};

/// The number that the scripts have for "the parent's algorithm".
const PARENTS_ALGORITHM: f64 = 4.0;

/// The reply of `lua/parent.lua` if the stored state is corrupt.
const CORRUPT: i64 = 2;

/// Groups of owners in the queues: of lease requests, of releases, and of lists. They differ from all
/// namespaces, which have no space in their names.
const LEASES: &str = "leases of";
const RELEASES: &str = "given back";
const LISTS: &str = "lists of resources";

/// About how many names of resources one command reads.
const NAMES_PAGE: usize = 500;

/// The most holders of a resource that one command reads.
const PAGE: usize = 128;

/// The operation of a call.
#[derive(Clone, Copy)]
enum Operation {
    Ask,
    Release,
    /// Drops expired leases only.
    Drop,
}

/// The numbers of a request, as `lua/lease.lua` describes them. All zero for other operations.
#[derive(Clone, Copy, Default)]
struct Numbers {
    algorithm: f64,
    capacity: f64,
    lease_s: f64,
    learning_s: f64,
    wants: f64,
    claimed: f64,
    claim_expiry_s: f64,
    learn_for_us: f64,
    existing_only: bool,
}

/// A call of `lua/lease.lua` at the time `now` (`None`: the server's own). The lane adds the last
/// argument: how many expired leases of others the call may drop.
struct LeaseCall<'a> {
    operation: Operation,
    resource: &'a str,
    numbers: Numbers,
    /// See [`holder_field`].
    holder: &'a [u8],
    /// See [`encode_bands`].
    bands: &'a [u8],
    from_parent: bool,
    now: Option<Micros>,
}

impl<'a> LeaseCall<'a> {
    /// A call that needs no numbers.
    fn without_numbers(
        operation: Operation,
        resource: &'a str,
        holder: &'a [u8],
        now: Option<Micros>,
    ) -> Self {
        let numbers = Numbers::default();
        Self { operation, resource, numbers, holder, bands: b"", from_parent: false, now }
    }

    fn cmd(&self, target: Target<'_>) -> Cmd {
        let (numbers, server) = (&self.numbers, target.server);
        let numbers = packed([
            self.operation as u8 as f64,
            numbers.algorithm,
            numbers.capacity,
            numbers.lease_s,
            numbers.learning_s,
            numbers.wants,
            numbers.claimed,
            numbers.claim_expiry_s,
            numbers.learn_for_us,
            f64::from(u8::from(self.from_parent)),
            self.now.map_or(0.0, |now| now.0 as f64),
            server.birth_seen.inherited() as f64,
            server.birth_seen.last() as f64,
            f64::from(u8::from(numbers.existing_only)),
        ]);
        let declared = match target.mode {
            SendMode::Asking => 1,
            _ if self.from_parent => 4,
            _ => 3,
        };
        let keys = ResourceKeys::new(self.resource);
        let keys = [keys.holders, keys.by_wants, keys.by_expiry, keys.upstream];
        let mut cmd = Scripted::Lease.call(declared);
        cmd.arg(&keys[..declared]);
        cmd.arg(numbers).arg(self.holder).arg(self.bands).arg(self.resource);
        cmd.arg(&*server.birth).arg(&*server.resources);
        cmd.arg(&keys[declared..]);
        cmd
    }
}

fn ask(ask: &LeaseRequest<'_>, now: Option<Micros>, target: Target<'_>) -> Cmd {
    let (rules, request) = (&ask.rules, &ask.holder_request);
    let (claimed, claim_expiry_s) =
        request.claim.map_or((0.0, 0.0), |claim| (claim.capacity, claim.expiry_s as f64));
    let call = LeaseCall {
        operation: Operation::Ask,
        resource: ask.resource,
        numbers: Numbers {
            algorithm: rules.algorithm.map_or(PARENTS_ALGORITHM, algorithm_number),
            capacity: rules.capacity,
            lease_s: rules.lease_s as f64,
            learning_s: rules.learning_s as f64,
            wants: request.bands.iter().map(|band| band.wants).sum(),
            claimed,
            claim_expiry_s,
            learn_for_us: request.learn_for_us as f64,
            existing_only: ask.existing_only,
        },
        holder: &holder_field(request.holder),
        bands: &encode_bands(request.bands),
        from_parent: rules.from_parent,
        now,
    };
    call.cmd(target)
}

/// The items of a list reply; none if the key does not exist.
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
    pub(super) fn metrics(&self) -> &StoreMetrics {
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

    /// The owners of requests in the queues: a caller within the template, or for an unnamed caller
    /// the first resource of the call. All new resources of a template count as one owner.
    fn note_owners(&self, asks: &[LeaseRequest<'_>]) -> SmallVec<[Owner; 4]> {
        let now = Instant::now();
        let first = asks.first().map_or("", |ask| ask.resource);
        let owner = |ask: &LeaseRequest<'_>| {
            let group = self.0.hash((LEASES, ask.template));
            let member = match ask.caller {
                Some(caller) => caller.number(),
                None => match self.0.note_member((LEASES, ask.resource), now) {
                    SHARED => SHARED,
                    _ => self.0.hash((LEASES, first)),
                },
            };
            Owner { group, member }
        };
        asks.iter().map(owner).collect()
    }

    /// The reply to one command about keys in a slot.
    async fn value(
        &self,
        slot: u16,
        script: Option<Scripted>,
        cmd: impl Fn(Target<'_>) -> Cmd,
    ) -> Result<Value, StoreError> {
        let mut replies = self.0.values(&[slot], script, |_, target| cmd(target)).await;
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

    /// Some resource names of one server, unordered.
    async fn names_page(&self, from: Cursor) -> Result<Page<String>, StoreError> {
        let servers = self.0.router.routes(&self.0.connector).one_of_each();
        // All lists are one owner, so that they can't crowd out requests.
        let owner = Owner { group: self.0.hash(LISTS), member: SHARED };
        let Some(&slot) = servers.get(from.part) else {
            return if from.part == 0 { Err(StoreError::Unreachable) } else { Ok((vec![], None)) };
        };
        let scan = |_: usize, target: Target<'_>| {
            let mut scan = cmd("ZSCAN", &*target.server.resources);
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

    /// The totals of resources. Leaves out those that have lost their last holder meanwhile.
    async fn totals_of(&self, names: &[String]) -> Result<Vec<(String, Totals)>, StoreError> {
        let owner = Owner { group: self.0.hash(LISTS), member: SHARED };
        let mut items = Vec::with_capacity(names.len());
        for page in names.chunks(MAX_REQUESTS_PER_CALL / 2) {
            let read = |at: usize, _: Target<'_>| {
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
        let cmd = |at: usize, target: Target<'_>| ask(&asks[at], now, target);
        let owners = self.note_owners(asks);
        let replies = self.0.values_of(|at| owners[at], &slots, Some(Scripted::Lease), cmd).await;
        let read = |reply: Result<Value, StoreError>| {
            let (grant, corrupt) = grant(&reply?).ok_or(StoreError::Refused)?;
            corrupt.into_iter().for_each(|kind| self.metrics().corrupt(kind, 1));
            Ok(grant)
        };
        replies.into_iter().map(read).collect()
    }

    async fn release(&self, holder: Holder<'_>, resources: &[&str]) -> Result<(), StoreError> {
        let (now, holder) = (self.manual_now(), holder_field(holder));
        for page in resources.chunks(MAX_REQUESTS_PER_CALL) {
            let slots: Vec<u16> = page.iter().map(|resource| self.slot(resource)).collect();
            let cmd = |at: usize, target: Target<'_>| {
                LeaseCall::without_numbers(Operation::Release, page[at], &holder, now).cmd(target)
            };
            let owner = Owner { group: self.0.hash(RELEASES), member: self.0.hash(&holder) };
            let replies = self.0.values_of(|_| owner, &slots, Some(Scripted::Lease), cmd).await;
            for reply in replies {
                reply?;
            }
        }
        Ok(())
    }

    async fn resource_names(&self, most: usize) -> Result<Listing<String>, StoreError> {
        // The first ones by name, so that each call lists the same ones.
        let (mut first, mut next) = (BTreeSet::new(), Some(Cursor::default()));
        while let Some(from) = next {
            let (names, after) = self.names_page(from).await?;
            for name in names {
                // After a slot has moved, two servers may list its resources: a set drops duplicates.
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
        // Duplicates count twice in `all`.
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
        let first = ghosts(sums);
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
        // If one server has lost its state, the store counts as born then.
        Ok(replies.iter().filter_map(number).max().map(Micros))
    }

    async fn members(&self, most: usize) -> Result<Vec<Member>, StoreError> {
        let inner = &self.0;
        let slots = inner.router.routes(&inner.connector).one_of_each();
        let list = |_, target: Target<'_>| script::members(target.server, most);
        let replies = inner.values(&slots, None, list).await;
        let mut members = BTreeMap::<String, Member>::new();
        let mut failure = Some(StoreError::Unreachable);
        // Each server knows all nodes that reach it, so one that is down hides none.
        for reply in replies {
            let listed = reply.and_then(|reply| {
                script::read_members_reply(&reply, NODE_TTL).ok_or(StoreError::Refused)
            });
            match listed {
                Ok(listed) => {
                    failure = None;
                    for member in listed {
                        let known = members.get(&member.name);
                        if known.is_none_or(|known| member.silent < known.silent) {
                            members.insert(member.name.clone(), member);
                        }
                    }
                }
                Err(error) => failure = failure.map(|_| error),
            }
        }
        failure.map_or_else(|| Ok(members.into_values().collect()), Err)
    }

    async fn take_renewal(&self, node: &str, time: Duration) -> Result<bool, StoreError> {
        // The script checks and extends in one step.
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
        let drop = LeaseCall::without_numbers(Operation::Drop, resource, b"", now);
        self.value(self.slot(resource), Some(Scripted::Lease), |target| drop.cmd(target)).await?;
        let (time, number) = (time.as_micros().to_string(), freeze_number());
        match self.parent(resource, "freeze", time.as_bytes(), number).await? {
            Value::Nil => Ok(None),
            // The cluster's clients may hold leases that the store has lost, so the parent must not
            // take the cluster's own lease back.
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
            algorithm_number(lease.algorithm),
            lease.lease_s as f64,
        ]);
        self.parent(resource, "thaw", &lease, number).await.map(|_| ())
    }
}
