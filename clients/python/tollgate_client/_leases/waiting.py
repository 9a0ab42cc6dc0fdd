"""How callers wait for a resource: in the order in which they came. Plans without input and output,
which a thread or a task performs."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Callable, Optional

from .._decide.effects import Plan
from .._keep.effects import FOREVER, Await, Clock, Signal
from ..errors import ClosedError, LeaseTimeoutError
from .held import Held
from .resource import Resource

Attempt = Callable[[Held, float], Optional[float]]
"""Takes what is waited for, given what is held and the time, and returns ``None``; or the seconds
after which that may be possible if nothing changes. It is called under the resource's lock."""


class Line:
    """Those who wait, the first one at the front. Guarded by the resource's lock."""

    def __init__(self, resource: Resource) -> None:
        self._resource = resource
        self._signals: OrderedDict[Signal, None] = OrderedDict()

    def join(self, signal: Signal) -> None:
        """Comes last."""
        self._signals[signal] = None

    def is_first(self, signal: Signal) -> bool:
        """Whether it is this caller's turn. Who is first is woken by changes of what is held."""
        if next(iter(self._signals)) is not signal:
            return False
        self._resource.watchers.add(signal)
        return True

    def leave(self, signal: Signal) -> None:
        """Leaves the turn to the next one."""
        del self._signals[signal]
        self._resource.watchers.discard(signal)
        self.wake()

    def wake(self) -> None:
        """Wakes the first one."""
        for first in self._signals:
            first.set()
            break


def in_turn(
    resource: Resource,
    line: Line,
    signal: Signal,
    attempt: Attempt,
    timeout: Optional[float],
    clock: Clock,
) -> Plan[None]:
    """Waits until an attempt succeeds. Raises ``ClosedError`` and ``LeaseTimeoutError``."""
    end = math.inf if timeout is None else clock() + timeout
    with resource.lock:
        line.join(signal)
    try:
        while True:
            with resource.lock:
                signal.clear()
                now = clock()
                held = resource.held_at(now)
                if held.is_closed:
                    raise ClosedError("the lease was given back")
                is_first = line.is_first(signal)
                pause: Optional[float] = math.inf
                if is_first:
                    pause = attempt(held, now)
                    if pause is not None and now < held.expires:
                        pause = min(pause, held.expires - now)
            if pause is None:
                return
            if now >= end:
                raise LeaseTimeoutError(resource.name)
            yield Await(signal, min(pause, end - now, FOREVER), is_first)
    finally:
        with resource.lock:
            line.leave(signal)
