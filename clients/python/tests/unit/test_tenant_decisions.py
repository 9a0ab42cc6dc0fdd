"""Requests for hits and holds: what is asked, what an answer means, and when it is asked again."""

from __future__ import annotations

import math
import threading
from typing import Any, List, Optional

import pytest

from tollgate_client import (
    ClosedError,
    DecidedBy,
    Fallback,
    Hits,
    InvalidRequestError,
    NoAnswer,
    NoDecisionError,
    Reason,
    Refused,
    RefusedError,
    TenantRequest,
)
from tollgate_client._decide.decider import Rules
from tollgate_client._decide.effects import Sleep, run
from tollgate_client._keep.desk import Desk
from tollgate_client._keep.effects import Await
from tollgate_client._proto.holds_pb2 import ReserveResponse
from tollgate_client._proto.throttle_pb2 import ThrottleResponse
from tollgate_client._tenants import wire
from tollgate_client._tenants.decider import TenantDecider
from tollgate_client._tenants.session import Reserved, Session
from tollgate_client.fallback import Fallbacks
from tollgate_client.request import tenant_request

REJECTED = ThrottleResponse.REJECTED


def asked(copies: int = 1, min_copies: Optional[int] = None, **options: Any) -> TenantRequest:
    options = {"max_wait": 0.0, "deadline": None, **options}
    return tenant_request("search", "acme", copies, min_copies, **options)


class Bench:
    """A decider whose waits take no time, with answers that the test sets."""

    remembers = True

    def __init__(self, fallback: Optional[Fallback] = None, **resources: Fallback) -> None:
        self.now = 0.0
        self.takes = 0.0
        self.answers: List[Any] = []
        self.calls: List[Any] = []
        self.deadlines: List[float] = []
        self.told: List[Any] = []
        fallbacks = Fallbacks(fallback, {}, {}, resources)
        rules = Rules(1.0, fallbacks, None, None, lambda *told: self.told.append(told))
        self.decider = TenantDecider(rules, self, lambda: self.now)
        self.desk: Desk[Session] = Desk(lambda: None)

    def hits(self, message: Any, deadline: float) -> Any:
        self.calls.append(message)
        self.deadlines.append(round(deadline - self.now, 6))
        self.now += self.takes
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer
        yield

    reserve = hits

    def ask(self, request: TenantRequest, *answers: Any) -> Hits:
        self.answers = list(answers)
        return run(self.decider.hits(request), self._perform)

    def hold(self, request: TenantRequest, *answers: Any) -> Session:
        self.answers = list(answers)
        session = self.session(request)
        run(self.decider.hold(request, session), self._perform)
        return session

    def session(self, request: TenantRequest) -> Session:
        session = Session(request, "me", self.desk, threading.Event())
        self.desk.add(session)
        return session

    def refusal(self, ask: Any, request: TenantRequest, *answers: Any) -> Refused:
        with pytest.raises(RefusedError) as error:
            ask(request, *answers)
        assert not self.answers and self.told[-1] == (request, error.value.refused)
        return error.value.refused

    def _perform(self, effect: Any) -> None:
        assert isinstance(effect, (Sleep, Await))
        self.now += effect.seconds


def rejected(millis: int, **more: Any) -> ThrottleResponse:
    return ThrottleResponse(status=REJECTED, retry_after_millis=millis, **more)


def taken(millis: int, **more: Any) -> ReserveResponse:
    return ReserveResponse(status=REJECTED, retry_after_millis=millis, **more)


def test_requests_with_numbers_that_make_no_sense():
    assert asked(0)[2:4] == (1, 1) and asked(10)[2:4] == (10, 10) and asked(10, 0)[2:4] == (10, 1)
    for copies, least in ((-1, None), (1, -1), (2, 3)):
        with pytest.raises(InvalidRequestError):
            asked(copies, least)
    for limits in (
        {"max_wait": -1.0},
        {"max_wait": math.nan},
        {"deadline": -1.0},
        {"ttl": 0.9},
        {"ttl": 86_401.0},
        {"ttl": math.nan},
    ):
        with pytest.raises(InvalidRequestError):
            asked(**limits)


