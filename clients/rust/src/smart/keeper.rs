//! The task that takes the tokens of a smart bucket.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep, timeout};

use super::meter::Meter;
use super::{Stock, Trouble};
use crate::client::Client;
use crate::decision::{AcquireError, Decision, Level, Reason, Refusal};
use crate::metrics;
use crate::request::Request;

/// How often demand is measured, and what is too much thrown away.
const TICK: Duration = Duration::from_millis(100);

/// How long tokens that are asked for may take to come. While demand is greater than the bucket's
/// rate, this is how much is asked for at a time.
const SOON: Duration = Duration::from_millis(100);

/// The least pause after a refusal that says where the bucket stands, unless half of the bucket is
/// there before: else a request for the one token that comes next would follow the other.
const STEP: Duration = Duration::from_millis(20);

/// The bounds of the pause after requests without tokens: it doubles.
const PAUSES: [Duration; 2] = [Duration::from_millis(500), Duration::from_secs(10)];

/// How long the bucket is taken to refuse more tokens at once than it has refused.
const LIMIT_TIME: Duration = Duration::from_secs(60);

pub(super) struct Keeper {
    client: Client,
    namespace: String,
    bucket: String,
    is_critical: bool,
    ahead: Duration,
    stock: Arc<Stock>,
    meter: Meter,
    /// The demand that was refused.
    refused: Meter,
    /// The tokens that were granted, and not thrown away.
    granted: u64,
    /// When some came last.
    added_at: Instant,
    /// Where the bucket stood, and when, if that is known.
    level: Option<(Level, Instant)>,
    /// The tokens that are there for the next request, if a refusal has said so.
    part: Option<u64>,
    /// Whether the bucket lends tokens: has them used before they have come.
    lends: bool,
    /// Whether others keep the bucket in debt, so that its tokens are not to be had soon.
    is_contested: bool,
    /// The most that the bucket gives at once, and until when that is believed.
    limit: Option<(u64, Instant)>,
    /// The longest pause after a request without tokens.
    pause: Duration,
    /// The tokens that were counted: used and refused.
    counted: [u64; 2],
}

impl Drop for Keeper {
    /// Also when the runtime has ended: nobody gets tokens any more.
    fn drop(&mut self) {
        self.stock.tokens.close();
    }
}

impl Keeper {
    pub(super) fn new(
        client: Client,
        (namespace, bucket): (String, String),
        is_critical: bool,
        ahead: Duration,
        stock: Arc<Stock>,
    ) -> Self {
        Self {
            client,
            namespace,
            bucket,
            is_critical,
            ahead,
            stock,
            meter: Meter::default(),
            refused: Meter::default(),
            granted: 0,
            added_at: Instant::now(),
            level: None,
            part: None,
            lends: false,
            is_contested: false,
            limit: None,
            pause: PAUSES[0],
            counted: [0; 2],
        }
    }

    /// Runs until the application lets go.
    pub(super) async fn run(mut self) {
        self.meter.count(0, Instant::now());
        self.refused.count(0, Instant::now());
        loop {
            let demanded = self.measure();
            let waiting = self.stock.waiting.load(Ordering::SeqCst);
            let wanted = self.wanted(demanded, waiting);
            if wanted > 0 {
                self.ask(wanted).await;
            } else {
                let is_empty = self.stock.tokens.available_permits() == 0;
                let is_idle = demanded == 0 && waiting == 0 && is_empty;
                let tick = if is_idle { Duration::MAX } else { TICK };
                let _ = timeout(tick, self.stock.bell.notified()).await;
            }
            if self.stock.is_closed.load(Ordering::Relaxed) {
                return;
            }
        }
    }

    /// Counts the demand of the last second, and throws away what is too much for it.
    fn measure(&mut self) -> u64 {
        let stock = &self.stock;
        // Before the look, so that what comes after it rings the bell again.
        stock.is_woken.swap(false, Ordering::SeqCst);
        let counts = [&stock.used, &stock.refused].map(|count| count.load(Ordering::Relaxed));
        let before = std::mem::replace(&mut self.counted, counts);
        metrics::smart_tokens("used", counts[0] - before[0]);
        metrics::smart_tokens("refused", counts[1] - before[1]);
        self.meter.count(counts[0] + counts[1], Instant::now());
        self.refused.count(counts[1], Instant::now());
        let demanded = self.meter.demanded();
        let target = self.target(demanded);
        stock.low.store(target.div_ceil(2), Ordering::Relaxed);
        // Not before those could use them who wait for them.
        if self.added_at.elapsed() >= self.ahead {
            let too_many = (stock.tokens.available_permits() as u64).saturating_sub(target);
            let too_many = usize::try_from(too_many).unwrap_or(usize::MAX);
            self.granted -= stock.tokens.forget_permits(too_many) as u64;
        }
        demanded
    }

    /// The tokens to have, with this demand in a second.
    fn target(&self, demanded: u64) -> u64 {
        // A single use, or a burst, says nothing about the next second; but who was refused may come
        // again.
        let expected = if self.meter.is_steady() { demanded } else { self.refused.demanded() };
        (expected as f64 * self.ahead.as_secs_f64()) as u64
    }

