"""When the keeper of holds renews, asks again and ends, and what it makes of the answers."""

from __future__ import annotations

import threading
from typing import Any, Callable, Dict, List, Optional, Set, Tuple

import pytest

from tollgate_client import ClosedError, DecidedBy, InvalidRequestError, NoAnswer, NoDecisionError
from tollgate_client._decide.effects import run
from tollgate_client._keep.desk import Desk
from tollgate_client._keep.effects import Begin
from tollgate_client._keep.inline import Inline
from tollgate_client._proto.holds_pb2 import (
    EndSessionResponse,
    KeepAliveResponse,
    ReserveResponse,
)
from tollgate_client._tenants import keeper, reserving
from tollgate_client._tenants.keeper import Keeper
from tollgate_client._tenants.session import Reserved, Session
from tollgate_client.request import tenant_request

AWAY = NoDecisionError(NoAnswer.UNREACHABLE)
FORBIDDEN = NoDecisionError(NoAnswer.FORBIDDEN, "not yours")
NOT_CONFIGURED = NoDecisionError(NoAnswer.NOT_CONFIGURED)
INVALID = InvalidRequestError("no")
REJECTED = ReserveResponse.REJECTED
NODE, DEGRADED, FALLBACK = DecidedBy.NODE, DecidedBy.DEGRADED_NODE, DecidedBy.FALLBACK


class Calls(Inline):
    """Has calls begin at once, or when the test says so."""

    waiting: Optional[List[Begin]] = None

    def _begin(self, begin: Begin) -> None:
        if self.waiting is None:
            super()._begin(begin)
        else:
            self.waiting.append(begin)


class Bench:
    """A keeper with a clock that the test moves, and nodes that it leads."""

    def __init__(self, most_calls: int = 32) -> None:
        self.now = 0.0
        self.reserved = ReserveResponse(granted=3)
        self.error: Optional[Exception] = None
        self.refused: Dict[str, Exception] = {}
        self.over: Set[str] = set()
        self.unheard: Set[str] = set()
        self.is_empty = self.is_degraded = self.has_fallback = False
        self.calls: List[Tuple[float, str, Any]] = []
        self.deadlines: List[float] = []
        self.nodes = self
        self.inline = Calls(lambda: self.now)
        self.most_calls = most_calls
        self.desk: Desk[Session] = Desk(self.inline.wake)

    def session(self, ttl: float = 9.0, on_lost: Optional[Callable[[], object]] = None) -> Session:
        """A session that is asked for."""
        request = tenant_request("sandbox", "acme", 5, 2, 0.0, None, ttl)
        session = Session(request, "me", self.desk, threading.Event(), on_lost)
        if self.desk.add(session):
            decider: Any = self
            plan = Keeper(self.desk, decider, self.inline.clock, self.most_calls).run()
            self.inline.start(plan)
        self.inline.catch_up()
        return session

    def hold(self, granted: Optional[Reserved] = None, **options: Any) -> Session:
        """A hold that is granted now."""
        session = self.session(**options)
        granted = granted or Reserved(3, NODE)
        if granted.decided_by is NODE:
            session.sent_at = self.now
            session.may_live_until = self.now + session.ttl
        assert session.grant(granted, self.now)
        self.inline.catch_up()
        return session

    def run(self, until: float) -> None:
        """Lets time pass."""
        self.now = until
        self.inline.catch_up()

    def let_go(self) -> None:
        """Has those calls answered that wait for it."""
        waiting, self.inline.waiting = self.inline.waiting, None
        for begin in waiting or ():
            self.inline._begin(begin)
        self.inline.catch_up()

    def times(self, method: str) -> List[float]:
        return [round(at, 6) for at, called, _ in self.calls if called == method]

    def called(self, method: str) -> List[Any]:
        return [what for _, called, what in self.calls if called == method]

    def fallback_grants(self, session: Session, now: float) -> bool:
        return self.has_fallback

    def keep_alive(self, message: Any, deadline: float) -> Any:
        yield from ()
        names = [one.session for one in message.sessions]
        self._called("keep_alive", names, deadline)
        for name in names:
            if name in self.refused:
                raise self.refused[name]
        answer = KeepAliveResponse(degraded=self.is_degraded)
        for one in message.sessions:
            if one.session not in self.unheard:
                renewed = answer.sessions.add(resource=one.resource, session=one.session)
                renewed.alive = self.is_degraded or one.session not in self.over
                if renewed.alive and not (self.is_degraded or self.is_empty):
                    renewed.holds.add(hold="me", domain="acme", copies=3)
        return answer

    def reserve(self, message: Any, deadline: float) -> Any:
        yield from ()
        self._called("reserve", message, deadline)
        if self.reserved.granted and not self.reserved.degraded:
            self.over.discard(message.session)
        return self.reserved

    def end_session(self, message: Any, deadline: float) -> Any:
        yield from ()
        self._called("end_session", message.session, deadline)
        return EndSessionResponse()

    def _called(self, method: str, what: Any, deadline: float) -> None:
        self.calls.append((self.inline.clock(), method, what))
        self.deadlines.append(deadline - self.inline.clock())
        if self.error is not None:
            raise self.error


