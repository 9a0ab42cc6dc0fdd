//! The most hits that limits allow within a span.
//!
//! A log never lets more hits than its limit into its window, so a span of several windows is covered
//! window by window. A tier has one log for each time that it is active, and that is bounded twice: by
//! the windows of the active time, and by the active times, with their cooldowns between them, that fit
//! into the span. Nothing is known of the time before the span, so a tier may have been entered at any
//! moment.

use std::time::Duration;

use tollgate_server::domain::throttle::{HitLimits, Tier};

/// A log has the exact times of so many hits. One with a greater limit counts by slots.
const EXACT_HITS: u64 = 128;

/// Slots of a window. A hit expires up to one slot early.
const SLOTS: u64 = 128;

/// Window of `hard_limit` and `global_limit`, in µs.
const SECOND_US: u64 = 1_000_000;

/// The store's clock may gain one part in so many on ours, or be slewed by that.
const CLOCK_DRIFT: u64 = 1000;

/// `span` as the store's clock may see it, in µs.
pub fn span_us(span: Duration) -> u64 {
    let us = u64::try_from(span.as_nanos().div_ceil(1000)).unwrap_or(u64::MAX);
    us.saturating_add(us.div_ceil(CLOCK_DRIFT))
}

/// Most hits of a domain with these limits; the `global_limit` is left out.
pub fn domain_hits(limits: &HitLimits<'_>, span_us: u64) -> u64 {
    let tiers = limits.tiers.iter().map(|tier| tier_hits(tier, span_us));
    let tiers = tiers.fold(0, u64::saturating_add);
    limits.hard.map_or(tiers, |limit| tiers.min(second_hits(limit, span_us)))
}

/// Most hits under a limit of so many a second.
pub fn second_hits(limit: u64, span_us: u64) -> u64 {
    limit.saturating_mul(span_us / expiry_us(limit, SECOND_US) + 1)
}

/// Most hits in a tier.
fn tier_hits(tier: &Tier, span_us: u64) -> u64 {
    let [window_us, active_us, cooldown_us] =
        [tier.window_us, tier.active_us, tier.cooldown_us].map(|us| u64::try_from(us).unwrap_or(0));
    let expiry_us = expiry_us(tier.limit, window_us);
    let windows_of_a_log = active_us.div_ceil(window_us.max(1));

    let mut windows = windows_of_a_log.min(span_us / expiry_us + 1);
    // Entered again within the span: the end of one active time, then `full` whole ones, and the start of
    // another. The most is reached with as many whole ones as fit, or one less.
    let cycle_us = active_us + cooldown_us;
    if let Some(rest_us) = span_us.checked_sub(cooldown_us) {
        let most_full = rest_us / cycle_us.max(1);
        for full in most_full.saturating_sub(1)..=most_full {
            let ends_us = rest_us - full * cycle_us;
            let ends = (2 * windows_of_a_log).min(ends_us / expiry_us + 2);
            windows = windows.max(full * windows_of_a_log + ends);
        }
    }
    tier.limit.saturating_mul(windows)
}

/// Shortest time after which a log forgets a hit, in µs.
fn expiry_us(limit: u64, window_us: u64) -> u64 {
    let expiry_us = match limit {
        0..=EXACT_HITS => window_us,
        _ => window_us * (SLOTS - 1) / SLOTS,
    };
    expiry_us.max(1)
}
