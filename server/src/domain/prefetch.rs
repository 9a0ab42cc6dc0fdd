//! Prefetch: when a node takes tokens from a bucket before requests ask for them, and how long it
//! keeps them. docs/adr/0007-prefetch.md derives the times below.

use std::collections::VecDeque;

use super::time::Micros;

/// How long a node may hold a token, in µs, counted from the sending of the refill. Older tokens are
/// dropped, and not given back.
pub const HELD_US: i64 = 1_000_000;

/// How long a node count from a heartbeat stays valid, in µs: two and a half heartbeat intervals.
pub const FRESH_US: i64 = 2_500_000;

/// How long a node must send heartbeats before it may prefetch, in µs. By then, no other node uses
/// a node count that excludes it, and all tokens taken under such a count have expired.
pub const STARTUP_WAIT_US: i64 = 4_000_000;

/// How long a higher node count stays in use after the last heartbeat that reported it, in µs. As
/// long as a node counts as alive after its last heartbeat (`NODE_TTL` in `store/redis`).
pub const COUNTED_US: i64 = 5_000_000;

const _: () = assert!(FRESH_US + HELD_US < STARTUP_WAIT_US && FRESH_US + HELD_US < COUNTED_US);

/// The node count that one node has learned from the replies to its heartbeats.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NodeCount {
    nodes: u32,
    /// When a heartbeat last reported `nodes`. A lower count replaces it only [`COUNTED_US`] later.
    counted_at: Micros,
    /// Start of the current series of heartbeats without a gap above [`FRESH_US`].
    since: Micros,
    /// When the last heartbeat was sent.
    last: Micros,
}

/// The inputs to prefetch decisions at one time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ClusterView {
    /// The current time.
    pub now: Micros,
    /// Upper bound on the number of live nodes.
    pub nodes: u32,
    /// Whether this node has sent heartbeats for long enough to prefetch.
    pub may_prefetch: bool,
}

impl NodeCount {
    /// Updates the count from a heartbeat that was sent `took_us` ago and reports `nodes`.
    pub fn after_heartbeat(before: Option<&Self>, now: Micros, took_us: i64, nodes: u32) -> Self {
        let updated = Self { nodes, counted_at: now, since: now, last: Micros(now.0 - took_us) };
        let Some(before) = before else { return updated };
        let since = if now.0 - before.last.0 <= FRESH_US { before.since } else { now };
        // Lower the count late, never early: a store that has lost its data counts only the nodes
        // that have sent a heartbeat since the loss.
        if nodes < before.nodes && now.0 - before.counted_at.0 < COUNTED_US {
            Self { nodes: before.nodes, counted_at: before.counted_at, since, ..updated }
        } else {
            Self { since, ..updated }
        }
    }

    /// The view at `now`. Without a heartbeat in the last [`FRESH_US`], `nodes` is `u32::MAX`.
    pub fn view(node_count: Option<&Self>, now: Micros) -> ClusterView {
        match node_count.filter(|node_count| now.0 - node_count.last.0 <= FRESH_US) {
            Some(node_count) => {
                let may_prefetch = now.0 - node_count.since.0 >= STARTUP_WAIT_US;
                ClusterView { now, nodes: node_count.nodes, may_prefetch }
            }
            None => ClusterView { now, nodes: u32::MAX, may_prefetch: false },
        }
    }
}

/// Requests within one window that make a bucket hot.
const HOT_REQUESTS: u32 = 10;

/// Length of a demand window, in µs.
const WINDOW_US: i64 = 10_000;

/// Most tokens held, as a multiple of one window's demand: 100 ms of demand.
const TARGET_WINDOWS: u64 = 10;

/// Tokens are given back after this time without a request, in µs.
const IDLE_US: i64 = 100_000;

/// Tokens are given back at this age even if requests still arrive, in µs.
const RETURN_AGE_US: i64 = HELD_US / 2;

/// Pause before the next refill after the bucket had less than half of the wanted tokens, in µs.
const EMPTY_PAUSE_US: i64 = 10_000;

/// Pause before the next refill after a refill that got no answer, in µs.
const FAILED_PAUSE_US: i64 = 250_000;

/// Tokens from one refill.
#[derive(Clone, Copy, Debug)]
struct Lot {
    tokens: u64,
    taken: Micros,
}

/// The prefetched tokens of one bucket on one node, and the recent demand for them.
#[derive(Debug)]
pub struct Stash {
    /// Oldest first.
    lots: VecDeque<Lot>,
    held: u64,
    lost: u64,
    last_request: Micros,
    window_start: Micros,
    /// Requests and tokens in the current window.
    this_window: (u32, u64),
    /// Requests and tokens in the previous window.
    last_window: (u32, u64),
    /// A refill is in flight.
    refilling: bool,
    /// No refill starts before this time.
    not_before: Micros,
}

