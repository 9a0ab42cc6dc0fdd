"""Rates, gauges and capacities of a fake, mostly with fake time."""

from __future__ import annotations

import asyncio
import math
import random
import threading
import time
from typing import Any, List

import pytest

from tollgate_client import (
    AlreadyLeasedError,
    Client,
    ClosedError,
    Fake,
    FakeAnswer,
    FakeTime,
    InvalidRequestError,
    LeaseTimeoutError,
    Mode,
)

from ..harness.waiting import LIMIT, eventually


@pytest.fixture
def fake_time() -> FakeTime:
    return FakeTime()


@pytest.fixture
def fake(fake_time: FakeTime) -> Fake:
    return Fake(fake_time=fake_time)


def test_a_fake_leases_without_a_node(connect, fake, fake_time):
    fake.capacity("db", 5.0)
    rate = connect(fake).lease("rate_limiter", "db")
    begin = time.monotonic()
    for _ in range(100):
        rate.wait()
    # At five a second, after a second or two of finding out how much is wanted.
    assert 19.0 <= fake_time.now <= 30.0
    assert time.monotonic() - begin < LIMIT


def test_the_first_call_does_not_wait_for_the_next_refresh(connect, fake, fake_time):
    rate = connect(fake).lease("rate_limiter", "db")
    # The first answer was for no demand at all.
    assert rate.capacity == 0.0
    fake_time.advance(0.5)
    rate.wait()
    assert fake_time.now <= 0.62


def test_one_caller_after_the_other_gets_a_rate_that_grows_to_the_demand(fake, fake_time):
    rate = Client(fake).rate_limiter("db")
    used: List[float] = []
    while fake_time.now < 21.0:
        rate.wait()
        used.append(fake_time.now)
        # The work of the caller, who would come a thousand times without a limit.
        fake_time.advance(0.001)
    assert sum(at >= 20.0 for at in used) >= 400
    # What is not demanded any more is given back, over ten seconds.
    before = rate.capacity
    fake_time.advance(5.0)
    assert 0.0 < rate.capacity < before
    fake_time.advance(10.0)
    assert rate.capacity == 0.0


def test_what_is_not_demanded_is_given_back(connect, fake, fake_time):
    client = connect(fake)
    rate, gauge = client.lease("rate_limiter", "db"), client.lease("gauge", "places")
    places = [gauge.acquire() for _ in range(5)]
    for _ in range(100):
        rate.wait()
    assert rate.capacity >= 10.0 and gauge.capacity >= 5.0
    for place in places:
        place.release()
        place.release()
    fake_time.advance(15.0)
    assert (rate.capacity, gauge.capacity) == (0.0, 0.0)


def test_a_debt_is_paid_at_the_capacity_that_was_held(connect, fake, fake_time):
    fake.capacity("db", 10.0)
    rate = connect(fake).lease("rate_limiter", "db", wants=1000.0)
    rate.wait(101)
    fake_time.advance(5.0)
    assert rate.capacity == 10.0
    # About half of the debt is left, for which the larger capacity takes 50 ms.
    fake.capacity("db", 1000.0)
    while rate.capacity < 1000.0:
        fake_time.advance(0.001)
    begin = fake_time.now
    assert not rate.try_use()
    rate.wait()
    assert 0.03 <= fake_time.now - begin <= 0.06


@pytest.mark.parametrize("seed", range(8))
def test_a_rate_uses_no_more_than_was_leased(seed, fake, fake_time):
    """However it is called, and however the capacity changes."""
    chance = random.Random(seed)
    fake.capacity("db", 5.0)
    rate = Client(fake).rate_limiter("db", wants=chance.choice([None, 30.0]))
    used, largest, most = 0, 0, 5.0
    for _ in range(300):
        step, n = chance.randrange(5), chance.randrange(1, 4)
        if step == 0:
            capacity = chance.choice([0.0, 1.0, 5.0, 20.0])
            fake.capacity("db", capacity)
            most = max(most, capacity)
        elif step == 1:
            fake_time.advance(chance.random())
        elif step == 2:
            used += n * rate.try_use(n)
        else:
            before = fake_time.now
            try:
                rate.wait(n, timeout=1.0)
                used += n
            except LeaseTimeoutError:
                pass
            assert fake_time.now - before <= 1.001
        assert used <= most * fake_time.now + max(most / 10, 1.0) + 3


