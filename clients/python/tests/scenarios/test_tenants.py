"""Hits and holds of tenants."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import threading
import time
import urllib.error
import urllib.request
from typing import Any, Callable, Dict, List

import pytest
from prometheus_client import REGISTRY

from tollgate_client import (
    Client,
    ClosedError,
    DecidedBy,
    Fallback,
    InvalidRequestError,
    NoAnswer,
    NoDecisionError,
    Reason,
    RefusedError,
)

from ..harness.clients import PATIENT, AnyClient, Asynchronous, Blocking
from ..harness.fault_proxy import Fault, FaultProxy
from ..harness.processes import Node, Redis, free_port
from ..harness.waiting import LIMIT, eventually, polls
from .test_processes import run

LIMITS = """
throttles:
  - resource: "search"
    hard_limit: 1000
    tiers: [{ limit: 5, window: 3600s, active: 3600s, cooldown: 0s }]
  - resource: "soon"
    hard_limit: 2
    tiers: [{ limit: 1000, window: 3600s, active: 3600s, cooldown: 0s }]
holds:
  - resource: "sandbox"
    global_limit: 3
  - resource: "many"
  - resource: "shadowed"
    global_limit: 1
    enforce: false
"""


@pytest.fixture
def node(start: Callable[..., Node]) -> Node:
    return start(LIMITS)


@pytest.fixture
def proxy(node: Node, ending: contextlib.ExitStack) -> FaultProxy:
    proxy = FaultProxy(node.port)
    ending.callback(proxy.close)
    return proxy


def metric(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"tollgate_client_{name}", labels) or 0.0


def look(node: Node, path: str, method: str = "GET") -> Dict[str, Any]:
    request = urllib.request.Request(f"http://{node.http}/v1/held/{path}", method=method)
    for _ in polls("the node has its store"):
        try:
            with urllib.request.urlopen(request, timeout=LIMIT) as response:
                answer: Dict[str, Any] = json.load(response)
                return answer
        except urllib.error.HTTPError as error:
            assert error.code == 503
            error.close()
    raise AssertionError


def held(node: Node, resource: str = "sandbox") -> int:
    """The copies that are held."""
    count: int = look(node, resource)["held"]
    return count


def sessions(node: Node, resource: str = "sandbox") -> List[Dict[str, Any]]:
    found: List[Dict[str, Any]] = look(node, resource)["sessions"]
    return found


def hold_when_decided_by(client: AnyClient, who: DecidedBy, *arguments: Any, **options: Any) -> Any:
    """Asks until a hold is granted by ``who``."""
    for _ in polls(f"granted by {who}"):
        with contextlib.suppress(NoDecisionError, RefusedError):
            hold = client.hold(*arguments, **options)
            if hold.decided_by is who:
                return hold
            hold.release()
    raise AssertionError


def test_each_answer_about_hits(connect, node):
    client = connect(node.grpc)
    hits = client.hits("search", "acme", 3)
    assert (hits.granted, hits.tier, hits.burst) == (3, 1, True)
    assert hits.decided_by is DecidedBy.NODE and not hits.shadow
    with pytest.raises(RefusedError) as error:
        client.hits("search", "acme", 3)
    assert error.value.reason is Reason.LIMIT and error.value.retry_after > 1000
    hits = client.hits("search", "acme", 9, min_copies=1)
    assert (hits.granted, hits.burst) == (2, False)
    with pytest.raises(RefusedError) as error:
        client.hits("search", "other", 6)
    assert error.value.retry_after is None
    for names in (("", "acme"), ("search", ""), ("search", "x" * 1025), ("search", "\udc00")):
        with pytest.raises(InvalidRequestError):
            client.hits(*names)
    refused = metric("tenant_requests_total", kind="hits", outcome="refused", decided_by="node")
    assert refused >= 2


def test_hits_are_waited_for(connect, node):
    client = connect(node.grpc)
    assert client.hits("soon", "acme", 2).granted == 2
    # Within the second, and they are back after it.
    assert client.hits("soon", "acme", 2, max_wait=LIMIT).granted == 2
    told: List[Any] = []
    impatient = connect(node.grpc, on_tenant_refused=lambda *refusal: told.append(refusal))
    impatient.hits("search", "acme", 5)
    with pytest.raises(RefusedError) as error:
        impatient.hits("search", "acme", 5, max_wait=60.0)
    assert error.value.retry_after > 60.0
    request, refused = told[0]
    assert request.max_wait == 60.0 and refused == error.value.refused


def test_refused_hits_are_remembered(connect, node):
    client = connect(node.grpc)
    decisions = lambda: node.metric("tollgate_throttle_decisions_total")  # noqa: E731
    client.hits("search", "acme", 3)
    for _ in polls("a refusal is remembered"):
        before = decisions()
        with pytest.raises(RefusedError):
            client.hits("search", "acme", 3)
        with pytest.raises(RefusedError) as error:
            client.hits("search", "acme", 4)
        if error.value.refused.decided_by is DecidedBy.REMEMBERED:
            break
    assert decisions() == before + 1 and error.value.retry_after > 1000
    # Fewer, and for others, may be granted.
    assert client.hits("search", "acme", 2).granted == 2
    assert client.hits("search", "other", 3).granted == 3


def test_a_resource_that_is_not_configured_or_of_the_other_kind(connect, node):
    client = connect(node.grpc)
    careful = connect(node.grpc, resource_fallbacks={"unknown": Fallback.ALLOW})
    for name, other in (("hits", "sandbox"), ("hold", "search")):
        with pytest.raises(NoDecisionError) as error:
            getattr(client, name)("unknown", "acme")
        assert error.value.reason is NoAnswer.NOT_CONFIGURED
        by_fallback = getattr(careful, name)("unknown", "acme")
        assert by_fallback.decided_by is DecidedBy.FALLBACK
        for one in (client, careful):
            with pytest.raises(InvalidRequestError):
                getattr(one, name)(other, "acme")
    # None of this opens a circuit.
    assert client.hits("search", "acme").decided_by is DecidedBy.NODE


def test_without_a_node_the_fallback_grants_the_fewest(connect):
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(NoDecisionError) as error:
        connect(address).hits("search", "acme")
    assert error.value.reason is NoAnswer.UNREACHABLE
    fallbacks = {"search": Fallback.rate(0.0, 5), "sandbox": Fallback.ALLOW}
    client = connect(address, fallback=Fallback.DENY, resource_fallbacks=fallbacks)
    hits = client.hits("search", "acme", 9, min_copies=3)
    assert (hits.granted, hits.decided_by) == (3, DecidedBy.FALLBACK)
    with pytest.raises(RefusedError) as refused:
        client.hits("search", "acme", 3)
    assert refused.value.reason is Reason.LIMIT
    hold = client.hold("sandbox", "acme", 9, min_copies=2)
    assert hold.is_held and (hold.copies, hold.decided_by) == (2, DecidedBy.FALLBACK)
    for ask in (client.hits, client.hold):
        with pytest.raises(RefusedError) as refused:
            ask("other", "acme")
        assert refused.value.reason is Reason.UNAVAILABLE


def test_a_hold_ends_with_its_guard(kind, connect, node):
    client = connect(node.grpc, client_id="the worker")
    before = metric("held_copies")
    if kind is Blocking:
        with client.client.hold("sandbox", "acme", 2) as inside:
            assert inside.is_held and held(node) == 2
    else:

        async def block() -> Any:
            async with client.client.hold("sandbox", "acme", 2) as inside:
                assert inside.is_held and held(node) == 2
            return inside

        inside = client.run(block())
    assert not inside.is_held
    eventually("released at the end of the block", lambda: held(node) == 0)
    hold = client.hold("sandbox", "acme", 2)
    assert metric("held_copies") == before + 2
    one = sessions(node)[0]
    assert one["holds"] == [{"hold": "the worker", "domain": "acme", "copies": 2}]
    assert len(one["session"]) == 32
    hold.release()
    assert not hold.is_held and hold.lost(timeout=LIMIT)
    eventually("released", lambda: held(node) == 0)
    # A handle that nothing refers to any more.
    hold = client.hold("sandbox", "acme", 3)
    assert held(node) == 3
    del hold
    gc.collect()
    eventually("collected", lambda: held(node) == 0)
    eventually("counted", lambda: metric("held_copies") == before)


def test_a_hold_outlives_its_client_only_with_its_handle(node):
    client = Client(node.grpc, deadline=PATIENT)
    hold = client.hold("sandbox", "acme", 3, ttl=3600.0)
    del client
    gc.collect()
    assert hold.is_held and held(node) == 3
    del hold
    gc.collect()
    eventually("released", lambda: held(node) == 0)
    connections = lambda: node.metric("tollgate_connections", transport="grpc")  # noqa: E731
    eventually("the connections are closed", lambda: connections() == 0)


def test_never_more_copies_are_held_than_there_are(connect, start, redis):
    store = ["--store", redis.url, "--store-timeout", "20s"]
    nodes = [start(LIMITS, *store) for _ in range(2)]
    clients = [connect([node.grpc for node in nodes]) for _ in range(3)]
    lock, failures = threading.Lock(), []
    inside = most = 0

    def work(client: AnyClient) -> None:
        nonlocal inside, most
        try:
            for _ in range(4):
                hold = client.hold("sandbox", "acme", max_wait=LIMIT)
                with lock:
                    inside += 1
                    most = max(most, inside)
                time.sleep(0.01)
                with lock:
                    inside -= 1
                hold.release()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(one,)) for one in clients for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and 1 <= most <= 3
    rest = clients[0].hold("sandbox", "acme", 9, min_copies=2, max_wait=LIMIT)
    assert 2 <= rest.copies <= 3
    with pytest.raises(RefusedError) as error:
        clients[1].hold("sandbox", "acme", 3)
    assert error.value.reason is Reason.LIMIT and error.value.retry_after is not None
    with pytest.raises(RefusedError) as error:
        clients[1].hold("sandbox", "acme", 4, max_wait=LIMIT)
    assert error.value.retry_after is None, "these limits never grant so many"


def test_a_hold_is_waited_for(connect, node):
    client, other = connect(node.grpc), connect(node.grpc)
    first = other.hold("sandbox", "other", 2)
    with pytest.raises(RefusedError):
        client.hold("sandbox", "acme", 2, max_wait=0.1)
    threading.Timer(0.5, first.release).start()
    second = client.hold("sandbox", "acme", 2, max_wait=LIMIT)
    assert not first.is_held and second.is_held and held(node) == 2


def test_a_hold_is_kept_alive(connect, node):
    client = connect(node.grpc)
    # A hold is lost if its renewal is held up for a third of its time.
    hold = client.hold("sandbox", "acme", 3, ttl=9.0)
    # It is recorded although there is no room.
    shadowed = client.hold("shadowed", "acme", 2, ttl=9.0)
    assert shadowed.shadow and not hold.shadow
    assert not hold.lost(timeout=12.0)
    assert hold.is_held and hold.decided_by is DecidedBy.NODE and held(node) == 3
    assert shadowed.is_held and shadowed.shadow and held(node, "shadowed") == 2


def test_a_hold_that_was_ended_is_lost(connect, node):
    client, told = connect(node.grpc), threading.Event()
    before = metric("lost_holds_total")
    hold = client.hold("sandbox", "acme", 3, ttl=3.0, on_lost=told.set)
    assert look(node, f"sandbox/{sessions(node)[0]['session']}", "DELETE")
    assert hold.lost(timeout=LIMIT) and told.wait(LIMIT) and not hold.is_held
    assert metric("lost_holds_total") == before + 1
    # Its copies are for others then.
    other = client.hold("sandbox", "acme", 3)
    hold.release()
    assert other.is_held and held(node) == 3


def test_a_hold_that_nobody_renews_is_lost_in_time(connect, proxy, node):
    client = connect(proxy.address)
    begin = time.monotonic()
    hold = client.hold("sandbox", "acme", 3, ttl=4.0)
    proxy.set(Fault.REFUSED)
    assert hold.lost(timeout=LIMIT) and not hold.is_held
    # Not before its time; and before others get the copies, unless this thread was asleep.
    assert time.monotonic() - begin >= 4.0 * 2 / 3
    other = connect(node.grpc).hold("sandbox", "other", 3, max_wait=LIMIT)
    assert time.monotonic() - begin >= 4.0 and other.is_held


def test_with_a_fallback_a_hold_goes_on_and_is_recorded_again(connect, proxy, node):
    client = connect(proxy.address, resource_fallbacks={"sandbox": Fallback.ALLOW})
    hold = client.hold("sandbox", "acme", 3, ttl=2.0)
    proxy.set(Fault.REFUSED)
    eventually("the fallback decides", lambda: hold.decided_by is DecidedBy.FALLBACK)
    eventually("the session is over", lambda: held(node) == 0)
    assert hold.is_held
    proxy.set(Fault.NOTHING)
    eventually("recorded again", lambda: hold.decided_by is DecidedBy.NODE)
    assert hold.is_held and held(node) == 3


def test_a_lost_store_ends_holds_or_leaves_them_by_policy(connect, start, redis, ending):
    limits = """
