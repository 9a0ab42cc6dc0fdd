//! The bytes that a node buffers for its clients: parts of requests, requests being decided, and
//! answers that are not sent yet, on both ports together.
//!
//! A buffer may grow as long as it is smaller than what the whole node has free: a dynamic
//! threshold (Choudhury and Hahne, "Dynamic queue length thresholds for shared-memory packet
//! switches", 1998). A single connection gets half of an idle node. Among many, those that hold most
//! reach the threshold first, while those that hold little go on. Nothing has to look for the
//! largest one.
//!
//! Beyond the threshold a connection is not read from, so that flow control stops its client. It is
//! not refused.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::Mutex;
use tokio::time::sleep;

use crate::metrics::BudgetMetrics;

/// The default limit of a node, in bytes.
pub const DEFAULT_LIMIT: usize = 128 << 20;

/// Time to the first check for free bytes. It doubles with each check, …
const FIRST_CHECK: Duration = Duration::from_millis(5);

/// … up to this.
const LAST_CHECK: Duration = Duration::from_millis(80);

/// Bytes that a connection may always buffer if it has none yet, so that each makes progress.
const ALWAYS: usize = 16 << 10;

/// The bytes that one node may buffer. Clones share them.
#[derive(Clone)]
pub struct Budget(Arc<Shared>);

struct Shared {
    limit: usize,
    used: AtomicUsize,
    metrics: BudgetMetrics,
}

impl Budget {
    /// A budget of `limit` bytes, all of them free.
    pub fn new(limit: usize, metrics: BudgetMetrics) -> Self {
        Self(Arc::new(Shared { limit, used: AtomicUsize::new(0), metrics }))
    }

    /// A budget that stops nobody, and is not measured.
    pub fn unlimited() -> Self {
        Self::new(usize::MAX, BudgetMetrics::noop())
    }

    /// An account for one direction of one connection. The directions are apart because a client
    /// that takes no answers must still be able to send its window updates, and because a request
    /// that is complete must be decided before its bytes are free again.
    pub fn account(&self) -> Arc<Account> {
        let (used, turn) = (AtomicUsize::new(0), Mutex::new(()));
        Arc::new(Account { budget: self.clone(), used, turn })
    }

    /// Bytes buffered in all accounts.
    pub fn used(&self) -> usize {
        self.0.used.load(Ordering::Relaxed)
    }

    fn free(&self) -> usize {
        self.0.limit.saturating_sub(self.used())
    }
}

/// What one connection buffers in one direction.
pub struct Account {
    budget: Budget,
    used: AtomicUsize,
    /// Held by the one task that checks for room, so that a connection has one timer however many
    /// streams wait.
    turn: Mutex<()>,
}

impl Account {
    /// Whether this connection may buffer `bytes` more. A piece of a request is read without
    /// knowing its length: then it is 0, and the threshold may be passed by one piece.
    pub fn has_room(&self, bytes: usize) -> bool {
        let used = self.used.load(Ordering::Relaxed);
        used + bytes < self.budget.free() || (used == 0 && bytes <= ALWAYS)
    }

    /// Waits until this connection may read another piece. Waiters go on in the order of their
    /// calls. The caller bounds the time.
    pub async fn room(&self) {
        self.room_for(0).await;
    }

    /// Waits until this connection may buffer `bytes` more, and counts them. What is too much for
    /// any node of this limit waits for a quarter of the limit, and is counted as that.
    pub async fn reserve(self: &Arc<Self>, bytes: usize) -> Held {
        let bytes = bytes.min(self.budget.0.limit / 4);
        self.room_for(bytes).await;
        self.hold(bytes)
    }

    async fn room_for(&self, bytes: usize) {
        if self.has_room(bytes) {
            return;
        }
        self.budget.0.metrics.pauses.increment(1);
        let _turn = self.turn.lock().await;
        let mut pause = FIRST_CHECK;
        while !self.has_room(bytes) {
            sleep(pause).await;
            pause = (pause * 2).min(LAST_CHECK);
        }
    }

    /// Counts so many bytes until the result is dropped. Never fails: the bytes are there already.
    pub fn hold(self: &Arc<Self>, bytes: usize) -> Held {
        let mut held = Held { account: Arc::clone(self), bytes: 0 };
        held.set(bytes);
        held
    }
}

/// Bytes counted in an account until this is dropped.
pub struct Held {
    account: Arc<Account>,
    bytes: usize,
}

impl Held {
    /// Counts so many bytes from now on, instead of as many as before.
    pub fn set(&mut self, bytes: usize) {
        let shared = &self.account.budget.0;
        if let Some(more) = bytes.checked_sub(self.bytes) {
            self.account.used.fetch_add(more, Ordering::Relaxed);
            shared.used.fetch_add(more, Ordering::Relaxed);
            shared.metrics.buffered.increment(more as f64);
        } else {
            let less = self.bytes - bytes;
            self.account.used.fetch_sub(less, Ordering::Relaxed);
            shared.used.fetch_sub(less, Ordering::Relaxed);
            shared.metrics.buffered.decrement(less as f64);
        }
        self.bytes = bytes;
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.set(0);
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future as _;
    use std::pin::pin;
    use std::task::{Context, Waker};

    use super::*;

    fn budget(limit: usize) -> Budget {
        Budget::new(limit, BudgetMetrics::noop())
    }

    /// Buffers in pieces of 10 bytes for as long as there is room.
    fn fill(account: &Arc<Account>) -> Held {
        let mut held = account.hold(0);
        while account.has_room(0) {
            held.set(held.bytes + 10);
        }
        held
    }

    #[test]
    fn a_connection_alone_gets_half_of_it() {
        let budget = budget(1000);
        assert_eq!(fill(&budget.account()).bytes, 500);
        assert_eq!(budget.used(), 0, "dropped");
    }

    #[test]
    fn a_small_connection_goes_on_beside_large_ones() {
        let budget = budget(10_000);
        let large: Vec<_> = (0..9).map(|_| fill(&budget.account())).collect();
        let first = large[0].bytes;
        assert!(large.iter().all(|one| one.bytes <= first), "nobody passes the first");
        let free = 10_000 - budget.used();
        assert!(free > 0, "{} used", budget.used());
        let small = fill(&budget.account());
        assert!(small.bytes >= free / 2, "{} of {free}", small.bytes);
        assert!(budget.used() <= 10_000);
    }

    #[test]
    fn an_empty_connection_always_has_room() {
        let budget = budget(100);
        let _most = budget.account().hold(1000);
        let empty = budget.account();
        assert!(empty.has_room(0));
        let _some = empty.hold(1);
        assert!(!empty.has_room(0));
    }

    #[tokio::test]
    async fn the_largest_reservation_fits_an_idle_node() {
        let budget = budget(1 << 20);
        let account = budget.account();
        let held = account.reserve(usize::MAX).await;
        assert_eq!(held.bytes, 1 << 18);
        assert!(account.has_room(1 << 18));
        assert!(!account.has_room(1 << 19));
    }

    #[tokio::test]
    async fn waiters_go_on_in_turn_once_others_let_go() {
        let budget = budget(1000);
        let (other, own) = (budget.account().hold(900), budget.account());
        let _held = own.hold(200);
        let mut context = Context::from_waker(Waker::noop());
        let (mut first, mut second) = (pin!(own.room()), pin!(own.room()));
        assert!(first.as_mut().poll(&mut context).is_pending());
        assert!(second.as_mut().poll(&mut context).is_pending());
        drop(other);
        assert!(own.has_room(0));
        assert!(second.as_mut().poll(&mut context).is_pending(), "after the first");
        first.await;
        second.await;
    }
}