def test_requests_on_the_wire():
    message = wire.throttle(asked(2**70, 3))
    assert (message.resource, message.domain) == ("search", "acme")
    assert (message.copies, message.min_copies) == (2**63 - 1, 3)
    session = Session(asked(5, 2, ttl=1.5), "me", Desk(lambda: None), threading.Event())
    reserve = wire.reserve(session)
    assert reserve.session == session.secret and len(session.secret) == 32
    assert (reserve.hold, reserve.session_ttl_millis) == ("me", 1500)
    assert (reserve.copies, reserve.min_copies) == (5, 2)
    with pytest.raises(InvalidRequestError):
        wire.throttle(TenantRequest("\udc00", "b"))


def test_what_an_answer_means():
    granted = ThrottleResponse(granted=2, tier_index=1, burst=True, shadow=True)
    assert wire.hits(granted) == Hits(2, 1, True, True, DecidedBy.NODE)
    for answer, reason, retry_after, who in (
        (rejected(1500), Reason.LIMIT, 1.5, DecidedBy.NODE),
        (rejected(0), Reason.LIMIT, None, DecidedBy.NODE),
        (rejected(20, degraded=True), Reason.LIMIT, 0.02, DecidedBy.DEGRADED_NODE),
        (rejected(0, degraded=True), Reason.UNAVAILABLE, None, DecidedBy.DEGRADED_NODE),
    ):
        assert wire.hits(answer) == Refused(reason, retry_after, who)
    reserved = wire.reserved(ReserveResponse(granted=2))
    assert reserved == Reserved(2, DecidedBy.NODE) and reserved.is_recorded
    for unrecorded in ({"degraded": True}, {"shadow": True}):
        reserved = wire.reserved(ReserveResponse(granted=2, **unrecorded))
        assert isinstance(reserved, Reserved) and not reserved.is_recorded
    for millis, retry_after in ((0, None), (1000, 1.0)):
        refused = Refused(Reason.UNAVAILABLE, retry_after, DecidedBy.DEGRADED_NODE)
        assert wire.reserved(taken(millis, degraded=True)) == refused
    assert wire.reserved(taken(0)) == Refused(Reason.LIMIT, None, DecidedBy.NODE)
    for meaning, message in ((wire.hits, ThrottleResponse), (wire.reserved, ReserveResponse)):
        odd = message.FromString(message(status=2).SerializeToString())
        with pytest.raises(NoDecisionError, match="unknown to this version"):
            meaning(odd)
        for granted in (0, -1):
            with pytest.raises(NoDecisionError, match=f"granted {granted}"):
                meaning(message(granted=granted))


def test_hits_are_asked_for_again_when_the_node_says():
    bench = Bench()
    # The node's times are exact.
    found = bench.ask(asked(max_wait=5.0), rejected(2000), rejected(1), ThrottleResponse(granted=1))
    assert found.granted == 1
    assert 2.02 <= bench.now <= 2.3, "up to a tenth later, and 20 ms at least"
    bench.now = 10.0
    assert bench.refusal(bench.ask, asked(max_wait=1.9), rejected(2000)).retry_after == 2.0
    assert bench.now == 10.0, "it would come too late"
    assert bench.refusal(bench.ask, asked(5, max_wait=9.0), rejected(0)).retry_after is None


def test_all_takes_no_longer_than_the_wait_and_the_deadline():
    bench = Bench()
    bench.takes = 0.9
    bench.ask(asked(max_wait=1.2), rejected(200), ThrottleResponse(granted=1))
    assert bench.deadlines == [1.0, 1.0]
    bench.refusal(bench.ask, asked(max_wait=1.0), rejected(200))
    bench = Bench()
    bench.ask(asked(max_wait=1.2, deadline=0.3), rejected(1100), ThrottleResponse(granted=1))
    assert bench.deadlines == [0.3, pytest.approx(0.3)]


def test_refusals_of_hits_are_remembered():
    bench = Bench()
    bench.refusal(bench.ask, asked(5, 3), rejected(400))
    again = bench.refusal(bench.ask, asked(9, 4))
    assert again == Refused(Reason.LIMIT, pytest.approx(0.4), DecidedBy.REMEMBERED)
    # Fewer would do.
    assert bench.ask(asked(9, 2), ThrottleResponse(granted=2)).granted == 2
    # That of a degraded node says nothing about the others.
    bench.now = 10.0
    bench.refusal(bench.ask, asked(), rejected(400, degraded=True))
    bench.refusal(bench.ask, asked(), rejected(400))
    # Those of holds are guesses.
    bench.now = 20.0
    bench.refusal(bench.hold, asked(), taken(400))
    bench.refusal(bench.hold, asked(), taken(400))


