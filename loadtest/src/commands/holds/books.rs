//! Books of the copies that clients hold for sure, against the limits of their domains, of groups and
//! of all together.
//!
//! Copies count from when their grant has arrived until they are about to be released, or the session
//! may have ended: its ttl after the last call was sent that renewed it. All that time the node counts
//! them, too, so a sum above its limit is the node's fault. This module reads no clock.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::time::{Duration, Instant};

use serde::Serialize;
use tollgate_server::config::model::HoldTemplate;

use crate::load::keys::Keys;

/// Sums listed in a report.
const REPORTED: usize = 10;

/// Index of the sum over all domains.
const ALL: usize = 0;

/// The store counts in whole milliseconds.
const ROUNDING: Duration = Duration::from_millis(2);

/// The store's clock may be faster than ours by one part in so many.
const CLOCK_DRIFT: u32 = 1000;

/// How long a session surely lives after a call that names it was sent.
pub(super) fn sure_life(ttl: Duration) -> Duration {
    ttl.saturating_sub(ROUNDING + ttl / CLOCK_DRIFT)
}

/// What is held, by session.
#[derive(Debug)]
pub(super) struct HoldBooks {
    template: Option<HoldTemplate>,
    keys: Keys,
    sessions: HashMap<u64, Entry>,
    /// When sessions may end. A session that was renewed has later ends, too.
    ends: BinaryHeap<Reverse<(Instant, u64)>>,
    /// All domains, then the groups, then the domains that have held copies.
    sums: Vec<Sum>,
    /// The sums that a domain counts in, by its number.
    domains: HashMap<u64, Box<[usize]>>,
    /// How often a grant has brought a sum above its limit.
    pub(super) violations: u64,
}

#[derive(Debug)]
struct Entry {
    domain: u64,
    copies: u64,
    until: Instant,
    /// Whether the copies are in the sums.
    counts: bool,
}

#[derive(Debug)]
struct Sum {
    name: Option<(Kind, String)>,
    held: u64,
    most: u64,
    limit: Option<u64>,
}

/// Whose copies a sum has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// All domains.
    All,
    /// A group of domains.
    Group,
    /// One domain.
    Domain,
}

/// The most that a domain, a group or all together held at once.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MostHeld {
    /// Who held it.
    pub of: Kind,
    /// Name of the domain or group; empty for all.
    pub name: String,
    /// Most copies at once.
    pub most_held: u64,
    /// Most copies that the limits allow; `None`: no limit, or none is known.
    pub limit: Option<u64>,
}

impl HoldBooks {
    pub(super) fn new(template: Option<HoldTemplate>, keys: Keys) -> Self {
        let sum = |name, limit| Sum { name, held: 0, most: 0, limit };
        let all = sum(None, template.as_ref().and_then(|template| template.global_limit));
        let groups = template.iter().flat_map(|template| &template.groups);
        let groups =
            groups.map(|group| sum(Some((Kind::Group, group.name.to_string())), group.limit));
        Self {
            sums: std::iter::once(all).chain(groups).collect(),
            template,
            keys,
            sessions: HashMap::new(),
            ends: BinaryHeap::new(),
            domains: HashMap::new(),
            violations: 0,
        }
    }

    /// A session of a domain has got copies, until `until` for sure.
    pub(super) fn begin(
        &mut self,
        session: u64,
        (domain, copies): (u64, u64),
        until: Instant,
        now: Instant,
    ) {
        self.sessions.insert(session, Entry { domain, copies, until, counts: false });
        self.renew(session, until, now);
    }

    /// A session lives until `until` for sure. It may have ended in these books meanwhile, but not in the
    /// node's.
    pub(super) fn renew(&mut self, session: u64, until: Instant, now: Instant) {
        self.expire(now);
        let Some(entry) = self.sessions.get_mut(&session) else { return };
        entry.until = entry.until.max(until);
        self.ends.push(Reverse((entry.until, session)));
        if !entry.counts && entry.until > now {
            entry.counts = true;
            let (domain, copies) = (entry.domain, entry.copies);
            self.add(domain, copies);
        }
    }

    /// A session is about to release its copies, or has lost them. Returns whether it held them for sure
    /// until now.
    pub(super) fn end(&mut self, session: u64, now: Instant) -> bool {
        self.expire(now);
        let Some(entry) = self.sessions.remove(&session) else { return false };
        if entry.counts {
            self.subtract(entry.domain, entry.copies);
        }
        entry.counts
    }

    fn expire(&mut self, now: Instant) {
        while let Some(&Reverse((until, session))) = self.ends.peek()
            && until <= now
        {
            self.ends.pop();
            let Some(entry) = self.sessions.get_mut(&session) else { continue };
            if entry.counts && entry.until <= now {
                entry.counts = false;
                let (domain, copies) = (entry.domain, entry.copies);
                self.subtract(domain, copies);
            }
        }
    }

    fn add(&mut self, domain: u64, copies: u64) {
        self.know(domain);
        for &index in &self.domains[&domain] {
            let sum = &mut self.sums[index];
            sum.held += copies;
            sum.most = sum.most.max(sum.held);
            self.violations += u64::from(sum.limit.is_some_and(|limit| sum.held > limit));
        }
    }

    fn subtract(&mut self, domain: u64, copies: u64) {
        for &index in &self.domains[&domain] {
            self.sums[index].held -= copies;
        }
    }

    /// Adds the sums of a domain, unless it has them.
    fn know(&mut self, domain: u64) {
        if self.domains.contains_key(&domain) {
            return;
        }
        let name = self.keys.name(domain);
        let (mut indices, mut limit) = (vec![ALL, self.sums.len()], None);
        if let Some(template) = &self.template {
            let groups = template.groups.iter().enumerate();
            let groups = groups.filter(|(_, group)| group.contains(&name));
            indices.extend(groups.map(|(index, _)| ALL + 1 + index));
            limit = template.domain_limit_of(&name);
        }
        self.sums.push(Sum { name: Some((Kind::Domain, name)), held: 0, most: 0, limit });
        self.domains.insert(domain, indices.into());
    }

    /// Whether there are limits to check against.
    pub(super) fn checked(&self) -> bool {
        self.template.is_some()
    }

    /// Domains that have held copies.
    pub(super) fn domains(&self) -> u64 {
        self.domains.len() as u64
    }

    /// What all domains held together.
    pub(super) fn all(&self) -> MostHeld {
        self.sums[ALL].most_held()
    }

    /// The sums that exceeded their limits, by how far.
    pub(super) fn exceeded(&self) -> Vec<MostHeld> {
        let mut exceeded: Vec<_> = self
            .sums
            .iter()
            .filter(|sum| sum.limit.is_some_and(|limit| sum.most > limit))
            .collect();
        exceeded.sort_by_key(|sum| Reverse(sum.most - sum.limit.unwrap_or(0)));
        exceeded.into_iter().take(REPORTED).map(Sum::most_held).collect()
    }
}

impl Sum {
    fn most_held(&self) -> MostHeld {
        let (of, name) = self.name.clone().unwrap_or((Kind::All, String::new()));
        MostHeld { of, name, most_held: self.most, limit: self.limit }
    }
}

#[cfg(test)]
#[path = "books_tests.rs"]
mod tests;