holds:
  - {{ resource: "sandbox", global_limit: 4 }}
on_store_failure: {}
"""
    allow, deny = (
        start(limits.format(policy), "--store", redis.url) for policy in ("allow", "deny")
    )
    client, strict = connect(allow.grpc), connect(deny.grpc)
    hold = hold_when_decided_by(client, DecidedBy.NODE, "sandbox", "acme", 3, ttl=6.0)
    redis.kill()
    # While the store is away, no session ends.
    free = hold_when_decided_by(client, DecidedBy.DEGRADED_NODE, "sandbox", "acme", 9, min_copies=2)
    assert free.copies == 2
    for _ in polls("refused by policy"):
        with pytest.raises(RefusedError) as error:
            strict.hold("sandbox", "acme")
        if error.value.reason is Reason.UNAVAILABLE:
            break
    assert not hold.lost(timeout=7.0) and free.is_held
    assert hold.decided_by is DecidedBy.DEGRADED_NODE
    # It comes back without its data: what there is room for is recorded, and the rest is lost.
    ending.callback(Redis(redis.port).close)
    both = [hold, free]

    def is_settled() -> bool:
        return all(not one.is_held or one.decided_by is DecidedBy.NODE for one in both)

    eventually("each is recorded or lost", is_settled)
    (kept,) = [one for one in both if one.is_held]
    eventually("nothing else", lambda: held(allow) == kept.copies)
    client.end()


def test_a_reserve_whose_answer_is_lost_leaves_nothing_behind(kind, connect, proxy, node):
    client = connect(proxy.address)
    client.hold("sandbox", "acme").release()
    eventually("released", lambda: held(node) == 0)
    # The deadline is over, or the task is cancelled.
    proxy.set(Fault.NO_REPLIES)
    failures: List[BaseException] = []

    def ask() -> None:
        try:
            client.hold("sandbox", "acme", 3, ttl=3600.0, deadline=4.0)
        except NoDecisionError as error:
            failures.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    eventually("granted", lambda: held(node) == 3)
    thread.join()
    assert len(failures) == 1
    proxy.set(Fault.NOTHING)
    eventually("ended", lambda: held(node) == 0)
    if kind is Asynchronous:
        hold_when_decided_by(client, DecidedBy.NODE, "sandbox", "acme").release()
        eventually("released", lambda: held(node) == 0)
        proxy.set(Fault.NO_REPLIES)

        async def begin() -> "asyncio.Task[Any]":
            async def hold() -> Any:
                return await client.client.hold("sandbox", "acme", 3, ttl=3600.0)

            return asyncio.ensure_future(hold())

        task = client.run(begin())
        eventually("granted", lambda: held(node) == 3)
        client.loop.call_soon_threadsafe(task.cancel)
        proxy.set(Fault.NOTHING)
        eventually("ended", lambda: held(node) == 0)


def test_a_client_that_is_closed_releases_its_holds(connect, proxy, node):
    client, told = connect(node.grpc), threading.Event()
    holds = [client.hold("many", "acme", 2, on_lost=told.set) for _ in range(20)]
    client.end()
    assert held(node, "many") == 0
    assert not any(hold.is_held for hold in holds) and holds[0].lost(timeout=LIMIT)
    assert told.is_set()
    holds[0].release()
    with pytest.raises(ClosedError):
        client.hold("many", "acme")
    # Without an answer it takes five seconds; then the session is over when its time is.
    client = connect(proxy.address)
    hold = client.hold("sandbox", "acme", 3, ttl=3.0)
    proxy.set(Fault.NO_REPLIES)
    client.end()
    assert not hold.is_held
    eventually("over", lambda: held(node) == 0)


def test_who_waits_for_copies_is_told_that_the_client_is_closed(connect, proxy, node):
    other = connect(node.grpc).hold("sandbox", "other", 3)
    client, ended = connect(proxy.address), threading.Event()

    def ask(**options: Any) -> None:
        with pytest.raises(ClosedError):
            client.hold("sandbox", "acme", 1, ttl=3600.0, max_wait=600.0, **options)
        ended.set()

    decisions = lambda: node.metric("tollgate_hold_decisions_total")  # noqa: E731
    before = decisions()
    threading.Thread(target=ask).start()
    eventually("it waits", lambda: decisions() > before)
    client.end()
    assert ended.wait(LIMIT)
    # A call that is under way ends first, and what it was granted is given back.
    client = connect(proxy.address)
    client.hold("many", "acme").release()
    other.release()
    eventually("released", lambda: held(node) == 0)
    ended.clear()
    proxy.set(Fault.NO_REPLIES)
    threading.Thread(target=ask, kwargs={"deadline": 3.0}).start()
    eventually("granted", lambda: held(node) == 1)
    closing = [threading.Thread(target=client.end) for _ in range(2)]
    for thread in closing:
        thread.start()
    time.sleep(0.2)
    assert all(thread.is_alive() for thread in closing), "both wait"
    proxy.set(Fault.NOTHING)
    assert ended.wait(LIMIT)
    for thread in closing:
        thread.join()
    eventually("ended", lambda: held(node) == 0)


def test_many_holds_are_renewed_in_few_calls(connect, node):
    client = connect(node.grpc)
    holds = [client.hold("many", f"tenant-{at}", ttl=6.0) for at in range(150)]
    before = node.metric("tollgate_rpc_duration_seconds_count", transport="grpc")
    assert not holds[0].lost(timeout=9.0)
    calls = node.metric("tollgate_rpc_duration_seconds_count", transport="grpc") - before
    assert all(hold.is_held for hold in holds)
    # Two for each round, if all are due within half a second.
    assert 4 <= calls <= 75, f"{calls} calls for 150 holds, each renewed several times"


def test_holds_stay_with_the_parent_of_a_fork(node):
    program = """
        hold = client.hold("sandbox", "acme", 2)

        def look():
            assert not hold.is_held and hold.lost()
            hold.release()
            with client.hold("sandbox", "acme", max_wait=20.0) as own:
                assert own.is_held
            client.close()

        in_child(look)
        assert hold.is_held and not hold.lost(timeout=0.1)
        client.close()
    """
    run(program, node.grpc)
    assert held(node) == 0
