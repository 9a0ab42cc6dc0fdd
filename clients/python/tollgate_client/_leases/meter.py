"""The arithmetic of rates. Pure: time is a parameter."""

from __future__ import annotations

import math

from .held import Held

_BURST = 0.1
"""How much of a second's capacity may be used at once."""

_LEAST_WAIT = 0.001
"""Seconds that a timer can wait at least."""


class Meter:
    """A token bucket whose rate is the capacity at each moment."""

    def __init__(self, now: float) -> None:
        # One token is there.
        self._tokens = 1.0
        # Until when the capacity has been added.
        self._at = now

    def accrue(self, held: Held, now: float) -> None:
        """Adds what has accrued until ``now``. Must be called before another capacity is held."""
        now = max(now, self._at)
        expires = min(max(held.expires, self._at), now)
        earned = _earned(held.capacity, expires - self._at) + _earned(held.after, now - expires)
        self._tokens = min(self._tokens + earned, most(held.at(now)))
        self._at = now

    def take(self, tokens: float, held: Held, now: float) -> float:
        """Takes tokens and returns 0; or the seconds after which they are there at the present
        capacity."""
        self.accrue(held, now)
        capacity = held.at(now)
        if capacity == math.inf:
            return 0.0
        # More than the burst is taken as a debt, which those who come later wait for.
        missing = min(tokens, most(capacity)) - self._tokens
        if missing <= 0.0 and capacity > 0.0:
            self._tokens -= tokens
            return 0.0
        if capacity <= 0.0:
            return math.inf
        return max(missing / capacity, _LEAST_WAIT)

    @property
    def debt(self) -> float:
        """The tokens that were taken and have not accrued yet."""
        return max(-self._tokens, 0.0)


def most(capacity: float) -> float:
    """The most that can be used at once."""
    return max(capacity * _BURST, 1.0)


def _earned(capacity: float, seconds: float) -> float:
    """Without a bound, no time is still nothing."""
    return capacity * seconds if seconds > 0.0 else 0.0
