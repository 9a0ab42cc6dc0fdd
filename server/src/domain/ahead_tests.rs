//! When a node takes tokens ahead, and what becomes of them.

use super::*;

const MS: i64 = 1000;

fn at(ms: i64) -> Micros {
    Micros(1_000_000_000 + ms * MS)
}

#[test]
fn a_count_is_relied_on_for_a_while_and_a_node_waits_until_it_is_counted() {
    assert_eq!(Sight::view(None, at(0)).nodes, u32::MAX);
    let beat = |before: Option<&Sight>, ms| Sight::heard(before, at(ms), 100 * MS, 3);
    let mut sight = beat(None, 0);
    for second in 1..=4 {
        let view = Sight::view(Some(&sight), at(second * 1000));
        assert_eq!((view.nodes, view.may_take), (3, second == 4), "after {second} s");
        sight = beat(Some(&sight), second * 1000);
    }
    // The count is as old as the heartbeat that asked for it.
    assert!(Sight::view(Some(&sight), at(6400)).may_take);
    let late = Sight::view(Some(&sight), at(6401));
    assert_eq!((late.nodes, late.may_take), (u32::MAX, false));
    // After a gap the others may have forgotten it, and it waits anew.
    sight = beat(Some(&sight), 7000);
    assert_eq!(Sight::view(Some(&sight), at(9000)).nodes, 3);
    assert!(!Sight::view(Some(&sight), at(9000)).may_take);
}

#[test]
fn more_nodes_are_believed_at_once_and_fewer_only_later() {
    let mut sight = Sight::heard(None, at(0), 0, 3);
    let mut counts = Vec::new();
    for (second, nodes) in [2, 2, 4, 2, 2, 2, 2, 2, 2].into_iter().enumerate() {
        let now = at(1000 * (second as i64 + 1));
        sight = Sight::heard(Some(&sight), now, 0, nodes);
        counts.push(Sight::view(Some(&sight), now).nodes);
    }
    assert_eq!(counts, [3, 3, 4, 4, 4, 4, 4, 2, 2]);
}

/// A stash whose bucket is asked for one token every 100 µs from `ms` on, for 10 ms.
fn hot(stash: &mut Stash, ms: i64) -> Micros {
    for step in 0..100 {
        stash.serve(1, Micros(at(ms).0 + step * 100));
    }
    at(ms + 10)
}

/// One that may take from the start.
fn ready() -> Stash {
    Stash::new(Micros(at(0).0 - QUIET_US))
}

#[test]
fn only_a_hot_bucket_is_taken_from() {
    let mut stash = ready();
    for ms in 0..1000 {
        stash.serve(1, at(2 * ms));
        assert_eq!(stash.refill(100, at(2 * ms)), None, "500 requests a second");
    }
    let now = hot(&mut stash, 3000);
    // A tenth of a second of what is asked for, or the most that may be held.
    let mut other = ready();
    hot(&mut other, 3000);
    assert_eq!(other.refill(5000, now), Some(1000));
    assert_eq!(stash.refill(100, now), Some(100));
    assert_eq!(stash.refill(100, now), None, "one is on its way");
    let mut new = Stash::new(at(0));
    let now = hot(&mut new, 3900);
    assert_eq!(new.refill(100, now), None, "others may not know of the limits yet");
    let now = hot(&mut new, 4000);
    assert_eq!(new.refill(100, now), Some(100));
}

#[test]
fn what_is_held_is_served_and_refilled_below_half() {
    let mut stash = ready();
    let now = hot(&mut stash, 0);
    assert_eq!(stash.refill(100, now), Some(100));
    stash.refilled(100, Some(100), now, now);
    assert_eq!(stash.serve(30, now), Some(100));
    assert_eq!(stash.serve(71, now), None, "served whole or not at all");
    assert_eq!(stash.refill(100, now), None);
    assert_eq!(stash.serve(21, now), Some(70));
    assert_eq!(stash.refill(100, now), Some(51));
    stash.refilled(51, Some(51), now, now);
    assert_eq!(stash.serve(100, now), Some(100));
    assert_eq!((stash.held(), stash.lost()), (0, 0));
}

#[test]
fn a_bucket_that_has_little_is_left_alone_for_a_moment() {
    let mut stash = ready();
    let now = hot(&mut stash, 0);
    assert_eq!(stash.refill(100, now), Some(100));
    stash.refilled(100, Some(49), now, now);
    assert_eq!(stash.serve(49, now), Some(49));
    assert_eq!(stash.refill(100, now), None);
    let now = hot(&mut stash, 20);
    assert_eq!(stash.refill(100, now), Some(100));
    stash.refilled(100, None, now, now);
    assert_eq!((stash.held(), stash.lost()), (0, 100), "whether they were taken is unknown");
    let now = hot(&mut stash, 200);
    assert_eq!(stash.refill(100, now), None);
    let now = hot(&mut stash, 300);
    assert_eq!(stash.refill(100, now), Some(100));
}

#[test]
fn what_nobody_wants_goes_back_and_what_is_too_old_is_lost() {
    let filled = || {
        let mut stash = ready();
        let now = hot(&mut stash, 0);
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

    // Nobody looked after this one, as when the process was stopped.
    let mut stopped = filled();
    assert_eq!(stopped.serve(1, at(1010)), None);
    assert_eq!((stopped.lost(), stopped.lost()), (100, 0));
    let mut stopped = filled();
    assert_eq!((stopped.empty(at(1010)), stopped.lost()), (0, 100));
    let mut served = filled();
    assert_eq!(served.serve(1, at(1009)), Some(100));
}

#[test]
fn parts_are_few_and_take_nearly_all_there_is() {
    for tokens in 1..2000 {
        let asked: Vec<u64> = parts(tokens).collect();
        assert_eq!(asked.iter().sum::<u64>(), tokens);
        assert!(asked.len() <= 6, "{asked:?}");
        for there in [tokens / 7, tokens / 2, tokens - 1, tokens] {
            let mut left = there;
            for part in asked.iter().filter(|part| **part > 0) {
                left -= if *part <= left { *part } else { 0 };
            }
            assert!(left <= tokens.div_ceil(16), "{left} of {there} left by {asked:?}");
        }
    }
}
