//! How many requests a client may reset before the node has begun them.
//!
//! Such a request costs the node a header block and gains the client nothing; a client that does
//! little else is an attack (CVE-2023-44487). Honest clients do it, too, where the node was slow to
//! read: a balancer whose callers give up. So resets are paid from an allowance that grows with
//! time, also while nothing is read, and with each request that the client does let begin.

use std::time::Instant;

/// What the allowance grows by, a second.
const PER_SECOND: f64 = 1000.0;

/// What a new connection may reset at once.
const AT_FIRST: f64 = PER_SECOND;

/// The most that gathers: what callers give up while a node stands still for five seconds.
const MOST: f64 = 5.0 * PER_SECOND;

/// The allowance of one connection.
pub(super) struct Allowance {
    left: f64,
    /// When it last grew.
    at: Instant,
    /// How many requests had begun then.
    begun: u64,
}

impl Allowance {
    pub(super) fn new(now: Instant) -> Self {
        Self { left: AT_FIRST, at: now, begun: 0 }
    }

    /// Pays for that many resets, after `begun` requests in all; `false`: there is not enough left.
    pub(super) fn pay(&mut self, resets: u32, begun: u64, now: Instant) -> bool {
        let grown = PER_SECOND * now.saturating_duration_since(self.at).as_secs_f64();
        let earned = begun.saturating_sub(self.begun) as f64;
        (self.at, self.begun) = (now, begun);
        self.left = (self.left + grown + earned).min(MOST) - f64::from(resets);
        self.left >= 0.0
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// How many turns a client lasts that resets so many and lets so many begin in each.
    fn turns(turn: Duration, resets: u32, begun: u64) -> usize {
        let (mut now, mut in_all) = (Instant::now(), 0);
        let mut allowance = Allowance::new(now);
        let mut paid = || {
            (now, in_all) = (now + turn, in_all + begun);
            allowance.pay(resets, in_all, now)
        };
        (0..10_000).take_while(|_| paid()).count()
    }

    #[test]
    fn who_only_resets_is_found_out() {
        let ms = Duration::from_millis;
        assert_eq!(turns(ms(1), 100, 0), 10, "1,000, and one more each ms");
        assert!(turns(ms(100), 101, 0) < 10_000, "more than 1,000 a second");
        assert_eq!(turns(ms(100), 100, 0), 10_000, "1,000 a second");
    }

    #[test]
    fn who_lets_as_many_begin_may_reset_as_many() {
        let ms = Duration::from_millis;
        assert_eq!(turns(ms(0), 300, 300), 10_000);
        assert!(turns(ms(0), 300, 200) < 100);
    }

    #[test]
    fn callers_give_up_while_a_node_stands_still() {
        let now = Instant::now();
        let mut allowance = Allowance::new(now);
        let after = |seconds| now + Duration::from_secs(seconds);
        assert!(allowance.pay(1, 0, now), "the connection works");
        assert!(allowance.pay(4900, 0, after(10)), "what came meanwhile is read at once");
        assert!(!allowance.pay(4900, 0, after(11)), "but not each second");
    }
}
