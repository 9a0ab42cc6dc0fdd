"""Servers that answer what no node does, and applications that end in unusual ways."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Iterator

import grpc
import pytest

from tollgate_client import Client, DecidedBy, Fallback, aio
from tollgate_client._nodes.asynchronous import AsyncNodes
from tollgate_client.fallback import LocalRate

from ..harness.waiting import eventually


class Odd(grpc.GenericRpcHandler):
    """Answers each call with the same bytes."""

    def __init__(self) -> None:
        self.health = b"\x08\x01"  # SERVING

    def service(self, details: Any) -> Any:
        is_health = details.method.startswith("/grpc.health")
        return grpc.unary_unary_rpc_method_handler(
            lambda request, context: self.health if is_health else b"\xff\xff"
        )


@pytest.fixture
def odd() -> Iterator[Any]:
    handler = Odd()
    server = grpc.server(ThreadPoolExecutor(4), handlers=(handler,))
    handler.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"  # type: ignore
    server.start()
    yield handler
    server.stop(None)


def test_an_answer_that_cannot_be_read_is_none(odd):
    with Client(odd.address, fallback=Fallback.ALLOW, deadline=20.0) as client:
        assert client.allow("a", "b").decided_by is DecidedBy.FALLBACK

    async def ask() -> Any:
        async with aio.Client(odd.address, fallback=Fallback.ALLOW, deadline=20.0) as client:
            return await client.allow("a", "b")

    assert asyncio.run(ask()).decided_by is DecidedBy.FALLBACK


def test_a_health_that_is_unknown_is_checked_again(odd):
    odd.health = b"\x08\x63"
    with Client(odd.address, fallback=Fallback.DENY) as client:
        assert not client.allow("a", "b").is_granted
        (node,) = client._engine._pool.nodes
        assert not node.circuit.is_called
        odd.health = b"\x08\x01"
        eventually("the node is called", lambda: node.circuit.is_called)


def test_each_event_loop_leaves_nothing_behind(start):
    client = aio.Client(start().grpc, deadline=20.0)
    for _ in range(10):
        assert asyncio.run(client.allow("a", "b")).is_granted
    gc.collect()
    assert sum(isinstance(one, AsyncNodes) for one in gc.get_objects()) <= 2
    asyncio.run(client.close())


def test_a_client_still_works_at_the_end_of_the_process():
    program = """
import atexit
from tollgate_client import Client, Fallback
atexit.register(lambda: print(client.allow("a", "b").decided_by.value))
client = Client("127.0.0.1:9", fallback=Fallback.ALLOW)
client.allow("a", "b")
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.stdout == "fallback\n" and "Traceback" not in ended.stderr, ended.stderr


def test_a_rate_that_is_next_to_nothing_never_grants_again():
    rate = LocalRate(1e-310, 1)
    assert rate.take(1, 0.0) == 0.0
    assert rate.take(1, 1.0) is None
