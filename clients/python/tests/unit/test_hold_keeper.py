"""When the keeper of holds renews, asks again and ends, and what it makes of the answers."""

from __future__ import annotations

from typing import Any, Callable, List, Optional, Set, Tuple

import pytest

from tollgate_client import DecidedBy, InvalidRequestError, NoAnswer, NoDecisionError
from tollgate_client._decide.effects import run
from tollgate_client._keep.desk import Desk
from tollgate_client._keep.inline import Inline
from tollgate_client._proto.holds_pb2 import (
    EndSessionResponse,
    KeepAliveResponse,
    ReserveResponse,
)
from tollgate_client._tenants import reserving
from tollgate_client._tenants.keeper import Keeper
from tollgate_client._tenants.session import Reserved, Session
from tollgate_client.request import tenant_request

AWAY = NoDecisionError(NoAnswer.UNREACHABLE)
FORBIDDEN = NoDecisionError(NoAnswer.FORBIDDEN, "not yours")
REJECTED = ReserveResponse.REJECTED


class Bench:
    """A keeper with a clock that the test moves, and nodes that it leads."""

    def __init__(self) -> None:
        self.now = 0.0
        self.reserved = ReserveResponse(granted=3)
        self.error: Optional[Exception] = None
        self.refused: Set[str] = set()
        self.over: Set[str] = set()
        self.unheard: Set[str] = set()
        self.is_empty = self.is_degraded = self.has_fallback = False
        self.calls: List[Tuple[float, str, Any]] = []
        self.nodes = self
        self._inline = Inline(lambda: self.now)
        self.desk: Desk[Session] = Desk(self._inline.wake)

    def session(self, ttl: float = 9.0, on_lost: Optional[Callable[[], object]] = None) -> Session:
        request = tenant_request("sandbox", "acme", 5, 2, 0.0, None, ttl)
        session = Session(request, "me", self.desk, on_lost)
        if self.desk.add(session):
            self._inline.start(Keeper(self.desk, self, self._inline.clock).run())
        self._inline.catch_up()
        return session

    def hold(self, granted: Optional[Reserved] = None, **options: Any) -> Session:
        """A hold that is granted now."""
        session = self.session(**options)
        session.may_exist, session.sent_at, session.silent_from = True, self.now, self.now
        assert session.grant(granted or Reserved(3, DecidedBy.NODE))
        self._inline.catch_up()
        return session

    def run(self, until: float) -> None:
        """Lets time pass."""
        self.now = until
        self._inline.catch_up()

    def times(self, method: str) -> List[float]:
        return [round(at, 6) for at, called, _ in self.calls if called == method]

    def fallback_grants(self, session: Session, now: float) -> bool:
        return self.has_fallback

    def keep_alive(self, message: Any, deadline: float) -> Any:
        names = [one.session for one in message.sessions]
        self._called("keep_alive", names, deadline)
        if self.refused.intersection(names):
            raise FORBIDDEN
        answer = KeepAliveResponse(degraded=self.is_degraded)
        for one in message.sessions:
            if one.session not in self.unheard:
                renewed = answer.sessions.add(resource=one.resource, session=one.session)
                renewed.alive = one.session not in self.over
                if renewed.alive and not self.is_empty:
                    renewed.holds.add(hold="me", domain="acme", copies=3)
        return answer
        yield

    def reserve(self, message: Any, deadline: float) -> Any:
        self._called("reserve", (message.hold, message.copies, message.min_copies), deadline)
        return self.reserved
        yield

    def end_session(self, message: Any, deadline: float) -> Any:
        self._called("end_session", message.session, deadline)
        return EndSessionResponse()
        yield

    def _called(self, method: str, what: Any, deadline: float) -> None:
        now = self._inline.clock()
        assert now < deadline <= now + 2.0
        self.calls.append((now, method, what))
        if self.error is not None:
            raise self.error


def test_holds_are_renewed_every_third_of_their_ttl_with_those_that_are_due_soon():
    bench = Bench()
    one = bench.hold()
    bench.run(0.4)
    two = bench.hold()
    bench.run(0.9)
    three = bench.hold()
    bench.run(7.0)
    assert bench.times("keep_alive") == [3.0, 3.9, 6.0, 6.9]
    together, alone = [one.name, two.name], [three.name]
    assert [names for _, _, names in bench.calls] == [together, alone, together, alone]


