//! Random events.

use proptest::prelude::*;
use tollgate_server::domain::bucket::BucketLimit;
use tollgate_server::domain::time::Micros;

use super::world::{MS, SECOND, World};

#[derive(Clone, Copy, Debug)]
pub(crate) enum Event {
    Pass(i64),
    /// Requests to one node at a fixed interval.
    Burst {
        node: usize,
        count: u32,
        tokens: u64,
        every_us: i64,
        land: bool,
    },
    /// The same to all nodes in turn.
    Everywhere {
        count: u32,
        tokens: u64,
        every_us: i64,
    },
    /// Load for long enough that nodes, or all but one, hold all that they may.
    Heat {
        all_but: Option<usize>,
    },
    /// Takes all tokens of the store and of all nodes at once.
    Drain,
    Join,
    Leave(usize),
    Kill(usize),
    Stop {
        node: usize,
        us: i64,
    },
}

fn change() -> impl Strategy<Value = Event> {
    prop_oneof![
        3 => Just(Event::Join),
        1 => (0..8_usize).prop_map(Event::Leave),
        1 => (0..8_usize).prop_map(Event::Kill),
        4 => (0..8_usize, 0..15 * SECOND).prop_map(|(node, us)| Event::Stop { node, us }),
    ]
}

/// A change while nodes hold all that they may; and later, when they do again, a drain.
fn press() -> impl Strategy<Value = Vec<Event>> {
    let wait = prop_oneof![0..SECOND, 0..4 * SECOND, 4 * SECOND..15 * SECOND];
    (change(), wait, any::<bool>(), 20 * MS..95 * MS).prop_map(|(change, wait, first, hold)| {
        let idle = match change {
            Event::Stop { node, us } if us > wait => Some(node),
            _ => None,
        };
        let heat = Event::Heat { all_but: None };
        let again = Event::Heat { all_but: idle.filter(|_| first) };
        vec![heat, change, Event::Pass(wait), again, Event::Pass(hold), Event::Drain]
    })
}

fn anything() -> impl Strategy<Value = Event> {
    let pass = prop_oneof![0..20 * MS, 0..500 * MS, 0..5 * SECOND];
    let burst = (0..8_usize, 1..150_u32, 1..8_u64, 0..400_i64, any::<bool>());
    prop_oneof![
        4 => pass.prop_map(Event::Pass),
        4 => Just(Event::Drain),
        4 => burst.prop_map(|(node, count, tokens, every_us, land)| {
            Event::Burst { node, count, tokens, every_us, land }
        }),
        6 => (1..150_u32, 1..8_u64, 0..200_i64)
            .prop_map(|(count, tokens, every_us)| Event::Everywhere { count, tokens, every_us }),
        4 => change(),
    ]
}

pub(crate) fn events() -> impl Strategy<Value = Vec<Event>> {
    let some = prop_oneof![
        2 => press(),
        1 => proptest::collection::vec(anything(), 1..10),
    ];
    proptest::collection::vec(some, 1..6).prop_map(|all| all.concat())
}

pub(crate) fn limit() -> impl Strategy<Value = BucketLimit> {
    // Refills per second, often high enough to make up for what nodes hold.
    let times = prop_oneof![1 => Just(1e-6), 1 => 0.1..2.0_f64, 3 => 2.0..30.0_f64];
    let debt = prop_oneof![2 => Just((0, 0)), 1 => Just((20, 30))];
    (times, 2..600_u64, 0.0..1.0_f64, debt).prop_map(
        |(times, size_tokens, part, (wait_timeout_ms, max_debt_ms))| BucketLimit {
            size_tokens,
            fill_rate: (size_tokens as f64 * times).max(1e-3),
            wait_timeout_ms,
            max_debt_ms,
            prefetch_tokens: ((size_tokens as f64 / 2.0 * part) as u64).max(1),
            ..BucketLimit::default()
        },
    )
}
pub(crate) async fn play(world: &mut World, event: Event) {
    let nodes = world.nodes.len();
    match event {
        Event::Pass(us) => world.pass(us).await,
        Event::Burst { node, count, tokens, every_us, land } => {
            for _ in 0..count {
                world.ask(node % nodes, tokens).await;
                if land {
                    world.land().await;
                }
                world.pass(every_us).await;
            }
        }
        Event::Everywhere { count, tokens, every_us } => {
            for number in 0..count as usize {
                world.ask(number % nodes, tokens).await;
                world.land().await;
                world.pass(every_us).await;
            }
        }
        Event::Heat { all_but } => {
            let tokens = world.limit.prefetch_tokens / 150 + 1;
            for _ in 0..60 {
                for node in (0..nodes).filter(|node| all_but.map(|at| at % nodes) != Some(*node)) {
                    world.ask(node, tokens).await;
                    world.land().await;
                }
                world.pass(600).await;
            }
        }
        Event::Drain => {
            // Smaller and smaller requests use up the tokens of nodes and store.
            let mut part = world.limit.size_tokens;
            while part > 0 {
                for node in 0..nodes {
                    while world.ask(node, part).await {}
                }
                part /= 2;
            }
        }
        Event::Join if nodes < 6 => world.join(),
        Event::Leave(node) if nodes > 1 => {
            world.land().await;
            let node = world.nodes.remove(node % nodes);
            node.store.close().await;
        }
        Event::Kill(node) if nodes > 1 => {
            let node = world.nodes.remove(node % nodes);
            world.dead.push(node.beat);
        }
        Event::Stop { node, us } => {
            let until = world.clock.now().0 + us;
            world.nodes[node % nodes].stopped_until = Micros(until);
            // Calls in flight still arrive.
            world.land().await;
        }
        _ => {}
    }
}