def by_fallback(bench: Bench, **options: Any) -> Session:
    """A hold that the fallback has granted, and of which no node knows."""
    session = bench.hold(Reserved(3, FALLBACK), **options)
    bench.over.add(session.secret)
    return session


@pytest.fixture(autouse=True)
def no_jitter(monkeypatch):
    monkeypatch.setattr(keeper.random, "random", lambda: 0.5)


def test_holds_are_renewed_every_third_of_their_ttl_with_those_that_are_due_soon():
    bench = Bench()
    one = bench.hold()
    bench.run(0.3)
    two = bench.hold()
    bench.run(0.8)
    three = bench.hold()
    bench.run(7.0)
    assert bench.times("keep_alive") == [3.0, 3.8, 6.0, 6.8]
    together, alone = [one.secret, two.secret], [three.secret]
    assert bench.called("keep_alive") == [together, alone, together, alone]


@pytest.mark.parametrize(
    "granted", [Reserved(3, DEGRADED), Reserved(3, NODE, True), Reserved(3, FALLBACK)]
)
def test_what_is_not_recorded_is_renewed_more_often_in_the_same_calls(granted):
    bench = Bench()
    one, two = bench.hold(granted), bench.hold()
    assert one.interval == 1.5 and bench.hold(granted, ttl=3600.0).interval == 5.0
    bench.is_degraded = True
    bench.run(1.5)
    assert bench.called("keep_alive") == [[one.secret]]
    bench.run(3.0)
    assert [one.secret, two.secret] in bench.called("keep_alive")
    assert not bench.called("reserve")


def test_the_first_renewal_is_counted_from_when_the_hold_was_asked_for():
    bench = Bench()
    session = bench.session()
    bench.reserved = ReserveResponse(granted=3)
    run(reserving.reserve(bench, session, 5.0, lambda: bench.now), lambda effect: None)
    bench.run(1.0)
    assert session.grant(Reserved(3, NODE), bench.now)
    bench.run(3.0)
    assert bench.times("keep_alive") == [3.0] and session.until == 12.0


@pytest.mark.parametrize("ttl, seconds", [(1.0, 0.1), (12.0, 1.0), (3600.0, 2.0)])
def test_how_long_an_answer_may_take(ttl, seconds):
    bench = Bench()
    bench.hold(ttl=ttl)
    bench.run(ttl / 3)
    bench.desk.close()
    bench.run(ttl / 3)
    # Also to end it.
    assert bench.deadlines == [pytest.approx(seconds)] * 2
    # The shortest of a group.
    bench = Bench()
    bench.hold(ttl=ttl)
    bench.run(ttl / 3 - 0.5)
    bench.hold(Reserved(3, NODE), ttl=1.5)
    bench.run(max(ttl / 3, bench.now))
    assert bench.deadlines[0] == pytest.approx(min(seconds, 0.125))


def test_a_hold_that_nobody_renews_is_lost_a_third_of_its_ttl_before_its_end():
    bench = Bench()
    told: List[float] = []
    one = bench.hold(on_lost=lambda: told.append(bench.inline.clock()))
    bench.error = AWAY
    bench.run(5.9)
    # A 24th of the ttl apart.
    assert bench.times("keep_alive") == [3.0 + 0.375 * at for at in range(8)]
    assert one.is_held and not told
    bench.run(7.0)
    assert not one.is_held and told == [6.0]
    assert not bench.times("end_session")
    # It is ended when the application has let go.
    bench.error = None
    one.release()
    bench.run(7.0)
    assert bench.times("end_session") == [7.0]
    assert bench.desk.live(False) is None, "the keeper has ended"


