use proptest::prelude::*;

use super::*;

const S: i64 = 1_000_000;

fn tier(limit: u64, window_s: i64, active_s: i64, cooldown_s: i64) -> Tier {
    Tier {
        limit,
        window_us: window_s * S,
        active_us: active_s * S,
        cooldown_us: cooldown_s * S,
        skippable: false,
    }
}

/// Decides with tiers only.
fn ask(history: &mut History, tiers: &[Tier], now: i64, copies: u64, min_copies: u64) -> Decision {
    let limits = HitLimits { hard: None, global: None, tiers, known_only: false };
    history.request(None, &limits, Micros(now), copies, min_copies)
}

#[test]
fn what_a_domain_stands_at() {
    let tiers = [tier(2, 10, 30, 0), tier(3, 5, 5, 20)];
    let limits = HitLimits { hard: Some(4), global: Some(9), tiers: &tiers, known_only: false };
    let (mut history, mut all) = (History::default(), History::default());
    let stands = |history: &History, all: &History, s: i64| {
        let standing = history.clone().standing(Some(all.clone()), &limits, Micros(s * S), (1, 1));
        let tiers = standing
            .tiers
            .iter()
            .map(|tier| (tier.state, tier.ends_us.map(|us| us / S), tier.hits));
        let seconds = (standing.domain_hits, standing.all_hits);
        (standing.tier, tiers.collect::<Vec<_>>(), seconds, standing.granted_in_us())
    };
    use TierState::{Active, Cooling, Inactive};
    let idle = (Inactive, None, 0);
    assert_eq!(stands(&history, &all, 100), (0, vec![idle, idle], (Some(0), Some(0)), Some(0)));
    history.request(Some(&mut all), &limits, Micros(100 * S), 4, 4);
    let burst = vec![(Active, Some(30), 2), (Active, Some(5), 2)];
    // The limit of hits in a second leaves no room.
    assert_eq!(stands(&history, &all, 100), (2, burst, (Some(4), Some(4)), Some(S + 1)));
    let later = vec![(Active, Some(28), 2), (Active, Some(3), 2)];
    assert_eq!(stands(&history, &all, 102), (2, later, (Some(0), Some(0)), Some(0)));
    // The second tier cools down, and the first one is full until its hits expire.
    let over = vec![(Active, Some(24), 2), (Cooling, Some(19), 0)];
    assert_eq!(stands(&history, &all, 106), (1, over, (Some(0), Some(0)), Some(4 * S + 1)));
    assert_eq!(stands(&history, &all, 130).1, vec![idle, idle]);
}

/// The paper's rules, one hit at a time, with the time of each hit.
#[derive(Clone, Default)]
struct Exact {
    tiers: Vec<(Option<i64>, Vec<i64>)>,
    /// The times of all hits.
    hits: Vec<i64>,
}

/// Whether there is room for a hit in the last second.
fn has_room(limit: Option<u64>, hits: &[i64], now: i64) -> bool {
    let counting = hits.iter().filter(|time| now <= **time + S).count() as u64;
    limit.is_none_or(|limit| counting < limit)
}

impl Exact {
    fn new(tiers: &[Tier]) -> Self {
        Self { tiers: vec![(None, Vec::new()); tiers.len()], hits: Vec::new() }
    }

    fn age(&self, index: usize, now: i64) -> Option<i64> {
        self.tiers[index].0.map(|at| now - at)
    }

    fn is_active(&self, tiers: &[Tier], index: usize, now: i64) -> bool {
        self.age(index, now).is_some_and(|age| age < tiers[index].active_us)
    }

    fn is_cooling(&self, tiers: &[Tier], index: usize, now: i64) -> bool {
        let tier = &tiers[index];
        let is_over = |age| age >= tier.active_us + tier.cooldown_us;
        !self.is_active(tiers, index, now) && !self.age(index, now).is_none_or(is_over)
    }

    fn has_room(&self, tiers: &[Tier], index: usize, now: i64) -> bool {
        let counts = |time: &&i64| now <= **time + tiers[index].window_us;
        (self.tiers[index].1.iter().filter(counts).count() as u64) < tiers[index].limit
    }

    fn current(&self, tiers: &[Tier], now: i64) -> Option<usize> {
        (0..tiers.len()).rev().find(|&index| self.is_active(tiers, index, now))
    }

