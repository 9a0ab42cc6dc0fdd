//! Limits how many requests a client may reset before the node has begun them.
//!
//! A reset request costs the node a header block and gains the client nothing; a client that does
//! little else is attacking (rapid reset, CVE-2023-44487). Honest clients do this too when the node
//! was slow to read, for example a load balancer whose callers cancel. So each reset is paid for
//! from an allowance, which grows with time, even while nothing is read, and with each request that
//! the client lets begin.

use std::time::Instant;

/// Growth of the allowance, in resets per second.
const RESETS_PER_SECOND: f64 = 1000.0;

/// The allowance of a new connection.
const INITIAL_RESETS: f64 = RESETS_PER_SECOND;

/// Maximum allowance: what callers cancel while a node stalls for five seconds.
const MAX_RESETS: f64 = 5.0 * RESETS_PER_SECOND;

/// The resets that one connection may still make.
pub(super) struct Allowance {
    left: f64,
    /// When `left` was last updated.
    updated: Instant,
    /// Requests begun until then.
    begun: u64,
}

impl Allowance {
    pub(super) fn new(now: Instant) -> Self {
        Self { left: INITIAL_RESETS, updated: now, begun: 0 }
    }

    /// Pays for `resets`, after `begun` requests in total; `false` if the allowance is used up.
    pub(super) fn pay(&mut self, resets: u32, begun: u64, now: Instant) -> bool {
        let grown = RESETS_PER_SECOND * now.saturating_duration_since(self.updated).as_secs_f64();
        let earned = begun.saturating_sub(self.begun) as f64;
        (self.updated, self.begun) = (now, begun);
        self.left = (self.left + grown + earned).min(MAX_RESETS) - f64::from(resets);
        self.left >= 0.0
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// The number of rounds until the allowance is used up, with `resets` and `begun` requests in
    /// each.
    fn rounds(interval: Duration, resets: u32, begun: u64) -> usize {
        let (mut now, mut total) = (Instant::now(), 0);
        let mut allowance = Allowance::new(now);
        let mut pay_once = || {
            (now, total) = (now + interval, total + begun);
            allowance.pay(resets, total, now)
        };
        (0..10_000).take_while(|_| pay_once()).count()
    }

    #[test]
    fn a_client_that_only_resets_is_detected() {
        let ms = Duration::from_millis;
        assert_eq!(rounds(ms(1), 100, 0), 10, "1,000, and one more each ms");
        assert!(rounds(ms(100), 101, 0) < 10_000, "more than 1,000 a second");
        assert_eq!(rounds(ms(100), 100, 0), 10_000, "1,000 a second");
    }

    #[test]
    fn as_many_requests_as_begin_may_be_reset() {
        let ms = Duration::from_millis;
        assert_eq!(rounds(ms(0), 300, 300), 10_000);
        assert!(rounds(ms(0), 300, 200) < 100);
    }

    #[test]
    fn resets_during_a_stall_are_allowed() {
        let now = Instant::now();
        let mut allowance = Allowance::new(now);
        let after = |seconds| now + Duration::from_secs(seconds);
        assert!(allowance.pay(1, 0, now), "the connection works");
        assert!(allowance.pay(4900, 0, after(10)), "what arrived meanwhile is read at once");
        assert!(!allowance.pay(4900, 0, after(11)), "but not each second");
    }
}