def test_the_pause_after_no_answer_has_a_bound():
    bench = Bench()
    bench.hold(ttl=3600.0)
    bench.error = AWAY
    bench.run(1212.0)
    assert bench.times("keep_alive") == [1200.0, 1205.0, 1210.0]


def test_an_answer_counts_from_when_its_call_was_sent():
    bench = Bench()
    one = bench.hold()
    bench.inline.waiting = []
    bench.run(3.5)
    bench.let_go()
    assert one.until == 12.0 and one.due == 6.0
    # It is found only now that its time is over: it is lost, without another call.
    bench.inline._longest_lag = 0.0
    bench.run(20.0)
    assert not one.is_held and len(bench.times("keep_alive")) == 1


def test_a_hold_is_lost_while_a_call_for_it_is_under_way():
    bench = Bench()
    one = bench.hold()
    bench.inline.waiting = []
    bench.run(6.0)
    assert not one.is_held
    bench.let_go()
    one.release()
    bench.run(6.0)
    assert not one.is_held and bench.times("end_session") == [6.0]


def test_a_fallback_takes_over_until_the_hold_is_recorded_again(caplog):
    bench = Bench()
    bench.has_fallback = True
    one = bench.hold()
    bench.hold()
    bench.error = AWAY
    bench.run(7.4)
    assert one.is_held and one.reserved == Reserved(3, FALLBACK)
    # As often as before: a 24th of the ttl apart.
    assert bench.times("keep_alive")[-3:] == [6.375, 6.75, 7.125]
    assert sum("the fallback lets" in text for text in caplog.messages) == 1
    # The store has lost it meanwhile.
    bench.error, bench.over = None, {one.secret}
    bench.run(7.5)
    assert one.reserved == Reserved(3, NODE) and one.until == 16.5
    asked = bench.called("reserve")
    assert [(one.session, one.copies, one.min_copies) for one in asked] == [(one.secret, 3, 3)]
    bench.run(10.5)
    assert bench.times("keep_alive")[-1] == 10.5


def test_a_recorded_hold_that_no_node_knows_is_lost():
    bench = Bench()
    one, two, three = bench.hold(), bench.hold(), bench.hold()
    bench.over = {one.secret}
    bench.run(3.0)
    assert not one.is_held and two.is_held and three.is_held, "its session is over"
    bench.is_empty = True
    bench.run(6.0)
    assert not two.is_held and not three.is_held, "the sessions live, without their holds"
    assert not bench.called("reserve")


@pytest.mark.parametrize("granted", [Reserved(3, DEGRADED), Reserved(3, NODE, True)])
def test_an_unrecorded_hold_that_no_node_knows_is_asked_for_once_more(granted):
    for answer, reserved in (
        (ReserveResponse(granted=3), Reserved(3, NODE)),
        (ReserveResponse(granted=3, shadow=True), Reserved(3, NODE, True)),
        (ReserveResponse(granted=3, degraded=True), Reserved(3, DEGRADED)),
        (ReserveResponse(status=REJECTED, degraded=True), granted),
        (ReserveResponse(status=REJECTED, retry_after_millis=5), None),
    ):
        bench = Bench()
        one = bench.hold(granted)
        bench.reserved, bench.over = answer, {one.secret}
        bench.run(1.5)
        assert bench.times("keep_alive") == bench.times("reserve") == [1.5]
        assert one.is_held is (reserved is not None)
        if reserved is not None:
            assert one.reserved == reserved and one.shadow is granted.shadow


def test_an_unrecorded_hold_that_a_node_knows_is_recorded():
    bench = Bench()
    one = bench.hold(Reserved(3, DEGRADED))
    bench.run(1.5)
    assert one.reserved == Reserved(3, NODE) and one.until == 10.5
    assert not bench.called("reserve")


