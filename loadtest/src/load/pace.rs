//! Send times of an open loop: a schedule fixed in advance, and a timer precise enough for it.

use std::cell::Cell;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use rand::rngs::SmallRng;
use rand_distr::{Distribution as _, Exp};
use tokio::sync::Notify;

use crate::load::keys;

/// Arrival process of an open loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Arrivals {
    /// At equal intervals.
    Uniform,
    /// Independent arrivals, as from many separate callers.
    Poisson,
}

impl Arrivals {
    /// Name on the command line and in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Uniform => "uniform",
            Self::Poisson => "poisson",
        }
    }
}

/// Scheduled send times of one thread, relative to the start. They do not depend on answers, so a
/// slow server cannot lighten the load.
#[derive(Clone, Debug)]
pub struct Schedule {
    gaps: Gaps,
}

#[derive(Clone, Debug)]
enum Gaps {
    // Request number `next` is due at `next * step_s`. A product instead of a sum, so that rounding
    // errors do not accumulate.
    Even { next: f64, step_s: f64 },
    Random { at_s: f64, gap: Exp<f64>, rng: SmallRng },
    Never,
}

impl Schedule {
    /// Part of thread number `thread`, out of `threads` that send `rate` requests/s together.
    pub fn new(rate: f64, arrivals: Arrivals, thread: u64, threads: u64, seed: u64) -> Self {
        let own_rate = rate / threads as f64;
        let gaps = match arrivals {
            Arrivals::Uniform => {
                Gaps::Even { next: thread as f64 / threads as f64, step_s: 1.0 / own_rate }
            }
            // Parallel Poisson processes add up to one with the sum of their rates.
            Arrivals::Poisson => Exp::new(own_rate).map_or(Gaps::Never, |gap| Gaps::Random {
                at_s: 0.0,
                gap,
                rng: keys::rng(seed, !thread),
            }),
        };
        Self { gaps }
    }
}

impl Iterator for Schedule {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        let at_s = match &mut self.gaps {
            Gaps::Even { next, step_s } => {
                let at_s = *next * *step_s;
                *next += 1.0;
                at_s
            }
            Gaps::Random { at_s, gap, rng } => {
                *at_s += gap.sample(rng);
                *at_s
            }
            Gaps::Never => return None,
        };
        Duration::try_from_secs_f64(at_s).ok()
    }
}

/// A timer with a precision of some 50 µs. Tokio's timer counts whole milliseconds, which would
/// show as latency, so a separate thread sleeps and wakes the task.
#[derive(Debug)]
pub struct Pacer {
    deadlines: mpsc::Sender<Instant>,
    set: Cell<Option<Instant>>,
    woken: Arc<Notify>,
}

impl Pacer {
    /// Starts the timer thread, which ends when this value is dropped.
    pub fn start() -> std::io::Result<Self> {
        let (deadlines, requested) = mpsc::channel::<Instant>();
        let woken = Arc::new(Notify::new());
        let wake = Arc::clone(&woken);
        thread::Builder::new().name("pacer".to_owned()).spawn(move || {
            while let Ok(mut deadline) = requested.recv() {
                // A new deadline replaces the pending one.
                loop {
                    let pause = deadline.saturating_duration_since(Instant::now());
                    match requested.recv_timeout(pause) {
                        Ok(instead) => deadline = instead,
                        Err(_) => break,
                    }
                }
                wake.notify_one();
            }
        })?;
        Ok(Self { deadlines, set: Cell::new(None), woken })
    }

    /// Waits until `when`; returns at once if it has passed. Cancel-safe: a dropped wait does not
    /// affect the next one.
    pub async fn until(&self, when: Instant) {
        if self.set.get() != Some(when) && when > Instant::now() {
            self.set.set(Some(when));
            if self.deadlines.send(when).is_err() {
                self.set.set(None);
                tokio::time::sleep_until(when.into()).await;
            }
        }
        while when > Instant::now() {
            // A wake-up may belong to a cancelled wait.
            self.woken.notified().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(arrivals: Arrivals, threads: u64) -> Vec<f64> {
        let part = |thread| {
            let schedule = Schedule::new(1000.0, arrivals, thread, threads, 1);
            schedule.map(|at| at.as_secs_f64()).take_while(|at| *at < 10.0)
        };
        let mut all: Vec<f64> = (0..threads).flat_map(part).collect();
        all.sort_by(f64::total_cmp);
        all
    }

    #[test]
    fn uniform_arrivals_are_evenly_spaced_over_all_threads() {
        for threads in [1, 3] {
            let times = all(Arrivals::Uniform, threads);
            assert_eq!(times.len(), 10_000);
            assert!(times.windows(2).all(|pair| (pair[1] - pair[0] - 0.001).abs() < 1e-6));
        }
    }

    #[test]
    fn poisson_arrivals_have_the_rate_and_the_spread() {
        for threads in [1, 3] {
            let times = all(Arrivals::Poisson, threads);
            // 10,000 expected, standard deviation 100.
            assert!((9_600..10_400).contains(&times.len()), "{}", times.len());
            let long = times.windows(2).filter(|pair| pair[1] - pair[0] > 0.001).count();
            let share = long as f64 / times.len() as f64;
            assert!((share - (-1.0_f64).exp()).abs() < 0.03, "{share}");
        }
    }

    #[tokio::test]
    async fn the_pacer_never_wakes_early() {
        let pacer = Pacer::start().expect("a thread");
        for us in [0, 300, 2_000] {
            let when = Instant::now() + Duration::from_micros(us);
            pacer.until(when).await;
            assert!(Instant::now() >= when);
        }
    }

    #[tokio::test]
    async fn cancelled_waits_do_not_delay_others() {
        let pacer = Pacer::start().expect("a thread");
        let start = Instant::now();
        let late = start + Duration::from_secs(60);
        for us in [500, 1_000, 1_500] {
            let soon = start + Duration::from_micros(us);
            tokio::select! { biased; () = pacer.until(late) => {}, () = std::future::ready(()) => {} }
            pacer.until(soon).await;
            assert!(Instant::now() >= soon);
        }
        assert!(start.elapsed() < Duration::from_secs(30));
    }
}