    fn hit(&mut self, tiers: &[Tier], now: i64) -> bool {
        let current = self.current(tiers, now);
        if let Some(index) = current
            && self.has_room(tiers, index, now)
        {
            self.tiers[index].1.push(now);
            return true;
        }
        for index in current.map_or(0, |index| index + 1)..tiers.len() {
            if !self.is_cooling(tiers, index, now) && tiers[index].limit > 0 {
                self.tiers[index] = (Some(now), vec![now]);
                return true;
            }
            if !tiers[index].skippable {
                return false;
            }
        }
        false
    }

    /// `all`: the hits of all domains.
    fn request(
        &mut self,
        all: &mut Vec<i64>,
        limits: &HitLimits<'_>,
        now: i64,
        copies: u64,
        min_copies: u64,
    ) -> u64 {
        let (mut after, mut all_after) = (self.clone(), all.clone());
        let mut hit = || {
            let granted = has_room(limits.hard, &after.hits, now)
                && has_room(limits.global, &all_after, now)
                && after.hit(limits.tiers, now);
            if granted {
                after.hits.push(now);
                all_after.push(now);
            }
            granted
        };
        let granted = (0..copies).take_while(|_| hit()).count() as u64;
        if granted < min_copies {
            return 0;
        }
        (*self, *all) = (after, all_after);
        granted
    }
}

fn tiers(limits: impl Strategy<Value = u64> + Clone) -> impl Strategy<Value = Vec<Tier>> {
    let one = (limits, 1..8i64, 1..4i64, 0..30i64, any::<bool>());
    let one = one.prop_map(|(limit, window, times, cooldown, skippable)| Tier {
        skippable,
        ..tier(limit, window, window * times, cooldown)
    });
    prop::collection::vec(one, 0..4)
}

/// A limit of hits in a second, or none.
fn by_second() -> impl Strategy<Value = Option<u64>> {
    prop_oneof![Just(None), (0..8u64).prop_map(Some)]
}

