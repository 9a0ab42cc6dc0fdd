"""Leases: forks, threads, the end of the process, and the loops of asyncio."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import warnings
from typing import Any

import pytest

from tollgate_client import Client, ClosedError, aio

from ..harness.clients import PATIENT
from ..harness.doorman import Doorman
from ..harness.waiting import LIMIT, eventually
from .test_processes import run


@pytest.fixture
def doorman(ending: Any) -> Doorman:
    doorman = Doorman()
    ending.callback(doorman.close)
    return doorman


def test_leases_of_the_parent_are_not_kept_by_the_child(start):
    program = """
        from tollgate_client import ClosedError

        rate = client.rate_limiter("rate", wants=5.0)
        gauge = client.gauge("gauge", wants=5.0)
        rate.wait(timeout=20)
        place = gauge.acquire(timeout=20)

        def is_closed(wait):
            try:
                wait()
            except ClosedError:
                return True

        def lease_anew():
            # Those of before the fork are closed.
            assert is_closed(rate.wait) and is_closed(gauge.acquire)
            assert not rate.try_use() and rate.capacity == 0.0
            place.release()
            rate.close()
            client.rate_limiter("rate", wants=5.0).wait(timeout=20)
            with client.gauge("gauge", wants=5.0) as other:
                other.acquire(timeout=20).release()

        in_child(lease_anew)
        in_child(in_child, lease_anew)
        rate.wait(timeout=20)
        place.release()
        with gauge.acquire(timeout=20):
            in_child(client.close)
        rate.wait(timeout=20)
        client.close()
    """
    run(program, start(LIMITS).grpc)


def test_leases_with_asyncio_after_a_fork(start):
    program = """
        def lease_anew():
            async def use():
                async with aio_client.rate_limiter("rate", wants=5.0) as rate:
                    await rate.wait(timeout=20)
                await aio_client.close()
            asyncio.run(use())

        async def use():
            rate = aio_client.rate_limiter("rate", wants=5.0)
            await rate.wait(timeout=20)
            return rate

        rate = asyncio.run(use())
        in_child(lease_anew)
        lease_anew()
    """
    run(program, start(LIMITS).grpc)


def test_the_child_has_another_client_id(doorman):
    program = """
        named = Client(sys.argv[1], client_id="me")

        def lease():
            for one in (client, named):
                with one.capacity("db", wants=5.0) as capacity:
                    capacity.changed(timeout=20)
                one.close()

        in_child(lease)
        lease()
    """
    run(program, doorman.address)
    ids = [asked.client_id for asked in doorman.asked]
    assert len(set(ids)) == 4 and "me" in ids
    assert sum(one.startswith("me:") for one in ids) == 1


def test_a_process_ends_without_a_word(start):
    """Although nothing is closed, and somebody waits."""
    program = """
        import threading
        rate = client.rate_limiter("rate", wants=5.0)
        rate.wait(timeout=20)
        place = client.gauge("gauge", wants=5.0).acquire(timeout=20)
        threading.Thread(target=client.gauge("none", wants=0.0).acquire, daemon=True).start()

        async def use():
            global kept
            kept = aio_client.rate_limiter("other", wants=5.0), aio_client.gauge("none", wants=0.0)
            await kept[0].wait(timeout=20)
            asyncio.ensure_future(kept[1]._acquire(None))
            await asyncio.sleep(0)

        asyncio.run(use())
        Client("127.0.0.1:9").rate_limiter("rate").try_use()
        away = Client("127.0.0.1:9").rate_limiter("rate")
    """
    begin = time.monotonic()
    run(program, start(LIMITS).grpc)
    assert time.monotonic() - begin < LIMIT / 2


def test_one_thread_for_all_leases_and_none_after_the_last(doorman):
    ours = lambda: [one for one in threading.enumerate() if one.name == "tollgate-client-leases"]  # noqa: E731
    with Client(doorman.address, deadline=PATIENT) as client:
        client.allow  # No lease yet.
        assert not ours()
        leases = [client.capacity(f"r{at}", wants=1.0) for at in range(5)]
        leases[-1].changed(timeout=LIMIT)
        assert len(ours()) == 1 and ours()[0].daemon
        for lease in leases:
            lease.close()
        eventually("the thread ends", lambda: not ours())
        client.rate_limiter("db", wants=1.0).wait(timeout=LIMIT)
        gc.collect()
        eventually("the thread ends", lambda: not ours())
        lease = client.capacity("db", wants=1.0)
        assert len(ours()) == 1
    assert not ours()
    lease.close()


def test_a_client_in_another_event_loop_leases_anew(doorman):
    client = aio.Client(doorman.address, deadline=PATIENT)
    rates = []

    async def use() -> None:
        for old in rates:
            client.rate_limiter(f"other{len(rates)}")
            with pytest.raises(ClosedError):
                await old.wait()
        rate = client.rate_limiter("db", wants=5.0)
        rates.append(rate)
        await rate.wait(timeout=LIMIT)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            asyncio.run(use())
        asyncio.run(client.close())
        del rates[:]
        gc.collect()


def test_the_task_of_leases_ends_with_them(doorman):
    async def use() -> None:
        async with aio.Client(doorman.address, deadline=PATIENT) as client:
            async with client.rate_limiter("db", wants=5.0) as rate:
                await rate.wait(timeout=LIMIT)
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert doorman.released == ["db"]

    asyncio.run(use())


LIMITS = """
resources:
  - { identifier_glob: '*', capacity: 100,
      algorithm: { kind: FAIR_SHARE, lease_length: 60, refresh_interval: 1,
                   learning_mode_duration: 0 } }
"""
