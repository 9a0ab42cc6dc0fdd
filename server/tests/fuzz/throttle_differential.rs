//! Compares `lua/throttle.lua` with the embedded store, the specification, over random traces of
//! requests for hits, changes of limits, and time that passes. Every answer must be equal.
//!
//! `PROPTEST_CASES` sets the number of traces (default 3,000).

use std::cell::Cell;

use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::TestRunner;
use testkit::{Redis, START, property_tests, redis_store, runtime};
use tollgate_server::domain::throttle::{HitLimits, Tier};
use tollgate_server::domain::time::ManualClock;
use tollgate_server::store::memory::MemoryStore;
use tollgate_server::store::throttle::{HitRequest, ThrottleStore};

/// Resources and domains. Their names join to the same text.
const NAMES: [(&str, &str); 4] = [("a", "b:c"), ("a:b", "c"), ("{a}%3A", "b"), ("{a}%3A", "ключ")];

#[derive(Clone, Debug)]
struct Step {
    pause_us: i64,
    name: usize,
    /// Index of the limits in use.
    limits: usize,
    copies: u64,
    min_copies: u64,
    known_only: bool,
    /// What is done before the request.
    before: Before,
}

#[derive(Clone, Copy, Debug)]
enum Before {
    Nothing,
    Look,
    Forget,
}

fn tier() -> impl Strategy<Value = Tier> {
    let limit = prop_oneof![4 => 0..8u64, 1 => 100..140u64, 2 => 129..5000u64, 1 => Just(1 << 31)];
    let window_us =
        prop_oneof![(1..10i64).prop_map(|s| s * 1_000_000), 1..10_000_000i64, 1..200i64];
    let cooldown_us = prop_oneof![Just(0), 1..30_000_000i64];
    (limit, window_us, 1..5i64, cooldown_us, any::<bool>()).prop_map(
        |(limit, window_us, times, cooldown_us, skippable)| Tier {
            limit,
            window_us,
            active_us: window_us * times,
            cooldown_us,
            skippable,
        },
    )
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let pause_us = prop_oneof![
        4 => Just(0),
        4 => 0..2_000_000i64,
        2 => (1..12i64).prop_map(|s| s * 1_000_000),
        2 => 0..200i64,
        1 => 0..60_000_000i64,
    ];
    let copies = prop_oneof![4 => 1..12u64, 2 => 1..3000u64, 1 => Just(i64::MAX as u64)];
    let known_only = prop::bool::weighted(0.1);
    let min_percent = select(vec![0, 0, 0, 50, 100u64]);
    let before = prop_oneof![
        12 => Just(Before::Nothing),
        5 => Just(Before::Look),
        1 => Just(Before::Forget),
    ];
    let one = (pause_us, 0..2 * NAMES.len(), 0..12usize, copies, min_percent, known_only, before);
    let one =
        one.prop_map(|(pause_us, name, tiers, copies, min_percent, known_only, before)| Step {
            known_only,
            before,
            pause_us,
            // Mostly one name, and mostly the same tiers.
            name: if name < NAMES.len() { name } else { 0 },
            limits: tiers.saturating_sub(9),
            copies,
            min_copies: (copies / 100 * min_percent).max(1),
        });
    proptest::collection::vec(one, 1..60)
}

/// The limits of hits in a second of a domain and of all domains, and the tiers.
type Limits = (Option<u64>, Option<u64>, Vec<Tier>);

/// A tier with its window, active time and cooldown in seconds.
fn seconds(limit: u64, spans: [i64; 3]) -> Tier {
    let [window_us, active_us, cooldown_us] = spans.map(|s| s * 1_000_000);
    Tier { limit, window_us, active_us, cooldown_us, skippable: false }
}

/// A request for up to `copies` hits on resource `a`.
fn hits<'a>(domain: &'a str, tiers: &'a [Tier], copies: u64) -> HitRequest<'a> {
    let (caller, resource, template, min_copies) = (None, "a", 0, 1);
    let limits = HitLimits { hard: None, global: None, tiers, known_only: false };
    HitRequest { caller, resource, template, domain, limits, copies, min_copies }
}

