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
use crate::request::Request;

/// How often demand is measured, and what is too much thrown away.
const TICK: Duration = Duration::from_millis(100);

/// How long tokens that are asked for may take to come. While demand is greater than the bucket's
/// rate, this is how much is asked for at a time.
const SOON: Duration = Duration::from_millis(100);

/// The longest pause after a request that has no tokens.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

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
    /// The tokens that were granted, and not thrown away.
    granted: u64,
    /// Where the bucket stood, and when, if that is known.
    level: Option<(Level, Instant)>,
    /// The most that the bucket gives at once, and until when that is believed.
    limit: Option<(u64, Instant)>,
    /// The pause after the last request without a decision.
    pause: Duration,
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
            granted: 0,
            level: None,
            limit: None,
            pause: Duration::ZERO,
        }
    }

    /// Runs until the application lets go.
    pub(super) async fn run(mut self) {
        self.meter.count(0, Instant::now());
        loop {
            let demanded = self.measure();
            let wanted = self.wanted(demanded);
            if wanted > 0 {
                self.ask(wanted).await;
            } else {
                let tick = if demanded == 0 { Duration::MAX } else { TICK };
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
        stock.is_woken.store(false, Ordering::Release);
        let demanded = stock.used.load(Ordering::Relaxed) + stock.refused.load(Ordering::Relaxed);
        self.meter.count(demanded, Instant::now());
        let demanded = self.meter.demanded();
        let target = self.target(demanded);
        stock.low.store(target.div_ceil(2), Ordering::Relaxed);
        let too_many = (stock.tokens.available_permits() as u64).saturating_sub(target);
        let too_many = usize::try_from(too_many).unwrap_or(usize::MAX);
        self.granted -= stock.tokens.forget_permits(too_many) as u64;
        demanded
    }

    /// The tokens to have, with this demand in a second.
    fn target(&self, demanded: u64) -> u64 {
        (demanded as f64 * self.ahead.as_secs_f64()) as u64
    }

    /// The tokens to ask for now.
    fn wanted(&self, demanded: u64) -> u64 {
        let (stock, target) = (&self.stock, self.target(demanded));
        let waiting = stock.waiting.load(Ordering::Acquire);
        // Those that a caller has got who does not know it yet are among both.
        let there = self.granted.saturating_sub(stock.used.load(Ordering::Acquire));
        let is_low = there < target.div_ceil(2) || there < waiting;
        if is_low { (target + waiting).saturating_sub(there) } else { 0 }
    }

    async fn ask(&mut self, wanted: u64) {
        let tokens = wanted.min(self.most(Instant::now())).max(1);
        let request = Request::new(&self.namespace, &self.bucket).tokens(tokens).max_wait(SOON);
        let request = if self.is_critical { request } else { request.not_critical() };
        match self.client.allow(request).await {
            Ok(Decision::Granted(grant)) => {
                let answered = Instant::now();
                // They are not there before.
                sleep(grant.wait).await;
                self.add(grant.tokens);
                self.level = grant.level.map(|level| (level, answered));
                self.pause = Duration::ZERO;
                self.tell(Trouble::None);
            }
            Ok(Decision::Refused(refusal)) => self.refused(tokens, refusal).await,
            Err(error) => self.failed(Trouble::Failed(error.into())).await,
        }
    }

    /// The most to ask for at once: what is there, and what comes soon. So a bucket that lends tokens
    /// does not lend more than that, and others get theirs.
    fn most(&self, now: Instant) -> u64 {
        let limit = self.limit.filter(|(_, until)| now < *until).map_or(u64::MAX, |limit| limit.0);
        let most = self.level.map(|(Level { available, rate }, at)| {
            available + rate * (now.duration_since(at) + SOON).as_secs_f64()
        });
        most.map_or(u64::MAX, |most| most as u64).min(limit)
    }

    fn add(&mut self, tokens: u64) {
        let stock = &self.stock.tokens;
        let room = Semaphore::MAX_PERMITS - stock.available_permits();
        let added = usize::try_from(tokens).unwrap_or(usize::MAX).min(room);
        self.granted += added as u64;
        stock.add_permits(added);
    }

    async fn refused(&mut self, tokens: u64, refusal: Refusal) {
        let retry_after = match (refusal.reason, refusal.retry_after) {
            (Reason::Limit | Reason::Banned, Some(retry_after)) => retry_after,
            (Reason::Limit | Reason::TooManyTokens, None) if tokens > 1 => {
                self.limit = Some((tokens / 2, Instant::now() + LIMIT_TIME));
                return;
            }
            _ => return self.failed(Trouble::Failed(AcquireError::Refused(refusal))).await,
        };
        let (now, debt) = (Instant::now(), refusal.debt());
        // Where nobody says how fast tokens come: so many until the retry time. None are lent there,
        // so only those are asked for that have come by then.
        let rate = tokens as f64 / retry_after.as_secs_f64().max(f64::MIN_POSITIVE);
        let level = refusal.level.or(Level::new(-rate * SOON.as_secs_f64(), rate));
        self.level = level.map(|level| (level, now));
        self.tell(Trouble::Refused(refusal));
        sleep(retry_after.min(debt + SOON).min(LONGEST_PAUSE)).await;
    }

    /// There are no tokens, and nobody knows when there will be.
    async fn failed(&mut self, trouble: Trouble) {
        self.tell(trouble);
        self.pause = (self.pause * 2).clamp(TICK, LONGEST_PAUSE);
        sleep(self.pause).await;
    }

    fn tell(&self, trouble: Trouble) {
        self.stock.trouble.send_replace(trouble);
    }
}
