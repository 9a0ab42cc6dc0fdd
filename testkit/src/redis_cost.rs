//! What requests cost Redis in CPU time, compared with one EVALSHA of a small token bucket for each request.

use std::thread;

use crate::Redis;

/// What is compared with: the script of `tollgate-loadtest floor`.
const NAIVE: &str = include_str!("../../loadtest/src/commands/floor/bucket.lua");

/// Requests in flight, over as many connections where requests are not put together.
pub const CALLERS: usize = 32;

/// Requests of each caller in a turn.
pub const TURN: usize = 500;

/// Kinds take turns, so that other load affects all of them.
pub const TURNS: usize = 9;

/// Keys that requests are for.
const KEYS: usize = 1000;

/// The number of the key that a caller's request is for.
pub fn key(caller: usize, nth: usize) -> usize {
    (caller * 31 + nth * 7) % KEYS
}

/// Measures the CPU time of a Redis.
pub struct CostMeter {
    inside: redis::Connection,
    callers: Vec<redis::Connection>,
    hash: String,
}

impl CostMeter {
    /// Connects to a Redis that does nothing else.
    pub fn new(redis: &Redis) -> Self {
        let mut inside = redis.connection();
        let hash = redis::cmd("SCRIPT").arg("LOAD").arg(NAIVE).query(&mut inside).unwrap();
        Self { inside, callers: (0..CALLERS).map(|_| redis.connection()).collect(), hash }
    }

    /// CPU time of Redis so far, in µs.
    fn cpu_us(&mut self) -> f64 {
        let text: String = redis::cmd("INFO").arg("cpu").query(&mut self.inside).unwrap();
        let seconds = |name: &str| -> f64 {
            let line = text.lines().find_map(|line| line.strip_prefix(name));
            line.unwrap().trim().parse().unwrap()
        };
        1e6 * (seconds("used_cpu_sys:") + seconds("used_cpu_user:"))
    }

    /// The CPU time of each of the requests of a turn, in µs.
    pub fn of(&mut self, turn: impl FnOnce()) -> f64 {
        let before = self.cpu_us();
        turn();
        (self.cpu_us() - before) / (CALLERS * TURN) as f64
    }

    /// The same of what is compared with: each caller has a connection of its own.
    pub fn of_naive(&mut self) -> f64 {
        let before = self.cpu_us();
        let hash = &self.hash;
        thread::scope(|scope| {
            for (caller, connection) in self.callers.iter_mut().enumerate() {
                scope.spawn(move || {
                    for nth in 0..TURN {
                        naive(hash, key(caller, nth)).query::<String>(connection).unwrap();
                    }
                });
            }
        });
        (self.cpu_us() - before) / (CALLERS * TURN) as f64
    }

    /// The same where all callers share one connection, and their requests are sent together.
    pub fn of_naive_pipelined(&mut self) -> f64 {
        let before = self.cpu_us();
        for nth in 0..TURN {
            let mut pipeline = redis::pipe();
            for caller in 0..CALLERS {
                pipeline.add_command(naive(&self.hash, key(caller, nth)));
            }
            pipeline.query::<Vec<String>>(&mut self.callers[0]).unwrap();
        }
        (self.cpu_us() - before) / (CALLERS * TURN) as f64
    }
}

fn naive(hash: &str, key: usize) -> redis::Cmd {
    let mut cmd = redis::cmd("EVALSHA");
    cmd.arg(hash).arg(1).arg(format!("b{{shop:{key}}}")).arg(2_000_000).arg(1000);
    cmd
}

/// The median of measurements.
pub fn median(costs: &[f64]) -> f64 {
    let mut costs = costs.to_vec();
    costs.sort_by(f64::total_cmp);
    costs[costs.len() / 2]
}
