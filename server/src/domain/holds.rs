//! Copies of a resource that domains hold. The state of one resource, and its operations.
//!
//! Holds belong to sessions. A session that no call has named for its time to live is over: the next calls
//! on the resource free what it held. Names are chosen by the caller, so that every call may be made
//! again. `lua/holds.lua` mirrors this.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use hashbrown::HashMap;

/// The most copies that can be held of a resource: with fewer, doubles are exact.
pub const MAX_HELD: u64 = 1_000_000_000_000_000;

/// The most bytes of the holds of a session, which is freed at once, and listed at once. The lists that many
/// calls ask for come in one reply, of at most 4 MiB.
pub const MAX_SESSION_BYTES: u64 = 30_000;

/// The bytes of a hold in a list, without its name, its domain and its groups.
const HOLD_BYTES: usize = 40;

/// A list has no more sessions once they have so many bytes.
const LIST_BYTES: u64 = 500_000;

/// The bytes of a session in a list, without its holds.
const SESSION_BYTES: u64 = 200;

/// How many sessions and counts of what they hold one call frees before it begins with no further session. A backlog is left
/// to the next calls, so that no call takes long.
const FREE_LIMIT: usize = 100;

/// A group that a domain is in, and its limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupLimit<'a> {
    /// The name of the group, of at most 128 bytes.
    pub name: &'a str,
    /// The most copies that its domains may hold; `None`: no limit.
    pub limit: Option<u64>,
}

/// What limits a new hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HoldLimits<'a> {
    /// The most copies that the domain may hold; `None`: no limit.
    pub domain: Option<u64>,
    /// The groups that the domain is in. A hold counts in all of them until it ends, whatever groups the
    /// domain is in by then.
    pub groups: &'a [GroupLimit<'a>],
    /// The most copies that all domains may hold; `None`: no limit.
    pub global: Option<u64>,
    /// The bounds on names.
    pub bounds: HoldBounds,
    /// Whether the limits on copies are enforced. If not, all copies are granted.
    pub enforced: bool,
}

/// What bounds the names of holds and sessions, which clients choose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HoldBounds {
    /// The most holds on the resource; `None`: no limit.
    pub max_holds: Option<u64>,
    /// Whether a session must exist already, to have a hold.
    pub known_only: bool,
}

/// A hold to move to another session.
#[derive(Clone, Copy, Debug)]
pub struct Transfer<'a> {
    /// The session.
    pub session: &'a str,
    /// The name of the hold, in both sessions.
    pub hold: &'a str,
    /// The most copies to move; `None`: all.
    pub copies: Option<u64>,
    /// The other session; it begins if there is none.
    pub to_session: &'a str,
    /// How long the other session lives without a call, in milliseconds.
    pub ttl_ms: i64,
}

/// What became of a [`Transfer`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transferred {
    /// The other session has a hold of this name, with so many copies. Nothing moves if it had one before.
    Copies(u64),
    /// There are too many holds, or too many sessions.
    TooMany,
    /// Neither session has a hold of this name.
    NoSuchHold,
    /// The other session has a hold of this name for another domain.
    OtherDomain,
}

impl HoldBounds {
    /// Whether there can be no more holds than these.
    fn are_met(&self, holds: u64) -> bool {
        self.max_holds.is_some_and(|max| holds >= max)
    }
}

/// A hold to make.
#[derive(Clone, Copy, Debug)]
pub struct NewHold<'a> {
    /// The session; it begins if there is none.
    pub session: &'a str,
    /// How long the session lives without a call, in milliseconds.
    pub ttl_ms: i64,
    /// The name of the hold.
    pub hold: &'a str,
    /// Whom it is for.
    pub domain: &'a str,
    /// The most copies.
    pub copies: u64,
    /// The least copies, from 1 to `copies`.
    pub min_copies: u64,
}

