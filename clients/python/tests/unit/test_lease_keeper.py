"""When the keeper asks, and for what."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Sequence, Set, Tuple

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
        self.slept = 0.0
        """Seconds for which the machine has slept, while its clock stood still."""
        self.interval = 5
        self.length = 60
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
        return self.lease_all([name], wants)[name]

    def lease_all(
        self, names: Sequence[str], wants: "float | None" = 1.0
    ) -> Dict[str, Resource]:
        """Leases all before the keeper looks."""
        all_of_them, is_first = {}, False
        for name in names:
            usage = RateUsage(self.now)
            one = Resource(name, Mode.SAFE, wants, usage, self.now, lambda: self._epoch(self.now))
            is_first |= self.desk.add(one)
            all_of_them[name] = one
        if is_first:
            clock = self._inline.clock
            keeper = Keeper(
                self.desk, self, "me", clock, lambda: self._epoch(clock()), lambda: self._jitter
            )
            self._inline.start(keeper.run())
        self._inline.catch_up()
        return all_of_them

    def _epoch(self, now: float) -> float:
        return 1000.0 + now + self.slept

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
            added.gets.expiry_time = int(self._epoch(self._inline.clock())) + self.length
            added.gets.refresh_interval = self.interval
            added.gets.capacity = one.wants * self.share
        return answer
        yield

    def release_capacity(self, message: Any, deadline: float) -> Any:
        self.released.append(list(message.resource_id))
        if self.refused.intersection(message.resource_id):
            raise self.refusal
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
    resources = bench.lease_all(names)
    assert [asked for _, asked in bench.asked] == [names, ["a", "b"], ["c", "d"], ["c"], ["d"]]
    assert [resources[name].held.capacity for name in names] == [1.0, 1.0, 0.0, 1.0]
    assert len(caplog.messages) == 1 and "c" in caplog.messages[0]
    # It is set aside for half a minute, and not released with the others.
    del bench.asked[:]
    bench.run(29.9)
    assert all(asked == ["a", "b", "d"] for _, asked in bench.asked) and len(bench.asked) == 5
    bench.refused = set()
    bench.run(30.0)
    # Apart from the others, as it may be refused again.
    assert bench.asked[-2:] == [(30.0, ["a", "b", "d"]), (30.0, ["c"])]
    assert resources["c"].held.capacity == 1.0
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
    calls: List[Any] = []
    get = bench.get_capacity

    def fail_second(message: Any, deadline: float) -> Any:
        calls.append(message)
        if len(calls) == 2:
            bench.error = AWAY
        return get(message, deadline)

    bench.get_capacity = fail_second  # type: ignore[method-assign]
    bench.lease_all(["a", "b", "c", "d"])
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
    assert len(bench.asked) == 1


def test_a_release_that_is_refused_is_split():
    bench = Bench()
    bench.lease_all(["a", "b", "c", "d"])
    # Allowed when it was leased, and not any more.
    bench.refused = {"b"}
    bench.desk.close()
    bench.run(0.1)
    assert bench.released == [["a", "b", "c", "d"], ["a", "b"], ["a"], ["b"], ["c", "d"]]


def test_who_is_leased_again_at_once_is_not_released():
    bench = Bench()
    first = bench.lease("a")
    bench.desk.remove(first)
    second = bench.lease("a", 3.0)
    bench.run(0.1)
    assert second.held.capacity == 3.0 and not bench.released
    # One that was collected, too.
    bench.desk.drop(second)
    third = bench.lease("a", 4.0)
    bench.run(0.2)
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
    bench.lease_all(names)
    # Those that were split off before are asked for once more.
    assert 100 <= len(bench.asked) <= 110
    bench.run(10.0)
    before = len(bench.asked)
    # A hundred a second, until each is known.
    assert 300 <= before <= 450
    bench.run(29.0)
    assert len(bench.asked) == before
    # Those that are known may be refused at once.
    bench.run(30.0)
    assert 100 <= len(bench.asked) - before <= 110
    before = len(bench.asked)
    bench.run(59.0)
    assert len(bench.asked) == before


def test_many_that_are_refused_take_no_lease_from_the_others():
    bench = Bench()
    bench.length = 20
    allowed, refused = ([f"{at}-{kind}" for at in range(60)] for kind in ("ok", "not"))
    resources = bench.lease_all(sorted(allowed + refused))
    # The right to half of them is lost.
    bench.refused = set(refused)
    for second in range(1, 100):
        bench.run(second)
        held = [resources[name].held_at(second).at(second) for name in allowed]
        assert held == [1.0] * 60, second
    bench.desk.close()
    bench.run(100.0)
    assert sorted(bench.released[0]) == sorted(allowed)


def test_those_that_are_refused_are_asked_for_again_together_and_apart_from_the_others():
    bench = Bench()
    bench.interval, bench.refused = 60 * 60, {"b", "c"}
    bench.lease_all(["a", "b"])
    bench.run(20.0)
    bench.lease("c")
    before = len(bench.asked)
    bench.run(29.9)
    assert len(bench.asked) == before
    bench.refused = set()
    bench.run(30.0)
    assert bench.asked[before:] == [(30.0, ["a"]), (30.0, ["b", "c"])]


def test_what_is_urgent_is_asked_for_together():
    bench = Bench()
    bench.interval = 60 * 60
    resources = list(bench.lease_all([f"r{at}" for at in range(50)]).values())
    for step in range(1000):
        bench.run(step / 100)
        bench.desk.hurry(resources[step % 50])
    # One every 100 ms.
    assert 90 <= len(bench.asked) <= 110
    # New ones, too.
    before = len(bench.asked)
    for step in range(100):
        bench.run(10.0 + step / 100)
        bench.lease(f"new{step}")
    assert 9 <= len(bench.asked) - before <= 11


def test_a_lease_that_runs_out_while_the_machine_sleeps_is_used_no_more():
    bench = Bench()
    one = bench.lease("a", wants=None)
    one.usage.ended = 10  # type: ignore[attr-defined]
    bench.run(5.0)
    bench.now = 7.0
    bench.slept = 57.9
    assert one.held_at(7.0).at(7.0) == 10.0 * 1.2 / 5 and one.could_get_more(7.0)
    bench.slept = 58.0
    assert one.held_at(7.0).at(7.0) == 0.0 and not one.could_get_more(7.0)
    # Until it is renewed.
    bench.run(10.0)
    assert one.held_at(10.0).at(10.0) == 10.0 * 1.2 / 10


def test_those_who_wait_are_told_when_nobody_keeps_their_leases():
    bench = Bench()
    one = bench.lease("a")
    bench.desk.keeper_has_ended()
    assert one.held.is_closed
    # The next one has another keeper.
    assert bench.desk.add(Resource("a", Mode.SAFE, 1.0, RateUsage(0.0), 0.0))
