//! The debt bucket: tokens accrue lazily up to a size, a request may take more than there
//! is, and the next caller waits until that debt is paid. The idea is that of Guava's
//! `RateLimiter` as the quotaservice design took it up; here it is kept in the form of the
//! generic cell rate algorithm (ITU-T I.371), whose whole state is one moment in time.
//!
//! That moment, [`State`]'s `zero`, is when the balance is (or was) exactly zero. All
//! arithmetic is in microseconds of accrual. With `interval` the time one token takes,
//! `accrued = min(cap, now - zero)` is the balance as a time, a grant moves `zero` by
//! `tokens * interval`, and a balance below zero *is* the time to wait. A grant from a
//! bucket that is not full adds to `zero` without reading the clock into it, so nothing is
//! lost however often the bucket is asked.
//!
//! `lua/allow.lua` does the same operations in the same order on the same doubles, so that
//! both stores give the same answers to the last bit. Who changes one, changes both.

use super::time::Micros;

/// Fractions of a microsecond in [`State::zero_frac`]: 2^18 of them. One token at 10^8 a
/// second takes 0.01 µs, 2621 of these units, so rounding a cost up loses 0.02 % at most.
pub const FRACTIONS: f64 = 262_144.0;

/// What counts as no time at all, in µs: below the clock's resolution, and below what one
/// token takes at 10^8 a second. It absorbs the fractions by which costs were rounded up,
/// so that a bucket of 3 a second is ready after one second, not a microsecond later.
pub const SLACK_US: f64 = 0.003_906_25;

/// The longest time, in µs, that a bucket may take to fill, or be in debt: four years.
/// Stored times are modulo 2^48 µs (nine years), so anything longer would be ambiguous.
pub const MAX_SPAN_US: f64 = 126_230_400_000_000.0;

/// The slowest and the fastest rate, in tokens a second. Faster, the fractions of a microsecond
/// that a state keeps would be too coarse.
pub const RATES: std::ops::RangeInclusive<f64> = 1e-8..=1e8;

/// The finest grid of expiries, in µs: an eighth of a second.
const FINEST_GRID_US: f64 = 131_072.0;

/// Bytes of an encoded [`State`].
pub const STATE_BYTES: usize = 12;

const TIME_MODULUS: i64 = 1 << 48;

/// One bucket's limits as an operator writes them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BucketLimit {
    /// The most tokens it holds.
    pub size_tokens: u64,
    /// Tokens a second that accrue.
    pub fill_rate: f64,
    /// The longest wait that a grant may carry.
    pub wait_timeout_ms: u64,
    /// How long after its last use a dynamic bucket is removed; `None`: never.
    pub max_idle_ms: Option<u64>,
    /// The longest time that paying off a debt may take.
    pub max_debt_ms: u64,
    /// The most tokens one request may take; `None`: no limit.
    pub max_tokens_per_request: Option<u64>,
    /// The share of the size, in percent, past which a grant is marked.
    pub soft_limit_percent: Option<f64>,
    /// The most tokens that a node takes ahead of its requests; 0: none.
    pub prefetch_tokens: u64,
}

impl Default for BucketLimit {
    fn default() -> Self {
        Self {
            size_tokens: 100,
            fill_rate: 50.0,
            wait_timeout_ms: 1000,
            max_idle_ms: None,
            max_debt_ms: 10_000,
            max_tokens_per_request: Some(50),
            soft_limit_percent: None,
            prefetch_tokens: 0,
        }
    }
}

impl BucketLimit {
    /// The same limits in the units that decisions are computed in.
    pub fn terms(&self) -> Terms {
        Terms::new(self.size_tokens as f64, self.fill_rate, self.max_debt_ms)
    }

    /// Whether a grant that leaves `tokens` in a bucket of `size` tokens is past the soft limit.
    pub fn past_soft_limit(&self, tokens: f64, size: impl FnOnce() -> f64) -> bool {
        self.soft_limit_percent.is_some_and(|percent| {
            let size = size();
            size - tokens > size * percent / 100.0
        })
    }
}

