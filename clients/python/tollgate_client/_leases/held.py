"""The capacity of a resource, as far as it is known. Pure."""

from __future__ import annotations

import math
from typing import NamedTuple


class Held(NamedTuple):
    """What a client may use of a resource."""

    capacity: float
    """The capacity of the lease."""
    expires: float
    """When the lease runs out."""
    after: float
    """The capacity without a lease."""
    is_all: bool = False
    """Whether the lease is all that was asked for."""
    is_closed: bool = False
    ends: float = math.inf
    """When the lease runs out by the time of day."""

    def at(self, now: float) -> float:
        """The capacity at a time."""
        return self.capacity if now < self.expires else self.after


CLOSED = Held(0.0, 0.0, 0.0, is_closed=True)
"""What is held after the lease was given back."""


def nothing_but(after: float, now: float) -> Held:
    """Nothing but this capacity without a lease."""
    return Held(0.0, now, after)