/// Requests: the time since the one before, in µs; copies; how many of them are needed at least.
fn requests(most: u64) -> impl Strategy<Value = Vec<(i64, u64, u64)>> {
    let gap = prop_oneof![Just(0), 0..2 * S, (0..10i64).prop_map(|s| s * S), 0..40 * S];
    let one = (gap, 1..=most, any::<prop::sample::Index>());
    let one =
        one.prop_map(|(gap, copies, min)| (gap, copies, 1 + min.index(copies as usize) as u64));
    prop::collection::vec(one, 1..60)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn small_limits_are_exact(
        tiers in tiers(0..6u64),
        hard in by_second(),
        global in by_second(),
        requests in prop::collection::vec((requests(8), any::<bool>()), 1..3),
    ) {
        let limits = HitLimits { hard, global, tiers: &tiers, known_only: false };
        let mut domains = [0, 1].map(|_| (History::default(), Exact::new(&tiers)));
        let (mut all, mut all_exact, mut now) = (History::default(), Vec::new(), 77);
        for ((gap, copies, min_copies), domain) in
            requests.into_iter().flat_map(|(all, odd)| all.into_iter().zip([false, odd].into_iter().cycle()))
        {
            now += gap;
            let (history, exact) = &mut domains[usize::from(domain)];
            let before = (history.clone(), all.clone());
            let expected = exact.request(&mut all_exact, &limits, now, copies, min_copies);
            let decision =
                history.request(Some(&mut all), &limits, Micros(now), copies, min_copies);
            prop_assert_eq!(decision.granted, expected);
            let counting = |hits: &[i64]| hits.iter().filter(|at| now <= **at + S).count() as u64;
            prop_assert_eq!(decision.domain_hits, hard.map(|_| counting(&exact.hits)));
            prop_assert_eq!(decision.all_hits, global.map(|_| counting(&all_exact)));
            if expected == copies {
                prop_assert!(!decision.limited_by_hard && !decision.limited_by_global);
            }
            if expected > 0 {
                continue;
            }
            prop_assert_eq!((&*history, &all), (&before.0, &before.1));
            // Not earlier, and not later, than retry_after says.
            let grants_at = |time| {
                let (mut exact, mut all) = (exact.clone(), all_exact.clone());
                exact.request(&mut all, &limits, time, min_copies, min_copies) > 0
            };
            let after = decision.retry_after_us.unwrap_or(1000 * S);
            for part in 0..50 {
                prop_assert!(!grants_at(now + (after - 1) * part / 49));
            }
            if decision.retry_after_us.is_some() {
                prop_assert!(grants_at(now + after));
            }
        }
    }

    #[test]
    fn large_limits_expire_a_slot_early_at_most(
        limit in 129..2000u64,
        window in 1..100 * S,
        requests in prop::collection::vec((0..2i64, 0..10 * S, 1..1500u64), 1..80),
    ) {
        let tiers = [Tier { window_us: window, ..tier(limit, 0, 3600, 0) }];
        let (mut history, mut now) = (History::default(), 5);
        let mut granted: Vec<(i64, u64)> = Vec::new();
        for (pause, gap, copies) in requests {
            now += pause * gap * window / (10 * S);
            let decision = ask(&mut history, &tiers, now, copies, 1);
            // A denial is right, and so is the number of hits in the window.
            let counting = |time: i64, span: i64| -> u64 {
                let hits = granted.iter().filter(|(at, _)| time <= *at + span);
                hits.map(|(_, hits)| hits).sum()
            };
            prop_assert!(decision.granted >= copies.min(limit.saturating_sub(counting(now, window))));
            let short = window - window / 128 - 1;
            prop_assert!(decision.granted + counting(now, short) <= limit);
            if decision.granted > 0 {
                granted.push((now, decision.granted));
            }
            // retry_after is exact.
            let refused = ask(&mut history.clone(), &tiers, now, limit, limit);
            if let Some(after) = refused.retry_after_us {
                let grants_at = |time| {
                    ask(&mut history.clone(), &tiers, time, limit, limit).granted > 0
                };
                prop_assert!(grants_at(now + after) && !grants_at(now + after - 1));
            }
        }
    }

    /// The same for several tiers, whose windows are within their active time.
    #[test]
    fn no_large_tier_grants_too_much_or_denies_what_fits(
        tiers in tiers(129..600u64),
        requests in prop::collection::vec((0..3i64, 0..10 * S, 1..900u64), 1..80),
    ) {
        let (mut history, mut now) = (History::default(), 5);
        // For each tier: when it was entered, and its hits since then.
        let mut granted: Vec<(i64, Vec<(i64, u64)>)> = vec![(-1000 * S, Vec::new()); tiers.len()];
        for (pause, gap, copies) in requests {
            now += pause * gap;
            let is_active = |index: usize, entered: i64| now < entered + tiers[index].active_us;
            let counting = |hits: &[(i64, u64)], span: i64| -> u64 {
                hits.iter().filter(|(at, _)| now <= *at + span).map(|(_, hits)| hits).sum()
            };
            let current = (0..tiers.len()).rev().find(|&index| is_active(index, granted[index].0));
            // What the times of all hits leave.
            let room = current.map_or(0, |index| {
                let (tier, (_, hits)) = (&tiers[index], &granted[index]);
                tier.limit.saturating_sub(counting(hits, tier.window_us))
            });
            let is_cooling = |index: usize| {
                let (entered, tier) = (granted[index].0, &tiers[index]);
                !is_active(index, entered) && now < entered + tier.active_us + tier.cooldown_us
            };
            let above = current.map_or(0, |index| index + 1)..tiers.len();
            let open = above.take_while(|&index| !is_cooling(index) || tiers[index].skippable);
            let open: Vec<usize> = open.filter(|&index| !is_cooling(index)).collect();
            let most = room + open.iter().map(|&index| tiers[index].limit).sum::<u64>();

            let decision = ask(&mut history, &tiers, now, copies, 1);
            prop_assert!(decision.granted >= copies.min(most), "{decision:?} of {most}");
            // The tiers that were entered took as much as they may, but for the last one.
            let mut left = decision.granted;
            let entered = open.iter().copied().filter(|&index| decision.burst && index < decision.tier);
            for index in entered.collect::<Vec<_>>().into_iter().rev() {
                let is_last = index + 1 == decision.tier;
                let hits = if is_last { decision.tier_hits } else { tiers[index].limit };
                granted[index] = (now, vec![(now, hits)]);
                left = left.checked_sub(hits).unwrap();
            }
            match current {
                Some(index) if left > 0 => granted[index].1.push((now, left)),
                _ => prop_assert_eq!(left, 0),
            }
            for (tier, (_, hits)) in tiers.iter().zip(&granted) {
                let short = tier.window_us - tier.window_us / 128 - 1;
                prop_assert!(counting(hits, short) <= tier.limit, "{tier:?}: {hits:?}");
            }
        }
    }
}

