//! Tests of the bounds, with worked numbers and against the code that decides.

use rand::rngs::SmallRng;
use rand::{RngExt as _, SeedableRng as _};
use tollgate_server::config::model::{Limits, Throttle};
use tollgate_server::domain::throttle::{History, HitLimits, Tier};
use tollgate_server::domain::time::Micros;

use super::bound::{domain_hits, second_hits, span_us};
use super::*;
use crate::audit::load_limits;

const S: i64 = 1_000_000;

fn tier(limit: u64, window_us: i64, active_us: i64, cooldown_us: i64) -> Tier {
    Tier { limit, window_us, active_us, cooldown_us, skippable: false }
}

fn bound(hard: Option<u64>, tiers: &[Tier], span_us: i64) -> u64 {
    let limits = HitLimits { hard, global: None, tiers, known_only: false };
    domain_hits(&limits, span_us as u64)
}

#[test]
fn a_span_is_covered_by_windows() {
    // 10 a second: in 2.5 s three windows, of which none is new at 2 s sharp or later than 3.
    for (span_us, hits) in [(0, 10), (S - 1, 10), (S, 20), (5 * S / 2, 30), (3 * S, 40)] {
        assert_eq!(second_hits(10, span_us as u64), hits, "{span_us}");
    }
    // Slots of 1/128 s: a window may be empty again after 127/128 s = 992,187 µs.
    for (span_us, hits) in [(992_186, 200), (992_187, 400), (S as u64, 400), (1_984_374, 600)] {
        assert_eq!(second_hits(200, span_us), hits, "{span_us}");
    }
    assert_eq!((second_hits(128, 992_187), second_hits(0, 5_000_000)), (128, 0));
}

#[test]
fn a_tier_is_bounded_by_its_windows_and_its_active_times() {
    // 20 a second for 5 s, and then for 10 s none: at most 100 at once.
    let short = [tier(20, S, 5 * S, 10 * S)];
    for (span_us, windows) in [
        (S / 2, 1),
        (9 * S / 2, 5),
        (9 * S, 5),
        // From here on two bursts may fall into the span, with the 10 s between them.
        (10 * S, 5),
        (12 * S, 5),
        (16 * S, 8),
        (20 * S, 10),
        (25 * S, 10),
        (26 * S, 10),
        // The end of a burst, a whole one, and the start of another: 10 s of bursts.
        (30 * S, 12),
    ] {
        assert_eq!(bound(None, &short, span_us), 20 * windows, "{span_us}");
    }
}

#[test]
fn a_tier_without_a_cooldown_may_begin_anew_within_a_window() {
    // Entered some time before: at its end and at its new start within one window.
    assert_eq!(bound(None, &[tier(5, S, 60 * S, 0)], 0), 10);
    assert_eq!(bound(None, &[tier(5, S, 60 * S, 0)], 5 * S / 2), 20);
    // Active for one window only: so each window may have two.
    assert_eq!(bound(None, &[tier(5, S, S, 0)], 5 * S / 2), 5 * 4);
}

#[test]
fn a_domain_has_the_least_of_its_hard_limit_and_of_all_tiers() {
    let tiers = [tier(20, S, 60 * S, 60 * S), tier(100, S, S, 60 * S)];
    assert_eq!(bound(None, &tiers, 5 * S / 2), 20 * 3 + 100);
    assert_eq!(bound(Some(50), &tiers, 5 * S / 2), 150);
    assert_eq!(bound(Some(60), &tiers, 5 * S / 2), 160);
    assert_eq!(bound(Some(60), &[], 5 * S / 2), 0);
}

#[test]
fn the_clock_of_the_store_may_be_a_little_faster() {
    assert_eq!(span_us(Duration::from_secs(10)), 10_010_000);
    assert_eq!(span_us(Duration::from_nanos(1)), 2);
}

