//! The token bucket with debt: tokens accrue lazily up to a size, a request may take more tokens
//! than the bucket holds, and later requests wait until that debt is paid off. The idea comes from
//! Guava's `RateLimiter` by way of the quotaservice design. The implementation follows the generic
//! cell rate algorithm (ITU-T I.371), whose whole state is one timestamp.
//!
//! That timestamp, `zero` in [`State`], is the time at which the balance is (or was) exactly zero.
//! All arithmetic is in microseconds of accrual. With `interval` as the time that one token takes
//! to accrue, the balance is `accrued = min(cap, now - zero)`. A grant moves `zero` by
//! `tokens * interval`. A negative balance is the time to wait. A grant from a bucket that is not
//! full adds to `zero` independently of `now`, so that rounding loses no accrual at any request
//! rate.
//!
//! `lua/allow.lua` does the same operations in the same order on the same doubles, so that both
//! stores give bit-identical answers. Change the two together.

use super::ban::Ban;
use super::time::Micros;
use super::window::{Window, WindowKind};

/// Units of [`State::zero_frac`] per microsecond: 2^18. At 10^8 tokens per second, one token takes
/// 0.01 µs or 2621 units, so rounding a cost up loses 0.04 % at most.
pub const FRACTIONS: f64 = 262_144.0;

/// Tolerance of comparisons, in µs: below the clock's resolution, and below the time that one
/// token takes at 10^8 per second. It absorbs the rounding up of costs, so that at 3 tokens per
/// second, 3 tokens are available after exactly one second, not a microsecond later.
pub const SLACK_US: f64 = 0.003_906_25;

/// Longest fill time or debt of a bucket, in µs: four years. Stored times are modulo 2^48 µs (nine
/// years), so a longer span would be ambiguous.
pub const MAX_SPAN_US: f64 = 126_230_400_000_000.0;

/// Valid fill rates, in tokens per second. Above the maximum, [`FRACTIONS`] would be too coarse.
pub const RATES: std::ops::RangeInclusive<f64> = 1e-8..=1e8;

/// How long after a grant it can be settled, by default.
pub const SETTLE_WITHIN_MS: u64 = 5 * 60 * 1000;

/// Smallest step of the expiry grid, in µs: about an eighth of a second.
const FINEST_GRID_US: f64 = 131_072.0;

/// Size of an encoded [`State`], in bytes.
pub const STATE_BYTES: usize = 12;

const TIME_MODULUS: i64 = 1 << 48;

/// The most that one request moves a balance by, in µs: from a full bucket to the longest debt, or back.
const MOST_US: f64 = 2.0 * MAX_SPAN_US;

/// How a bucket decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Algorithm {
    /// Tokens accrue up to a size.
    TokenBucket,
    /// Tokens leave one after the other: a token bucket of size 0, whose debt is the queue.
    LeakyBucket {
        /// The most tokens that wait.
        queue: u64,
    },
    /// Tokens are limited within windows.
    Windows(Window),
}

impl Algorithm {
    /// The word in the limits file.
    pub fn word(self) -> &'static str {
        match self {
            Self::TokenBucket => "token_bucket",
            Self::LeakyBucket { .. } => "leaky_bucket",
            Self::Windows(window) => match window.kind {
                WindowKind::Fixed => "fixed_window",
                WindowKind::Sliding => "sliding_window",
                WindowKind::Log => "sliding_log",
                // No bucket's own algorithm.
                WindowKind::Ban { .. } => "ban",
            },
        }
    }

    /// The most tokens that wait in a leaky bucket.
    pub fn queue(self) -> Option<u64> {
        match self {
            Self::LeakyBucket { queue } => Some(queue),
            _ => None,
        }
    }

    /// The windows, if it has any.
    pub fn windows(self) -> Option<Window> {
        match self {
            Self::Windows(window) => Some(window),
            _ => None,
        }
    }
}

