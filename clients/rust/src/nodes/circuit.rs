//! When a node is called: the circuit breaker of one node. Pure: time is a parameter.

use std::time::Duration;

use tokio::time::Instant;

/// Failures in a row after which a node is not called any more.
const MOST_FAILURES: u32 = 3;

/// The pause before a failing node is checked, doubled with each failure up to [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(100);

/// The longest pause: a node that is well again is called after so long at most.
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// How often a node that is not called is checked while it is well.
const CHECK_INTERVAL: Duration = Duration::from_secs(10);

/// How long the one call of a trial may take before another one is tried.
const TRIAL_INTERVAL: Duration = Duration::from_secs(1);

/// Whether one node is called.
#[derive(Debug)]
pub(super) struct Circuit {
    state: State,
    /// Failed calls in a row.
    failures: u32,
    /// How often the circuit was opened, or the check failed, since the last call that was
    /// answered.
    trips: u32,
    /// Advanced when the state changes: what an older call reports says nothing about now.
    generation: u64,
    /// The node is overloaded, and wants to be left alone until then.
    quiet_until: Option<Instant>,
    /// Whether a call was answered since the last check.
    answered: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// The first check is under way.
    Connecting,
    /// Called.
    Up,
    /// A check has passed after failures: one call at a time until one is answered.
    Trial { busy: bool },
    /// Not called until a check passes.
    Down,
}

/// The permission for one call, to be reported with its result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Pass {
    generation: u64,
    /// The failures in a row that were known when the call began.
    failures: u32,
}

/// The result of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Report {
    /// The node has answered, if only that the request is wrong.
    Answered,
    /// The node is overloaded and wants to be left alone for this long.
    Overloaded(Duration),
    /// No answer in time, or an error.
    Failed,
    /// No connection.
    Unreachable,
    /// The caller has given up before the deadline, which says nothing about the node.
    Cancelled,
}

impl Circuit {
    pub(super) fn new() -> Self {
        Self {
            state: State::Connecting,
            failures: 0,
            trips: 0,
            generation: 0,
            quiet_until: None,
            answered: false,
        }
    }

    pub(super) fn state(&self) -> State {
        self.state
    }

    /// Whether calls go to the node.
    pub(super) fn is_called(&self) -> bool {
        matches!(self.state, State::Up | State::Trial { .. })
    }

    /// Whether the node is left alone because it is overloaded.
    pub(super) fn is_quiet(&self, now: Instant) -> bool {
        self.quiet_until.is_some_and(|until| now < until)
    }

    /// The permission to call the node now.
    pub(super) fn pass(&mut self, now: Instant) -> Option<Pass> {
        if self.is_quiet(now) {
            return None;
        }
        match &mut self.state {
            State::Up => {}
            State::Trial { busy } if !*busy => *busy = true,
            State::Trial { .. } | State::Connecting | State::Down => return None,
        }
        Some(Pass { generation: self.generation, failures: self.failures })
    }

    /// Takes the result of a call. Returns whether it has opened the circuit.
    pub(super) fn report(&mut self, pass: Pass, report: Report, now: Instant) -> bool {
        if pass.generation != self.generation {
            return false;
        }
        let is_trial = matches!(self.state, State::Trial { .. });
        match report {
            Report::Answered => {
                (self.failures, self.trips, self.answered) = (0, 0, true);
                if is_trial {
                    self.enter(State::Up);
                }
                false
            }
            Report::Overloaded(pause) => {
                let until = now.checked_add(pause.min(LONGEST_PAUSE));
                self.quiet_until = self.quiet_until.max(until);
                self.end_trial();
                false
            }
            Report::Cancelled => {
                self.end_trial();
                false
            }
            Report::Failed | Report::Unreachable => {
                // Those that were under way together fail together: that is one failure.
                self.failures = self.failures.max(pass.failures + 1);
                let opens =
                    is_trial || report == Report::Unreachable || self.failures >= MOST_FAILURES;
                if opens {
                    self.trips += 1;
                    self.enter(State::Down);
                }
                opens
            }
        }
    }

    fn end_trial(&mut self) {
        if let State::Trial { busy } = &mut self.state {
            *busy = false;
        }
    }

    /// Takes the result of a check.
    pub(super) fn checked(&mut self, is_well: bool) {
        match (self.state, is_well) {
            (State::Connecting, true) => self.enter(State::Up),
            // The call of the last trial may take as long as it likes, without a verdict.
            (State::Down | State::Trial { .. }, true) => self.enter(State::Trial { busy: false }),
            (_, false) => {
                self.trips += 1;
                self.enter(State::Down);
            }
            (State::Up, true) => {}
        }
        self.answered = false;
    }

    fn enter(&mut self, state: State) {
        (self.state, self.failures) = (state, 0);
        self.generation += 1;
    }

    /// Whether a check can be left out, because calls are answered.
    pub(super) fn needs_no_check(&mut self) -> bool {
        self.state == State::Up && std::mem::take(&mut self.answered)
    }

