"""Charges of a fake, mostly with fake time."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import threading
from typing import Any, Callable, List

import pytest

from tollgate_client import (
    Client,
    ClosedError,
    Fake,
    FakeAnswer,
    FakeTime,
    InvalidRequestError,
    NoAnswer,
    NoDecisionError,
    aio,
)
from tollgate_client._charges import desk, keeper
from tollgate_client._decide.decider import Decider

from ..harness.waiting import eventually


@pytest.fixture
def fake_time() -> FakeTime:
    return FakeTime()


@pytest.fixture
def fake(fake_time: FakeTime) -> Fake:
    return Fake(fake_time=fake_time)


@pytest.fixture
def later(fake_time: FakeTime) -> Callable[[Any, float], None]:
    """Lets time pass, and has the keeper look."""

    def later(client: Any, seconds: float) -> None:
        end = fake_time.now + seconds
        while fake_time.now < end:
            fake_time.advance(0.05)
            client.charge("db", "nothing", 0)

    return later


def test_charges_are_put_together(connect, fake, later):
    client = connect(fake)
    for _ in range(100):
        client.charge("db", "rows", 3)
        client.charge("db", "bytes", 0)
    client.charge("web", "rows", 1)
    assert not fake.asked("db", "rows")
    later(client, 1.0)
    assert fake.asked("db", "rows") == [300]
    assert fake.asked("web", "rows") == [1]
    assert not fake.asked("db", "bytes")
    client.charge("db", "rows", 7)
    later(client, 1.0)
    assert fake.asked("db", "rows") == [300, 7]


def test_what_is_too_much_is_charged_in_parts(connect, fake, later):
    client = connect(fake)
    # More than eight are never granted at once.
    fake.answer("db", "rows", FakeAnswer.rate(10.0, 8))
    client.charge("db", "rows", 100)
    later(client, 0.2)
    assert fake.asked("db", "rows")[:5] == [100, 50, 25, 12, 6]
    later(client, 20.0)
    # Those that were granted are as many as were charged.
    before = len(fake.asked("db", "rows"))
    fake.answer("db", "rows", FakeAnswer.GRANT)
    later(client, 2.0)
    assert len(fake.asked("db", "rows")) == before


def test_what_is_refused_is_charged_later(connect, fake, later):
    client = connect(fake)
    for answer in (FakeAnswer.refuse(0.5), FakeAnswer.refuse(60.0), FakeAnswer.NO_NODE):
        fake.answer("db", "rows", answer)
        client.charge("db", "rows", 5)
        later(client, 5.0)
        client.charge("db", "rows", 1)
        asked = fake.asked("db", "rows")
        # After half a second, and then after a longer pause, if not told to ask earlier.
        assert asked[-4:] == [5] * 4
        fake.answer("db", "rows", FakeAnswer.GRANT)
        later(client, 5.0)
        assert fake.asked("db", "rows")[len(asked) :] == [6]
        later(client, 5.0)
        assert fake.asked("db", "rows")[len(asked) :] == [6]


def test_what_nobody_takes_for_a_minute_is_dropped(connect, fake, later, caplog):
    client = connect(fake)
    fake.answer("db", "rows", FakeAnswer.refuse(100.0))
    for _ in range(100):
        client.charge("db", "rows", 5)
        later(client, 1.0)
    assert "db:rows can't be charged: nothing could be taken for a minute" in caplog.messages[0]
    # What was charged in the first minute is gone.
    fake.answer("db", "rows", FakeAnswer.GRANT)
    later(client, 20.0)
    asked = fake.asked("db", "rows")
    assert asked[-1] < 300
    # Each refused request was made after a longer pause than the one before.
    assert len(asked) < 40


def test_what_was_tried_late_in_an_outage_is_not_dropped_with_the_first(fake, later):
    client = Client(fake)
    names = [f"r{at}" for at in range(300)]
    for name in names:
        fake.answer("db", name, FakeAnswer.NO_NODE)
        client.charge("db", name, 1)
    # One in each round, in turn.
    later(client, 10.0)
    asked = [len(fake.asked("db", name)) for name in names]
    assert set(asked) == {0, 1}
    late = {name for name, times in zip(names, asked) if times == 0}
    later(client, 55.0)
    # Then they are refused once more.
    for name in names:
        fake.answer("db", name, FakeAnswer.refuse(0.3))
    later(client, 0.5)
    before = {name: len(fake.asked("db", name)) for name in names}
    for name in names:
        fake.answer("db", name, FakeAnswer.GRANT)
    later(client, 40.0)
    taken = {name for name in names if len(fake.asked("db", name)) > before[name]}
    assert late <= taken and len(taken) < 300
    client.close()


def test_what_is_taken_in_part_is_not_dropped(connect, fake, later, caplog):
    client = connect(fake)
    # One token in ten seconds.
    fake.answer("db", "rows", FakeAnswer.rate(0.1, 1))
    client.charge("db", "rows", 20)
    later(client, 300.0)
    assert not caplog.messages
    assert fake.asked("db", "rows")[-1] == 1
    before = len(fake.asked("db", "rows"))
    later(client, 100.0)
    assert len(fake.asked("db", "rows")) == before


@pytest.mark.parametrize(
    "reason, calls",
    [(NoAnswer.TIMEOUT, 1), (NoAnswer.FAILED, 1), (NoAnswer.FORBIDDEN, 1), (NoAnswer.OVERLOADED, 4)],
)
def test_what_may_have_been_taken_is_not_taken_again(reason, calls, fake, later, monkeypatch):
    asked: List[int] = []

    def charge(self: Decider, request: Any, deadline: float) -> Any:
        asked.append(request.tokens)
        raise NoDecisionError(reason, "no answer")
        yield

    monkeypatch.setattr(Decider, "charge", charge)
    client = fake.client()
    client.charge("db", "rows", 5)
    later(client, 5.0)
    assert asked == [5] * calls
    client.charge("db", "rows", 6)
    later(client, 5.0)
    assert asked[-1] == (6 if calls == 1 else 11)


def test_what_can_never_be_charged_is_dropped(connect, fake, later, caplog):
    client = connect(fake)
    for answer in (FakeAnswer.NO_BUCKET, FakeAnswer.INVALID, FakeAnswer.refuse()):
        fake.answer("db", "rows", answer)
        client.charge("db", "rows", 5)
        later(client, 2.0)
        before = len(fake.asked("db", "rows"))
        fake.answer("db", "rows", FakeAnswer.GRANT)
        later(client, 2.0)
        assert len(fake.asked("db", "rows")) == before
    assert len(caplog.messages) == 3
    assert "db:rows can't be charged: there is no such bucket" in caplog.messages[0]
    # One message a second.
    caplog.clear()
    for at in range(10):
        fake.answer("db", f"r{at}", FakeAnswer.NO_BUCKET)
        client.charge("db", f"r{at}", 5)
    later(client, 0.5)
    assert len(caplog.messages) == 1


def test_charges_of_too_many_buckets_are_dropped(fake, caplog, monkeypatch):
    monkeypatch.setattr(desk, "MOST_BUCKETS", 3)
    client = Client(fake)
    for at in range(5):
        client.charge("db", f"r{at}", 1)
    client.charge("db", "r0", 1)
    client.close()
    assert [fake.asked("db", f"r{at}") for at in range(5)] == [[2], [1], [1], [], []]
    assert len(caplog.messages) == 1 and "too many buckets" in caplog.messages[0]


def test_what_is_charged_during_a_call_is_taken_later(fake, later):
    client = Client(fake)
    ask = fake.ask

    def charge_more(message: Any, deadline: float) -> Any:
        fake.ask = ask  # type: ignore[method-assign]
        client.charge("db", "rows", 7)
        return ask(message, deadline)

    fake.ask = charge_more  # type: ignore[method-assign]
    client.charge("db", "rows", 5)
    later(client, 1.0)
    assert fake.asked("db", "rows") == [5, 7]


def test_without_an_answer_the_others_are_tried_in_the_next_round(fake, later):
    client = Client(fake)
    fake.answer("db", "first", FakeAnswer.NO_NODE)
    client.charge("db", "first", 1)
    client.charge("db", "second", 2)
    later(client, 0.12)
    assert (fake.asked("db", "first"), fake.asked("db", "second")) == ([1], [])
    later(client, 0.2)
    assert (fake.asked("db", "first"), fake.asked("db", "second")) == ([1], [2])


@pytest.mark.parametrize("seed", range(20))
def test_all_is_charged_once_over_random_histories(seed, fake, later):
    chance = random.Random(seed)
    client = Client(fake)
    charged = taken = 0
    ask = fake.ask

    def count(message: Any, deadline: float) -> Any:
        nonlocal taken
        answer = yield from ask(message, deadline)
        taken += answer.tokens_granted
        return answer

    fake.ask = count  # type: ignore[method-assign]
    for _ in range(100):
        fake.answer(
            "db",
            "rows",
            chance.choice(
                [
                    FakeAnswer.GRANT,
                    FakeAnswer.refuse(chance.random() * 2),
                    FakeAnswer.rate(50.0, chance.randrange(1, 100)),
                    FakeAnswer.NO_NODE,
                ]
            ),
        )
        for _ in range(chance.randrange(4)):
            charged += (tokens := chance.randrange(50))
            client.charge("db", "rows", tokens)
        later(client, chance.random())
        assert taken <= charged
    fake.answer("db", "rows", FakeAnswer.GRANT)
    # Where one token was the most at once, twenty a round.
    later(client, 10.0 + charged / 200 / 0.75)
    assert taken == charged


def test_mistakes_are_told_at_once(connect, fake):
    client = connect(fake)
    with pytest.raises(InvalidRequestError):
        client.charge("db", "rows", -1)
    with pytest.raises(InvalidRequestError):
        client.charge("db", "\ud800", 1)
    for tokens in (1.5, None):
        with pytest.raises(TypeError):
            client.charge("db", "rows", tokens)
    with pytest.raises(TypeError):
        client.charge("db", 5, 1)
    # As many in one call as a request can have.
    client.charge("db", "rows", 2**64)
    client.end()
    assert fake.asked("db", "rows") == [2**63 - 1, 2**63 - 1, 2]


@pytest.mark.parametrize("with_fake_time", [False, True])
def test_what_is_open_is_charged_when_the_client_is_closed(connect, with_fake_time, fake_time):
    fake = Fake(fake_time=fake_time if with_fake_time else None)
    client = connect(fake)
    # It is refused at first.
    fake.answer("db", "rows", FakeAnswer.refuse(60.0))
    client.charge("db", "rows", 5)
    eventually("it is asked for", lambda: with_fake_time or fake.asked("db", "rows") == [5])
    fake.answer("db", "rows", FakeAnswer.GRANT)
    client.charge("db", "rows", 6)
    client.end()
    assert fake.asked("db", "rows")[-1] == 11
    with pytest.raises(ClosedError):
        client.charge("db", "rows", 1)
    client.end()
    name = "tollgate-client-charges"
    eventually("no thread", lambda: all(one.name != name for one in threading.enumerate()))


def test_what_is_open_is_charged_when_the_client_is_collected():
    fake = Fake()
    client = Client(fake)
    client.charge("db", "rows", 5)
    del client
    gc.collect()
    eventually("it is charged", lambda: fake.asked("db", "rows") == [5])

    async def charge() -> None:
        client = aio.Client(fake)
        client.charge("db", "rows", 6)
        await asyncio.sleep(0)
        del client
        gc.collect()
        while fake.asked("db", "rows") != [5, 6]:
            await asyncio.sleep(0.001)
        while len(asyncio.all_tasks()) > 1:
            await asyncio.sleep(0.001)

    asyncio.run(charge())


def test_closing_takes_no_longer_than_it_may(fake, fake_time):
    """Although each answer takes its time."""
    deadlines: List[float] = []

    def slow(message: Any, deadline: float) -> Any:
        deadlines.append(deadline)
        fake_time.advance(deadline - fake_time.now)
        raise NoDecisionError(NoAnswer.TIMEOUT)
        yield

    fake.ask = slow  # type: ignore[method-assign]
    client = Client(fake)
    for at in range(10):
        client.charge("db", f"r{at}", 1)
    begin = fake_time.now
    client.close()
    assert fake_time.now <= begin + keeper.LONGEST_CLOSE + 1e-9


def test_a_keeper_that_was_cancelled_is_replaced():
    """What was charged before is not lost."""
    fake = Fake()

    async def charge() -> None:
        client = aio.Client(fake)
        client.charge("db", "rows", 5)
        await asyncio.sleep(0)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.sleep(0)
        client.charge("db", "rows", 6)
        await client.close()

    asyncio.run(charge())
    assert fake.asked("db", "rows") == [11]


def test_threads_charge_all():
    fake = Fake()
    client = Client(fake)

    def charge() -> None:
        for _ in range(1000):
            client.charge("db", "rows", 1)

    threads = [threading.Thread(target=charge) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    client.close()
    assert sum(fake.asked("db", "rows")) == 8000


def test_what_is_charged_is_counted(fake):
    from prometheus_client import REGISTRY

    def counted() -> float:
        return REGISTRY.get_sample_value("tollgate_client_charged_tokens_total") or 0.0

    before = counted()
    client = Client(fake)
    client.charge("db", "rows", 5)
    client.close()
    assert counted() == before + 5


def test_the_application_is_not_told_and_no_fallback_decides(fake, later, caplog):
    from tollgate_client import Fallback

    told: List[Any] = []
    client = Client(fake, fallback=Fallback.ALLOW, on_refused=lambda *one: told.append(one))
    fake.answer("db", "rows", FakeAnswer.refuse(0.1))
    client.charge("db", "rows", 5)
    later(client, 1.0)
    fake.answer("db", "rows", FakeAnswer.NO_BUCKET)
    with caplog.at_level(logging.WARNING):
        later(client, 1.0)
    assert not told and "can't be charged" in caplog.text