    /// The tokens to ask for now.
    fn wanted(&self, demanded: u64, waiting: u64) -> u64 {
        let target = self.target(demanded);
        // Those that a caller has got who does not know it yet are among both.
        let there = self.granted.saturating_sub(self.stock.used.load(Ordering::Acquire));
        let is_low = there < target.div_ceil(2) || there < waiting;
        if is_low { target.saturating_add(waiting).saturating_sub(there) } else { 0 }
    }

    async fn ask(&mut self, wanted: u64) {
        let most = self.part.take().unwrap_or_else(|| self.most(Instant::now()));
        let tokens = wanted.min(most).max(1);
        let request = Request::new(&self.namespace, &self.bucket).tokens(tokens);
        // Where others wait for longer, too, nothing comes soon.
        let request = if self.is_contested { request } else { request.max_wait(SOON) };
        let request = if self.is_critical { request } else { request.not_critical() };
        match self.client.decide(&request).await {
            Ok(Decision::Granted(grant)) => {
                self.level = grant.level.map(|level| (level, Instant::now()));
                self.lends |= grant.level.is_some_and(|level| level.available < 0.0);
                self.is_contested &= grant.wait > SOON;
                self.pause = PAUSES[0];
                // They are not there before.
                sleep(grant.wait).await;
                self.add(grant.tokens);
                self.tell(Trouble::None);
            }
            Ok(Decision::Refused(refusal)) => self.refused(tokens, refusal).await,
            Err(error) => self.failed(error.into()).await,
        }
    }

    /// The most to ask for at once: what is there; and what comes soon, of a bucket that lends.
    fn most(&self, now: Instant) -> u64 {
        let limit = self.limit.filter(|(_, until)| now < *until).map_or(u64::MAX, |limit| limit.0);
        let Some((Level { available, rate, size }, at)) = self.level else { return limit };
        let there = (available + rate * now.duration_since(at).as_secs_f64()).min(size);
        let soon = rate * SOON.as_secs_f64();
        let most = match (self.is_contested, self.lends) {
            (true, _) => soon,
            (false, true) => there + soon,
            (false, false) => there,
        };
        (most as u64).min(limit)
    }

    fn add(&mut self, tokens: u64) {
        let stock = &self.stock.tokens;
        let room = Semaphore::MAX_PERMITS - stock.available_permits();
        let added = usize::try_from(tokens).unwrap_or(usize::MAX).min(room);
        (self.granted, self.added_at) = (self.granted + added as u64, Instant::now());
        stock.add_permits(added);
    }

    async fn refused(&mut self, tokens: u64, refusal: Refusal) {
        let retry_after = match (refusal.reason, refusal.retry_after) {
            (Reason::Limit | Reason::Banned, Some(retry_after)) => retry_after,
            (Reason::Limit | Reason::TooManyTokens, None) if tokens > 1 => {
                self.limit = Some((tokens / 2, Instant::now() + LIMIT_TIME));
                return;
            }
            _ => return self.failed(AcquireError::Refused(refusal)).await,
        };
        let (now, debt) = (Instant::now(), refusal.debt());
        self.is_contested = debt > SOON;
        if !self.is_contested {
            // It would have lent them.
            self.lends = false;
        }
        let there = refusal.level.map_or(0, |level| level.available as u64);
        if !self.is_contested && (1..tokens).contains(&there) {
            // A window does not refill before it ends: what is left of it is to be had now.
            (self.part, self.level) = (Some(there), refusal.level.map(|level| (level, now)));
            return;
        }
        let least = refusal.level.map_or(Duration::ZERO, |Level { available, rate, size }| {
            let missing = (size / 2.0 - available.max(0.0)).max(0.0);
            Duration::try_from_secs_f64(missing / rate).unwrap_or(STEP).min(STEP)
        });
        // Where nobody says how fast tokens come: so many until the retry time.
        let rate = tokens as f64 / retry_after.as_secs_f64().max(f64::MIN_POSITIVE);
        let level = refusal.level.or(Level::new(0.0, rate, f64::INFINITY));
        self.level = level.map(|level| {
            // Less is there than it seems: others have come, or the rest is kept in reserve.
            let available = level.available.min((tokens / 2) as f64);
            (Level { available, ..level }, now)
        });
        self.tell(Trouble::Refused(refusal, now));
        // A part of them comes before the others; one has no part.
        let is_part = tokens > 1
            && level.is_some_and(|level| tokens as f64 > level.rate * SOON.as_secs_f64());
        let pause = if is_part { retry_after.min(debt + SOON) } else { retry_after };
        self.sleep(pause.max(least)).await;
    }

    /// There are no tokens, and nobody knows when there will be.
    async fn failed(&mut self, error: AcquireError) {
        self.tell(Trouble::Failed(error, Instant::now()));
        sleep(PAUSES[0]).await;
    }

    /// Not for too long, as the limit may be raised.
    async fn sleep(&mut self, pause: Duration) {
        if pause > self.pause {
            sleep(self.pause).await;
            self.pause = (self.pause * 2).min(PAUSES[1]);
        } else {
            sleep(pause).await;
        }
    }

    fn tell(&self, trouble: Trouble) {
        self.stock.trouble.send_replace(trouble);
    }
}
