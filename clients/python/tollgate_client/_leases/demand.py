"""How much to ask for. Pure."""

from __future__ import annotations

from collections import deque
from typing import Deque

WINDOW = 10
"""The demand of this many seconds is averaged."""

_HEADROOM = 1.2
"""What is asked for beyond the average, so that not every fluctuation has to wait."""


class Demand:
    """The demand of the last seconds, to ask for as much."""

    def __init__(self) -> None:
        self._seconds: Deque[float] = deque(maxlen=WINDOW)

    def add(self, demand: float) -> None:
        """Adds what was demanded in the last second."""
        self._seconds.append(demand)

    def wants(self, present: float) -> float:
        """The average with some headroom, or the demand of the last or the ``present`` second if
        that is more: so it grows at once, and shrinks slowly."""
        if not self._seconds:
            return max(present, 0.0)
        average = sum(self._seconds) / len(self._seconds)
        return max(_HEADROOM * average, self._seconds[-1], present)
