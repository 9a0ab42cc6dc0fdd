"""Leases: rates, gauges, wants, modes, and what happens to them."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any, Callable, List

import pytest

from tollgate_client import AlreadyLeasedError, ClosedError, InvalidRequestError, Mode

from ..harness.clients import AnyClient, Asynchronous, Blocking
from ..harness.fault_proxy import Fault, FaultProxy
from ..harness.processes import Node
from ..harness.waiting import LIMIT, eventually, polls

_ALGORITHM = "kind: FAIR_SHARE, refresh_interval: 1, learning_mode_duration: 0"
LIMITS = f"""
resources:
  - {{ identifier_glob: 'short*', capacity: 100, safe_capacity: 7,
      algorithm: {{ {_ALGORITHM}, lease_length: 2 }} }}
  - {{ identifier_glob: '*', capacity: 100, safe_capacity: 7,
      algorithm: {{ {_ALGORITHM}, lease_length: 60 }} }}
"""


@pytest.fixture
def node(start: Callable[..., Node]) -> Node:
    return start(LIMITS)


@pytest.fixture
def proxy(node: Node, ending: Any) -> FaultProxy:
    proxy = FaultProxy(node.port)
    ending.callback(proxy.close)
    return proxy


def run_all(work: Callable[[], None], number: int, failures: List[BaseException]) -> Any:
    """Starts threads that do this work."""

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run) for _ in range(number)]
    for thread in threads:
        thread.start()
    return threads


def test_clients_share_a_capacity_and_give_it_back(connect, node):
    clients = [connect(node.grpc) for _ in range(2)]

    def lease(client: AnyClient, **options: Any) -> Any:
        return client.lease("capacity", "db", **options)

    first = lease(clients[0], wants=80.0)
    assert first.changed(timeout=LIMIT) == 80.0
    # An invalid number does not spoil the request for the others.
    invalid = clients[0].lease("capacity", "invalid", wants=float("nan"))
    for name in ("", "x" * 1025):
        with pytest.raises(InvalidRequestError):
            clients[0].lease("capacity", name)
    second = lease(clients[1], wants=80.0)
    eventually("half for each", lambda: first.get() == second.get() == 50.0)
    second.set_wants(10.0)
    eventually("what each wants", lambda: (first.get(), second.get()) == (80.0, 10.0))
    assert invalid.get() == 0.0
    with pytest.raises(AlreadyLeasedError):
        lease(clients[0])
    # By closing the handle, and the client.
    second.close()
    third = lease(clients[1], wants=20.0)
    eventually("leased anew", lambda: third.get() == 20.0)
    clients[1].end()
    with pytest.raises(ClosedError):
        clients[1].lease("capacity", "other")
    first.set_wants(100.0)
    eventually("all for the first", lambda: first.get() == 100.0)


def test_rates_of_several_clients_stay_within_the_capacity(connect, node):
    rates = [connect(node.grpc).lease("rate_limiter", "api") for _ in range(3)]
    used: List[None] = []
    failures: List[BaseException] = []
    stop = threading.Event()
    threads = []
    for rate in rates:

        def work(rate: Any = rate) -> None:
            while not stop.is_set():
                rate.wait(timeout=LIMIT)
                used.append(None)

        # More callers than the rate can serve.
        threads += run_all(work, 10, failures)

    def measure(seconds: float) -> float:
        begin, before = time.monotonic(), len(used)
        time.sleep(seconds)
        count = len(used) - before
        elapsed = time.monotonic() - begin
        # The bursts of three clients come on top.
        assert count <= 100 * elapsed + 3 * 10, f"{count} in {elapsed} s"
        return count / elapsed

    # The wants grow until the whole capacity is leased, and it stays so.
    for _ in polls("the capacity is used"):
        if measure(1.5) >= 80:
            break
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_gauge_lets_in_as_many_as_are_leased(connect, node):
    client, other = connect(node.grpc), connect(node.grpc)
    rest = other.lease("capacity", "connections", wants=40.0)
    assert rest.changed(timeout=LIMIT) == 40.0
    gauge = client.lease("gauge", "connections")
    assert gauge.try_acquire() is None
    lock, leave, failures = threading.Lock(), threading.Event(), []
    inside = most = 0

    def enter() -> None:
        nonlocal inside, most
        place = gauge.acquire(timeout=LIMIT)
        with lock:
            inside += 1
            most = max(most, inside)
        leave.wait()
        with lock:
            inside -= 1
        place.release()

    threads = run_all(enter, 70, failures)
    eventually("what is left is used", lambda: inside == 60)
    leave.set()
    for thread in threads:
        thread.join()
    assert not failures and most == 60
    # The other client wants all of it: what is left shrinks, and places are refused.
    rest.set_wants(1000.0)

    def count() -> int:
        places = []
        while len(places) < 60:
            place = gauge.try_acquire()
            if place is None:
                break
            places.append(place)
        for place in places:
            place.release()
        return len(places)

    eventually("a place is refused", lambda: count() < 60)


def test_a_lease_that_runs_out_leaves_what_the_mode_says(proxy, ending):
    client = Blocking(proxy.address)
    ending.callback(client.close)
    leases = [
        client.lease("capacity", f"short-{mode.value}", wants=150.0, mode=mode)
        for mode in (Mode.SAFE, Mode.PESSIMISTIC, Mode.OPTIMISTIC)
    ]

    def are(*capacities: float) -> Callable[[], bool]:
        return lambda: tuple(lease.get() for lease in leases) == capacities

    # Before the first answer, nothing is known of a safe capacity.
    eventually("leased", are(100.0, 100.0, 100.0))
    proxy.set(Fault.NO_REPLIES)
    eventually("run out", are(7.0, 0.0, 150.0))
    proxy.set(Fault.NOTHING)
    eventually("leased again", are(100.0, 100.0, 100.0))


def test_a_client_that_is_closed_during_a_refresh_lets_go(connect, node, proxy):
    client = connect(proxy.address)
    rate = client.lease("rate_limiter", "db", wants=50.0)
    rate.wait(timeout=LIMIT)
    ends: List[BaseException] = []

    def wait() -> None:
        rate.wait(1_000_000)
        rate.wait()

    waiting = run_all(wait, 1, ends)
    proxy.set(Fault.NOTHING, delay=0.1)
    # The request of a refresh has passed, and its answer has not.
    before = node.metric("tollgate_lease_decisions_total")
    rate.set_wants(60.0)
    eventually("asked again", lambda: node.metric("tollgate_lease_decisions_total") > before)
    # Both return when the leases are released.
    failures: List[BaseException] = []
    second = run_all(client.end, 1, failures)
    client.end()
    second[0].join()
    rest = connect(node.grpc).lease("capacity", "db", wants=100.0)
    assert not failures and rest.changed(timeout=LIMIT) == 100.0
    waiting[0].join()
    assert [type(error) for error in ends] == [ClosedError]
    assert not rate.try_use()
    client.end()


def test_closing_takes_five_seconds_at_most(proxy, ending):
    clients = [Blocking(proxy.address), Asynchronous(proxy.address)]
    for client in clients:
        ending.callback(client.close)
        client.lease("rate_limiter", "db", wants=50.0).wait(timeout=LIMIT)
    proxy.set(Fault.NO_REPLIES)
    failures: List[BaseException] = []
    begin = time.monotonic()
    threads = [thread for client in clients for thread in run_all(client.end, 1, failures)]
    for thread in threads:
        thread.join()
    assert time.monotonic() - begin < 10.0 and not failures
    proxy.set(Fault.NOTHING)


def test_a_resource_that_is_not_allowed_spoils_no_other(connect, start, tmp_path: Path):
    access = tmp_path / "access.yaml"
    access.write_text("callers: [{ name: a, anyone: true, resources: ['db.*'] }]")
    node = start(LIMITS, "--access", str(access))
    client = connect(node.grpc)
    forbidden = [client.lease("capacity", name, wants=5.0) for name in ("a", "db", "z")]
    allowed = [client.lease("capacity", f"db.{at}", wants=5.0) for at in range(4)]
    eventually("leased", lambda: all(lease.get() == 5.0 for lease in allowed))
    # What is closed is released, with what may not be.
    rest = connect(node.grpc).lease("capacity", "db.0", wants=100.0)
    eventually("the rest", lambda: rest.get() == 95.0)
    for lease in [allowed[0], *forbidden]:
        lease.close()
    eventually("released", lambda: rest.get() == 100.0)
