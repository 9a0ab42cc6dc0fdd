//! Runs a load: its threads, connections and loops.

use std::rc::Rc;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Instant;

use tokio::runtime::{Builder, Runtime};
use tokio::task::{JoinSet, LocalSet};
use tollgate_client::connection::Target;

use crate::error::RunError;
use crate::load::args::LoadArgs;
use crate::load::driver::Caller;
use crate::load::loops::{Worker, closed_loop, open_loop};
use crate::load::pace::{Pacer, Schedule};
use crate::load::protocol::Protocol;
use crate::load::tally::{LiveCounts, Tally, Window};

/// Part `index` of `total` split as evenly as possible into `parts`.
fn share(total: u64, index: u64, parts: u64) -> u64 {
    total / parts + u64::from(index < total % parts)
}

/// Runs the load. `watch` runs on the calling thread meanwhile; its receiver disconnects when the
/// last sending thread ends.
pub(crate) fn drive<P: Protocol, W>(
    args: &LoadArgs,
    protocol: P,
    watch: impl FnOnce(&mpsc::Receiver<()>, &[Arc<LiveCounts>], Window) -> W,
) -> Result<(Tally<P>, W), RunError> {
    let protocol = Arc::new(protocol);
    let targets = args.run.credentials.targets(&args.run.target)?;
    // Connects and does all other fallible work before the first request.
    let connected = (0..args.threads).map(|thread| Connected::new(args, thread, &targets));
    let connected: Vec<Connected<P>> = connected.collect::<Result<_, _>>()?;

    let window = Window::new(Instant::now(), args.run.warmup, args.run.duration);
    let mut lives = Vec::new();
    let mut parts = Vec::new();
    for connected in connected {
        let live = Arc::<LiveCounts>::default();
        lives.push(Arc::clone(&live));
        let worker = Worker::new(Arc::clone(&protocol), window, live, Tally::new(window)?);
        parts.push(SenderThread { connected, worker });
    }
    thread::scope(|scope| {
        let (running, finished) = mpsc::channel::<()>();
        let mut threads = Vec::new();
        for part in parts {
            let running = running.clone();
            threads.push(thread::Builder::new().spawn_scoped(scope, move || {
                let tally = part.drive(args);
                drop(running);
                tally
            })?);
        }
        drop(running);
        let watched = watch(&finished, &lives, window);
        let mut total: Option<Tally<P>> = None;
        for thread in threads {
            let tally = thread.join().ok().flatten().ok_or(RunError::Panicked)?;
            match &mut total {
                Some(total) => total.merge(tally),
                None => total = Some(tally),
            }
        }
        total.map(|total| (total, watched)).ok_or(RunError::Panicked)
    })
}

/// What one sending thread needs before the first request.
struct Connected<P: Protocol> {
    thread: u64,
    runtime: Runtime,
    /// For an open loop.
    pacer: Option<Pacer>,
    callers: Vec<Caller<P>>,
}

impl<P: Protocol> Connected<P> {
    fn new(args: &LoadArgs, thread: u64, targets: &[Target]) -> Result<Self, RunError> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let pacer = args.rate.map(|_| Pacer::start()).transpose()?;
        let callers = runtime.block_on(async {
            let mut callers = Vec::new();
            for number in (thread..args.run.connections).step_by(args.threads as usize) {
                let target = &targets[number as usize % targets.len()];
                callers.push(Caller::dial(target, args.run.timeout).await);
            }
            callers
        });
        Ok(Self { thread, runtime, pacer, callers })
    }
}

/// State of one sending thread.
struct SenderThread<P: Protocol> {
    connected: Connected<P>,
    worker: Worker<P>,
}

impl<P: Protocol> SenderThread<P> {
    fn drive(self, args: &LoadArgs) -> Option<Tally<P>> {
        let Self { connected, worker } = self;
        let Connected { thread, runtime, pacer, callers } = connected;
        let worker = Rc::new(worker);
        let keys = worker.keys().clone();
        let draw = |stream| keys.draw(args.run.seed, stream);
        LocalSet::new().block_on(&runtime, async {
            let mut tasks = JoinSet::new();
            if let (Some(rate), Some(pacer)) = (args.rate, pacer) {
                let schedule =
                    Schedule::new(rate, args.arrivals, thread, args.threads, args.run.seed);
                let max_outstanding = share(args.max_outstanding, thread, args.threads) as usize;
                let worker = Rc::clone(&worker);
                tasks.spawn_local(open_loop(
                    worker,
                    callers,
                    draw(thread),
                    schedule,
                    pacer,
                    max_outstanding,
                ));
            } else {
                for (index, at) in (0..).zip(callers) {
                    let number = thread + index * args.threads;
                    for caller in 0..args.in_flight {
                        tasks.spawn_local(closed_loop(
                            Rc::clone(&worker),
                            worker.requester(&at),
                            draw(number * args.in_flight + caller),
                            args.honour_wait,
                        ));
                    }
                }
            }
            // Propagates a panic of a task instead of reporting a partial run.
            tasks.join_all().await;
        });
        Rc::into_inner(worker).map(Worker::into_tally)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_add_up() {
        for (total, parts) in [(10, 3), (3, 3), (4096, 7)] {
            let shares: Vec<u64> = (0..parts).map(|index| share(total, index, parts)).collect();
            assert_eq!(shares.iter().sum::<u64>(), total);
            assert!(shares.iter().all(|share| share.abs_diff(total / parts) <= 1));
        }
    }
}