def test_timeouts_use_nothing(connect, fake, fake_time):
    fake.capacity("db", 1.0)
    fake.capacity("places", 1.0)
    client = connect(fake)
    rate = client.lease("rate_limiter", "db", wants=1.0)
    gauge = client.lease("gauge", "places", wants=5.0)
    rate.wait(3)
    for _ in range(2):
        begin = fake_time.now
        with pytest.raises(LeaseTimeoutError) as error:
            rate.wait(timeout=0.5)
        assert error.value.resource == "db" and fake_time.now - begin == pytest.approx(0.5)
    rate.wait(timeout=2.01)
    place = gauge.acquire(timeout=0.0)
    with pytest.raises(TimeoutError):
        gauge.acquire(timeout=3.0)
    place.release()
    gauge.acquire(timeout=0.0)
    with pytest.raises(LeaseTimeoutError):
        client.lease("capacity", "other").changed(timeout=1.0)
    for n in (-1, float("nan")):
        with pytest.raises(InvalidRequestError):
            rate.wait(n)
        with pytest.raises(InvalidRequestError):
            rate.try_use(n)


def test_a_capacity_tells_of_its_changes(connect, fake, fake_time):
    fake.capacity("db", 5.0)
    client = connect(fake)
    db = client.lease("capacity", "db", wants=10.0, mode=Mode.OPTIMISTIC)
    assert db.changed() == 5.0
    fake.capacity("db", 7.0)
    assert db.changed(timeout=2.0) == 7.0
    db.set_wants(3.0)
    assert db.changed(timeout=2.0) == 3.0 == db.get()
    assert client.lease("capacity", "nothing").get() == 0.0


def test_the_same_wants_are_not_asked_for_again(connect, fake, fake_time, monkeypatch):
    calls: List[Any] = []
    get = fake.get_capacity
    monkeypatch.setattr(fake, "get_capacity", lambda *one: calls.append(one) or get(*one))
    db = connect(fake).lease("capacity", "db", wants=5.0)
    for _ in range(500):
        fake_time.advance(0.01)
        db.set_wants(5.0)
    # At the fake's interval of a second, less a tenth.
    assert 5 <= len(calls) <= 6
    db.set_wants(6.0)
    fake_time.advance(0.1)
    assert db.get() == 6.0


def test_no_handle_uses_a_lease_that_has_run_out_by_the_time_of_day(fake, fake_time):
    """As it does while the machine sleeps, and the other clock stands still."""
    client = Client(fake)
    rate = client.rate_limiter("rate", wants=100.0)
    gauge = client.gauge("gauge", wants=100.0)
    capacity = client.capacity("capacity", wants=100.0)
    fake_time.advance(0.1)
    assert rate.try_use() and gauge.try_acquire() is not None and capacity.changed() == 100.0
    for handle in (rate, gauge, capacity):
        handle._resource._epoch = lambda: math.inf
    assert not rate.try_use() and gauge.try_acquire() is None
    assert (rate.capacity, gauge.capacity, capacity.get()) == (0.0, 0.0, 0.0)
    assert capacity.changed() == 0.0
    for wait in (rate.wait, gauge.acquire):
        with pytest.raises(LeaseTimeoutError):
            wait(timeout=0.1)


def test_modes_before_the_first_answer(connect, fake_time):
    client = connect(Fake(FakeAnswer.NO_NODE, fake_time=fake_time))
    capacities = [
        client.lease("capacity", mode.value, wants=5.0, mode=mode).get() for mode in Mode
    ]
    assert capacities == [0.0, 0.0, 5.0]