/// A [`Terms`]' rate and debt limit in 29 bits: 6 bits of binary exponent, 18 of mantissa,
/// and the debt limit in milliseconds modulo 31. A state carries the mark of the terms that
/// it was written under; where that differs from the terms of today, the limits have changed
/// and the balance is carried over at the rate it was earned at. Rates that are whole numbers
/// up to 524,288 are kept exactly, others to within 4 millionths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark(u32);

impl Mark {
    fn new(rate: f64, max_debt_ms: u64) -> Self {
        let bits = rate.to_bits();
        let exponent = ((bits >> 52) as i64 - 1023 + 32).clamp(0, 63) as u32;
        let mantissa = ((bits >> 34) & 0x3_ffff) as u32;
        Self(exponent << 23 | mantissa << 5 | (max_debt_ms % 31) as u32)
    }

    /// As a number below 2^29.
    pub fn bits(self) -> u32 {
        self.0
    }

    fn same_rate(self, other: Self) -> bool {
        self.0 >> 5 == other.0 >> 5
    }

    /// Tokens a second.
    fn rate(self) -> f64 {
        let exponent = u64::from(self.0 >> 23) + 1023 - 32;
        let mantissa = u64::from(self.0 >> 5 & 0x3_ffff);
        f64::from_bits(exponent << 52 | mantissa << 34)
    }
}

/// What one bucket grants, in the units that decisions are computed in.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Terms {
    /// Microseconds that one token takes to accrue.
    pub interval_us: f64,
    /// Microseconds that an empty bucket takes to fill.
    pub cap_us: f64,
    /// How long after its balance was zero a state is needed, in µs: as long as `cap_us`, but
    /// where nodes take tokens ahead. There, `cap_us` differs between nodes for a moment when
    /// one comes or goes, and a state must be there for all of them.
    pub life_us: f64,
    /// The longest debt, as a time.
    pub max_debt_us: f64,
    /// What a state written under these terms is marked with.
    pub mark: Mark,
    /// The grid that expiries are on, in µs: a power of two, at most a sixteenth of `life_us`, but
    /// not finer than an eighth of a second. A state outlives the moment at which its bucket is
    /// full by a step of it at most, so that few grants move the expiry.
    pub grid_us: f64,
}

impl Terms {
    fn new(size_tokens: f64, rate: f64, max_debt_ms: u64) -> Self {
        let interval_us = 1e6 / rate;
        let cap_us = size_tokens * interval_us;
        Self {
            interval_us,
            cap_us,
            life_us: cap_us,
            max_debt_us: max_debt_ms as f64 * 1000.0,
            mark: Mark::new(rate, max_debt_ms),
            grid_us: grid_us(cap_us),
        }
    }

    /// The longest time, in µs, that a state may be about after the last grant.
    pub fn longest_life_us(&self) -> f64 {
        self.life_us + self.grid_us + self.max_debt_us
    }

    /// The share of one node among `nodes` that decide each on its own: rate and size are
    /// divided, though not to less than one token; waits and debts stay as long as they were.
    pub fn share(&self, nodes: u32) -> Self {
        let nodes = f64::from(nodes.max(1));
        let interval_us = self.interval_us * nodes;
        // Less than one token could never be granted where no debt is allowed.
        let cap_us = self.cap_us.max(interval_us);
        let grid_us = grid_us(cap_us);
        let hash = self.mark.0 & 31;
        let mark = Mark(Mark::new(1e6 / interval_us, 0).0 & !31 | hash);
        Self { interval_us, cap_us, life_us: cap_us, mark, grid_us, ..*self }
    }

    /// What is left to the bucket while each of `nodes` may hold [`Terms::ahead_tokens`]: less
    /// of a size, but all else the same. More nodes never leave more.
    pub fn beside_prefetch(&self, prefetch_tokens: u64, nodes: u32) -> Self {
        let held_us = self.cost_us(prefetch_tokens) * f64::from(nodes.max(1));
        Self { cap_us: self.life_us - held_us.min(self.life_us / 2.0), ..*self }
    }

