//! Faults of Redis itself.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::trial::{AWAY, LIMITS, Trial};
use testkit::cluster::{Cluster, reserve_quarter};
use testkit::{Redis, eventually, redis_cmd, signal};

const BY_POLICY: &str = "the policy answers";

/// A trial during which decisions are not shared.
fn trial<'a>(place: u32, test: &'a str, class: &'a str, fault: &'a str) -> Trial<'a> {
    let (meanwhile, shared, lost_states) = (BY_POLICY, false, 0.0);
    Trial { place, fault, meanwhile, test, shared, class, lost_states }
}

fn cluster(args: &[&str]) -> Cluster {
    let redis = Redis::start_with(args);
    let url = redis.url();
    Cluster::start_on(redis, &url, &[], 3, LIMITS, &[])
}

fn tell(inside: &mut redis::Connection, words: &str) -> redis::RedisResult<redis::Value> {
    redis_cmd(words).query(inside)
}

fn tell_new_connection(redis: &Redis, words: &str) {
    tell(&mut redis.connection(), words).unwrap();
}

/// Sends a command that keeps Redis busy, from another thread.
fn tell_in_background(
    redis: &Redis,
    words: &'static str,
) -> JoinHandle<redis::RedisResult<redis::Value>> {
    let mut inside = redis.connection();
    thread::spawn(move || tell(&mut inside, words))
}

/// Waits until Redis answers other clients again.
fn wait_until_it_answers(redis: &Redis) {
    let mut inside = redis.connection();
    eventually("Redis answers", 3 * AWAY, || tell(&mut inside, "PING").is_ok());
}

#[test]
fn killed() {
    let _machine = reserve_quarter();
    let mut trial =
        trial(201, "faults::server::killed", "unreachable", "Redis is killed, and starts empty");
    trial.lost_states = 1.0;
    trial.run(&mut cluster(&[]), Redis::kill, |redis, ()| redis.start_again());
}

#[test]
fn stopped() {
    let _machine = reserve_quarter();
    trial(202, "faults::server::stopped", "timeout", "Redis gets SIGSTOP, then SIGCONT").run(
        &mut cluster(&[]),
        |redis| signal(redis.pid(), "STOP"),
        |redis, ()| signal(redis.pid(), "CONT"),
    );
}

#[test]
fn client_pause() {
    let _machine = reserve_quarter();
    trial(203, "faults::server::client_pause", "timeout", "CLIENT PAUSE").run(
        &mut cluster(&[]),
        |redis| tell_new_connection(redis, "CLIENT PAUSE 2000 ALL"),
        |redis, ()| wait_until_it_answers(redis),
    );
}

#[test]
fn debug_sleep() {
    let _machine = reserve_quarter();
    trial(204, "faults::server::debug_sleep", "timeout", "DEBUG SLEEP").run(
        &mut cluster(&["--enable-debug-command", "yes"]),
        |redis| tell_in_background(redis, "DEBUG SLEEP 2"),
        |redis, asleep| {
            wait_until_it_answers(redis);
            asleep.join().unwrap().unwrap();
        },
    );
}

#[test]
fn out_of_memory() {
    let _machine = reserve_quarter();
    trial(205, "faults::server::out_of_memory", "refused", "maxmemory is reached, with noeviction")
        .run(
            &mut cluster(&["--maxmemory-policy", "noeviction"]),
            |redis| tell_new_connection(redis, "CONFIG SET maxmemory 1"),
            |redis, ()| tell_new_connection(redis, "CONFIG SET maxmemory 0"),
        );
}

#[test]
fn read_only() {
    let _machine = reserve_quarter();
    trial(206, "faults::server::read_only", "refused", "The master is demoted: READONLY").run(
        &mut cluster(&[]),
        |redis| tell_new_connection(redis, "REPLICAOF 127.0.0.1 1"),
        |redis, ()| tell_new_connection(redis, "REPLICAOF NO ONE"),
    );
}

/// Redis loads keys of another database, each with a delay, and answers LOADING meanwhile.
#[test]
fn loading() {
    let _machine = reserve_quarter();
    let args = ["--enable-debug-command", "yes", "--loading-process-events-interval-bytes", "1024"];
    let mut cluster = cluster(&args);
    let mut inside = cluster.redis.connection();
    tell(&mut inside, "SELECT 1").unwrap();
    tell(&mut inside, "DEBUG POPULATE 20000").unwrap();
    trial(207, "faults::server::loading", "refused", "Redis loads its data: LOADING").run(
        &mut cluster,
        |redis| {
            tell_new_connection(redis, "CONFIG SET key-load-delay 1000");
            tell_in_background(redis, "DEBUG RELOAD")
        },
        |redis, load| {
            tell_new_connection(redis, "CONFIG SET key-load-delay 0");
            load.join().unwrap().unwrap();
        },
    );
}