def test_a_degraded_answer_makes_a_hold_unrecorded():
    bench = Bench()
    one = bench.hold()
    bench.is_degraded = True
    bench.run(3.0)
    assert one.reserved == Reserved(3, DEGRADED) and one.until == 12.0
    bench.run(20.0)
    assert one.is_held and not bench.called("reserve")
    # The store is back without it.
    bench.is_degraded, bench.over = False, {one.secret}
    bench.run(21.0)
    assert one.reserved == Reserved(3, NODE) and len(bench.called("reserve")) == 1


def test_what_is_degraded_changes_nothing_about_a_hold_of_the_fallback():
    bench = Bench()
    one = by_fallback(bench)
    bench.is_degraded = True
    bench.run(3.0)
    assert one.reserved == Reserved(3, FALLBACK) and one.until > 1e9
    assert bench.times("keep_alive") == [1.5, 3.0]
    bench.is_degraded = False
    bench.reserved = ReserveResponse(status=REJECTED, degraded=True)
    bench.run(6.0)
    assert one.is_held and one.reserved == Reserved(3, FALLBACK)
    assert bench.times("reserve") == [4.5, 6.0]
    bench.error = NoDecisionError(NoAnswer.NOT_CONFIGURED)
    bench.run(60.0)
    assert one.is_held and one.reserved == Reserved(3, FALLBACK)
    bench.error, bench.reserved = None, ReserveResponse(status=REJECTED)
    bench.run(62.0)
    assert not one.is_held


def test_a_session_that_an_answer_leaves_out_is_not_answered():
    bench = Bench()
    three, four = bench.hold(), bench.hold()
    bench.unheard = {three.secret}
    bench.run(20.0)
    assert not three.is_held and four.is_held


@pytest.mark.parametrize("error", [FORBIDDEN, NOT_CONFIGURED, INVALID])
def test_the_sessions_of_a_group_that_is_refused_are_renewed_one_by_one(error):
    bench = Bench()
    holds = [bench.hold() for _ in range(4)]
    names = [one.secret for one in holds]
    bench.refused = {names[2]: error}
    bench.run(3.0)
    assert bench.called("keep_alive") == [names, *([name] for name in names)]
    # That one is tried again by itself: another node may renew it.
    bench.run(5.9)
    tried = bench.called("keep_alive")[5:]
    assert tried == [[names[2]]] * 7
    bench.run(6.0)
    # Those with an answer are together again.
    assert [one.is_held for one in holds] == [True, True, False, True]
    assert [names[0], names[1], names[3]] in bench.called("keep_alive")[5:]
    # The other failures are no reason for that.
    bench = Bench()
    holds = [bench.hold() for _ in range(2)]
    bench.error = AWAY
    bench.run(3.3)
    assert len(bench.calls) == 1 and not any(one.is_alone for one in holds)


def test_not_too_many_calls_for_single_sessions_are_made_at_a_time():
    bench = Bench(most_calls=3)
    holds = [bench.hold() for _ in range(10)]
    for one in holds[5:]:
        one.release()
    bench.inline.waiting = []
    bench.run(0.0)
    assert len(bench.inline.waiting) == 3
    bench.refused = {one.secret: FORBIDDEN for one in holds}
    bench.run(3.0)
    assert len(bench.inline.waiting) == 4, "those for many sessions do not wait for them"
    bench.let_go()
    # What is held comes first.
    methods = [method for _, method, _ in bench.calls]
    assert methods == ["end_session"] * 3 + ["keep_alive"] * 6 + ["end_session"] * 2


def test_many_holds_are_renewed_in_groups_of_a_hundred():
    bench = Bench()
    holds = [bench.hold() for _ in range(250)]
    bench.run(3.0)
    assert [len(group) for group in bench.called("keep_alive")] == [100, 100, 50]
    names = {name for group in bench.called("keep_alive") for name in group}
    assert names == {one.secret for one in holds}