def test_a_hold_that_nobody_renews_is_lost_a_third_of_its_ttl_before_its_end():
    bench = Bench()
    told: List[float] = []
    one = bench.hold(on_lost=lambda: told.append(bench._inline.clock()))
    bench.error = AWAY
    bench.run(5.9)
    # A 24th of the ttl apart.
    assert bench.times("keep_alive") == [3.0 + 0.375 * at for at in range(8)]
    assert one.is_held and not told
    bench.run(60.0)
    assert not one.is_held and told == [6.0]
    assert bench.desk.live(False) is None, "the keeper has ended"
    assert not bench.times("end_session")


def test_an_answer_counts_from_when_its_call_was_sent():
    bench = Bench()
    one = bench.hold()
    bench.error = AWAY
    bench.run(4.0)
    bench.error = None
    bench.run(4.2)
    assert one.until == 3.0 + 3 * 0.375 + 9.0
    # It is found only now that its time is over: it is lost, without another call.
    bench._inline._longest_lag = 0.0
    bench.run(20.0)
    assert not one.is_held and len(bench.times("keep_alive")) == 4


def test_a_fallback_takes_over_until_the_hold_is_recorded_again():
    bench = Bench()
    bench.has_fallback = True
    one = bench.hold()
    bench.error = AWAY
    bench.run(12.5)
    assert one.is_held and one.reserved == Reserved(3, DecidedBy.FALLBACK)
    # The same hold as before.
    assert bench.times("reserve") == [9.0, 12.0] and bench.calls[-1][2] == ("me", 3, 3)
    bench.error = None
    bench.run(15.1)
    assert one.reserved == Reserved(3, DecidedBy.NODE) and one.until == 24.0
    bench.run(18.1)
    assert bench.times("keep_alive")[-1] == 18.0 and len(bench.times("reserve")) == 3


@pytest.mark.parametrize(
    "granted",
    [Reserved(3, DecidedBy.DEGRADED_NODE), Reserved(3, DecidedBy.NODE, True)],
    ids=["degraded", "shadow"],
)
def test_what_is_not_recorded_is_asked_for_again(granted):
    bench = Bench()
    one = bench.hold(granted)
    for error, answer in (
        (AWAY, ReserveResponse()),
        (NoDecisionError(NoAnswer.NOT_CONFIGURED), ReserveResponse()),
        (InvalidRequestError("no"), ReserveResponse()),
        (None, ReserveResponse(granted=3, degraded=True)),
        (None, ReserveResponse(granted=3, shadow=True)),
        (None, ReserveResponse(status=REJECTED, degraded=True)),
    ):
        bench.error, bench.reserved = error, answer
        bench.run(bench.now + 3.0)
        assert one.is_held and one.reserved == granted
    assert bench.times("reserve") == [3.0, 6.0, 9.0, 12.0, 15.0, 18.0]
    bench.reserved = ReserveResponse(status=REJECTED, retry_after_millis=5)
    bench.run(21.0)
    assert not one.is_held and not bench.times("keep_alive")


def test_what_an_answer_says_of_a_hold():
    bench = Bench()
    bench.is_degraded = bench.is_empty = True
    one, two = bench.hold(), bench.hold()
    bench.run(20.0)
    assert one.is_held and two.is_held, "the store was away"
    bench.over = {one.name}
    bench.run(21.0)
    assert not one.is_held and two.is_held, "the session is over"
    bench.is_degraded = False
    bench.run(24.0)
    assert not two.is_held, "the session lives, without the hold"
    # What a node says nothing about is not answered.
    bench.is_empty = False
    three, four = bench.hold(), bench.hold()
    bench.unheard = {three.name}
    bench.run(40.0)
    assert not three.is_held and four.is_held


def test_a_session_that_is_refused_spoils_no_other():
    bench = Bench()
    holds = [bench.hold() for _ in range(4)]
    bench.refused = {holds[2].name}
    bench.run(3.0)
    names = [one.name for one in holds]
    assert [group for _, _, group in bench.calls] == [
        names,
        names[:2],
        names[2:],
        names[2:3],
        names[3:],
    ]
    bench.run(8.9)
    assert [one.is_held for one in holds] == [True, True, False, True]


