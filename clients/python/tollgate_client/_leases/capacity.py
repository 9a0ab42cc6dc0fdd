"""A leased capacity that the application uses as it likes, without input and output."""

from __future__ import annotations

import math
from typing import Optional

from .._decide.effects import Plan
from .._keep.effects import Clock, Signal
from .held import Held
from .resource import Resource
from .waiting import Line, in_turn


class Changes:
    """The changes of a capacity."""

    def __init__(self, resource: Resource, clock: Clock) -> None:
        self._resource = resource
        self._clock = clock
        # What was returned last.
        self._seen = resource.initial
        self._line = Line(resource)

    def changed(self, timeout: Optional[float], signal: Signal) -> Plan[float]:
        """Waits until another capacity may be used than this returned last."""

        def attempt(held: Held, now: float) -> Optional[float]:
            capacity = held.at(now)
            if capacity == self._seen:
                return math.inf
            self._seen = capacity
            return None

        yield from in_turn(self._resource, self._line, signal, attempt, timeout, self._clock)
        return self._seen