def test_nothing_is_used_after_the_client_was_closed(connect, fake):
    client = connect(fake)
    rate = client.lease("rate_limiter", "rate", wants=100.0)
    gauge = client.lease("gauge", "gauge", wants=100.0)
    capacity = client.lease("capacity", "capacity", wants=100.0)
    with pytest.raises(AlreadyLeasedError, match="the client has a lease on rate already"):
        client.lease("gauge", "rate")
    rate.wait()
    place = gauge.acquire()
    assert capacity.changed() == 100.0
    client.end()
    assert not rate.try_use() and gauge.try_acquire() is None
    assert (rate.capacity, gauge.capacity, capacity.get()) == (0.0, 0.0, 0.0)
    for wait in (rate.wait, gauge.acquire, capacity.changed):
        with pytest.raises(ClosedError):
            wait()
    with pytest.raises(ClosedError):
        client.lease("gauge", "other")
    place.release()
    # A second time changes nothing.
    client.end()
    rate.close()
    rate.close()


def test_context_managers(fake):
    with Client(fake) as client:
        with client.gauge("places", wants=2.0) as gauge:
            with gauge.acquire() as place, gauge.acquire():
                assert gauge.try_acquire() is None
                assert gauge.resource == "places" and repr(gauge) == "<Gauge of places>"
            with gauge.acquire(), gauge.acquire():
                pass
        with client.gauge("places") as gauge, client.rate_limiter("rate", wants=1.0) as rate:
            rate.wait()
        assert not rate.try_use()
        place.release()

    async def use() -> None:
        async with fake.aio_client() as client:
            async with client.gauge("places", wants=2.0) as gauge:
                async with gauge.acquire():
                    place = await gauge.acquire()
                    assert gauge.try_acquire() is None
                    place.release()
                    with await gauge.acquire():
                        pass
            async with client.rate_limiter("rate", wants=1.0) as rate:
                await rate.wait()
            assert not rate.try_use()

    asyncio.run(use())


# In real time: callers that wait at the same time.


def waiters(work: Any, number: int, order: List[int]) -> List[threading.Thread]:
    """Threads that begin to wait one after the other."""
    threads = []
    for at in range(number):

        def run(at: int = at) -> None:
            work()
            order.append(at)

        threads.append(threading.Thread(target=run))
    return threads


def test_callers_are_served_in_the_order_of_their_calls():
    fake = Fake()
    fake.capacity("db", 50.0)
    with Client(fake) as client:
        rate = client.rate_limiter("db", wants=50.0)
        # Nothing is free for two seconds.
        rate.wait(100)
        order: List[int] = []
        threads = waiters(lambda: rate.wait(timeout=LIMIT), 10, order)
        usage = rate._rate._usage
        for at, thread in enumerate(threads):
            thread.start()
            eventually("it waits", lambda: usage.waiting + len(order) == at + 1)
            assert not rate.try_use(), "it does not overtake"
        for thread in threads:
            thread.join()
        assert order == list(range(10))


def test_tasks_are_served_in_the_order_of_their_calls_and_may_be_cancelled():
    fake = Fake()
    fake.capacity("db", 50.0)

    async def use() -> None:
        order: List[int] = []
        async with fake.aio_client() as client:
            rate = client.rate_limiter("db", wants=50.0)
            await rate.wait(20)

            async def wait(at: int) -> None:
                await rate.wait(100_000 if at == 3 else 1)
                order.append(at)

            tasks = [asyncio.ensure_future(wait(at)) for at in range(10)]
            await asyncio.sleep(0.01)
            # Those who give up use nothing, wherever they wait.
            for at in (0, 3, 9):
                tasks[at].cancel()
            await asyncio.wait(tasks)
            assert order == [1, 2, 4, 5, 6, 7, 8]
            assert not rate._rate._usage.waiting

    asyncio.run(use())


def test_who_waits_first_and_gives_up_leaves_the_place_to_the_next(connect):
    fake = Fake()
    fake.capacity("db", 1.0)
    gauge = connect(fake).lease("gauge", "db", wants=1.0)
    place = gauge.acquire(timeout=LIMIT)
    order: List[str] = []
    got: List[Any] = []

    def first() -> None:
        try:
            gauge.acquire(timeout=0.2)
        except LeaseTimeoutError:
            order.append("gave up")

    def second() -> None:
        got.append(gauge.acquire(timeout=LIMIT))
        order.append("got in")

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    for thread in threads:
        thread.start()
    threads[0].join()
    assert order == ["gave up"]
    place.release()
    threads[1].join()
    assert order == ["gave up", "got in"] and gauge.try_acquire() is None
    got.pop().release()
    assert gauge.try_acquire() is not None