def test_many_holds_are_renewed_in_groups_of_a_hundred():
    bench = Bench()
    holds = [bench.hold() for _ in range(250)]
    bench.run(3.0)
    assert [len(group) for _, _, group in bench.calls] == [100, 100, 50]
    assert {name for _, _, group in bench.calls for name in group} == {one.name for one in holds}


def test_a_release_is_tried_again_until_the_session_is_over():
    bench = Bench()
    one, two = bench.hold(), bench.hold()
    bench.error = AWAY
    one.release()
    bench.run(0.0)
    assert not one.is_held
    bench.run(2.5)
    assert bench.times("end_session") == [0.0, 1.0, 2.0]
    two.release()
    bench.error = None
    bench.run(2.5)
    assert bench.calls[-1][2] == two.name
    bench.error = AWAY
    bench.run(60.0)
    # Nobody has named it since the beginning.
    ended = [at for at, method, name in bench.calls if (method, name) == ("end_session", one.name)]
    assert ended == [float(at) for at in range(9)]
    assert bench.desk.live(False) is None


def test_what_no_node_may_have_granted_needs_no_end():
    bench = Bench()
    one = bench.session()
    one.sent_at = bench.now
    assert one.grant(Reserved(2, DecidedBy.FALLBACK))
    one.release()
    bench.run(60.0)
    assert not bench.calls and bench.desk.live(False) is None


@pytest.mark.parametrize(
    "error, arrived, ended",
    [(AWAY, False, False), (AWAY, True, True), (InvalidRequestError("no"), False, False)],
)
def test_a_request_whose_answer_is_lost_is_ended(error, arrived, ended):
    bench = Bench()
    one = bench.session()
    bench.error = error
    if arrived:
        error._may_be_decided = True
    plan = reserving.reserve(bench, one, bench.now + 1.0, lambda: bench.now)
    with pytest.raises(type(error)):
        run(plan, lambda effect: None)
    bench.error, error._may_be_decided = None, False
    assert not one.is_asking and one.may_exist is ended
    one.release()
    bench.run(0.0)
    assert bench.times("end_session") == [0.0] * ended


def test_a_request_under_way_is_ended_afterwards():
    """Also if its caller gives up."""
    bench = Bench()
    one = bench.session()

    def reserve(message: Any, deadline: float) -> Any:
        yield "a call"

    bench.reserve = reserve  # type: ignore[method-assign]
    plan = reserving.reserve(bench, one, 1.0, lambda: bench.now)
    assert next(plan) == "a call"
    bench.desk.close()
    bench.run(1.0)
    assert not bench.calls and not one.grant(Reserved(3, DecidedBy.NODE))
    plan.close()
    one.release()
    bench.run(1.0)
    assert bench.times("end_session") == [1.0]


def test_all_are_ended_when_the_client_is_closed():
    bench = Bench()
    told: List[int] = []
    holds = [bench.hold(on_lost=lambda: told.append(1)) for _ in range(3)]
    holds[0].drop()
    bench.desk.close()
    assert not any(one.is_held for one in holds)
    bench.run(0.0)
    assert {name for _, _, name in bench.calls} == {one.name for one in holds}
    assert bench._inline._plan is None, "the keeper has ended"
    # Without an answer, that takes five seconds.
    bench = Bench()
    bench.hold()
    bench.error = AWAY
    bench.desk.close()
    bench.run(60.0)
    assert bench.times("end_session") == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_a_callback_that_fails_disturbs_no_other_hold(caplog):
    bench = Bench()
    one, two = bench.hold(on_lost=lambda: 1 / 0), bench.hold()
    bench.over = {one.name}
    bench.run(20.0)
    assert not one.is_held and two.is_held
    assert any("on_lost" in message for message in caplog.messages)


def test_the_name_of_a_hold_is_cut():
    bench = Bench()
    request = tenant_request("sandbox", "acme", 1, None, 0.0, None)
    for given, name in (("x" * 200, "x" * 128), ("é" * 100, "é" * 64), ("", "client")):
        assert Session(request, given, bench.desk).hold == name
