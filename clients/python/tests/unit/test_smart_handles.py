"""Smart buckets of both clients, with a fake."""

from __future__ import annotations

import asyncio
import gc
import math
import threading
import time
import traceback
from typing import List

import pytest

from tollgate_client import (
    Client,
    ClosedError,
    Fake,
    FakeAnswer,
    FakeTime,
    InvalidRequestError,
    NoDecisionError,
    RefusedError,
    aio,
)

from ..harness.waiting import LIMIT, eventually


@pytest.fixture
def fake_time() -> FakeTime:
    return FakeTime()


@pytest.fixture
def fake(fake_time: FakeTime) -> Fake:
    return Fake(fake_time=fake_time)


def ours() -> List[threading.Thread]:
    name = "tollgate-client-smart-buckets"
    return [one for one in threading.enumerate() if one.name == name]


def test_a_fake_needs_no_node_and_no_time(connect, fake, fake_time):
    fake.answer("db", "reads", FakeAnswer.rate(10.0, 10))
    bucket = connect(fake).smart_bucket("db", "reads")
    # The first use waits for a node.
    assert not bucket.try_acquire()
    assert bucket.try_acquire()
    for _ in range(100):
        bucket.acquire(max_wait=5.0)
    assert 8.9 <= fake_time.now <= 10.5
    begin = fake_time.now
    with pytest.raises(RefusedError) as error:
        bucket.acquire(100, max_wait=2.0)
    assert fake_time.now - begin == pytest.approx(2.0)
    assert error.value.retry_after is not None
    assert not ours()


def test_mistakes_are_told_at_once(connect, fake):
    client = connect(fake)
    bucket = client.smart_bucket("db", "reads")
    for wrong in (-1, -(2**70)):
        with pytest.raises(InvalidRequestError):
            bucket.try_acquire(wrong)
        with pytest.raises(InvalidRequestError):
            bucket.acquire(wrong, max_wait=1.0)
    for odd in (1.5, math.nan, math.inf):
        with pytest.raises(TypeError):
            bucket.try_acquire(odd)
        with pytest.raises(TypeError):
            bucket.acquire(odd, max_wait=1.0)
    for wait in (-1.0, math.nan):
        with pytest.raises(InvalidRequestError):
            bucket.acquire(max_wait=wait)
    for ahead in (-1.0, math.nan, math.inf):
        with pytest.raises(InvalidRequestError):
            client.smart_bucket("db", "reads", ahead=ahead)
    with pytest.raises(InvalidRequestError):
        client.smart_bucket("db", "\ud800")
    # 0 tokens are one.
    bucket.acquire(0, max_wait=1.0)
    bucket.acquire(max_wait=math.inf)


def test_nothing_is_used_after_it_is_closed(connect, fake):
    client = connect(fake)
    one, other = (client.smart_bucket("db", "reads") for _ in range(2))
    for bucket in (one, other):
        bucket.acquire(max_wait=1.0)
    one.close()
    one.close()
    assert not one.try_acquire()
    with pytest.raises(ClosedError):
        one.acquire(max_wait=1.0)
    other.acquire(max_wait=1.0)
    client.end()
    assert not other.try_acquire()
    with pytest.raises(ClosedError):
        other.acquire(max_wait=1.0)
    with pytest.raises(ClosedError):
        client.smart_bucket("db", "reads")


def test_what_is_not_critical_says_so(connect):
    asked: List[int] = []

    class Critical(Fake):
        def ask(self, message, deadline):
            asked.append(message.criticality)
            return (yield from super().ask(message, deadline))

    client = connect(Critical(fake_time=FakeTime()))
    for critical in (True, False):
        client.smart_bucket("db", "reads", critical=critical).acquire(max_wait=1.0)
    assert asked[0] != asked[-1]


