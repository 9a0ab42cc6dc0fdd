"""How many tokens are demanded. Pure."""

from __future__ import annotations

from collections import deque
from typing import Deque, Tuple

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
        counts.append((now, demanded))
        while counts[1][0] + _WINDOW <= now:
            counts.popleft()

    @property
    def demanded(self) -> int:
        """The tokens that were demanded in the last second."""
        return self._counts[-1][1] - self._counts[0][1]