/// One bucket's limits as an operator writes them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BucketLimit {
    /// How it decides.
    pub algorithm: Algorithm,
    /// The most tokens that the bucket holds, or that are granted within a window; 0 for a leaky bucket.
    pub size_tokens: u64,
    /// Tokens that accrue, or leave, per second; for a window, its limit by its length.
    pub fill_rate: f64,
    /// The longest wait that a grant may impose.
    pub wait_timeout_ms: u64,
    /// Idle time after which a dynamic bucket is removed; `None`: never.
    pub max_idle_ms: Option<u64>,
    /// The longest time that paying off a debt may take.
    pub max_debt_ms: u64,
    /// The most tokens one request may take; `None`: no limit.
    pub max_tokens_per_request: Option<u64>,
    /// Use of the bucket, in percent of its size, above which grants are marked as soft-limited;
    /// `None`: never.
    pub soft_limit_percent: Option<f64>,
    /// The most tokens that each node prefetches; 0: no prefetch.
    pub prefetch_tokens: u64,
    /// How long after a grant of a token bucket it can be settled.
    pub settle_within_ms: u64,
    /// The share of the bucket, in percent, that is kept for critical requests.
    pub reserve_percent: u8,
    /// When the bucket refuses everything; `None`: never.
    pub ban: Option<Ban>,
}

impl Default for BucketLimit {
    fn default() -> Self {
        Self {
            algorithm: Algorithm::TokenBucket,
            size_tokens: 100,
            fill_rate: 50.0,
            wait_timeout_ms: 1000,
            max_idle_ms: None,
            max_debt_ms: 10_000,
            max_tokens_per_request: Some(50),
            soft_limit_percent: None,
            prefetch_tokens: 0,
            settle_within_ms: SETTLE_WITHIN_MS,
            reserve_percent: 0,
            ban: None,
        }
    }
}

impl BucketLimit {
    /// The limits of a window.
    pub fn of_window(limit: u64, window: Window) -> Self {
        Self {
            algorithm: Algorithm::Windows(window),
            size_tokens: limit,
            fill_rate: limit as f64 / (window.length_us as f64 / 1e6),
            wait_timeout_ms: 0,
            max_debt_ms: 0,
            max_tokens_per_request: None,
            ..Self::default()
        }
    }

    /// A leaky bucket, which `rate` tokens a second leave, and in which up to `queue` wait.
    pub fn leaky(rate: f64, queue: u64) -> Self {
        Self {
            algorithm: Algorithm::LeakyBucket { queue },
            size_tokens: 0,
            fill_rate: rate,
            // That of the last one in the queue, or a little more: the debt limit is exact.
            wait_timeout_ms: (queue as f64 * Terms::leak_us(1e6 / rate) / 1000.0).ceil() as u64,
            max_debt_ms: Terms::leaky(rate, queue).max_debt_ms(),
            max_tokens_per_request: None,
            ..Self::default()
        }
    }

    /// Converts the limits to the units of the arithmetic.
    pub fn terms(&self) -> Terms {
        match self.algorithm {
            Algorithm::TokenBucket => {
                Terms::new(self.size_tokens as f64, self.fill_rate, self.max_debt_ms)
            }
            Algorithm::LeakyBucket { queue } => Terms::leaky(self.fill_rate, queue),
            Algorithm::Windows(window) => Terms::of_window(self.size_tokens as f64, window),
        }
    }

    /// How what is asked for is counted, if the bucket may be banned; it is kept for at least `least_kept_us`.
    pub fn ban_terms(&self, least_kept_us: f64) -> Option<Terms> {
        let terms = |ban: Ban| Terms::of_window(ban.threshold as f64, ban.window(least_kept_us));
        self.ban.map(terms)
    }

    /// Whether a grant exceeds the soft limit when it leaves `tokens` in a bucket of `size` tokens.
    pub fn past_soft_limit(&self, tokens: f64, size: impl FnOnce() -> f64) -> bool {
        self.soft_limit_percent.is_some_and(|percent| {
            let size = size();
            size - tokens > size * percent / 100.0
        })
    }
}

/// Fingerprint of a [`Terms`] in 29 bits: 6 bits of the rate's binary exponent, 18 of its mantissa,
/// and a hash of the debt limit: in milliseconds modulo 31, or of a leaky bucket's queue.
///
/// A state stores the mark of the terms it was written under. If it differs from the current
/// terms' mark, the limits have changed, and the balance is converted from the old rate to the
/// new one. Whole rates up to 524,288 are exact; others have a relative error of up to 4·10^-6.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark(u32);

