"""When a node is called."""

from __future__ import annotations

from tollgate_client._nodes.circuit import (
    ANSWERED,
    CANCELLED,
    FAILED,
    UNREACHABLE,
    Circuit,
    Outcome,
    Report,
    State,
)


def up() -> Circuit:
    circuit = Circuit()
    assert circuit.state is State.CONNECTING and circuit.attempt(0) is None
    circuit.checked(True)
    assert circuit.state is State.UP
    return circuit


def tripped() -> Circuit:
    """A circuit whose node was unreachable, and has passed a check since."""
    circuit = up()
    circuit.report(circuit.attempt(0), UNREACHABLE, 0)
    circuit.checked(True)
    return circuit


def test_three_failures_in_a_row_open_it():
    circuit = up()
    for report, opens in ((FAILED, False), (FAILED, False), (ANSWERED, False)) + (
        (FAILED, False),
        (CANCELLED, False),
        (FAILED, False),
        (FAILED, True),
    ):
        assert circuit.report(circuit.attempt(0), report, 0) is opens
    assert circuit.state is State.DOWN and circuit.attempt(0) is None


def test_calls_that_fail_together_count_once():
    circuit = up()
    for opens in (False, False, True):
        passes = [circuit.attempt(0) for _ in range(10)]
        opened = [circuit.report(given, FAILED, 0) for given in passes]
        assert opened == [opens] + [False] * 9
    assert circuit.state is State.DOWN


def test_what_calls_of_before_report_says_nothing():
    circuit = up()
    old = circuit.attempt(0)
    assert circuit.report(circuit.attempt(0), UNREACHABLE, 0)
    assert not circuit.report(old, ANSWERED, 0)
    assert circuit.state is State.DOWN


def test_trials_are_made_one_at_a_time():
    circuit = tripped()
    trial = circuit.attempt(0)
    assert trial is not None and circuit.attempt(0) is None
    circuit.report(trial, CANCELLED, 0)
    slow = circuit.attempt(0)
    # It takes too long. Another one may be tried after the next check.
    circuit.checked(True)
    trial = circuit.attempt(0)
    assert not circuit.report(slow, FAILED, 0)
    assert circuit.report(trial, FAILED, 0), "the first failure of a trial"
    circuit.checked(True)
    circuit.report(circuit.attempt(0), ANSWERED, 0)
    assert circuit.state is State.UP
    assert circuit.attempt(0) is not None and circuit.attempt(0) is not None


def test_pauses_double_until_a_call_is_answered():
    circuit = up()
    assert circuit.pause(1.0) == 10
    circuit.report(circuit.attempt(0), UNREACHABLE, 0)
    pauses = []
    for _ in range(9):
        pauses.append(round(circuit.pause(1.0), 6))
        circuit.checked(False)
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10, 10]
    # A check that passes is no call that was answered.
    circuit.checked(True)
    circuit.report(circuit.attempt(0), FAILED, 0)
    assert circuit.pause(1.0) == 10 and circuit.pause(0.0) == 5
    circuit.checked(True)
    circuit.report(circuit.attempt(0), ANSWERED, 0)
    circuit.report(circuit.attempt(0), UNREACHABLE, 0)
    assert circuit.pause(1.0) == 0.1
    for _ in range(1000):
        circuit.checked(False)
    assert circuit.pause(1.0) == 10


def test_an_overloaded_node_is_left_alone_for_as_long_as_it_says():
    circuit = up()
    given = circuit.attempt(0)
    assert not circuit.report(given, Report(Outcome.OVERLOADED, 0.2), 0)
    assert circuit.attempt(0.199) is None and circuit.state is State.UP
    assert circuit.attempt(0.2) is not None
    circuit.report(given, Report(Outcome.OVERLOADED, 1e9), 0)
    assert circuit.attempt(9.999) is None and circuit.attempt(10) is not None
    trial = tripped()
    trial.report(trial.attempt(0), Report(Outcome.OVERLOADED, 0.2), 0)
    assert trial.attempt(0.1) is None and trial.attempt(0.2) is not None


def test_checks_are_left_out_while_calls_are_answered():
    circuit = up()
    assert not circuit.needs_no_check()
    given = circuit.attempt(0)
    circuit.report(given, ANSWERED, 0)
    assert circuit.needs_no_check() and not circuit.needs_no_check()
    circuit.report(given, ANSWERED, 0)
    circuit.checked(False)
    assert not circuit.needs_no_check() and circuit.attempt(0) is None