def test_a_session_is_ended_again_until_its_time_is_over():
    bench = Bench()
    one, two = bench.hold(ttl=120.0), bench.hold(ttl=120.0)
    bench.error = AWAY
    one.release()
    bench.run(2.5)
    assert not one.is_held and bench.times("end_session") == [0.0, 1.0]
    two.release()
    bench.error = None
    bench.run(2.5)
    assert bench.calls[-1][2] == two.secret
    bench.error = AWAY
    bench.run(600.0)
    ends = [at for at, method, name in bench.calls if (method, name) == ("end_session", one.secret)]
    # Doubled to half a minute.
    assert ends == [0.0, 1.0, 3.0, 7.0, 15.0, 31.0, 61.0, 91.0]
    assert bench.desk.live(False) is None


def test_the_pauses_before_another_end_differ(monkeypatch):
    for value, pause in ((0.0, 0.75), (1.0, 1.25)):
        monkeypatch.setattr(keeper.random, "random", lambda value=value: value)
        bench = Bench()
        one = bench.hold()
        bench.error = AWAY
        one.release()
        bench.run(1.3)
        assert bench.times("end_session") == [0.0, pause]


@pytest.mark.parametrize("error", [FORBIDDEN, NOT_CONFIGURED, INVALID, ClosedError("closed")])
def test_an_end_that_is_refused_is_not_tried_again(error):
    bench = Bench()
    one = bench.hold()
    bench.error = error
    one.release()
    bench.run(60.0)
    assert bench.times("end_session") == [0.0] and bench.desk.live(False) is None


def test_a_renewal_may_have_arrived():
    """Its session may live for its ttl from the end of the call."""
    bench = Bench()
    one = bench.hold(ttl=12.0)
    bench.error = NoDecisionError(NoAnswer.TIMEOUT)
    bench.run(4.0)
    assert one.may_live_until == 4.0 + 1.0 + 12.0


def test_what_no_node_may_have_granted_needs_no_end():
    bench = Bench()
    one = bench.session()
    assert one.grant(Reserved(2, FALLBACK), 0.0)
    one.release()
    bench.run(60.0)
    assert not bench.calls and bench.desk.live(False) is None


@pytest.mark.parametrize(
    "answer, arrived, may_live",
    [
        *((NoDecisionError(why), False, False) for why in NoAnswer),
        *((NoDecisionError(why), True, True) for why in NoAnswer),
        (InvalidRequestError("no"), False, False),
        (ReserveResponse(status=REJECTED), False, False),
        (ReserveResponse(status=REJECTED, degraded=True), False, True),
        (ReserveResponse(granted=0), False, True),
        (ReserveResponse(granted=3), False, True),
    ],
)
def test_a_request_that_may_have_been_carried_out_is_ended(answer, arrived, may_live):
    bench = Bench()
    one = bench.session()
    if isinstance(answer, Exception):
        bench.error = answer
        if isinstance(answer, NoDecisionError):
            answer._may_be_decided = arrived
    else:
        bench.reserved = answer
    try:
        run(reserving.reserve(bench, one, 1.0, lambda: bench.now), lambda effect: None)
    except (NoDecisionError, InvalidRequestError):
        pass
    assert one.may_live_until == (10.0 if may_live else float("-inf"))
    bench.error = None
    one.give_up()
    bench.run(0.0)
    assert bench.times("end_session") == [0.0] * may_live
    assert bench.desk.live(False) is None


def test_an_earlier_request_that_may_have_been_carried_out_is_not_forgotten():
    bench = Bench()
    one = bench.session()
    bench.reserved = ReserveResponse(status=REJECTED, degraded=True)
    plan = lambda: reserving.reserve(bench, one, 1.0, lambda: bench.now)  # noqa: E731
    run(plan(), lambda effect: None)
    bench.reserved = ReserveResponse(status=REJECTED)
    run(plan(), lambda effect: None)
    assert one.may_live_until == 10.0


@pytest.mark.parametrize("who", [DEGRADED, FALLBACK])
def test_what_no_recording_node_has_granted_gets_another_session(who):
    bench = Bench()
    one = bench.session()
    before, one.may_live_until = one.secret, 9.0
    assert one.grant(Reserved(2, who), 0.0)
    assert one.secret != before
    bench.error = AWAY
    bench.run(0.5)
    bench.error = None
    bench.run(1.2)
    assert bench.called("end_session") == [before] * 2 and one.is_held
    bench.over = {one.secret}
    bench.run(1.5)
    assert bench.called("reserve")[0].session == one.secret
    # What a node has granted keeps its name.
    two = bench.session()
    before, two.may_live_until = two.secret, 9.0
    assert two.grant(Reserved(2, NODE), bench.now) and two.secret == before
    # Nothing is granted once the client is closed.
    three = bench.session()
    before, three.may_live_until = three.secret, bench.now + 9.0
    bench.desk.close()
    assert not three.grant(Reserved(2, who), bench.now)
    three.give_up()
    bench.run(bench.now)
    assert bench.called("end_session").count(before) == 1