def test_a_fallback_decides_on_the_fewest():
    none, unconfigured = NoDecisionError(NoAnswer.TIMEOUT), NoDecisionError(NoAnswer.NOT_CONFIGURED)
    for error in (none, unconfigured):
        with pytest.raises(NoDecisionError):
            Bench().ask(asked(), error)
        bench = Bench(Fallback.DENY, search=Fallback.rate(0.0, 5))
        assert bench.ask(asked(9, 3), error) == Hits(3, 0, False, False, DecidedBy.FALLBACK)
        assert bench.refusal(bench.ask, asked(3), error).reason is Reason.LIMIT
        session = bench.hold(asked(9, 2), error)
        assert session.copies == 2 and session.reserved == Reserved(2, DecidedBy.FALLBACK)
    bench = Bench(Fallback.DENY)
    for ask, away in (
        (bench.ask, rejected(0, degraded=True)),
        (bench.hold, taken(1000, degraded=True)),
    ):
        refused = Refused(Reason.UNAVAILABLE, None, DecidedBy.FALLBACK)
        assert bench.refusal(ask, asked(), away) == refused
    # Mistakes of the caller never get that far.
    with pytest.raises(InvalidRequestError):
        Bench(Fallback.ALLOW).ask(asked(), InvalidRequestError("no"))


def test_a_hold_is_asked_for_until_the_end():
    bench = Bench()
    session = bench.hold(asked(max_wait=60.0), taken(1000), taken(1000), ReserveResponse(granted=1))
    assert 1.5 <= bench.now <= 2.5, "a quarter more or less"
    assert session.is_held and bench.calls[0] == bench.calls[2]
    assert session.until == session.sent_at + 10.0 == bench.now + 10.0
    # With a last attempt at the end.
    bench.now = 0.0
    refused = bench.refusal(bench.hold, asked(max_wait=1.0), taken(5000), taken(5000))
    assert refused.retry_after == 5.0 and bench.now == 1.0
    bench.refusal(bench.hold, asked(max_wait=1.0), taken(0))
    assert bench.now == 1.0, "these limits never grant it"
    # Without a fallback, the store may be back in time.
    away = taken(1000, degraded=True)
    assert bench.hold(asked(max_wait=9.0), away, ReserveResponse(granted=1)).is_held


def test_a_name_that_is_no_text():
    bench = Bench()
    request = asked()._replace(domain="\udc00")
    session = bench.session(request)
    for plan in (bench.decider.hits(request), bench.decider.hold(request, session)):
        with pytest.raises(InvalidRequestError):
            run(plan, bench._perform)
    assert session.is_released and not session.is_asking and not bench.calls
    assert session.may_live_until == -math.inf


def test_who_waits_for_a_hold_is_told_that_the_client_is_closed():
    bench = Bench()
    session = bench.session(asked(max_wait=60.0))
    bench.answers = [taken(1000)]
    plan = bench.decider.hold(asked(max_wait=60.0), session)
    pause = next(plan)
    assert isinstance(pause, Await) and session.is_asking
    signal: Any = pause.signal
    assert not signal.is_set()
    bench.desk.close()
    assert signal.is_set(), "at once, not after the pause"
    with pytest.raises(ClosedError):
        plan.send(None)
    assert not session.is_asking and len(bench.calls) == 1


def test_what_ends_a_request_for_a_hold_gives_it_up():
    """Whatever is raised where it waits, or by a callback."""
    bench = Bench()

    def interrupted(message: Any, deadline: float) -> Any:
        yield "a call"

    bench.reserve = interrupted  # type: ignore[method-assign]
    for end in (KeyboardInterrupt, GeneratorExit):
        session = bench.session(asked())
        plan = bench.decider.hold(asked(), session)
        assert next(plan) == "a call" and session.is_asking
        with pytest.raises(end):
            plan.throw(end)
        assert session.is_released and not session.is_asking
        assert session.may_live_until == bench.now + 1.0 + 10.0, "it may have been granted"
    bench = Bench()
    bench.told = None  # type: ignore[assignment]
    session = bench.session(asked())
    bench.answers = [taken(0)]
    with pytest.raises(AttributeError):
        run(bench.decider.hold(asked(), session), bench._perform)
    assert session.is_released and not session.is_asking


def test_the_shadow_of_a_hold_stays_what_it_was_at_the_grant():
    bench = Bench()
    for shadow in (True, False):
        session = bench.hold(asked(), ReserveResponse(granted=1, shadow=shadow))
        session.renew(Reserved(1, DecidedBy.NODE, not shadow), 1.0)
        assert session.shadow is shadow