#[test]
fn a_foreign_slow_script() {
    let _machine = reserve_quarter();
    trial(
        208,
        "faults::server::a_foreign_slow_script",
        "refused",
        "Another's script does not end: BUSY",
    )
    .run(
        &mut cluster(&["--busy-reply-threshold", "100"]),
        |redis| tell_in_background(redis, "EVAL while(true)do--[[]]end 0"),
        |redis, script| {
            tell_new_connection(redis, "SCRIPT KILL");
            assert!(script.join().unwrap().is_err(), "the script was killed");
        },
    );
}

/// Runs a trial in which the rights of the nodes' user change.
fn with_user(trial: &Trial<'_>, fail: &str, mend: &str) {
    let redis = Redis::start();
    tell_new_connection(&redis, "ACL SETUSER node on >right ~* &* +@all");
    let url = redis.url().replace("://", "://node:right@");
    let mut cluster = Cluster::start_on(redis, &url, &[], 3, LIMITS, &[]);
    trial.run(
        &mut cluster,
        |redis| {
            tell_new_connection(redis, fail);
            // Logged-in connections would keep their rights.
            tell_new_connection(redis, "CLIENT KILL USER node");
        },
        |redis, ()| tell_new_connection(redis, mend),
    );
}

#[test]
fn a_wrong_password() {
    let _machine = reserve_quarter();
    let trial =
        trial(209, "faults::server::a_wrong_password", "refused", "The password is changed");
    with_user(&trial, "ACL SETUSER node resetpass >wrong", "ACL SETUSER node >right");
}

#[test]
fn a_forbidden_command() {
    let _machine = reserve_quarter();
    let trial =
        trial(210, "faults::server::a_forbidden_command", "refused", "An ACL forbids EVALSHA");
    with_user(&trial, "ACL SETUSER node -evalsha", "ACL SETUSER node +evalsha");
}

/// A repeated step in a background thread.
struct Repeated {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl Repeated {
    /// Makes at least this many steps, however early it is stopped.
    fn start(
        redis: &Redis,
        pause: Duration,
        least: u32,
        mut step: impl FnMut(&mut redis::Connection, u32) + Send + 'static,
    ) -> Self {
        let (mut inside, stop) = (redis.connection(), Arc::new(AtomicBool::new(false)));
        let stopped = Arc::clone(&stop);
        let thread = thread::spawn(move || {
            for count in 0.. {
                if count >= least && stopped.load(Ordering::Relaxed) {
                    break;
                }
                step(&mut inside, count);
                thread::sleep(pause);
            }
        });
        Self { stop, thread }
    }

    fn stop(self) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap();
    }
}

#[test]
fn script_flush() {
    let _machine = reserve_quarter();
    let mut trial =
        trial(211, "faults::server::script_flush", "", "SCRIPT FLUSH, a hundred times a second");
    (trial.shared, trial.meanwhile) = (true, "decisions are shared");
    trial.run(
        &mut cluster(&[]),
        |redis| {
            let step =
                |inside: &mut redis::Connection, _| drop(tell(inside, "SCRIPT FLUSH").unwrap());
            Repeated::start(redis, Duration::from_millis(10), 50, step)
        },
        |_, steps| steps.stop(),
    );
}

/// Each such value counts as a full bucket, once.
#[test]
fn foreign_values() {
    const VALUES: u32 = 6;
    let _machine = reserve_quarter();
    let mut trial = trial(
        212,
        "faults::server::foreign_values",
        "",
        "Six values of a wrong type, or corrupt, under each key",
    );
    (trial.shared, trial.meanwhile) = (true, "decisions are shared; the bucket counts as full");
    trial.lost_states = f64::from(VALUES);
    let mut cluster = cluster(&[]);
    trial.run(
        &mut cluster,
        |redis| {
            let step = |inside: &mut redis::Connection, count| {
                if count < VALUES {
                    for namespace in ["local", "allow", "deny"] {
                        let key = format!("b{{{namespace}:b}}");
                        let put = ["RPUSH", "SET", "SADD"][count as usize % 3];
                        let mut both = redis::pipe();
                        both.atomic().cmd("DEL").arg(&key).cmd(put).arg(&key).arg("something");
                        both.exec(inside).unwrap();
                    }
                }
            };
            Repeated::start(redis, AWAY / 10, VALUES, step)
        },
        |_, steps| steps.stop(),
    );
}