#[test]
fn both_stores_decide_alike() {
    let redis = Redis::start();
    let runtime = runtime();
    let clock = ManualClock::new(START);
    let (traces, looked) = (Cell::new(0), Cell::new(0));
    // By kind: refused for good, refused for now, granted, granted with a burst.
    let answers = Cell::new([0_u64; 4]);
    let by_second = || {
        prop_oneof![
            3 => Just(None),
            2 => (0..20u64).prop_map(Some),
            1 => (100..3000u64).prop_map(Some),
        ]
    };
    let limits = (by_second(), by_second(), proptest::collection::vec(tier(), 0..4));
    let limits = proptest::array::uniform3(limits);
    let shared = runtime.block_on(redis_store(&redis, clock.clone()));
    let config = property_tests::config("throttle_differential", property_tests::cases(1_500));
    let compare = |(limits, steps): ([Limits; 3], Vec<Step>)| {
        let memory = MemoryStore::with_clock(clock.clone());
        traces.set(traces.get() + 1);
        for (nth, step) in steps.iter().enumerate() {
            clock.advance(step.pause_us);
            let (resource, domain) = NAMES[step.name];
            // Each trace has resources of its own.
            let resource = format!("{} {resource}", traces.get());
            let (hard, global, tiers) = &limits[step.limits];
            let request = HitRequest {
                caller: None,
                resource: &resource,
                template: 0,
                domain,
                limits: HitLimits {
                    hard: *hard,
                    global: *global,
                    tiers,
                    known_only: step.known_only,
                },
                copies: step.copies,
                min_copies: step.min_copies,
            };
            let looks = match step.before {
                Before::Nothing => None,
                Before::Look => Some(runtime.block_on(async {
                    (memory.look_at_hits(&request).await, shared.look_at_hits(&request).await)
                })),
                Before::Forget => {
                    let forgotten = runtime.block_on(async {
                        (memory.forget_hits(&request).await, shared.forget_hits(&request).await)
                    });
                    prop_assert_eq!(forgotten.1, forgotten.0, "reset at step {}: {:?}", nth, step);
                    None
                }
            };
            if let Some((expected, look)) = &looks {
                prop_assert_eq!(look, expected, "look at step {}: {:?}", nth, step);
                looked.set(looked.get() + 1);
            }
            let (expected, decision) = runtime.block_on(async {
                (memory.request_hits(&request).await, shared.request_hits(&request).await)
            });
            prop_assert_eq!(decision, expected, "step {}: {:?}", nth, step);
            if let (Some((Ok(look), _)), Ok(decision)) = (&looks, decision) {
                prop_assert_eq!(look.next, decision, "look at step {}: {:?}", nth, step);
                if hard.is_none() && global.is_none() && !decision.not_known {
                    let room = step.copies.min(look.room(tiers));
                    let granted = if room < step.min_copies { 0 } else { room };
                    prop_assert_eq!(decision.granted, granted, "room at step {}: {:?}", nth, step);
                }
            }
            let kind = match expected {
                Ok(decision) if decision.burst => 3,
                Ok(decision) if decision.granted > 0 => 2,
                Ok(decision) => usize::from(decision.retry_after_us.is_some()),
                Err(_) => unreachable!("the embedded store does not fail"),
            };
            let mut counts = answers.get();
            counts[kind] += 1;
            answers.set(counts);
        }
        Ok(())
    };
    TestRunner::new(config).run(&(limits, steps()), compare).unwrap();
    let least = traces.get();
    assert!(looked.get() > least, "{} looks", looked.get());
    assert!(answers.get().iter().all(|count| *count > least), "{:?} of {least}", answers.get());
}

#[test]
fn time_that_steps_back_stands_still() {
    let redis = Redis::start();
    let runtime = runtime();
    let clock = ManualClock::new(START);
    let memory = MemoryStore::with_clock(clock.clone());
    let shared = runtime.block_on(redis_store(&redis, clock.clone()));
    let tiers = [seconds(2, [10, 60, 0])];
    let request = hits("b", &tiers, 2);
    for (step_us, granted, retry_after_us) in
        [(0, 2, None), (-5_000_000, 0, Some(15_000_001)), (15_000_001, 2, None)]
    {
        clock.advance(step_us);
        let (expected, decision) = runtime.block_on(async {
            (memory.request_hits(&request).await, shared.request_hits(&request).await)
        });
        assert_eq!(decision, expected);
        assert_eq!(
            expected.map(|one| (one.granted, one.retry_after_us)),
            Ok((granted, retry_after_us))
        );
    }
}

