use std::hint::spin_loop;
use std::{iter, thread};

use tokio::runtime::Builder;

use super::*;

fn pool() -> Pool {
    Pool {
        view: ArcSwap::default(),
        next: AtomicUsize::new(0),
        by_target: Mutex::new(vec![None]),
        changed: watch::channel(()).0,
    }
}

fn target() -> Target {
    Target::new("127.0.0.1:1".parse().unwrap(), Credentials::default()).unwrap()
}

/// The node is found and connected by another thread, at any moment of the look.
#[test]
fn a_call_waits_for_the_first_node_whenever_it_looks() {
    let runtime = Builder::new_current_thread().enable_time().build().unwrap();
    let _entered = runtime.enter();
    let target = target();
    for round in 0..500 {
        let pool = pool();
        let node = Arc::new(Node::new(target.clone(), pool.changed.clone()));
        let ready = AtomicUsize::new(0);
        let meet = || {
            ready.fetch_add(1, Ordering::AcqRel);
            while ready.load(Ordering::Acquire) < 2 {
                thread::yield_now();
            }
        };
        let attempt = thread::scope(|scope| {
            scope.spawn(|| {
                meet();
                (0..round % 50).for_each(|_| spin_loop());
                pool.publish(0, iter::once(&node));
                node.take(Ok(()));
            });
            meet();
            let deadline = Instant::now() + Duration::from_secs(60);
            runtime.block_on(pool.attempt(&[], deadline))
        });
        assert!(attempt.is_ok(), "{:?} in round {round}", attempt.err());
    }
}

/// While another one is still being connected.
#[tokio::test]
async fn a_call_that_waits_finds_a_node_whose_trial_has_ended() {
    let (pool, target) = (pool(), target());
    let node = || Arc::new(Node::new(target.clone(), pool.changed.clone()));
    let (on_trial, connecting) = (node(), node());
    pool.publish(0, [&on_trial, &connecting].into_iter());
    on_trial.take(Err("it does not answer".to_owned()));
    on_trial.take(Ok(()));
    let deadline = Instant::now() + Duration::from_secs(20);
    let trial = on_trial.attempt(Instant::now()).ok().unwrap();
    let (waiting, trial) = tokio::join!(
        pool.attempt(&[], deadline),
        trial.call(|_| async { Ok(Response::new(())) }, deadline)
    );
    assert!(trial.is_ok() && Arc::ptr_eq(waiting.unwrap().node(), &on_trial));
}