    /// The most tokens that each of `nodes` may hold ahead of its requests, so that all of them
    /// together hold half of the size at most. More nodes never make it more.
    pub fn ahead_tokens(&self, prefetch_tokens: u64, nodes: u32) -> u64 {
        let size = self.life_us / self.interval_us;
        prefetch_tokens.min((size / 2.0 / f64::from(nodes.max(1))) as u64)
    }

    /// What `tokens` cost, in microseconds of accrual.
    pub fn cost_us(&self, tokens: u64) -> f64 {
        tokens as f64 * self.interval_us
    }

    /// Microseconds of accrual as tokens, to a millionth.
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

/// A bucket that is not full. A full bucket needs no state: it and an absent one are the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct State {
    /// When the balance is zero: whole microseconds since the epoch, …
    pub zero_us: i64,
    /// … and this many 2^18ths of one.
    pub zero_frac: u32,
    /// The terms under which this was written.
    pub mark: Mark,
    /// The debt is longer than the debt limit because the limits were changed, and must be
    /// paid all the same. Without this, such a debt can only come of a clock that stepped back.
    pub carried: bool,
}

impl State {
    /// As stored: little-endian, 6 bytes of whole microseconds modulo 2^48, then 18 bits of
    /// fraction with the mark's upper 6 bits, then the mark's lower 23 bits above `carried`.
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

    /// Reads what [`State::encode`] wrote, at most four and a half years before or after `now`.
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

    /// The balance at `now`, as a time.
    fn accrued_us(&self, now: Micros) -> f64 {
        (now.0 - self.zero_us) as f64 - f64::from(self.zero_frac) / FRACTIONS
    }

    /// The state after `zero` has moved by `us`, rounded up.
    fn moved(self, us: f64) -> Self {
        let mut whole = us.floor();
        let mut frac = f64::from(self.zero_frac) + ((us - whole) * FRACTIONS).ceil();
        if frac >= FRACTIONS {
            whole += 1.0;
            frac -= FRACTIONS;
        }
        Self { zero_us: self.zero_us + whole as i64, zero_frac: frac as u32, ..self }
    }
}

/// One request to a bucket.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Request {
    /// What the tokens cost: [`Terms::cost_us`]; negative: so much is given back.
    pub cost_us: f64,
    /// The longest wait that a grant may carry; negative: so much must be there.
    pub max_wait_us: f64,
}

impl Request {
    /// For tokens, which may come of the future.
    pub fn take(cost_us: f64, max_wait_ms: u64) -> Self {
        Self { cost_us, max_wait_us: max_wait_ms as f64 * 1000.0 }
    }

    /// For tokens that are there: without a wait, and without leaving a debt.
    pub fn take_ahead(cost_us: f64) -> Self {
        Self { cost_us, max_wait_us: -cost_us }
    }

    /// Gives tokens back, what they cost; beyond what makes the bucket full, they are lost. It
    /// is refused only where it would leave a debt beyond the limit.
    pub fn give_back(cost_us: f64) -> Self {
        // So much pays any debt and fills any bucket.
        let most_us = 2.0 * MAX_SPAN_US;
        Self { cost_us: -cost_us.min(most_us), max_wait_us: f64::INFINITY }
    }
}

/// What becomes of a bucket's state.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Change {
    /// It stays as it is.
    Keep,
    /// It is replaced by this.
    Put(State),
    /// The bucket is full, and its state goes.
    Remove,
}

/// A bucket's answer to one request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Decision {
    /// Whether the tokens are granted.
    pub granted: bool,
    /// The balance that the request met, as a time; negative: in debt.
    pub accrued_us: f64,
    /// What to do with the state.
    pub change: Change,
}

