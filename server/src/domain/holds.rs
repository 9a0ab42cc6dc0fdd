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

/// The bytes of a hold in a list, without its name and its domain.
const HOLD_BYTES: usize = 40;

/// How many sessions and holds one call frees before it begins with no further session. A backlog is left
/// to the next calls, so that no call takes long.
const FREE_LIMIT: usize = 100;

/// What limits a new hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HoldLimits {
    /// The most copies that the domain may hold; `None`: no limit.
    pub domain: Option<u64>,
    /// The most copies that all domains may hold; `None`: no limit.
    pub global: Option<u64>,
    /// The most holds on the resource; `None`: no limit.
    pub max_holds: Option<u64>,
    /// Whether a session must exist already.
    pub known_only: bool,
    /// Whether the limits on copies are enforced. If not, all copies are granted.
    pub enforced: bool,
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
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reservation {
    /// The result.
    pub outcome: HoldOutcome,
    /// The copies that the hold has; 0: there is no hold.
    pub granted: u64,
    /// The copies that enforced limits grant a new hold; 0 if fewer than the least.
    pub allowed: u64,
    /// The copies that the domain holds.
    pub domain_held: u64,
    /// The copies that all domains hold.
    pub all_held: u64,
    /// Whether there are sessions to free that are over.
    pub has_backlog: bool,
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

/// The holds on one resource. Times are in milliseconds since the epoch.
#[derive(Debug, Default)]
pub struct Holds {
    sessions: HashMap<Arc<str>, Session>,
    /// The sessions by their end.
    by_end: BTreeSet<(i64, Arc<str>)>,
    /// The copies that each domain holds, if any.
    domains: HashMap<Box<str>, u64>,
    /// The copies that all domains hold.
    copies: u64,
    holds: u64,
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

#[derive(Debug)]
struct Hold {
    domain: Box<str>,
    copies: u64,
}

impl Holds {
    /// Makes a hold. Renews the session, except if the hold is for another domain.
    pub fn reserve(&mut self, new: &NewHold<'_>, limits: &HoldLimits, now_ms: i64) -> Reservation {
        let has_backlog = self.free(new.session, now_ms);
        let session = self.sessions.get(new.session);
        let is_known = session.is_some();
        let had = session.and_then(|session| session.holds.get(new.hold));
        let had = had.map(|hold| (hold.copies, *hold.domain == *new.domain));
        let bytes = hold_bytes(new.hold, new.domain);
        let session_bytes = bytes + session.map_or(0, |session| session.bytes);
        let domain_held = self.domains.get(new.domain).copied().unwrap_or_default();
        let answer = Reservation {
            domain_held,
            all_held: self.copies,
            has_backlog,
            ..Reservation::default()
        };
        if let Some((copies, is_same_domain)) = had {
            if !is_same_domain {
                return Reservation { outcome: HoldOutcome::OtherDomain, ..answer };
            }
            self.renew(new.session, new.ttl_ms, now_ms);
            return Reservation { outcome: HoldOutcome::Known, granted: copies, ..answer };
        }
        if is_known {
            self.renew(new.session, new.ttl_ms, now_ms);
        }
        let room = |limit: Option<u64>, held| limit.unwrap_or(MAX_HELD).saturating_sub(held);
        let most = new.copies.min(MAX_HELD.saturating_sub(self.copies));
        let allowed =
            most.min(room(limits.domain, domain_held)).min(room(limits.global, self.copies));
        let allowed = if allowed < new.min_copies { 0 } else { allowed };
        let granted = if limits.enforced { allowed } else { most };
        let answer = Reservation { allowed, ..answer };
        if limits.max_holds.is_some_and(|max| self.holds >= max)
            || session_bytes > MAX_SESSION_BYTES
            || (limits.known_only && !is_known)
        {
            return Reservation { outcome: HoldOutcome::TooMany, ..answer };
        }
        if granted < new.min_copies {
            return Reservation { outcome: HoldOutcome::NoRoom, ..answer };
        }
        if !is_known {
            self.sessions.insert(new.session.into(), Session::default());
            self.renew(new.session, new.ttl_ms, now_ms);
        }
        if let Some(session) = self.sessions.get_mut(new.session) {
            let hold = Hold { domain: new.domain.into(), copies: granted };
            session.holds.insert(new.hold.into(), hold);
            session.bytes = session_bytes;
        }
        self.holds += 1;
        self.copies += granted;
        *self.domains.entry_ref(new.domain).or_default() += granted;
        Reservation { granted, domain_held: domain_held + granted, all_held: self.copies, ..answer }
    }

    /// Cuts a hold to `keep` copies; 0 ends it. Returns the copies left; 0 if there is no such hold. Renews
    /// the session.
    pub fn release(&mut self, session: &str, hold: &str, keep: u64, now_ms: i64) -> u64 {
        self.free(session, now_ms);
        let Some(kept) = self.sessions.get_mut(session) else { return 0 };
        let ttl_ms = kept.ttl_ms;
        let mut left = 0;
        let mut released = None;
        if let Entry::Occupied(mut entry) = kept.holds.entry(hold.into()) {
            let had = entry.get().copies;
            left = had.min(keep);
            entry.get_mut().copies = left;
            released = Some((entry.get().domain.clone(), had - left));
            if left == 0 {
                kept.bytes -= hold_bytes(hold, &entry.remove().domain);
                self.holds -= 1;
            }
        }
        if let Some((domain, copies)) = released {
            self.give_back(&domain, copies);
        }
        self.renew(session, ttl_ms, now_ms);
        left
    }

    /// Renews a session, with a new time to live if one is given. `None` if it does not live.
    pub fn keep_alive(
        &mut self,
        session: &str,
        ttl_ms: Option<i64>,
        now_ms: i64,
    ) -> Option<LiveSession> {
        self.free(session, now_ms);
        let ttl_ms = ttl_ms.unwrap_or(self.sessions.get(session)?.ttl_ms);
        self.renew(session, ttl_ms, now_ms);
        let session = self.sessions.get(session)?;
        let holds = session.holds.iter().map(|(name, hold)| HeldCopies {
            hold: name.clone(),
            domain: hold.domain.clone(),
            copies: hold.copies,
        });
        Some(LiveSession { ends_ms: session.ends_ms, holds: holds.collect() })
    }

    /// Ends a session. Returns the copies that it held; 0 if it did not live.
    pub fn end_session(&mut self, session: &str, now_ms: i64) -> u64 {
        self.free(session, now_ms);
        self.forget(session).0
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
        if self.sessions.get(session).is_some_and(|session| session.ends_ms <= now_ms) {
            self.forget(session);
        }
        has_backlog
    }

    /// Forgets a session and what it holds: so many copies, and so many holds.
    fn forget(&mut self, session: &str) -> (u64, usize) {
        let Some((name, session)) = self.sessions.remove_entry(session) else { return (0, 0) };
        self.by_end.remove(&(session.ends_ms, name));
        let copies = session.holds.values().map(|hold| hold.copies).sum();
        for hold in session.holds.values() {
            self.give_back(&hold.domain, hold.copies);
        }
        self.holds -= session.holds.len() as u64;
        (copies, session.holds.len())
    }

    fn give_back(&mut self, domain: &str, copies: u64) {
        self.copies -= copies;
        if let Some(held) = self.domains.get_mut(domain) {
            *held -= copies;
            if *held == 0 {
                self.domains.remove(domain);
            }
        }
    }

    fn renew(&mut self, name: &str, ttl_ms: i64, now_ms: i64) {
        let Some((name, session)) = self.sessions.get_key_value(name) else { return };
        let (name, before_ms) = (Arc::clone(name), session.ends_ms);
        let ends_ms = now_ms.saturating_add(ttl_ms);
        self.by_end.remove(&(before_ms, Arc::clone(&name)));
        self.by_end.insert((ends_ms, Arc::clone(&name)));
        if let Some(session) = self.sessions.get_mut(&name) {
            (session.ends_ms, session.ttl_ms) = (ends_ms, ttl_ms);
        }
    }
}

/// The bytes of a hold in a list.
fn hold_bytes(hold: &str, domain: &str) -> u64 {
    (HOLD_BYTES + hold.len() + domain.len()) as u64
}

#[cfg(test)]
mod tests;