/// The limit of all domains would otherwise refuse everyone until the clock has caught up.
#[test]
fn all_domains_do_not_wait_for_a_clock_that_has_stepped_back() {
    let redis = Redis::start();
    let runtime = runtime();
    let clock = ManualClock::new(START);
    let memory = MemoryStore::with_clock(clock.clone());
    let shared = runtime.block_on(redis_store(&redis, clock.clone()));
    let tiers = [seconds(9, [10, 60, 0])];
    for (step_us, domain, granted, all_hits) in [
        (0, "b", 3, 3),
        (-5_000_000, "c", 3, 3),
        // The time of b is ahead.
        (1_000_001, "b", 3, 3),
        (0, "c", 0, 3),
        (1_000_001, "c", 3, 3),
        // Less than the second that is counted: the hits count.
        (-500_000, "b", 0, 3),
    ] {
        clock.advance(step_us);
        let mut request = hits(domain, &tiers, 3);
        request.limits.global = Some(3);
        let (expected, decision) = runtime.block_on(async {
            (memory.request_hits(&request).await, shared.request_hits(&request).await)
        });
        assert_eq!(decision, expected, "{step_us} {domain}");
        let decision = decision.unwrap();
        assert_eq!((decision.granted, decision.all_hits), (granted, Some(all_hits)), "{step_us}");
    }
}

#[test]
fn an_idle_domain_leaves_nothing_behind() {
    let redis = Redis::start();
    let runtime = runtime();
    let clock = ManualClock::new(START);
    let memory = MemoryStore::with_clock(clock.clone());
    let shared = runtime.block_on(redis_store(&redis, clock.clone()));
    let tiers = [seconds(500, [1, 2, 3])];
    let request = |domain| hits(domain, &tiers, 1000);
    runtime.block_on(async {
        for domain in ["b", "c"] {
            assert_eq!(memory.request_hits(&request(domain)).await.unwrap().granted, 500);
            assert_eq!(shared.request_hits(&request(domain)).await.unwrap().granted, 500);
        }
        assert_eq!(memory.histories(), 2);
        clock.advance(5_000_000);
        memory.sweep().await;
        assert_eq!(memory.histories(), 2);
        clock.advance(1_000);
        memory.sweep().await;
        assert_eq!(memory.histories(), 0);
    });
    // The end of the cooldown.
    let mut inside = redis.connection();
    let expires_ms: i64 = redis::cmd("PEXPIRETIME").arg("a{a:b}").query(&mut inside).unwrap();
    assert_eq!(expires_ms, (START.0 + 5_000_000) / 1000);
}

#[test]
fn corrupt_values_count_as_absent() {
    let redis = Redis::start();
    let runtime = runtime();
    let shared = runtime.block_on(redis_store(&redis, ManualClock::new(START)));
    let mut inside = redis.connection();
    let tiers = [seconds(3, [1, 2, 0])];
    let request = hits("b", &tiers, 5);
    // One log, which is that of the last second.
    let head = [&[1][..], &START.0.to_le_bytes()[..7], &START.0.to_le_bytes()[..7]].concat();
    let cut_off = [&head[..], &[14, 0, 1, 2, 3]].concat();
    let odd = [&head[..], &[3, 0, 1, 2, 3]].concat();
    for value in [&b""[..], b"x", &[200; 40], &head, &cut_off, &odd] {
        let expires_ms = (START.0 + 3_600_000_000) / 1000;
        let mut set = redis::cmd("SET");
        set.arg("a{a:b}").arg(value).arg("PXAT").arg(expires_ms).exec(&mut inside).unwrap();
        let look = runtime.block_on(shared.look_at_hits(&request)).unwrap();
        assert_eq!((look.tier, look.granted_in_us()), (0, Some(0)), "{value:?}");
        let decision = runtime.block_on(shared.request_hits(&request)).unwrap();
        assert_eq!((decision.granted, decision.burst), (3, true), "{value:?}");
        assert_eq!(runtime.block_on(shared.look_at_hits(&request)).unwrap().tiers[0].hits, 3);
    }
    redis::cmd("DEL").arg("a{a:b}").exec(&mut inside).unwrap();
    redis::cmd("LPUSH").arg("a{a:b}").arg("x").exec(&mut inside).unwrap();
    assert_eq!(runtime.block_on(shared.look_at_hits(&request)).unwrap().tier, 0);
    assert_eq!(runtime.block_on(shared.request_hits(&request)).unwrap().granted, 3);
}
