"""Several nodes: spread, killed, restarted, not there yet."""

from __future__ import annotations

import signal
import threading
import time
from contextlib import contextmanager
from typing import Any, Iterator, List

import pytest

from tollgate_client import DecidedBy, Fallback, NoAnswer, NoDecisionError

from ..conftest import OPEN
from ..harness.clients import PATIENT, AnyClient, ask_until_decided_by
from ..harness.processes import Node, Redis, free_port
from ..harness.waiting import polls


@pytest.fixture
def three(start: Any, redis: Redis) -> List[Node]:
    """Nodes that share a store."""
    return [start(OPEN, "--store", redis.url, "--store-timeout", "20s") for _ in range(3)]


def connect_to_all(connect: Any, nodes: List[Node]) -> AnyClient:
    """A client that has called each of the nodes."""
    client: AnyClient = connect([node.grpc for node in nodes])
    for _ in polls("all nodes are called"):
        if all(node.decisions() for node in nodes):
            return client
        client.allow("a", "b")
    raise AssertionError


@contextmanager
def load(client: AnyClient) -> Iterator[None]:
    """Threads that ask all the time, and each of whose calls must be decided by a node."""
    stop, failures = threading.Event(), []

    def ask() -> None:
        try:
            while not stop.is_set():
                assert client.allow("a", "b").decided_by is DecidedBy.NODE
        except Exception as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=ask) for _ in range(20)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not failures


def wait_for_calls(nodes: List[Node], more: int) -> None:
    before = sum(node.decisions() for node in nodes)
    for _ in polls("calls are answered"):
        if sum(node.decisions() for node in nodes) >= before + more:
            return


def test_calls_are_spread_over_the_nodes(connect, three):
    client = connect_to_all(connect, three)
    before = [node.decisions() for node in three]
    for _ in range(30):
        client.allow("a", "b")
    assert [node.decisions() - old for node, old in zip(three, before)] == [10.0] * 3


def test_a_name_is_resolved(connect, start):
    # Its other address, if it has one, is a node that does not answer.
    client = connect(f"localhost:{start().port}")
    for _ in range(10):
        assert client.allow("a", "b").decided_by is DecidedBy.NODE
    with pytest.raises(NoDecisionError) as error:
        connect("no-such-host.invalid:1").allow("a", "b")
    assert error.value.reason is NoAnswer.UNREACHABLE


def test_a_node_that_is_killed_under_load_fails_no_call(connect, three):
    client = connect_to_all(connect, three)
    with load(client):
        wait_for_calls(three[1:], 500)
        three[0].kill()
        wait_for_calls(three[1:], 500)


def test_a_node_that_drains_fails_no_call(connect, start):
    nodes = [start(), start()]
    client = connect_to_all(connect, nodes)
    with load(client):
        nodes[0].signal(signal.SIGTERM)
        for _ in polls("the node has drained"):
            if nodes[0].has_ended():
                break
        wait_for_calls(nodes[1:], 300)


def test_a_node_that_starts_later_or_again_is_called(connect, start):
    port = free_port()
    client = connect(f"127.0.0.1:{port}", fallback=Fallback.ALLOW)
    ask_until_decided_by(client, DecidedBy.FALLBACK)
    node = start(port=port)
    ask_until_decided_by(client, DecidedBy.NODE)
    node.kill()
    ask_until_decided_by(client, DecidedBy.FALLBACK)
    start(port=port)
    ask_until_decided_by(client, DecidedBy.NODE)


def test_without_a_node_the_fallback_decides_at_once(connect):
    client = connect(
        f"127.0.0.1:{free_port()}",
        namespace_fallbacks={"open": Fallback.ALLOW},
        bucket_fallbacks={("open", "closed"): Fallback.DENY},
    )
    # Not after the deadline, which is far.
    begin = time.monotonic()
    assert client.allow("open", "any").is_granted
    assert not client.allow("open", "closed").is_granted
    with pytest.raises(NoDecisionError) as error:
        client.allow("other", "any")
    assert str(error.value) == "no decision: no node can be reached"
    assert time.monotonic() - begin < PATIENT / 2
