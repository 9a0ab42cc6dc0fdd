"""When the keeper asks, and for what."""

from __future__ import annotations

from typing import Any, Callable, List, Set, Tuple

import pytest

from tollgate_client import InvalidRequestError, Mode, NoAnswer, NoDecisionError
from tollgate_client._keep.inline import Inline
from tollgate_client._leases.desk import Desk
from tollgate_client._leases.keeper import Keeper
from tollgate_client._leases.rate import RateUsage
from tollgate_client._leases.resource import Resource
from tollgate_client._proto.doorman_pb2 import GetCapacityResponse, ReleaseCapacityResponse

FORBIDDEN = NoDecisionError(NoAnswer.FORBIDDEN, "not yours")
AWAY = NoDecisionError(NoAnswer.UNREACHABLE)


class Bench:
    """A keeper with a clock that the test moves, and a lessor that it leads."""

    def __init__(self, jitter: float = 1.0) -> None:
        self.now = 0.0
        self.interval = 5
        self.share = 1.0
        self.refused: Set[str] = set()
        self.refusal: Exception = FORBIDDEN
        self.error: "Exception | None" = None
        self.asked: List[Tuple[float, List[str]]] = []
        self.released: List[List[str]] = []
        self._inline = Inline(lambda: self.now)
        self.desk = Desk(self._inline.wake)
        self._jitter = jitter

    def lease(self, name: str, wants: "float | None" = 1.0) -> Resource:
        resource = Resource(name, Mode.SAFE, wants, RateUsage(self.now), self.now)
        if self.desk.add(resource):
            clock = self._inline.clock
            keeper = Keeper(self.desk, self, "me", clock, lambda: 1000.0, lambda: self._jitter)
            self._inline.start(keeper.run())
        self._inline.catch_up()
        return resource

    def run(self, until: float) -> None:
        """Lets time pass."""
        self.now = until
        self._inline.catch_up()

    def times(self) -> List[float]:
        return [round(at, 6) for at, _ in self.asked]

    def get_capacity(self, message: Any, deadline: float) -> Any:
        names = [one.resource_id for one in message.resource]
        self.asked.append((self._inline.clock(), names))
        assert message.client_id == "me" and deadline == self._inline.clock() + 2.0
        if self.error is not None:
            raise self.error
        if self.refused.intersection(names):
            raise self.refusal
        answer = GetCapacityResponse()
        for one in message.resource:
            added = answer.response.add(resource_id=one.resource_id)
            added.gets.expiry_time, added.gets.refresh_interval = 1060, self.interval
            added.gets.capacity = one.wants * self.share
        return answer
        yield

    def release_capacity(self, message: Any, deadline: float) -> Any:
        self.released.append(list(message.resource_id))
        if self.error is not None:
            raise self.error
        return ReleaseCapacityResponse()
        yield


@pytest.mark.parametrize("jitter, interval", [(0.0, 4.5), (1.0, 5.0)])
def test_all_are_refreshed_at_the_interval_and_new_ones_are_asked_for_at_once(jitter, interval):
    bench = Bench(jitter)
    bench.lease("a")
    bench.run(0.5)
    bench.lease("b")
    assert bench.asked == [(0.0, ["a"]), (0.5, ["b"])]
    bench.run(12.0)
    assert bench.asked[2:] == [(interval, ["a", "b"]), (2 * interval, ["a", "b"])]


def test_an_interval_of_nothing_is_a_second():
    bench = Bench()
    bench.interval = 0
    bench.lease("a")
    bench.run(3.5)
    assert bench.times() == [0.0, 1.0, 2.0, 3.0]


def test_a_refresh_that_fails_is_tried_again_after_a_second(caplog):
    bench = Bench()
    one = bench.lease("a")
    bench.error = AWAY
    bench.run(7.5)
    assert bench.times() == [0.0, 5.0, 6.0, 7.0]
    assert len(caplog.messages) == 1, "it is logged once"
    # Who is in a hurry waits as long.
    one.wants = 2.0
    bench.desk.hurry(one)
    bench.run(7.9)
    bench.error = None
    bench.run(8.0)
    assert bench.times()[4:] == [8.0] and one.held.capacity == 2.0
    bench.run(14.0)
    assert bench.times()[5:] == [13.0]


def test_hurries_are_a_tenth_of_a_second_apart():
    bench = Bench()
    one = bench.lease("a", wants=None)
    for step in range(1, 6):
        bench.run(step * 0.04)
        bench.desk.hurry(one)
        bench.run(step * 0.04)
    bench.run(1.0)
    assert bench.times() == [0.0, 0.1, 0.2, 0.3]
    assert one.could_get_more(bench.now)


def test_more_is_asked_for_only_where_that_may_help():
    bench = Bench()
    measured, fixed = bench.lease("a", None), bench.lease("b", 1.0)
    assert measured.could_get_more(bench.now) and not fixed.could_get_more(bench.now)
    bench.share = 0.5
    measured.usage.waiting = 4  # type: ignore[attr-defined]
    bench.run(5.0)
    # Those who wait count twice, and a fifth is added.
    assert measured.held.capacity == 0.5 * 1.2 * 2 * 4 and not measured.could_get_more(bench.now)


