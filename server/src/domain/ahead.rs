//! What a node holds of a bucket ahead of its requests, and when it may. docs/adr/0007-prefetch.md
//! has the argument for the times below.

use std::collections::VecDeque;

use super::time::Micros;

/// How long after it was taken, in µs, a token may be served. Whoever relies on it that a node
/// holds nothing from before some moment waits for longer.
pub const HELD_US: i64 = 1_000_000;

/// How long, in µs, a count of the nodes is relied on: two heartbeats and a half.
pub const FRESH_US: i64 = 2_500_000;

/// How long, in µs, a node must have been counted before it takes tokens ahead: by then no other
/// relies on a count without it, nor holds what it took by one.
pub const QUIET_US: i64 = 4_000_000;

/// How long after its last heartbeat, in µs, a node is still counted.
pub const COUNTED_US: i64 = 5_000_000;

const _: () = assert!(FRESH_US + HELD_US < QUIET_US && FRESH_US + HELD_US < COUNTED_US);

/// Who shares the buckets, as one node has it from its heartbeats.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sight {
    nodes: u32,
    /// When that count, the highest of late, was heard last.
    counted_at: Micros,
    /// Since when the heartbeats have followed each other closely.
    since: Micros,
    /// When the last of them was sent.
    last: Micros,
}

/// What a node goes by at one moment.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct View {
    /// The moment.
    pub now: Micros,
    /// The most nodes that there may be.
    pub nodes: u32,
    /// Whether the others have counted this node for long enough.
    pub may_take: bool,
}

impl Sight {
    /// What a node knows after a heartbeat that was sent `took_us` ago and counts `nodes`.
    pub fn heard(before: Option<&Self>, now: Micros, took_us: i64, nodes: u32) -> Self {
        let heard = Self { nodes, counted_at: now, since: now, last: Micros(now.0 - took_us) };
        let Some(before) = before else { return heard };
        let since = if now.0 - before.last.0 <= FRESH_US { before.since } else { now };
        // Those who are gone may be missed too late, but not too early: a store that forgot
        // its nodes counts only those that have come back to it.
        if nodes < before.nodes && now.0 - before.counted_at.0 < COUNTED_US {
            Self { nodes: before.nodes, counted_at: before.counted_at, since, ..heard }
        } else {
            Self { since, ..heard }
        }
    }

    /// What a node goes by at `now`. With nothing heard of late, there may be any number of nodes.
    pub fn view(sight: Option<&Self>, now: Micros) -> View {
        match sight.filter(|sight| now.0 - sight.last.0 <= FRESH_US) {
            Some(sight) => {
                let may_take = now.0 - sight.since.0 >= QUIET_US;
                View { now, nodes: sight.nodes, may_take }
            }
            None => View { now, nodes: u32::MAX, may_take: false },
        }
    }
}

/// A bucket is worth taking ahead from when so many requests come …
const HOT: u32 = 10;

/// … within so many µs.
const WINDOW_US: i64 = 10_000;

/// How many windows' demand a node holds at most: a tenth of a second.
const WINDOWS: u64 = 10;

/// How long, in µs, nobody must have asked before tokens are given back, …
const IDLE_US: i64 = 100_000;

/// … and how long before even though somebody does.
const AGED_US: i64 = HELD_US / 2;

/// How long, in µs, after a bucket had too little it is left alone, …
const EMPTY_US: i64 = 10_000;

/// … and how long after there was no answer.
const FAILED_US: i64 = 250_000;

/// Tokens taken at one moment.
#[derive(Clone, Copy, Debug)]
struct Lot {
    tokens: u64,
    taken: Micros,
}

/// What one node holds of one bucket, and how hot that is.
#[derive(Debug)]
pub struct Stash {
    /// The oldest first.
    lots: VecDeque<Lot>,
    held: u64,
    lost: u64,
    asked: Micros,
    window: Micros,
    /// Requests and tokens in the window at hand, and in the one before.
    now: (u32, u64),
    before: (u32, u64),
    /// More is on its way.
    refilling: bool,
    not_before: Micros,
}

impl Stash {
    /// An empty one. Nothing is taken before [`QUIET_US`] have passed, so that all nodes know of
    /// the limits that allow it.
    pub fn new(now: Micros) -> Self {
        Self {
            lots: VecDeque::new(),
            held: 0,
            lost: 0,
            asked: now,
            window: now,
            now: (0, 0),
            before: (0, 0),
            refilling: false,
            not_before: Micros(now.0 + QUIET_US),
        }
    }