def test_those_who_wait_are_told_that_the_handle_or_the_client_is_closed(connect):
    client = connect(Fake())
    rate = client.lease("rate_limiter", "rate", wants=0.0)
    gauge = client.lease("gauge", "gauge", wants=0.0)
    capacity = client.lease("capacity", "capacity")
    errors: List[str] = []

    def wait(work: Any) -> None:
        try:
            work()
        except ClosedError:
            errors.append("closed")

    works = [rate.wait, rate.wait, gauge.acquire, gauge.acquire, capacity.changed]
    threads = [threading.Thread(target=wait, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    rate.close()
    threads[0].join()
    threads[1].join()
    assert len(errors) == 2
    client.end()
    for thread in threads:
        thread.join()
    assert len(errors) == 5


def test_a_place_that_is_collected_is_free_for_those_who_wait(connect):
    gauge = connect(Fake()).lease("gauge", "db", wants=1.0)
    places = [gauge.acquire(timeout=LIMIT)]
    threading.Timer(0.05, places.clear).start()
    gauge.acquire(timeout=LIMIT).release()


def test_threads_do_not_refuse_each_other():
    with Client(Fake()) as client:
        rate = client.rate_limiter("rate", wants=1e6)
        gauge = client.gauge("gauge", wants=1e6, mode=Mode.PESSIMISTIC)
        eventually("leased", lambda: rate.capacity == gauge.capacity == 1e6)
        # The burst is there after a tenth of a second.
        eventually("the burst", lambda: rate.try_use(50_000))
        time.sleep(0.1)
        refused: List[None] = []

        def use() -> None:
            for _ in range(2000):
                if not rate.try_use() or gauge.try_acquire() is None:
                    refused.append(None)

        threads = [threading.Thread(target=use) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not refused
        assert gauge._places._usage.in_use - len(gauge._places._usage._lost) == 0


def test_metrics(connect, fake, fake_time):
    prometheus_client = pytest.importorskip("prometheus_client")

    def value(name: str, **labels: str) -> Any:
        return prometheus_client.REGISTRY.get_sample_value(f"tollgate_client_{name}", labels)

    fake.capacity("metered", 5.0)
    client = connect(fake)
    lease = client.lease("capacity", "metered", wants=8.0)
    assert lease.get() == 5.0
    assert value("lease_wants", resource="metered") == 8.0
    assert value("lease_capacity", resource="metered") == 5.0
    client.end()
    assert value("lease_wants", resource="metered") == 0.0
    assert value("lease_capacity", resource="metered") == 0.0
    before = value("failed_refreshes_total")
    connect(Fake(FakeAnswer.NO_NODE, fake_time=fake_time)).lease("capacity", "away").get()
    assert value("failed_refreshes_total") == before + 1


def test_a_debt_is_demand(connect, fake, fake_time):
    fake.capacity("db", 100.0)
    rate = connect(fake).lease("rate_limiter", "db")
    rate.wait(3000)
    begin = fake_time.now
    rate.wait()
    assert 29.0 <= fake_time.now - begin <= 32.0


def test_what_is_refused_at_once_is_demand(fake, fake_time):
    client = Client(fake)
    rate, gauge = client.rate_limiter("rate"), client.gauge("gauge")
    begin = fake_time.now
    while not all([rate.try_use() for _ in range(100)]):
        fake_time.advance(0.1)
    assert fake_time.now - begin <= 3.0
    begin = fake_time.now
    while True:
        places = [gauge.try_acquire() for _ in range(100)]
        if None not in places:
            break
        for place in places:
            if place is not None:
                place.release()
        fake_time.advance(0.1)
    assert fake_time.now - begin <= 3.0