def test_a_request_under_way_is_ended_afterwards():
    """Also if its caller gives up, and then nothing keeps the keeper."""
    bench = Bench()
    one = bench.session()

    def reserve(message: Any, deadline: float) -> Any:
        yield "a call"

    bench.reserve = reserve  # type: ignore[method-assign]
    plan = reserving.reserve(bench, one, 1.0, lambda: bench.now)
    assert next(plan) == "a call"
    bench.desk.close()
    bench.run(1.0)
    assert not bench.calls and bench.desk.live(False) == [one]
    assert not one.grant(Reserved(3, NODE), bench.now)
    plan.close()
    one.give_up()
    bench.run(1.0)
    assert bench.times("end_session") == [1.0] and bench.inline._plan is None


def test_a_handle_that_is_collected_ends_its_request():
    bench = Bench()
    one = bench.session()
    one.may_live_until = 9.0
    one.drop()
    bench.run(0.0)
    assert bench.times("end_session") == [0.0] and bench.desk.live(False) is None


def test_all_are_ended_when_the_client_is_closed():
    bench = Bench()
    told: List[int] = []
    holds = [bench.hold(on_lost=lambda: told.append(1)) for _ in range(3)]
    holds[0].drop()
    bench.desk.close()
    assert not any(one.is_held for one in holds) and len(told) == 3
    bench.run(0.0)
    assert set(bench.called("end_session")) == {one.secret for one in holds}
    assert bench.inline._plan is None, "the keeper has ended"


def test_sessions_are_ended_for_a_minute_once_the_client_is_closed():
    bench = Bench()
    bench.hold(ttl=3600.0)
    bench.error = AWAY
    bench.run(10.0)
    bench.desk.close()
    bench.run(600.0)
    assert bench.times("end_session") == [10.0, 11.0, 13.0, 17.0, 25.0, 41.0]
    assert bench.inline._plan is None, "the keeper has ended"


def test_a_callback_that_fails_or_lets_go_disturbs_no_other_hold(caplog):
    bench = Bench()
    one, two = bench.hold(on_lost=lambda: 1 / 0), bench.hold()
    three = bench.hold(on_lost=lambda: three.release())
    bench.over = {one.secret, three.secret}
    bench.run(20.0)
    assert not one.is_held and two.is_held and not three.is_held
    assert any("on_lost" in message for message in caplog.messages)
    assert bench.called("end_session") == [three.secret]


def test_messages_about_lost_holds_are_throttled(caplog):
    bench = Bench()
    holds = [bench.hold() for _ in range(5)]
    bench.over = {one.secret for one in holds}
    bench.run(3.0)
    late = bench.hold()
    bench.over.add(late.secret)
    bench.run(6.0)
    lost = [text for text in caplog.messages if "are lost" in text]
    assert len(lost) == 2 and "(0 such" in lost[0] and "(4 such" in lost[1]


def test_a_call_that_breaks_or_is_given_up_is_no_answer(caplog):
    bench = Bench()
    one = bench.hold()
    bench.error = ValueError("a bug")
    bench.run(3.0)
    assert any("has failed" in message for message in caplog.messages)
    # Its thread or its task has ended before it began.
    bench.error, bench.inline.waiting = None, []
    bench.run(3.4)
    bench.inline.waiting.pop().ended()
    bench.inline.waiting = None
    bench.run(4.0)
    assert one.is_held and bench.times("keep_alive") == [3.0, 3.775]


def test_the_name_of_a_hold_is_cut():
    bench = Bench()
    request = tenant_request("sandbox", "acme", 1, None, 0.0, None)
    for given, name in (("x" * 200, "x" * 128), ("é" * 100, "é" * 64), ("", "client")):
        assert Session(request, given, bench.desk, threading.Event()).hold == name
