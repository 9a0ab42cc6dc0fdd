"""What the library logs."""

from __future__ import annotations

import logging
from typing import Optional

LOG = logging.getLogger("tollgate_client")

_INTERVAL = 1.0
"""Seconds between two messages of the same kind."""


class Throttle:
    """Lets one message a second pass, and counts the others."""

    def __init__(self) -> None:
        self._next = 0.0
        self._held_back = 0

    def passes(self, now: float) -> Optional[int]:
        """How many were held back since the last one; ``None`` if this one is, too."""
        if now < self._next:
            self._held_back += 1
            return None
        held_back, self._held_back = self._held_back, 0
        self._next = now + _INTERVAL
        return held_back