#[test]
fn batch_processing_of_the_paper() {
    let tiers = [tier(5000, 300, 300, 86_100)];
    let mut history = History::default();
    let start = 1_000_000 * S;
    assert_eq!(ask(&mut history, &tiers, start, 6000, 1).granted, 5000);
    let refused = ask(&mut history, &tiers, start + 10 * S, 1, 1);
    assert_eq!((refused.granted, refused.tier, refused.tier_hits), (0, 1, 5000));
    // The active time ends with the window, and a day has passed when the cooldown ends.
    assert_eq!(refused.retry_after_us, Some((86_400 - 10) * S));
    assert_eq!(ask(&mut history, &tiers, start + 86_400 * S - 1, 1, 1).granted, 0);
    assert_eq!(ask(&mut history, &tiers, start + 86_400 * S, 1, 1).granted, 1);
}

/// Nodes that take turns with different limits, as while new limits are rolled out, grant no more than the
/// larger limit.
#[test]
fn nodes_with_different_limits_count_each_others_hits() {
    let limits = [(1000, 60), (100, 60), (1000, 45), (120, 7), (130, 13)];
    for (one, other) in limits.into_iter().flat_map(|one| limits.map(|other| (one, other))) {
        let nodes = [one, other].map(|(limit, window_s)| [tier(limit, window_s, 3600, 0)]);
        let mut history = History::default();
        let mut granted = Vec::new();
        for step in 0..4000 {
            let now = 100 * S + step * S / 100;
            let decision = ask(&mut history, &nodes[step as usize % 2], now, 3, 1);
            granted.push((now, decision.granted));
        }
        let window_us = one.1.min(other.1) * S;
        // The slots of both windows are shorter than half a second.
        let span = |from: i64| from..from + window_us - S;
        let within = |from: i64| {
            let within = granted.iter().filter(move |(at, _)| span(from).contains(at));
            within.map(|(_, hits)| hits).sum::<u64>()
        };
        let most = granted.iter().map(|(at, _)| within(*at)).max().unwrap_or(0);
        let limit = one.0.max(other.0);
        assert!((limit * 9 / 10..=limit).contains(&most), "{most}: {one:?} and {other:?}");
    }
}

#[test]
fn tiers_that_one_node_lacks_are_kept() {
    let tiers = [tier(2, 10, 100, 0), tier(3, 10, 10, 1000)];
    let mut history = History::default();
    assert_eq!(ask(&mut history, &tiers, 1000 * S, 5, 1).granted, 5);
    let expires_ms = history.expires_ms(&tiers, 0);
    assert_eq!(expires_ms, 2010 * 1000);
    assert_eq!(ask(&mut history, &tiers[..1], 1020 * S, 5, 1).granted, 2);
    assert_eq!(history.expires_ms(&tiers[..1], expires_ms), expires_ms);
    // The second tier is still cooling down.
    assert_eq!(ask(&mut history, &tiers, 1040 * S, 5, 1).granted, 2);
}

#[test]
fn time_does_not_run_backwards() {
    let tiers = [tier(2, 10, 60, 0)];
    let mut history = History::default();
    assert_eq!(ask(&mut history, &tiers, 100 * S, 2, 2).granted, 2);
    let refused = ask(&mut history, &tiers, 50 * S, 1, 1);
    assert_eq!((refused.granted, refused.retry_after_us), (0, Some(60 * S + 1)));
    // A clock that was far ahead for a while decides nothing.
    assert_eq!(ask(&mut history, &tiers, 100 * S - 3601 * S, 2, 2).granted, 2);
}

#[test]
fn a_node_alone_has_a_share_of_the_limits() {
    for (limit, nodes, part) in [(10, 1, 10), (10, 3, 3), (2, 3, 1), (0, 3, 0), (10, 0, 10)] {
        assert_eq!(share(limit, nodes), part);
        let whole = tier(limit, 10, 100, 5);
        assert_eq!(whole.share(nodes), Tier { limit: part, ..whole });
    }
}