impl Mark {
    /// `hash`: 5 bits.
    fn new(rate: f64, hash: u32) -> Self {
        let bits = rate.to_bits();
        let exponent = ((bits >> 52) as i64 - 1023 + 32).clamp(0, 63) as u32;
        let mantissa = ((bits >> 34) & 0x3_ffff) as u32;
        Self(exponent << 23 | mantissa << 5 | hash)
    }

    /// A hash of the queue of a leaky bucket. Queues may well differ by a multiple of 31, so it is mixed. Under
    /// this multiplier, that of xorshift1024*, few queues of usual lengths have equal hashes.
    fn hash_of_queue(queue: u64) -> u32 {
        const MULTIPLIER: u64 = 1_181_783_497_276_652_981;
        let mixed = queue.wrapping_mul(MULTIPLIER);
        ((mixed ^ mixed >> 32).wrapping_mul(MULTIPLIER) >> 59) as u32
    }

    /// The mark as a number below 2^29.
    pub fn bits(self) -> u32 {
        self.0
    }

    fn same_rate(self, other: Self) -> bool {
        self.0 >> 5 == other.0 >> 5
    }

    /// The rate, in tokens per second.
    fn rate(self) -> f64 {
        let exponent = u64::from(self.0 >> 23) + 1023 - 32;
        let mantissa = u64::from(self.0 >> 5 & 0x3_ffff);
        f64::from_bits(exponent << 52 | mantissa << 34)
    }
}

/// The limits of one bucket in the units of the arithmetic. The balance of a window is what is left of its
/// limit: there, one token costs 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Terms {
    /// The windows; `None` for a token bucket.
    pub window: Option<Window>,
    /// Time in which one token accrues, in µs.
    pub interval_us: f64,
    /// Time in which an empty bucket fills, in µs.
    pub cap_us: f64,
    /// How long a state is needed after its balance was zero, in µs. Equal to `cap_us`, except for
    /// buckets with prefetch: their `cap_us` depends on the node count, which differs between
    /// nodes for a short time, and the state must last for the node with the largest `cap_us`.
    pub life_us: f64,
    /// The debt limit, in µs of accrual.
    pub max_debt_us: f64,
    /// The mark stored in states written under these terms.
    pub mark: Mark,
    /// Step of the grid on which states expire, in µs: a power of two, at most a sixteenth of
    /// `life_us`, but at least an eighth of a second. A state expires at most one step after its
    /// bucket is full, so that few grants have to change the expiry.
    pub grid_us: f64,
}

impl Terms {
    fn new(size_tokens: f64, rate: f64, max_debt_ms: u64) -> Self {
        let interval_us = 1e6 / rate;
        let cap_us = size_tokens * interval_us;
        Self {
            window: None,
            interval_us,
            cap_us,
            life_us: cap_us,
            max_debt_us: max_debt_ms as f64 * 1000.0,
            mark: Mark::new(rate, (max_debt_ms % 31) as u32),
            grid_us: grid_us(cap_us),
        }
    }

    /// Those of a leaky bucket. The first token leaves at once, so there is a debt of one more than wait.
    fn leaky(rate: f64, queue: u64) -> Self {
        let max_debt_us = (queue as f64 + 1.0) * Self::leak_us(1e6 / rate);
        let mark = Mark::new(rate, Mark::hash_of_queue(queue));
        Self { max_debt_us, mark, ..Self::new(0.0, rate, 0) }
    }

    /// The time that one token takes to leave a leaky bucket, in µs, rounded up as a grant is: so many grants
    /// that a queue has room for fit in.
    fn leak_us(interval_us: f64) -> f64 {
        (interval_us * FRACTIONS).ceil() / FRACTIONS
    }

    /// The debt limit in whole milliseconds, rounded up.
    fn max_debt_ms(&self) -> u64 {
        (self.max_debt_us / 1000.0).ceil() as u64
    }

    /// The most tokens that wait in a leaky bucket; `None` for another one.
    pub fn queue(&self) -> Option<u64> {
        let is_leaky = self.cap_us == 0.0 && self.window.is_none();
        is_leaky.then(|| (self.max_debt_us / Self::leak_us(self.interval_us)).round() as u64 - 1)
    }

    fn of_window(limit: f64, window: Window) -> Self {
        Self {
            window: Some(window),
            interval_us: 1.0,
            cap_us: limit,
            life_us: window.life_us() as f64,
            max_debt_us: 0.0,
            mark: Mark(0),
            grid_us: 0.0,
        }
    }