/// What became of a [`NewHold`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reservation {
    /// The result.
    pub outcome: HoldOutcome,
    /// The copies that the hold has; 0: there is no hold.
    pub granted: u64,
    /// The copies that enforced limits grant a new hold; 0 if fewer than the least.
    pub allowed: u64,
    /// The copies that the domain holds.
    pub domain_held: u64,
    /// The copies that each group of the domain holds, in the order of the limits.
    pub groups_held: Vec<u64>,
    /// The copies that all domains hold.
    pub all_held: u64,
    /// Whether there are sessions to free that are over.
    pub has_backlog: bool,
}

/// The copies that a limit leaves room for.
pub fn room(limit: Option<u64>, held: u64) -> u64 {
    limit.unwrap_or(MAX_HELD).saturating_sub(held)
}

impl Reservation {
    /// What comes of a new hold where so much is held, and names have no bounds.
    pub fn decide(self, new: &NewHold<'_>, limits: &HoldLimits<'_>) -> Self {
        let allowed = self.allowed(new, limits);
        let granted = if limits.enforced { allowed } else { self.most(new) };
        if granted < new.min_copies {
            return Self { outcome: HoldOutcome::NoRoom, allowed, ..self };
        }
        Self {
            outcome: HoldOutcome::Made,
            granted,
            allowed,
            domain_held: self.domain_held + granted,
            groups_held: self.groups_held.into_iter().map(|held| held + granted).collect(),
            all_held: self.all_held + granted,
            ..self
        }
    }

    /// The copies that the limits grant a new hold where so much is held; 0 if fewer than the least.
    fn allowed(&self, new: &NewHold<'_>, limits: &HoldLimits<'_>) -> u64 {
        let groups = limits.groups.iter().zip(&self.groups_held);
        let group_room = groups.map(|(group, held)| room(group.limit, *held)).min();
        let allowed = self
            .most(new)
            .min(room(limits.domain, self.domain_held))
            .min(room(limits.global, self.all_held))
            .min(group_room.unwrap_or(MAX_HELD));
        if allowed < new.min_copies { 0 } else { allowed }
    }

    /// The copies that a new hold gets without limits.
    fn most(&self, new: &NewHold<'_>) -> u64 {
        new.copies.min(MAX_HELD.saturating_sub(self.all_held))
    }
}

/// The result of a [`NewHold`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HoldOutcome {
    /// The hold is made.
    #[default]
    Made,
    /// The session had a hold of this name.
    Known,
    /// The limits leave less room than the least number of copies.
    NoRoom,
    /// There are too many holds, or too many sessions.
    TooMany,
    /// The session has a hold of this name for another domain.
    OtherDomain,
}

impl HoldOutcome {
    /// All outcomes, in the order of their numbers in `lua/holds.lua`.
    pub const ALL: [Self; 5] =
        [Self::Made, Self::Known, Self::NoRoom, Self::TooMany, Self::OtherDomain];
}

/// A live session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LiveSession {
    /// Until when it lives without a call, in milliseconds since the epoch.
    pub ends_ms: i64,
    /// Its holds, by name.
    pub holds: Vec<HeldCopies>,
}

/// A hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeldCopies {
    /// The name of the hold.
    pub hold: Box<str>,
    /// Whom it is for.
    pub domain: Box<str>,
    /// The copies; at least 1.
    pub copies: u64,
}

/// The sessions on a resource, and what is held of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HoldList {
    /// The copies that all domains hold. This may count sessions that are over and not yet freed, as all
    /// these counts.
    pub all_held: u64,
    /// The number of holds.
    pub holds: u64,
    /// The copies that each group holds, in the order in which they were asked for.
    pub groups_held: Vec<u64>,
    /// Live sessions by name.
    pub sessions: Vec<(Box<str>, LiveSession)>,
    /// Whether there are more sessions than these.
    pub has_more: bool,
}

/// The holds on one resource. Times are in milliseconds since the epoch.
#[derive(Debug, Default)]
pub struct Holds {
    sessions: HashMap<Arc<str>, Session>,
    /// The sessions by their end.
    by_end: BTreeSet<(i64, Arc<str>)>,
    held: Held,
    holds: u64,
}

/// The copies that are held.
#[derive(Debug, Default, PartialEq, Eq)]
struct Held {
    /// By all domains.
    all: u64,
    /// By each domain, if any.
    domains: HashMap<Box<str>, u64>,
    /// By each group, if any.
    groups: HashMap<Box<str>, u64>,
}