def test_threads_use_no_more_than_was_granted_and_are_told(connect):
    fake = Fake(FakeAnswer.rate(500.0, 50))
    bucket = Client(fake).smart_bucket("db", "reads")
    used: List[int] = []
    begin = time.monotonic()

    def use() -> None:
        for _ in range(50):
            bucket.acquire(max_wait=LIMIT)
            used.append(1)

    threads = [threading.Thread(target=use) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(used) == 500 and time.monotonic() - begin >= 0.89
    assert ours() and all(one.daemon for one in ours())
    # Whoever waits is told.
    fake.answer("db", "reads", FakeAnswer.NO_NODE)
    errors: List[Exception] = []

    def wait() -> None:
        try:
            bucket.acquire(100_000, max_wait=LIMIT)
        except NoDecisionError as error:
            errors.append(error)

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 3 and all(traceback.format_exception(type(e), e, None) for e in errors)
    bucket.close()
    eventually("the thread ends", lambda: not ours())


def test_who_waits_is_told_that_it_is_closed():
    bucket = Client(Fake(FakeAnswer.refuse(60.0))).smart_bucket("db", "reads")
    assert repr(bucket) == "<SmartBucket of db:reads>"
    outcomes: List[str] = []

    def wait() -> None:
        try:
            bucket.acquire(max_wait=LIMIT)
        except ClosedError:
            outcomes.append("closed")

    thread = threading.Thread(target=wait)
    thread.start()
    eventually("it waits", lambda: bool(bucket._stock._line))
    bucket.close()
    thread.join()
    assert outcomes == ["closed"]


def test_a_context_manager_ends_with_its_block():
    client = Client(Fake())
    with client.smart_bucket("db", "reads") as bucket:
        bucket.acquire(max_wait=LIMIT)
    with pytest.raises(ClosedError):
        bucket.acquire(max_wait=LIMIT)
    eventually("the thread ends", lambda: not ours())
    # The next one starts another.
    with client.smart_bucket("db", "reads") as bucket:
        bucket.acquire(max_wait=LIMIT)
    client.close()


def test_one_that_is_collected_ends():
    client = Client(Fake())
    client.smart_bucket("db", "reads").acquire(max_wait=LIMIT)
    gc.collect()
    eventually("the thread ends", lambda: not ours())
    # With its client, too.
    bucket = Client(Fake()).smart_bucket("db", "reads")
    gc.collect()
    bucket.acquire(max_wait=LIMIT)
    del bucket
    gc.collect()
    eventually("the thread ends", lambda: not ours())


def test_tasks_use_no_more_than_was_granted_and_a_cancelled_one_uses_nothing():
    fake = Fake(FakeAnswer.rate(500.0, 50))

    async def use() -> None:
        async with aio.Client(fake) as client:
            async with client.smart_bucket("db", "reads") as bucket:
                begin = time.monotonic()

                async def use_often() -> None:
                    for _ in range(50):
                        await bucket.acquire(max_wait=LIMIT)

                await asyncio.gather(*(use_often() for _ in range(10)))
                assert time.monotonic() - begin >= 0.89
                fake.answer("db", "reads", FakeAnswer.refuse(60.0))
                tasks = [
                    asyncio.ensure_future(bucket.acquire(10_000, max_wait=LIMIT)) for _ in range(3)
                ]
                await asyncio.sleep(0)
                tasks[0].cancel()
                fake.answer("db", "reads", FakeAnswer.GRANT)
                results = await asyncio.gather(*tasks, return_exceptions=True)
                assert isinstance(results[0], asyncio.CancelledError)
                assert results[1:] == [None, None]
            with pytest.raises(ClosedError):
                await bucket.acquire(max_wait=1.0)
        while len(asyncio.all_tasks()) > 1:
            await asyncio.sleep(0.001)

    asyncio.run(use())


def test_in_another_event_loop_it_is_closed():
    client = aio.Client(Fake())
    buckets: List[aio.SmartBucket] = []

    async def use() -> None:
        client.charge("db", "rows", 1)
        for old in buckets:
            with pytest.raises(ClosedError):
                await old.acquire(max_wait=1.0)
        bucket = client.smart_bucket("db", "reads")
        await bucket.acquire(max_wait=LIMIT)
        buckets.append(bucket)

    for _ in range(3):
        asyncio.run(use())
    asyncio.run(client.close())
    del buckets[:]
    gc.collect()
