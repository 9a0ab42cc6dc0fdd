//! Compares `lua/holds.lua` with the embedded store, the specification, over random traces of
//! operations, changes of limits, and time that passes. Every answer must be equal.
//!
//! `PROPTEST_CASES` sets the number of traces (default 1,000).

use std::cell::Cell;

use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use testkit::{Redis, START, property_tests, redis_store, runtime};
use tollgate_server::domain::holds::{
    GroupLimit, HoldBounds, HoldLimits, HoldOutcome, MAX_HELD, NewHold, Transfer,
};
use tollgate_server::domain::time::ManualClock;
use tollgate_server::store::holds::{HoldStore, HoldTarget};
use tollgate_server::store::memory::MemoryStore;

const SESSIONS: [&str; 4] = ["s", "s\0", "sitzung", "\u{7f}Ж"];
const HOLDS: [&str; 4] = ["h", "h\u{1}", "halt", "ключ"];
const DOMAINS: [&str; 3] = ["acme", "", "домен"];
const GROUPS: [&[GroupLimit<'_>]; 5] = [
    &[],
    &[GroupLimit { name: "trial", limit: Some(7) }],
    &[GroupLimit { name: "группа", limit: None }, GroupLimit { name: "trial", limit: Some(9) }],
    &[GroupLimit { name: "a\0", limit: Some(0) }, GroupLimit { name: "acme", limit: Some(3) }],
    &[GroupLimit { name: "acme", limit: Some(MAX_HELD) }],
];

#[derive(Clone, Debug)]
enum Operation {
    Reserve {
        hold: usize,
        domain: usize,
        copies: u64,
        min_copies: u64,
        limits: HoldLimits<'static>,
    },
    /// Many sessions with a hold each.
    Crowd {
        count: usize,
    },
    /// Many holds of a session.
    Fill {
        count: usize,
    },
    Release {
        hold: usize,
        keep: u64,
    },
    KeepAlive,
    Transfer {
        hold: usize,
        copies: Option<u64>,
        to_session: usize,
        bounds: HoldBounds,
    },
    End,
    List,
}

#[derive(Clone, Debug)]
struct Step {
    pause_us: i64,
    session: usize,
    ttl_ms: i64,
    operation: Operation,
}

fn operation() -> impl Strategy<Value = Operation> {
    let limit =
        || prop_oneof![3 => Just(None), 5 => (0..12u64).prop_map(Some), 1 => Just(Some(MAX_HELD))];
    let bounds = || {
        let max_holds = prop_oneof![6 => Just(None), 1 => (0..8u64).prop_map(Some)];
        (max_holds, prop::bool::weighted(0.1))
            .prop_map(|(max_holds, known_only)| HoldBounds { max_holds, known_only })
    };
    let groups = (0..GROUPS.len()).prop_map(|at| GROUPS[at]);
    let limits = (limit(), groups, limit(), bounds(), prop::bool::weighted(0.8)).prop_map(
        |(domain, groups, global, bounds, enforced)| HoldLimits {
            domain,
            groups,
            global,
            bounds,
            enforced,
        },
    );
    let copies = prop_oneof![6 => 1..9u64, 1 => Just(MAX_HELD), 1 => Just(i64::MAX as u64)];
    let reserve = (0..HOLDS.len(), 0..DOMAINS.len(), copies, 0..3u64, limits).prop_map(
        |(hold, domain, copies, least, limits)| Operation::Reserve {
            hold,
            domain,
            copies,
            min_copies: if least == 0 { copies } else { 1 },
            limits,
        },
    );
    let copies = prop_oneof![Just(None), (1..9u64).prop_map(Some)];
    let transfer = (0..HOLDS.len(), copies, 0..SESSIONS.len(), bounds()).prop_map(
        |(hold, copies, to_session, bounds)| Operation::Transfer {
            hold,
            copies,
            to_session,
            bounds,
        },
    );
    prop_oneof![
        8 => reserve,
        3 => (0..HOLDS.len(), 0..8u64).prop_map(|(hold, keep)| Operation::Release { hold, keep }),
        3 => Just(Operation::KeepAlive),
        3 => transfer,
        1 => Just(Operation::End),
        1 => Just(Operation::List),
        1 => (1..130usize).prop_map(|count| Operation::Crowd { count }),
        1 => (1..130usize).prop_map(|count| Operation::Fill { count }),
    ]
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let pause_us = prop_oneof![
        4 => Just(0),
        4 => 0..2_000_000i64,
        2 => (1..12i64).prop_map(|s| s * 1_000_000),
        1 => 0..60_000_000i64,
    ];
    let ttl_ms = prop_oneof![3 => Just(10_000), 2 => 1..20_000i64, 1 => Just(86_400_000)];
    let step = (pause_us, 0..SESSIONS.len(), ttl_ms, operation());
    let step = step.prop_map(|(pause_us, session, ttl_ms, operation)| Step {
        pause_us,
        session,
        ttl_ms,
        operation,
    });
    proptest::collection::vec(step, 1..40)
}

const NO_LIMITS: HoldLimits<'_> = HoldLimits {
    domain: None,
    groups: &[],
    global: None,
    bounds: HoldBounds { max_holds: None, known_only: false },
    enforced: true,
};

