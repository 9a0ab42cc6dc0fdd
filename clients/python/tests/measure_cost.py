"""Measures the CPU time of a call through the library, and through the generated stub alone. It is
no test, as it judges nothing.

    python measure_cost.py HOST:PORT
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from typing import Any, Callable, List, Tuple

import grpc
import grpc.aio

from tollgate_client import Client, aio
from tollgate_client._proto.quotaservice_pb2 import AllowRequest
from tollgate_client._proto.quotaservice_pb2_grpc import QuotaServiceStub

ROUNDS = 9
CALLS = 1000
TASKS = 20


def message() -> AllowRequest:
    return AllowRequest(namespace="a", bucket_name="b", tokens_requested=1)


def show(name: str, rounds: List[Tuple[float, float]]) -> None:
    raw, library = (statistics.median(times) * 1e6 for times in zip(*rounds))
    ratio = statistics.median(ours / theirs for theirs, ours in rounds)
    print(f"{name}: stub {raw:.0f} us, library {library:.0f} us of CPU a call, ratio {ratio:.2f}")


def blocking(address: str) -> None:
    def measure(call: Callable[[], Any]) -> float:
        start = time.process_time()
        for _ in range(CALLS):
            call()
        return (time.process_time() - start) / CALLS

    with grpc.insecure_channel(address) as channel, Client(address, deadline=5.0) as client:
        stub = QuotaServiceStub(channel)
        raw = lambda: stub.Allow(message(), timeout=5.0)  # noqa: E731
        library = lambda: client.allow("a", "b")  # noqa: E731
        measure(raw), measure(library)
        show("blocking", [(measure(raw), measure(library)) for _ in range(ROUNDS)])


async def asynchronous(address: str, tasks: int) -> None:
    async def measure(call: Callable[[], Any]) -> float:
        async def repeat() -> None:
            for _ in range(CALLS // tasks):
                await call()

        start = time.process_time()
        await asyncio.gather(*(repeat() for _ in range(tasks)))
        return (time.process_time() - start) / CALLS

    async with grpc.aio.insecure_channel(address) as channel:
        async with aio.Client(address, deadline=5.0) as client:
            stub = QuotaServiceStub(channel)
            raw = lambda: stub.Allow(message(), timeout=5.0)  # noqa: E731
            library = lambda: client.allow("a", "b")  # noqa: E731
            await measure(raw), await measure(library)
            rounds = [(await measure(raw), await measure(library)) for _ in range(ROUNDS)]
            show(f"asyncio, {tasks} tasks", rounds)


if __name__ == "__main__":
    blocking(sys.argv[1])
    for tasks in (1, TASKS):
        asyncio.run(asynchronous(sys.argv[1], tasks))
