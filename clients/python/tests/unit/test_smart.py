"""Smart buckets of a fake: what is asked for, used and refused, in a world whose time is moved."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from typing import Any, Callable, Dict, Generator, List, Tuple

import pytest

from tollgate_client import (
    ClosedError,
    DecidedBy,
    Fake,
    FakeAnswer,
    FakeTime,
    Fallback,
    Granted,
    NoDecisionError,
    Reason,
    Refused,
    RefusedError,
    TollgateError,
)
from tollgate_client._decide.decider import Decider, Rules
from tollgate_client._decide.effects import Sleep
from tollgate_client._decide.level import level
from tollgate_client._keep.desk import Desk
from tollgate_client._keep.effects import Rest
from tollgate_client._smart.keeper import Keeper
from tollgate_client._smart.meter import Meter
from tollgate_client._smart.stock import Stock
from tollgate_client._smart.supply import Supply
from tollgate_client.fallback import Fallbacks
from tollgate_client.request import Request

Plan = Generator[Any, Any, Any]


class Signal:
    """Wakes one plan of a world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.is_set = False
        self.waits: "Tuple[int, Plan] | None" = None

    def set(self) -> None:
        self.is_set = True
        if self.waits is not None:
            self._world.at(self._world.time.now, *self.waits)

    def clear(self) -> None:
        self.is_set = False


class World:
    """Plans that run side by side, in time that passes when all of them wait."""

    def __init__(self, answer: FakeAnswer = FakeAnswer.GRANT, **fallbacks: Any) -> None:
        self.time = FakeTime()
        self.fake = Fake(answer, fake_time=self.time)
        rules = Rules(1.0, Fallbacks(fallbacks.get("fallback"), {}, {}), None, None)
        self.granted = 0
        self._events: List[Tuple[float, int, int, Plan]] = []
        self._numbers = itertools.count()
        # The wait of each plan that waits. What comes from an earlier one is not heard.
        self._waits: Dict[Plan, int] = {}
        self._bell = Signal(self)
        self.desk: Desk[Stock] = Desk(self._bell.set)
        self.decider = Decider(rules, self.fake, self.fake.now)

    def stock(self, ahead: float = 1.0) -> Stock:
        request = Request("db", "reads", max_wait=0.1)
        stock = Stock(request, Supply(ahead, self.time.now), self.desk.wake, self.fake.now)
        if self.desk.add(stock):
            self.spawn(Keeper(self.desk, self, self.fake.now).run())  # type: ignore[arg-type]
        return stock

    def decide(self, request: Request) -> Plan:
        answer = yield from self.decider.allow(request)
        self.granted += answer.tokens if answer.is_granted else 0
        return answer

    def acquire(self, stock: Stock, tokens: int, max_wait: float) -> Plan:
        yield from stock.acquire(tokens, max_wait, lambda: Signal(self))

    def spawn(self, plan: Plan) -> None:
        self._wait(plan, 0.0)

    def at(self, when: float, number: int, plan: Plan) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), number, plan))

    def run(self, seconds: float) -> None:
        end = self.time.now + seconds
        while self._events and self._events[0][0] <= end:
            when, _, number, plan = heapq.heappop(self._events)
            if self._waits.get(plan) == number:
                self.time.now = max(self.time.now, when)
                self._step(plan)
        self.time.now = end

    def outcome(self, stock: Stock, tokens: int, max_wait: float) -> Any:
        """What comes of an acquire: the error, or ``None``."""
        outcomes: List[Any] = []

        def acquire() -> Plan:
            try:
                yield from self.acquire(stock, tokens, max_wait)
                outcomes.append(None)
            except TollgateError as error:
                outcomes.append(error)

        self.spawn(acquire())
        while not outcomes:
            self.run(0.01)
        return outcomes[0]

    def _step(self, plan: Plan) -> None:
        del self._waits[plan]
        try:
            effect = plan.send(None)
        except StopIteration:
            return
        if isinstance(effect, Sleep):
            self._wait(plan, effect.seconds)
            return
        signal: Any = self._bell if isinstance(effect, Rest) else effect.signal
        number = self._wait(plan, effect.seconds)
        signal.waits = (number, plan)
        if signal.is_set:
            signal.set()
        if signal is self._bell:
            signal.clear()

    def _wait(self, plan: Plan, seconds: float) -> int:
        number = self._waits[plan] = next(self._numbers)
        self.at(self.time.now + seconds, number, plan)
        return number


def asked(world: World) -> List[int]:
    return world.fake.asked("db", "reads")


def test_the_meter_counts_the_demand_of_the_last_second():
    meter = Meter(0.0)
    assert meter.demanded == 0
    for tenth in range(21):
        meter.count(tenth * 5, tenth / 10)
    assert meter.demanded == 50
    meter.count(100, 2.5)
    assert meter.demanded == 25
    meter.count(100, 3.2)
    assert meter.demanded == 0
    meter.count(107, 9.0)
    assert meter.demanded == 7 and len(meter._counts) <= 2