impl Stash {
    /// An empty stash. The first refill starts [`STARTUP_WAIT_US`] later at the earliest, so that all
    /// nodes have loaded the limits that allow prefetch.
    pub fn new(now: Micros) -> Self {
        Self {
            lots: VecDeque::new(),
            held: 0,
            lost: 0,
            last_request: now,
            window_start: now,
            this_window: (0, 0),
            last_window: (0, 0),
            refilling: false,
            not_before: Micros(now.0 + STARTUP_WAIT_US),
        }
    }

    /// Records a request and serves it from the held tokens. Returns the number of tokens held
    /// before; `None`, with nothing taken, if that is less than `tokens`.
    pub fn serve(&mut self, tokens: u64, now: Micros) -> Option<u64> {
        self.record_demand(tokens, now);
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

    fn record_demand(&mut self, tokens: u64, now: Micros) {
        self.last_request = now;
        let age_us = now.0 - self.window_start.0;
        if age_us >= WINDOW_US {
            self.last_window = if age_us < 2 * WINDOW_US { self.this_window } else { (0, 0) };
            self.this_window = (0, 0);
            self.window_start = now;
        }
        let (requests, demand) = self.this_window;
        self.this_window = (requests.saturating_add(1), demand.saturating_add(tokens));
    }

    /// Starts a refill: the number of tokens to take, so that at most `max_held` are held. `None` if
    /// none is due, or until [`Stash::refilled`] has ended the last one.
    pub fn refill(&mut self, max_held: u64, now: Micros) -> Option<u64> {
        let requests = self.this_window.0.max(self.last_window.0);
        let tokens = self.this_window.1.max(self.last_window.1);
        let target = max_held.min(tokens.saturating_mul(TARGET_WINDOWS));
        let due = !self.refilling
            && now >= self.not_before
            && requests >= HOT_REQUESTS
            && self.held < target.div_ceil(2);
        due.then(|| {
            self.refilling = true;
            target - self.held
        })
    }

    /// Ends a refill of `wanted` tokens that was sent at `sent`. `taken` is `None` if the store
    /// gave no answer; the wanted tokens then count as lost.
    pub fn refilled(&mut self, wanted: u64, taken: Option<u64>, sent: Micros, now: Micros) {
        self.refilling = false;
        match taken {
            Some(tokens) => {
                if tokens > 0 {
                    self.lots.push_back(Lot { tokens, taken: sent });
                    self.held += tokens;
                }
                if tokens < wanted.div_ceil(2) {
                    self.not_before = Micros(now.0 + EMPTY_PAUSE_US);
                }
            }
            None => {
                self.lost += wanted;
                self.not_before = Micros(now.0 + FAILED_PAUSE_US);
            }
        }
    }

    fn expire(&mut self, now: Micros) {
        self.lost += self.remove_older(HELD_US, now);
    }

    /// Removes tokens taken at least `age_us` ago, and returns how many.
    fn remove_older(&mut self, age_us: i64, now: Micros) -> u64 {
        let mut tokens = 0;
        while let Some(lot) = self.lots.front().filter(|lot| now.0 - lot.taken.0 >= age_us) {
            tokens += lot.tokens;
            self.lots.pop_front();
        }
        self.held -= tokens;
        tokens
    }

    /// Removes unused tokens that should go back to the store, and returns how many.
    pub fn spare(&mut self, now: Micros) -> u64 {
        if now.0 - self.last_request.0 >= IDLE_US {
            return self.take_all(now);
        }
        self.expire(now);
        self.remove_older(RETURN_AGE_US, now)
    }

    /// Removes all tokens that have not expired, to give them back, and returns how many.
    pub fn take_all(&mut self, now: Micros) -> u64 {
        self.expire(now);
        self.lots.clear();
        std::mem::take(&mut self.held)
    }

    /// Tokens lost since the last call: expired, or in a refill that got no answer.
    pub fn take_lost(&mut self) -> u64 {
        std::mem::take(&mut self.lost)
    }

    /// The number of tokens held.
    pub fn held(&self) -> u64 {
        self.held
    }

    /// The number of tokens held that have not expired at `now`. Changes nothing.
    pub fn usable(&self, now: Micros) -> u64 {
        let usable = self.lots.iter().filter(|lot| now.0 - lot.taken.0 < HELD_US);
        usable.map(|lot| lot.tokens).sum()
    }
}

/// Splits a refill into requests that are each granted in full or refused: half of `tokens`, then
/// half of the rest, down to a sixteenth. So a few requests take nearly all available tokens.
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
#[path = "prefetch_tests.rs"]
mod tests;
