"""When a node is called: the circuit breaker of one node. Time is a parameter."""

from __future__ import annotations

import enum
from typing import NamedTuple, Optional

_MOST_FAILURES = 3
"""Failures in a row after which a node is not called any more."""

_FIRST_PAUSE = 0.1
"""Seconds before a failing node is checked, doubled with each failure up to the longest pause."""

_LONGEST_PAUSE = 10.0
"""A node that is well again is called after so many seconds at most."""

_CHECK_INTERVAL = 10.0
"""Seconds between checks of a node that is not called while it is well."""

_TRIAL_INTERVAL = 1.0
"""Seconds that the one call of a trial may take before another one is tried."""


class State(enum.Enum):
    """Whether one node is called."""

    CONNECTING = enum.auto()
    """The first check is under way."""
    UP = enum.auto()
    """Called."""
    TRIAL = enum.auto()
    """A check has passed after failures: one call at a time until one is answered."""
    BUSY_TRIAL = enum.auto()
    """The same, and that call is under way."""
    DOWN = enum.auto()
    """Not called until a check passes."""


class Pass(NamedTuple):
    """The permission for one call, to be reported with its result."""

    generation: int
    failures: int
    """The failures in a row that were known when the call began."""


class Outcome(enum.Enum):
    """The result of a call."""

    ANSWERED = enum.auto()
    """The node has answered, if only that the request is wrong."""
    OVERLOADED = enum.auto()
    """The node is overloaded."""
    FAILED = enum.auto()
    """No answer in time, or an error."""
    UNREACHABLE = enum.auto()
    """No connection."""
    CANCELLED = enum.auto()
    """The caller has given up before the deadline, which says nothing about the node."""


class Report(NamedTuple):
    """What a call says about its node."""

    outcome: Outcome
    pause: float = 0.0
    """Seconds that an overloaded node wants to be left alone."""


ANSWERED = Report(Outcome.ANSWERED)
FAILED = Report(Outcome.FAILED)
UNREACHABLE = Report(Outcome.UNREACHABLE)
CANCELLED = Report(Outcome.CANCELLED)


class Circuit:
    """The circuit breaker of one node."""

    def __init__(self) -> None:
        self.state = State.CONNECTING
        # Failed calls in a row.
        self._failures = 0
        # How often the circuit was opened, or the check failed, since the last answered call.
        self._trips = 0
        # Advanced when the state changes: what an older call reports says nothing about now.
        self._generation = 0
        # The node is overloaded, and wants to be left alone until then.
        self._quiet_until: Optional[float] = None
        # Whether a call was answered since the last check.
        self._answered = False
        # The permission while the state is UP and no call has failed.
        self._pass = Pass(0, 0)

    @property
    def is_called(self) -> bool:
        """Whether calls go to the node."""
        return self.state not in (State.CONNECTING, State.DOWN)

    def is_quiet(self, now: float) -> bool:
        """Whether the node is left alone because it is overloaded."""
        return self._quiet_until is not None and now < self._quiet_until

    def attempt(self, now: float) -> Optional[Pass]:
        """The permission to call the node now."""
        if self._quiet_until is not None and now < self._quiet_until:
            return None
        if self.state is State.TRIAL:
            self.state = State.BUSY_TRIAL
        elif self.state is not State.UP:
            return None
        return self._pass

    def report(self, given: Pass, report: Report, now: float) -> bool:
        """Takes the result of a call. Returns whether it has opened the circuit."""
        if given.generation != self._generation:
            return False
        outcome = report.outcome
        is_trial = self.state is not State.UP
        if outcome is Outcome.ANSWERED:
            if self._failures:
                self._set_failures(0)
            self._trips, self._answered = 0, True
            if is_trial:
                self._enter(State.UP)
            return False
        if outcome is Outcome.OVERLOADED:
            until = now + min(report.pause, _LONGEST_PAUSE)
            self._quiet_until = max(self._quiet_until or until, until)
        if outcome in (Outcome.OVERLOADED, Outcome.CANCELLED):
            if is_trial:
                self.state = State.TRIAL
            return False
        # Those that were under way together fail together: that is one failure.
        self._set_failures(max(self._failures, given.failures + 1))
        is_enough = self._failures >= _MOST_FAILURES
        opens = is_trial or outcome is Outcome.UNREACHABLE or is_enough
        if opens:
            self._trips += 1
            self._enter(State.DOWN)
        return opens

    def checked(self, is_well: bool) -> None:
        """Takes the result of a check."""
        if not is_well:
            self._trips += 1
            self._enter(State.DOWN)
        elif self.state is State.CONNECTING:
            self._enter(State.UP)
        elif self.state is not State.UP:
            # The call of the last trial may take as long as it likes, without a verdict.
            self._enter(State.TRIAL)
        self._answered = False

    def needs_no_check(self) -> bool:
        """Whether a check can be left out, because calls are answered."""
        answered, self._answered = self._answered, self._answered and self.state is not State.UP
        return answered and self.state is State.UP

    def pause(self, jitter: float) -> float:
        """How long to wait before the next check; ``jitter`` from 0 to 1 spreads the checks of
        many clients over the last half of it."""
        if self.state is State.CONNECTING:
            return 0.0
        if self.state is State.UP:
            pause = _CHECK_INTERVAL
        elif self.state is State.DOWN:
            pause = min(_FIRST_PAUSE * 2 ** min(max(self._trips - 1, 0), 16), _LONGEST_PAUSE)
        else:
            pause = _TRIAL_INTERVAL
        return pause * (0.5 + jitter / 2)

    def _enter(self, state: State) -> None:
        self.state = state
        self._generation += 1
        self._set_failures(0)

    def _set_failures(self, failures: int) -> None:
        self._failures = failures
        self._pass = Pass(self._generation, failures)
