"""A network and a store that fail."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait

import pytest
from prometheus_client import REGISTRY

from tollgate_client import (
    DecidedBy,
    Fallback,
    InvalidRequestError,
    NoAnswer,
    NoDecisionError,
    Reason,
)
from tollgate_client._nodes import asynchronous, blocking, circuit

from ..conftest import OPEN
from ..harness.clients import Asynchronous, ask_until_decided_by
from ..harness.fault_proxy import Fault
from ..harness.processes import Redis
from ..harness.waiting import eventually, polls


def metric(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"tollgate_client_{name}", labels) or 0.0


@pytest.mark.parametrize("fault", [Fault.NO_REPLIES, Fault.HALF_OPEN])
def test_a_node_that_hangs_is_not_called_until_it_answers(connect, proxied, fault):
    _, proxy = proxied
    client = connect(proxy.address, fallback=Fallback.ALLOW)
    ask_until_decided_by(client, DecidedBy.NODE)
    proxy.set(fault)
    # Some wait for the deadline. Then the circuit is open, and nobody waits.
    at_once = 0
    for _ in polls("the circuit is opened", pause=0.0):
        before = time.monotonic()
        assert client.allow("a", "b", deadline=0.1).decided_by is DecidedBy.FALLBACK
        at_once = at_once + 1 if time.monotonic() - before < 0.1 else 0
        if at_once == 20:
            break
    proxy.set(Fault.NOTHING)
    ask_until_decided_by(client, DecidedBy.NODE, deadline=0.1)


def test_an_idle_client_finds_that_its_node_hangs(connect, proxied, monkeypatch):
    monkeypatch.setattr(circuit, "_CHECK_INTERVAL", 0.2)
    _, proxy = proxied
    client = connect(proxy.address)
    gc.collect()
    client.allow("a", "b")
    called = metric("nodes_called")
    proxy.set(Fault.NO_REPLIES)
    # Not before: the first check connects, too, which may take long on a busy machine.
    monkeypatch.setattr(blocking, "CHECK_TIMEOUT", 0.5)
    monkeypatch.setattr(asynchronous, "CHECK_TIMEOUT", 0.5)
    # No call fails, but the check.
    eventually("the circuit is open", lambda: metric("nodes_called") == called - 1)
    before = time.monotonic()
    with pytest.raises(NoDecisionError) as error:
        client.allow("a", "b")
    assert error.value.reason is NoAnswer.UNREACHABLE
    assert time.monotonic() - before < 5


def test_a_slow_node_delays_no_call_beyond_its_deadline(connect, proxied):
    _, proxy = proxied
    client = connect(proxy.address, fallback=Fallback.DENY)
    client.allow("a", "b")
    # A round trip takes 80 ms.
    proxy.set(Fault.NOTHING, delay=0.04)
    assert client.allow("a", "b").decided_by is DecidedBy.NODE
    late = 0
    for _ in range(30):
        before = time.monotonic()
        decision = client.allow("a", "b", deadline=0.02)
        took = time.monotonic() - before
        # An answer counts that is there when the deadline is noticed too late.
        assert took >= 0.08 or decision.decided_by is DecidedBy.FALLBACK
        # Not because its circuit is open: with so little time, no answer says nothing.
        assert took >= 0.018
        late += took > 0.06
    # How late calls are is judged where nothing else runs.
    if "TOLLGATE_ALONE" in os.environ:
        assert late <= 5, f"{late} of 30 calls took 40 ms longer than they said"
    assert client.allow("a", "b").decided_by is DecidedBy.NODE


def test_connections_that_break_are_made_again(connect, proxied):
    _, proxy = proxied
    client = connect(proxy.address, fallback=Fallback.ALLOW)
    for fault in (Fault.CUT_REPLIES, Fault.REFUSED, Fault.RESET_ON_ACCEPT):
        ask_until_decided_by(client, DecidedBy.NODE)
        proxy.set(fault)
        ask_until_decided_by(client, DecidedBy.FALLBACK)
        proxy.set(Fault.NOTHING)
    ask_until_decided_by(client, DecidedBy.NODE)


@pytest.mark.parametrize("kind", [Asynchronous], ids=["asyncio"], indirect=True)
def test_cancelled_calls_open_no_circuit(connect, proxied):
    """A client that gives up before its deadline has not found a node that fails."""
    node, proxy = proxied
    client = connect(proxy.address)
    client.allow("a", "b")
    proxy.set(Fault.NO_REPLIES)

    async def give_up() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(client.client.allow("a", "b"), 0.05)

    async def all_give_up() -> None:
        await asyncio.gather(*(give_up() for _ in range(25)))

    # Calls that fail together would count once, so three times is the least.
    for _ in range(4):
        client.run(all_give_up())
    proxy.set(Fault.NOTHING)
    assert client.allow("a", "b").decided_by is DecidedBy.NODE
    assert node.decisions() >= 2


def test_a_client_that_is_closed_closes_its_connections(connect, start):
    node = start()
    clients = [connect(node.grpc) for _ in range(5)]
    for client in clients:
        client.allow("a", "b")
    assert node.metric("tollgate_connections", transport="grpc") == 5
    for client in clients:
        client.close()
    closed = lambda: node.metric("tollgate_connections", transport="grpc") == 0  # noqa: E731
    eventually("the connections are closed", closed)


def test_a_lost_store_is_decided_on_by_policy(connect, start, redis, ending):
    limits = """namespaces:
  local: { on_store_failure: local, default_bucket: {} }
  deny: { on_store_failure: deny, default_bucket: {} }
