"""How many tokens are demanded. Pure."""

from __future__ import annotations

from collections import deque
from typing import Deque, Tuple

_APART = 0.02
"""Counts are kept so many seconds apart at least."""

_STEADY = 0.1
"""Demand that is spread over so many seconds is steady."""

_WINDOW = 1.0
"""Seconds over which demand is measured."""


class Meter:
    """Counts the tokens that were demanded in the last second."""

    def __init__(self, now: float) -> None:
        # When how many had been demanded since the start. The first is the last one of the time
        # before the window.
        self._counts: Deque[Tuple[float, int]] = deque([(now, 0)])

    def count(self, demanded: int, now: float) -> None:
        """So many were demanded since the start."""
        counts = self._counts
        if len(counts) > 1 and counts[-2][0] + _APART > now:
            counts.pop()
        counts.append((now, demanded))
        while len(counts) > 1 and counts[1][0] + _WINDOW <= now:
            counts.popleft()

    @property
    def is_steady(self) -> bool:
        """Whether they were demanded over a while, not all at once."""
        first = last = None
        before = self._counts[0][1]
        for at, demanded in self._counts:
            if demanded > before:
                first, last, before = at if first is None else first, at, demanded
        return first is not None and last is not None and first + _STEADY <= last

    @property
    def demanded(self) -> int:
        """The tokens that were demanded in the last second."""
        return self._counts[-1][1] - self._counts[0][1]