def test_few_calls_serve_many_uses():
    world = World()
    stock = world.stock()

    def use() -> Plan:
        for _ in range(10_000):
            yield from world.acquire(stock, 1, 1.0)
            yield Sleep(0.001)

    world.spawn(use())
    world.run(60.0)
    # The first ones are asked for as they come, and then half a second of use at a time.
    assert len(asked(world)) <= 160
    # At most a second of use is left.
    assert 10_000 <= world.granted <= 10_000 + 1100
    # None of it stays when nobody uses it.
    assert not stock.try_acquire(1) and stock._tokens == 0


def test_a_use_ahead_of_need_waits_for_nobody():
    world = World()
    stock = world.stock()
    refused = 0

    def use() -> Plan:
        nonlocal refused
        for at in range(10_000):
            refused += not stock.try_acquire(1)
            # After ten seconds, ten times as much.
            yield Sleep(0.01 if at < 1000 else 0.001)

    world.spawn(use())
    world.run(60.0)
    # Until the first ones are there, and while the use grows.
    assert refused <= 200


def test_ahead_is_how_much_is_taken():
    for ahead, most in ((0.2, 30), (5.0, 510)):
        world = World()
        stock = world.stock(ahead)

        def use() -> Plan:
            while True:
                stock.try_acquire(1)
                yield Sleep(0.01)

        world.spawn(use())
        world.run(10.0)
        assert most / 3 <= max(asked(world)) <= most


@pytest.mark.parametrize("seed", range(30))
def test_never_more_is_used_than_was_granted(seed):
    """However the demand and the answers change, and whoever gives up."""
    chance = random.Random(seed)
    world = World()
    stock = world.stock(chance.choice([0.0, 0.3, 1.0]))
    used = served = told = 0

    def use(chance: random.Random) -> Plan:
        nonlocal used, served, told
        for _ in range(100):
            tokens, max_wait = chance.randrange(1, 10), chance.random() / 20
            step = chance.randrange(4)
            if step == 0:
                used += tokens * stock.try_acquire(tokens)
            elif step == 1:
                # One who gives up while it waits, or when it is served.
                plan = world.acquire(stock, tokens, 1.0)
                try:
                    next(plan)
                    yield Sleep(max_wait)
                except StopIteration:
                    used += tokens
                plan.close()
            else:
                try:
                    yield from world.acquire(stock, tokens, max_wait)
                    used += tokens
                    served += 1
                except TollgateError:
                    told += 1
            if chance.randrange(20) == 0:
                yield Sleep(chance.random() * 5)

    for _ in range(20):
        world.spawn(use(random.Random(chance.random())))
    for _ in range(100):
        world.fake.answer(
            "db",
            "reads",
            chance.choice(
                [
                    FakeAnswer.refuse(0.001 + chance.random() * 0.3),
                    FakeAnswer.refuse(),
                    FakeAnswer.grant_after(chance.random() / 10),
                    FakeAnswer.rate(100.0, 20),
                    FakeAnswer.NO_NODE,
                    FakeAnswer.GRANT,
                ]
            ),
        )
        world.run(chance.random())
        assert used + stock._tokens <= world.granted and stock._tokens >= 0
        assert stock._waiting == sum(one.tokens for one in stock._line)
    assert served and told and not stock._line


@pytest.mark.parametrize("rate, burst", [(1000, 100), (1000, 60_000), (20, 2), (3, 100)])
@pytest.mark.parametrize("with_level", [False, True])
def test_demand_beyond_the_rate_uses_all_of_it(rate, burst, with_level):
    world = World()
    world.fake.answer("db", "reads", FakeAnswer.rate(rate, burst))
    if with_level:
        say_levels(world, rate, burst)
    stock = world.stock()
    used = use_all(world, stock, 50)
    # What the bucket held at first is used by then.
    world.run(5.0)
    while used() < burst:
        world.run(1.0)
    before = used()
    world.run(20.0)
    assert 0.98 <= (used() - before) / (20 * rate) <= 1.02


def test_demand_beyond_the_rate_takes_few_calls():
    """Not a call for each token, even if all callers wait for the next one."""
    world = World()
    world.fake.answer("db", "reads", FakeAnswer.rate(500.0, 50))
    say_levels(world, 500.0, 50)
    stock = world.stock()
    calls, ask = 0, world.fake.ask

    def asked(message: Any, deadline: float) -> Any:
        nonlocal calls
        calls += 1
        # A round trip, in which a token may come.
        yield Sleep(0.001)
        return (yield from ask(message, deadline))

    world.fake.ask = asked  # type: ignore[method-assign]
    used = use_all(world, stock, 20)
    world.run(5.0)
    before, calls = used(), 0
    world.run(10.0)
    assert 0.98 <= (used() - before) / 5000 <= 1.02
    assert calls <= 2000