    /// Notes a request, and serves it if there is enough: tells how many tokens there were.
    pub fn serve(&mut self, tokens: u64, now: Micros) -> Option<u64> {
        self.note(tokens, now);
        self.expire(now);
        let held = self.held;
        if tokens > held {
            return None;
        }
        let mut due = tokens;
        while let Some(lot) = self.lots.front_mut().filter(|_| due > 0) {
            let part = due.min(lot.tokens);
            lot.tokens -= part;
            due -= part;
            if lot.tokens == 0 {
                self.lots.pop_front();
            }
        }
        self.held -= tokens;
        Some(held)
    }

    fn note(&mut self, tokens: u64, now: Micros) {
        self.asked = now;
        let age_us = now.0 - self.window.0;
        if age_us >= WINDOW_US {
            self.before = if age_us < 2 * WINDOW_US { self.now } else { (0, 0) };
            self.now = (0, 0);
            self.window = now;
        }
        self.now = (self.now.0.saturating_add(1), self.now.1.saturating_add(tokens));
    }

    /// How many tokens to take now, if any, so that no more than `most` are held; until
    /// [`Stash::refilled`] is told what came of it, no more.
    pub fn refill(&mut self, most: u64, now: Micros) -> Option<u64> {
        let (count, tokens) = (self.now.0.max(self.before.0), self.now.1.max(self.before.1));
        let target = most.min(tokens.saturating_mul(WINDOWS));
        let due = !self.refilling
            && now >= self.not_before
            && count >= HOT
            && self.held < target.div_ceil(2);
        due.then(|| {
            self.refilling = true;
            target - self.held
        })
    }

    /// So many of the tokens wanted were taken, not before `sent`; `None`: that is unknown.
    pub fn refilled(&mut self, wanted: u64, taken: Option<u64>, sent: Micros, now: Micros) {
        self.refilling = false;
        match taken {
            Some(tokens) => {
                if tokens > 0 {
                    self.lots.push_back(Lot { tokens, taken: sent });
                    self.held += tokens;
                }
                if tokens < wanted.div_ceil(2) {
                    self.not_before = Micros(now.0 + EMPTY_US);
                }
            }
            None => {
                self.lost += wanted;
                self.not_before = Micros(now.0 + FAILED_US);
            }
        }
    }

    fn expire(&mut self, now: Micros) {
        self.lost += self.older(HELD_US, now);
    }

    /// Takes out what was taken so long ago.
    fn older(&mut self, age_us: i64, now: Micros) -> u64 {
        let mut tokens = 0;
        while let Some(lot) = self.lots.front().filter(|lot| now.0 - lot.taken.0 >= age_us) {
            tokens += lot.tokens;
            self.lots.pop_front();
        }
        self.held -= tokens;
        tokens
    }

    /// Takes out what is not wanted any more and to be given back.
    pub fn spare(&mut self, now: Micros) -> u64 {
        if now.0 - self.asked.0 >= IDLE_US {
            return self.empty(now);
        }
        self.expire(now);
        self.older(AGED_US, now)
    }

    /// Takes out all that may be given back.
    pub fn empty(&mut self, now: Micros) -> u64 {
        self.expire(now);
        self.lots.clear();
        std::mem::take(&mut self.held)
    }

    /// How many tokens were lost since this was asked last: held for too long, or in a refill
    /// that got no answer.
    pub fn lost(&mut self) -> u64 {
        std::mem::take(&mut self.lost)
    }

    /// How many tokens there are.
    pub fn held(&self) -> u64 {
        self.held
    }
}

/// The parts in which tokens are asked for, each granted whole or not: halves, and halves of what
/// is left, so that a few parts take nearly all that there is.
pub fn parts(tokens: u64) -> impl Iterator<Item = u64> {
    let least = (tokens / 16).max(1);
    let mut left = tokens;
    std::iter::from_fn(move || {
        let part = if left <= least { left } else { left.div_ceil(2) };
        left -= part;
        (part > 0).then_some(part)
    })
}

#[cfg(test)]
#[path = "ahead_tests.rs"]
mod tests;
