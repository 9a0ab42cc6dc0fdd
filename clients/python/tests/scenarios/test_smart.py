"""Smart buckets: tokens that are taken ahead of need."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, List

from tollgate_client import RefusedError, aio

from ..harness.clients import PATIENT
from ..harness.waiting import LIMIT
from .test_processes import run

LIMITS = """namespaces:
  a:
    buckets:
      books: { size: 1000, fill_rate: 1/d, max_tokens_per_request: 30 }
      quick: { size: 50, fill_rate: 500, wait_timeout_millis: 0 }
      lends: { size: 50, fill_rate: 500, wait_timeout_millis: 1000, max_debt_millis: 1000 }
"""


def test_a_smart_bucket_uses_what_a_node_grants(connect, start):
    node = start(LIMITS)
    # Four clients use all that is in the books, and nothing more.
    clients = [connect(node.grpc) for _ in range(4)]
    buckets = [clients[at % 4].smart_bucket("a", "books") for at in range(20)]

    def use(bucket: Any) -> int:
        used = 0
        try:
            while True:
                bucket.acquire(max_wait=3.0)
                used += 1
        except RefusedError:
            return used

    with ThreadPoolExecutor(20) as threads:
        used = sum(threads.map(use, buckets))
    granted = node.metric("tollgate_tokens_granted_total", namespace="a", bucket="books")
    assert used <= granted <= 1000
    # Each of twenty buckets may have taken some ahead that nobody used in time.
    assert used >= 500
    for name in ("quick", "lends"):
        bucket = clients[0].smart_bucket("a", name)
        bucket.acquire(max_wait=PATIENT)
        begin = time.monotonic()
        for _ in range(1000):
            bucket.acquire(max_wait=LIMIT)
        # At 500 a second, after the 50 that were there, and those that are lent for a moment.
        assert time.monotonic() - begin >= 1.4, name


def test_tasks_of_one_loop_use_what_a_node_grants(start):
    node = start(LIMITS)

    async def use() -> None:
        async with aio.Client(node.grpc, deadline=PATIENT) as client:
            bucket = client.smart_bucket("a", "quick")
            await bucket.acquire(max_wait=PATIENT)
            begin = time.monotonic()

            async def use_often() -> None:
                for _ in range(50):
                    await bucket.acquire(max_wait=LIMIT)

            await asyncio.gather(*(use_often() for _ in range(20)))
            assert time.monotonic() - begin >= 1.4

    asyncio.run(use())
    used = node.metric("tollgate_tokens_granted_total", namespace="a", bucket="quick")
    assert used >= 1001
    # Not a call for each.
    assert node.decisions(namespace="a", bucket="quick") < 500


def test_smart_buckets_of_the_parent_are_closed_in_the_child(start):
    program = """
        from tollgate_client import ClosedError

        reads = client.smart_bucket("a", "quick")
        reads.acquire(max_wait=20)

        def use_anew():
            # One of before the fork is closed.
            assert not reads.try_acquire()
            try:
                reads.acquire(max_wait=20)
                assert False
            except ClosedError:
                pass
            reads.close()
            ask()
            with client.smart_bucket("a", "quick") as other:
                other.acquire(max_wait=20)
            async def use():
                async with aio_client.smart_bucket("a", "quick") as other:
                    await other.acquire(max_wait=20)
                await aio_client.close()
            asyncio.run(use())

        # Nothing is asked for during the fork.
        import time
        while reads._stock.supply.target:
            time.sleep(0.01)
        in_child(use_anew)
        reads.acquire(max_wait=20)
        client.close()
    """
    limits = LIMITS + "      b: { size: 1000, fill_rate: 1000 }\n"
    run(program, start(limits).grpc)


def test_a_process_ends_without_a_word(start):
    """Although nothing is closed, and somebody waits."""
    program = """
        import threading

        client.charge("a", "books", 1)
        reads = client.smart_bucket("a", "quick")
        reads.acquire(max_wait=20)
        books = client.smart_bucket("a", "books")
        wait = lambda: books.acquire(1000000, max_wait=60)
        threading.Thread(target=wait, daemon=True).start()

        async def use():
            global kept
            aio_client.charge("a", "books", 1)
            kept = aio_client.smart_bucket("a", "quick")
            await kept.acquire(max_wait=20)
            asyncio.ensure_future(kept.acquire(1000000, max_wait=60))
            await asyncio.sleep(0)

        asyncio.run(use())
    """
    run(program, start(LIMITS).grpc)