def use_all(world: World, stock: Stock, users: int) -> Callable[[], int]:
    """Has so many take one token after the other. The result says how many they have used."""
    used = 0

    def use() -> Plan:
        nonlocal used
        while True:
            yield from world.acquire(stock, 1, 60.0)
            used += 1

    for _ in range(users):
        world.spawn(use())
    return lambda: used


def say_levels(world: World, rate: float, burst: int) -> None:
    """Has the fake say where its bucket stands, as nodes do."""
    ask = world.fake.ask
    tokens, counted_at = float(burst), 0.0

    def asked(message: Any, deadline: float) -> Any:
        nonlocal tokens, counted_at
        answer = yield from ask(message, deadline)
        tokens = min(tokens + (world.time.now - counted_at) * rate, float(burst))
        tokens, counted_at = tokens - answer.tokens_granted, world.time.now
        answer.tokens_available, answer.fill_rate, answer.size = tokens, rate, burst
        return answer

    world.fake.ask = asked  # type: ignore[method-assign]


def test_who_comes_first_is_served_first():
    world = World(FakeAnswer.rate(10.0, 10))
    stock = world.stock()
    assert world.outcome(stock, 10, 1.0) is None
    served: List[int] = []

    def use(number: int, tokens: int) -> Plan:
        yield from world.acquire(stock, tokens, 60.0)
        served.append(number)

    for number, tokens in enumerate((5, 1, 8, 1)):
        world.spawn(use(number, tokens))
    world.run(0.001)
    assert not stock.try_acquire(1)
    world.run(10.0)
    assert served == [0, 1, 2, 3]


def test_who_gives_up_leaves_the_tokens_to_the_next():
    world = World(FakeAnswer.refuse(0.5))
    stock = world.stock()
    plan = world.acquire(stock, 5, 60.0)
    next(plan)
    outcomes: List[str] = []

    def use() -> Plan:
        yield from world.acquire(stock, 3, 60.0)
        outcomes.append("used")

    world.spawn(use())
    world.run(0.1)
    stock.add(4)
    world.run(0.1)
    assert not outcomes
    plan.close()
    world.run(0.1)
    assert outcomes == ["used"]
    # One who is served in the moment in which it gives up, too.
    plan = world.acquire(stock, 5, 60.0)
    next(plan)
    world.spawn(use())
    world.run(0.0)
    stock.add(4)
    assert stock._tokens == 0
    plan.close()
    world.run(0.1)
    assert outcomes == ["used", "used"]
    assert stock._used == 6


def test_who_waits_is_told_why_there_are_no_tokens():
    world = World(FakeAnswer.NO_NODE)
    stock = world.stock()
    error = world.outcome(stock, 1, 60.0)
    assert isinstance(error, NoDecisionError)
    # As soon as that is known.
    assert world.time.now < 1.0
    world.fake.answer("db", "reads", FakeAnswer.NO_BUCKET)
    error = world.outcome(stock, 1, 60.0)
    assert isinstance(error, RefusedError) and error.reason is Reason.NO_BUCKET
    world.fake.answer("db", "reads", FakeAnswer.refuse(100.0))
    begin = world.time.now
    error = world.outcome(stock, 1, 5.0)
    assert isinstance(error, RefusedError)
    assert (error.reason, error.retry_after) == (Reason.LIMIT, 100.0)
    assert 5.0 <= world.time.now - begin <= 5.1
    world.fake.answer("db", "reads", FakeAnswer.GRANT)
    assert world.outcome(stock, 1, 5.0) is None
    # The fallback has a rate for all.
    world = World(FakeAnswer.NO_NODE, fallback=Fallback.rate(1.0, 5))
    stock = world.stock()
    assert world.outcome(stock, 5, 2.0) is None
    assert isinstance(world.outcome(stock, 5, 2.0), RefusedError)


def test_each_who_waits_is_told():
    world = World(FakeAnswer.NO_NODE)
    stock = world.stock()
    errors: List[Any] = []

    def use() -> Plan:
        try:
            yield from world.acquire(stock, 1, 60.0)
        except NoDecisionError as error:
            errors.append(error)

    for _ in range(5):
        world.spawn(use())
    world.run(0.5)
    assert len(set(map(id, errors))) == 5
    for _ in range(5):
        world.spawn(use())
    world.run(0.001)
    world.desk.close()
    with pytest.raises(ClosedError):
        next(world.acquire(stock, 1, 1.0))
    assert not stock.try_acquire(1)