/// Carries out a step on a store, and returns all answers as text, and the outcomes.
async fn carry_out(
    store: &impl HoldStore,
    resource: &str,
    step: &Step,
) -> (String, Vec<HoldOutcome>) {
    let target = HoldTarget { caller: None, resource, template: 0 };
    let (session, ttl_ms) = (SESSIONS[step.session], step.ttl_ms);
    let new = NewHold { session, ttl_ms, hold: "", domain: "crowd", copies: 1, min_copies: 1 };
    let mut answers = Vec::new();
    match step.operation {
        Operation::Reserve { hold, domain, copies, min_copies, limits } => {
            let (hold, domain) = (HOLDS[hold], DOMAINS[domain]);
            let new = NewHold { hold, domain, copies, min_copies, ..new };
            answers.push(store.reserve(&target, &new, &limits).await.unwrap());
        }
        Operation::Crowd { count } => {
            for nth in 0..count {
                let session = format!("{session} {nth}");
                let new = NewHold { session: &session, hold: "h", ..new };
                answers.push(store.reserve(&target, &new, &NO_LIMITS).await.unwrap());
            }
        }
        Operation::Fill { count } => {
            for nth in 0..count {
                // As many as this are too many for a session.
                let hold = format!("{nth:0250}");
                let new = NewHold { hold: &hold, ..new };
                answers.push(store.reserve(&target, &new, &NO_LIMITS).await.unwrap());
            }
        }
        Operation::Release { hold, keep } => {
            let left = store.release_hold(&target, session, HOLDS[hold], keep).await.unwrap();
            return (format!("{left} left"), Vec::new());
        }
        Operation::KeepAlive => {
            let ttl_ms = Some(ttl_ms).filter(|ttl_ms| *ttl_ms != 10_000);
            let session = store.keep_alive(&target, session, ttl_ms).await.unwrap();
            return (format!("{session:?}"), Vec::new());
        }
        // A session and itself are no two sessions.
        Operation::Transfer { to_session, .. } if to_session == step.session => {}
        Operation::Transfer { hold, copies, to_session, bounds } => {
            let (hold, to_session) = (HOLDS[hold], SESSIONS[to_session]);
            let transfer = Transfer { session, hold, copies, to_session, ttl_ms };
            let moved = store.transfer(&target, &transfer, &bounds).await.unwrap();
            return (format!("{moved:?}"), Vec::new());
        }
        Operation::End => {
            let released = store.end_session(&target, session).await.unwrap();
            return (format!("{released} released"), Vec::new());
        }
        Operation::List => {
            let groups = ["trial", "acme", "none", "группа"];
            let list = store.list_holds(&target, &groups).await.unwrap();
            return (format!("{list:?}"), Vec::new());
        }
    }
    (format!("{answers:?}"), answers.iter().map(|answer| answer.outcome).collect())
}

#[test]
fn both_stores_decide_alike() {
    let redis = Redis::start();
    let runtime = runtime();
    let clock = ManualClock::new(START);
    let shared = runtime.block_on(redis_store(&redis, clock.clone()));
    let traces = Cell::new(0);
    let outcomes = Cell::new([0_u64; 5]);
    let config = property_tests::config("holds_differential", property_tests::cases(500));
    let compare = |steps: Vec<Step>| {
        let memory = MemoryStore::with_clock(clock.clone());
        traces.set(traces.get() + 1);
        // Each trace has a resource of its own.
        let resource = format!("{{{}}}", traces.get());
        for (nth, step) in steps.iter().enumerate() {
            clock.advance(step.pause_us);
            let (expected, got) = runtime.block_on(async {
                (
                    carry_out(&memory, &resource, step).await,
                    carry_out(&shared, &resource, step).await,
                )
            });
            prop_assert_eq!(got.0, expected.0, "step {}: {:?}", nth, step);
            let mut counts = outcomes.get();
            expected.1.iter().for_each(|outcome| counts[*outcome as usize] += 1);
            outcomes.set(counts);
        }
        Ok(())
    };
    TestRunner::new(config).run(&steps(), compare).unwrap();
    let least = traces.get() / 10;
    assert!(outcomes.get().iter().all(|count| *count > least), "{:?} of {least}", outcomes.get());
}

