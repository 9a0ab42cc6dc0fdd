//! Tests of prefetch: when a node takes tokens, and how it uses, returns or loses them.

use super::*;

const MS: i64 = 1000;

fn at(ms: i64) -> Micros {
    Micros(1_000_000_000 + ms * MS)
}

#[test]
fn node_count_expires_and_prefetch_waits_for_heartbeats() {
    assert_eq!(NodeCount::view(None, at(0)).nodes, u32::MAX);
    let beat =
        |before: Option<&NodeCount>, ms| NodeCount::after_heartbeat(before, at(ms), 100 * MS, 3);
    let mut node_count = beat(None, 0);
    for second in 1..=4 {
        let view = NodeCount::view(Some(&node_count), at(second * 1000));
        assert_eq!((view.nodes, view.may_prefetch), (3, second == 4), "after {second} s");
        node_count = beat(Some(&node_count), second * 1000);
    }
    // The age of the count starts when the heartbeat was sent.
    assert!(NodeCount::view(Some(&node_count), at(6400)).may_prefetch);
    let late = NodeCount::view(Some(&node_count), at(6401));
    assert_eq!((late.nodes, late.may_prefetch), (u32::MAX, false));
    // After a gap, other nodes may no longer count this one, so the wait starts again.
    node_count = beat(Some(&node_count), 7000);
    assert_eq!(NodeCount::view(Some(&node_count), at(9000)).nodes, 3);
    assert!(!NodeCount::view(Some(&node_count), at(9000)).may_prefetch);
}

#[test]
fn node_count_rises_at_once_and_falls_late() {
    let mut node_count = NodeCount::after_heartbeat(None, at(0), 0, 3);
    let mut counts = Vec::new();
    for (second, nodes) in [2, 2, 4, 2, 2, 2, 2, 2, 2].into_iter().enumerate() {
        let now = at(1000 * (second as i64 + 1));
        node_count = NodeCount::after_heartbeat(Some(&node_count), now, 0, nodes);
        counts.push(NodeCount::view(Some(&node_count), now).nodes);
    }
    assert_eq!(counts, [3, 3, 4, 4, 4, 4, 4, 2, 2]);
}

/// Requests one token every 100 µs from `ms` on, for 10 ms; returns the end of that time.
fn make_hot(stash: &mut Stash, ms: i64) -> Micros {
    for step in 0..100 {
        stash.serve(1, Micros(at(ms).0 + step * 100));
    }
    at(ms + 10)
}

/// A stash that may refill at once.
fn ready() -> Stash {
    Stash::new(Micros(at(0).0 - STARTUP_WAIT_US))
}

#[test]
fn only_hot_buckets_refill() {
    let mut stash = ready();
    for ms in 0..1000 {
        stash.serve(1, at(2 * ms));
        assert_eq!(stash.refill(100, at(2 * ms)), None, "500 requests a second");
    }
    let now = make_hot(&mut stash, 3000);
    // 100 ms of demand, or the most tokens that may be held.
    let mut other = ready();
    make_hot(&mut other, 3000);
    assert_eq!(other.refill(5000, now), Some(1000));
    assert_eq!(stash.refill(100, now), Some(100));
    assert_eq!(stash.refill(100, now), None, "a refill is in flight");
    let mut new = Stash::new(at(0));
    let now = make_hot(&mut new, 3900);
    assert_eq!(new.refill(100, now), None, "other nodes may not have loaded the limits yet");
    let now = make_hot(&mut new, 4000);
    assert_eq!(new.refill(100, now), Some(100));
}

#[test]
fn serves_held_tokens_and_refills_below_half() {
    let mut stash = ready();
    let now = make_hot(&mut stash, 0);
    assert_eq!(stash.refill(100, now), Some(100));
    stash.refilled(100, Some(100), now, now);
    assert_eq!(stash.serve(30, now), Some(100));
    assert_eq!(stash.serve(71, now), None, "served in full or not at all");
    assert_eq!(stash.refill(100, now), None);
    assert_eq!(stash.serve(21, now), Some(70));
    assert_eq!(stash.refill(100, now), Some(51));
    stash.refilled(51, Some(51), now, now);
    assert_eq!(stash.serve(100, now), Some(100));
    assert_eq!((stash.held(), stash.take_lost()), (0, 0));
}

#[test]
fn refills_pause_after_a_shortage_or_a_failure() {
    let mut stash = ready();
    let now = make_hot(&mut stash, 0);
    assert_eq!(stash.refill(100, now), Some(100));
    stash.refilled(100, Some(49), now, now);
    assert_eq!(stash.serve(49, now), Some(49));
    assert_eq!(stash.refill(100, now), None);
    let now = make_hot(&mut stash, 20);
    assert_eq!(stash.refill(100, now), Some(100));
    stash.refilled(100, None, now, now);
    assert_eq!((stash.held(), stash.take_lost()), (0, 100), "whether they were taken is unknown");
    let now = make_hot(&mut stash, 200);
    assert_eq!(stash.refill(100, now), None);
    let now = make_hot(&mut stash, 300);
    assert_eq!(stash.refill(100, now), Some(100));
}

#[test]
fn unused_tokens_go_back_and_expired_tokens_are_lost() {
    let filled = || {
        let mut stash = ready();
        let now = make_hot(&mut stash, 0);
        stash.refill(100, now);
        stash.refilled(100, Some(100), now, now);
        stash
    };
    let mut idle = filled();
    assert_eq!(idle.spare(at(50)), 0);
    assert_eq!((idle.spare(at(120)), idle.held()), (100, 0));

    let mut slow = filled();
    slow.serve(1, at(480));
    assert_eq!(slow.spare(at(500)), 0);
    assert_eq!((slow.spare(at(510)), slow.held()), (99, 0));

    // No upkeep ran, as when the process was suspended.
    let mut stopped = filled();
    assert_eq!(stopped.serve(1, at(1010)), None);
    assert_eq!((stopped.take_lost(), stopped.take_lost()), (100, 0));
    let mut stopped = filled();
    assert_eq!((stopped.take_all(at(1010)), stopped.take_lost()), (0, 100));
    let mut served = filled();
    assert_eq!(served.serve(1, at(1009)), Some(100));
}

#[test]
fn few_parts_take_nearly_all_available_tokens() {
    for tokens in 1..2000 {
        let asked: Vec<u64> = parts(tokens).collect();
        assert_eq!(asked.iter().sum::<u64>(), tokens);
        assert!(asked.len() <= 6, "{asked:?}");
        for available in [tokens / 7, tokens / 2, tokens - 1, tokens] {
            let mut left = available;
            for part in asked.iter().filter(|part| **part > 0) {
                left -= if *part <= left { *part } else { 0 };
            }
            assert!(left <= tokens.div_ceil(16), "{left} of {available} left by {asked:?}");
        }
    }
}
