//! The bytes that a node buffers for its clients: parts of requests, requests being decided, and
//! unsent answers, of both ports together.
//!
//! A connection may buffer more as long as it holds less than the node has free: a dynamic
//! threshold (Choudhury and Hahne, "Dynamic queue length thresholds for shared-memory packet
//! switches", 1998). A single connection gets half of an idle node. Among many connections, the
//! largest reach the threshold first, and small ones continue. Nothing has to search for the
//! largest one.
//!
//! A connection above the threshold is not refused. The node stops reading from it, so that flow
//! control stops the client.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::Mutex;
use tokio::time::sleep;

use crate::metrics::BudgetMetrics;

/// The default limit of a node, in bytes.
pub const DEFAULT_LIMIT: usize = 128 << 20;

/// Pause before the first check for free bytes. It doubles with each check.
const MIN_PAUSE: Duration = Duration::from_millis(5);

/// Longest pause between two checks.
const MAX_PAUSE: Duration = Duration::from_millis(80);

/// Bytes that a connection may always buffer, so that each connection makes progress even while
/// others use up the budget.
const MIN_SHARE: usize = 16 << 10;

/// The bytes that one node may buffer. Clones share one limit.
#[derive(Clone)]
pub struct Budget(Arc<BudgetState>);

struct BudgetState {
    limit: usize,
    used: AtomicUsize,
    metrics: BudgetMetrics,
}

impl Budget {
    /// A budget of `limit` bytes, all of them free.
    pub fn new(limit: usize, metrics: BudgetMetrics) -> Self {
        Self(Arc::new(BudgetState { limit, used: AtomicUsize::new(0), metrics }))
    }

    /// A budget without a limit or metrics.
    pub fn unlimited() -> Self {
        Self::new(usize::MAX, BudgetMetrics::noop())
    }

    /// An account for one direction of one connection. Directions are separate because a client
    /// that reads no answers must still be able to send WINDOW_UPDATE frames, and because a
    /// complete request must be decided before its bytes are free again.
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

/// The bytes that one connection buffers in one direction.
pub struct Account {
    budget: Budget,
    used: AtomicUsize,
    /// Held by the one task that waits for room, so that a connection has one timer for all its
    /// streams.
    turn: Mutex<()>,
}

impl Account {
    /// Whether this connection may buffer `bytes` more. `bytes` is 0 for a chunk of unknown length;
    /// one chunk may exceed the threshold.
    pub fn has_room(&self, bytes: usize) -> bool {
        let used = self.used.load(Ordering::Relaxed);
        used + bytes <= MIN_SHARE || used + bytes < self.budget.free()
    }

    /// Waits until this connection may read another chunk. Waiters proceed in the order of their
    /// calls. Has no timeout.
    pub async fn wait_for_room(&self) {
        self.wait_until_fits(0).await;
    }

    /// Waits until this connection may buffer `bytes` more, and counts them. Waits for, and counts,
    /// a quarter of the node's limit at most, so that a large reservation can succeed at all.
    pub async fn reserve(self: &Arc<Self>, bytes: usize) -> HeldBytes {
        let bytes = bytes.min(self.budget.0.limit / 4);
        self.wait_until_fits(bytes).await;
        self.count(bytes)
    }

    async fn wait_until_fits(&self, bytes: usize) {
        if self.has_room(bytes) {
            return;
        }
        self.budget.0.metrics.pauses.increment(1);
        let _turn = self.turn.lock().await;
        let mut pause = MIN_PAUSE;
        while !self.has_room(bytes) {
            sleep(pause).await;
            pause = (pause * 2).min(MAX_PAUSE);
        }
    }

    /// Counts `bytes` until the result is dropped. Never waits: the bytes are buffered already.
    pub fn count(self: &Arc<Self>, bytes: usize) -> HeldBytes {
        let mut held = HeldBytes { account: Arc::clone(self), bytes: 0 };
        held.set(bytes);
        held
    }
}

/// Bytes counted in an account until this is dropped.
pub struct HeldBytes {
    account: Arc<Account>,
    bytes: usize,
}

impl HeldBytes {
    /// Replaces the number of bytes counted.
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

impl Drop for HeldBytes {
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

    /// Buffers chunks of 1 kB while there is room.
    fn fill(account: &Arc<Account>) -> HeldBytes {
        let mut held = account.count(0);
        while account.has_room(0) {
            held.set(held.bytes + (1 << 10));
        }
        held
    }

    #[test]
    fn a_single_connection_gets_half() {
        let budget = budget(1 << 20);
        assert_eq!(fill(&budget.account()).bytes, 1 << 19);
        assert_eq!(budget.used(), 0, "free again after the drop");
    }

    #[test]
    fn large_connections_leave_room_for_small_ones() {
        let limit = 1 << 20;
        let budget = budget(limit);
        let large: Vec<_> = (0..5).map(|_| fill(&budget.account())).collect();
        let first = large[0].bytes;
        assert!(large.iter().all(|held| held.bytes <= first), "the first has the most");
        let free = limit - budget.used();
        assert!(free > 0, "{} used", budget.used());
        let small = fill(&budget.account());
        assert!(small.bytes >= free / 2, "{} of {free}", small.bytes);
        assert!(budget.used() <= limit);
    }

    #[test]
    fn a_small_connection_always_has_room() {
        let budget = budget(100);
        let _large = budget.account().count(1000);
        let small = budget.account();
        assert!(small.has_room(MIN_SHARE));
        let _held = small.count(MIN_SHARE);
        assert!(small.has_room(0));
        assert!(!small.has_room(1));
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
    async fn waiters_proceed_in_order() {
        let budget = budget(100 << 10);
        let (other, own) = (budget.account().count(90 << 10), budget.account());
        let _held = own.count(20 << 10);
        let mut context = Context::from_waker(Waker::noop());
        let (mut first, mut second) = (pin!(own.wait_for_room()), pin!(own.wait_for_room()));
        assert!(first.as_mut().poll(&mut context).is_pending());
        assert!(second.as_mut().poll(&mut context).is_pending());
        drop(other);
        assert!(own.has_room(0));
        assert!(second.as_mut().poll(&mut context).is_pending(), "waits for the first");
        first.await;
        second.await;
    }
}