"""
    node = start(limits, "--store", redis.url)
    client = connect(node.grpc)
    cautious = connect(node.grpc, fallback=Fallback.rate(0.0, 1))
    for one in (client, cautious):
        ask_until_decided_by(one, DecidedBy.NODE, "deny")
    redis.kill()
    ask_until_decided_by(client, DecidedBy.DEGRADED_NODE, "local")
    decision = ask_until_decided_by(client, DecidedBy.DEGRADED_NODE, "deny")
    assert not decision.is_granted and decision.reason is Reason.UNAVAILABLE
    # With a fallback, that is where it decides: its only token.
    assert ask_until_decided_by(cautious, DecidedBy.FALLBACK, "deny").is_granted
    assert not cautious.allow("deny", "b").is_granted
    ending.callback(Redis(redis.port).close)
    ask_until_decided_by(client, DecidedBy.NODE, "deny")


def test_an_overloaded_node_is_left_alone(connect, start, redis):
    store = ["--store", redis.url, "--store-timeout", "20s"]
    node = start(OPEN, *store, "--threads", "1", "--max-in-flight", "1")
    client = connect(node.grpc, fallback=Fallback.DENY)
    ask_until_decided_by(client, DecidedBy.NODE)
    redis.signal(signal.SIGSTOP)
    with ThreadPoolExecutor(2) as threads:
        # One has the only slot until the store answers, and the other one is refused.
        calls = [threads.submit(client.allow, "a", "b") for _ in range(2)]
        try:
            done, pending = wait(calls, return_when=FIRST_COMPLETED)
            assert done.pop().result().decided_by is DecidedBy.FALLBACK
            begin, before, asked = time.monotonic(), node.metric("tollgate_shed_requests_total"), 0
            # Each time it says to wait for 100 ms at least.
            most = lambda: int((time.monotonic() - begin) * 10) + 1  # noqa: E731
            while (took := time.monotonic() - begin) < 0.3 or (asked <= 2 * most() and took < 10):
                assert client.allow("a", "b").decided_by is DecidedBy.FALLBACK
                asked += 1
            shed = node.metric("tollgate_shed_requests_total") - before
            assert shed <= most() and asked > 2 * most(), (shed, asked)
        finally:
            redis.signal(signal.SIGCONT)
        assert pending.pop().result().decided_by is DecidedBy.NODE
    ask_until_decided_by(client, DecidedBy.NODE)


def test_metrics_of_calls(connect, proxied, kind):
    _, proxy = proxied
    namespace = kind.__name__
    client = connect(proxy.address, fallback=Fallback.DENY)
    node = {"namespace": namespace, "outcome": "granted", "decided_by": "node"}
    invalid = {"namespace": "", "outcome": "invalid", "decided_by": "node"}
    fallback = {"namespace": namespace, "outcome": "refused", "decided_by": "fallback"}

    def failed() -> float:
        """The calls that a broken connection has failed."""
        return sum(metric("failed_calls_total", reason=one) for one in ("error", "unreachable"))

    asked, waited = metric("request_seconds_count"), metric("wait_seconds_count")
    mistakes, timeouts = (
        metric("requests_total", **invalid),
        metric("failed_calls_total", reason="timeout"),
    )
    client.allow(namespace, "b")
    client.acquire(namespace, "b")
    assert metric("requests_total", **node) == 2
    assert metric("request_seconds_count") == asked + 2
    assert metric("wait_seconds_count") == waited + 1
    with pytest.raises(InvalidRequestError):
        client.allow(namespace, "")
    assert metric("requests_total", **invalid) == mistakes + 1
    proxy.set(Fault.NO_REPLIES)
    client.allow(namespace, "b", deadline=0.02)
    assert metric("requests_total", **fallback) == 1
    assert metric("failed_calls_total", reason="timeout") == timeouts + 1
    before = failed()
    proxy.set(Fault.CUT_REPLIES)
    for _ in polls("a call fails"):
        client.allow(namespace, "b")
        if failed() > before:
            break
