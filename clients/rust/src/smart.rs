//! Smart buckets: tokens of a bucket that the client takes ahead of need, so that their use costs no
//! call to a node.

mod keeper;
mod meter;

use std::fmt::{self, Debug};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::{Notify, Semaphore, watch};
use tokio::time::{Instant, timeout};

use self::keeper::Keeper;
use crate::client::Client;
use crate::decision::{AcquireError, DecidedBy, Error, NoAnswer, Reason, Refusal};

/// How much use is taken ahead at most, if the application does not say otherwise.
const AHEAD: Duration = Duration::from_secs(1);

impl Client {
    /// Takes tokens of a bucket ahead of need: see [`SmartBucket`].
    pub fn smart_bucket<'a>(&'a self, namespace: &'a str, bucket: &'a str) -> SmartBuilder<'a> {
        SmartBuilder { client: self, namespace, bucket, ahead: AHEAD, is_critical: true }
    }
}

/// The settings of a [`SmartBucket`].
#[must_use]
pub struct SmartBuilder<'a> {
    client: &'a Client,
    namespace: &'a str,
    bucket: &'a str,
    ahead: Duration,
    is_critical: bool,
}

impl SmartBuilder<'_> {
    /// How much use is taken ahead at most: so many tokens as are used in this time; default: one
    /// second.
    pub fn ahead(self, ahead: Duration) -> Self {
        Self { ahead, ..self }
    }

    /// Leaves what the bucket keeps in reserve for critical requests.
    pub fn not_critical(self) -> Self {
        Self { is_critical: false, ..self }
    }

    /// Begins to take tokens, with the first use.
    ///
    /// # Panics
    ///
    /// If neither the client was made in a Tokio runtime, which only one of a
    /// [`Fake`](crate::Fake) can, nor this is called in one.
    pub fn build(self) -> SmartBucket {
        let stock = Arc::new(Stock::new());
        let names = (self.namespace.to_owned(), self.bucket.to_owned());
        let (client, ahead) = (self.client.clone(), self.ahead);
        let keeper = Keeper::new(client, names, self.is_critical, ahead, Arc::clone(&stock));
        self.client.tasks().spawn(keeper.run());
        SmartBucket(Arc::new(Handle(stock)))
    }
}

/// Tokens of a bucket that are taken ahead of need, in the background, so that their use costs no
/// call to a node. Clones share them.
///
/// As many are taken as are used in a second (see [`ahead`](SmartBuilder::ahead)), and half of
/// them are left when more are asked for. So the first call after a pause waits for a node, and up
/// to a second's use is lost when it ends: what was taken is not given back. All clients together
/// never use more than the nodes, or the client's [`Fallback`](crate::Fallback), have granted. The
/// requests to nodes are not told to [`on_refused`](crate::Builder::on_refused).
///
/// It works on after [`Client::close`].
///
/// ```no_run
/// # async fn example(client: tollgate_client::Client) -> Result<(), Box<dyn std::error::Error>> {
/// use std::time::Duration;
///
/// let reads = client.smart_bucket("db", "reads").build();
/// reads.acquire(1, Duration::from_secs(1)).await?;
/// // Now read from the database.
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct SmartBucket(Arc<Handle>);

/// The keeper ends when this is dropped.
struct Handle(Arc<Stock>);

impl Drop for Handle {
    fn drop(&mut self) {
        self.0.is_closed.store(true, Ordering::Relaxed);
        self.0.bell.notify_one();
    }
}

/// What the application and the keeper share.
struct Stock {
    tokens: Semaphore,
    /// All tokens that were used.
    used: AtomicU64,
    /// All tokens that were refused.
    refused: AtomicU64,
    /// Those that callers wait for.
    waiting: AtomicU64,
    /// With fewer tokens than these, the keeper is woken.
    low: AtomicU64,
    is_woken: AtomicBool,
    bell: Notify,
    /// Why the last tokens that were asked for are not there.
    trouble: watch::Sender<Trouble>,
    /// The application has let go.
    is_closed: AtomicBool,
}

/// Why there are no tokens.
#[derive(Clone, Default)]
enum Trouble {
    #[default]
    None,
    /// There will be some, as was said then.
    Refused(Refusal, Instant),
    /// Nobody knows when there will be some; who waits is told.
    Failed(AcquireError, Instant),
}

/// How long that is true.
const TROUBLE_TIME: Duration = Duration::from_secs(2);