def test_what_is_too_much_is_asked_for_in_parts():
    world = World(FakeAnswer.rate(1000.0, 8))
    stock = world.stock()
    assert world.outcome(stock, 100, 60.0) is None
    assert asked(world)[:5] == [100, 50, 25, 12, 6]
    assert max(asked(world)[5:]) <= 6
    # After a minute, it may be otherwise.
    world.fake.answer("db", "reads", FakeAnswer.GRANT)
    world.run(60.0)
    assert world.outcome(stock, 100, 60.0) is None
    assert asked(world)[-1] == 100


def test_there_are_pauses_while_there_is_no_answer():
    world = World(FakeAnswer.NO_NODE)
    stock = world.stock()

    def use() -> Plan:
        while True:
            stock.try_acquire(1)
            yield Sleep(0.01)

    world.spawn(use())
    world.run(20.0)
    assert 35 <= len(asked(world)) <= 41
    world.fake.answer("db", "reads", FakeAnswer.GRANT)
    world.run(1.5)
    assert stock.try_acquire(1)


def test_nothing_is_asked_for_while_nobody_uses_it():
    world = World()
    stock = world.stock()
    world.run(60.0)
    assert not asked(world)
    assert world.outcome(stock, 3, 1.0) is None
    world.run(60.0)
    before = len(asked(world))
    world.run(600.0)
    assert len(asked(world)) == before and stock._tokens == 0
    world.desk.remove(stock)
    world.run(1.0)
    assert not world.desk.is_kept


def test_no_more_is_asked_for_than_comes_soon():
    supply = Supply(1.0, 0.0)
    assert supply.at_once(10_000, 0.0) == 10_000
    supply.granted(Granted(5, 0.0, False, False, DecidedBy.NODE, level(20.0, 100.0, 1e9)), 1.0)
    assert supply.at_once(10_000, 1.0) == 20
    assert supply.at_once(10_000, 2.0) == 120
    assert supply.at_once(7, 2.0) == 7
    # A debt: it lends.
    supply.granted(Granted(5, 0.05, False, False, DecidedBy.NODE, level(-200.0, 100.0, 1e9)), 1.0)
    assert supply.at_once(10_000, 1.0) == 1 and supply.paused_until == 1.05
    debt = Refused(Reason.LIMIT, 3.0, DecidedBy.NODE, 0.4, level(-40.0, 100.0, 1e9))
    assert supply.refused(50, debt, 2.0)
    assert supply.paused_until == 2.5
    # Others keep it in debt: in parts, and with the bucket's own wait.
    assert supply.at_once(10_000, 2.5) == 10
    assert supply.request(Request("db", "reads"), 10).max_wait is None
    # What is left of a window is to be had at once, but not what is kept in reserve.
    left = Refused(Reason.LIMIT, 0.8, DecidedBy.NODE, 0.0, level(7.0, 100.0, 100.0))
    assert supply.refused(50, left, 3.0)
    assert supply.paused_until == 3.0 and supply.at_once(10_000, 3.0) == 7
    assert supply.refused(7, left, 3.0)
    assert supply.paused_until > 3.0 and supply.at_once(10_000, 3.0) == 3
    # One has no part, however slowly it comes.
    slow = level(0.0, 0.1, 10.0)
    assert supply.refused(1, Refused(Reason.LIMIT, 0.4, DecidedBy.NODE, 0.0, slow), 3.5)
    assert supply.paused_until == 3.9
    # The next token is not asked for by itself, but before the bucket is full, of which a part may be
    # kept in reserve.
    for size, available, pause in ((1e9, 0.0, 0.02), (5.0, 0.0, 0.005), (50.0, 40.0, 0.002)):
        stands = level(available, 500.0, size)
        assert supply.refused(1, Refused(Reason.LIMIT, 0.002, DecidedBy.NODE, 0.0, stands), 4.0)
        assert supply.paused_until == 4.0 + pause, size
    # Where no node says how fast tokens come.
    assert supply.refused(50, Refused(Reason.LIMIT, 0.5, DecidedBy.NODE), 4.0)
    assert supply.paused_until == 4.1 and supply.at_once(10_000, 4.5) == 50
    assert supply.request(Request("db", "reads"), 10).max_wait == 0.1
    assert not supply.refused(1, Refused(Reason.LIMIT, None, DecidedBy.NODE), 5.0)
    assert not supply.refused(9, Refused(Reason.UNAVAILABLE, 5.0, DecidedBy.NODE), 5.0)


def test_levels_that_make_no_sense_are_not_known():
    for available, rate in ((math.nan, 1.0), (1.0, math.nan), (1.0, 0.0), (math.inf, 1.0)):
        assert level(available, rate, 1e9) is None
    assert level(-5.0, 2.0, 1e9) == (-5.0, 2.0, 1e9)
