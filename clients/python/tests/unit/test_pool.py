"""Which node is called next, and which are checked and resolved when."""

from __future__ import annotations

from typing import List, Sequence

import pytest

from tollgate_client import ClosedError, NoAnswer, NoDecisionError
from tollgate_client._decide.effects import Call, Change
from tollgate_client._nodes.address import Address, Socket
from tollgate_client._nodes.asking import Nodes
from tollgate_client._nodes.circuit import ANSWERED, FAILED, UNREACHABLE, Outcome, Report
from tollgate_client._nodes.pool import Attempt, Check, Pool, Resolve
from tollgate_client._proto.quotaservice_pb2 import AllowRequest

ONE, TWO, THREE = (Socket(f"10.0.0.{last}", 1) for last in (1, 2, 3))


class Kept:
    """A pool of one name, whose checks and resolutions the test answers."""

    def __init__(self) -> None:
        self.changes = 0
        self.pool = Pool([Address("nodes", 1, False)], self._changed, jitter=lambda: 1.0)

    def _changed(self) -> None:
        self.changes += 1

    def resolve(self, sockets: Sequence[Socket], now: float) -> None:
        (task,) = (task for task in self.pool.tasks(1, now)[0] if isinstance(task, Resolve))
        self.pool.resolved(task.name, sockets, now)

    def checks(self, now: float, version: int = 1) -> List[Check]:
        return [task for task in self.pool.tasks(version, now)[0] if isinstance(task, Check)]

    def check(self, now: float, well: Sequence[Socket] = (ONE, TWO, THREE)) -> None:
        for check in self.checks(now):
            problem = None if check.node.socket in well else "ill"
            self.pool.checked(check, object(), 1, problem, now)

    def called(self, times: int, now: float) -> List[str]:
        attempts = [self.pool.attempt((), now) for _ in range(times)]
        return [one.node.socket.ip for one in attempts if isinstance(one, Attempt)]


def ready(*sockets: Socket) -> Kept:
    kept = Kept()
    kept.resolve(sockets, 0)
    kept.check(0)
    return kept


def test_callers_wait_for_the_first_connections():
    kept = Kept()
    changes = kept.pool.attempt((), 0)
    assert changes == kept.pool.changes
    kept.resolve([ONE], 0)
    assert kept.pool.changes > changes and isinstance(kept.pool.attempt((), 0), int)
    kept.check(0)
    assert isinstance(kept.pool.attempt((), 0), Attempt) and kept.changes == 2


def test_a_caller_that_waits_looks_for_nodes_whose_trial_has_ended():
    kept = Kept()
    kept.resolve([ONE, TWO], 0)
    one, two = kept.checks(0)
    for problem, now in ("ill", 0), (None, 1):
        kept.pool.checked(one, object(), 1, problem, now)
        kept.checks(now + 1)
    trial = kept.pool.attempt((), 1)
    asking = Nodes(kept.pool, lambda: 1.0).ask(AllowRequest(), 100.0)
    wait = next(asking)
    assert isinstance(wait, Change) and wait.number == kept.pool.changes and wait.seconds < 0.1
    kept.pool.report(trial, ANSWERED, 1)
    call = asking.send(None)
    assert isinstance(call, Call) and call.node is one.node and not two.node.circuit.is_called


def test_nodes_are_called_in_turn():
    called = ready(ONE, TWO, THREE).called(6, 0)
    assert called[:3] == called[3:] and len(set(called)) == 3


def test_those_that_were_tried_come_last():
    pool = ready(ONE, TWO).pool
    first = pool.attempt((), 0)
    for _ in range(3):
        assert pool.attempt([first.node], 0).node is not first.node
    second = pool.attempt([first.node], 0)
    pool.report(second, UNREACHABLE, 0)
    assert pool.attempt([first.node, second.node], 0).node is first.node