impl State {
    /// When it is needed no more, in milliseconds since the epoch: a little after its bucket is
    /// full.
    pub fn expires_ms(&self, terms: &Terms) -> i64 {
        let step = ((self.zero_us as f64 + terms.life_us) / terms.grid_us).floor();
        ((step + 1.0) * terms.grid_us / 1000.0).ceil() as i64
    }
}

/// Decides one request to a bucket in `state` (`None`: full) at `now`.
pub fn decide(state: Option<&State>, terms: &Terms, request: &Request, now: Micros) -> Decision {
    let mut accrued_us = terms.cap_us;
    // Restated: the state no longer says by itself what the balance is, and is written anew.
    let (mut restated, mut carried) = (false, false);
    if let Some(state) = state {
        accrued_us = state.accrued_us(now);
        carried = state.carried;
        if state.mark != terms.mark {
            if !state.mark.same_rate(terms.mark) {
                // Both rates as marks keep them: nodes with different limits, which restate a
                // balance in turn, then neither forgive any of it nor add to it.
                accrued_us *= state.mark.rate() / terms.mark.rate();
                // A debt that would take longer can't be stored, nor would anyone wait for it.
                accrued_us = accrued_us.max(-MAX_SPAN_US);
            }
            (restated, carried) = (true, true);
        }
        // Every grant leaves at most the debt limit, so a longer debt that no change of
        // limits explains comes of a clock that stepped back: nobody pays for that.
        if !carried && accrued_us < -terms.max_debt_us - 1.0 {
            accrued_us = -terms.max_debt_us;
            restated = true;
        }
    }
    let full = accrued_us >= terms.cap_us;
    if full {
        accrued_us = terms.cap_us;
    }

    let granted = allowed(accrued_us, terms, request);
    let change = if granted {
        let left = match state {
            Some(state) if !restated && !full => {
                State { carried: false, ..*state }.moved(request.cost_us)
            }
            _ => State::at(now, accrued_us - request.cost_us, terms),
        };
        let filled = request.cost_us < 0.0 && left.accrued_us(now) >= terms.cap_us;
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

/// A bucket that has a state is full. By the terms of another node it may not be.
fn fill(terms: &Terms, now: Micros) -> Change {
    if terms.cap_us < terms.life_us {
        Change::Put(State::at(now, terms.cap_us, terms))
    } else {
        Change::Remove
    }
}

fn allowed(accrued_us: f64, terms: &Terms, request: &Request) -> bool {
    -accrued_us - SLACK_US <= request.max_wait_us
        && request.cost_us - accrued_us - SLACK_US <= terms.max_debt_us
}

/// How long a grant must wait that met this balance, in whole milliseconds, rounded up.
pub fn wait_ms(accrued_us: f64) -> i64 {
    ceil_ms((-accrued_us - SLACK_US).max(0.0))
}

/// How long until a refused request could be granted if nobody else asked, in whole
/// milliseconds, rounded up; 0 if it never could.
pub fn retry_after_ms(accrued_us: f64, terms: &Terms, request: &Request) -> i64 {
    if request.cost_us - terms.cap_us - SLACK_US > terms.max_debt_us {
        return 0;
    }
    let until_wait = -accrued_us - request.max_wait_us;
    let until_debt = request.cost_us - accrued_us - terms.max_debt_us;
    ceil_ms(until_wait.max(until_debt) - SLACK_US).max(1)
}

fn ceil_ms(us: f64) -> i64 {
    (us / 1000.0).ceil() as i64
}

/// What kind of bucket serves a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Configured under the name asked for.
    Configured {
        /// Its namespace bounds its dynamic buckets.
        bounded: bool,
    },
    /// Dynamic, under the name asked for.
    Dynamic {
        /// How many its namespace may have at once; `None`: no limit.
        max_buckets: Option<u64>,
    },
    /// The namespace's default bucket.
    NamespaceDefault,
    /// The default bucket of them all.
    GlobalDefault,
}

#[cfg(test)]
#[path = "bucket_tests.rs"]
mod tests;
