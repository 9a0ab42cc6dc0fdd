"""Fixtures: whatever a test starts ends with it."""

from __future__ import annotations

import contextlib
import os
from typing import Any, Callable, Iterator, Type

import pytest

# The tests start processes, and with Python 3.9 gRPC's preparations for a fork can fail that. What
# tests forks does so in processes of its own, without this.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

from .harness.clients import PATIENT, AnyClient, Asynchronous, Blocking
from .harness.fault_proxy import FaultProxy
from .harness.processes import Node, Redis

OPEN = "global_default_bucket: { size: 1000000, fill_rate: 1000000 }"
"""Limits that refuse nothing."""

Connect = Callable[..., AnyClient]


@pytest.fixture
def ending() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture(params=[Blocking, Asynchronous], ids=["blocking", "asyncio"])
def kind(request: pytest.FixtureRequest) -> Type[AnyClient]:
    kind: Type[AnyClient] = request.param
    return kind


@pytest.fixture
def connect(kind: Type[AnyClient], ending: contextlib.ExitStack) -> Connect:
    """Makes patient clients of either kind."""

    def connect(addresses: Any, **settings: Any) -> AnyClient:
        settings.setdefault("deadline", PATIENT)
        client = kind(addresses, **settings)  # type: ignore[call-arg]
        ending.callback(client.close)
        return client

    return connect


@pytest.fixture
def start(ending: contextlib.ExitStack) -> Callable[..., Node]:
    """Starts nodes."""

    def start(limits: str = OPEN, *arguments: str, port: int = 0) -> Node:
        node = Node(limits, *arguments, port=port)
        ending.callback(node.close)
        return node

    return start


@pytest.fixture
def redis(ending: contextlib.ExitStack) -> Redis:
    redis = Redis()
    ending.callback(redis.close)
    return redis


@pytest.fixture
def proxied(start: Callable[..., Node], ending: contextlib.ExitStack) -> "tuple[Node, FaultProxy]":
    """A node behind a proxy."""
    node = start()
    proxy = FaultProxy(node.port)
    ending.callback(proxy.close)
    return node, proxy
