"""A lease on so many at once, without input and output."""

from __future__ import annotations

import math
from collections import deque
from typing import Callable, Deque, Optional

from .._decide.effects import Plan
from .._keep.effects import Clock, Signal
from .held import Held
from .resource import Resource
from .waiting import Line, in_turn

_GROWTH = 2
"""While places are refused at once, this many times their number is asked for: nobody knows how many
callers there are."""

_ROUNDING = 1e-9
"""A share that is a whole number but for this is one: shares are sums of fractions."""


class GaugeUsage:
    """The demand of a gauge. Guarded by the resource's lock."""

    def __init__(self) -> None:
        self.in_use = 0
        self.waiting = 0
        self._peak = 0
        self._is_refused = False
        # Places that were collected without being released.
        self._lost: Deque[None] = deque()

    @property
    def present(self) -> int:
        """How many have a place, or wait."""
        return self.in_use + self.waiting

    def come(self) -> None:
        """Counts one more, who waits or is refused."""
        self._peak = max(self._peak, self.present + 1)

    def take(self, capacity: float) -> bool:
        """Takes a place, if there is one."""
        self.sweep()
        is_free = self.in_use + 1 <= capacity + _ROUNDING
        self.in_use += is_free
        return is_free

    def lose(self) -> None:
        """A place was collected without being released. May be called at any moment."""
        self._lost.append(None)

    def sweep(self) -> bool:
        """Frees the places that were collected, and returns whether there are any."""
        is_any = bool(self._lost)
        while self._lost:
            self._lost.popleft()
            self.in_use -= 1
        return is_any

    def demand(self, seconds: float) -> float:
        return float(self._peak * _GROWTH if self._is_refused else self._peak)

    def refuse(self) -> None:
        """A place was refused at once."""
        self._is_refused = True

    def begin_second(self) -> None:
        self.sweep()
        self._peak = self.present
        self._is_refused = False

    def before_change(self, held: Held, now: float) -> None:
        pass


class Places:
    """The use of a gauge."""

    def __init__(
        self, resource: Resource, usage: GaugeUsage, hurry: Callable[[], None], clock: Clock
    ) -> None:
        self._resource = resource
        self._usage = usage
        self._hurry = hurry
        self._clock = clock
        self._line = Line(resource)

    def acquire(self, timeout: Optional[float], signal: Signal) -> Plan[None]:
        """Waits for a place, and takes it."""
        resource, usage = self._resource, self._usage
        is_in = False

        def attempt(held: Held, now: float) -> Optional[float]:
            nonlocal is_in
            is_in = usage.take(held.at(now))
            if is_in:
                # In the same moment, so that nobody is counted twice.
                usage.waiting -= 1
                return None
            self._ask_if_full(held, now)
            return math.inf

        with resource.lock:
            usage.come()
            usage.waiting += 1
            now = self._clock()
            self._ask_if_full(resource.held_at(now), now)
        try:
            yield from in_turn(resource, self._line, signal, attempt, timeout, self._clock)
        finally:
            if not is_in:
                with resource.lock:
                    usage.waiting -= 1

    def try_acquire(self) -> bool:
        """Takes a place, if there is one now, and nobody waits."""
        usage = self._usage
        with self._resource.lock:
            now = self._clock()
            usage.come()
            if not usage.waiting and usage.take(self._resource.held_at(now).at(now)):
                return True
            usage.refuse()
            if self._resource.could_get_more(now):
                self._hurry()
            return False

    def release(self) -> None:
        """Frees a place."""
        with self._resource.lock:
            self._usage.in_use -= 1
            self._line.wake()

    def lose(self) -> None:
        """A place was collected without being released. May be called at any moment."""
        self._usage.lose()

    def _ask_if_full(self, held: Held, now: float) -> None:
        """Asks for more if there are not enough places for who waits."""
        is_full = self._usage.present > held.at(now) + _ROUNDING
        if is_full and self._resource.could_get_more(now):
            self._hurry()