#[derive(Debug, Default)]
struct Session {
    ends_ms: i64,
    ttl_ms: i64,
    /// The bytes of its holds.
    bytes: u64,
    /// By name.
    holds: BTreeMap<Box<str>, Hold>,
}

impl Session {
    fn live(&self) -> LiveSession {
        let holds = self.holds.iter().map(|(name, hold)| HeldCopies {
            hold: name.clone(),
            domain: hold.domain.clone(),
            copies: hold.copies,
        });
        LiveSession { ends_ms: self.ends_ms, holds: holds.collect() }
    }
}

#[derive(Clone, Debug)]
struct Hold {
    domain: Box<str>,
    /// The groups that it counts in.
    groups: Box<[Box<str>]>,
    copies: u64,
}

impl Hold {
    /// The bytes in a list, if it has this name.
    fn bytes(&self, name: &str) -> u64 {
        hold_bytes(name, &self.domain, self.groups.iter().map(|group| &**group))
    }
}

impl Held {
    fn by_domain(&self, domain: &str) -> u64 {
        self.domains.get(domain).copied().unwrap_or_default()
    }

    fn by_group(&self, group: &str) -> u64 {
        self.groups.get(group).copied().unwrap_or_default()
    }

    /// Counts so many copies of a hold.
    fn add(&mut self, hold: &Hold, copies: u64) {
        self.all += copies;
        *self.domains.entry_ref(&*hold.domain).or_default() += copies;
        for group in &hold.groups {
            *self.groups.entry_ref(&**group).or_default() += copies;
        }
    }

    /// Counts so many copies of a hold no more.
    fn remove(&mut self, hold: &Hold, copies: u64) {
        let remove = |counts: &mut HashMap<Box<str>, u64>, name: &str| {
            if let Some(held) = counts.get_mut(name) {
                *held -= copies;
                if *held == 0 {
                    counts.remove(name);
                }
            }
        };
        self.all -= copies;
        remove(&mut self.domains, &hold.domain);
        hold.groups.iter().for_each(|group| remove(&mut self.groups, group));
    }
}

impl Holds {
    /// Makes a hold. Renews the session, except if the hold is for another domain.
    pub fn reserve(&mut self, new: &NewHold<'_>, limits: &HoldLimits, now_ms: i64) -> Reservation {
        let has_backlog = self.free(new.session, now_ms);
        let session = self.sessions.get(new.session);
        let is_known = session.is_some();
        let had = session.and_then(|session| session.holds.get(new.hold));
        let had = had.map(|hold| (hold.copies, *hold.domain == *new.domain));
        let group_names = limits.groups.iter().map(|group| group.name);
        let bytes = hold_bytes(new.hold, new.domain, group_names.clone());
        let session_bytes = bytes + session.map_or(0, |session| session.bytes);
        let domain_held = self.held.by_domain(new.domain);
        let groups_held: Vec<u64> =
            group_names.clone().map(|name| self.held.by_group(name)).collect();
        let answer = Reservation {
            domain_held,
            groups_held,
            all_held: self.held.all,
            has_backlog,
            ..Reservation::default()
        };
        if let Some((copies, is_same_domain)) = had {
            if !is_same_domain {
                return Reservation { outcome: HoldOutcome::OtherDomain, ..answer };
            }
            self.renew(new.session, Some(new.ttl_ms), now_ms);
            return Reservation { outcome: HoldOutcome::Known, granted: copies, ..answer };
        }
        if is_known {
            self.renew(new.session, Some(new.ttl_ms), now_ms);
        }
        if limits.bounds.are_met(self.holds)
            || session_bytes > MAX_SESSION_BYTES
            || (limits.bounds.known_only && !is_known)
        {
            let allowed = answer.allowed(new, limits);
            return Reservation { outcome: HoldOutcome::TooMany, allowed, ..answer };
        }
        let decided = answer.decide(new, limits);
        if decided.granted == 0 {
            return decided;
        }
        if !is_known {
            self.sessions.insert(new.session.into(), Session::default());
            self.renew(new.session, Some(new.ttl_ms), now_ms);
        }
        if let Some(session) = self.sessions.get_mut(new.session) {
            let groups = group_names.map(Into::into).collect();
            let hold = Hold { domain: new.domain.into(), groups, copies: decided.granted };
            self.held.add(&hold, decided.granted);
            session.holds.insert(new.hold.into(), hold);
            session.bytes = session_bytes;
        }
        self.holds += 1;
        decided
    }