impl SmartBucket {
    /// Uses tokens if they are there. Costs no call to a node. A request for 0 tokens is one for 1.
    #[must_use]
    pub fn try_acquire(&self, tokens: u32) -> bool {
        let (stock, tokens) = (&self.0.0, tokens.max(1));
        let is_there = stock.take(tokens);
        if !is_there {
            stock.refused.fetch_add(tokens.into(), Ordering::Relaxed);
            stock.wake();
        }
        is_there
    }

    /// Uses tokens, and waits for them up to `max_wait` if they are not there. Those who came first
    /// are served first. A request for 0 tokens is one for 1.
    ///
    /// If the future is dropped before it is ready, no tokens are used.
    pub async fn acquire(&self, tokens: u32, max_wait: Duration) -> Result<(), AcquireError> {
        let (stock, tokens) = (&self.0.0, tokens.max(1));
        if stock.take(tokens) {
            return Ok(());
        }
        let _waiting = Waiting::new(stock, tokens);
        let mut troubles = stock.trouble.subscribe();
        stock.wake();
        let mut permits = pin!(stock.tokens.acquire_many(tokens));
        let got = timeout(max_wait, async {
            loop {
                tokio::select! {
                    biased;
                    permits = &mut permits => return match permits {
                        Ok(permits) => {
                            permits.forget();
                            stock.used.fetch_add(tokens.into(), Ordering::Relaxed);
                            Ok(())
                        }
                        Err(_) => Err(Error::NoDecision(NoAnswer::Closed).into()),
                    },
                    // The sender is in the stock.
                    _ = troubles.changed() => {
                        if let Trouble::Failed(error, _) = &*troubles.borrow_and_update() {
                            return Err(error.clone());
                        }
                    }
                }
            }
        });
        let got = got.await.unwrap_or_else(|_| Err(stock.refusal()));
        if got.is_err() {
            stock.refused.fetch_add(tokens.into(), Ordering::Relaxed);
        }
        got
    }
}

impl Stock {
    fn new() -> Self {
        Self {
            tokens: Semaphore::new(0),
            used: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            waiting: AtomicU64::new(0),
            low: AtomicU64::new(0),
            is_woken: AtomicBool::new(false),
            bell: Notify::new(),
            trouble: watch::Sender::default(),
            is_closed: AtomicBool::new(false),
        }
    }

    /// Uses tokens if they are there, and nobody waits for them.
    fn take(&self, tokens: u32) -> bool {
        let Ok(permits) = self.tokens.try_acquire_many(tokens) else { return false };
        permits.forget();
        self.used.fetch_add(tokens.into(), Ordering::Relaxed);
        if (self.tokens.available_permits() as u64) < self.low.load(Ordering::Relaxed) {
            self.wake();
        }
        true
    }

    fn wake(&self) {
        if !self.is_woken.load(Ordering::SeqCst) && !self.is_woken.swap(true, Ordering::SeqCst) {
            self.bell.notify_one();
        }
    }

    /// The refusal of who has waited for too long.
    fn refusal(&self) -> AcquireError {
        match &*self.trouble.borrow() {
            Trouble::Failed(error, at) if at.elapsed() <= TROUBLE_TIME => error.clone(),
            Trouble::Refused(refusal, at) if at.elapsed() <= TROUBLE_TIME => {
                let retry_after =
                    refusal.retry_after.map(|after| after.saturating_sub(at.elapsed()));
                AcquireError::Refused(Refusal { retry_after, ..refusal.clone() })
            }
            _ => AcquireError::Refused(Refusal::new(Reason::Limit, None, DecidedBy::Node)),
        }
    }
}

/// A caller who waits for tokens.
struct Waiting<'a> {
    stock: &'a Stock,
    tokens: u32,
}

impl<'a> Waiting<'a> {
    fn new(stock: &'a Stock, tokens: u32) -> Self {
        // Before the look whether the keeper is woken, which looks here after it has slept.
        stock.waiting.fetch_add(tokens.into(), Ordering::SeqCst);
        Self { stock, tokens }
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.stock.waiting.fetch_sub(self.tokens.into(), Ordering::SeqCst);
    }
}

impl Debug for SmartBucket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tokens = self.0.0.tokens.available_permits();
        f.debug_struct("SmartBucket").field("tokens", &tokens).finish_non_exhaustive()
    }
}