@pytest.mark.parametrize("refusal", [FORBIDDEN, InvalidRequestError("no")])
def test_a_resource_that_is_refused_spoils_no_other(refusal, caplog):
    bench = Bench()
    bench.refused, bench.refusal = {"c"}, refusal
    names = ["a", "b", "c", "d"]
    # All at once.
    resources = {}
    for name in names:
        resources[name] = Resource(name, Mode.SAFE, 1.0, RateUsage(0.0), 0.0)
        bench.desk.add(resources[name])
    keeper = Keeper(bench.desk, bench, "me", bench._inline.clock, lambda: 1000.0, lambda: 1.0)
    bench._inline.start(keeper.run())
    bench.run(0.0)
    assert [asked for _, asked in bench.asked] == [names, ["a", "b"], ["c", "d"], ["c"], ["d"]]
    assert [resources[name].held.capacity for name in names] == [1.0, 1.0, 0.0, 1.0]
    assert len(caplog.messages) == 1 and "c" in caplog.messages[0]
    # It is set aside for half a minute, and not released with the others.
    del bench.asked[:]
    bench.run(29.9)
    assert all(asked == ["a", "b", "d"] for _, asked in bench.asked) and len(bench.asked) == 5
    bench.refused = set()
    bench.run(30.0)
    assert bench.asked[-1] == (30.0, names) and resources["c"].held.capacity == 1.0
    bench.refused = {"c"}
    bench.run(35.0)
    for name in names:
        bench.desk.remove(resources[name])
    bench.run(36.0)
    assert bench.released == [["a", "b", "d"]]
    assert not bench.desk.is_kept


def test_without_an_answer_the_other_half_is_not_asked():
    bench = Bench()
    bench.refused = {"a"}
    for name in ("a", "b", "c", "d"):
        bench.desk.add(Resource(name, Mode.SAFE, 1.0, RateUsage(0.0), 0.0))
    calls: List[Any] = []
    get = bench.get_capacity

    def fail_second(message: Any, deadline: float) -> Any:
        calls.append(message)
        if len(calls) == 2:
            bench.error = AWAY
        return get(message, deadline)

    bench.get_capacity = fail_second  # type: ignore[method-assign]
    keeper = Keeper(bench.desk, bench, "me", bench._inline.clock, lambda: 1000.0, lambda: 1.0)
    bench._inline.start(keeper.run())
    bench.run(0.9)
    assert len(calls) == 2
    bench.error = None
    bench.run(1.0)
    assert [len(call.resource) for call in calls[2:]] == [4, 2, 1, 1, 2]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda answer: answer.ClearField("response"),
        lambda answer: answer.response.append(answer.response[0]),
    ],
)
def test_a_node_that_answers_twice_or_not_for_a_resource_has_not_answered(
    spoil: Callable[[Any], Any]
):
    bench = Bench()
    get = bench.get_capacity

    def spoiled(message: Any, deadline: float) -> Any:
        answer = yield from get(message, deadline)
        spoil(answer)
        return answer

    bench.get_capacity = spoiled  # type: ignore[method-assign]
    one = bench.lease("a")
    bench.run(1.0)
    assert one.held.capacity == 0.0 and bench.times() == [0.0, 1.0]


def test_a_closed_desk_releases_all():
    bench = Bench()
    one = bench.lease("a")
    bench.lease("b")
    bench.desk.close()
    bench.run(0.0)
    assert bench.released == [["a", "b"]] and one.held.is_closed
    bench.run(100.0)
    assert len(bench.asked) == 2


def test_who_is_leased_again_at_once_is_not_released():
    bench = Bench()
    first = bench.lease("a")
    bench.desk.remove(first)
    second = bench.lease("a", 3.0)
    assert second.held.capacity == 3.0 and not bench.released
    # One that was collected, too.
    bench.desk.drop(second)
    third = bench.lease("a", 4.0)
    bench.desk.remove(second)
    bench.run(1.0)
    assert third.held.capacity == 4.0 and not bench.released
    bench.desk.remove(third)
    bench.error = AWAY
    bench.run(2.0)
    assert bench.released == [["a"]] and not bench.desk.is_kept
    bench.error = None
    assert bench.lease("a", 5.0).held.capacity == 5.0, "another keeper begins"


@pytest.mark.parametrize("error, most", [(AWAY, 5.0), (NoDecisionError(NoAnswer.TIMEOUT), 2.0)])
def test_after_an_answer_that_may_be_lost_no_more_is_used_than_was_asked_for(error, most):
    bench = Bench()
    one = bench.lease("a", wants=5.0)
    one.wants, bench.error = 2.0, error
    bench.run(5.0)
    assert one.held.at(bench.now) == most


def test_only_what_is_in_a_hurry_is_asked_for_before_the_time():
    bench = Bench()
    one, _ = bench.lease("a", wants=None), bench.lease("b")
    bench.run(1.0)
    bench.desk.hurry(one)
    bench.run(1.0)
    assert bench.asked[-1] == (1.0, ["a"])
    bench.run(5.0)
    assert bench.asked[-1] == (5.0, ["a", "b"])


def test_refusals_cost_a_bounded_number_of_calls():
    bench = Bench()
    names = [f"r{at}" for at in range(200)]
    bench.refused = set(names)
    for name in names:
        bench.desk.add(Resource(name, Mode.SAFE, 1.0, RateUsage(0.0), 0.0))
    keeper = Keeper(bench.desk, bench, "me", bench._inline.clock, lambda: 1000.0, lambda: 1.0)
    bench._inline.start(keeper.run())
    bench.run(0.0)
    # Those that were split off before are asked for once more.
    assert 100 <= len(bench.asked) <= 110
    before = len(bench.asked)
    bench.run(29.0)
    assert len(bench.asked) == before


def test_those_who_wait_are_told_when_nobody_keeps_their_leases():
    bench = Bench()
    one = bench.lease("a")
    bench.desk.keeper_has_ended()
    assert one.held.is_closed
    # The next one has another keeper.
    assert bench.desk.add(Resource("a", Mode.SAFE, 1.0, RateUsage(0.0), 0.0))