    /// Cuts a hold to `keep` copies; 0 ends it. Returns the copies left; 0 if there is no such hold. Renews
    /// the session.
    pub fn release(&mut self, session: &str, hold: &str, keep: u64, now_ms: i64) -> u64 {
        self.free(session, now_ms);
        let Some(kept) = self.sessions.get_mut(session) else { return 0 };
        let mut left = 0;
        if let Entry::Occupied(mut entry) = kept.holds.entry(hold.into()) {
            let had = entry.get().copies;
            left = had.min(keep);
            entry.get_mut().copies = left;
            self.held.remove(entry.get(), had - left);
            if left == 0 {
                kept.bytes -= entry.remove().bytes(hold);
                self.holds -= 1;
            }
        }
        self.renew(session, None, now_ms);
        left
    }

    /// Moves a hold, or copies of it, to another session. It counts for the same domain and in the same groups.
    /// Renews both sessions, except if there is no such hold or it is for another domain.
    pub fn transfer(
        &mut self,
        transfer: &Transfer<'_>,
        bounds: &HoldBounds,
        now_ms: i64,
    ) -> Transferred {
        let Transfer { session, hold, to_session, .. } = *transfer;
        self.free(session, now_ms);
        self.forget_if_over(to_session, now_ms);
        let hold_of = |name| self.sessions.get(name).and_then(|session| session.holds.get(hold));
        let outcome = match (hold_of(session), hold_of(to_session)) {
            (None, None) => return Transferred::NoSuchHold,
            (Some(here), Some(there)) if here.domain != there.domain => {
                return Transferred::OtherDomain;
            }
            (_, Some(there)) => Transferred::Copies(there.copies),
            (Some(here), None) => {
                let copies = transfer.copies.unwrap_or(u64::MAX).min(here.copies);
                let other = self.sessions.get(to_session);
                let other_bytes = here.bytes(hold) + other.map_or(0, |session| session.bytes);
                let is_too_many = (copies < here.copies && bounds.are_met(self.holds))
                    || other_bytes > MAX_SESSION_BYTES
                    || (bounds.known_only && other.is_none());
                match is_too_many {
                    true => Transferred::TooMany,
                    false => {
                        self.move_hold(transfer, copies);
                        Transferred::Copies(copies)
                    }
                }
            }
        };
        self.renew(session, None, now_ms);
        self.renew(to_session, Some(transfer.ttl_ms), now_ms);
        outcome
    }

    fn move_hold(&mut self, transfer: &Transfer<'_>, copies: u64) {
        let Transfer { session, hold, to_session, .. } = *transfer;
        let Some(session) = self.sessions.get_mut(session) else { return };
        let Some(kept) = session.holds.get_mut(hold) else { return };
        let moved = Hold { copies, ..kept.clone() };
        let bytes = moved.bytes(hold);
        if copies < kept.copies {
            kept.copies -= copies;
            self.holds += 1;
        } else {
            session.holds.remove(hold);
            session.bytes -= bytes;
        }
        let other = self.sessions.entry_ref(to_session).or_default();
        other.holds.insert(hold.into(), moved);
        other.bytes += bytes;
    }

    /// Renews a session, with a new time to live if one is given. `None` if it does not live.
    pub fn keep_alive(
        &mut self,
        session: &str,
        ttl_ms: Option<i64>,
        now_ms: i64,
    ) -> Option<LiveSession> {
        self.free(session, now_ms);
        self.renew(session, ttl_ms, now_ms);
        self.sessions.get(session).map(Session::live)
    }

