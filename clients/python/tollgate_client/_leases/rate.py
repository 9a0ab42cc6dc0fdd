"""A lease on so much a second, without input and output."""

from __future__ import annotations

from typing import Callable, Optional

from .._decide.effects import Plan
from .._keep.effects import Clock, Signal
from ..errors import InvalidRequestError
from .held import Held
from .meter import Meter
from .resource import Resource
from .waiting import Line, in_turn

_GROWTH = 2.0
"""While callers wait, this many times their demand is asked for: those who call again only once
they were served would call more often, but nobody knows how often."""


class RateUsage:
    """The demand of a rate. Guarded by the resource's lock."""

    def __init__(self, now: float) -> None:
        self.meter = Meter(now)
        self.waiting = 0
        """What is waited for now."""
        self.ended = 0
        """What was used, refused or no longer waited for since the second began."""
        self.refused = 0
        """What was refused since the second began."""

    def demand(self, seconds: float) -> float:
        # A debt is paid within a second.
        demand = max(self.ended / seconds, self.meter.debt) + self.waiting
        return demand * _GROWTH if self.waiting else demand

    def is_short(self, capacity: float) -> bool:
        """Whether what is demanded takes more than a second at this capacity."""
        return self.waiting + self.meter.debt + self.refused > capacity

    def begin_second(self) -> None:
        self.ended = self.refused = 0

    def before_change(self, held: Held, now: float) -> None:
        self.meter.accrue(held, now)

    def sweep(self) -> bool:
        return False


class Rate:
    """The use of a rate."""

    def __init__(
        self, resource: Resource, usage: RateUsage, hurry: Callable[[], None], clock: Clock
    ) -> None:
        self._resource = resource
        self._usage = usage
        self._hurry = hurry
        self._clock = clock
        self._line = Line(resource)

    def wait(
        self, n: int, timeout: Optional[float], new_signal: Callable[[], Signal]
    ) -> Plan[None]:
        """Waits until ``n`` may be used, and uses it."""
        _check(n)
        resource, usage = self._resource, self._usage

        def attempt(held: Held, now: float) -> Optional[float]:
            pause = usage.meter.take(n, held, now)
            if pause == 0.0:
                return None
            self._ask_if_short(held, now)
            return pause

        with resource.lock:
            now = self._clock()
            held = resource.held_at(now)
            is_first = not usage.waiting and not held.is_closed
            if is_first and usage.meter.take(n, held, now) == 0.0:
                usage.ended += n
                return
            usage.waiting += n
            self._ask_if_short(held, now)
        try:
            yield from in_turn(resource, self._line, new_signal(), attempt, timeout, self._clock)
        finally:
            with resource.lock:
                usage.waiting -= n
                usage.ended += n

    def try_use(self, n: int) -> bool:
        """Uses ``n`` if that is possible now, and nobody waits."""
        _check(n)
        usage = self._usage
        with self._resource.lock:
            now = self._clock()
            held = self._resource.held_at(now)
            usage.ended += n
            if not usage.waiting and usage.meter.take(n, held, now) == 0.0:
                return True
            usage.refused += n
            self._ask_if_short(held, now)
            return False

    def _ask_if_short(self, held: Held, now: float) -> None:
        if self._usage.is_short(held.at(now)) and self._resource.could_get_more(now):
            self._hurry()


def _check(n: int) -> None:
    # What is not at least 0 may also be no number.
    if not n >= 0:
        raise InvalidRequestError(f"invalid request: {n} units")