/// Asks a history for all it gives, now and then or all the time, and compares what it granted within
/// each span with the bound of that span. Returns the greatest share of a bound that was granted.
fn granted_to_bound(rng: &mut SmallRng) -> f64 {
    let by_second = rng.random_bool(0.3);
    let window_us = if by_second { S / 2 } else { rng.random_range(1..=40_i64) * 100 };
    let hard = by_second.then(|| rng.random_range(1..=300));
    let tier = |rng: &mut SmallRng, limits: std::ops::RangeInclusive<u64>| {
        let active_us = window_us * rng.random_range(1..=4);
        let cooldown_us = [0, window_us / 3, window_us * 2, 9 * window_us][rng.random_range(0..4)];
        tier(rng.random_range(limits), window_us, active_us, cooldown_us)
    };
    let small = tier(rng, 0..=5);
    let large = tier(rng, 129..=300);
    let sets = [vec![small], vec![large], vec![small, large], vec![large, small]];
    let tiers = &sets[rng.random_range(0..sets.len())];
    let limits = HitLimits { hard, global: None, tiers, known_only: false };
    let (mut history, mut now) = (History::default(), S);
    let longest_pause_us = [2, window_us / 50 + 1, window_us / 2 + 1, 4 * window_us];
    let longest_pause_us = longest_pause_us[rng.random_range(0..4)];
    let mut grants = Vec::new();
    while grants.len() < 80 {
        // A store forgets a history that can decide nothing any more.
        if history.expires_ms(tiers, 0) * 1000 <= now {
            history = History::default();
        }
        let copies = if rng.random_bool(0.5) { 1000 } else { rng.random_range(1..20) };
        let decision = history.request(None, &limits, Micros(now), copies, 1);
        if decision.granted > 0 {
            grants.push((now, decision.granted));
        }
        now += match decision.retry_after_us {
            // A server that is asked again as soon as there is room grants the most.
            Some(us) if rng.random_bool(0.7) => us,
            None if decision.granted == 0 => break,
            _ => rng.random_range(1..=longest_pause_us),
        };
    }
    let mut most = 0.0_f64;
    for (first, (from, _)) in grants.iter().enumerate() {
        let mut sum = 0;
        for (until, hits) in &grants[first..] {
            sum += hits;
            let bound = domain_hits(&limits, (until - from) as u64);
            assert!(sum <= bound, "{sum} of {bound} in {} µs: {tiers:?}", until - from);
            most = most.max(sum as f64 / bound as f64);
        }
    }
    most
}

#[test]
fn no_bound_is_below_what_a_node_grants_and_some_are_reached() {
    let mut rng = SmallRng::seed_from_u64(5);
    let shares: Vec<f64> = (0..400).map(|_| granted_to_bound(&mut rng)).collect();
    assert!(shares.iter().filter(|share| **share == 1.0).count() > 40, "{shares:?}");
}

const LIMITS: &str = "
throttles:
  - resource: 'api.*'
    global_limit: 60
    tiers: [{ limit: 5, window: 1s, active: 60s, cooldown: 60s }]
    domains:
      acme: { hard_limit: 20, tiers: [{ limit: 1000, window: 60s, active: 1d, cooldown: 60s }] }
";

fn limits() -> Limits {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("limits.yaml");
    std::fs::write(&path, LIMITS).expect("a file");
    load_limits(&path).expect("good limits")
}

fn audit(throttle: Option<&Throttle>, grants: &[(&str, u64)]) -> HitAudit {
    let mut ledger = Ledger::default();
    grants.iter().for_each(|(domain, hits)| ledger.grant(domain, *hits));
    HitAudit::new(&ledger, throttle, Duration::from_millis(2500))
}

#[test]
fn domains_may_have_limits_of_their_own_and_one_hit_more_is_named() {
    let limits = limits();
    let (_, throttle) = limits.throttles.find("api.x").expect("a throttle");
    let kept = audit(Some(throttle), &[("small", 15), ("acme", 60)]);
    assert!(kept.passed() && kept.checked, "{kept:?}");
    assert_eq!((kept.domains, kept.granted_hits), (2, 75));
    let broken = audit(Some(throttle), &[("small", 16), ("acme", 60), ("idle", 1)]);
    assert!(!broken.passed());
    assert_eq!(broken.violations, 1);
    let worst = DomainEntry {
        domain: "small".to_owned(),
        granted_hits: 16,
        bound_hits: 15.0,
        granted_to_bound: 16.0 / 15.0,
    };
    assert_eq!(broken.violated, std::slice::from_ref(&worst));
    assert_eq!(broken.most_loaded, Some(worst));
}

#[test]
fn all_domains_together_have_a_bound() {
    let limits = limits();
    let (_, throttle) = limits.throttles.find("api.x").expect("a throttle");
    let grants = |hits| -> Vec<_> { ["a", "b", "c", "d"].map(|domain| (domain, hits)).into() };
    let mut all = grants(15);
    all.push(("acme", 60));
    let kept = audit(Some(throttle), &all);
    assert_eq!(kept.all.as_ref().map(|all| (all.bound_hits, all.kept)), Some((180.0, true)));
    all.extend(["e", "f", "g", "h", "i"].map(|domain| (domain, 13)));
    let broken = audit(Some(throttle), &all);
    assert_eq!((broken.violations, broken.granted_hits), (0, 185));
    assert!(!broken.passed());
}

#[test]
fn without_limits_nothing_is_checked() {
    let audit = audit(None, &[("a", 1_000_000)]);
    assert!(!audit.checked && audit.passed());
    assert_eq!((audit.most_loaded, audit.all, audit.granted_hits), (None, None, 1_000_000));
}