    /// Ends a session. Returns the copies that it held; 0 if it did not live.
    pub fn end_session(&mut self, session: &str, now_ms: i64) -> u64 {
        self.free(session, now_ms);
        self.forget(session).0
    }

    /// Lists the live sessions in the order of their end, those that end first, and what `groups` hold.
    pub fn list(&mut self, groups: &[&str], now_ms: i64) -> HoldList {
        self.free("", now_ms);
        let mut live = self.by_end.iter().filter(|(ends_ms, _)| *ends_ms > now_ms);
        let (mut sessions, mut bytes) = (Vec::new(), 0);
        while bytes < LIST_BYTES
            && let Some((_, name)) = live.next()
        {
            if let Some(session) = self.sessions.get(name) {
                bytes += SESSION_BYTES + session.bytes;
                sessions.push((Box::from(&**name), session.live()));
            }
        }
        HoldList {
            all_held: self.held.all,
            holds: self.holds,
            groups_held: groups.iter().map(|group| self.held.by_group(group)).collect(),
            has_more: live.next().is_some(),
            sessions,
        }
    }

    /// After this time, in milliseconds since the epoch, nothing here matters any more: the end of the last
    /// session; 0 without sessions.
    pub fn until_ms(&self) -> i64 {
        self.by_end.last().map_or(0, |(ends_ms, _)| *ends_ms)
    }

    /// Frees sessions that are over, in the order of their end, and in any case `session` if it is. Returns
    /// whether there are more.
    fn free(&mut self, session: &str, now_ms: i64) -> bool {
        if now_ms > self.until_ms() {
            *self = Self::default();
        }
        let first_over = |holds: &Self| {
            let first = holds.by_end.first().filter(|(ends_ms, _)| *ends_ms <= now_ms);
            first.map(|(_, name)| Arc::clone(name))
        };
        let mut freed = 0;
        while freed < FREE_LIMIT
            && let Some(name) = first_over(self)
        {
            freed += 1 + self.forget(&name).1;
        }
        let has_backlog = first_over(self).is_some();
        self.forget_if_over(session, now_ms);
        has_backlog
    }

    fn forget_if_over(&mut self, session: &str, now_ms: i64) {
        if self.sessions.get(session).is_some_and(|session| session.ends_ms <= now_ms) {
            self.forget(session);
        }
    }

    /// Forgets a session and what it holds: so many copies, in so many counts of domains and groups.
    fn forget(&mut self, session: &str) -> (u64, usize) {
        let Some((name, session)) = self.sessions.remove_entry(session) else { return (0, 0) };
        self.by_end.remove(&(session.ends_ms, name));
        let copies = session.holds.values().map(|hold| hold.copies).sum();
        session.holds.values().for_each(|hold| self.held.remove(hold, hold.copies));
        self.holds -= session.holds.len() as u64;
        (copies, session.holds.values().map(|hold| 1 + hold.groups.len()).sum())
    }

    /// Renews a session, if there is one, with a new time to live if one is given.
    fn renew(&mut self, name: &str, ttl_ms: Option<i64>, now_ms: i64) {
        let Some((name, session)) = self.sessions.get_key_value(name) else { return };
        let (name, before_ms) = (Arc::clone(name), session.ends_ms);
        let ttl_ms = ttl_ms.unwrap_or(session.ttl_ms);
        let ends_ms = now_ms.saturating_add(ttl_ms);
        self.by_end.remove(&(before_ms, Arc::clone(&name)));
        self.by_end.insert((ends_ms, Arc::clone(&name)));
        if let Some(session) = self.sessions.get_mut(&name) {
            (session.ends_ms, session.ttl_ms) = (ends_ms, ttl_ms);
        }
    }
}

/// The bytes of a hold in a list. A group has one byte more than its name.
fn hold_bytes<'a>(hold: &str, domain: &str, groups: impl Iterator<Item = &'a str>) -> u64 {
    let groups: usize = groups.map(|group| group.len() + 1).sum();
    (HOLD_BYTES + hold.len() + domain.len() + groups) as u64
}

#[cfg(test)]
mod tests;