def test_without_a_node_to_call():
    kept = Kept()
    kept.resolve([], 0)
    with pytest.raises(NoDecisionError, match="no node can be reached"):
        kept.pool.attempt((), 0)
    kept = ready(ONE)
    kept.pool.report(kept.pool.attempt((), 0), Report(Outcome.OVERLOADED, 1.0), 0)
    with pytest.raises(NoDecisionError) as error:
        kept.pool.attempt((), 0.5)
    assert error.value.reason is NoAnswer.OVERLOADED
    kept.pool.close()
    with pytest.raises(ClosedError):
        kept.pool.attempt((), 2)
    assert kept.pool.tasks(1, 100)[0] == []


def test_a_node_that_fails_is_checked_on_a_new_connection():
    kept = ready(ONE)
    before = kept.pool.nodes[0].connection
    kept.pool.report(kept.pool.attempt((), 5), UNREACHABLE, 5)
    assert kept.checks(5.09) == []
    (check,) = kept.checks(5.1)
    assert check.is_new and kept.checks(6) == []
    kept.pool.checked(check, "new", 1, "ill", 6)
    assert kept.pool.nodes[0].connection is before
    kept.check(6.2)
    assert kept.pool.nodes[0].connection is not before
    assert kept.called(1, 6.2) == [ONE.ip]
    with pytest.raises(NoDecisionError):
        kept.called(1, 6.2)


def test_a_well_node_is_checked_every_ten_seconds_unless_it_answers():
    kept = ready(ONE)
    (check,) = kept.checks(10)
    assert not check.is_new
    kept.pool.checked(check, check.node.connection, 1, None, 10)
    kept.pool.report(kept.pool.attempt((), 11), ANSWERED, 11)
    assert kept.checks(20) == [] and len(kept.checks(30)) == 1


def test_new_certificates_are_tried_on_a_new_connection():
    kept = ready(ONE)
    kept.pool.report(kept.pool.attempt((), 1), ANSWERED, 1)
    (check,) = kept.checks(10, version=2)
    assert check.is_new
    # Refused, the older ones still serve.
    kept.pool.checked(check, "new", 2, "ill", 10)
    assert kept.called(1, 10) == [ONE.ip] and kept.pool.nodes[0].connection != "new"
    (check,) = kept.checks(20, version=2)
    kept.pool.checked(check, "new", 2, None, 20)
    assert kept.pool.nodes[0].connection == "new"


def test_a_name_is_resolved_again():
    kept = ready(ONE)
    kept.pool.report(kept.pool.attempt((), 29), ANSWERED, 29)
    assert not [task for task in kept.pool.tasks(1, 29.9)[0] if isinstance(task, Resolve)]
    # Its old node is called until the new one can be.
    kept.resolve([TWO], 30)
    assert kept.called(1, 30) == [ONE.ip]
    kept.check(30)
    assert kept.called(2, 30) == [TWO.ip] * 2
    # While it can't be resolved, its last addresses stay.
    kept.resolve([], 60)
    assert kept.called(1, 60) == [TWO.ip]


def test_a_name_is_resolved_sooner_while_no_node_is_called():
    kept = ready(ONE)
    for _ in range(3):
        kept.pool.report(kept.pool.attempt((), 1), FAILED, 1)
    kept.resolve([THREE], 2)
    assert [node.socket for node in kept.pool.nodes] == [THREE], "the old one is not well"


def test_what_could_not_be_done_is_due_again():
    kept = Kept()
    (task,) = kept.pool.tasks(1, 0)[0]
    kept.pool.put_off(task, 0)
    kept.resolve([ONE], 2)
    (check,) = kept.checks(2)
    kept.pool.put_off(check, 2)
    assert kept.checks(2.9) == []
    kept.check(3)
    assert kept.called(1, 3) == [ONE.ip]
    (check,) = kept.checks(13)
    kept.pool.put_off(check, 13)
    assert kept.called(1, 13) == [ONE.ip], "that says nothing about the node"
