"""Where a bucket stands. Pure."""

from __future__ import annotations

import math
from typing import NamedTuple, Optional


class Level(NamedTuple):
    """Where a bucket stands after an answer."""

    available: float
    """The tokens that are there; a debt is negative."""
    rate: float
    """The tokens that come in a second; more than 0."""
    size: float
    """The most that are there."""

    @property
    def debt(self) -> float:
        """Seconds that the bucket takes to pay its debt."""
        return max(-self.available / self.rate, 0.0)

    @property
    def until_half_full(self) -> float:
        """Seconds until half of the bucket is there, not counting what it takes to pay a debt."""
        return max(self.size / 2 - max(self.available, 0.0), 0.0) / self.rate


def level(available: float, rate: float, size: float) -> Optional[Level]:
    """``None`` if the numbers make no sense, as they do where nobody knows them."""
    # Neither holds for what is not a number.
    is_known = 0.0 < rate < math.inf and -math.inf < available < math.inf
    return Level(available, rate, size) if is_known else None
