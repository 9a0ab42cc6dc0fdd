"""Fault after fault."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from typing import Any, List, Tuple

from tollgate_client import DecidedBy, Fallback

from ..harness.clients import AnyClient, ask_until_decided_by
from ..harness.fault_proxy import Fault

DEADLINE = 0.1


def test_fault_after_fault_fails_no_call_and_delays_none(connect: Any, proxied: Any) -> None:
    """Whatever becomes of the network, no call fails that has a fallback, and none waits longer
    than it said. How much longer is judged where nothing else runs (``TOLLGATE_ALONE=1``)."""
    _, proxy = proxied
    client = connect(proxy.address, fallback=Fallback.ALLOW)
    ask_until_decided_by(client, DecidedBy.NODE)
    stop = threading.Event()
    calls: List[Tuple[DecidedBy, float]] = []
    failures: List[BaseException] = []
    callers = [
        threading.Thread(target=ask, args=(client, stop, calls, failures)) for _ in range(5)
    ]
    for caller in callers:
        caller.start()
    try:
        for fault in [fault for fault in Fault if fault is not Fault.NOTHING]:
            proxy.set(fault)
            time.sleep(0.3)
            proxy.set(Fault.NOTHING, delay=0.08)
            time.sleep(0.3)
            proxy.set(Fault.NOTHING)
            ask_until_decided_by(client, DecidedBy.NODE, deadline=DEADLINE)
    finally:
        stop.set()
        for caller in callers:
            caller.join()
    assert not failures, failures
    decided = Counter(who for who, _ in calls)
    assert decided[DecidedBy.NODE] and decided[DecidedBy.FALLBACK], decided
    # Those that were answered at once would hide the others.
    late = sorted(took - DEADLINE for _, took in calls if took > DEADLINE / 2)
    p99 = late[len(late) * 99 // 100]
    print(f"{decided}; of the {len(late)} that waited, p99 {p99 * 1000:.1f} ms after the deadline")
    assert p99 <= 0.02 or "TOLLGATE_ALONE" not in os.environ, late


def ask(
    client: AnyClient,
    stop: threading.Event,
    calls: List[Tuple[DecidedBy, float]],
    failures: List[BaseException],
) -> None:
    while not stop.is_set():
        start = time.monotonic()
        try:
            granted = client.acquire("a", "b", deadline=DEADLINE)
        except BaseException as error:
            failures.append(error)
            return
        calls.append((granted.decided_by, time.monotonic() - start - granted.wait))
        time.sleep(0.005)