    /// The longest time that a state may exist after the last grant, in µs.
    pub fn longest_life_us(&self) -> f64 {
        self.life_us + self.grid_us + self.max_debt_us
    }

    /// The share of one of `nodes` nodes that decide independently: rate and size, or the limit of a window, are
    /// divided by `nodes`, to one token at least; the queue of a leaky bucket, too. Wait and debt limits stay
    /// the same, and so does the threshold of a ban: nobody is banned for being served by one node.
    pub fn share(&self, nodes: u32) -> Self {
        if let Some(queue) = self.queue() {
            let nodes = nodes.max(1);
            let rate = 1e6 / self.interval_us / f64::from(nodes);
            return Self::leaky(rate, queue / u64::from(nodes));
        }
        let nodes = f64::from(nodes.max(1));
        if let Some(window) = self.window {
            if let WindowKind::Ban { .. } = window.kind {
                return *self;
            }
            // A limit of 0 grants nothing anywhere.
            let cap_us = (self.cap_us / nodes).floor().max(1.0).min(self.cap_us);
            return Self { cap_us, ..*self };
        }
        let interval_us = self.interval_us * nodes;
        // A bucket of less than one token could never grant without debt.
        let cap_us = self.cap_us.max(interval_us);
        let grid_us = grid_us(cap_us);
        let mark = Mark::new(1e6 / interval_us, self.mark.0 & 31);
        Self { interval_us, cap_us, life_us: cap_us, mark, grid_us, ..*self }
    }

    /// The terms of the bucket while each of `nodes` may hold [`Terms::max_prefetch_tokens`]: a
    /// smaller size, with everything else unchanged. The size never grows with the number of nodes.
    pub fn beside_prefetch(&self, prefetch_tokens: u64, nodes: u32) -> Self {
        let held_us = self.cost_us(prefetch_tokens) * f64::from(nodes.max(1));
        Self { cap_us: self.life_us - held_us.min(self.life_us / 2.0), ..*self }
    }

    /// The most tokens that each of `nodes` may prefetch, so that together they hold half of the
    /// size at most. Never grows with the number of nodes.
    pub fn max_prefetch_tokens(&self, prefetch_tokens: u64, nodes: u32) -> u64 {
        let size = self.life_us / self.interval_us;
        prefetch_tokens.min((size / 2.0 / f64::from(nodes.max(1))) as u64)
    }

    /// The tokens that a reserve of `percent` keeps: of the size, of a leaky bucket's queue, or of the limit of a
    /// window. A part of a token in a queue or a window counts as a whole one.
    pub fn reserve_tokens(&self, percent: u8) -> f64 {
        let of = |tokens: f64| tokens * f64::from(percent) / 100.0;
        match self.queue() {
            Some(queue) => of(queue as f64).ceil(),
            None if self.window.is_some() => of(self.cap_us).ceil(),
            None => of(self.cap_us) / self.interval_us,
        }
    }

    /// Takes tokens that cost `cost_us`, and leaves the reserve.
    pub fn take_unreserved(&self, cost_us: f64, max_wait_ms: u64, reserve_percent: u8) -> Charge {
        let take = Charge::take(cost_us, max_wait_ms);
        let max_wait_us = match self.queue() {
            // As from a queue that is shorter by the reserve.
            Some(queue) => {
                let shorter = queue as f64 - self.reserve_tokens(reserve_percent);
                let max_debt_us = (shorter + 1.0) * Self::leak_us(self.interval_us);
                take.max_wait_us.min(max_debt_us - cost_us)
            }
            None if self.window.is_some() => -(cost_us + self.reserve_tokens(reserve_percent)),
            // Not by way of tokens, which would round.
            None => -(cost_us + self.cap_us * f64::from(reserve_percent) / 100.0),
        };
        Charge { max_wait_us, ..take }
    }

    /// The cost of `tokens`, in µs of accrual.
    pub fn cost_us(&self, tokens: u64) -> f64 {
        tokens as f64 * self.interval_us
    }

    /// Converts µs of accrual to tokens, rounded to a millionth.
    pub fn tokens(&self, accrued_us: f64) -> f64 {
        let tokens = accrued_us / self.interval_us;
        // Past 2^53 millionths the rounding itself would be the larger error.
        if tokens.abs() < 9e9 { (tokens * 1e6).round() / 1e6 } else { tokens }
    }
}