    /// How long to wait before the next check; `jitter` from 0 to 1 spreads the checks of many
    /// clients over the last half of it.
    pub(super) fn pause(&self, jitter: f64) -> Duration {
        let pause = match self.state {
            State::Connecting => return Duration::ZERO,
            State::Up => CHECK_INTERVAL,
            State::Trial { .. } => TRIAL_INTERVAL,
            State::Down => {
                let doublings = self.trips.saturating_sub(1).min(16);
                (FIRST_PAUSE * 2_u32.pow(doublings)).min(LONGEST_PAUSE)
            }
        };
        pause.mul_f64(0.5 + jitter / 2.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn up() -> Circuit {
        let mut circuit = Circuit::new();
        circuit.checked(true);
        circuit
    }

    #[test]
    fn opens_after_failures_in_a_row_and_tries_one_call_at_a_time() {
        let now = Instant::now();
        let mut circuit = Circuit::new();
        assert_eq!((circuit.pass(now), circuit.pause(1.0)), (None, Duration::ZERO));
        circuit.checked(true);
        let pass = circuit.pass(now).unwrap();
        for _ in 0..10 {
            for _ in 0..2 {
                let pass = circuit.pass(now).unwrap();
                assert!(!circuit.report(pass, Report::Failed, now));
            }
            circuit.report(pass, Report::Answered, now);
        }
        // Calls that fail together are one failure.
        for _ in 0..10 {
            assert!(!circuit.report(pass, Report::Failed, now));
        }
        let opened = [(); 2].map(|()| {
            let pass = circuit.pass(now).unwrap();
            circuit.report(pass, Report::Failed, now)
        });
        assert_eq!(opened, [false, true]);
        assert_eq!((circuit.state(), circuit.pass(now)), (State::Down, None));
        // Calls of before say nothing any more.
        assert!(!circuit.report(pass, Report::Answered, now));
        assert_eq!(circuit.state(), State::Down);
        circuit.checked(true);
        let trial = circuit.pass(now).unwrap();
        assert_eq!(circuit.pass(now), None, "one at a time");
        circuit.report(pass, Report::Failed, now);
        assert_eq!(circuit.state(), State::Trial { busy: true });
        circuit.report(trial, Report::Cancelled, now);
        let slow = circuit.pass(now).unwrap();
        // It takes too long. Another one may be tried after the next check.
        circuit.checked(true);
        let trial = circuit.pass(now).unwrap();
        assert!(!circuit.report(slow, Report::Failed, now));
        assert!(circuit.report(trial, Report::Failed, now), "the first failure of a trial");
        circuit.checked(true);
        let trial = circuit.pass(now).unwrap();
        circuit.report(trial, Report::Answered, now);
        assert_eq!(circuit.state(), State::Up);
        assert!(circuit.pass(now).is_some() && circuit.pass(now).is_some());
    }

    #[test]
    fn an_unreachable_node_is_not_called_at_once_again() {
        let (now, mut circuit) = (Instant::now(), up());
        let pass = circuit.pass(now).unwrap();
        assert!(circuit.report(pass, Report::Unreachable, now));
        assert_eq!(circuit.state(), State::Down);
    }

    #[test]
    fn pauses_double_until_a_call_is_answered() {
        let (now, mut circuit) = (Instant::now(), up());
        let ms = |circuit: &Circuit| circuit.pause(1.0).as_millis();
        assert_eq!(ms(&circuit), 10_000);
        let pass = circuit.pass(now).unwrap();
        circuit.report(pass, Report::Unreachable, now);
        let mut pauses = Vec::new();
        for _ in 0..9 {
            pauses.push(ms(&circuit));
            circuit.checked(false);
        }
        assert_eq!(pauses, [100, 200, 400, 800, 1600, 3200, 6400, 10_000, 10_000]);
        // A check that passes is no call that was answered.
        circuit.checked(true);
        let trial = circuit.pass(now).unwrap();
        circuit.report(trial, Report::Failed, now);
        assert_eq!(ms(&circuit), 10_000);
        assert_eq!(circuit.pause(0.0).as_millis(), 5000);
        circuit.checked(true);
        let trial = circuit.pass(now).unwrap();
        circuit.report(trial, Report::Answered, now);
        let pass = circuit.pass(now).unwrap();
        circuit.report(pass, Report::Unreachable, now);
        assert_eq!(ms(&circuit), 100);
        for _ in 0..1000 {
            circuit.checked(false);
        }
        assert_eq!(ms(&circuit), 10_000);
    }

    #[test]
    fn an_overloaded_node_is_left_alone_for_as_long_as_it_says() {
        let (now, mut circuit) = (Instant::now(), up());
        let at = |ms| now + Duration::from_millis(ms);
        let pass = circuit.pass(now).unwrap();
        assert!(!circuit.report(pass, Report::Overloaded(Duration::from_millis(200)), now));
        assert_eq!((circuit.pass(at(199)), circuit.state()), (None, State::Up));
        assert!(circuit.pass(at(200)).is_some());
        circuit.report(pass, Report::Overloaded(Duration::MAX), now);
        assert!(circuit.pass(at(10_000)).is_some());
    }

    #[test]
    fn checks_are_left_out_while_calls_are_answered() {
        let (now, mut circuit) = (Instant::now(), up());
        assert!(!circuit.needs_no_check());
        let pass = circuit.pass(now).unwrap();
        circuit.report(pass, Report::Answered, now);
        assert!(circuit.needs_no_check() && !circuit.needs_no_check());
        circuit.report(pass, Report::Answered, now);
        circuit.checked(false);
        assert!(!circuit.needs_no_check() && circuit.pass(now).is_none());
    }
}