/// A hold of three copies.
const HOLD: NewHold<'_> =
    NewHold { session: "s", ttl_ms: 5000, hold: "h", domain: "acme", copies: 3, min_copies: 1 };

const LIMITS: HoldLimits<'_> = HoldLimits {
    domain: Some(5),
    groups: GROUPS[1],
    global: None,
    bounds: HoldBounds { max_holds: None, known_only: false },
    enforced: true,
};

#[test]
fn a_resource_of_which_nothing_is_held_leaves_nothing_behind() {
    let (redis, runtime, clock) = (Redis::start(), runtime(), ManualClock::new(START));
    let memory = MemoryStore::with_clock(clock.clone());
    let shared = runtime.block_on(redis_store(&redis, clock.clone()));
    let target = HoldTarget { caller: None, resource: "a", template: 0 };
    let mut inside = redis.connection();
    let mut expiries = || -> Vec<i64> {
        let mut expiry = |key| redis::cmd("PEXPIRETIME").arg(key).query(&mut inside).unwrap();
        vec![expiry("c{a}"), expiry("s{a}")]
    };
    const NO_KEY: i64 = -2;
    let refused = NewHold { copies: 9, min_copies: 9, ..HOLD };
    runtime.block_on(async {
        assert_eq!(memory.reserve(&target, &refused, &LIMITS).await.unwrap().granted, 0);
        assert_eq!(shared.reserve(&target, &refused, &LIMITS).await.unwrap().granted, 0);
        assert_eq!((memory.held_resources(), expiries()), (0, vec![NO_KEY; 2]), "refused");
        for end in [true, false] {
            assert_eq!(memory.reserve(&target, &HOLD, &LIMITS).await.unwrap().granted, 3);
            assert_eq!(shared.reserve(&target, &HOLD, &LIMITS).await.unwrap().granted, 3);
            let ends_ms = clock.now().0 / 1000 + 5000;
            assert_eq!((memory.held_resources(), expiries()), (1, vec![ends_ms; 2]), "held");
            if end {
                assert_eq!(memory.end_session(&target, "s").await.unwrap(), 3);
                assert_eq!(shared.end_session(&target, "s").await.unwrap(), 3);
                assert_eq!(expiries(), [NO_KEY; 2], "ended");
            }
        }
        clock.advance(5_001_000);
        memory.sweep().await;
        assert_eq!(memory.held_resources(), 0);
    });
}

#[test]
fn corrupt_values_count_as_absent() {
    let (redis, runtime, clock) = (Redis::start(), runtime(), ManualClock::new(START));
    let shared = runtime.block_on(redis_store(&redis, clock.clone()));
    let target = HoldTarget { caller: None, resource: "a", template: 0 };
    let mut inside = redis.connection();
    let mut run = |line: &str| {
        let mut words = line.split(' ');
        let mut cmd = redis::cmd(words.next().unwrap());
        words.for_each(|word| {
            cmd.arg(word);
        });
        cmd.exec(&mut inside).unwrap();
    };
    for lines in [
        &["SET c{a} x"][..],
        &["SET s{a} x"],
        &["HSET c{a} unknown 1"],
        // A header that is too short, and a session of which there is no record.
        &["HSET c{a} \u{0} 1", "HSET c{a} ss 123"],
        &["HSET c{a} ss short", "ZADD s{a} 1 ss"],
        &["ZADD s{a} 1 nobody"],
    ] {
        run("DEL c{a}");
        run("DEL s{a}");
        for line in lines {
            run(line);
        }
        let made = runtime.block_on(shared.reserve(&target, &HOLD, &LIMITS)).unwrap();
        assert_eq!((made.granted, made.all_held), (3, 3), "{lines:?}");
        let list = runtime.block_on(shared.list_holds(&target, &["trial"])).unwrap();
        assert_eq!((list.all_held, list.holds, list.groups_held), (3, 1, vec![3]), "{lines:?}");
        assert_eq!(list.sessions.len(), 1, "{lines:?}");
    }
}