fn grid_us(cap_us: f64) -> f64 {
    let mut grid_us = FINEST_GRID_US;
    while grid_us * 32.0 <= cap_us {
        grid_us *= 2.0;
    }
    grid_us
}

/// The stored state of a bucket that is not full. A bucket without a state is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct State {
    /// The time at which the balance is zero, in whole µs since the epoch.
    pub zero_us: i64,
    /// The fraction of a microsecond to add to `zero_us`, in units of 2^-18 µs.
    pub zero_frac: u32,
    /// The mark of the terms under which the state was written.
    pub mark: Mark,
    /// A change of limits, or a settlement, left a debt beyond the debt limit, which still must be
    /// paid. If `false`, a debt beyond the limit means that the clock stepped back.
    pub carried: bool,
}

impl State {
    /// Encodes the state, little-endian: 6 bytes of `zero_us` modulo 2^48; 3 bytes with 18 bits of
    /// `zero_frac` below the mark's upper 6 bits; 3 bytes with `carried` as the lowest bit below
    /// the mark's lower 23 bits.
    pub fn encode(&self) -> [u8; STATE_BYTES] {
        let whole = self.zero_us.rem_euclid(TIME_MODULUS) as u64;
        let middle = self.zero_frac | self.mark.0 >> 23 << 18;
        let last = (self.mark.0 & 0x7f_ffff) << 1 | u32::from(self.carried);
        let mut bytes = [0; STATE_BYTES];
        bytes[..6].copy_from_slice(&whole.to_le_bytes()[..6]);
        bytes[6..9].copy_from_slice(&middle.to_le_bytes()[..3]);
        bytes[9..].copy_from_slice(&last.to_le_bytes()[..3]);
        bytes
    }

    /// Decodes the result of [`State::encode`]. `zero_us` must be within four and a half years of
    /// `now`.
    pub fn decode(bytes: &[u8; STATE_BYTES], now: Micros) -> Self {
        let number = |range: std::ops::Range<usize>| {
            bytes[range].iter().rev().fold(0_i64, |sum, byte| sum << 8 | i64::from(*byte))
        };
        let mut since_us = (now.0 - number(0..6)).rem_euclid(TIME_MODULUS);
        if since_us >= TIME_MODULUS / 2 {
            since_us -= TIME_MODULUS;
        }
        let (middle, last) = (number(6..9) as u32, number(9..12) as u32);
        Self {
            zero_us: now.0 - since_us,
            zero_frac: middle & 0x3_ffff,
            mark: Mark(middle >> 18 << 23 | last >> 1),
            carried: last & 1 == 1,
        }
    }

    /// The state whose balance is `accrued_us` at `now`.
    fn at(now: Micros, accrued_us: f64, terms: &Terms) -> Self {
        Self { zero_us: now.0, zero_frac: 0, mark: terms.mark, carried: false }.moved(-accrued_us)
    }

    /// The balance at `now`, in µs of accrual.
    fn accrued_us(&self, now: Micros) -> f64 {
        (now.0 - self.zero_us) as f64 - f64::from(self.zero_frac) / FRACTIONS
    }

    /// The state with `zero` moved by `us`, rounded up to the next fraction.
    fn moved(self, us: f64) -> Self {
        let mut whole = us.floor();
        let mut frac = f64::from(self.zero_frac) + ((us - whole) * FRACTIONS).ceil();
        if frac >= FRACTIONS {
            whole += 1.0;
            frac -= FRACTIONS;
        }
        Self { zero_us: self.zero_us + whole as i64, zero_frac: frac as u32, ..self }
    }

    /// The state with a debt that can be stored, and marked if it is beyond the debt limit.
    fn with_any_debt(self, terms: &Terms, now: Micros) -> Self {
        let left = match self.accrued_us(now) < -MAX_SPAN_US {
            true => Self::at(now, -MAX_SPAN_US, terms),
            false => self,
        };
        Self { carried: left.accrued_us(now) < -terms.max_debt_us, ..left }
    }
}

/// One request to a bucket, in the units of the arithmetic.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Charge {
    /// Cost of the tokens ([`Terms::cost_us`]). A negative cost returns tokens.
    pub cost_us: f64,
    /// The longest wait that a grant may impose, in µs. If negative, the balance must be at least
    /// its absolute value; for a window, which has no wait, in tokens.
    pub max_wait_us: f64,
}