#[test]
fn one_request_goes_through_several_tiers_and_past_skippable_ones() {
    let skippable = Tier { skippable: true, ..tier(3, 10, 10, 1000) };
    let tiers = [tier(2, 10, 1000, 0), skippable, tier(4, 10, 100, 0)];
    let mut history = History::default();
    let decision = ask(&mut history, &tiers, 1000 * S, 20, 1);
    assert_eq!((decision.granted, decision.tier, decision.tier_hits), (9, 3, 4));
    // Tiers 2 and 3 are over after 100 s, and tier 2 cools down: it is passed.
    let decision = ask(&mut history, &tiers, 1101 * S, 20, 7);
    assert_eq!((decision.granted, decision.retry_after_us), (0, Some((1010 - 101) * S)));
    let decision = ask(&mut history, &tiers, 1101 * S, 20, 6);
    assert_eq!((decision.granted, decision.tier, decision.tier_hits), (6, 3, 4));
}

#[test]
fn answers_say_which_limit_is_the_reason() {
    let tiers = [tier(10, 60, 60, 0)];
    let decide = |hard, global, copies| {
        let (mut history, mut all) = (History::default(), History::default());
        let limits = HitLimits { hard, global, tiers: &tiers, known_only: false };
        let decision = history.request(Some(&mut all), &limits, Micros(S), copies, 1);
        (decision.granted, decision.limited_by_hard, decision.limited_by_global)
    };
    assert_eq!(decide(Some(5), Some(7), 5), (5, false, false));
    assert_eq!(decide(Some(5), Some(7), 6), (5, true, false));
    assert_eq!(decide(Some(8), Some(7), 9), (7, false, true));
    assert_eq!(decide(Some(7), Some(7), 9), (7, true, true));
    assert_eq!(decide(Some(20), Some(30), 40), (10, false, false));
    assert_eq!(decide(Some(10), Some(10), 40), (10, false, false));
    assert_eq!(decide(Some(0), None, 1), (0, true, false));
    assert_eq!(decide(None, Some(0), 1), (0, false, true));
}

/// If the least number exceeds the hard limit, the request will always fail.
#[test]
fn limits_of_the_second_delay_a_retry() {
    let tiers = [tier(3, 10, 60, 0)];
    let limits = HitLimits { hard: Some(2), global: None, tiers: &tiers, known_only: false };
    let mut history = History::default();
    let mut request = |at_us, copies, min_copies| {
        let now = Micros(1000 * S + at_us);
        let decision = history.request(None, &limits, now, copies, min_copies);
        (decision.granted, decision.retry_after_us, decision.domain_hits)
    };
    assert_eq!(request(0, 5, 1), (2, None, Some(2)));
    assert_eq!(request(1, 3, 3), (0, None, Some(2)), "never");
    assert_eq!(request(1, 1, 1), (0, Some(S), Some(2)));
    assert_eq!(request(S + 1, 5, 1), (1, None, Some(1)));
    // Now the tier has less room.
    assert_eq!(request(S + 1, 1, 1), (0, Some(9 * S), Some(1)));
}

#[test]
fn a_log_with_slots_becomes_exact_again() {
    let (many, few) = ([tier(500, 10, 3600, 0)], [tier(100, 10, 3600, 0)]);
    let mut history = History::default();
    assert_eq!(ask(&mut history, &many, 1000 * S, 500, 1).granted, 500);
    assert_eq!(ask(&mut history, &few, 1011 * S, 100, 1).granted, 100);
    assert_eq!(ask(&mut history, &few, 1021 * S, 1, 1).retry_after_us, Some(1));
}

#[test]
fn a_longer_window_expires_hits_half_a_slot_late_at_most() {
    let (short, long) = ([tier(1000, 7, 3600, 0)], [tier(1000, 60, 3600, 0)]);
    let mut history = History::default();
    assert_eq!(ask(&mut history, &short, 1000 * S, 1, 1).granted, 1);
    let (at, slot) = (1000 * S + 400_000, 60 * S / 128);
    assert_eq!(ask(&mut history, &short, at, 129, 1).granted, 129);
    let hits_at = |time| ask(&mut history.clone(), &long, time, 1001, 1001).tier_hits;
    assert_eq!([at, at + 60 * S - 2 * slot].map(hits_at), [130, 130]);
    assert_eq!(hits_at(at + 60 * S + slot / 2 + 1), 0);
}
