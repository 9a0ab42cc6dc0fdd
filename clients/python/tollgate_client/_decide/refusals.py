"""The refusals of the last second. Who asks for as much again before the retry time is refused
without a call."""

from __future__ import annotations

import threading
from typing import Dict, NamedTuple, Optional, Tuple

from ..answers import DecidedBy, Reason, Refused
from ..request import Request

LONGEST = 1.0
"""Seconds that a refusal is remembered at most, so that a limit that was raised counts at once."""

MOST = 10_000
"""The most refusals that are remembered."""


class _Remembered(NamedTuple):
    # The least number of tokens that was refused.
    tokens: int
    # The wait that would have been accepted; None for the bucket's own limit, the longest.
    max_wait: Optional[float]
    critical: bool
    reason: Reason
    # When the refused request could be granted.
    retry_at: float
    forget_at: float

    def covers(self, request: Request, now: float) -> bool:
        """Whether the request would be refused, too."""
        waits_no_longer = self.max_wait is None or (
            request.max_wait is not None and request.max_wait <= self.max_wait
        )
        return (
            now < self.forget_at
            and request.tokens >= self.tokens
            and waits_no_longer
            # What is refused to a critical request is refused to all.
            and (self.critical or not request.critical)
        )


class Refusals:
    """The refusals of one client."""

    def __init__(self) -> None:
        self._table: Dict[Tuple[str, str], _Remembered] = {}
        self._lock = threading.Lock()

    def get(self, request: Request, now: float) -> Optional[Refused]:
        """The refusal of such a request that is still valid."""
        found = self._table.get((request.namespace, request.bucket))
        if found is None or not found.covers(request, now):
            return None
        return Refused(found.reason, max(found.retry_at - now, 0.0), DecidedBy.REMEMBERED)

    def add(self, request: Request, refused: Refused, now: float) -> None:
        """Remembers a refusal if it says when to ask again. Not that of a degraded node: another
        one may have tokens."""
        if refused.decided_by is not DecidedBy.NODE or refused.retry_after is None:
            return
        new = _Remembered(
            # A ban refuses any number.
            1 if refused.reason is Reason.BANNED else request.tokens,
            request.max_wait,
            request.critical,
            refused.reason,
            now + refused.retry_after,
            now + min(refused.retry_after, LONGEST),
        )
        with self._lock:
            if len(self._table) >= MOST:
                self._make_room(now)
            self._table[request.namespace, request.bucket] = new

    def _make_room(self, now: float) -> None:
        valid = {name: one for name, one in self._table.items() if now < one.forget_at}
        # Forgets all rather than look through so many with each refusal. The nodes remember, too.
        self._table = valid if len(valid) <= MOST // 2 else {}

    def __len__(self) -> int:
        return len(self._table)