impl Charge {
    /// Takes tokens, with a wait and a debt if the limits allow.
    pub fn take(cost_us: f64, max_wait_ms: u64) -> Self {
        Self { cost_us, max_wait_us: max_wait_ms as f64 * 1000.0 }
    }

    /// Takes available tokens only, without a wait or a debt.
    pub fn take_available(cost_us: f64) -> Self {
        Self { cost_us, max_wait_us: -cost_us }
    }

    /// Takes tokens that count whatever the limits. Of a token bucket they are always granted, and may leave
    /// any debt that can be stored. Of a window they count even if they are refused; a log counts none that
    /// are refused.
    pub fn count(cost_us: f64) -> Self {
        Self { cost_us: cost_us.min(MOST_US), max_wait_us: f64::INFINITY }
    }

    /// Whether a token bucket grants it whatever the debt.
    fn is_unlimited(&self) -> bool {
        self.max_wait_us == f64::INFINITY
    }

    /// What must be left after a grant. For windows, where it is in tokens.
    pub fn reserve(&self) -> f64 {
        (-self.max_wait_us - self.cost_us).max(0.0)
    }

    /// Whether the tokens count even if they are refused. Only windows refuse such.
    pub fn counts_refused(&self) -> bool {
        self.cost_us >= 0.0 && self.max_wait_us == f64::INFINITY
    }

    /// Returns tokens that cost `cost_us`. Tokens beyond the bucket's size are lost. Never refused.
    pub fn give_back(cost_us: f64) -> Self {
        Self { cost_us: -cost_us.min(MOST_US), max_wait_us: f64::INFINITY }
    }
}

/// The change that a request makes to a bucket's state.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Change {
    /// The state stays unchanged.
    Keep,
    /// Store this state.
    Put(State),
    /// Remove the state: the bucket is full.
    Remove,
}

/// A bucket's answer to one request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Decision {
    /// Whether the tokens are granted.
    pub granted: bool,
    /// The balance before the request, in µs of accrual; negative: in debt.
    pub accrued_us: f64,
    /// The change to make to the state.
    pub change: Change,
}

impl State {
    /// When the state expires, in milliseconds since the epoch: at the first step of the grid
    /// after its bucket is full.
    pub fn expires_ms(&self, terms: &Terms) -> i64 {
        let step = ((self.zero_us as f64 + terms.life_us) / terms.grid_us).floor();
        ((step + 1.0) * terms.grid_us / 1000.0).ceil() as i64
    }
}

/// A bucket's balance before a request.
struct Balance {
    accrued_us: f64,
    /// The balance was converted or corrected, so the state must be written again even if the
    /// request is refused.
    restated: bool,
    /// The balance may be a debt beyond the limit, from before a change of limits or from a settlement.
    carried: bool,
    full: bool,
}

impl Balance {
    /// The balance at `now`. A `state` of `None` is a full bucket.
    fn of(state: Option<&State>, terms: &Terms, now: Micros) -> Self {
        let mut accrued_us = terms.cap_us;
        let (mut restated, mut carried) = (false, false);
        if let Some(state) = state {
            accrued_us = state.accrued_us(now);
            carried = state.carried;
            if state.mark != terms.mark {
                if !state.mark.same_rate(terms.mark) {
                    // Use both rates as rounded in the marks. When nodes with different limits
                    // convert a balance back and forth, it then neither shrinks nor grows.
                    accrued_us *= state.mark.rate() / terms.mark.rate();
                }
                (restated, carried) = (true, true);
            }
            // A longer debt could not be stored. It may also mean that the clock stepped back.
            if carried && accrued_us < -MAX_SPAN_US {
                (accrued_us, restated) = (-MAX_SPAN_US, true);
            }
            // Only settlements exceed the debt limit. Without one, and without a change of limits, a longer debt
            // means that the clock stepped back, so it is cut to the limit.
            if !carried && accrued_us < -terms.max_debt_us - 1.0 {
                accrued_us = -terms.max_debt_us;
                restated = true;
            }
        }
        let full = accrued_us >= terms.cap_us;
        if full {
            accrued_us = terms.cap_us;
        }
        Self { accrued_us, restated, carried, full }
    }
}

/// The balance at `now`, in µs of accrual; negative: debt. A `state` of `None` is a full bucket.
pub fn balance_us(state: Option<&State>, terms: &Terms, now: Micros) -> f64 {
    Balance::of(state, terms, now).accrued_us
}

/// Decides one request at `now`. A `state` of `None` is a full bucket.
pub fn decide(state: Option<&State>, terms: &Terms, charge: &Charge, now: Micros) -> Decision {
    let Balance { accrued_us, restated, carried, full } = Balance::of(state, terms, now);
    let granted = allowed(accrued_us, terms, charge);
    let change = if granted {
        let left = match state {
            Some(state) if !restated && !full => {
                State { carried: false, ..*state }.moved(charge.cost_us)
            }
            _ => State::at(now, accrued_us - charge.cost_us, terms),
        };
        let left = match charge.is_unlimited() {
            true => left.with_any_debt(terms, now),
            false => left,
        };
        let filled = charge.cost_us <= 0.0 && left.accrued_us(now) >= terms.cap_us;
        match state {
            None if filled => Change::Keep,
            Some(_) if filled => fill(terms, now),
            _ => Change::Put(left),
        }
    } else if !restated {
        Change::Keep
    } else if full {
        fill(terms, now)
    } else {
        let carried = carried && accrued_us < -terms.max_debt_us;
        Change::Put(State { carried, ..State::at(now, accrued_us, terms) })
    };
    Decision { granted, accrued_us, change }
}

/// The change for a bucket that has become full. With prefetch, nodes may disagree on the size, so
/// a state stays to hold the balance for the others.
fn fill(terms: &Terms, now: Micros) -> Change {
    if terms.cap_us < terms.life_us {
        Change::Put(State::at(now, terms.cap_us, terms))
    } else {
        Change::Remove
    }
}

fn allowed(accrued_us: f64, terms: &Terms, charge: &Charge) -> bool {
    charge.is_unlimited()
        || is_wait_allowed(accrued_us, charge) && is_debt_allowed(accrued_us, terms, charge)
}

/// The wait of a grant that found this balance, in whole milliseconds, rounded up.
pub fn wait_ms(accrued_us: f64) -> i64 {
    ceil_ms((-accrued_us - SLACK_US).max(0.0))
}

/// Time until a refused request could be granted if no other request came, in whole milliseconds,
/// rounded up. 0 if it can never be granted.
pub fn retry_after_ms(accrued_us: f64, terms: &Terms, charge: &Charge) -> i64 {
    let debts_never = charge.cost_us - terms.cap_us - SLACK_US > terms.max_debt_us;
    if debts_never || !is_wait_allowed(terms.cap_us, charge) {
        return 0;
    }
    let until_wait = -accrued_us - charge.max_wait_us;
    let until_debt = charge.cost_us - accrued_us - terms.max_debt_us;
    ceil_ms(until_wait.max(until_debt) - SLACK_US).max(1)
}

/// Whether a wait by this balance is within the limit of a request.
pub fn is_wait_allowed(accrued_us: f64, charge: &Charge) -> bool {
    accrued_us >= -charge.max_wait_us - SLACK_US
}

/// Whether the debt that a grant leaves is within the limit.
pub fn is_debt_allowed(accrued_us: f64, terms: &Terms, charge: &Charge) -> bool {
    accrued_us >= charge.cost_us - terms.max_debt_us - SLACK_US
}

/// Time until the bucket is full if no request comes, in whole milliseconds, rounded up.
pub fn full_in_ms(accrued_us: f64, terms: &Terms) -> i64 {
    ceil_ms((terms.cap_us - accrued_us).max(0.0))
}

fn ceil_ms(us: f64) -> i64 {
    (us / 1000.0).ceil() as i64
}

/// The kind of bucket that serves a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BucketKind {
    /// A bucket configured under the requested name.
    Configured,
    /// A dynamic bucket with the requested name.
    Dynamic {
        /// The most dynamic buckets in the namespace at once; `None`: no limit.
        max_buckets: Option<u64>,
    },
    /// The namespace's default bucket.
    NamespaceDefault,
    /// The default bucket of all namespaces.
    GlobalDefault,
}

#[cfg(test)]
#[path = "bucket_tests.rs"]
mod tests;
